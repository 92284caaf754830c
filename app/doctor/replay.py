"""The exported draft in plain PyTorch, step by step as an engine serves it. It shares nothing with the trainer's
passes but the rotary frequencies.

A request is replayed whole: rows of the target's states fill the cache, and from each start a chain of k tokens is
drafted, fed with its own proposals, whose rows see the cache up to the start and their own chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from app.codecs import decoded
from app.draft_config import DraftConfig
from app.train.alignment import supervision_mask
from app.train.draft import Eagle3Draft, inverse_frequencies
from app.train.evaluate import EvaluationSample, GreedyDraft

_STARTS_AT_ONCE = 256


class StepDraft:
    """Proposals of a draft, a Proposer of app/train/evaluate.py.

    Args:
        config: the draft's shape.
        tensors: by root name, as exported; the embedding included.
    """

    def __init__(self, config: DraftConfig, tensors: Mapping[str, Tensor], device: str = "cpu") -> None:
        self.config = config
        self.t = {n: (x.float() if x.is_floating_point() else x).to(device) for n, x in tensors.items()}
        frequencies, self.scale = inverse_frequencies(config)
        self.frequencies = frequencies.to(device)  # [head_dim/2]
        offsets = self.t.get("d2t")
        rows = torch.arange(config.draft_vocab_size, device=device)
        self.said = rows if offsets is None else rows + offsets.long()  # [Vd] target ids

    @torch.no_grad()
    def __call__(self, samples: Sequence[EvaluationSample], k: int) -> list[Tensor]:
        """Per sample the proposals of its starts [n, k] int64 target ids."""
        return [self._request(sample, k) for sample in samples]

    def _request(self, sample: EvaluationSample, k: int) -> Tensor:
        device = self.frequencies.device
        starts = supervision_mask(sample.loss_mask, 0).nonzero().flatten().to(device)  # [n]
        if not len(starts):
            return torch.empty(0, k, dtype=torch.int64)
        rows = int(starts[-1]) + 1
        ids = sample.token_ids.to(device)
        state = self.combine(decoded(sample.aux[:rows]).to(device).float())  # [R, H]
        positions = torch.arange(rows, device=device)
        q, keys, values = self._qkv(ids[1 : rows + 1], state, positions)
        causal = positions.unsqueeze(0) <= positions.unsqueeze(1)  # [R, R]
        heads = range(0, rows, _STARTS_AT_ONCE)
        parts = [self._attend(q[i : i + _STARTS_AT_ONCE], keys, values, causal[i : i + _STARTS_AT_ONCE]) for i in heads]
        hidden = self._layer(torch.cat(parts), state)  # [R, H]
        chains = [self._chains(hidden[part], part, keys, values, k) for part in starts.split(_STARTS_AT_ONCE)]
        return torch.cat(chains).cpu()

    def _chains(self, state: Tensor, starts: Tensor, keys: Tensor, values: Tensor, k: int) -> Tensor:
        """Chains that begin at rows `starts` [n] with the layer's output there [n, H]: proposals [n, k]."""
        before = torch.arange(len(keys), device=keys.device).unsqueeze(0) <= starts.unsqueeze(1)  # [n, R]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        proposals = []
        for step in range(k):
            out = self._norm(state, "norm.weight")  # [n, H]
            proposals.append(self.said[F.linear(out, self.t["lm_head.weight"]).argmax(-1)])
            if step == k - 1:
                break
            fed = out if self.config.norm_output else state  # [n, H]
            q, key, value = self._qkv(proposals[-1], fed, starts + step + 1)
            own_keys.append(key)
            own_values.append(value)
            chain = (torch.stack(own_keys, 1), torch.stack(own_values, 1))  # [n, step+1, kv, d]
            state = self._layer(self._attend(q, keys, values, before, chain), fed)
        return torch.stack(proposals, 1)

    def combine(self, aux: Tensor) -> Tensor:
        """The three states of N rows [N, 3*Ht] as one [N, H]."""
        if self.config.norm_before_fc:
            aux = self._norm(aux, "input_norm.weight")
        if self.config.fc_norm:
            aux = torch.cat([self._norm(x, f"fc_norm.{i}.weight") for i, x in enumerate(aux.chunk(3, -1))], -1)
        return F.linear(aux, self.t["fc.weight"])

    def _qkv(self, tokens: Tensor, state: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [N], states [N, H], positions [N] -> q [N, heads, d], k and v [N, kv, d]."""
        embedded = self._norm(self.t["embed_tokens.weight"][tokens], "midlayer.input_layernorm.weight")
        x = torch.cat([embedded, self._norm(state, "midlayer.hidden_norm.weight")], -1)  # [N, 2H]
        split = [F.linear(x, self.t[f"midlayer.self_attn.{p}_proj.weight"]) for p in "qkv"]
        q, k, v = (y.unflatten(-1, (-1, self.config.head_dim)) for y in split)
        return self._rotate(q, positions), self._rotate(k, positions), v

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, chain: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """q [N, heads, d] over the cache [R, kv, d] where `seen` [N, R], and its own chain [N, j, kv, d] -> [N, q]."""
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        cached_k, cached_v = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)  # [R, heads, d]
        scores = torch.einsum("nhd,rhd->nhr", q, cached_k)  # [N, heads, R]
        scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        if chain is not None:
            own_k, own_v = (x.repeat_interleave(groups, 2) for x in chain)  # [N, j, heads, d]
            scores = torch.cat([scores, torch.einsum("nhd,njhd->nhj", q, own_k)], -1)
        weights = (scores * self.config.head_dim**-0.5).softmax(-1)  # [N, heads, R + j]
        mixed = torch.einsum("nhr,rhd->nhd", weights[..., : len(keys)], cached_v)
        if chain is not None:
            mixed = mixed + torch.einsum("nhj,njhd->nhd", weights[..., len(keys) :], own_v)
        return mixed.flatten(1)

    def _layer(self, attended: Tensor, state: Tensor) -> Tensor:
        """The rest of the layer: attended [N, q], state [N, H] -> [N, H] before the last norm."""
        residual = self._norm(state, "midlayer.hidden_norm.weight") if self.config.norm_before_residual else state
        x = residual + F.linear(attended, self.t["midlayer.self_attn.o_proj.weight"])  # [N, H]
        y = self._norm(x, "midlayer.post_attention_layernorm.weight")
        gate, up = (F.linear(y, self.t[f"midlayer.mlp.{p}_proj.weight"]) for p in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, self.t["midlayer.mlp.down_proj.weight"])

    def _norm(self, x: Tensor, gain: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.t[gain]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, n, d] turned by its positions [N]."""
        angles = positions.float().unsqueeze(-1) * self.frequencies  # [N, d/2]
        cos, sin = (f(angles).unsqueeze(1) * self.scale for f in (torch.cos, torch.sin))  # [N, 1, d/2]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def compare_orders(
    config: DraftConfig, tensors: Mapping[str, Tensor], samples: Sequence[EvaluationSample], k: int
) -> tuple[list[int], list[int]]:
    """By draft token, how many proposals of the trainer's pass equal those of `StepDraft`, and how many there are.

    Only chains that were fed the true tokens count: the trainer's pass knows no others.
    """
    draft = Eagle3Draft(config)
    draft.load_exported(dict(tensors))
    ours, engine = GreedyDraft(draft.eval(), torch.float32)(samples, k), StepDraft(config, tensors)(samples, k)
    equal, seen = [0] * k, [0] * k
    for sample, a, b in zip(samples, ours, engine, strict=True):
        for step, on in enumerate(_fed_the_truth(sample, b)):
            seen[step] += int(on.sum())
            equal[step] += int((a[on, step] == b[on, step]).sum())
    return equal, seen


def _fed_the_truth(sample: EvaluationSample, proposals: Tensor) -> list[Tensor]:
    """By draft token, the starts [n] whose chain was fed the true tokens up to it, and whose token is in the answer;
    proposals [n, k]."""
    starts = supervision_mask(sample.loss_mask, 0).nonzero().flatten()  # [n]
    on, found = torch.ones(len(starts), dtype=torch.bool), []
    for step in range(proposals.shape[1]):
        on = on & supervision_mask(sample.loss_mask, step)[starts]
        found.append(on)
        at = (starts + 2 + step).clamp(max=len(sample.token_ids) - 1)  # [n]
        on = on & (proposals[:, step] == sample.token_ids[at])
    return found
