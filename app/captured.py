"""The committed parts of a run, as later stages find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.budget import STOPPED_BY
from app.errors import UserError
from app.parts import PartEntry, committed_parts, ingest_part_path, read_entry
from app.pipeline import StageContext
from app.record import record_of, refuse_mismatch
from app.runfolder import Manifest, digest_of, flat_config
from app.samples import conversation_ids

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
    "capture.codec",
)
TARGET_WEIGHTS, TARGET_TOKENIZER = "target weights", "target tokenizer and template"  # inputs of the generate stage


def part_keys(ctx: StageContext, shape: str | None = None) -> dict[int, str]:
    """Part number -> key its entry must carry: config, target and the part's rows; of `shape`, or today's."""
    ingest = ctx.input("ingest")
    shape = shape or shape_of(ctx)
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
    # Parts of before there were codecs hold what bf16 stores, and stay valid.
    shape = {k: v for k, v in config.items() if (k, v) != ("capture.codec", "bf16")}
    return digest_of([shape, weights, tokenizer, list(layers)])


def load_entries(ctx: StageContext) -> list[PartEntry]:
    """Commit entries of the finished stage, in part order; of all parts, unless its budget ended it.

    Raises:
        UserError: a part is missing, or was captured from something else; it names what.
    """
    keys = part_keys(ctx)
    valid, _ = committed_parts(ctx.run.store, keys, "size")
    missing = sorted(set(keys) - set(valid))
    if missing and STOPPED_BY not in ctx.input("generate").extra:
        other = read_entry(ctx.run.store, missing[0])
        refuse_mismatch([other] if other else [], record_of(ctx.config, ctx.target, ctx.layers))
        raise UserError(f"{ctx.run.url}: part {missing[0]} of generate is missing; run `draftmill generate` again")
    return [valid[p] for p in sorted(valid)]


def require_states(
    ctx: StageContext, stage: str, entries: list[PartEntry], split: dict[str, str] | None = None
) -> None:
    """Raises UserError where states that `stage` reads were cleaned: of all parts, or with `split` of those that hold a
    held-out conversation."""
    gone = [e for e in entries if e.cleaned]
    if split is not None:
        store = ctx.run.store
        gone = [e for e in gone if any(split.get(c) == "holdout" for c in conversation_ids(store, [e]))]
    if gone:
        raise UserError(
            f"{stage}: the states of {len(gone)} of {len(entries)} parts were cleaned ({gone[0].cleaned}), and {stage}"
            " reads them; run generate again for these parts: draftmill generate"
            f" {ctx.run.url}/config.yaml generate.recapture=true"
        )
