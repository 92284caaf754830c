"""The unrolled EAGLE-3 loss (CONTRACTS section 2), computed only where a loss is on.

`UnrolledLoss` equals `app.train.reference` in value and gradients. What it saves, all of it exact: rows that
learn nothing get `fc`, the norms, keys and values and nothing else; step k touches only the rows whose mask
is on at k; the embedding's share of q/k/v and the teacher's probabilities are computed once per position and
shared by all steps; head and loss run over chunks of rows and make their gradients on the way, so that no
[rows, Vd] tensor outlives its chunk and no logit is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.codecs import decoded
from app.target import TargetHead
from app.train.alignment import Pack
from app.train.attention import attend
from app.train.draft import CastDraft, Eagle3Draft, rotate
from app.train.objective import Buffer, Distribution, Objective, row_losses
from app.train.recompute import made_again
from app.train.weights import add_product

# Logits alive at once, in elements: a chunk's [rows, Vd]. Larger chunks add up lm_head's gradient less often.
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**27}


@dataclass(frozen=True)
class StepStats:
    """Sums by unroll step, so that packs and ranks add up: four tensors [K] fp64 on the draft's device."""

    rows: Tensor  # supervised rows
    loss: Tensor  # sum of the rows' losses
    hits: Tensor  # rows whose top draft token is the emitted token
    alpha: Tensor  # sum of the rows' acceptance where the objective measures it (`Objective.measures_alpha`), else 0

    @classmethod
    def zeros(cls, unroll_steps: int, device: torch.device) -> StepStats:
        return cls(*torch.zeros(4, unroll_steps, dtype=torch.float64, device=device))

    def __add__(self, other: StepStats) -> StepStats:
        return StepStats(
            self.rows + other.rows, self.loss + other.loss, self.hits + other.hits, self.alpha + other.alpha
        )


class Teacher:
    """The target's distribution over the draft vocabulary; weights in the compute dtype."""

    def __init__(
        self, head: TargetHead, kept_ids: Tensor, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.head, self.dtype, self.device = head, dtype, torch.device(device)
        self.kept_ids = kept_ids.to(self.device)
        self.rows = head.lm_head[kept_ids.to(head.lm_head.device)].to(self.device, dtype)  # [Vd, Ht]
        self.gain = head.norm_weight.to(self.device)  # [Ht] fp32
        self._whole: Tensor | None = None

    def logits(self, s_n: Tensor) -> Tensor:
        """lm_head(final_norm(s_n)) over the kept rows: s_n [N, Ht] -> [N, Vd] fp32 (fp64 in fp64)."""
        return self._logits(s_n, self.rows, self._fresh)

    def distribution(
        self, s_n: Tensor, temperature: float = 1.0, measure_inside: bool = False, buffer: Buffer | None = None
    ) -> Distribution:
        """The teacher at s_n [C, Ht]. `measure_inside` computes the whole head where the vocabulary is a part of it.

        With `buffer` it lies in scratch memory, until the next call.
        """
        buffer = buffer or self._fresh
        if measure_inside and len(self.rows) < len(self.head.lm_head):
            whole = _cooled(self.whole_logits(s_n), temperature)  # [C, V]
            logits = whole.index_select(1, self.kept_ids)  # [C, Vd]
            inside = torch.exp(logits.logsumexp(-1) - whole.logsumexp(-1))  # [C]
        else:
            logits = _cooled(self._logits(s_n, self.rows, buffer), temperature)  # [C, Vd]
            inside = torch.ones_like(logits[:, 0])  # [C]
        probs = torch.softmax(logits, -1, out=buffer("teacher", len(logits), logits.shape[1], logits.dtype))  # [C, Vd]
        lse = logits.amax(-1) - probs.amax(-1).log()  # [C]
        return Distribution(probs, logits.mul_(probs).sum(-1) - lse, inside)

    def keep(self, s_n: Tensor) -> Tensor:
        """Where the target's first choice over all of V is in the draft vocabulary: [N, Ht] -> [N] bool."""
        top = [self.whole_logits(part).argmax(-1) for part in s_n.split(self.rows_at_once)]
        return torch.isin(torch.cat(top), self.kept_ids) if top else torch.zeros(0, dtype=torch.bool)

    def whole_logits(self, s_n: Tensor) -> Tensor:
        """lm_head(final_norm(s_n)) over all of V: s_n [N, Ht] -> [N, V], as `logits`."""
        if self._whole is None:
            self._whole = self.head.lm_head.to(self.device, self.dtype)  # [V, Ht]
        return self._logits(s_n, self._whole, self._fresh)

    @property
    def rows_at_once(self) -> int:
        """Positions whose logits over all of V fit the room of a chunk."""
        return max(1, CHUNK_ELEMENTS[self.device.type] // len(self.head.lm_head))

    def _fresh(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=self.device)

    def _logits(self, s_n: Tensor, rows: Tensor, buffer: Buffer) -> Tensor:
        wide = torch.promote_types(self.dtype, torch.float32)
        gain = self.gain + 1.0 if self.head.norm_plus_one else self.gain
        x = F.rms_norm(s_n.to(wide), gain.shape, gain.to(wide), self.head.norm_eps)  # [N, Ht]
        product = buffer("teacher product", len(x), len(rows), self.dtype)
        out = torch.mm(x.to(self.dtype), rows.T, out=product)  # [N, rows]
        if wide != self.dtype:
            out = buffer("teacher logits", len(out), out.shape[1], wide).copy_(out)
        if self.head.logit_scale != 1.0:
            out = out * self.head.logit_scale
        if self.head.logit_softcap is not None:
            out = torch.tanh(out / self.head.logit_softcap) * self.head.logit_softcap
        return out


def _cooled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, in place."""
    return logits if temperature == 1.0 else logits.div_(temperature)


class UnrolledLoss:
    """sum_k w^k * (sum over supervised rows of the objective's loss) / (their number in the global batch)."""

    def __init__(
        self, draft: Eagle3Draft, head: TargetHead, unroll_steps: int, step_decay: float,
        dtype: torch.dtype = torch.bfloat16, objective: Objective | None = None,
    ) -> None:  # fmt: skip
        """K = `unroll_steps`, w = `step_decay`, maths in `dtype`; the objective is forward KL by default."""
        self.draft, self.dtype = draft, dtype
        self.unroll_steps, self.step_decay = unroll_steps, step_decay
        self.objective = objective or Objective()
        self.teacher = Teacher(head, draft.kept_ids, dtype, draft.d2t.device)
        # Mean acceptance [K] fp64 of the optimiser step before, for an objective that adapts to it.
        self.alpha = torch.zeros(unroll_steps, dtype=torch.float64, device=self.teacher.device)
        self._buffers: dict[str, Tensor] = {}

    def keep(self, pack: Pack) -> Tensor | None:
        """Positions of `pack` whose rows count, [N_0] bool; None is all of them."""
        return self.teacher.keep(decoded(pack.teacher)) if self.objective.drop_out_of_vocab else None

    def adapt(self, alpha: Tensor, rows: Tensor) -> None:
        """Take the acceptance of a finished step: its sums and the supervised rows of the global batch, [K] each."""
        mean = alpha.to(self.alpha) / rows.to(self.alpha)  # [K], NaN where a step has no rows
        self.alpha = torch.where(mean.isfinite(), mean, self.alpha)

    def counts(self, pack: Pack, keep: Tensor | None = None) -> Tensor:
        """Supervised rows by unroll step [K] fp64, on the CPU: sum them over packs and ranks for the mean."""
        rows = pack.counts if keep is None else [int(keep[ahead].sum()) for ahead in pack.ahead]
        return torch.tensor(rows, dtype=torch.float64)

    def __call__(
        self, pack: Pack, counts: Tensor | None = None, keep: Tensor | None = None, again: int = 0, keeps: bool = False
    ) -> tuple[Tensor, StepStats]:
        """Loss of `pack` (scalar, differentiable once) and its statistics.

        counts [K]: supervised rows of the whole global batch, default this pack's own. With the global counts
        the losses and gradients of all packs of all ranks add up (a sum, not a mean) to those of one big
        batch. again: parts of the unroll that are made again in the backward pass (`unroll`); keeps: norms and
        activations are not.
        """
        if not pack.counts[0]:
            none = StepStats.zeros(self.unroll_steps, self.teacher.device)
            return none.loss.sum(), none
        own = self.counts(pack, keep)
        total = own if counts is None else counts
        weights = [self.step_decay**k / max(float(n), 1.0) for k, n in enumerate(total)]
        hidden = torch.cat(unroll(self.draft.cast(self.dtype, keeps), pack, again))  # [sum N_k, H], what lm_head reads
        labels, shares = self.draft.target_to_draft[pack.labels], self.objective.kl_share(self.alpha)
        job = _HeadJob(pack, self.objective, self.teacher, labels, weights, shares, keep, self._buffer)
        loss, sums = _HeadLoss.apply(hidden, self.draft.lm_head.weight, job)
        return loss, StepStats(sent(own.tolist(), own.dtype, sums.device), *sums.double())

    def _buffer(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Scratch memory that stays: fresh large tensors cost page faults on every step."""
        held = self._buffers.get(name)
        if held is None or len(held) < rows or held.shape[1] != columns or held.dtype != dtype:
            held = torch.empty(rows, columns, dtype=dtype, device=self.teacher.device)
            self._buffers[name] = held
        return held[:rows]


def unroll(draft: CastDraft, pack: Pack, again: int = 0) -> list[Tensor]:
    """What lm_head reads at every unroll step: per step [N_k, H] for the rows pack.rows[k].

    The first `again` of its 1 + K parts, what all steps read and then each step, are made again in the backward pass.
    """
    shared = made_again(_shared, draft, pack) if again else _shared(draft, pack)
    state = shared[-1]  # [N_0, H]
    own: tuple[Tensor, ...] = ()  # keys and values of the steps before
    outputs: list[Tensor] = []
    for k in range(len(pack.rows)):
        step = partial(made_again, _step) if k + 1 < again else _step
        output, state, *more = step(draft, pack, k, state, *shared[:-1], *own)
        own = (*own, *more)
        outputs.append(output)
    return outputs


def _shared(draft: CastDraft, pack: Pack) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the steps read: keys and values of step 0 [R, kv_heads, head_dim], the embedding's share of q, k and v
    [N_0, q + 2 kv], and the first state [N_0, H]."""
    queries, others = slice(0, draft.q_size), slice(draft.q_size, None)
    known = pack.embedded
    embedding = draft.embedding(pack.next_ids) if known is None else known.to(draft.dtype)  # [R, H]
    fused = draft.fuse(decoded(pack.aux))  # [R, H]
    embed_kv = draft.embed_qkv(embedding, others)  # [R, 2 kv]
    key, value = (embed_kv + draft.state_qkv(fused, others)).chunk(2, -1)  # [R, kv]
    keys = rotate(draft.heads(key), *draft.rotary(pack.positions))  # [R, kv_heads, head_dim]
    embed_q = draft.embed_qkv(take(embedding, pack.rows[0]), queries)  # [N_0, q]
    embed_qkv = torch.cat([embed_q, take(embed_kv, pack.rows[0])], -1)  # [N_0, q + 2 kv]
    return keys, draft.heads(value).contiguous(), embed_qkv, take(fused, pack.rows[0])


def _step(
    draft: CastDraft, pack: Pack, k: int, state: Tensor, keys: Tensor, values: Tensor, embed_qkv: Tensor, *own: Tensor
) -> tuple[Tensor, ...]:
    """Unroll step k: what lm_head reads, the next state [N_k, H] each, and from step 1 on the rows' own key and value
    [N_k, kv_heads, head_dim].

    state [N_{k-1}, H] (of step 0: [N_0, H]), own: what steps 1 .. k-1 gave as key and value, one after the other.
    """
    rotary = draft.rotary(pack.positions[pack.rows[k]] + k)
    query_size = draft.q_size
    more: tuple[Tensor, ...] = ()
    if k == 0:
        query = embed_qkv[:, :query_size] + draft.state_qkv(state, slice(0, query_size))  # [N_0, q]
        own_keys = own_values = keys.new_empty(0, 0, *keys.shape[1:])
    else:
        state = take(state, pack.carry[k])  # [N_k, H]
        qkv = take(embed_qkv, pack.ahead[k]) + draft.state_qkv(state)  # [N_k, q + 2 kv]
        key_size = (qkv.shape[1] - query_size) // 2
        query, key, value = qkv.split([query_size, key_size, key_size], -1)
        more = (rotate(draft.heads(key), *rotary), draft.heads(value).contiguous())  # [N_k, kv_heads, head_dim]
        own_keys, own_values = (torch.stack([*_carried(own[i::2], pack, k), more[i]]) for i in (0, 1))
    q = rotate(draft.heads(query), *rotary)  # [N_k, heads, head_dim]
    attended = attend(q, keys, values, own_keys, own_values, pack, k)  # [N_k, heads, head_dim]
    hidden = draft.finish(attended, state)  # [N_k, H]
    output = draft.head_input(hidden)  # [N_k, H]
    return output, draft.next_state(hidden, output), *more


def _carried(own: Sequence[Tensor], pack: Pack, k: int) -> list[Tensor]:
    """Of steps 1 .. k-1 what belongs to the rows of step k: own [N_j, ...] -> [N_k, ...] each."""
    found: list[Tensor] = []
    place = pack.carry[k]  # [N_k], among the rows of step k-1
    for j in range(len(own), 0, -1):
        found.append(take(own[j - 1], place))
        place = pack.carry[j][place]  # [N_k], among those of step j-1
    return found[::-1]


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of x, each at most once: the gradient is then a copy, not a sum."""
    out: Tensor = _Take.apply(x, index)
    return out


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy_(0, index, grads[0]), None


@dataclass(frozen=True)
class _HeadJob:
    pack: Pack
    objective: Objective
    teacher: Teacher
    labels: Tensor  # [N_0] int64 draft ids, -1 outside the draft vocabulary
    weights: list[float]  # per step, w^k / global count
    kl_shares: Tensor  # [K]
    keep: Tensor | None  # [N_0] bool
    buffer: Buffer

    def distribution(self, low: int, high: int) -> Distribution | None:
        """The teacher at positions low..high-1 of the pack, where the objective reads it."""
        if self.objective.loss == "cross_entropy":
            return None
        states = decoded(self.pack.teacher[low:high])  # [C, Ht]
        buffer = None if states.is_cuda else self.buffer
        return self.teacher.distribution(states, self.objective.temperature, self.objective.measures_alpha, buffer)

    def chunks(self, vocab: int, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
        """Teacher positions low..high-1 and the rows that read them [n] int64, among those of all steps."""
        pack = self.pack
        size = max(1, CHUNK_ELEMENTS[device.type] // (vocab * len(self.weights)))
        everything = torch.arange(sum(pack.counts), device=device).split(pack.counts)
        for low in range(0, pack.counts[0], size):
            high = min(low + size, pack.counts[0])
            at = [rows[bounds[low] : bounds[high]] for rows, bounds in zip(everything, pack.bounds, strict=True)]
            yield low, high, torch.cat(at)

    def scratch(self, name: str, rows: int, columns: int, like: Tensor) -> Tensor:
        """Memory for a chunk; a GPU's allocator has it at hand, and can use it elsewhere afterwards."""
        if like.is_cuda:
            return like.new_empty(rows, columns)
        return self.buffer(name, rows, columns, like.dtype)

    def cast(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        """`master` [Vd, H] in `dtype`."""
        if master.is_cuda or master.dtype == dtype:
            return master.to(dtype)
        return self.buffer("head", len(master), master.shape[1], dtype).copy_(master)


class _HeadLoss(torch.autograd.Function):
    """lm_head, the rows' losses and the gradients of both, chunk by chunk over teacher positions."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, master: Tensor, job: _HeadJob) -> tuple[Tensor, Tensor]:
        """hidden [sum N_k, H] compute dtype, master [Vd, H] fp32 -> loss, sums [3, K] (loss, hits, alpha)."""
        pack, vocab = job.pack, len(master)
        weight = job.cast(master, hidden.dtype)  # [Vd, H]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        wants_grad = any(ctx.needs_input_grad[:2])
        d_hidden = torch.empty_like(hidden) if wants_grad else hidden.new_empty(0)  # [sum N_k, H]
        d_weight: Tensor | None = None  # [Vd, H]
        step = _steps(pack.counts, hidden.device)  # [sum N_k]
        ahead = torch.cat(pack.ahead)  # [sum N_k]
        factors = sent(job.weights, wide, hidden.device)  # [K]
        scales, shares = factors[step] / job.objective.temperature, job.kl_shares[step]  # [sum N_k]
        if job.keep is not None:
            scales = scales * job.keep[ahead]
        measured = hidden.new_zeros(3, len(hidden), dtype=wide)  # [3, sum N_k] loss, hits, alpha
        for low, high, at in job.chunks(vocab, hidden.device):
            x = hidden[at]  # [n, H]
            logits = torch.mm(x, weight.T, out=job.scratch("logits", len(x), vocab, x))  # [n, Vd]
            rows = row_losses(
                job.objective, logits, ahead[at] - low, job.labels[low:high], job.distribution(low, high), shares[at],
                job.buffer,
            )  # fmt: skip
            alpha = torch.zeros_like(rows.loss) if rows.alpha is None else rows.alpha  # [n]
            measured[:, at] = torch.stack([rows.loss, rows.hits.to(wide), alpha])
            if wants_grad:  # `logits` are now the gradient of the logits
                scale = scales[at].to(hidden.dtype).unsqueeze(-1)  # [n, 1]
                d_weight = add_product(d_weight, logits.T, x * scale, master.dtype)  # [Vd, H]
                d_hidden[at] = torch.mm(logits, weight).mul_(scale)  # [n, H]
        ctx.save_for_backward(d_hidden, master.new_empty(0) if d_weight is None else d_weight)
        if job.keep is not None:
            measured = measured * job.keep[ahead]
        sums = torch.stack([part.sum(1) for part in measured.split(pack.counts, 1)], 1)  # [3, K]
        ctx.mark_non_differentiable(sums)
        return (sums[0] * factors).sum(), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        d_hidden, d_weight = ctx.saved_tensors  # scaled in place: a second copy would be alive with all activations
        return d_hidden.mul_(grads[0].to(d_hidden.dtype)), d_weight.mul_(grads[0].to(d_weight.dtype)), None


def _steps(counts: Sequence[int], device: torch.device) -> Tensor:
    """Of all steps' rows, one after the other, which step is theirs: [sum N_k] int64."""
    return torch.cat([torch.full((n,), k, device=device) for k, n in enumerate(counts)])


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device that does not wait for them: from pinned memory, as any other copy is made at once."""
    held = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return held.to(device, non_blocking=True)
