"""Row alignment (CONTRACTS section 2) and packing: which state and token learn which token.

One document, prompt x0..x3 and answer x4..x9 (x9 ends it), so m = 0 0 0 0 1 1 1 1 1 1:

    row t           0   1   2   3   4   5   6   7   8      states exist for 0..T-2
    feature         g0  g1  g2  g3  g4  g5  g6  g7  g8     g_t = fc(s_a[t], s_b[t], s_c[t])
    step 0  embeds  x1  x2  x3  x4  x5  x6  x7  x8  x9     x_{t+1}
            learns  .   .   .   x5  x6  x7  x8  x9  .      x_{t+2}, teacher at t+1 = 4 5 6 7 8
    step 1  embeds  .   .   .   x5  x6  x7  x8  .   .      x_{t+2}
            learns  .   .   .   x6  x7  x8  x9  .   .      x_{t+3}, teacher at t+2 = 5 6 7 8
    step 4  learns  .   .   .   x9  .   .   .   .   .      x_{t+6}, teacher at t+5 = 8

Row t at step k reads the token, the teacher and the label of row t+k at step 0. So the embedding's share of
q/k/v, the teacher's probabilities and the labels are computed once per row and shared by all steps, and the
rows of step k are a subset of those of step k-1: the mask "all of m_{t+1} .. m_{t+2+k}" only shrinks with k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from app.codecs import Encoded, States, cat_rows
from app.errors import UserError


class TrainingSample(Protocol):
    """What packing reads of one engine request; T tokens, S positions where the teacher is read."""

    @property
    def sample_id(self) -> str: ...
    @property
    def token_ids(self) -> Tensor: ...  # [T] int64
    @property
    def loss_mask(self) -> Tensor: ...  # [T] bool, m_t
    @property
    def aux(self) -> States: ...  # [T-1, 3*Ht], low to high
    @property
    def teacher(self) -> States: ...  # [S, Ht], s_n before the final norm
    @property
    def teacher_pos(self) -> Tensor: ...  # [S] int64, ascending


def supervision_mask(loss_mask: Tensor, step: int) -> Tensor:
    """Rows that learn at unroll step `step`: all of m_{t+1} .. m_{t+2+step}.

    loss_mask [T] bool -> [T-1] bool over the rows t = 0..T-2.
    """
    rows, width = max(len(loss_mask) - 1, 0), step + 2
    mask = torch.zeros(rows, dtype=torch.bool)  # [T-1]
    if len(loss_mask) > width:
        windows = loss_mask[1:].bool().unfold(0, width, 1)  # [T-width, width]
        mask[: len(windows)] = windows.all(-1)
    return mask


@dataclass(frozen=True)
class Document:
    """Where a document lies in a pack: rows [start, end), the first that learns, its slots for queries."""

    start: int
    first: int
    end: int
    slot: int  # query row r of this document has slot `slot + r - first`


@dataclass(frozen=True)
class Pack:
    """Several documents end to end, without padding. R rows, N_k of them learning at step k.

    Rows after a document's last learning row are left out, documents that learn nothing too. States travel as they
    are stored and are decoded where they are used, on the training device.
    """

    next_ids: Tensor  # [R] int64, x_{t+1}
    positions: Tensor  # [R] int64, t in its own document
    aux: States  # [R, 3*Ht]
    teacher: States  # [N_0, Ht], s_n at t+1
    labels: Tensor  # [N_0] int64, x_{t+2} as the target's id
    rows: tuple[Tensor, ...]  # per step [N_k] int64: the rows that learn, ascending
    slots: tuple[Tensor, ...]  # per step [N_k] int64: their query slots
    carry: tuple[Tensor, ...]  # per step [N_k] int64: where row t stands among the N_{k-1} rows of the step before
    ahead: tuple[Tensor, ...]  # per step [N_k] int64: where row t+k stands among the N_0 rows of step 0
    cu_queries: Tensor  # [D+1] int32, slots of each document
    cu_rows: Tensor  # [D+1] int32, rows of each document
    documents: tuple[Document, ...]
    bounds: tuple[tuple[int, ...], ...]  # per step, N_0 + 1 numbers: how many of `ahead` are below i
    tokens: int  # of the whole documents
    embedded: Tensor | None = None  # [R, H] the embedding's rows of next_ids, where they were looked up before

    @property
    def counts(self) -> list[int]:
        """N_k by unroll step."""
        return [len(rows) for rows in self.rows]

    @property
    def num_slots(self) -> int:
        return sum(d.end - d.first for d in self.documents)

    def to(self, device: torch.device | str) -> Self:
        """The same pack on `device` (asynchronous from pinned memory)."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> Self:
        """The same pack in pinned memory."""
        return self._map(Tensor.pin_memory)

    def used_by(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of a pack that another stream copied until `stream` is done with it."""

        def record(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        self._map(record)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        mapped: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                mapped[f.name] = function(value)
            elif isinstance(value, Encoded):
                mapped[f.name] = value.map(function)
            elif isinstance(value, tuple) and value and isinstance(value[0], Tensor):
                mapped[f.name] = tuple(function(t) for t in value)
        return replace(self, **mapped)


def pack(samples: Sequence[TrainingSample], unroll_steps: int) -> Pack:
    """Concatenate `samples` and work out every index that the unrolled loss needs.

    Raises:
        UserError: a sample's states do not cover the positions its mask asks for.
    """
    next_ids, positions, aux, teacher, labels = [], [], [], [], []
    active: list[list[Tensor]] = [[] for _ in range(unroll_steps)]
    documents: list[Document] = []
    row = slot = tokens = 0
    for sample in samples:
        tokens += len(sample.token_ids)
        masks = [supervision_mask(sample.loss_mask, k) for k in range(unroll_steps)]
        learning = masks[0].nonzero().flatten()  # [n_0]
        if not len(learning):
            continue
        first, length = int(learning[0]), int(learning[-1]) + 1
        if len(sample.aux) < length:
            raise UserError(f"sample {sample.sample_id}: {len(sample.aux)} states for {length} rows; capture again")
        next_ids.append(sample.token_ids[1 : length + 1])
        positions.append(torch.arange(length))
        aux.append(sample.aux[:length])
        teacher.append(_teacher_at(sample, learning + 1))
        labels.append(sample.token_ids[learning + 2])
        for k, mask in enumerate(masks):
            active[k].append(mask.nonzero().flatten() + row)
        documents.append(Document(row, row + first, row + length, slot))
        row, slot = row + length, slot + length - first

    rows = [torch.cat(a) if a else torch.empty(0, dtype=torch.int64) for a in active]  # per step [N_k]
    slot_of = torch.zeros(row, dtype=torch.int64)  # [R]
    for d in documents:
        slot_of[d.first : d.end] = torch.arange(d.slot, d.slot + d.end - d.first)
    ahead = [torch.searchsorted(rows[0], r + k) for k, r in enumerate(rows)]
    before = [rows[0], *rows[:-1]]
    every = torch.arange(len(rows[0]) + 1)
    empty_states = torch.zeros(0, 0)
    return Pack(
        next_ids=_cat(next_ids),
        positions=_cat(positions),
        aux=cat_rows(aux) if aux else empty_states,
        teacher=cat_rows(teacher) if teacher else empty_states,
        labels=_cat(labels),
        rows=tuple(rows),
        slots=tuple(slot_of[r] for r in rows),
        carry=tuple(torch.searchsorted(b, r) for b, r in zip(before, rows, strict=True)),
        ahead=tuple(ahead),
        cu_queries=torch.tensor([d.slot for d in documents] + [slot], dtype=torch.int32),
        cu_rows=torch.tensor([d.start for d in documents] + [row], dtype=torch.int32),
        documents=tuple(documents),
        bounds=tuple(tuple(torch.searchsorted(a, every).tolist()) for a in ahead),
        tokens=tokens,
    )


def _teacher_at(sample: TrainingSample, wanted: Tensor) -> States:
    """s_n of `sample` at positions `wanted` [n] -> [n, Ht]."""
    index = torch.searchsorted(sample.teacher_pos, wanted)  # [n]
    found = index < len(sample.teacher_pos)
    found[found.clone()] = sample.teacher_pos[index[found]] == wanted[found]
    if not bool(found.all()):
        missing = int(wanted[~found][0])
        raise UserError(f"sample {sample.sample_id}: no teacher state at position {missing}; capture again")
    return sample.teacher[index]


def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts).long() if parts else torch.empty(0, dtype=torch.int64)
