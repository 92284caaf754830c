"""Source files to rows: what a file is, by its name and first bytes, and its rows one at a time."""

from __future__ import annotations

import codecs
import csv
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from app.config import SourceConfig
from app.errors import RowError, first_line
from app.redact import redact
from app.sources.hub import fault_of, is_hub_error
from app.sources.locate import SourceError, SourceFile, format_of_name, source_files
from app.sources.parsing import csv_rows, json_rows, parse_line, text_lines, whole_line
from app.sources.server_logs import is_request_line

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet", b"PK\x03\x04": "zip"}
_READ = 1 << 20  # bytes looked at for the format, and at a time


def read_rows(source: SourceConfig, files: Sequence[SourceFile] | None = None) -> Iterator[tuple[str, Any]]:
    """(where, row) of a source, in order of file names and of rows; blank lines are no rows.

    A row is what its format gives (an object, a list, a line of text), or a RowError for one that cannot be read.
    `where` is `file:line` for line formats and `file#item` for lists, Parquet and zipped files' items.

    Args:
        files: those of `source`, where they are known.

    Raises:
        SourceError: the source is missing, empty, or of no readable form.
    """
    found = source_files(source) if files is None else files

    def rows() -> Iterator[tuple[str, Any]]:
        for file in found:
            yield from _file_rows(source, file)

    return islice(rows(), source.limit)


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
    except Exception as error:
        yield file.name, _fault(source, file, error)


def _fault(source: SourceConfig, file: SourceFile, error: Exception) -> RowError:
    """What stopped the reading of a file, for the row that could not be read.

    Raises:
        SourceError: the source is gone or refused; any error that is none of the file.
    """
    if source.dataset is not None and is_hub_error(error):
        raise fault_of(source, error) from error
    if isinstance(error, EOFError | zipfile.BadZipFile | zlib.error | pa.ArrowException | csv.Error):
        return RowError("cut_file", f"the file ends too early or is damaged ({first_line(error, 200)})")
    if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):  # zipfile's: encrypted, odd methods
        raise SourceError(source.label, f"{file.name} cannot be unpacked ({first_line(error)})") from error
    if not isinstance(error, OSError):
        raise error
    if file.fs.exists(file.path):
        return RowError("cut_file", f"the file cannot be read to its end ({str(error)[:200]})")
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
    members = [m for m in archive.namelist() if format_of_name(m) in ("json", "jsonl", "csv")]
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
        for row in _rows_of(batch):
            number += 1
            yield f"{name}#{number}", row


def _rows_of(batch: pa.RecordBatch) -> Iterator[Any]:
    """The rows of a batch; a RowError for one with a value Python cannot hold."""
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, OverflowError):  # a time outside Python's, text that is not UTF-8
        pass
    for at in range(len(batch)):
        try:
            yield batch.slice(at, 1).to_pylist()[0]
        except (ValueError, OverflowError) as error:
            yield RowError("bad_value", f"a value cannot be read ({first_line(error, 200)})")


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
            yield from json_rows(name, text)
        elif kind == "csv":
            yield from csv_rows(name, text)
        else:
            parse = parse_line if kind == "jsonl" else whole_line
            found = False
            for number, line in text_lines(text):
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
    named = format_of_name(name)
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
    except (ValueError, RecursionError):
        return False
    return True
