"""Source files to rows: any fsspec location, JSONL, JSON, Parquet, CSV, text, compressed or zipped; streamed."""

from __future__ import annotations

import codecs
import csv
import difflib
import io
import json
import logging
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from app.config import SourceConfig
from app.errors import RowError, UserError, first_line
from app.redact import redact
from app.runfolder import digest_of
from app.sources.server_logs import is_request_line
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
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet", b"PK\x03\x04": "zip"}
_told: set[tuple[str, str]] = set()  # folders whose unread files were named
_MAX_LINE = 256 << 20  # characters
_READ = 1 << 20  # characters at a time of a JSON list
_LIST_KEYS = ("data", "rows", "items", "conversations", "instances", "examples", "train")


class SourceError(UserError):
    """A whole source cannot be used."""

    def __init__(self, label: str, said: str) -> None:
        super().__init__(f"source {label}: {said}")
        self.label = label


@dataclass(frozen=True)
class SourceFile:
    """One file of a source."""

    fs: Any
    path: str

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]


def read_rows(source: SourceConfig) -> Iterator[tuple[str, Any]]:
    """(where, row) of a source, in order of file names and of rows; blank lines are no rows.

    A row is what its format gives (an object, a list, a line of text), or a RowError for one that cannot be read.
    `where` is `file:line` for line formats and `file#item` for lists, Parquet and zipped files' items.

    Raises:
        SourceError: the source is missing, empty, or of no readable form.
    """
    files = source_files(source)

    def rows() -> Iterator[tuple[str, Any]]:
        for file in files:
            yield from _file_rows(source, file)

    return islice(rows(), source.limit)


def source_digest(source: SourceConfig) -> str:
    """Digest of the content of a source's files.

    Raises:
        SourceError: as `read_rows`.
    """
    parts = []
    for file in source_files(source):
        if source.dataset is not None:
            parts.append(file.path)  # it names the commit
            continue
        protocols = (file.fs.protocol,) if isinstance(file.fs.protocol, str) else file.fs.protocol
        parts.append(file_sha256(Path(file.path)) if "file" in protocols else file.fs.ukey(file.path))
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
    where = source.path if "://" in source.path else str(Path(source.path).expanduser().absolute())
    try:
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
            raise SourceError(
                source.label, f"nothing is found at {redact(where)}{_nearby(fs, path)}; check sources[].path"
            )
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
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4) or [n for n in names if _format_of_name(n)][:3]
    return f" (the folder holds {', '.join(close)})" if close else " (the folder holds no data file)"


def _is_data(path: str) -> bool:
    """Whether a file of a folder is read: hidden ones and those of unknown endings are not."""
    return _format_of_name(path) is not None and not path.rsplit("/", 1)[-1].startswith((".", "_"))


def _format_of_name(path: str) -> str | None:
    stem = path.lower()
    for ending in _COMPRESSIONS:
        stem = stem.removesuffix(ending)
    return next((f for ending, f in _FORMATS.items() if stem.endswith(ending)), None)


def _file_rows(source: SourceConfig, file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Rows of one file; a file that ends too early ends in a RowError."""
    try:
        with file.fs.open(file.path, "rb") as raw:
            magic = next((kind for mark, kind in _MAGIC.items() if _peek(raw, 4).startswith(mark)), None)
            if magic == "zip":
                yield from _zip_rows(source, file.name, raw)
                return
            if magic == "parquet" or source.format == "parquet":
                yield from _parquet_rows(source, file.name, raw)
                return
            stream: Any = raw
            if magic in ("gzip", "zstd"):
                stream = _Decompressed(pa.CompressedInputStream(pa.PythonFile(raw, "r"), magic))
            yield from _text_rows(source, file.name, stream)
    except (EOFError, zipfile.BadZipFile) as error:
        yield file.name, RowError("cut_file", f"the file ends too early or is damaged ({error})")
    except OSError as error:
        if file.fs.exists(file.path):
            yield file.name, RowError("cut_file", f"the file cannot be read to its end ({str(error)[:200]})")
        else:
            raise SourceError(source.label, f"{redact(file.path)} went away while it was read") from error


class _Decompressed(io.RawIOBase):
    """pyarrow's decompressor as a raw stream; a stream that is cut raises EOFError."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(min(len(buffer), 1 << 16))  # what a cut stream gave before counts
        except OSError as error:
            raise EOFError(str(error)) from error
        buffer[: len(data)] = data
        return len(data)


def _peek(raw: IO[bytes], count: int) -> bytes:
    start = raw.read(count)
    raw.seek(0)
    return start


def _zip_rows(source: SourceConfig, name: str, raw: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Rows of the data files in a zip: what ChatGPT and Claude send as an export."""
    archive = zipfile.ZipFile(raw)
    members = [m for m in archive.namelist() if _format_of_name(m) in ("json", "jsonl", "csv")]
    chats = [m for m in members if m.rsplit("/", 1)[-1].startswith("conversations")]
    members = sorted(chats or members)
    if not members:
        raise SourceError(source.label, f"{name} holds no .json, .jsonl or .csv file")
    for member in members:
        with archive.open(member) as inner:
            yield from _text_rows(source, f"{name}/{member}", inner)


def _parquet_rows(source: SourceConfig, name: str, raw: IO[bytes]) -> Iterator[tuple[str, Any]]:
    try:
        file = pq.ParquetFile(raw)
    except pa.ArrowInvalid as error:
        raise SourceError(source.label, f"{name} is no Parquet file or is cut ({str(error)[:150]})") from error
    number = 0
    for batch in file.iter_batches(batch_size=256):
        for row in batch.to_pylist():
            number += 1
            yield f"{name}#{number}", row


def _text_rows(source: SourceConfig, name: str, stream: Any) -> Iterator[tuple[str, Any]]:
    """Rows of a text file, whatever its name says where the format is auto."""
    stream = io.BufferedReader(stream, _READ)
    start = bytes(stream.peek(_READ))
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:4096]:
        what = "compressed Parquet; unpack it" if start.startswith(b"PAR1") else "UTF-16 or no text; save it as UTF-8"
        raise SourceError(source.label, f"{name} is {what}")
    kind: str = source.format if source.format != "auto" else _kind_of(name, start)
    with io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as text:
        if kind == "json":
            yield from _json_rows(name, text)
        elif kind == "csv":
            yield from _csv_rows(name, text)
        else:
            parse = parse_line if kind == "jsonl" else _checked_line
            found = False
            for number, line in _lines(text):
                if kind == "log" and isinstance(line, str) and not is_request_line(line):
                    continue  # a server's log says much else
                found = True
                yield f"{name}:{number}", line if isinstance(line, RowError) else parse(line)
            if kind == "log" and not found:
                raise SourceError(
                    source.label,
                    f"{name} holds no logged request; vLLM logs them with --enable-log-requests and"
                    " VLLM_LOGGING_LEVEL=DEBUG, SGLang with --log-requests --log-requests-level 3",
                )


def _kind_of(name: str, start: bytes) -> str:
    """The format of a text file by its name, or by how it begins: JSON lists named .jsonl are common, and so on."""
    head = start.removeprefix(codecs.BOM_UTF8).lstrip()
    named = _format_of_name(name)
    if named not in (None, "json", "jsonl"):
        return str(named)
    if head[:1] not in (b"{", b"["):
        return named or "text"
    lines = [line.strip() for line in head.split(b"\n")]
    opening = [line for line in lines if line[:1] == head[:1]]
    if head[:1] == b"[":
        # Several lines that each are a whole list are rows; else the list holds them.
        return "jsonl" if len(opening) > 1 and opening[0][-1:] == b"]" and _is_json(opening[0]) else "json"
    if lines[0] == b"{" and lines[1:2] and lines[1][:1] in (b'"', b"}"):
        return "json"  # pretty-printed
    if len(opening) > 1 or named != "json":
        return "jsonl"
    return "json"


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _lines(text: io.TextIOWrapper) -> Iterator[tuple[int, Any]]:
    """(number, line) of the lines that are not blank; one too long to hold becomes a RowError."""
    number = 0
    while True:
        line = text.readline(_MAX_LINE)
        if not line:
            return
        number += 1
        if len(line) == _MAX_LINE and not line.endswith("\n"):
            while (rest := text.readline(_MAX_LINE)) and not rest.endswith("\n"):
                pass
            yield number, RowError("line_too_long", f"the line is longer than {_MAX_LINE >> 20} Mi characters")
        elif line.strip():
            yield number, line


def parse_line(line: str) -> Any:
    """A line of JSON as a value, or the RowError it is rejected by."""
    checked = _checked(line)
    if isinstance(checked, RowError):
        return checked
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return RowError("bad_json", str(error)[:200])
    return _whole_characters(row) if "\\u" in line else row


def _checked_line(line: str) -> Any:
    return _checked(line.rstrip("\r\n"))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _checked(line: str) -> Any:
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:
        return RowError("bad_encoding", "the line is not UTF-8")
    return line


def _whole_characters(row: Any) -> Any:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return RowError("bad_encoding", "the row is not UTF-8 or holds half a surrogate pair")
    except RecursionError as error:
        return RowError("bad_json", str(error)[:200])
    return row


def _json_rows(name: str, text: io.TextIOWrapper) -> Iterator[tuple[str, Any]]:
    """Items of a JSON list, or the objects of a file, one at a time: a list of any size streams."""
    pieces = _JsonPieces(text)
    if not pieces.skip():
        return
    in_list = pieces.take("[")
    number = 0
    while pieces.skip():
        if in_list and pieces.take("]"):
            if pieces.skip():
                yield (
                    f"{name}#{number + 1}",
                    RowError("cut_file", "something follows the end of the list; it is not read"),
                )
            return
        if in_list and number and not (pieces.take(",") and pieces.skip()):
            yield f"{name}#{number + 1}", RowError("cut_file", "no comma after the item; the rest is not read")
            return
        if in_list and pieces.take("]"):
            return  # after a comma too many
        number += 1
        try:
            value = pieces.value()
        except ValueError as error:
            yield f"{name}#{number}", RowError("cut_file", f"item {number}: {error}; the rest of the file is not read")
            return
        if not in_list and number == 1 and isinstance(value, dict) and (inner := _inner_list(value)) is not None:
            for count, item in enumerate(inner, 1):
                yield f"{name}#{count}", _whole_characters(item)
            return
        yield f"{name}#{number}", value if isinstance(value, RowError) else _whole_characters(value)
    if in_list:
        yield f"{name}#{number + 1}", RowError("cut_file", "the list has no end; the file is cut")


def _inner_list(value: dict[str, Any]) -> list[Any] | None:
    """The rows of an object that only wraps them."""
    lists = [k for k, v in value.items() if isinstance(v, list) and v and all(isinstance(i, dict) for i in v)]
    if len(lists) != 1:
        return None
    key = lists[0]
    rows: list[Any] = value[key]
    shaped_itself = any("role" in row or "from" in row for row in rows)
    return rows if key in _LIST_KEYS and not shaped_itself else None


class _JsonPieces:
    """Reads JSON values off a text stream without holding more than one of them."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self._buffer = ""
        self._at = 0
        self._ended = False
        self._constant: str | None = None
        self._decoder = json.JSONDecoder(parse_constant=self._note)

    def _note(self, name: str) -> None:
        self._constant = name

    def _more(self) -> bool:
        data = "" if self._ended else self._text.read(max(_READ, len(self._buffer) - self._at))
        self._buffer = self._buffer[self._at :] + data
        self._at = 0
        self._ended = self._ended or not data
        return bool(data)

    def skip(self) -> bool:
        """Pass over white space; False at the end of the file."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at].isspace():
                self._at += 1
            if self._at < len(self._buffer):
                return True
            if not self._more():
                return False

    def take(self, character: str) -> bool:
        """Pass over `character` if it is the next one."""
        if self._buffer[self._at] != character:
            return False
        self._at += 1
        return True

    def value(self) -> Any:
        """The next value; a RowError for one that holds NaN or Infinity.

        Raises:
            ValueError: what stands there is no JSON, or the file ends within it.
        """
        while True:
            self._constant = None
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                near_end = isinstance(error, json.JSONDecodeError) and (
                    error.pos >= len(self._buffer) - 16 or error.msg.startswith(("Unterminated", "Expecting value"))
                )
                if near_end and len(self._buffer) - self._at < _MAX_LINE and self._more():
                    continue
                raise ValueError(str(error)[:150]) from error
            if end == len(self._buffer) and self._more():
                continue  # a number may go on
            self._at = end
            return value if self._constant is None else RowError("bad_json", f"{self._constant} is not JSON")


def _csv_rows(name: str, text: io.TextIOWrapper) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(min(sys.maxsize, _MAX_LINE))
    counted = _Counted(text)
    head = next(counted, "")
    try:
        dialect: Any = csv.Sniffer().sniff(head, ",;\t|")
    except csv.Error:
        dialect = csv.excel
    delimiter = dialect.delimiter
    fields = next(csv.reader([head], delimiter=delimiter), [])
    reader = csv.reader(counted, delimiter=delimiter, strict=True)
    while True:
        line = counted.number + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "end of data" in str(error):
                yield (
                    f"{name}:{line}",
                    RowError("cut_file", "a quote is never closed; the rest of the file is within it"),
                )
            else:
                yield f"{name}:{line}", RowError("bad_csv", str(error))
            continue
        if not values:
            continue
        if len(values) != len(fields):
            yield f"{name}:{line}", RowError("bad_csv", f"{len(values)} fields, and the header has {len(fields)}")
            continue
        row = {f.strip(): (v if v != "" else None) for f, v in zip(fields, values, strict=True)}
        bad = any(isinstance(_checked(v), RowError) for v in values)
        yield f"{name}:{line}", RowError("bad_encoding", "the record is not UTF-8") if bad else row


class _Counted(Iterator[str]):
    """Lines with the number of the last one given."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self.number = 0

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        return line
