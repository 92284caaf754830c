"""Where a source's rows are: files, folders, globs and URLs of any fsspec kind, or a dataset of the hub."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from app.config import SourceConfig
from app.errors import UserError, first_line
from app.redact import redact
from app.runfolder import digest_of
from app.storage import file_sha256

log = logging.getLogger("draftmill")
_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".log": "log",
    ".zip": "zip",
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_told: set[tuple[str, str]] = set()  # folders whose unread files were named


class SourceError(UserError):
    """A whole source cannot be used."""

    def __init__(self, label: str, said: str) -> None:
        super().__init__(f"source {label}: {said}")
        self.label, self.said = label, said


@dataclass(frozen=True)
class SourceFile:
    """One file of a source."""

    fs: Any
    path: str

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]


class Listing:
    """The files of sources, each source asked once: what was digested is what is read."""

    def __init__(self) -> None:
        self._files: dict[tuple[str | None, ...], list[SourceFile]] = {}

    def files(self, source: SourceConfig) -> list[SourceFile]:
        """As `source_files`; what failed is asked again."""
        place = (source.path, source.dataset, source.subset, source.split, source.revision)
        if place not in self._files:
            self._files[place] = source_files(source)
        return self._files[place]


def source_digest(source: SourceConfig, files: Sequence[SourceFile] | None = None) -> str:
    """Digest of the content of a source's files.

    Args:
        files: those of `source`, where they are known.

    Raises:
        SourceError: as `source_files`.
    """
    parts = []
    for file in source_files(source) if files is None else files:
        if source.dataset is not None:
            parts.append(file.path)  # it names the commit
            continue
        protocols = (file.fs.protocol,) if isinstance(file.fs.protocol, str) else file.fs.protocol
        try:
            parts.append(file_sha256(Path(file.path)) if "file" in protocols else file.fs.ukey(file.path))
        except OSError as error:
            raise SourceError(source.label, f"{redact(file.path)} cannot be read ({first_line(error)})") from error
    return digest_of(parts)


def source_files(source: SourceConfig) -> list[SourceFile]:
    """The files of a source, sorted by path.

    Raises:
        SourceError: nothing is there, or it cannot be opened.
    """
    if source.dataset is not None:
        from app.sources.hub import dataset_files

        return dataset_files(source)
    assert source.path is not None
    where = source.path
    try:
        where = where if "://" in where else str(Path(where).expanduser().absolute())
        fs, path = fsspec.core.url_to_fs(where)
        if re.search(r"[*?\[]", path) and not where.startswith(("http://", "https://")) and not fs.exists(path):
            shown = path.rsplit("/", 1)[-1].startswith(".")  # as a shell does
            paths = sorted(
                p for p in fs.glob(path) if not fs.isdir(p) and (shown or not p.rsplit("/", 1)[-1].startswith("."))
            )
        elif fs.isdir(path):
            found = sorted(fs.find(path))
            paths = [p for p in found if _is_data(p)]
            if not paths:
                raise SourceError(
                    source.label, f"the folder {redact(where)} holds no file ending in {', '.join(_FORMATS)}"
                )
            others = [p.rsplit("/", 1)[-1] for p in found if not _is_data(p)]
            if others and (source.label, where) not in _told:
                _told.add((source.label, where))
                more = f" and {len(others) - 3} more" if len(others) > 3 else ""
                log.info("source %s: not read in the folder: %s%s", source.label, ", ".join(others[:3]), more)
        else:
            paths = [path] if fs.exists(path) else []
        if not paths:
            raise SourceError(source.label, f"nothing is found at {redact(where)}{_nearby(fs, path)}; check the path")
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(source.label, f"{redact(where)} cannot be opened ({redact(first_line(error))})") from error
    return [SourceFile(fs, p) for p in paths]


def _nearby(fs: Any, path: str) -> str:
    """What lies where something was looked for, in words."""
    folder, _, wanted = path.rpartition("/")
    try:
        names = sorted(p.rsplit("/", 1)[-1] for p in fs.ls(folder, detail=False))
    except Exception:
        return f" (there is no folder {redact(folder)})" if folder else ""
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4) or [n for n in names if format_of_name(n)][:3]
    return f" (the folder holds {', '.join(close)})" if close else " (the folder holds no data file)"


def _is_data(path: str) -> bool:
    """Whether a file of a folder is read: hidden ones and those of unknown endings are not."""
    return format_of_name(path) is not None and not path.rsplit("/", 1)[-1].startswith((".", "_"))


def format_of_name(path: str) -> str | None:
    stem = path.lower()
    for ending in _COMPRESSIONS:
        stem = stem.removesuffix(ending)
    return next((f for ending, f in _FORMATS.items() if stem.endswith(ending)), None)
