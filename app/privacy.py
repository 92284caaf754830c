"""What must not be stored, learnt twice or learnt from: personal data, near repeats, benchmark prompts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

from app.errors import UserError
from app.redact import redact

# Characters of words: of scripts that put spaces between them, vowel signs and accents of their own included, and of
# those that do not, where nothing says at which character an address begins or ends.
_DENSE = r"\u2e80-\u2fdf\u3005-\u3007\u3021-\u30fa\u30fc-\u9fff\uac00-\ud7af\uf900-\ufaff"
_MARKS = r"\u0300-\u036f\u0900-\u0903\u093a-\u094f\u0e31-\u0e4e"
_SPACED = rf"(?:[^\W{_DENSE}]|[{_MARKS}])"
_NO_WORD_BEFORE = rf"(?<![^\W{_DENSE}])(?<![{_MARKS}])"
_LABELS = rf"(?:(?:[^\W_]|[{_MARKS}\-]){{1,63}}\.)+"
_DENSE_TOP = rf"[{_DENSE}]{{2,6}}"
_TOP = rf"(?:xn--[A-Za-z0-9\-]{{2,59}}|(?:[^\W\d_{_DENSE}]|[{_MARKS}]){{2,24}}(?!{_SPACED})|{_DENSE_TOP})"
_DENSE_LOCAL = rf"(?:[^\W]|[{_MARKS}.%+\-]){{0,16}}"
_EMAIL = re.compile(
    rf"{_NO_WORD_BEFORE}(?:"
    rf"{_SPACED}(?:{_SPACED}|[.%+\-]|(?<=\w)['’](?=\w)){{0,63}}[@＠]{_LABELS}{_TOP}"
    rf"|{_DENSE_LOCAL}[{_DENSE}][@＠]{_LABELS}{_TOP}"
    rf"|[{_DENSE}]{_DENSE_LOCAL}[@＠]{_LABELS}{_DENSE_TOP}"
    r")"
)
_NO_NUMBER_BEFORE = rf"(?<![^\W{_DENSE}])(?<![.\-/])"
_NO_NUMBER_BEHIND = rf"(?![^\W{_DENSE}]|\.\d)"
_PHONE = re.compile(
    rf"{_NO_NUMBER_BEFORE}(?:"
    r"(?:\+\d{1,3}[\s.\-]?)?(?:\(\d{2,4}\)[\s.\-]?|\d{2,4}[\s.\-])\d{3,4}[\s.\-]?\d{3,4}"
    r"|\+\d(?:[\s.\-/]?\(?\d\)?){8,14}"  # international, in whatever groups
    r"|0\d(?:[\s.\-]\d{2}){4}"  # in pairs
    r"|0\d{2,4} ?/ ?\d{2,8}(?:[ \-]\d{1,5}){0,3}(?!/)"  # the area code before a stroke
    rf"){_NO_NUMBER_BEHIND}"
)
# Nine to twelve digits are a number of any kind, unless a word beside them says whose.
_BARE = rf"{_NO_NUMBER_BEFORE}(?:0\d{{8,11}}|[1-9]\d{{8,10}}){_NO_NUMBER_BEHIND}(?![,\-/]\d)"
_LINE = (
    r"(?:t[eé]l[eé](?:phone|fono?)|tel|ph(?:one)?|cell(?:[ -]?phone)?|mobil(?:e|funk)?|m[oó]vil|handy|fax"
    r"|whats ?app|sms|hotline|landline)(?:[ _-]?(?:number|no|nr|num|nummer))?"
)
_LINE_DENSE = r"(?:电话|電話|手机|手機|携帯|传真|휴대폰|전화)(?:号码?|號碼?|番号|번호)?"
_FILL = (
    r"(?:[\s:：=#.,\"'()\[\]*–-]|是|为|為"
    r"|\b(?:is|are|at|on|under|via|the|my|our|his|her|your|number|no|nr|lautet|ist|es|est)\b)"
)
_CALL = (
    r"(?<!system )(?<!function )(?<!method )(?<!api )\b(?:(?:call|dial|ring)|"
    r"(?:call|text|ring|dial|phone|reach|contact|message)(?: (?:me|us|him|her|them)(?: (?:back|now|today|anytime))?"
    r"(?: (?:at|on|under|via))?| (?:at|on|under|via)))(?::? | (?:my|this|the|our) number:? )"
)
_PHONE_BESIDE_WORD = re.compile(
    rf"(?i:(?P<before>(?<![^\W_]){_LINE}(?![^\W\d_]){_FILL}{{0,12}}|{_LINE_DENSE}{_FILL}{{0,6}}|{_CALL})){_BARE}"
    rf"|{_BARE}(?=(?i: ?[(\[,–-]? ?(?:(?:is|was) )?(?:(?:my|our|his|her|the|their) )?(?:new |old )?{_LINE}\b))"
)
_PHONE_NAME = re.compile(rf"(?i)(?:^|.*[\W_]){_LINE}(?:$|[\W_].*)|.*{_LINE_DENSE}")
_CARD = re.compile(r"(?<!\d)(?<!\d\.)\d(?:[ \-]?\d){12,18}(?!\.?\d)")
_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|\beyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{5,}"
    r"|\b(?:AIza[A-Za-z0-9_\-]{35}|glpat-[A-Za-z0-9_\-]{20}|sk_live_[A-Za-z0-9]{20,})"
    r"|(?i:\b(?:password|passwd|passphrase)\b\s*[:=]\s*[\"']?)[^\s\"',;]{6,}"
    r"|(?i:\b(?:bearer|api[_\-]?key|password|passwd|secret|token)\b\s*[:=]?\s*[\"']?)(?=[A-Za-z0-9+/_\-.]*\d)"
    r"[A-Za-z0-9+/_\-.]{16,}",
    re.S,
)
_WORD = re.compile(r"\w+")
# JSON inside a text: what follows an escape begins a word, though the escape ends in a letter.
_ESCAPE = re.compile(r"(\\(?:u[0-9a-fA-F]{4}|.))", re.S)


class Redactor:
    """Replaces personal data by `[email]`, `[phone]`, `[key]`, `[card]`, before ids are made or anything is stored."""

    def __init__(self, kinds: Iterable[str]) -> None:
        by_kind: dict[str, Callable[[str], str]] = {
            "key": lambda text: _KEY.sub("[key]", redact(text).replace("***", "[key]")),
            "email": lambda text: _EMAIL.sub("[email]", text) if "@" in text or "＠" in text else text,
            "card": lambda text: _CARD.sub(lambda m: "[card]" if _luhn(m[0]) else m[0], text),
            "phone": _without_phones,
        }
        wanted = set(kinds)
        self._phones = "phone" in wanted
        self._replace = [by_kind[k] for k in by_kind if k in wanted]

    def __call__(self, value: Any) -> Any:
        """`value` with every text and number inside it redacted, names in objects too."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self(v) for v in value]
        if isinstance(value, dict):
            return {self(k): self._named(k, v) for k, v in value.items()}
        if isinstance(value, int | float) and not isinstance(value, bool):
            text = str(value)
            replaced = self._text(text)
            return value if replaced == text else replaced
        return value

    def _named(self, name: Any, value: Any) -> Any:
        """A value of an object, whose name may say what a bare number is."""
        bare = self._phones and isinstance(value, str | int) and re.fullmatch(_BARE, str(value))
        return "[phone]" if bare and _PHONE_NAME.fullmatch(str(name)) else self(value)

    def _text(self, text: str) -> str:
        replaced = self._between_escapes(text)
        if "\\u" in text:  # letters that are written out as numbers belong to the words around them
            whole = self._between_escapes(_ESCAPE.sub(_letter, text))
            if whole != _ESCAPE.sub(_letter, replaced):
                return whole
        return replaced

    def _between_escapes(self, text: str) -> str:
        if "\\" in text:
            text = "".join(p if p.startswith("\\") else self._plain(p) for p in _ESCAPE.split(text))
        return self._plain(text)

    def _plain(self, text: str) -> str:
        for replace in self._replace:
            text = replace(text)
        return text


def _letter(escape: re.Match[str]) -> str:
    character = chr(int(escape[0][2:], 16)) if len(escape[0]) == 6 else ""
    return character if character.isalpha() else escape[0]


def _without_phones(text: str) -> str:
    text = _PHONE.sub(lambda m: "[phone]" if _phone_like(m[0]) else m[0], text)
    return _PHONE_BESIDE_WORD.sub(lambda m: f"{m['before'] or ''}[phone]", text)


def _phone_like(text: str) -> bool:
    return 9 <= sum(c.isdigit() for c in text) <= 15


def _luhn(text: str) -> bool:
    """Check digit of payment cards (ISO/IEC 7812-1)."""
    digits = [int(c) for c in text if c.isdigit()][::-1]
    return sum(d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(digits)) % 10 == 0


def normalised(text: str) -> str:
    """Text as overlap is judged: case, punctuation and spacing do not count."""
    return " ".join(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


class BenchmarkPrompts:
    """Prompts of benchmark sets, found again in training rows by their normalised text."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._prompts = {n for n in map(normalised, prompts) if n}

    def __len__(self) -> int:
        return len(self._prompts)

    def holds(self, messages: list[dict[str, Any]]) -> bool:
        """Whether a user turn is one of the prompts."""
        return any(m["role"] == "user" and normalised(m["content"]) in self._prompts for m in messages)


class NearRepeats:
    """Finds conversations whose user turns nearly repeat earlier ones (MinHash with LSH).

    Args:
        threshold: Jaccard similarity of word 5-grams from which a conversation counts as a repeat.
    """

    _PERMUTATIONS = 128

    def __init__(self, threshold: float) -> None:
        try:
            import rensa
        except ImportError as error:
            raise UserError(
                "ingest.near_duplicates needs the package rensa: pip install 'draftmill[dedup]', or set it to null"
            ) from error
        self._hash = rensa.RMinHash
        self._threshold = threshold
        bands = next(b for b in (64, 32, 16, 8) if (1 / b) ** (b / self._PERMUTATIONS) <= threshold or b == 8)
        self._index = rensa.RMinHashLSH(threshold=threshold, num_perm=self._PERMUTATIONS, num_bands=bands)
        self._ids: list[str] = []
        self._hashes: list[Any] = []

    def sketch(self, messages: list[dict[str, Any]]) -> Any:
        """Hashes of a conversation's user turns, to be given to `earlier`."""
        words = normalised(" ".join(m["content"] for m in messages if m["role"] == "user")).split(" ")
        grams = {" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))}
        mine = self._hash(num_perm=self._PERMUTATIONS, seed=1)
        mine.update(sorted(grams))
        return mine

    def earlier(self, identity: str, mine: Any) -> str | None:
        """Id of an earlier conversation that the one of sketch `mine` nearly repeats; else None, and it is kept."""
        for number in sorted(self._index.query(mine)):
            if mine.jaccard(self._hashes[number]) >= self._threshold:
                return self._ids[number]
        self._index.insert(len(self._ids), mine)
        self._ids.append(identity)
        self._hashes.append(mine)
        return None
