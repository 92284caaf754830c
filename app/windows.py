"""Sealed windows: the parts that a training takes while others are still being made, in order (`train.start_after`).

`train/windows.json` in the run folder is written by the driver before any step reads from a window, and only ever
grows: workers of one training, and of the one that goes on after a kill, see the same windows. A part stands in it with
a digest of its content, so that a part made again is not taken for the one that was learnt from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from app.config import Config
from app.parts import PartEntry, entry_readers, read_entry
from app.runfolder import digest_of, sealed, unsealed
from app.storage import Store

PATH = "train/windows.json"


@dataclass(frozen=True)
class Window:
    """Parts that were sealed together."""

    parts: tuple[tuple[int, str], ...]  # number and digest of the content, ascending
    rows: int  # conversations of ingest in them
    last: bool  # sealed in the knowledge that no part comes after it


@dataclass(frozen=True)
class Windows:
    """All of them so far."""

    planned_rows: int  # conversations of ingest in all parts
    sealed: tuple[Window, ...] = ()
    closed: bool = False  # no window comes after these

    @property
    def parts(self) -> dict[int, str]:
        """Number -> digest of every sealed part."""
        return {part: digest for window in self.sealed for part, digest in window.parts}

    def with_window(self, entries: Iterable[PartEntry], last: bool) -> Windows:
        """These and one more of `entries`."""
        held = sorted(entries, key=lambda e: e.part)
        window = Window(tuple((e.part, content_of(e)) for e in held), sum(e.rows_in for e in held), last)
        return replace(self, sealed=(*self.sealed, window), closed=last)

    def closed_with(self, entries: list[PartEntry]) -> Windows:
        """These, closed; with `entries`, where there are any, as the last window."""
        return self.with_window(entries, last=True) if entries else replace(self, closed=True)

    def unsealed_of(self, entries: Mapping[int, PartEntry]) -> list[PartEntry]:
        """Those of `entries` (by part) that are in no window yet."""
        known = self.parts
        return [entries[part] for part in sorted(entries) if part not in known]

    def fit(self, entries: Mapping[int, PartEntry]) -> bool:
        """Whether every sealed part is still among `entries` (by part) with its content, and once closed, no other."""
        known = self.parts
        if self.closed and known.keys() != entries.keys():
            return False
        return all(part in entries and content_of(entries[part]) == digest for part, digest in known.items())


def content_of(entry: PartEntry) -> str:
    """Digest of what a part holds."""
    return digest_of(entry.checksums)


def read_windows(store: Store) -> Windows | None:
    """The windows of run folder `store`; None where none was sealed, or the file is damaged."""
    data = unsealed(store.read_json(PATH))
    if data is None:
        return None
    windows = (
        Window(tuple((int(part), str(digest)) for part, digest in w["parts"]), int(w["rows"]), bool(w["last"]))
        for w in data["sealed"]
    )
    return Windows(int(data["planned_rows"]), tuple(windows), bool(data["closed"]))


def windows_of(store: Store, config: Config, entries: Iterable[PartEntry]) -> Windows | None:
    """The windows of run folder `store` where training goes by them and they are of `entries`; else None."""
    if config.train.start_after is None:
        return None
    windows = read_windows(store)
    return windows if windows is not None and windows.fit({e.part: e for e in entries}) else None


def write_windows(store: Store, windows: Windows) -> None:
    """Whole or not at all."""
    store.write_json(PATH, sealed(asdict(windows)))


def entries_of(store: Store, window: Window) -> list[PartEntry]:
    """The commit entries of a window.

    Raises:
        ValueError: a part is not what was sealed.
    """
    entries: list[PartEntry] = []
    with entry_readers(store) as pool:
        found = list(pool.map(lambda named: read_entry(store, named[0]), window.parts))
    for entry, (part, digest) in zip(found, window.parts, strict=True):
        if entry is None or content_of(entry) != digest:
            raise ValueError(f"part {part} is not what was sealed")
        entries.append(entry)
    return entries
