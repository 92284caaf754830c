"""The part: the unit of work, of commit and of resume.

A committed part of the generate stage is three objects in `generate/parts/`:

- `part-00007-<sha8>.parquet`      one row per sample: token ids, loss mask, messages, finish reason, ...
- `part-00007-<sha8>.safetensors`  states: `aux` [N, 3*H] and `teacher` [M, H] in `capture.codec` (app/states.py)
- `part-00007.json`                the entry, written last: names, sizes and checksums of both, counts, rejects

A part without a valid entry is work to do. Data names carry their own checksum, so that a writer that was
given up for dead can never overwrite what another has committed.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.checksum import KIND, KINDS, checksum_of, hasher, kind_of
from app.codecs import States, encode
from app.errors import UserError
from app.packed import Captured, PackedStates
from app.runfolder import has_types, sealed, unsealed
from app.states import CONVENTION, StatesFile, write_states
from app.storage import Store, explained

PARTS = "generate/parts"
FORMAT_VERSION = 3  # of an entry: 3 has BLAKE3 checksums
STATES_VERSION = 2  # of a states file
Mask = Sequence[bool] | NDArray[np.bool_]  # [T]
OTHER_INPUTS = "made from other inputs or settings"  # of an entry: whole, and of no use to today's run
_LARGE = 2**20  # bytes: a write whose checksum another thread takes meanwhile

INGEST_SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # conversation id: hash of the canonical conversation
        ("source", pa.string()),
        ("domain", pa.string()),
        ("use", pa.string()),  # regenerate | as_is
        ("where", pa.string()),  # file:line
        ("messages", pa.string()),  # JSON list
        ("template_kwargs", pa.string()),  # JSON
        ("sampling", pa.string()),  # JSON, the row's own values over generate's
        ("private", pa.bool_()),  # no report shows its text
        (
            "requests",  # regenerate: the first turn's prompt alone; as_is: every sample
            pa.list_(
                pa.struct(
                    [
                        ("prompt_ids", pa.list_(pa.int32())),  # up to the first supervised token
                        ("answer_ids", pa.list_(pa.int32())),  # as_is only
                        ("loss_mask", pa.list_(pa.bool_())),  # as_is only, over prompt + answer
                        ("truncated", pa.bool_()),
                    ]
                )
            ),
        ),
        ("mask_method", pa.string()),
    ]
)

SAMPLE_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),  # conversation id and turn
        ("conversation_id", pa.string()),
        ("turn", pa.int32()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("use", pa.string()),
        ("private", pa.bool_()),  # no report shows its text
        ("messages", pa.string()),  # JSON list, the answer included
        ("template_kwargs", pa.string()),
        ("sampling", pa.string()),  # JSON, as sent to the engine
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),  # over prompt + answer, T values
        ("mask_method", pa.string()),
        ("finish_reason", pa.string()),  # stop | length | prefill
        ("truncated", pa.bool_()),  # the answer was stopped by length; no end token was invented
        ("aux_start", pa.int64()),  # first row of this sample in `aux`; it has T-1
        ("teacher_start", pa.int64()),  # first row in `teacher`
        ("teacher_rows", pa.int64()),
        ("num_tokens", pa.int32()),  # T: what planning needs without the lists
    ]
)


def ingest_part_path(part: int) -> str:
    return f"ingest/parts/{part_name(part)}.parquet"


def read_ingest_part(store: Store, part: int) -> list[dict[str, Any]]:
    """Rows of ingest part `part` (INGEST_SCHEMA)."""
    rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(store.read_bytes(ingest_part_path(part)))).to_pylist()
    return rows


def ingest_table(rows: list[dict[str, Any]]) -> pa.Table:
    """INGEST_SCHEMA rows, their token ids and masks as numpy arrays, as a table: made column by column, since Arrow
    takes nested Python lists apart value by value."""
    requests = [request for row in rows for request in row["requests"]]
    struct = INGEST_SCHEMA.field("requests").type.value_type
    children = [_lists([r[f.name] for r in requests], f.type.value_type) for f in struct if f.name != "truncated"]
    children.append(pa.array([r["truncated"] for r in requests], pa.bool_()))
    of_rows = pa.ListArray.from_arrays(
        _offsets([len(row["requests"]) for row in rows]), pa.StructArray.from_arrays(children, fields=list(struct))
    )
    columns = [
        of_rows if f.name == "requests" else pa.array([row[f.name] for row in rows], f.type) for f in INGEST_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=INGEST_SCHEMA)


def _lists(values: list[Any], value_type: pa.DataType) -> pa.ListArray:
    """Arrays, or None, as one Arrow array of lists."""
    flat = np.concatenate([v for v in values if v is not None] or [np.zeros(0, bool)])
    absent = pa.array([v is None for v in values], pa.bool_())
    lengths = [0 if v is None else len(v) for v in values]
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(flat).cast(value_type), mask=absent)


def _offsets(lengths: list[int]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))


def write_ingest_part(store: Store, part: int, table: pa.Table) -> None:
    """Write `table` (INGEST_SCHEMA) as ingest part `part`: the same rows give the same bytes."""
    store.write_bytes(ingest_part_path(part), ingest_part_bytes(table))


def ingest_part_bytes(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    data: bytes = buffer.getvalue().to_pybytes()
    return data


@dataclass(frozen=True)
class PartEntry:
    """The commit of one part."""

    part: int
    key: str  # hash of everything that shaped it: config, target, input rows
    rows_in: int  # conversations
    conversations: int  # kept
    samples: int
    rejects: list[dict[str, str]]  # id, where, reason, detail
    cut_short: list[dict[str, str]]  # kept, but a later turn failed: the same fields
    tokens: dict[str, int]  # prompt, answer, supervised
    finish_reasons: dict[str, int]
    files: dict[str, dict[str, Any]]  # "rows", "states": name, size, checksum (app/checksum.py)
    layers: list[int]  # k of the auxiliary states, low to high
    dtype: str  # of the states as the engine gave them
    hidden_size: int
    seconds: float
    format_version: int = FORMAT_VERSION
    codec: str = "bf16"  # app/codecs.py; version 1 knew no other
    compression: str = "none"
    record: dict[str, Any] = field(default_factory=dict)  # what the states were captured from: app/record.py
    cleaned: str | None = None  # when the states were deleted, ISO 8601; the rows are still there
    writer: dict[str, Any] = field(default_factory=dict)  # who committed it: host, node (Ray's id), pid, at (ISO 8601)

    @property
    def bytes(self) -> int:
        return sum(int(f["size"]) for f in self.files.values())

    @property
    def checksums(self) -> dict[str, str]:
        """Of its data files, by kind."""
        return {kind: checksum_of(file) for kind, file in self.files.items()}


_FILE_NAME = re.compile(r"[\w-]+\.(parquet|safetensors)")  # of a folder's own: no path
_ENTRY_TYPES: dict[str, Any] = {
    "part": int, "key": str, "rows_in": int, "conversations": int, "samples": int, "rejects": list, "cut_short": list,
    "tokens": dict, "finish_reasons": dict, "files": dict, "layers": list, "dtype": str, "hidden_size": int,
}  # fmt: skip


def part_name(part: int) -> str:
    return f"part-{part:05d}"


def as_mask(loss_mask: Mask) -> Tensor:
    """[T] bool."""
    return torch.from_numpy(np.array(loss_mask, dtype=bool))


def teacher_positions(loss_mask: Tensor) -> Tensor:
    """Positions the teacher is read at (CONTRACTS.md section 2): p with m_p and m_{p+1}. [T] bool -> [S] int64."""
    return (loss_mask[:-1] & loss_mask[1:]).nonzero().squeeze(-1)


def write_part(
    store: Store,
    entry: dict[str, Any],
    rows: list[dict[str, Any]],
    states: Sequence[Tensor],
) -> PartEntry:
    """Write and commit one part.

    Args:
        entry: PartEntry's fields but `files` and `samples`; `codec` and `compression` are obeyed.
        rows: SAMPLE_SCHEMA rows but `aux_start`, `teacher_start`, `teacher_rows`, `num_tokens`.
        states: per row [T-1, 4, H]: three auxiliary states and s_n, CPU.

    Raises:
        UserError: the store is full or cannot be reached, or the codec cannot hold these states.
        ValueError: states are not those of their row.
    """
    codec = entry.get("codec", "bf16")
    samples = []
    for row, state in zip(rows, states, strict=True):
        if len(state) != len(row["loss_mask"]) - 1:
            raise ValueError(f"sample {row['sample_id']}: {len(state)} states for {len(row['loss_mask'])} tokens")
        samples.append(stored_states(state, row["loss_mask"], codec))
    return commit_part(store, entry, rows, samples)


def stored_states(states: Captured, loss_mask: Mask, codec: str) -> tuple[States, States]:
    """What is kept of a sample's states [T-1, 4, H]: the auxiliary rows [T-1, 3H], and the teacher's [S, H].

    Raises:
        UserError: the codec cannot hold them.
    """
    positions = teacher_positions(as_mask(loss_mask))  # [S]
    if isinstance(states, PackedStates):
        if states.packing.codec != codec:
            raise ValueError(f"states packed as {states.packing.codec} are to be stored as {codec}")
        return states.stored(0, 3), states.stored(3, 4, _as_range(positions))
    return encode(states[:, :3], codec), encode(states[positions, 3:], codec)


def _as_range(positions: Tensor) -> slice | Tensor:
    """Ascending positions as a slice where there is no gap between them."""
    if not len(positions):
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions


def remove_conversations(store: Store, entry: PartEntry, ids: set[str], key: str) -> PartEntry:
    """Write the part of `entry` anew without the conversations `ids`, commit it under `key`, delete its old files.

    Its files must be those of their checksums: what is written gets fresh ones, damage included.
    Killed in between, either the old part or the new one is committed, and `remove_orphans` deletes the rest.
    """
    table = pq.read_table(store.local(f"{PARTS}/{entry.files['rows']['name']}"))
    rows = [row for row in table.to_pylist() if row["conversation_id"] not in ids]
    samples = _stored_samples(store, entry, rows)
    gone = {*table["conversation_id"].to_pylist(), *(r["id"] for r in entry.rejects)} & ids
    finishes = Counter(row["finish_reason"] for row in rows)
    left = {
        **entry.__dict__,
        "key": key,
        "rows_in": entry.rows_in - len(gone),
        "conversations": len({row["conversation_id"] for row in rows}),
        "rejects": [r for r in entry.rejects if r["id"] not in ids],
        "cut_short": [r for r in entry.cut_short if r["id"] not in ids],
        "tokens": {
            "prompt": sum(len(row["prompt_ids"]) for row in rows),
            "answer": sum(len(row["answer_ids"]) for row in rows),
            "supervised": sum(sum(row["loss_mask"]) for row in rows),
        },
        "finish_reasons": dict(finishes),
    }
    done = commit_part(store, left, rows, samples, entry.files["states"] if entry.cleaned else None)
    for kind, file in entry.files.items():
        if file["name"] != done.files[kind]["name"]:
            store.forget_copy(f"{PARTS}/{file['name']}")
            store.delete(f"{PARTS}/{file['name']}")
    return done


def _stored_samples(store: Store, entry: PartEntry, rows: list[dict[str, Any]]) -> list[tuple[States, States]]:
    """States of `rows` as they are stored, so that nothing is quantised twice; of no width where they were cleaned."""
    places = [
        (
            row["aux_start"],
            len(row["prompt_ids"]) + len(row["answer_ids"]) - 1,
            row["teacher_start"],
            row["teacher_rows"],
        )
        for row in rows
    ]
    if entry.cleaned:
        return [(torch.empty(length, 0), torch.empty(count, 0)) for _, length, _, count in places]
    file = StatesFile.open(store, f"{PARTS}/{entry.files['states']['name']}")
    return [(file.rows("aux", a, a + length), file.rows("teacher", t, t + count)) for a, length, t, count in places]


def commit_part(
    store: Store, entry: dict[str, Any], rows: list[dict[str, Any]], samples: Sequence[tuple[States, States]],
    cleaned: dict[str, Any] | None = None, sync: bool = True,
) -> PartEntry:  # fmt: skip
    """Write the data files of a part, then its entry.

    Raises:
        UserError: the store is full or cannot be reached.
    """
    done = write_files(store, entry, rows, samples, cleaned, sync)
    write_entry(store, done, sync)
    return done


def write_files(
    store: Store, entry: dict[str, Any], rows: list[dict[str, Any]], samples: Sequence[tuple[States, States]],
    cleaned: dict[str, Any] | None = None, sync: bool = True,
) -> PartEntry:  # fmt: skip
    """Write the data files of a part; the states not where they are `cleaned`, a file that was. The part counts when
    its entry, which this returns, is written too.

    Without `sync` a local disk may still be taking the files when this returns: a killed process loses nothing by
    that, and after a power failure the checksum tells that the part is to be made again.

    Raises:
        UserError: the store is full or cannot be reached.
    """
    hidden, name = int(entry["hidden_size"]), part_name(entry["part"])
    entry = {"codec": "bf16", "compression": "none", "record": {}, **entry, "format_version": FORMAT_VERSION}
    about = {
        "format": "draftmill-states",
        "version": STATES_VERSION,
        "layers": entry["layers"],
        "convention": CONVENTION,
        "codec": entry["codec"],
        "compression": entry["compression"],
    }
    files = {
        "rows": _commit_file(store, name, "parquet", lambda f: pq.write_table(_sample_table(rows, samples), f), sync)
    }
    files["states"] = cleaned or _commit_file(
        store, name, "safetensors", lambda f: write_states(f, samples, hidden, about), sync
    )
    return PartEntry(**{**entry, "samples": len(rows), "files": files})


def drop_files(store: Store, entry: PartEntry) -> None:
    """Delete the data files of a part that is not to be committed."""
    for file in entry.files.values():
        store.delete(f"{PARTS}/{file['name']}")


def _sample_table(rows: list[dict[str, Any]], samples: Sequence[tuple[States, States]]) -> pa.Table:
    """SAMPLE_SCHEMA rows with where their states lie."""
    full, aux_start, teacher_start = [], 0, 0
    for row, (aux, teacher) in zip(rows, samples, strict=True):
        places = {"aux_start": aux_start, "teacher_start": teacher_start, "teacher_rows": len(teacher)}
        full.append({**row, **places, "num_tokens": len(row["prompt_ids"]) + len(row["answer_ids"])})
        aux_start, teacher_start = aux_start + len(aux), teacher_start + len(teacher)
    # Column by column: Arrow takes nested Python lists apart value by value, and the engine waits meanwhile.
    columns = [
        _lists([np.asarray(row[f.name]) for row in full], f.type.value_type)
        if pa.types.is_list(f.type)
        else pa.array([row[f.name] for row in full], f.type)
        for f in SAMPLE_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=SAMPLE_SCHEMA)


def write_entry(store: Store, entry: PartEntry, sync: bool = True) -> None:
    """Commit a part whose data files are in place."""
    store.write_json(f"{PARTS}/{part_name(entry.part)}.json", sealed(entry.__dict__), sync)


class _Hashed(io.RawIOBase):
    """Writes on to `file` and takes the checksum of what passes, beside the writing where that pays."""

    def __init__(self, file: BinaryIO, beside: ThreadPoolExecutor) -> None:
        self._file, self._beside, self.digest, self.size = file, beside, hasher(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size < _LARGE:
            self.digest.update(data)
            self._file.write(data)
        else:
            hashing = self._beside.submit(self.digest.update, data)
            self._file.write(data)
            hashing.result()
        self.size += size
        return size


def _commit_file(store: Store, name: str, suffix: str, write: Any, sync: bool = True) -> dict[str, Any]:
    """Write a data file beside its place, then name it by its checksum."""
    scratch = store.scratch() / f"{name}.{suffix}.tmp-{torch.randint(1 << 62, (1,)).item():x}"
    try:
        with explained(store.url), open(scratch, "wb") as file, ThreadPoolExecutor(1) as beside:
            hashed = _Hashed(file, beside)
            write(hashed)
        digest = hashed.digest.hexdigest()
        final = f"{name}-{digest[:8]}.{suffix}"
        store.put(scratch, f"{PARTS}/{final}", sync)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return {"name": final, "size": hashed.size, KIND: digest}


def read_entry(store: Store, part: int) -> PartEntry | None:
    """The commit entry of `part`, or None where it is absent, cut or none of ours. Older versions are read as they are.

    Raises:
        UserError: a newer draftmill made it.
    """
    path = f"{PARTS}/{part_name(part)}.json"
    data = unsealed(store.read_json(path))
    if data is None or data.get("part") != part:
        return None
    version = data.get("format_version")
    if not isinstance(version, int) or version < 1:
        return None
    if version > FORMAT_VERSION:
        raise UserError(
            f"{store.url}/{path} has format version {version} and this draftmill reads versions up to {FORMAT_VERSION};"
            " use a newer draftmill for this run folder"
        )
    if not _is_whole(data):
        return None
    try:
        return PartEntry(**data)
    except TypeError:
        return None


def _is_whole(data: dict[str, Any]) -> bool:
    """Whether the fields of an entry are what the program works with: `files` two files of this folder."""
    if not has_types(data, _ENTRY_TYPES) or data["files"].keys() != {"rows", "states"}:
        return False
    files = data["files"].values()
    if not all(_is_record(f) and _FILE_NAME.fullmatch(str(f.get("name"))) for f in files):
        return False
    faults = [*data["rejects"], *data["cut_short"]]
    if not all(isinstance(f, dict) and has_types(f, {"id": str, "reason": str}) for f in faults):
        return False
    return all(
        isinstance(n, int) for n in (*data["tokens"].values(), *data["finish_reasons"].values(), *data["layers"])
    )


def _is_record(value: Any) -> bool:
    """Whether `value` tells a file's size in bytes and a checksum."""
    return (
        isinstance(value, dict)
        and has_types(value, {"size": int})
        and any(isinstance(value.get(kind), str) for kind in KINDS)
    )


def entry_fault(store: Store, entry: PartEntry, key: str, verify: str) -> str | None:
    """Why `entry` does not count as done for work `key`, in words; None when it does."""
    if entry.key != key:
        return OTHER_INPUTS
    for kind, file in entry.files.items():
        if kind == "states" and entry.cleaned:
            continue
        path = f"{PARTS}/{file['name']}"
        size = store.size(path)
        if size is None:
            return f"{kind} file {file['name']} is missing"
        if size != file["size"]:
            return f"{kind} file {file['name']} has {size} bytes instead of {file['size']}"
        if verify == "checksum" and store.checksum(path, kind_of(file)) != checksum_of(file):
            return f"{kind} file {file['name']} does not match its checksum"
    return None


def entry_readers(store: Store) -> ThreadPoolExecutor:
    """Threads to read entries with; far away it is waiting, not work."""
    return ThreadPoolExecutor(8 if store.is_local else 64)


def committed_parts(store: Store, keys: dict[int, str], verify: str) -> tuple[dict[int, PartEntry], dict[int, str]]:
    """Split parts into valid entries and, for the rest that left traces, the reason they are made again.

    Args:
        keys: part number -> the key its entry must carry.
        verify: "checksum" or "size".
    """
    names = set(store.files(PARTS))

    def look(item: tuple[int, str]) -> tuple[int, PartEntry | None, str | None]:
        part, key = item
        if f"{part_name(part)}.json" not in names:
            return part, None, None
        entry = read_entry(store, part)
        if entry is None:
            return part, None, "its entry cannot be read"
        return part, entry, entry_fault(store, entry, key, verify)

    valid: dict[int, PartEntry] = {}
    bad: dict[int, str] = {}
    with entry_readers(store) as pool:
        for part, entry, fault in pool.map(look, sorted(keys.items())):
            if fault is not None:
                bad[part] = fault
            elif entry is not None:
                valid[part] = entry
    return valid, bad


def remove_orphans(store: Store, valid: dict[int, PartEntry] | None = None) -> int:
    """Delete data files and entries that no entry of `valid` names; returns their number.

    Without `valid` every readable entry counts: what a killed writer left goes, captures of other settings stay.
    """
    if store.is_local:
        for torn in store.scratch().glob("part-*.tmp-*"):  # of a writer that was killed
            torn.unlink(missing_ok=True)
    names = store.files(PARTS)
    if valid is None:
        numbers = [int(n[5:-5]) for n in names if n.startswith("part-") and n.endswith(".json") and n[5:-5].isdigit()]
        valid = {p: e for p in numbers if (e := read_entry(store, p)) is not None}
    wanted = {str(f["name"]) for e in valid.values() for f in e.files.values()}
    wanted |= {f"{part_name(p)}.json" for p in valid}
    orphans = [n for n in names if n not in wanted]
    for name in orphans:
        store.delete(f"{PARTS}/{name}")
    return len(orphans)
