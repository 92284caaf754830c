"""Token ids as text a person can look at: what is learnt is marked, special tokens and control characters show."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "⟦", "⟧"
_GREEN, _RESET = "\x1b[1;32m", "\x1b[0m"
# Characters that reorder or hide what stands around them.
_UNSEEN = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0xFEFF}
SPAN_LIMIT = 2000  # characters of one span that are shown


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of one kind, decoded."""

    text: str
    supervised: bool


def spans_of(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool]) -> list[Span]:
    """Tokens as spans of equal mask; special tokens stay in the text."""
    spans: list[Span] = []
    before, end = "", 0
    for supervised, group in groupby(mask):
        begin, end = end, end + sum(1 for _ in group)
        whole = text_of(tokenizer, ids[:end])
        # The text is cut out of the whole: decoded alone, a piece loses the space it begins with.
        piece = whole[len(before) :] if whole.startswith(before) else text_of(tokenizer, ids[begin:end])
        spans.append(Span(piece, supervised))
        before = whole
    return spans


def text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def visible(text: str) -> str:
    """`text` without characters that steer a terminal or reorder a page; they show as signs."""
    out = []
    for c in text:
        code = ord(c)
        if code < 32 and c not in "\n\t":
            out.append(chr(0x2400 + code))
        elif 0x7F <= code < 0xA0 or code in _UNSEEN or 0xD800 <= code < 0xE000:
            out.append(f"<U+{code:04X}>")
        else:
            out.append(c)
    return "".join(out)


def short(text: str, limit: int) -> str:
    """`text`, its middle left out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    left = len(text) - limit
    return f"{text[: limit * 2 // 3]} [... {left:,} characters ...] {text[len(text) - limit // 3 :]}"


def one_line(text: str, limit: int = 100) -> str:
    return short(" ".join(visible(text).split()), limit)


def terminal_lines(spans: list[Span], colour: bool, limit: int | None = SPAN_LIMIT) -> list[str]:
    """Lines of the text; supervised spans are green, or stand between OPEN and CLOSE."""
    text = ""
    for span in spans:
        shown = visible(short(span.text, limit) if limit is not None else span.text)
        if not span.supervised:
            text += shown
        elif colour:
            text += "\n".join(f"{_GREEN}{line}{_RESET}" if line else "" for line in shown.split("\n"))
        else:
            text += f"{OPEN}{shown}{CLOSE}"
    return text.split("\n")
