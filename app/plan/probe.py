"""Two minutes of the real thing: the whole pipeline on a few prompts of the run, in a folder that goes away."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.config import Config
from app.plan.hardware import Hardware, Rates
from app.plan.measured import rates_of, timings_of
from app.plan.tokens import TokenStats
from app.runfolder import RunFolder
from app.storage import Store

log = logging.getLogger("draftmill")
_TRAIN_S = 30.0
_GENERATE_S = 45.0
_LEAST, _MOST = 16, 4096  # rows
# Of the bench: one setting, by an engine of our own, with the held-out prompts alone.
_ONE_CELL: dict[str, Any] = {
    "repeats": 1,
    "draft_tokens": None,
    "temperature": 0.0,
    "domain_pass": False,
    "sets": [],
    "server": None,
    "baseline_server": None,
}


def probe_config(config: Config, folder: str, stats: TokenStats, rates: Rates) -> Config:
    """The run made small: one engine, one worker, one part after another, a random draw of each source."""
    g = config.generate
    mean = stats.decoded / max(1, stats.rows)
    by_time = round(_GENERATE_S * rates.generate_tokens_per_s.value / max(1.0, mean))
    rows = max(_LEAST, min(_MOST, by_time, 6 * g.max_num_seqs), min(3 * g.max_num_seqs, by_time))
    held = max(4, min(config.bench.concurrencies[0], rows // 4)) if config.evaluate.holdout else 0
    each = max(2, -(-rows // len(config.sources)))
    sources = [
        s.model_copy(update={"count": each, "share": None, "limit": min(s.limit or 50 * each, 50 * each)})
        for s in config.sources
    ]
    tokens = max(1.0, stats.tokens / max(1, stats.rows) * (rows - held))
    epochs = max(0.5, min(50.0, _TRAIN_S * rates.train_tokens_per_s.value / tokens))
    return config.model_copy(
        update={
            "run_dir": folder,
            "sources": sources,
            "generate": g.model_copy(update={"replicas": 1, "parts_in_flight": 1}),
            "train": config.train.model_copy(
                update={
                    "epochs": epochs,
                    "workers": 1,
                    "validation_share": 0.0,
                    "checkpoint_every_s": 3600.0,
                    "start_after": None,
                }
            ),
            "evaluate": config.evaluate.model_copy(update={"holdout": held, "bootstrap": 10}),
            "bench": config.bench.model_copy(update=_ONE_CELL | {"concurrency": config.bench.concurrencies[0]}),
            "storage": config.storage.model_copy(update={"rows_per_part": 2 * each * len(sources)}),
        }
    )


def probe(
    config: Config,
    stats: TokenStats,
    rates: Rates,
    hardware: Hardware,
    run: Callable[[Config], object] | None = None,
) -> Rates:
    """`rates` with all that the probe measured in their place.

    Raises:
        UserError: what the run itself would raise.
    """
    store = Store(config.run_dir, config.storage.options)
    parent = Path(store.root).parent if store.is_local else None
    while parent is not None and not parent.is_dir():
        parent = parent.parent
    folder = tempfile.mkdtemp(prefix="draftmill-probe-", dir=parent)
    small = probe_config(config, folder, stats, rates)
    log.info(
        "probe: %d rows in %s, about two minutes and the engines' start; the folder is removed afterwards",
        sum(s.count or 0 for s in small.sources), folder,
    )  # fmt: skip
    try:
        (run or _run)(small)
        measured = rates_of(timings_of(RunFolder(folder), 1, 1, hardware.on_gpu))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rates.with_values(
        measured, "measured by the probe, one engine and one worker; more are taken to scale without loss"
    )


def _run(config: Config) -> object:
    from app.pipeline import run_pipeline
    from app.stages import stages_up_to

    last = "bench" if config.evaluate.holdout else "train"
    return run_pipeline(config, stages_up_to(last))
