"""Random drafts for TINY, and the means to break them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.checkpoint import DraftConfig
from app.pipelines.vocab import VocabMap
from app.target import TargetInfo, default_aux_layers
from tests.tiny import TOKENIZER_LEN

IDS = "eagle_aux_hidden_state_layer_ids"
DRAFT_VOCAB = 320


def draft_config(target: TargetInfo, **changes: Any) -> DraftConfig:
    """A draft of TINY's own sizes with a reduced vocabulary."""
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": target.hidden_size,
        "rope_theta": target.rope_theta,
        "rope_scaling": target.rope_scaling,
        "max_position_embeddings": target.max_position_embeddings,
        "aux_layer_ids": default_aux_layers(target.num_layers),
        "eos_token_id": target.eos_token_ids,
        "pad_token_id": target.pad_token_id,
    }
    return DraftConfig(**values | changes)


def random_tensors(config: DraftConfig, kept: Tensor | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Random fp32 weights under their root names, with the map of `kept` ids [Vd]."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 0.1 * torch.randn(shape, generator=generator) + name.endswith("norm.weight")
        for name, (shape, dtype) in config.tensor_shapes().items()
        if dtype.is_floating_point
    }
    if config.has_vocab_map:
        if kept is None:
            kept = torch.randperm(TOKENIZER_LEN, generator=generator)[: config.draft_vocab_size].sort().values
        vocab = VocabMap(kept, config.vocab_size)
        tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    return tensors


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
