"""Tiny random targets of every family, in Hugging Face form: 8 layers, hidden 64, TINY's tokenizer.

Norm weights are far from their neutral value, so that a wrong convention (w for 1 + w, or the reverse) shows.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny import CHAT_TEMPLATE, MAX_POSITIONS, VOCAB, make_tokenizer

HIDDEN, LAYERS = 64, 8
_PLUS_ONE = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_QWEN_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_HYBRID = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}

# Class of transformers without its "ForCausalLM", and what its config says beyond _COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 32, **_ROPE}),
    "qwen2": ("Qwen2", {"num_attention_heads": 2, **_ROPE}),
    "qwen3": ("Qwen3", {"head_dim": 32, **_ROPE}),
    "qwen2_moe": ("Qwen2Moe", {**_QWEN_MOE, "shared_expert_intermediate_size": 64, "num_attention_heads": 2, **_ROPE}),
    "qwen3_moe": ("Qwen3Moe", {**_QWEN_MOE, "head_dim": 32, **_ROPE}),
    "qwen3_next": ("Qwen3Next", {**_QWEN_MOE, **_HYBRID, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5", {**_HYBRID, "rope_parameters": _MROPE}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_QWEN_MOE, **_HYBRID, "shared_expert_intermediate_size": 32, "rope_parameters": _MROPE},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "rope_parameters": {**YARN, "rope_theta": 150_000.0, "truncate": False},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**MLA, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "granite": (
        "Granite",
        {
            "logits_scaling": 4.0,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "num_attention_heads": 2,
            "tie_word_embeddings": True,
            **_ROPE,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "sliding_window": 16,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": ("Gemma3", {"head_dim": 32, "tie_word_embeddings": True}),
}


def make_family(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Write a random target of `family` under `folder` (bf16) and return it; the same seed gives the same bits."""
    name, settings = FAMILIES[family]
    tokenizer = make_tokenizer()
    config = _config(name)(
        **{
            **_COMMON,
            **settings,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            "pad_token_id": tokenizer.pad_token_id,
            **changes,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = getattr(transformers, f"{name}ForCausalLM")(config)
        spread(model, plus_one=config.model_type in _PLUS_ONE)
        if "linear_key_head_dim" in settings:
            calm(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def spread(model: torch.nn.Module, plus_one: bool = False) -> None:
    """Norm gains of 0.5 to 1.5; biases, sinks and the padding token's embedding that are not zero."""
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            low = -0.5 if plus_one and "linear_attn" not in name else 0.5
            parameter.data.uniform_(low, low + 1.0)
        elif name.endswith(("bias", "sinks")):
            parameter.data.normal_(0.0, 0.1)
        elif name.endswith("embed_tokens.weight"):
            empty = ~parameter.data.any(-1)
            parameter.data[empty] = parameter.data[~empty][: int(empty.sum())].flip(-1)


def calm(model: Any) -> None:
    """Let the layers add little to the token, so that the rounding of bf16 stays as small as in a trained model."""
    model.model.embed_tokens.weight.data *= 10.0
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            parameter.data *= 0.25


def _config(name: str) -> Any:
    for suffix in ("TextConfig", "Config"):
        if hasattr(transformers, name + suffix):
            return getattr(transformers, name + suffix)
    raise LookupError(name)


def make_kimi_k25(folder: Path, seed: int = 0) -> Path:
    """A target laid out as Kimi-K2.5: nested config, `language_model.` names, INT4 experts, shards, remote tokenizer.

    The language model is `deepseek_v3` of FAMILIES; its embedding, norms and head stay bf16, as does attention.
    """
    plain = make_family(folder / "plain", "deepseek_v3", seed, tie_word_embeddings=False)
    tensors = {f"language_model.{name}": t for name, t in load_file(plain / "model.safetensors").items()}
    text = json.loads((plain / "config.json").read_text())
    shutil.rmtree(plain)
    shards: dict[str, dict[str, torch.Tensor]] = {"first": {}, "experts": {}, "last": {}}
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            stem = name.removesuffix("weight")
            packed, scale = pack_int4(tensor)
            shards["experts"] |= {
                f"{stem}weight_packed": packed,
                f"{stem}weight_scale": scale,
                f"{stem}weight_shape": torch.tensor(tensor.shape),
            }
        else:
            shards["last" if "lm_head" in name or "model.norm" in name else "first"][name] = tensor
    # Names that a careless search takes for the language model's.
    shards["first"] |= {
        "vision_tower.encoder.final_layernorm.weight": torch.ones(48, dtype=torch.bfloat16),
        "vision_tower.model.norm.weight": torch.ones(48, dtype=torch.bfloat16),
        "vision_tower.embed_tokens.weight": torch.ones(5, 48, dtype=torch.bfloat16),
        "mm_projector.pre_norm.weight": torch.ones(48, dtype=torch.bfloat16),
    }
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards.values(), 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    text |= {"model_type": "kimi_k2", "quantization_config": _INT4}
    for key in ("architectures", "head_dim"):  # the real nested config has neither
        text.pop(key, None)
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_remote_tokenizer(folder)
    return folder


_INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}


def pack_int4(weight: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """4-bit groups of weight [rows, columns]: packed int32 [rows, columns/8], scales bf16 [rows, columns/32]."""
    grouped = weight.float().unflatten(-1, (-1, group))  # [rows, groups, 32]
    scale = grouped.abs().amax(-1, keepdim=True) / 7.0
    levels = (grouped / scale).round().clamp(-8, 7).to(torch.int64).flatten(-2) + 8  # [rows, columns], 0..15
    shifts = 4 * torch.arange(8)
    packed = (levels.unflatten(-1, (-1, 8)) << shifts).sum(-1)  # [rows, columns/8]
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return packed.to(torch.int32), scale[..., 0].to(torch.bfloat16)


_REMOTE_TOKENIZER = '''
from pathlib import Path
from transformers import PreTrainedTokenizer


class ByteTokenizer(PreTrainedTokenizer):
    """One id for each byte; the file only says how many of them there are."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **kwargs):
        self.vocab_file = vocab_file
        self.count = int(Path(vocab_file).read_text())
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.count

    def get_vocab(self):
        return {chr(i): i for i in range(self.count)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return [chr(b) for b in text.encode()]

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return bytes(ord(t) for t in tokens).decode(errors="replace")
'''


def _write_remote_tokenizer(folder: Path) -> None:
    """A slow tokenizer of 256 bytes and one end token whose code lies beside the weights."""
    (folder / "tokenization_bytes.py").write_text(_REMOTE_TOKENIZER)
    (folder / "tiktoken.model").write_text("256")
    settings = {
        "tokenizer_class": "ByteTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_bytes.ByteTokenizer", None]},
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "added_tokens_decoder": {
            "256": {"content": "<|im_end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
