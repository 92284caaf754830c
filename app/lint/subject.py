"""What is checked: one draft's config in flat form, its tensors, and what is known of its target and training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from app.draft_config import NORM_FLAGS, NUM_AUX
from app.errors import UserError
from app.lint.difference import ABSENT, ENGINES, Difference
from app.lint.names import IDS, canonical_name
from app.rope import Rope, rope_of_config
from app.target import TargetInfo

# Keys of the speculators layout that stand outside its `transformer_layer_config`.
_OUTSIDE_THE_LAYER = (
    *("architectures", "draft_vocab_size", "target_hidden_size", IDS, "eagle_config"),
    *NORM_FLAGS,
    *("speculators_model_type", "speculators_config", "torch_dtype", "dtype"),
)
# What a reader of Llama configs takes where a key is absent.
_LLAMA_DEFAULTS: dict[str, int | float] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


@dataclass(frozen=True)
class Subject:
    """A draft to check. `raw` is config.json as it is, `tensors` are under the names of the file."""

    raw: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    target: TargetInfo | None = None
    target_embed: Tensor | None = None  # [V, H]
    trained_ids: Sequence[int] | None = None  # k, where known from elsewhere than the folder

    @property
    def is_speculators(self) -> bool:
        return "transformer_layer_config" in self.raw or "speculators_model_type" in self.raw

    @cached_property
    def config(self) -> dict[str, Any]:
        """The keys as in the flat layout, whichever layout the folder has."""
        if not self.is_speculators:
            return dict(self.raw)
        layer = self.raw.get("transformer_layer_config")
        outside = {key: self.raw[key] for key in _OUTSIDE_THE_LAYER if key in self.raw}
        return {**(layer if isinstance(layer, Mapping) else {}), **outside}

    @cached_property
    def by_root(self) -> dict[str, Tensor]:
        return {canonical_name(name): tensor for name, tensor in self.tensors.items()}

    def key(
        self,
        name: str,
        expected: Any,
        found: Any,
        fix: str,
        engines: tuple[str, ...] = ENGINES,
        warning: bool = False,
    ) -> Difference:
        """A difference in config key `name`."""
        inside = self.is_speculators and name.split(".")[0] not in _OUTSIDE_THE_LAYER
        where = f"config {'transformer_layer_config.' if inside else ''}{name}"
        said = ABSENT if found is None else str(found)
        return Difference(where, str(expected), said, fix, engines, "warning" if warning else "error")

    def whole(self, name: str) -> int | None:
        """Key `name` where it is a positive whole number."""
        value = self.config.get(name)
        return value if type(value) is int and value > 0 else None

    def rows(self, root: str, dim: int = 0) -> int | None:
        """Size of tensor `root` in dimension `dim`."""
        tensor = self.by_root.get(root)
        return tensor.shape[dim] if tensor is not None and tensor.dim() > dim else None

    @cached_property
    def inferred(self) -> dict[str, int]:
        """What the weights say of sizes that the config leaves out."""
        heads, attention = self.whole("num_attention_heads"), "midlayer.self_attn."
        q_rows, k_rows = self.rows(f"{attention}q_proj.weight"), self.rows(f"{attention}k_proj.weight")
        head_dim = self.whole("head_dim") or (q_rows // heads if q_rows and heads else None)
        fc_inputs = self.rows("fc.weight", 1)
        values = {
            "hidden_size": self.rows("norm.weight"),
            "intermediate_size": self.rows("midlayer.mlp.gate_proj.weight"),
            "head_dim": head_dim,
            "num_key_value_heads": k_rows // head_dim if k_rows and head_dim else None,
            "draft_vocab_size": self.rows("lm_head.weight"),
            "target_hidden_size": fc_inputs // NUM_AUX if fc_inputs else None,
            "vocab_size": self.rows("t2d") or self.rows("embed_tokens.weight"),
            "num_hidden_layers": 1,
        }
        return {name: value for name, value in values.items() if self.config.get(name) is None and value is not None}

    def fallback(self, name: str) -> tuple[str, int | float | None]:
        """What engines take where size `name` is absent: in words, and the value."""
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        if name == "head_dim":
            return "hidden_size / num_attention_heads", hidden // heads if hidden and heads else None
        others = {
            "num_key_value_heads": "num_attention_heads",
            "draft_vocab_size": "vocab_size",
            "target_hidden_size": "hidden_size",
        }
        if name in others:
            return others[name], self.whole(others[name])
        return f"{_LLAMA_DEFAULTS[name]}, Llama's default", _LLAMA_DEFAULTS[name]

    @cached_property
    def rope(self) -> Rope | None:
        """The rotary settings, or None where they cannot be read."""
        try:
            return rope_of_config(self.config)
        except (UserError, TypeError, ValueError, AttributeError):
            return None

    @cached_property
    def mended(self) -> dict[str, Any]:
        """`config` with the gaps and switches that the rules report closed, so that none hides the tensors."""
        out = {**self.config, **self.inferred, "num_hidden_layers": 1, "hidden_act": "silu"}
        out.setdefault("rms_norm_eps", _LLAMA_DEFAULTS["rms_norm_eps"])
        out.setdefault("max_position_embeddings", _LLAMA_DEFAULTS["max_position_embeddings"])
        out |= dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False)
        out[IDS], out["eagle_config"] = list(range(1, NUM_AUX + 1)), {}
        out["fc_norm"] = bool(out.get("fc_norm")) or "fc_norm.0.weight" in self.by_root
        out["norm_before_fc"] = self.norm_before_fc or "input_norm.weight" in self.by_root
        if self.rope is None:
            out = {key: value for key, value in out.items() if not key.startswith("rope_")}
        for name in ("transformer_layer_config", "speculators_model_type", "speculators_config"):
            out.pop(name, None)
        return out

    @property
    def nested(self) -> Mapping[str, Any]:
        """`eagle_config`, where there is one."""
        nested = self.config.get("eagle_config")
        return nested if isinstance(nested, Mapping) else {}

    @property
    def norm_before_fc(self) -> bool:
        """As engines read it: the nested key first."""
        return bool(self.nested.get("norm_before_fc", self.config.get("norm_before_fc", False)))
