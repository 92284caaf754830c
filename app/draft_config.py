"""The draft's configuration: one typed object, many config.json layouts in, one full form out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from app.errors import UserError
from app.rope import Rope, rope_keys, rope_of_config
from app.target import default_aux_layers

Shape = tuple[int, ...]
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NUM_AUX = 3


class DraftConfig(BaseModel):
    """Shape and meaning of one EAGLE-3 draft layer (CONTRACTS sections 3 and 5).

    `aux_layer_ids` are in the k convention: the residual stream after k decoder layers of the target.
    `rope_scaling` is None for plain rotary embeddings, else a dict with `rope_type` and its parameters
    and without `rope_theta`. `dtype` is that of the weights in the checkpoint's file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int
    aux_layer_ids: tuple[int, int, int]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    @model_validator(mode="before")
    @classmethod
    def _canonical_rope(cls, values: Any) -> Any:
        """Equal settings compare equal, whatever spelling they came in."""
        if not isinstance(values, dict) or not isinstance(values.get("rope_scaling"), Mapping):
            return values
        rope = Rope.parse(values["rope_theta"], values["rope_scaling"], values["max_position_embeddings"])
        return {**values, "rope_scaling": rope.scaling}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, value in self:
            if type(value) is int and not name.endswith("token_id") and value < 1:
                raise UserError(f"draft config: {name} must be positive, not {value}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"draft config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"draft config: head_dim {self.head_dim} must be even for rotary embeddings")
        if self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"draft config: draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}"
            )
        a, b, c = self.aux_layer_ids
        if not 1 <= a < b < c:
            raise UserError(f"draft config: aux_layer_ids {list(self.aux_layer_ids)} must be three ascending ids >= 1")
        if self.rope_theta <= 0:
            raise UserError(f"draft config: rope_theta must be positive, not {self.rope_theta}")
        return self

    @property
    def rope(self) -> Rope:
        """Base and scaling of the rotary embedding, as trained."""
        return Rope(theta=self.rope_theta, scaling=self.rope_scaling)

    @property
    def has_vocab_map(self) -> bool:
        """True where the draft speaks a part of the target's vocabulary, so that d2t and t2d exist."""
        return self.draft_vocab_size != self.vocab_size

    def require_flags(self, supported: Sequence[str] = ()) -> None:
        """Refuse (UserError) norm flags that are on but not in `supported`: they change the draft's maths."""
        refused = [name for name in NORM_FLAGS if getattr(self, name) and name not in supported]
        if refused:
            raise UserError(
                f"this trainer cannot build a draft with {', '.join(refused)}: the weights would get another "
                "meaning than they were trained with; start from a draft without it"
            )

    def tensor_shapes(self, embed_tokens: bool = False) -> dict[str, tuple[Shape, torch.dtype]]:
        """Expected tensors of the file by root name: shape and dtype (CONTRACTS section 5).

        `d2t` and `t2d` are there only with a reduced vocabulary; `embed_tokens.weight` only if asked for.
        """
        h, ht, inner = self.hidden_size, self.target_hidden_size, self.intermediate_size
        q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, Shape] = {
            "fc.weight": (h, NUM_AUX * ht),
            "midlayer.self_attn.q_proj.weight": (q_size, 2 * h),
            "midlayer.self_attn.k_proj.weight": (kv_size, 2 * h),
            "midlayer.self_attn.v_proj.weight": (kv_size, 2 * h),
            "midlayer.self_attn.o_proj.weight": (h, q_size),
            "midlayer.mlp.gate_proj.weight": (inner, h),
            "midlayer.mlp.up_proj.weight": (inner, h),
            "midlayer.mlp.down_proj.weight": (h, inner),
            "midlayer.hidden_norm.weight": (h,),
            "midlayer.input_layernorm.weight": (h,),
            "midlayer.post_attention_layernorm.weight": (h,),
            "norm.weight": (h,),
            "lm_head.weight": (self.draft_vocab_size, h),
        }
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (NUM_AUX * ht,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (ht,) for i in range(NUM_AUX)}
        if embed_tokens:
            shapes["embed_tokens.weight"] = (self.vocab_size, h)
        weight_dtype: torch.dtype = getattr(torch, self.dtype)
        tensors = {name: (shape, weight_dtype) for name, shape in shapes.items()}
        if self.has_vocab_map:
            tensors["d2t"] = ((self.draft_vocab_size,), torch.int64)
            tensors["t2d"] = ((self.vocab_size,), torch.bool)
        return tensors

    def to_hf_config(self) -> dict[str, Any]:
        """The full config.json both engines read; every key of CONTRACTS section 5 is written out.

        The layer ids appear twice on purpose: vLLM reads the top-level ones (k) as they are, SGLang reads
        the nested ones (k - 1) and adds one. Both rotary forms hold the same values, because readers differ
        in which of them wins.
        """
        eos = self.eos_token_id
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            **rope_keys(self.rope),
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **{name: getattr(self, name) for name in NORM_FLAGS},
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [k - 1 for k in self.aux_layer_ids],
                "use_aux_hidden_state": True,
                "norm_before_fc": self.norm_before_fc,
            },
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": self.dtype,
            "use_cache": True,
        }

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        tensor_shapes: Mapping[str, Sequence[int]] | None = None,
        target_num_layers: int | None = None,
    ) -> Self:
        """Parse a draft's config.json in any of the layouts found in the wild.

        Accepted: our full form; ids only in `eagle_config` (j = k - 1); speculators' nesting
        (`transformer_layer_config`); rotary settings in `rope_parameters`, in `rope_theta`/`rope_scaling`
        or in both where they agree; null or absent ids when `target_num_layers` is given; absent `head_dim`,
        `draft_vocab_size` and `target_hidden_size` where `tensor_shapes` (root names) settle them.

        Raises UserError for a config that is not a single-layer Llama EAGLE-3 draft, for unknown or
        contradictory rotary settings, and for anything that would have to be guessed.
        """
        values = _parse(config, tensor_shapes or {}, target_num_layers)
        try:
            return cls(**values)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(str(part) for part in fault["loc"])
            raise UserError(f"draft config: {where}: {fault['msg']} (found {fault['input']!r})") from error


def _parse(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], target_num_layers: int | None
) -> dict[str, Any]:
    """Field values of DraftConfig from a foreign config; see `DraftConfig.from_hf_config`."""
    speculators = "transformer_layer_config" in config or "speculators_model_type" in config
    layer: Mapping[str, Any] = config
    if speculators:
        kind = config.get("speculators_model_type")
        if kind != "eagle3":
            raise UserError(f"draft config: speculators_model_type is {kind!r}; only 'eagle3' can be read")
        layer = config.get("transformer_layer_config") or {}
    eagle: Mapping[str, Any] = config.get("eagle_config") or {}
    _require_single_llama_layer(layer, eagle)

    def required(name: str) -> int:
        value = layer.get(name)
        if value is None:
            raise UserError(f"draft config: {name} is missing; add it to config.json")
        if type(value) is not int:
            raise UserError(f"draft config: {name} must be a whole number, not {value!r}")
        return value

    def rows(name: str) -> int | None:
        return int(shapes[name][0]) if name in shapes else None

    def number(value: Any, fallback: int) -> Any:
        return fallback if value is None else value

    hidden, heads, vocab = required("hidden_size"), required("num_attention_heads"), required("vocab_size")
    q_rows, head_rows = rows("midlayer.self_attn.q_proj.weight"), rows("lm_head.weight")
    fc_inputs = int(shapes["fc.weight"][1]) if "fc.weight" in shapes else NUM_AUX * hidden
    rope = rope_of_config(layer)
    flags = {name: bool(config.get(name, False)) for name in NORM_FLAGS}
    flags["norm_before_fc"] = bool(eagle.get("norm_before_fc", flags["norm_before_fc"]))
    if speculators:  # its readers take an absent flag as true
        flags["norm_before_residual"] = bool(config.get("norm_before_residual", True))
    eos = layer.get("eos_token_id")
    dtypes = [where.get(key) for where in (layer, config) for key in ("dtype", "torch_dtype")]
    head_dim = layer.get("head_dim")
    return {
        "hidden_size": hidden,
        "intermediate_size": required("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": number(layer.get("num_key_value_heads"), heads),
        "head_dim": _head_dim(hidden, heads, q_rows) if head_dim is None else head_dim,
        "rms_norm_eps": layer.get("rms_norm_eps", 1e-6),
        "vocab_size": vocab,
        "draft_vocab_size": number(config.get("draft_vocab_size"), number(head_rows, vocab)),
        "target_hidden_size": number(config.get("target_hidden_size"), fc_inputs // NUM_AUX),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "max_position_embeddings": required("max_position_embeddings"),
        "aux_layer_ids": _aux_layer_ids(config, eagle, target_num_layers),
        **flags,
        "bos_token_id": layer.get("bos_token_id"),
        "eos_token_id": tuple(eos) if isinstance(eos, list) else eos,
        "pad_token_id": layer.get("pad_token_id"),
        "dtype": next((str(dtype) for dtype in dtypes if dtype), "bfloat16").removeprefix("torch."),
    }


def _require_single_llama_layer(layer: Mapping[str, Any], eagle: Mapping[str, Any]) -> None:
    model_type = layer.get("model_type", "llama")
    if model_type != "llama":
        raise UserError(f"draft config: model_type {model_type!r}: only Llama-style drafts can be read")
    if layer.get("num_hidden_layers", 1) != 1:
        raise UserError(
            f"draft config: num_hidden_layers is {layer['num_hidden_layers']}; an EAGLE-3 draft has one "
            "(is this the target's config.json?)"
        )
    if layer.get("hidden_act", "silu") != "silu":
        raise UserError(f"draft config: hidden_act {layer['hidden_act']!r}; only 'silu' is supported")
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if layer.get(name):
            raise UserError(f"draft config: {name} is true; drafts with it are not supported")
    if eagle.get("use_aux_hidden_state") is False:
        raise UserError("draft config: eagle_config.use_aux_hidden_state is false: not an EAGLE-3 draft")


def _head_dim(hidden: int, heads: int, q_rows: int | None) -> int:
    """hidden // heads, the engines' fallback for an absent head_dim, only where q_proj proves it."""
    if q_rows is None:
        raise UserError("draft config: head_dim is missing and no q_proj weight settles it; add it to config.json")
    if hidden % heads or q_rows != hidden:
        raise UserError(
            f"draft config: head_dim is missing, and by q_proj's {q_rows} rows it is not hidden_size / heads "
            f"= {hidden}/{heads}: add head_dim {q_rows // heads} to config.json"
        )
    return hidden // heads


def _aux_layer_ids(
    config: Mapping[str, Any], eagle: Mapping[str, Any], target_num_layers: int | None
) -> tuple[int, ...]:
    """Layer ids in the k convention; nested ids are j = k - 1 (CONTRACTS sections 1 and 5)."""
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or [j + 1 for j in eagle.get(key) or []]
    if not ids:
        if target_num_layers is None:
            raise UserError(
                f"draft config: {key} is missing, so every engine would guess: write the ids the draft was trained with"
            )
        ids = default_aux_layers(target_num_layers)
    if len(ids) != NUM_AUX:
        raise UserError(f"draft config: {key} has {len(ids)} ids, expected {NUM_AUX}: {list(ids)}")
    return tuple(int(k) for k in ids)
