"""The EAGLE-3 draft: one decoder layer over the target's hidden states (CONTRACTS section 3).

Parameters carry the checkpoint's own names (CONTRACTS section 5). Masters are fp32; `Eagle3Draft.cast` gives
the layer's maths in the compute dtype. The maths is vLLM's `LlamaDecoderLayer` of `llama_eagle3.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from app.draft_config import DraftConfig
from app.errors import UserError
from app.rope import Rope
from app.target import TargetHead
from app.train.fusion import fused_on_gpu
from app.train.recompute import norm, norm_linear, swiglu_linear
from app.train.weights import Weight, cast, cast_columns, linear

T = TypeVar("T")
# Standard deviation of an untrained draft's logits.
START_SPREAD = 1.6


class Norm(nn.Module):
    """RMSNorm gain [size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Attention(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=False)


class Mlp(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)


class Midlayer(nn.Module):
    def __init__(self, c: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size)
        self.hidden_norm = Norm(c.hidden_size)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = Norm(c.hidden_size)
        self.mlp = Mlp(c)


class FrozenEmbedding(nn.Module):
    """The target's embedding [V, H] in the target's own dtype; NaN until somebody loads it, never trained."""

    weight: Tensor

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.full((vocab_size, hidden_size), math.nan, dtype=torch.bfloat16))


class Eagle3Draft(nn.Module):
    """The draft's weights. What must be loaded (`embed_tokens`, `lm_head`) is NaN until it is."""

    d2t: Tensor  # [Vd] int64 offsets: target id = i + d2t[i]
    target_to_draft: Tensor  # [V] int64: draft id, -1 outside the draft vocabulary

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        h, ht = config.hidden_size, config.target_hidden_size
        self.config = config
        self.embed_tokens = FrozenEmbedding(config.vocab_size, h)
        if config.norm_before_fc:
            self.input_norm = Norm(3 * ht)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(ht) for _ in range(3))
        self.fc = nn.Linear(3 * ht, h, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = Norm(h)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        nn.init.constant_(self.lm_head.weight, math.nan)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("target_to_draft", torch.empty(0, dtype=torch.int64), persistent=False)
        self.set_vocabulary(torch.arange(config.draft_vocab_size))
        inv_freq, self.rope_scale = inverse_frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)  # [head_dim/2] fp32
        self.inv_freq: Tensor

    def forward(self, function: Callable[[], T]) -> T:
        """`function`, which reads the parameters: sharded ones are whole inside (app/train/sharding.py)."""
        return function()

    @property
    def kept_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, ascending [Vd] int64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_vocabulary(self, kept_ids: Tensor) -> None:
        """Take `kept_ids` [Vd] int64, strictly ascending target ids, as the meaning of the head's rows.

        Raises:
            UserError: another count than Vd, not ascending, or outside 0..V-1.
        """
        ids = kept_ids.to(self.d2t.device, torch.int64)
        c = self.config
        if len(ids) != c.draft_vocab_size:
            raise UserError(f"{len(ids)} kept ids for a draft vocabulary of {c.draft_vocab_size}")
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= c.vocab_size:
            raise UserError(f"kept ids must ascend within 0..{c.vocab_size - 1}; are these offsets (d2t)?")
        self.d2t = ids - torch.arange(len(ids), device=ids.device)
        self.target_to_draft = torch.full((c.vocab_size,), -1, device=ids.device)
        self.target_to_draft[ids] = torch.arange(len(ids), device=ids.device)

    @torch.no_grad()
    def init_from_target(self, head: TargetHead, kept_ids: Tensor) -> None:
        """Embedding and head rows from the target, and a start of `fc` and `norm` that suits them.

        The embedding stays bit-exact and frozen, the head's rows are those of `kept_ids` [Vd]. `fc` starts by
        passing the highest auxiliary state on, whose directions the head can already read. `norm` starts as
        one constant that gives logits a spread of about `START_SPREAD`: the target's own gain makes a draft
        that knows nothing yet sure of itself (on SmolLM2 its first loss is twice that of this start).

        Raises:
            UserError: the target's width is not the draft's: its embedding cannot be shared then.
        """
        c = self.config
        if head.embed_tokens.shape[1] != c.hidden_size or head.lm_head.shape[1] != c.hidden_size:
            raise UserError(
                f"the target's embedding is {head.embed_tokens.shape[1]} wide and the draft {c.hidden_size}: "
                "a draft shares its target's embedding, so give it the target's hidden size"
            )
        self.set_vocabulary(kept_ids)
        self.embed_tokens.weight = head.embed_tokens.clone().to(self.d2t.device)
        rows = head.lm_head[kept_ids.to(head.lm_head.device)].to(self.lm_head.weight)  # [Vd, H]
        self.lm_head.weight.copy_(rows)
        self.norm.weight.fill_(START_SPREAD / float(rows.norm(dim=-1).mean().clamp(min=1e-6)))
        if c.target_hidden_size == c.hidden_size:
            self.fc.weight.zero_()
            self.fc.weight[:, -c.hidden_size :].fill_diagonal_(1.0)

    @torch.no_grad()
    def remap_vocabulary(self, kept_ids: Tensor, head: TargetHead) -> None:
        """Change the draft vocabulary of a trained draft: shared tokens keep their rows.

        kept_ids [Vd] int64, same count as before. New tokens take the target's rows.
        """
        old_row = self.target_to_draft[kept_ids.to(self.d2t.device)]  # [Vd], -1 where new
        trained = self.lm_head.weight.detach().clone()  # [Vd, H]
        self.set_vocabulary(kept_ids)
        fresh = head.lm_head[kept_ids.to(head.lm_head.device)].to(trained)  # [Vd, H]
        self.lm_head.weight.copy_(torch.where((old_row >= 0).unsqueeze(-1), trained[old_row.clamp(min=0)], fresh))

    def export_state_dict(self) -> dict[str, Tensor]:
        """Tensors by checkpoint name: fp32 masters, the embedding as stored, `d2t` and `t2d` if mapped."""
        state = {name: p.detach().clone() for name, p in self.named_parameters()}
        state["embed_tokens.weight"] = self.embed_tokens.weight.clone()
        if self.config.has_vocab_map:
            state["d2t"] = self.d2t.clone()
            state["t2d"] = self.target_to_draft >= 0
        return state

    @torch.no_grad()
    def load_exported(self, state: dict[str, Tensor]) -> None:
        """Load what `export_state_dict` gave, or a checkpoint's tensors; the embedding may be absent.

        Raises:
            UserError: a tensor is missing or of another shape.
        """
        if self.config.has_vocab_map:
            if "d2t" not in state:
                raise UserError("the checkpoint has no d2t though its vocabulary is reduced")
            offsets = state["d2t"].to(self.d2t.device)
            self.set_vocabulary(offsets + torch.arange(len(offsets), device=offsets.device))
        for name, parameter in self.named_parameters():
            if name not in state or state[name].shape != parameter.shape:
                found = tuple(state[name].shape) if name in state else "nothing"
                raise UserError(f"checkpoint tensor {name}: expected {tuple(parameter.shape)}, found {found}")
            parameter.copy_(state[name])
        if "embed_tokens.weight" in state:
            self.embed_tokens.weight = state["embed_tokens.weight"].clone().to(self.d2t.device)

    def place(self, device: torch.device, embedding_device: torch.device) -> None:
        """Move the draft to `device`, its embedding to a device of its own."""
        weight = self.embed_tokens.weight
        self.embed_tokens.weight = weight.new_empty(0)
        self.to(device)
        self.embed_tokens.weight = weight.to(embedding_device)

    def check_loaded(self) -> None:
        """Raises UserError if any weight is NaN or infinite: something was not loaded, or training broke."""
        tensors = {**dict(self.named_parameters()), "embed_tokens.weight": self.embed_tokens.weight}
        bad = [name for name, t in tensors.items() if not bool(torch.isfinite(t).all())]
        if bad:
            raise UserError(f"the draft's {', '.join(bad)} holds NaN or infinity: never loaded, or training broke")

    def cast(self, dtype: torch.dtype, keeps: bool = False) -> CastDraft:
        """The layer's maths in `dtype`; gradients flow back to the fp32 masters.

        keeps: norms and activations wait for the backward pass in place of being made again in it.
        """
        layer = self.midlayer
        attention = layer.self_attn
        projections = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        qkv_embed, qkv_state = cast_columns(dtype, 2, *projections)
        return CastDraft(
            draft=self,
            dtype=dtype,
            fc=cast(dtype, self.fc.weight),
            qkv_embed=qkv_embed,
            qkv_state=qkv_state,
            o_proj=cast(dtype, attention.o_proj.weight),
            gate_up=cast(dtype, layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight),
            down=cast(dtype, layer.mlp.down_proj.weight),
            keeps=keeps,
        )


@dataclass(frozen=True)
class CastDraft:
    """The draft's layer in one dtype. N rows, H hidden, q = heads * head_dim, kv = kv_heads * head_dim.

    q/k/v = W concat(norm(embedding), norm(state)) splits into a share of the embedding and one of the state;
    the first depends on the token alone, so unroll steps that read the same token share it.
    """

    draft: Eagle3Draft
    dtype: torch.dtype
    fc: Weight  # [H, 3*Ht]
    qkv_embed: Weight  # [q + 2 kv, H]
    qkv_state: Weight  # [q + 2 kv, H]
    o_proj: Weight  # [H, q]
    gate_up: Weight  # [2 I, H]
    down: Weight  # [H, I]
    keeps: bool = False  # norms and activations (app/train/recompute.py)

    @property
    def q_size(self) -> int:
        return self.draft.config.num_attention_heads * self.draft.config.head_dim

    def _norm(self, x: Tensor, gain: Norm) -> Tensor:
        return norm(x, gain.weight, self.draft.config.rms_norm_eps, self.keeps)

    def _norm_linear(self, x: Tensor, gain: Norm, weight: Weight) -> Tensor:
        return norm_linear(x, gain.weight, weight, self.draft.config.rms_norm_eps, self.keeps)

    def fuse(self, aux: Tensor) -> Tensor:
        """g = fc(aux): aux [N, 3*Ht] -> [N, H]."""
        draft = self.draft
        x = aux.to(self.dtype)  # [N, 3*Ht]
        if draft.config.norm_before_fc:
            x = self._norm(x, draft.input_norm)
        if draft.config.fc_norm:
            parts = zip(x.chunk(3, -1), draft.fc_norm, strict=True)
            x = torch.cat([self._norm(p, n) for p, n in parts], -1)  # type: ignore[arg-type]
        return linear(x, self.fc)

    def embedding(self, ids: Tensor) -> Tensor:
        """Rows of the embedding: target ids [N] -> [N, H] on their device, wherever the embedding lies."""
        weight = self.draft.embed_tokens.weight  # [V, H]
        return weight[ids.to(weight.device)].to(ids.device, self.dtype)

    def embed_qkv(self, embedding: Tensor, part: slice = slice(None)) -> Tensor:
        """The embedding's share of q, k and v, or of a part of them: [N, H] -> [N, q + 2 kv]."""
        return self._norm_linear(embedding, self.draft.midlayer.input_layernorm, self.qkv_embed.part(part))

    def norm_state(self, state: Tensor) -> Tensor:
        """hidden_norm(state): [N, H] -> [N, H]."""
        return self._norm(state, self.draft.midlayer.hidden_norm)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [N] -> [N, 1, head_dim/2] each."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self.draft.inv_freq  # [N, head_dim/2]
        scale = self.draft.rope_scale
        return (angles.cos() * scale).to(self.dtype).unsqueeze(1), (angles.sin() * scale).to(self.dtype).unsqueeze(1)

    def heads(self, x: Tensor) -> Tensor:
        """[N, n * head_dim] -> [N, n, head_dim]."""
        return x.unflatten(-1, (-1, self.draft.config.head_dim))

    def state_qkv(self, state: Tensor, part: slice = slice(None)) -> Tensor:
        """The state's share of q, k and v, or of a part of them: [N, H] -> [N, q + 2 kv]."""
        return self._norm_linear(state, self.draft.midlayer.hidden_norm, self.qkv_state.part(part))

    def finish(self, attended: Tensor, state: Tensor) -> Tensor:
        """o_proj, residual, MLP: attended [N, heads, head_dim], state [N, H] -> [N, H] before `norm`."""
        layer = self.draft.midlayer
        residual = self.norm_state(state) if self.draft.config.norm_before_residual else state  # [N, H]
        x = residual + linear(attended.flatten(1), self.o_proj)  # [N, H]
        gate_up = self._norm_linear(x, layer.post_attention_layernorm, self.gate_up)  # [N, 2 I]
        return x + swiglu_linear(gate_up, self.down, self.keeps)  # [N, H]

    def head_input(self, hidden: Tensor) -> Tensor:
        """norm(hidden), what lm_head reads: [N, H] -> [N, H]."""
        return self._norm(hidden, self.draft.norm)

    def next_state(self, hidden: Tensor, head_input: Tensor) -> Tensor:
        """What the next unroll step takes as state [N, H]."""
        return head_input if self.draft.config.norm_output else hidden


@fused_on_gpu
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split form: x [N, n, head_dim], cos and sin [N, 1, head_dim/2] -> like x."""
    a, b = x.chunk(2, -1)  # [N, n, head_dim/2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def inverse_frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    """Rotary frequencies [head_dim/2] fp32 and the factor on cos and sin, as transformers computes them.

    Raises:
        UserError: a scaling whose frequencies depend on the sequence's length, or one nobody knows.
    """
    rope = Rope.parse(config.rope_theta, config.rope_scaling, config.max_position_embeddings)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim  # [head_dim/2]
    if rope.scaling is None:
        return 1.0 / rope.theta**exponents, 1.0
    kind = str(rope.scaling["rope_type"])
    if kind not in ("linear", "llama3", "yarn"):
        raise UserError(f"rope_type {kind!r} cannot be trained: it depends on the length; give the draft its own")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
    )
    settings.rope_parameters = {**rope.scaling, "rope_theta": rope.theta}
    settings.rope_theta, settings.rope_scaling = rope.theta, {**rope.scaling, "rope_theta": rope.theta}
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](settings, torch.device("cpu"))
    return inv_freq.float(), float(factor)
