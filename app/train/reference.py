"""The unrolled loss written down as CONTRACTS section 2 says it: dense, slow, one document, every row.

This is the definition that `app.train.loss` is tested against; nothing here is shared with the fast path
except the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from app.codecs import decoded
from app.target import TargetHead
from app.train.alignment import TrainingSample
from app.train.draft import Eagle3Draft
from app.train.objective import Objective


def reference_loss(
    draft: Eagle3Draft, head: TargetHead, samples: list[TrainingSample], unroll_steps: int, step_decay: float,
    objective: Objective | None = None, alpha: Sequence[float] | None = None,
) -> tuple[Tensor, list[dict[str, float]]]:  # fmt: skip
    """Loss of a batch of documents; per step the number of rows, mean loss, share of hits, mean acceptance.

    alpha: mean acceptance by step of the optimiser step before, for the hybrid of `lk`; default 0.
    """
    objective = objective or Objective()
    total = torch.zeros((), dtype=draft.fc.weight.dtype)
    report = []
    logits = [reference_logits(draft, s, unroll_steps) for s in samples]  # per document [K, T-1, Vd]
    for k in range(unroll_steps):
        rows, losses, hits, accepted = 0, total.new_zeros(()), 0, 0.0
        kl_share = math.exp(-objective.lk_eta * (alpha[k] if alpha else 0.0))
        for sample, by_step in zip(samples, logits, strict=True):
            kept = draft.kept_ids
            for t in range(len(sample.token_ids) - 1):
                window = sample.loss_mask[t + 1 : t + 3 + k]  # m_{t+1} .. m_{t+2+k}
                if len(window) < k + 2 or not bool(window.all()):
                    continue
                s_n = decoded(sample.teacher[sample.teacher_pos == t + 1 + k])  # [1, Ht]
                whole = head.logits(s_n)[0].to(total.dtype)  # [V]
                if objective.drop_out_of_vocab and int(whole.argmax()) not in kept:
                    continue
                token = int(sample.token_ids[t + 2 + k])
                loss, share = reference_row(objective, by_step[k, t], whole, kept, token, kl_share)
                losses = losses + loss
                accepted += share
                hits += int(kept[by_step[k, t].argmax()] == token)
                rows += 1
        total = total + step_decay**k * losses / max(rows, 1)
        sums = {"loss": float(losses.detach()), "hits": hits, "alpha": accepted}
        report.append({"rows": rows, **{name: value / max(rows, 1) for name, value in sums.items()}})
    return total, report


def reference_row(
    objective: Objective, logits: Tensor, teacher: Tensor, kept: Tensor, token: int, kl_share: float
) -> tuple[Tensor, float]:
    """Loss and acceptance of one row: draft logits [Vd], teacher logits over all [V], the emitted target id."""
    log_q = (logits / objective.temperature).log_softmax(-1)  # [Vd]
    mass = (teacher / objective.temperature).softmax(-1)[kept]  # [Vd] what speculative sampling accepts at most
    p = mass / mass.sum()  # [Vd] renormalised over the draft vocabulary
    alpha = torch.minimum(mass, log_q.exp()).sum()
    kl = (p * (p.log() - log_q)).sum()
    if objective.loss == "cross_entropy":
        places = (kept == token).nonzero().flatten().tolist()
        loss = -log_q[places[0]] if places else 0.0 * log_q.sum()
    elif objective.loss == "kl":
        loss = kl
    elif objective.lk_form == "log_alpha":
        loss = -alpha.log()
    else:
        loss = kl_share * kl + (1 - kl_share) * (1 - alpha)
    return loss, float(alpha.detach())


def reference_logits(draft: Eagle3Draft, sample: TrainingSample, unroll_steps: int) -> Tensor:
    """Draft logits of every row at every step, true tokens fed: [K, T-1, Vd]."""
    c, layer = draft.config, draft.midlayer
    dtype = draft.fc.weight.dtype
    ids = sample.token_ids
    rows = len(ids) - 1  # T-1

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps) * weight

    def rotary(x: Tensor, positions: Tensor) -> Tensor:  # x [rows, n, head_dim]
        angles = positions[:, None].float() * draft.inv_freq  # [rows, head_dim/2]
        cos = (torch.cat([angles, angles], -1).cos() * draft.rope_scale).to(dtype)[:, None]  # [rows, 1, head_dim]
        sin = (torch.cat([angles, angles], -1).sin() * draft.rope_scale).to(dtype)[:, None]
        turned = torch.cat([-x[..., c.head_dim // 2 :], x[..., : c.head_dim // 2]], -1)
        return x * cos + turned * sin

    groups = c.num_attention_heads // c.num_key_value_heads
    aux = decoded(sample.aux).to(dtype)  # [T-1, 3*Ht]
    if c.norm_before_fc:
        aux = norm(aux, draft.input_norm.weight)
    if c.fc_norm:
        aux = torch.cat(
            [norm(p, draft.get_parameter(f"fc_norm.{i}.weight")) for i, p in enumerate(aux.chunk(3, -1))], -1
        )
    state = F.linear(aux, draft.fc.weight)  # [T-1, H]
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()  # row t sees step-0 keys of rows <= t
    keys: list[Tensor] = []  # per step [T-1, heads, head_dim]
    values: list[Tensor] = []
    out = []
    for k in range(unroll_steps):
        shifted = ids[(torch.arange(rows) + 1 + k).clamp(max=rows)]  # x_{t+1+k}, repeated past the end
        embedded = norm(draft.embed_tokens.weight[shifted].to(dtype), layer.input_layernorm.weight)  # [T-1, H]
        normed = norm(state, layer.hidden_norm.weight)  # [T-1, H]
        residual = normed if c.norm_before_residual else state
        x = torch.cat([embedded, normed], -1)  # [T-1, 2H]
        at = torch.arange(rows) + k
        q = rotary(layer.self_attn.q_proj(x).unflatten(-1, (-1, c.head_dim)), at)  # [T-1, heads, head_dim]
        key = rotary(layer.self_attn.k_proj(x).unflatten(-1, (-1, c.head_dim)), at)
        value = layer.self_attn.v_proj(x).unflatten(-1, (-1, c.head_dim))
        keys.append(key.repeat_interleave(groups, 1))
        values.append(value.repeat_interleave(groups, 1))
        scores = [torch.einsum("thd,shd->hts", q, keys[0]).masked_fill(~causal, -torch.inf)]  # [heads, T-1, T-1]
        scores += [torch.einsum("thd,thd->ht", q, own)[..., None] for own in keys[1:]]  # [heads, T-1, 1] each
        weights = (torch.cat(scores, -1) * c.head_dim**-0.5).softmax(-1)  # [heads, T-1, T-1+k]
        attended = torch.einsum("hts,shd->thd", weights[..., :rows], values[0])  # [T-1, heads, head_dim]
        for j, own in enumerate(values[1:]):
            attended = attended + weights[..., rows + j].T[..., None] * own
        x = residual + layer.self_attn.o_proj(attended.flatten(1))  # [T-1, H]
        y = norm(x, layer.post_attention_layernorm.weight)
        x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))  # [T-1, H]
        head_input = norm(x, draft.norm.weight)  # [T-1, H]
        out.append(draft.lm_head(head_input))  # [T-1, Vd]
        state = head_input if c.norm_output else x
    return torch.stack(out)
