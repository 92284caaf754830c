"""The committed parts of a run, as later stages find them."""

from __future__ import annotations

from app.errors import UserError
from app.parts import PartEntry, committed_parts, ingest_part_path
from app.pipeline import StageContext
from app.runfolder import digest_of, flat_config

# What shapes the samples of a part, beside its rows and the target.
CONFIG_KEYS = (
    "generate.max_length",
    "generate.max_new_tokens",
    "generate.temperature",
    "generate.top_p",
    "generate.top_k",
    "generate.seed",
    "generate.engine_args",
    "target.dtype",
    "target.template_kwargs",
    "capture.layers",
)


def part_keys(ctx: StageContext) -> dict[int, str]:
    """Part number -> key its entry must carry: config, target and the part's rows."""
    ingest = ctx.input("ingest")
    shape = [
        flat_config(ctx.config, CONFIG_KEYS),
        ctx.target.weights_digest,
        ctx.target.tokenizer_digest,
        ctx.layers,
    ]
    shape_digest = digest_of(shape)
    return {
        part: digest_of([shape_digest, ingest.outputs[ingest_part_path(part)]["sha256"]])
        for part in range(ingest.counts["parts"])
    }


def load_entries(ctx: StageContext) -> list[PartEntry]:
    """Commit entries of the finished stage, in part order."""
    keys = part_keys(ctx)
    valid, _ = committed_parts(ctx.run.store, keys, "size")
    missing = sorted(set(keys) - set(valid))
    if missing:
        raise UserError(f"{ctx.run.url}: part {missing[0]} of generate is missing; run `draftmill generate` again")
    return [valid[p] for p in sorted(valid)]
