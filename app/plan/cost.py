"""What a token costs: bytes on disk, operations and memory of training. Formulas only."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.codecs import state_bytes
from app.config import Config
from app.plan.tokens import TokenStats
from app.target import TargetInfo, check_aux_layers, default_aux_layers, text_config, weight_bytes
from app.train.loop import draft_config
from app.train.loss import CHUNK_ELEMENTS
from app.train.trainer import TOKENS_PER_PASS

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_ROW_BYTES_PER_TOKEN = 4.0  # ids, mask and compressed text of the parquet file; measured on the demo run
_BYTES_PER_PART = 9_000  # parquet schema, entry, safetensors header; the same run


@dataclass(frozen=True)
class Shape:
    """Sizes of target and draft; bytes are of one value of the captured type."""

    hidden: int
    layers: int
    vocab: int  # V
    draft_vocab: int  # Vd
    intermediate: int
    query: int  # heads * head_dim of the draft
    key: int  # kv heads * head_dim
    value_bytes: int
    target_parameters: float  # that work on one token
    target_bytes: int  # of its weights
    heads: int = 0  # of the target's attention; 0: unknown
    kv_heads: int = 0  # 0: unknown, or its cache is one latent vector
    kv_bytes: float = 0.0  # of the target's cache, a token, all layers
    codec: str = "bf16"  # of the stored states (app/codecs.py)
    compression: str = "none"

    @property
    def state_bytes(self) -> float:
        """Of one stored state of one token."""
        return state_bytes(self.hidden, self.codec, self.compression, self.value_bytes)

    @property
    def trained(self) -> int:
        """Parameters that training changes (CONTRACTS.md section 5)."""
        h = self.hidden
        layer = 2 * h * (self.query + 2 * self.key) + h * self.query + 3 * h * self.intermediate
        return 3 * h * h + layer + self.draft_vocab * h + 4 * h


def shape_of(target: TargetInfo, config: Config) -> Shape:
    """Sizes from the target's config and the run's.

    Raises:
        UserError: the auxiliary layers or the draft's sizes do not fit.
    """
    n = target.num_layers
    layers = default_aux_layers(n) if config.capture.layers is None else check_aux_layers(config.capture.layers, n)
    size = min(config.vocab.size or target.vocab_size, target.vocab_size)
    draft = draft_config(target, config.train, [*layers, n], size)
    folder = Path(target.model)
    weights = int(target.extra.get("weight_bytes") or weight_bytes(folder, target.name))
    raw = text_config(json.loads((folder / "config.json").read_text()))
    latent = int(raw.get("kv_lora_rank") or 0)  # multi-head latent attention
    plain = 2 * target.num_key_value_heads * target.head_dim
    cached = latent + int(raw.get("qk_rope_head_dim") or 0) if latent else plain
    return Shape(
        hidden=target.hidden_size,
        layers=n,
        vocab=target.vocab_size,
        draft_vocab=size,
        intermediate=draft.intermediate_size,
        query=draft.num_attention_heads * draft.head_dim,
        key=draft.num_key_value_heads * draft.head_dim,
        value_bytes=DTYPE_BYTES[config.target.dtype],
        target_parameters=active_parameters(raw, target),
        target_bytes=weights,
        heads=target.num_attention_heads,
        kv_heads=0 if latent else target.num_key_value_heads,
        kv_bytes=float(DTYPE_BYTES[config.target.dtype] * n * cached),
        codec=config.capture.codec,
        compression=config.capture.compression,
    )


def active_parameters(config: dict[str, Any], target: TargetInfo) -> float:
    """Parameters of the target that work on one token, roughly: experts that are not chosen do not count."""
    h, hd = target.hidden_size, target.head_dim
    attention = 2 * h * hd * (target.num_attention_heads + target.num_key_value_heads)
    chosen = int(config.get("num_experts_per_tok") or 0)
    if chosen:
        # Where the key of the experts' own width is missing, intermediate_size is theirs (gpt-oss).
        width = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or target.intermediate_size)
        mlp = 3 * h * width * (chosen + int(config.get("n_shared_experts") or 0))
    else:
        mlp = 3 * h * target.intermediate_size
    return float(target.num_layers * (attention + mlp) + target.vocab_size * h)


def token_bytes(states: int, hidden: int, value_bytes: int = 2) -> int:
    """Bytes of one token's hidden states."""
    return states * hidden * value_bytes


def naive_bytes(tokens: float, hidden: int, value_bytes: int = 2, states: int = 4) -> float:
    """Every state of every token: what a plain capture keeps."""
    return tokens * token_bytes(states, hidden, value_bytes)


def part_bytes(stats: TokenStats, shape: Shape, rows_per_part: int) -> float:
    """Bytes of the committed parts: three states at T-1 positions, s_n where it teaches, the rows (docs/format.md)."""
    states = 3 * (stats.tokens - stats.samples) + stats.teacher
    parts = math.ceil(max(1, stats.rows) / rows_per_part)
    return states * shape.state_bytes + stats.tokens * _ROW_BYTES_PER_TOKEN + parts * _BYTES_PER_PART


def other_bytes(stats: TokenStats, shape: Shape, config: Config) -> float:
    """Bytes of everything else a run keeps at once: ingest parts, checkpoints, the export."""
    ingest = stats.tokens * 6.0
    checkpoint = 12.0 * shape.trained  # fp32 weights and two moments
    best = 4.0 * shape.trained if config.train.validation_share else 0.0
    export = 2.0 * shape.trained + (shape.value_bytes * shape.vocab * shape.hidden if config.export.embed_tokens else 0)
    return ingest + (config.train.keep_checkpoints + 1) * checkpoint + best + export


def train_operations(shape: Shape, unroll_steps: int, supervised_share: float) -> float:
    """Floating-point operations of training on one token (CONTRACTS.md section 2).

    Every row needs `fc`, keys and values; the rest runs for supervised rows only, once an unroll step.
    The teacher's head runs forward alone, once a position.
    """
    h = shape.hidden
    every = 3 * h * h + 4 * h * shape.key
    step = 3 * h * shape.query + 3 * h * shape.intermediate + shape.draft_vocab * h + 4 * h * shape.key
    teacher = shape.draft_vocab * h / 3
    return 6.0 * (every + supervised_share * (unroll_steps * step + teacher))


def tokens_per_pass(config: Config, on_gpu: bool, longest: int) -> int:
    """Tokens that one worker holds in memory at once."""
    share = math.ceil(config.train.tokens_per_step / config.train.workers)
    return max(longest, min(TOKENS_PER_PASS["cuda" if on_gpu else "cpu"], share))


def train_memory(shape: Shape, config: Config, on_gpu: bool, longest: int, supervised_share: float) -> float:
    """Peak bytes of one training worker, roughly.

    With a budget for activations, or a GPU for `auto` to look at, the longest document alone must fit and no more.
    """
    h, train = shape.hidden, config.train
    width = DTYPE_BYTES[train.compute_dtype]
    longest = min(longest, train.max_document or longest)
    tokens = tokens_per_pass(config, on_gpu, longest)
    spread = train.workers if train.shard else 1
    moments = 8 if train.optimizer_state == "fp32" else 2
    weights = ((8.0 + moments) / spread + width) * shape.trained  # masters, gradients, two moments; the compute copy
    frozen = width * shape.draft_vocab * h
    if train.embedding_device == "gpu" or not on_gpu:
        frozen += shape.value_bytes * shape.vocab * h
    if train.out_of_vocab == "drop":
        frozen += width * shape.vocab * h
    per_row = 7 * h + 2 * shape.query + 2 * shape.key + 3 * shape.intermediate
    saved = tokens * supervised_share * train.unroll_steps * per_row * width
    if on_gpu or train.activation_gib != "auto":
        saved = min(saved, _least_activations(shape, train.unroll_steps, longest, supervised_share, width))
    logits = 4 * 4 * min(CHUNK_ELEMENTS["cuda" if on_gpu else "cpu"], tokens * shape.draft_vocab)
    inputs = 3 * tokens * token_bytes(4, h, shape.value_bytes)  # this step and two kept ready
    return weights + frozen + saved + logits + inputs


def _least_activations(shape: Shape, steps: int, tokens: int, supervised_share: float, width: int) -> float:
    """Bytes of a document whose unroll steps are made again in the backward pass (app/train/activations.py): inputs of
    the steps, the head's gradients, and one step at work."""
    every = 4.0 * shape.key + supervised_share * (shape.query + 2 * shape.key)
    inputs = supervised_share * steps * (2 * shape.hidden + 2 * shape.key)
    at_work = supervised_share * (7 * shape.intermediate + 6 * shape.hidden + 2 * shape.query + 2 * steps * shape.key)
    return tokens * (every + inputs + at_work) * width
