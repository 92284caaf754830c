"""What must not be stored, learnt twice or learnt from: personal data, near repeats, benchmark prompts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

from app.errors import UserError
from app.redact import redact

_EMAIL = re.compile(r"\b[A-Za-z0-9._%+\-]{1,64}@[A-Za-z0-9\-]{1,63}(?:\.[A-Za-z0-9\-]{1,63})*\.[A-Za-z]{2,24}\b")
_PHONE = re.compile(
    r"(?<![\w.\-/])(?:"
    r"(?:\+\d{1,3}[\s.\-]?)?(?:\(\d{2,4}\)[\s.\-]?|\d{2,4}[\s.\-])\d{3,4}[\s.\-]?\d{3,4}"
    r"|\+\d(?:[\s.\-/]?\(?\d\)?){8,14}"  # international, in whatever groups
    r"|0\d(?:[\s.\-]\d{2}){4}"  # in pairs
    r")(?!\w|\.\d)"
)
_CARD = re.compile(r"(?<!\d)(?<!\d\.)\d(?:[ \-]?\d){12,18}(?!\.?\d)")
_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|\beyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{5,}"
    r"|\b(?:AIza[A-Za-z0-9_\-]{35}|glpat-[A-Za-z0-9_\-]{20}|sk_live_[A-Za-z0-9]{20,})"
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
            "email": lambda text: _EMAIL.sub("[email]", text),
            "card": lambda text: _CARD.sub(lambda m: "[card]" if _luhn(m[0]) else m[0], text),
            "phone": lambda text: _PHONE.sub(lambda m: "[phone]" if _phone_like(m[0]) else m[0], text),
        }
        wanted = set(kinds)
        self._replace = [by_kind[k] for k in by_kind if k in wanted]

    def __call__(self, value: Any) -> Any:
        """`value` with every text and number inside it redacted, names in objects too."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self(v) for v in value]
        if isinstance(value, dict):
            return {self(k): self(v) for k, v in value.items()}
        if isinstance(value, int | float) and not isinstance(value, bool):
            text = str(value)
            replaced = self._text(text)
            return value if replaced == text else replaced
        return value

    def _text(self, text: str) -> str:
        if "\\" in text:
            text = "".join(p if p.startswith("\\") else self._plain(p) for p in _ESCAPE.split(text))
        return self._plain(text)

    def _plain(self, text: str) -> str:
        for replace in self._replace:
            text = replace(text)
        return text


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

    def earlier(self, identity: str, messages: list[dict[str, Any]]) -> str | None:
        """Id of an earlier conversation this one nearly repeats; else None, and it is remembered."""
        words = normalised(" ".join(m["content"] for m in messages if m["role"] == "user")).split(" ")
        grams = {" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))}
        mine = self._hash(num_perm=self._PERMUTATIONS, seed=1)
        mine.update(sorted(grams))
        for number in sorted(self._index.query(mine)):
            if mine.jaccard(self._hashes[number]) >= self._threshold:
                return self._ids[number]
        self._index.insert(len(self._ids), mine)
        self._ids.append(identity)
        self._hashes.append(mine)
        return None
