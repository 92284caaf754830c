"""The stages of a run in data order, and what each depends on."""

from __future__ import annotations

from app import clean
from app.captured import CONFIG_KEYS
from app.doctor import command as doctor
from app.errors import UserError
from app.pipeline import Stage
from app.pipelines import bench, evaluate, export, generate, ingest, quality, report, vocab
from app.train import overlap, warm_start
from app.train import stage as train

# The split into train, validation and holdout is a pure function of the conversations and these values.
_SPLIT = ("evaluate.holdout", "evaluate.holdout_seed", "train.validation_share", "train.start_after")

STAGES: tuple[Stage, ...] = (
    Stage(
        "ingest",
        ingest.run,
        config_keys=(
            "sources",
            "ingest",
            "target.template_kwargs",
            "generate.max_length",
            "capture.mask",
            "capture.max_empty_mask_share",
            "storage.rows_per_part",
        ),
        execution_keys=("ingest.workers",),
        outside=ingest.outside,
    ),
    Stage(
        "generate",
        generate.run,
        inputs=("ingest",),
        config_keys=CONFIG_KEYS,
        outside=generate.outside,
        unfinished=generate.unfinished,
        check=generate.check,
    ),
    Stage("quality", quality.run, inputs=("generate",), config_keys=("quality",)),
    Stage(
        "vocab",
        vocab.run,
        inputs=("generate",),
        config_keys=("vocab", *_SPLIT, "train.init_from", "train.new_vocabulary"),
        outside=warm_start.outside,
    ),
    Stage(
        "train",
        train.run,
        inputs=("generate", "vocab"),
        config_keys=("train", "evaluate.holdout", "evaluate.holdout_seed"),
        execution_keys=train.EXECUTION_KEYS,
        outside=warm_start.outside,
        check=train.check,
        before=doctor.before_train,
        after=clean.after_train,
        ahead=overlap.ahead,
    ),
    Stage("export", export.run, inputs=("vocab", "train"), config_keys=("export", "evaluate.num_draft_tokens")),
    Stage(
        "evaluate",
        evaluate.run,
        inputs=("generate", "export"),
        config_keys=("evaluate", "train.validation_share", "train.start_after"),
        check=evaluate.check,
        after=clean.after_evaluate,
    ),
    Stage(
        "bench",
        bench.run,
        inputs=("generate", "export"),
        config_keys=("bench", "generate.max_new_tokens", "evaluate.num_draft_tokens", *_SPLIT),
        outside=bench.outside,
        check=bench.check,
        before=doctor.before_bench,
    ),
    Stage(
        "report",
        report.run,
        inputs=("ingest", "generate", "quality", "vocab", "train", "export", "evaluate", "bench"),
        before=doctor.before_report,
        after=clean.after_report,
    ),
)


def stages_up_to(name: str) -> list[Stage]:
    """The stages that end with `name`, inputs first.

    Raises:
        UserError: no such stage.
    """
    names = [s.name for s in STAGES]
    if name not in names:
        raise UserError(f"there is no stage {name!r}; the stages are {', '.join(names)}")
    return list(STAGES[: names.index(name) + 1])
