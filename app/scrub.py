"""Takes every mention of conversations out of a run folder's text files: outputs, examples, reports, logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from app.runfolder import sealed, unsealed
from app.storage import Store

# Weights hold no text; parts are rewritten by their own rules; the lists name the forgotten by design.
_NOT_SEARCHED = (".safetensors", ".parquet", "forgotten.json", "lease.json")
_LINES = (".jsonl", ".log", ".txt", ".err", ".out")
_BENCH_OUTPUTS = "bench/outputs.jsonl"


def scrub(store: Store, ids: re.Pattern[str], reports: bool) -> Iterator[tuple[str, str]]:
    """Remove what names `ids`: lines of line files, items of lists and objects in JSON, other files whole.

    Bench quotes a few tokens of prompts that it names only by number: where its outputs hold one of `ids`, all its
    quotations go. The file that says so goes last, so that a scrubbing that was killed can be done again.

    Args:
        reports: the pages in `report/` go whole, since they may quote too.

    Yields:
        What was changed, and how.
    """
    quoted = store.exists(_BENCH_OUTPUTS) and _mentions(store, _BENCH_OUTPUTS, ids)
    paths = [p for p in store.walk() if not p.endswith(_NOT_SEARCHED)]
    for path in sorted(paths, key=lambda p: p == _BENCH_OUTPUTS):
        done = None
        if path.endswith(_LINES):
            done = _without_lines(store, path, ids, quoted and path.endswith(".log"))
        elif path.endswith(".json"):
            done = _without_values(store, path, ids, quoted)
        elif (reports and path.startswith("report/")) or _mentions(store, path, ids):
            store.delete(path)
            done = "removed whole"
        if done is not None:
            yield path, done


def _mentions(store: Store, path: str, ids: re.Pattern[str]) -> bool:
    return bool(ids.search(store.read_bytes(path).decode("utf-8", "replace")))


def _without_lines(store: Store, path: str, ids: re.Pattern[str], quoted: bool) -> str | None:
    lines = store.read_bytes(path).decode("utf-8", "surrogateescape").split("\n")
    left = [x for x in lines if not ids.search(x) and not (quoted and "bench: prompt " in x)]
    if len(left) == len(lines):
        return None
    store.write_bytes(path, "\n".join(left).encode("utf-8", "surrogateescape"))
    return f"{len(lines) - len(left)} line(s)"


def _without_values(store: Store, path: str, ids: re.Pattern[str], quoted: bool) -> str | None:
    data = store.read_json(path)
    if data is None:
        if not _mentions(store, path, ids):
            return None
        store.delete(path)  # no JSON, and it names them
        return "removed whole"
    plain = unsealed(data)
    before = data if plain is None else plain
    left, _ = _scrubbed(before, lambda text: bool(ids.search(text)))
    if quoted:
        left = _without_key(left, "mismatch_examples")
    if left == before:
        return None
    store.write_json(path, left if plain is None else sealed(left))
    return "values that name or quote it"


def _scrubbed(value: Any, names: Callable[[str], bool]) -> tuple[Any, bool]:
    """`value` without the list items, objects and texts that name a conversation; and whether it does itself."""
    if isinstance(value, str):
        return value, names(value)
    if isinstance(value, list):
        pairs = [_scrubbed(v, names) for v in value]
        return [v for v, named in pairs if not named], False
    if not isinstance(value, dict):
        return value, False
    left: dict[str, Any] = {}
    named = False
    for key, inner in value.items():
        inner, inside = _scrubbed(inner, names)
        if not inside and not names(key):
            left[key] = inner
        named = named or (inside and isinstance(inner, str))
    return left, named


def _without_key(value: Any, key: str) -> Any:
    """`value` with every list under `key` emptied."""
    if isinstance(value, list):
        return [_without_key(v, key) for v in value]
    if isinstance(value, dict):
        return {k: [] if k == key else _without_key(v, key) for k, v in value.items()}
    return value
