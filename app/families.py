"""What differs between families of targets, read from their config.json: the norm, the logits, and the draft's default.

No list of supported models: every rule reads the keys that a family's config has. What no key tells is a short
table by `model_type` (as the language model's own config names it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import UserError
from app.rope import Rope, draft_rope

# Gain stored as (1 + w): the Gemma form of RMSNorm, which Qwen3-Next and Qwen3.5 took over. Gemma 3n and 4 store w.
_PLUS_ONE_NORM = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_next"}
    | {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
)
_EPS = ("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon", "norm_eps")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_MLA_HEAD_DIM = 128
_MLA_KV_HEADS = 8


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft layer where the configuration names no others."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope: Rope


def draft_shape(config: Mapping[str, Any]) -> DraftShape:
    """The draft layer for a target of `config`: attention like the target's, a dense SwiGLU of its dense width.

    Latent attention (MLA) is no layer that a Llama draft has: there the draft takes the target's number of heads
    with the size of its values, at most 8 key-value heads, and plain rotary embeddings of the target's base.

    Raises:
        UserError: a size is not one whole number, or a rotary setting is unknown.
    """
    heads, hidden = whole(config, "num_attention_heads"), whole(config, "hidden_size")
    if is_latent(config):
        return DraftShape(
            num_attention_heads=heads,
            num_key_value_heads=math.gcd(_MLA_KV_HEADS, heads),
            head_dim=whole(config, "v_head_dim", _MLA_HEAD_DIM),
            intermediate_size=dense_width(config),
            rope=Rope(draft_rope(config).theta),
        )
    return DraftShape(
        num_attention_heads=heads,
        num_key_value_heads=whole(config, "num_key_value_heads", heads),
        head_dim=whole(config, "head_dim", hidden // heads),
        intermediate_size=dense_width(config),
        rope=draft_rope(config),
    )


def dense_width(config: Mapping[str, Any]) -> int:
    """Inner width of a dense MLP of the target; 4 H where it has only experts.

    Configs of mixtures of experts keep the experts' width in `moe_intermediate_size`; those without that key
    (gpt-oss, Mixtral, MiniMax) keep it in `intermediate_size`, and have no dense width to tell.
    """
    hidden = whole(config, "hidden_size")
    if config.get("intermediate_size_mlp"):  # Llama 4, whose intermediate_size is the experts'
        return whole(config, "intermediate_size_mlp")
    experts = max((config.get(key) or 0 for key in _EXPERTS), default=0)
    if experts > 1 and not config.get("moe_intermediate_size"):
        return 4 * hidden
    return whole(config, "intermediate_size", 4 * hidden)


def is_latent(config: Mapping[str, Any]) -> bool:
    """Whether the target's attention is latent (MLA: DeepSeek, Kimi)."""
    return bool(config.get("kv_lora_rank"))


def norm_is_plus_one(config: Mapping[str, Any]) -> bool:
    """Whether the final norm's gain is 1 + w."""
    return config.get("model_type") in _PLUS_ONE_NORM


def norm_eps(config: Mapping[str, Any]) -> float:
    """The final RMSNorm's epsilon.

    Raises:
        UserError: the target's norm is a LayerNorm, which takes the mean away too.
    """
    value = next((config[key] for key in _EPS if config.get(key) is not None), None)
    if value is None and config.get("layer_norm_eps") is not None:
        raise UserError(
            f"targets of model_type {config.get('model_type')!r} end in a LayerNorm;"
            " draftmill reads targets whose final norm is an RMSNorm"
        )
    return float(value) if value is not None else 1e-6


def logit_scale(config: Mapping[str, Any]) -> float:
    """The factor on the head's output: Cohere and Llama forks multiply, Granite divides, MiniCPM scales by width."""
    scale = float(config.get("logit_scale") or 1.0)
    if config.get("logits_scaling"):
        scale /= float(config["logits_scaling"])
    if config.get("model_type") == "minicpm" and config.get("dim_model_base"):
        scale *= float(config["dim_model_base"]) / whole(config, "hidden_size")
    return scale


def whole(config: Mapping[str, Any], key: str, fallback: int | None = None) -> int:
    """One whole number of a config.

    Raises:
        UserError: it is missing and has no `fallback`, or differs from layer to layer.
    """
    value = config.get(key)
    if value is None:
        if fallback is None:
            raise UserError(f"the target's config.json has no {key!r}; this is not a decoder target")
        return fallback
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"the target's config.json has {key} {str(value)[:60]}; one whole number is needed")
    return value
