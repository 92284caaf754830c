"""Benchmark sets by path: MT-bench (`turns`), GSM8K (`question`), HumanEval (`prompt`), any shape that sources have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.config import SourceConfig
from app.errors import UserError
from app.redact import redact
from app.sources.benchmarks import prompt_messages
from app.sources.locate import Listing, SourceError, source_digest
from app.sources.readers import read_rows


def _source_of(path: str) -> SourceConfig:
    return SourceConfig(path=path)


def set_digests(paths: list[str], listing: Listing) -> dict[str, str]:
    """Digest of each set by what it is called in a manifest.

    Raises:
        UserError: a set cannot be read.
    """
    try:
        return {f"bench set {p}": source_digest(_source_of(p), listing.files(_source_of(p))) for p in paths}
    except SourceError as error:
        raise UserError(f"bench.sets: {error.said}") from error


def read_sets(paths: list[str], rows: int, listing: Listing) -> dict[str, list[list[dict[str, Any]]]]:
    """By the file's name, the first `rows` conversations of each set: what is asked, without recorded answers.

    Raises:
        UserError: a set cannot be read, a row is no prompt, or two sets have one name.
    """
    sets: dict[str, list[list[dict[str, Any]]]] = {}
    for path in paths:
        source = _source_of(path)
        if source.label in sets:
            raise UserError(f"bench.sets: two files are called {source.label!r}; rename one")
        chats: list[list[dict[str, Any]]] = []
        try:
            for where, row in read_rows(source, listing.files(source)):
                if len(chats) == rows:
                    break
                chats.append(_questions(where, row, path))
        except SourceError as error:
            raise UserError(f"bench.sets: {error.said}") from error
        if not chats:
            raise UserError(f"bench.sets: {redact(path)} holds no prompt; mend it or take it off the list")
        sets[source.label] = chats
    return sets


@dataclass(frozen=True)
class SetTurns:
    """Turns of benchmark sets, as the bench asks them."""

    asked: int = 0  # each a prompt, with and without the draft
    earlier: int = 0  # of those, answered once more before, so that the turns after them can be asked


def count_turns(sets: Iterable[list[list[dict[str, Any]]]]) -> SetTurns:
    """Of the conversations of `read_sets`."""
    each = [sum(m["role"] == "user" for m in chat) for chats in sets for chat in chats]
    return SetTurns(sum(each), sum(n - 1 for n in each))


def _questions(where: str, row: Any, path: str) -> list[dict[str, Any]]:
    """The system and user messages of a row."""
    messages = prompt_messages("bench.sets", where, row, path)
    asked = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] in ("system", "user")]
    if not any(m["role"] == "user" for m in asked):
        raise UserError(f"bench.sets: {where} of {redact(path)} asks nothing; give each row a prompt")
    return asked
