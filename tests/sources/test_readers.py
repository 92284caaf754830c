"""Every format and compression to rows, and every fault of a source as one sentence."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.config import SourceConfig
from app.errors import RowError
from app.sources.locate import Listing, SourceError, source_digest
from app.sources.readers import read_rows

ROWS = [{"prompt": "one", "n": 1}, {"prompt": "zwei ü", "n": None}, {"prompt": "三", "n": 3}]


def source(path: Path | str, **changes: Any) -> SourceConfig:
    return SourceConfig(**{"name": "s", "path": str(path), **changes})


def rows_of(path: Path | str, **changes: Any) -> list[tuple[str, Any]]:
    return [
        (where, row.reason if isinstance(row, RowError) else row) for where, row in read_rows(source(path, **changes))
    ]


def jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()


def parquet(rows: list[Any]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue().to_pybytes())


CSV = 'prompt;n\r\none;1\r\n"zwei ü";\r\n三;3\r\n'.encode()


@pytest.mark.parametrize(
    ("name", "data", "where"),
    [
        ("a.jsonl", jsonl(ROWS), "a.jsonl:{}"),
        ("a.json", json.dumps(ROWS).encode(), "a.json#{}"),
        ("a.json", json.dumps(ROWS, indent=2).encode(), "a.json#{}"),
        ("a.json", json.dumps({"data": ROWS}).encode(), "a.json#{}"),
        ("a.jsonl", json.dumps(ROWS).encode(), "a.jsonl#{}"),  # misnamed
        ("a.json", jsonl(ROWS), "a.json:{}"),  # misnamed
        ("a.json", "\n".join(json.dumps(r, indent=1) for r in ROWS).encode(), "a.json#{}"),  # pretty-printed, no list
        ("a", jsonl(ROWS), "a:{}"),
        ("a.parquet", parquet(ROWS), "a.parquet#{}"),
        ("a.data", parquet(ROWS), "a.data#{}"),
        ("a.jsonl.gz", gzip.compress(jsonl(ROWS)), "a.jsonl.gz:{}"),
        ("a.jsonl", gzip.compress(jsonl(ROWS)), "a.jsonl:{}"),  # misnamed
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode()), "a.json.gz#{}"),
    ],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, data: bytes, where: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert rows_of(tmp_path / name) == [(where.format(i), row) for i, row in enumerate(ROWS, 1)]


def test_zstd(tmp_path: Path) -> None:
    with pa.OSFile(str(tmp_path / "a.jsonl.zst"), "wb") as sink, pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(jsonl(ROWS))
    assert [row for _, row in rows_of(tmp_path / "a.jsonl.zst")] == ROWS


def test_csv_keeps_quoted_lines_and_names_ragged_records(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(
        b"\xef\xbb\xbf" + 'prompt,n\n"two\nlines, quoted",1\n\nshort\nlast,2\nbad \xff,3\n'.encode("latin-1")
    )
    assert rows_of(path) == [
        ("a.csv:2", {"prompt": "two\nlines, quoted", "n": "1"}),
        ("a.csv:5", "bad_csv"),
        ("a.csv:6", {"prompt": "last", "n": "2"}),
        ("a.csv:7", "bad_encoding"),
    ]
    path.write_bytes(CSV)
    assert [r["prompt"] for _, r in rows_of(path)] == ["one", "zwei ü", "三"]


def test_text_lines_and_zips(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"first\r\n\r\nsecond\n")
    assert rows_of(tmp_path / "a.txt") == [("a.txt:1", "first"), ("a.txt:3", "second")]
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        archive.writestr("user.json", '{"name": "me"}')
        archive.writestr("conversations.json", json.dumps(ROWS))
    assert rows_of(tmp_path / "export.zip") == [
        (f"export.zip/conversations.json#{i}", row) for i, row in enumerate(ROWS, 1)
    ]


def test_of_a_servers_log_only_the_requests_are_rows(tmp_path: Path) -> None:
    body = '{"messages": [{"role": "user", "content": "q"}]}'
    lines = [
        "INFO 11-30 06:41:20 [api_server.py:1] Starting vLLM",
        f"DEBUG 11-30 06:41:20 [logger.py:41] Request chatcmpl-1 JSON body: {body}",
        "Traceback (most recent call last):",
    ]
    (tmp_path / "a.log").write_text("\n".join(lines))
    assert [where for where, _ in rows_of(tmp_path / "a.log")] == ["a.log:2"]
    (tmp_path / "b.log").write_text(lines[0])
    with pytest.raises(SourceError, match="holds no logged request; vLLM logs them with"):
        rows_of(tmp_path / "b.log")


def test_bom_crlf_blank_lines_and_bad_lines(tmp_path: Path) -> None:
    lines = [b'{"a": 1}', b"", b"  ", b'{"a": ', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"a": NaN}', b"[1, 2]", b"7"]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    assert rows_of(tmp_path / "a.jsonl") == [
        ("a.jsonl:1", {"a": 1}),
        ("a.jsonl:4", "bad_json"),
        ("a.jsonl:5", "bad_encoding"),
        ("a.jsonl:6", "bad_encoding"),
        ("a.jsonl:7", "bad_json"),
        ("a.jsonl:8", [1, 2]),
        ("a.jsonl:9", 7),
    ]


def test_globs_and_folders_are_read_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.json", "notes.md", "._a.jsonl", ".hidden.jsonl"):
        (tmp_path / name).write_bytes(jsonl([{"from": name}]))
    assert [r["from"] for _, r in rows_of(tmp_path / "*.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [r["from"] for _, r in rows_of(tmp_path)] == ["a.jsonl", "b.jsonl", "c.json"]
    assert [r["from"] for _, r in rows_of(tmp_path, limit=1)] == ["a.jsonl"]


def test_a_file_that_ends_too_early_gives_its_rows_and_says_so(tmp_path: Path) -> None:
    many = [{"n": i, "t": f"text {i * 7919 % 10007}"} for i in range(20000)]
    for name, data in {
        "a.jsonl.gz": gzip.compress(jsonl(many)),
        "a.json": json.dumps(many).encode(),
    }.items():
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        rows = rows_of(tmp_path / name)
        good = [r for _, r in rows if isinstance(r, dict)]
        assert good == many[: len(good)] and len(good) > 1000
        assert rows[-1][1] in ("cut_file", "bad_json")


def test_a_list_broken_in_the_middle_says_that_the_rest_is_lost(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"a": 1}, {"a": 2}, {"a" 3}, {"a": 4}]')
    found = list(read_rows(source(tmp_path / "a.json")))
    assert [w for w, _ in found] == ["a.json#1", "a.json#2", "a.json#3"]
    assert isinstance(found[-1][1], RowError) and "the rest of the file is not read" in found[-1][1].detail


def _near(folder: Path) -> Path:
    (folder / "prompts.jsonl").write_text("{}")
    return folder / "prompt.jsonl"


def _utf16(folder: Path) -> Path:
    (folder / "a.jsonl").write_text('{"a": 1}', encoding="utf-16")
    return folder / "a.jsonl"


def _no_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("picture.png", b"x")
    return folder / "a.zip"


def _bad_parquet(folder: Path) -> Path:
    (folder / "a.parquet").write_bytes(parquet(ROWS)[:-20])
    return folder / "a.parquet"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_near, "nothing is found at .*prompt.jsonl .the folder holds prompts.jsonl"),
        (lambda p: p / "*.parquet", "nothing is found"),
        (lambda p: p / "no" / "such.jsonl", "there is no folder"),
        (_utf16, "UTF-16 or no text; save it as UTF-8"),
        (_no_zip, "holds no .json"),
        (_bad_parquet, "no Parquet file or is cut"),
        (lambda p: p, "holds no file ending in"),
    ],
)
def test_faults_of_a_source(tmp_path: Path, make: Callable[[Path], Path], words: str) -> None:
    with pytest.raises(SourceError, match=words) as fault:
        list(read_rows(source(make(tmp_path))))
    assert fault.value.label == "s"


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.jsonl", "[1]\n[2]\n", [[1], [2]]),
        ("a.json", '[{"a": 1}] trailing', [{"a": 1}, "cut_file"]),
        ("a.json", '[{"a": 1} {"a": 2}]', [{"a": 1}, "cut_file"]),
        ("a.json", '[{"a": 1}, {"a": NaN}, {"a": 3},]', [{"a": 1}, "bad_json", {"a": 3}]),
        ("a.json", '{"data": [{"a": 1}, {"a": 2}]}\n', [{"a": 1}, {"a": 2}]),
        ("a.json", '{"a" 1}\n{"a": 2}\n{"a": 3}\n', ["bad_json", {"a": 2}, {"a": 3}]),
        ("a.jsonl", '{\n{"a": 2}\n', ["bad_json", {"a": 2}]),
        ("a.csv", 'a,b\n1,2\n"open,3\n4,5\n', [{"a": "1", "b": "2"}, "cut_file"]),
    ],
)
def test_no_row_is_lost_without_a_word(tmp_path: Path, name: str, text: str, rows: list[Any]) -> None:
    (tmp_path / name).write_text(text)
    assert [row for _, row in rows_of(tmp_path / name)] == rows


def test_a_large_list_streams(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    with open(path, "w") as out:
        out.write("[")
        for i in range(60_000):
            out.write(("," if i else "") + json.dumps({"n": i, "text": f"{i} " * 100}))
        out.write("]")
    size = path.stat().st_size
    assert size > 30e6
    tracemalloc.start()
    count = sum(1 for _ in read_rows(source(path)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 60_000
    assert peak < size / 3


def test_a_listing_looks_once_and_what_it_saw_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    listing, folder = Listing(), source(tmp_path)
    first = listing.files(folder)
    (tmp_path / "b.jsonl").write_bytes(jsonl(ROWS))
    assert listing.files(folder) is first and len(first) == 1
    assert len(list(read_rows(folder, first))) == len(ROWS)
    assert len(list(read_rows(folder))) == 2 * len(ROWS)
    assert source_digest(folder, first) != source_digest(folder)
    assert len(listing.files(source(tmp_path / "b.jsonl"))) == 1
    for _ in range(2):
        with pytest.raises(SourceError):
            listing.files(source(tmp_path / "absent.jsonl"))


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(ROWS))
    first = source_digest(source(path))
    assert source_digest(source(path)) == first
    path.write_bytes(jsonl(ROWS[:2]))
    assert source_digest(source(path)) != first


def test_values_python_cannot_hold_are_rows_rejected_by_name(tmp_path: Path) -> None:
    times = pa.array([0, 2**53], pa.int64()).cast(pa.timestamp("ms"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "at": times}), tmp_path / "a.parquet")
    text = pa.array([b"good", b"\xff\xfe"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "b.parquet")
    for name in ("a.parquet", "b.parquet"):
        (_, first), (_, second) = rows_of(tmp_path / name)
        assert first["prompt"] in ("a", "good")
        assert second == "bad_value"


def test_a_damaged_zip_is_a_cut_file_and_an_encrypted_one_a_sentence(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.jsonl", "\n".join(json.dumps({"prompt": f"question {i}"}) for i in range(500)))
    data = bytearray((tmp_path / "a.zip").read_bytes())
    at = len(data) // 3
    (tmp_path / "a.zip").write_bytes(data[:at] + bytes(b ^ 0xFF for b in data[at : at + 60]) + data[at + 60 :])
    assert rows_of(tmp_path / "a.zip")[-1][1] == "cut_file"
    data[6] |= 1  # the flag of encryption, in the member's header and in the directory
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "b.zip").write_bytes(data)
    with pytest.raises(SourceError, match=r"b\.zip cannot be unpacked .*password"):
        rows_of(tmp_path / "b.zip")


def test_a_csv_with_carriage_returns_alone_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"prompt,response\ra,b\rc,d\r")
    assert rows_of(tmp_path / "a.csv")[-1][1] in ("cut_file", "bad_csv")


def test_a_home_nobody_has_is_a_sentence() -> None:
    with pytest.raises(SourceError, match="cannot be opened"):
        rows_of("~nobody-of-this-name/x.jsonl")
