"""The benchmark sets of `ingest.benchmark_sets`: files of prompts that training rows are compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from app.config import SourceConfig
from app.errors import RowError, UserError
from app.privacy import BenchmarkPrompts, normalised
from app.redact import redact
from app.sources.locate import Listing, SourceError, source_digest
from app.sources.readers import read_rows
from app.sources.shapes import to_raw


def _source_of(path: str) -> SourceConfig:
    return SourceConfig(name=f"benchmark set {path}", path=path)


@contextlib.contextmanager
def _named_by_setting() -> Iterator[None]:
    """A set that cannot be read is named by its setting: it is none of `sources`."""
    try:
        yield
    except SourceError as error:
        raise UserError(f"ingest.benchmark_sets: {error.said}") from error


def benchmark_digests(paths: list[str], listing: Listing) -> dict[str, str]:
    """Digest of each set by what it is called in a manifest.

    Raises:
        UserError: a set cannot be read.
    """
    digests = {}
    for path in paths:
        with _named_by_setting():
            source = _source_of(path)
            digests[source.label] = source_digest(source, listing.files(source))
    return digests


def benchmark_prompts(paths: list[str], listing: Listing) -> BenchmarkPrompts | None:
    """The prompts of all sets; None where there are no sets.

    Raises:
        UserError: a set cannot be read or holds no prompt.
    """
    return BenchmarkPrompts(p for path in paths for p in _prompts_of(path, listing)) if paths else None


def prompt_messages(setting: str, where: str, row: Any, path: str) -> list[dict[str, Any]]:
    """The messages of `row` of the file `path`, which `setting` names.

    Raises:
        UserError: it has no known shape.
    """
    try:
        if isinstance(row, RowError):
            raise row
        return to_raw(row, {}).messages
    except RowError as error:
        raise UserError(
            f"{setting}: {where} of {redact(path)} is no prompt ({error.reason}); give rows of a known shape,"
            " `prompt`, `question`, `turns` or `messages`"
        ) from error


def _prompts_of(path: str, listing: Listing) -> list[str]:
    """The first user turn of each row; the later ones of a benchmark are too common ("Explain.") to count."""
    prompts = []
    source = _source_of(path)
    with _named_by_setting():
        for where, row in read_rows(source, listing.files(source)):
            messages = prompt_messages("ingest.benchmark_sets", where, row, path)
            first = next((m["content"] for m in messages if m["role"] == "user"), None)
            if isinstance(first, str):
                prompts.append(first)
    if not any(map(normalised, prompts)):
        raise UserError(f"ingest.benchmark_sets: {redact(path)} holds no prompt; mend it or take it off the list")
    return prompts
