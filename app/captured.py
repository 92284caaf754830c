"""The committed parts of a run, as later stages find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.errors import UserError
from app.parts import PartEntry, committed_parts, ingest_part_path
from app.pipeline import StageContext
from app.runfolder import Manifest, digest_of, flat_config

# What shapes the samples of a part, beside its rows and the target.
CONFIG_KEYS = (
    "generate.engine",
    "generate.max_length",
    "generate.max_new_tokens",
    "generate.length_stopped",
    "generate.thinking_only",
    "generate.temperature",
    "generate.top_p",
    "generate.top_k",
    "generate.seed",
    "generate.engine_args",
    "target.dtype",
    "target.template_kwargs",
    "capture.layers",
)
TARGET_WEIGHTS, TARGET_TOKENIZER = "target weights", "target tokenizer and template"  # inputs of the generate stage


def part_keys(ctx: StageContext) -> dict[int, str]:
    """Part number -> key its entry must carry: config, target and the part's rows."""
    ingest = ctx.input("ingest")
    shape = shape_of(ctx)
    return {
        part: part_key(shape, ingest.outputs[ingest_part_path(part)]["sha256"])
        for part in range(ingest.counts["parts"])
    }


def part_key(shape: str, ingest_sha256: str) -> str:
    """Key of a part made in shape `shape` from an ingest part of this checksum."""
    return digest_of([shape, ingest_sha256])


def shape_of(ctx: StageContext) -> str:
    """Digest of what shapes every part, by today's configuration and target."""
    target = ctx.target
    return _shape(flat_config(ctx.config, CONFIG_KEYS), target.weights_digest, target.tokenizer_digest, ctx.layers)


def recorded_shape(generate: Manifest) -> str:
    """As `shape_of`, of a finished stage: needs no target."""
    weights, tokenizer = (generate.inputs.get(k, "") for k in (TARGET_WEIGHTS, TARGET_TOKENIZER))
    return _shape(generate.config, weights, tokenizer, generate.extra["layers"])


def _shape(config: dict[str, Any], weights: str, tokenizer: str, layers: Sequence[int]) -> str:
    return digest_of([config, weights, tokenizer, list(layers)])


def load_entries(ctx: StageContext) -> list[PartEntry]:
    """Commit entries of the finished stage, in part order."""
    keys = part_keys(ctx)
    valid, _ = committed_parts(ctx.run.store, keys, "size")
    missing = sorted(set(keys) - set(valid))
    if missing:
        raise UserError(f"{ctx.run.url}: part {missing[0]} of generate is missing; run `draftmill generate` again")
    return [valid[p] for p in sorted(valid)]
