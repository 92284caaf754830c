"""Text of a file to rows: lines, JSON lines, JSON lists of any size, CSV. A row that cannot be read is a RowError."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from app.errors import RowError

_MAX_LINE = 256 << 20  # characters
_READ = 1 << 20  # characters at a time of a JSON list
_LIST_KEYS = ("data", "rows", "items", "conversations", "instances", "examples", "train")


def text_lines(text: io.TextIOWrapper) -> Iterator[tuple[int, Any]]:
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


def whole_line(line: str) -> Any:
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


def json_rows(name: str, text: io.TextIOWrapper) -> Iterator[tuple[str, Any]]:
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


def csv_rows(name: str, text: io.TextIOWrapper) -> Iterator[tuple[str, Any]]:
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
