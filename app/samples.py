"""Reads committed parts as training samples: local parts mapped into memory, others by ranges.

Samples are drawn in random order over all parts. A copy of whole parts would be fetched again for every sample unless
the disk holds the whole run, so an object store is asked for the very bytes of a sample, many samples at once
(`StepLoader`); memory holds the coming steps, the headers of the files, and token ids of about `_CACHED_BYTES`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from app.codecs import States, decoded
from app.config import Config
from app.errors import UserError
from app.parts import PARTS, PartEntry, ingest_part_path, teacher_positions
from app.runfolder import RunFolder
from app.states import StatesFile
from app.storage import Store, explained

_CACHED_BYTES = 256 << 20  # of token ids and masks
_OPEN_FILES = 256  # states files whose header is kept
_OPENERS = 8  # parts looked at at once when a reader starts
_INDEX = ["sample_id", "conversation_id", "domain", "num_tokens", "teacher_rows"]  # what planning needs
_LISTS = ["prompt_ids", "answer_ids", "loss_mask", "sampling", "aux_start", "teacher_start"]  # what a sample needs more
T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One engine request with its states: T tokens, rows 0..T-2."""

    sample_id: str
    conversation_id: str
    domain: str
    split: str  # train | valid | holdout
    token_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    aux: States  # [T-1, 3H] s_a, s_b, s_c low to high, as they are stored
    teacher: States  # [S, H] s_n at teacher_pos
    teacher_pos: Tensor  # [S] int64, positions p with m_p and m_{p+1}
    greedy: bool  # sampled at temperature 0


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """What packing and splitting need, without the states."""

    sample_id: str
    conversation_id: str
    domain: str
    num_tokens: int  # T
    num_supervised: int  # teacher rows S


def assign_splits(conversation_ids: list[str], holdout: int, seed: int, validation_share: float) -> dict[str, str]:
    """Deterministic split by conversation: the `holdout` lowest hashes, then the validation share, the rest train.

    Independent of order and of the number of workers.

    Raises:
        UserError: nothing would be left to train on.
    """

    def rank(conversation_id: str) -> str:
        return hashlib.sha256(f"{seed}:{conversation_id}".encode()).hexdigest()

    ordered = sorted(set(conversation_ids), key=rank)
    left = len(ordered) - holdout
    if left < 1:
        raise UserError(
            f"evaluate.holdout keeps {holdout} conversations and only {len(ordered)} were generated;"
            " lower it or bring more prompts"
        )
    valid = round(left * validation_share)
    if valid == left:
        raise UserError(
            f"train.validation_share {validation_share:g} takes all {left} conversations that are not held out;"
            " lower it or bring more prompts"
        )
    split = dict.fromkeys(ordered[:holdout], "holdout")
    split |= dict.fromkeys(ordered[holdout : holdout + valid], "valid")
    return split | dict.fromkeys(ordered[holdout + valid :], "train")


class SampleReader:
    """Random access to the samples of committed parts, from several threads at once.

    Starts in O(parts) small reads: ids and counts, neither token ids nor masks nor states. Picklable by construction
    arguments.

    Args:
        store: the run folder.
        entries: commit entries, any order.
        split: conversation id -> split; samples of other conversations are left out.
        wanted: which splits to serve.
    """

    def __init__(
        self,
        store: Store,
        entries: list[PartEntry],
        split: dict[str, str],
        wanted: tuple[str, ...] = ("train",),
    ) -> None:
        self._store = store
        self._entries: list[PartEntry] = []
        self._split, self._wanted = split, wanted
        self._rows: list[tuple[int, int]] = []  # (entry index, row in its table)
        self.infos: list[SampleInfo] = []
        self._lists: _Cache[pa.Table] = _Cache(_CACHED_BYTES, lambda table: int(table.nbytes))
        self._tables: _Cache[list[dict[str, Any]]] = _Cache(4, lambda table: 1)
        self._files: _Cache[StatesFile] = _Cache(_OPEN_FILES, lambda file: 1)
        self.extend(entries)

    def extend(self, entries: list[PartEntry]) -> None:
        """Serve the samples of more parts too, after those there are; nobody may read meanwhile."""
        added, first = sorted(entries, key=lambda e: e.part), len(self._entries)
        self._entries += added
        for number, table in enumerate(_of_parts(self._store, added, _INDEX), first):
            for row, values in enumerate(zip(*(column.to_pylist() for column in table.columns), strict=True)):
                if self._split.get(values[1]) in self._wanted:
                    self._rows.append((number, row))
                    self.infos.append(SampleInfo(*values))

    def by_part(self) -> list[int]:
        """Indices of all samples in the order of their parts, however they came."""
        return sorted(range(len(self)), key=lambda i: (self._entries[self._rows[i][0]].part, self._rows[i][1]))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """The Parquet row of sample `index` (SAMPLE_SCHEMA), its text included."""
        number, row = self._rows[index]
        return self._tables.get(number, lambda: _read(self._store, self._entries[number], None).to_pylist())[row]

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, its states as they are stored.

        Raises:
            UserError: its states are damaged or not its own.
        """
        return self._sample(index, lambda count: [(0, count)])

    def some_rows(self, index: int, most: int, stretches: int = 1) -> Sample:
        """As `self[index]`, with at most `most` rows of `aux` and of `teacher`, and no more is read.

        They are the first ones, or `stretches` of neighbours evenly apart, from the first row to the last;
        `teacher_pos` [at most `most`] goes with them.
        """
        return self._sample(index, lambda count: _stretches(count, most, stretches))

    def _sample(self, index: int, pick: Callable[[int], list[tuple[int, int]]]) -> Sample:
        """Sample `index` with the rows that `pick` chooses, as ranges, of so many as there are."""
        number, row = self._rows[index]
        entry, info = self._entries[number], self.infos[index]
        lists = self._lists.get(number, lambda: _read(self._store, entry, _LISTS))
        values = {name: lists.column(name)[row].as_py() for name in _LISTS[3:]}
        prompt, answer, mask = (_list_at(lists, name, row) for name in _LISTS[:3])
        loss_mask = torch.from_numpy(mask)  # [T]
        aux = (values["aux_start"], values["aux_start"] + info.num_tokens - 1)
        teacher = (values["teacher_start"], values["teacher_start"] + info.num_supervised)
        file = self._files.get(number, lambda: StatesFile.open(self._store, _path(entry, "states")))
        if len(mask) != info.num_tokens or file.bounds(row) not in (None, (aux, teacher)):
            raise UserError(
                f"sample {info.sample_id}: the states in {file.name} are not those of its tokens;"
                f" delete {PARTS}/part-{entry.part:05d}.json, and `draftmill generate` makes the part again"
            )
        read, positions = pick(info.num_supervised), teacher_positions(loss_mask)
        return Sample(
            sample_id=info.sample_id,
            conversation_id=info.conversation_id,
            domain=info.domain,
            split=self._split[info.conversation_id],
            token_ids=torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64)),
            loss_mask=loss_mask,
            aux=_rows_of(file, "aux", aux[0], pick(info.num_tokens - 1)),
            teacher=_rows_of(file, "teacher", teacher[0], read),
            teacher_pos=torch.cat([positions[a:b] for a, b in read]),
            greedy=json.loads(values["sampling"]).get("temperature", 1.0) == 0,
        )


class _Cache(Generic[T]):
    """The values used last, up to a total size; several threads may make one value twice, never wait for long."""

    def __init__(self, room: int, size: Callable[[T], int]) -> None:
        self._room, self._size, self._held = room, size, 0
        self._values: OrderedDict[int, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: int, make: Callable[[], T]) -> T:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self._held += self._size(value)
            while self._held > self._room and len(self._values) > 1:
                self._held -= self._size(self._values.popitem(last=False)[1])
        return value


def _stretches(count: int, most: int, number: int) -> list[tuple[int, int]]:
    """`number` ranges of 0 .. count-1 evenly apart, together at most `most` long; all of it where that is no more."""
    if count <= most:
        return [(0, count)]
    length = most // number
    return [(int(a), int(a) + length) for a in np.linspace(0, count - length, number)]


def _rows_of(file: StatesFile, kind: str, first: int, ranges: list[tuple[int, int]]) -> States:
    """Rows of a sample whose states begin at row `first`: as they are stored where they lie together, else decoded."""
    parts = [file.rows(kind, first + a, first + b) for a, b in ranges]
    return parts[0] if len(parts) == 1 else torch.cat([decoded(part) for part in parts])


def _path(entry: PartEntry, kind: str) -> str:
    return f"{PARTS}/{entry.files[kind]['name']}"


def _read(store: Store, entry: PartEntry, columns: list[str] | None) -> pa.Table:
    """Columns of a part's rows, each in one piece; version 1 has no `num_tokens`, so it is counted."""
    with explained(store.url), store.fs.open(store.full(_path(entry, "rows")), "rb") as file:
        parquet = pq.ParquetFile(file)
        absent = columns is not None and "num_tokens" in columns and "num_tokens" not in parquet.schema_arrow.names
        if columns is None or not absent:
            return parquet.read(columns, use_threads=False).combine_chunks()
        lists = parquet.read(["prompt_ids", "answer_ids"], use_threads=False)
        lengths = pc.add(pc.list_value_length(lists["prompt_ids"]), pc.list_value_length(lists["answer_ids"]))
        table = parquet.read([c for c in columns if c != "num_tokens"], use_threads=False)
        return table.append_column("num_tokens", lengths).select(columns).combine_chunks()


def _of_parts(store: Store, entries: list[PartEntry], columns: list[str]) -> list[pa.Table]:
    """`columns` of each part, several parts at once."""
    with ThreadPoolExecutor(_OPENERS) as pool:
        return list(pool.map(lambda entry: _read(store, entry, columns), entries))


def _list_at(table: pa.Table, name: str, row: int) -> np.ndarray[Any, Any]:
    """A list of a row as an array of its own."""
    values = table.column(name)[row].values
    array: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
    return array


def conversation_ids(store: Store, entries: list[PartEntry]) -> list[str]:
    """Every conversation with at least one sample."""
    ids: set[str] = set()
    for table in _of_parts(store, entries, ["conversation_id"]):
        ids.update(table.column(0).to_pylist())
    return sorted(ids)


def planned_ids(store: Store) -> list[str]:
    """Every conversation of the finished ingest stage, whether it is answered yet or not."""
    manifest = RunFolder(store.url, store.options).manifest("ingest")
    if manifest is None:
        raise UserError(f"{store.url}: stage ingest has not run yet; run `draftmill ingest` first")

    def ids(part: int) -> list[str]:
        with explained(store.url), store.fs.open(store.full(ingest_part_path(part)), "rb") as file:
            return list(pq.ParquetFile(file).read(["id"], use_threads=False).column(0).to_pylist())

    with ThreadPoolExecutor(_OPENERS) as pool:
        return sorted(i for part in pool.map(ids, range(int(manifest.counts["parts"]))) for i in part)


def load_split(store: Store, entries: list[PartEntry], config: Config) -> dict[str, str]:
    """The split this configuration makes of the committed conversations; with `train.start_after` of all that are to be
    answered, so that it is the same before and after the last answer."""
    whole = config.train.start_after is not None
    return assign_splits(
        planned_ids(store) if whole else conversation_ids(store, entries),
        config.evaluate.holdout,
        config.evaluate.holdout_seed,
        config.train.validation_share,
    )
