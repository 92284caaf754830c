"""Reads committed parts as training samples, memory-mapped."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from torch import Tensor

from app.config import Config
from app.errors import UserError
from app.parts import PARTS, PartEntry, teacher_positions
from app.storage import Store


@dataclass(frozen=True)
class Sample:
    """One engine request with its states: T tokens, rows 0..T-2."""

    sample_id: str
    conversation_id: str
    domain: str
    split: str  # train | valid | holdout
    token_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool
    aux: Tensor  # [T-1, 3H] s_a, s_b, s_c low to high
    teacher: Tensor  # [S, H] s_n at teacher_pos
    teacher_pos: Tensor  # [S] int64, positions p with m_p and m_{p+1}
    greedy: bool  # sampled at temperature 0


@dataclass(frozen=True)
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
    """Random access to the samples of committed parts.

    Starts in O(parts); reads rows lazily, one memory-mapped shard at a time. Picklable by construction arguments.

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
        self._entries = sorted(entries, key=lambda e: e.part)
        self._split = split
        self._rows: list[tuple[int, int]] = []  # (entry index, row in its table)
        self.infos: list[SampleInfo] = []
        for number, entry in enumerate(self._entries):
            columns = ["sample_id", "conversation_id", "domain", "loss_mask", "teacher_rows"]
            table = pq.read_table(store.local(f"{PARTS}/{entry.files['rows']['name']}"), columns=columns)
            for row, values in enumerate(table.to_pylist()):
                if split.get(values["conversation_id"]) in wanted:
                    self._rows.append((number, row))
                    self.infos.append(
                        SampleInfo(
                            values["sample_id"],
                            values["conversation_id"],
                            values["domain"],
                            len(values["loss_mask"]),
                            values["teacher_rows"],
                        )
                    )
        self._tables: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()
        self._handles: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """The Parquet row of sample `index` (SAMPLE_SCHEMA)."""
        number, row = self._rows[index]
        table = self._tables.get(number)
        if table is None:
            name = self._entries[number].files["rows"]["name"]
            table = pq.read_table(self._store.local(f"{PARTS}/{name}")).to_pylist()
            _remember(self._tables, number, table, 16)
        return table[row]

    def __getitem__(self, index: int) -> Sample:
        number, _ = self._rows[index]
        row = self.row(index)
        handle = self._handles.get(number)
        if handle is None:
            name = self._entries[number].files["states"]["name"]
            handle = safe_open(str(self._store.local(f"{PARTS}/{name}")), "pt")
            _remember(self._handles, number, handle, 64)
        ids = torch.tensor(row["prompt_ids"] + row["answer_ids"], dtype=torch.int64)  # [T]
        mask = torch.tensor(row["loss_mask"], dtype=torch.bool)  # [T]
        a, t = row["aux_start"], row["teacher_start"]
        return Sample(
            sample_id=row["sample_id"],
            conversation_id=row["conversation_id"],
            domain=row["domain"],
            split=self._split[row["conversation_id"]],
            token_ids=ids,
            loss_mask=mask,
            aux=handle.get_slice("aux")[a : a + len(ids) - 1],
            teacher=handle.get_slice("teacher")[t : t + row["teacher_rows"]],
            teacher_pos=teacher_positions(mask),
            greedy=json.loads(row["sampling"]).get("temperature", 1.0) == 0,
        )


def _remember(cache: OrderedDict[int, Any], key: int, value: Any, size: int) -> None:
    cache[key] = value
    while len(cache) > size:
        cache.popitem(last=False)


def conversation_ids(store: Store, entries: list[PartEntry]) -> list[str]:
    """Every conversation with at least one sample."""
    ids: set[str] = set()
    for entry in entries:
        table = pq.read_table(store.local(f"{PARTS}/{entry.files['rows']['name']}"), columns=["conversation_id"])
        ids.update(table.column(0).to_pylist())
    return sorted(ids)


def load_split(store: Store, entries: list[PartEntry], config: Config) -> dict[str, str]:
    """The split this configuration makes of the committed conversations."""
    return assign_splits(
        conversation_ids(store, entries),
        config.evaluate.holdout,
        config.evaluate.holdout_seed,
        config.train.validation_share,
    )
