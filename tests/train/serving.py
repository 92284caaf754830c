"""A draft served as vLLM serves it: a KV cache, one row at a time, chains that start again from the target's states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from app.train.draft import Eagle3Draft
from tests.train.debug import FakeSample


@dataclass(frozen=True)
class Round:
    """One draft round: it starts at row `start`; proposals [k] target ids, logits [k, Vd], accepted ones."""

    start: int
    proposals: Tensor
    logits: Tensor
    accepted: int


class Server:
    """Keys and values of rows 0..n-1; nothing here is shared with training but the weights."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self.draft, self.cache = draft, list[tuple[Tensor, Tensor]]()

    def combine(self, aux: Tensor) -> Tensor:
        """The target's three states of one row [3*Ht] -> [H], in the order of vLLM's combine_hidden_states."""
        c, x = self.draft.config, aux.to(self.draft.fc.weight.dtype)
        if c.norm_before_fc:
            x = self._norm(x, self.draft.input_norm.weight)
        if c.fc_norm:
            gains = [self.draft.get_parameter(f"fc_norm.{i}.weight") for i in range(3)]
            x = torch.cat([self._norm(part, gain) for part, gain in zip(x.chunk(3), gains, strict=True)])
        return self.draft.fc(x)

    def row(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next row: target id and state [H] -> the state that a chain continues with [H], logits [Vd]."""
        c, layer, attention = self.draft.config, self.draft.midlayer, self.draft.midlayer.self_attn
        embedded = self._norm(self.draft.embed_tokens.weight[token].to(state.dtype), layer.input_layernorm.weight)
        normed = self._norm(state, layer.hidden_norm.weight)
        x = torch.cat([embedded, normed])
        position, d = len(self.cache), c.head_dim
        q = self._rotate(attention.q_proj(x).view(-1, d), position)  # [heads, d]
        self.cache.append((self._rotate(attention.k_proj(x).view(-1, d), position), attention.v_proj(x).view(-1, d)))
        groups = c.num_attention_heads // c.num_key_value_heads
        keys = torch.stack([k for k, _ in self.cache]).repeat_interleave(groups, 1)  # [rows, heads, d]
        values = torch.stack([v for _, v in self.cache]).repeat_interleave(groups, 1)
        weights = (torch.einsum("hd,shd->hs", q, keys) * d**-0.5).softmax(-1)
        attended = torch.einsum("hs,shd->hd", weights, values).flatten()
        hidden = (normed if c.norm_before_residual else state) + attention.o_proj(attended)
        y = self._norm(hidden, layer.post_attention_layernorm.weight)
        hidden = hidden + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
        out = self._norm(hidden, self.draft.norm.weight)
        return (out if c.norm_output else hidden), self.draft.lm_head(out)

    def chain(self, state: Tensor, logits: Tensor, k: int, forced: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """k proposals from the last row's output; its own rows leave the cache again. -> [k], [k, Vd].

        `forced` [k] feeds these tokens instead of the draft's own.
        """
        rows, proposals, seen = len(self.cache), [], []
        for step in range(k):
            best = logits.argmax()
            proposals.append(best + self.draft.d2t[best])
            seen.append(logits)
            if step < k - 1:
                state, logits = self.row(proposals[-1] if forced is None else forced[step], state)
        del self.cache[rows:]
        return torch.stack(proposals), torch.stack(seen)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + self.draft.config.rms_norm_eps) * gain

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        angle = position * self.draft.inv_freq  # [d/2]
        cos, sin = (f(angle).to(x.dtype) * self.draft.rope_scale for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@torch.no_grad()
def serve(
    draft: Eagle3Draft, sample: FakeSample, start: int, k: int, forced: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The draft round that starts at row `start`: proposals [k], logits [k, Vd]."""
    server = Server(draft)
    for t in range(start + 1):
        state, logits = server.row(sample.token_ids[t + 1], server.combine(sample.aux[t]))
    return server.chain(state, logits, k, forced)


@torch.no_grad()
def serve_answer(draft: Eagle3Draft, sample: FakeSample, answer: int, k: int, true_tokens: bool = False) -> list[Round]:
    """A request from its prompt to its end: prefill, then rounds, each from the target's states of what was accepted.

    answer: position of the first emitted token. A round accepts what equals the sample's tokens; as many tokens as
    that and the target's own one are then fed with the target's states, over the rows the chain had made.
    `true_tokens` feeds those to the chains, whatever the draft proposes.
    """
    ids, server, rounds = sample.token_ids, Server(draft), list[Round]()
    fed, last = 0, answer - 1  # rows in the cache, row whose output the next chain starts from
    while last + 2 < len(ids):
        for t in range(fed, last + 1):
            state, logits = server.row(ids[t + 1], server.combine(sample.aux[t]))
        fed, width = last + 1, min(k, len(ids) - last - 2)
        truth = ids[last + 2 : last + 2 + width]
        proposals, seen = server.chain(state, logits, width, truth if true_tokens else None)
        accepted = int((proposals == truth).long().cumprod(-1).sum())
        rounds.append(Round(last, proposals, seen, accepted))
        last += accepted + 1
    return rounds
