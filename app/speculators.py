"""The speculators layout of a draft: config.json and tensor names as vLLM's speculators library writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from app.draft_config import NORM_FLAGS, DraftConfig
from app.lint.names import IDS, listed_name

# Keys of the flat form that describe the layer itself.
_LAYER_KEYS = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "rope_theta"),
    *("rope_scaling", "rope_parameters", "max_position_embeddings", "attention_bias", "attention_dropout"),
    *("mlp_bias", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)


@dataclass(frozen=True)
class Verifier:
    """The target as this layout names it: `vllm serve FOLDER` serves it with the draft."""

    name: str
    architecture: str
    num_draft_tokens: int


def speculators_config(config: DraftConfig, verifier: Verifier) -> dict[str, Any]:
    """The config.json of the layout; the layer ids are k, as vLLM reads them."""
    flat = config.to_hf_config()
    proposal = {"proposal_type": "greedy", "speculative_tokens": verifier.num_draft_tokens}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": verifier.name, "architectures": [verifier.architecture]},
        },
        "transformer_layer_config": {key: flat[key] for key in _LAYER_KEYS} | {"torch_dtype": config.dtype},
        **{key: flat[key] for key in ("draft_vocab_size", "target_hidden_size", IDS, *NORM_FLAGS, "torch_dtype")},
        "tie_word_embeddings": False,
    }


def speculators_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` by root name, under the names of the layout."""
    return {listed_name(name): tensor for name, tensor in tensors.items()}
