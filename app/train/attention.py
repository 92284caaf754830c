"""Attention of the unrolled draft: step-0 keys of rows <= t of the document, and the row's later keys.

The two parts are merged by their log-sum-exp, and one backward serves both: with the merged output O and the
merged log-sum-exp m, P = exp(S - m) and dS = P * (dO V^T - rowsum(dO * O)) hold for every key, of either
part. So a flash kernel's own backward, given O and m, returns the exact gradients of its part (as in ring
attention), and no [L, L] matrix is ever kept: memory grows with the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from app.train.alignment import Pack
from app.train.fusion import fused_on_gpu

# Queries scored at once on the path without a flash kernel: [heads, n, L] scores live for a moment, and no more of them
# than SCORE_ELEMENTS.
QUERY_BLOCK = 512
SCORE_ELEMENTS = 2**26


def attend(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, pack: Pack, step: int
) -> Tensor:
    """Softmax attention of the learning rows of unroll step `step`, scale 1/sqrt(head_dim).

    q [N_k, heads, d], keys and values of step 0 [R, kv, d], own keys and values of steps 1..k [k, N_k, kv,
    d], all rotated already. Query head h reads key head h // (heads / kv). -> [N_k, heads, d].
    """
    out: Tensor = _Attend.apply(q, keys, values, own_keys, own_values, pack, step)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, own_k: Tensor, own_v: Tensor, pack: Pack, step: int
    ) -> Tensor:
        slots = pack.slots[step]  # [N_k]
        dense_q = _spread(q, slots, pack.num_slots)  # [slots, heads, d]
        dense_out, dense_lse, flash = _documents_forward(
            dense_q, keys, values, pack
        )  # [slots, heads, d], [heads, slots]
        whole = len(slots) == pack.num_slots
        out = dense_out if whole else dense_out[slots]  # [N_k, heads, d]
        if len(own_k):
            lse = (dense_lse if whole else dense_lse[:, slots]).T  # [N_k, heads]
            out, merged = _merge(q, own_k, own_v, out, lse)  # [N_k, heads, d], [N_k, heads]
            dense_lse = _put(dense_lse, slots, merged.T, whole)  # [heads, slots]
            dense_out = out if whole else dense_out.index_copy(0, slots, out)
        ctx.save_for_backward(dense_q, keys, values, own_k, own_v, dense_out, dense_lse, *flash)
        ctx.pack, ctx.step = pack, step
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad_outputs[0].contiguous()  # [N_k, heads, d]
        dense_q, keys, values, own_k, own_v, dense_out, dense_lse, *flash = ctx.saved_tensors
        pack, step = ctx.pack, ctx.step
        slots = pack.slots[step]  # [N_k]
        whole = len(slots) == pack.num_slots
        dense_grad = _spread(grad, slots, pack.num_slots)  # [slots, heads, d]
        dense_dq, dk, dv = _documents_backward(dense_grad, dense_q, keys, values, dense_out, dense_lse, flash, pack)
        dq = dense_dq if whole else dense_dq[slots]  # [N_k, heads, d]
        if not len(own_k):
            return dq, dk, dv, torch.zeros_like(own_k), torch.zeros_like(own_v), None, None
        q, out = (dense_q, dense_out) if whole else (dense_q[slots], dense_out[slots])
        lse = (dense_lse if whole else dense_lse[:, slots]).T  # [N_k, heads]
        own_dq, d_own_k, d_own_v = _own_gradients(grad, q, own_k, own_v, out, lse)
        return dq + own_dq, dk, dv, d_own_k, d_own_v, None, None


@fused_on_gpu
def _merge(q: Tensor, own_k: Tensor, own_v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Add a row's own keys to attention over step-0 keys.

    q and out [N, heads, d], lse [N, heads], own keys and values [k, N, kv, d] -> merged out and lse.
    """
    groups = (own_k.shape[2], -1)
    scores = _own_scores(q, own_k)  # [k, N, heads]
    merged = torch.logaddexp(lse, scores.logsumexp(0))  # [N, heads]
    share = torch.exp(scores - merged).to(q.dtype)  # [k, N, heads]
    own = share.unflatten(2, groups).unsqueeze(-1) * own_v.unsqueeze(3)  # [k, N, kv, g, d]
    kept = torch.exp(lse - merged).to(q.dtype).unsqueeze(-1)  # [N, heads, 1]
    return out * kept + own.sum(0).flatten(1, 2), merged


@fused_on_gpu
def _own_gradients(
    grad: Tensor, q: Tensor, own_k: Tensor, own_v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that pass through a row's own keys: of q [N, heads, d], own keys and own values [k, N, kv, d]."""
    groups, scale = (own_k.shape[2], -1), q.shape[-1] ** -0.5
    share = torch.exp(_own_scores(q, own_k) - lse)  # [k, N, heads]
    d_share = (grad.unflatten(1, groups) * own_v.unsqueeze(3)).sum(-1, dtype=share.dtype)  # [k, N, kv, g]
    ds = (share * (d_share.flatten(2) - _dot(grad, out)) * scale).to(q.dtype)  # [k, N, heads]
    ds, share = ds.unflatten(2, groups).unsqueeze(-1), share.to(q.dtype).unflatten(2, groups).unsqueeze(-1)
    dq = (ds * own_k.unsqueeze(3)).sum(0).flatten(1, 2)  # [N, heads, d]
    return dq, (ds * q.unflatten(1, groups)).sum(3), (share * grad.unflatten(1, groups)).sum(3)


def _documents_forward(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Causal attention inside each document: q [slots, heads, d], k and v [R, kv, d].

    Returns the output [slots, heads, d], its log-sum-exp [heads, slots] and what a flash backward needs
    besides.
    """
    if _use_flash(q):
        return _flash_forward(q, k, v, pack)
    scale, heads, kv = q.shape[-1] ** -0.5, q.shape[1], k.shape[1]
    out = torch.empty_like(q)  # [slots, heads, d]
    lse = q.new_empty(heads, len(q), dtype=_stat_dtype(q))  # [heads, slots]
    for block, key_rows, hidden in _blocks(pack, heads, q.device):
        queries = _by_key_head(q[block], kv) * scale  # [kv, g*n, d]
        scores = _masked_scores(queries, k[key_rows], hidden)  # [kv, g*n, L]
        top = scores.amax(-1, keepdim=True)  # [kv, g*n, 1]
        weights = scores.sub_(top).exp_()  # [kv, g*n, L]
        total = weights.sum(-1, keepdim=True, dtype=lse.dtype)  # [kv, g*n, 1]
        lse[:, block] = (total.log() + top).view(heads, -1)
        part = torch.bmm(weights, v[key_rows].transpose(0, 1)) / total.to(q.dtype)  # [kv, g*n, d]
        out[block] = part.view(heads, -1, q.shape[-1]).transpose(0, 1)
    return out, lse, []


def _documents_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, flash: list[Tensor], pack: Pack
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [slots, heads, d], k and v [R, kv, d] for the (merged) output and log-sum-exp."""
    if flash:
        return _flash_backward(grad, q, k, v, out, lse, flash, pack)
    scale, kv = q.shape[-1] ** -0.5, k.shape[1]
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = _dot(grad, out).T  # [heads, slots]
    for block, key_rows, hidden in _blocks(pack, q.shape[1], q.device):
        queries = _by_key_head(q[block], kv) * scale  # [kv, g*n, d]
        rounded = lse[:, block].to(q.dtype)  # [heads, n]
        rest = torch.exp(rounded - lse[:, block])  # [heads, n], puts back what rounding took from the lse
        upstream = _by_key_head(grad[block] * rest.T.unsqueeze(-1).to(q.dtype), kv)  # [kv, g*n, d]
        scores = _masked_scores(queries, k[key_rows], hidden)  # [kv, g*n, L]
        weights = scores.sub_(_stat_rows(rounded, scores)).exp_()  # [kv, g*n, L]
        dv[key_rows] += torch.bmm(weights.transpose(1, 2), upstream).transpose(0, 1)  # [L, kv, d]
        ds = torch.bmm(upstream, v[key_rows].permute(1, 2, 0))  # [kv, g*n, L]
        ds = ds.sub_(_stat_rows(delta[:, block] * rest, ds)).mul_(weights)  # [kv, g*n, L]
        dk[key_rows] += torch.bmm(ds.transpose(1, 2), queries).transpose(0, 1)  # [L, kv, d]
        part = torch.bmm(ds, k[key_rows].transpose(0, 1)) * scale  # [kv, g*n, d]
        dq[block] = part.view(q.shape[1], -1, q.shape[-1]).transpose(0, 1)
    return dq, dk, dv


def _blocks(pack: Pack, heads: int, device: torch.device) -> Any:
    """Blocks of n queries of a document: slots, rows they see, [n, n] True where the last n are hidden."""
    for d in pack.documents:
        size = max(1, min(QUERY_BLOCK, SCORE_ELEMENTS // (heads * (d.end - d.start))))
        for low in range(d.first, d.end, size):
            high = min(low + size, d.end)
            hidden = torch.ones(high - low, high - low, dtype=torch.bool, device=device).triu_(1)
            yield slice(d.slot + low - d.first, d.slot + high - d.first), slice(d.start, high), hidden


def _masked_scores(queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """queries [kv, g*n, d] x keys [L, kv, d] -> [kv, g*n, L], -inf at keys ahead of the query."""
    n = len(hidden)
    scores = torch.bmm(queries, keys.permute(1, 2, 0))  # [kv, g*n, L]
    scores.view(len(queries), -1, n, scores.shape[-1])[..., -n:].masked_fill_(hidden, float("-inf"))
    return scores


def _by_key_head(x: Tensor, kv: int) -> Tensor:
    """[n, heads, d] -> [kv, g*n, d], g query heads to a key head."""
    n, heads, d = x.shape
    return x.transpose(0, 1).reshape(kv, heads // kv * n, d)


def _stat_rows(x: Tensor, like: Tensor) -> Tensor:
    """[heads, n] -> [kv, g*n, 1] in the dtype of `like` [kv, g*n, L]."""
    return x.reshape(like.shape[0], like.shape[1], 1).to(like.dtype)


def _own_scores(q: Tensor, own_k: Tensor) -> Tensor:
    """q [N, heads, d] with own keys [k, N, kv, d] -> [k, N, heads] in at least fp32."""
    products = q.unflatten(1, (own_k.shape[2], -1)) * own_k.unsqueeze(3)  # [k, N, kv, g, d]
    return products.sum(-1, dtype=_stat_dtype(q)).flatten(2) * q.shape[-1] ** -0.5


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Rowwise product of [N, heads, d] summed over d in at least fp32 -> [N, heads]."""
    return (a * b).sum(-1, dtype=_stat_dtype(a))


def _spread(x: Tensor, slots: Tensor, size: int) -> Tensor:
    """Rows of x [N, ...] at their `slots` among `size`, zeros between."""
    return x.contiguous() if len(x) == size else x.new_zeros(size, *x.shape[1:]).index_copy_(0, slots, x)


def _put(x: Tensor, slots: Tensor, part: Tensor, whole: bool) -> Tensor:
    return part.contiguous() if whole else x.index_copy(1, slots, part)


def _stat_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# FlashAttention-2 as PyTorch ships it; bottom-right aligned causal masks and packed documents.


def _use_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, pack: Pack) -> tuple[Tensor, Tensor, list[Tensor]]:
    out, lse, rng, offset, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, pack.cu_queries, pack.cu_rows, *_longest(pack), 0.0, True, False, scale=q.shape[-1] ** -0.5
    )
    return out, lse, [rng, offset]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, flash: list[Tensor], pack: Pack
) -> tuple[Tensor, Tensor, Tensor]:
    rng, offset = flash
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, pack.cu_queries, pack.cu_rows, *_longest(pack), 0.0, True, rng, offset,
        scale=q.shape[-1] ** -0.5,
    )  # fmt: skip
    return dq, dk, dv


def _longest(pack: Pack) -> tuple[int, int]:
    return max(d.end - d.first for d in pack.documents), max(d.end - d.start for d in pack.documents)
