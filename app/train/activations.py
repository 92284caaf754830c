"""What a pass keeps for its backward pass, worked out from its rows, and how a budget for it is kept.

A pass is one pack of documents. Its gradient is the same whatever is kept, and a step's gradient the same however its
documents are shared out over passes. So a budget is kept in two ways, the cheaper one first:

1. documents share a pass only as long as all that it would keep fits;
2. of a document that is too large by itself, parts of the unroll are made again in the backward pass in place of being
   kept: what all steps read, then steps 0, 1, .. (`app.train.loss.unroll`), as many as it takes.

A part that is made again keeps its inputs: a state and one key and value of each row. Nothing grows with the square of
a document's length.

Where time is worth more than memory, on a CPU, a pass that fits with room to spare keeps more: norms and activations,
which are otherwise made again (app/train/recompute.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from app.config import TrainConfig
from app.draft_config import DraftConfig
from app.errors import UserError
from app.nodes import memory_of_host
from app.train.alignment import Pack, supervision_mask
from app.train.loss import CHUNK_ELEMENTS

GIB = 2**30
GPU_SHARE, HOST_SHARE = 0.9, 0.5  # of the memory that a training counts on
LEAST_ROOM = GIB
_STAT_BYTES = 4  # of a log-sum-exp


class SampleLength(Protocol):
    @property
    def sample_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_supervised(self) -> int: ...


@dataclass(frozen=True)
class Rows:
    """How many rows of a pass do what; those of its documents add up."""

    rows: int  # R
    slots: int  # from the first row of a document that learns to its last
    learning: tuple[int, ...]  # N_k

    @classmethod
    def of_pack(cls, pack: Pack) -> Rows:
        return cls(len(pack.next_ids), pack.num_slots, tuple(pack.counts))

    @classmethod
    def of_mask(cls, loss_mask: torch.Tensor, unroll_steps: int) -> Rows:
        """Of a document with mask [T]."""
        masks = [supervision_mask(loss_mask, k) for k in range(unroll_steps)]
        learning = masks[0].nonzero().flatten()  # [N_0]
        if not len(learning):
            return cls(0, 0, (0,) * unroll_steps)
        first, end = int(learning[0]), int(learning[-1]) + 1
        return cls(end, end - first, tuple(int(m.sum()) for m in masks))

    @classmethod
    def most(cls, tokens: int, supervised: int, unroll_steps: int) -> Rows:
        """No document of so many tokens, of which so many are supervised, has more."""
        return cls(tokens, tokens, (min(tokens, supervised),) * unroll_steps)

    def __add__(self, other: Rows) -> Rows:
        learning = tuple(a + b for a, b in zip(self.learning, other.learning, strict=True))
        return Rows(self.rows + other.rows, self.slots + other.slots, learning)


@dataclass(frozen=True)
class Activations:
    """Bytes of the passes of one draft; `width` is that of a value in the compute dtype, `steps` is K."""

    config: DraftConfig
    width: int
    steps: int
    budget: int  # bytes
    keeps_more: bool = False  # norms and activations too, of a pass where they fit

    @property
    def parts(self) -> int:
        """Of the unroll: what all steps read, and each step."""
        return 1 + self.steps

    def again(self, rows: Rows) -> int:
        """The fewest parts to make again so that a pass fits the budget; where it never does, those that need least."""
        needs = [self.need(rows, n) for n in range(self.parts + 1)]
        return next((n for n, need in enumerate(needs) if need <= self.budget), needs.index(min(needs)))

    def plan(self, rows: Rows) -> tuple[int, bool]:
        """Of a pass: how many parts are made again (`again`), and whether norms and activations are kept."""
        return self.again(rows), self.keeps_more and self.need(rows, 0) + self.more(rows) <= self.budget

    def fits_whole(self, rows: Rows) -> bool:
        """Whether a pass fits with nothing made again."""
        return self.need(rows, 0) <= self.budget

    def need(self, rows: Rows, again: int) -> int:
        """Bytes alive at once at the most, `again` parts being made again: what waits for the backward pass, and what
        is at work beside it. That is the head's input when the forward pass ends, then the gradients of the last step,
        and at last a step that is made again, when those after it are done with."""
        kept, last = self.kept(rows, again), again - 2  # the last step that is made again
        peaks = [kept + sum(rows.learning) * self.config.hidden_size * self.width]
        if again < self.parts:
            peaks.append(kept + self._gradients(rows, self.steps - 1))
        if last >= 0:
            done = sum(self._step(rows, k) for k in range(last + 1, self.steps))
            peaks.append(kept - done + self._step(rows, last) + self._gradients(rows, last))
        return max(peaks)

    def kept(self, rows: Rows, again: int) -> int:
        """Bytes that wait for the backward pass when the forward pass ends, weights left out."""
        c, n = self.config, rows.learning
        key = 2 * c.num_key_value_heads * c.head_dim  # and value
        query = c.num_attention_heads * c.head_dim
        values = rows.rows * key + sum(n) * c.hidden_size  # step 0's keys and values; the gradient of the head's input
        if again > 1:  # inputs of the steps: the embedding's share, states, keys and values of the steps before
            values += n[0] * (query + key + c.hidden_size)
            values += sum(n[k] for k in range(again - 2)) * c.hidden_size
            values += sum(n[k] for k in range(1, again - 2)) * key
        kept = values * self.width + (0 if again else self._shared(rows))
        return kept + sum(self._step(rows, k) for k in range(max(again - 1, 0), self.steps))

    def more(self, rows: Rows) -> int:
        """Bytes that norms and activations add to a pass when they are kept: x / rms(x) of each norm in at least fp32
        in place of x, what a product reads of it, and two activations of each row of the MLP."""
        c, wide = self.config, max(self.width, _STAT_BYTES)
        first, learning = rows.learning[0], sum(rows.learning)
        before_fc = rows.rows * (c.norm_before_fc + c.fc_norm)
        in_front = 2 * rows.rows + first + 2 * learning  # rows of norms that a product reads
        alone = learning * (1 + c.norm_before_residual)  # of those that none does
        units = 3 * c.target_hidden_size * before_fc + c.hidden_size * (in_front + alone)
        inverses = (1 + 2 * c.fc_norm) * before_fc + in_front + alone
        given_up = 3 * c.target_hidden_size * before_fc + c.hidden_size * (2 * rows.rows + first + 3 * learning)
        values = c.hidden_size * in_front + 2 * c.intermediate_size * learning - given_up
        return (units + inverses) * wide + values * self.width

    def _shared(self, rows: Rows) -> int:
        """Of what all steps read: the three states, in the compute dtype and normed, embedding, fused state, angles."""
        c = self.config
        states = 3 * c.target_hidden_size * (1 + c.norm_before_fc + c.fc_norm)
        values = rows.rows * (states + 2 * c.hidden_size + c.head_dim) + rows.learning[0] * c.hidden_size
        return values * self.width

    def _step(self, rows: Rows, k: int) -> int:
        """Of step k: three states and the MLP's input of each row, queries and outputs of its attention, own keys."""
        c, n = self.config, rows.learning[k]
        query = c.num_attention_heads * c.head_dim
        own = 2 * k * c.num_key_value_heads * c.head_dim
        values = n * (3 * c.hidden_size + 2 * c.intermediate_size + own + c.head_dim) + rows.slots * 2 * query
        if n != rows.slots:
            values += n * query
        return values * self.width + rows.slots * c.num_attention_heads * _STAT_BYTES

    def _gradients(self, rows: Rows, k: int) -> int:
        """At work in the backward pass of step k: the MLP's or the attention's, and those that add up over steps."""
        c, n = self.config, rows.learning[k]
        key, query = 2 * c.num_key_value_heads * c.head_dim, c.num_attention_heads * c.head_dim
        at_once = max(5 * c.intermediate_size + 3 * c.hidden_size, (4 + k) * query + 2 * k * key + 2 * c.hidden_size)
        return (n * at_once + rows.rows * key + rows.learning[0] * (query + key)) * self.width

    def require(self, infos: Sequence[SampleLength], max_tokens: int, said: str) -> None:
        """Whether every document fits alone; `said` names where the budget comes from.

        Raises:
            UserError: one does not; it says how large it is and what to set.
        """
        sizes = [(min(i.num_tokens, max_tokens), i.num_supervised) for i in infos]
        if self._least(max(tokens for tokens, _ in sizes), max(supervised for _, supervised in sizes)) <= self.budget:
            return
        needs = [self._least(*size) for size in sizes]
        worst = max(range(len(needs)), key=needs.__getitem__)
        if needs[worst] <= self.budget:
            return
        raise UserError(
            f"sample {infos[worst].sample_id} of {sizes[worst][0]:,} tokens needs {needs[worst] / GIB:.3g} GiB for its"
            f" activations, and the budget is {self.budget / GIB:.3g} GiB ({said}): set train.activation_gib to what it"
            " needs, train.max_document to cut documents, or a lower train.unroll_steps"
        )

    def _least(self, tokens: int, supervised: int) -> int:
        """Bytes of a document of so many tokens, of which so many are supervised, with as much made again as helps."""
        rows = Rows.most(tokens, supervised, self.steps)
        return min(self.need(rows, n) for n in range(self.parts + 1))


def room(train: TrainConfig, config: DraftConfig, device: torch.device, world: int, longest: int) -> int:
    """Bytes that a worker's memory leaves for activations, roughly: of a GPU what weights, moments, the teacher, inputs
    and logits leave; of a host the same of half its memory, shared by `world` workers. At least `LEAST_ROOM`.

    longest: tokens of the longest document.
    """
    if device.type == "cuda":
        memory = GPU_SHARE * torch.cuda.get_device_properties(device).total_memory
    else:
        memory = HOST_SHARE * memory_of_host().total / world
    return max(LEAST_ROOM, int(memory - fixed_bytes(train, config, device, world, longest)))


def fixed_bytes(train: TrainConfig, config: DraftConfig, device: torch.device, world: int, longest: int) -> float:
    """Bytes of a worker that do not depend on what a pass keeps."""
    c, width = config, getattr(torch, train.compute_dtype).itemsize
    shapes = c.tensor_shapes().items()
    trained = sum(math.prod(shape) for name, (shape, _) in shapes if name not in ("d2t", "t2d"))
    at_a_step = (width + 8) * trained  # the cast weights; gradients on their way, whole
    moments = 8 if train.optimizer_state == "fp32" else 2
    weights = (8 + moments) * trained / (world if train.shard else 1)  # fp32 masters, gradients, two moments
    frozen = width * c.draft_vocab_size * c.target_hidden_size
    if train.embedding_device == "gpu" or device.type == "cpu":
        frozen += 2 * c.vocab_size * c.hidden_size
    if train.loss == "lk" or train.out_of_vocab == "drop":
        frozen += width * c.vocab_size * c.target_hidden_size
    inputs = 2 * max(train.tokens_per_step / world, longest) * (4 * 2 * c.target_hidden_size)  # this step and the next
    return weights + at_a_step + frozen + inputs + 16 * CHUNK_ELEMENTS[device.type]
