"""`draftmill plan`: from the command line's words to lines of text."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from app.config import Config
from app.engine.model_class import check_model_class
from app.plan.cost import shape_of
from app.plan.estimate import PLAN_FILE, Plan, make_plan
from app.plan.hardware import RATE_KEYS, Described, find_hardware, rough_rates
from app.plan.measured import compare
from app.plan.probe import probe
from app.plan.text import compare_lines, plan_lines
from app.plan.tokens import (
    TOKEN_KEYS,
    Sampler,
    TokenStats,
    assumed_stats,
    parse_assumptions,
    read_sample,
    stats_of_run,
    token_stats,
)
from app.runfolder import RunFolder
from app.sizing import settled
from app.target import TargetInfo, inspect_target

log = logging.getLogger("draftmill")
ROWS_SAMPLED = 1000  # of each source


def plan_run(
    config: Config,
    assume: Sequence[str] = (),
    described: Described | None = None,
    price: float | None = None,
    measure: bool = False,
    sampler: Sampler = read_sample,
) -> Plan:
    """Plan a run and keep the plan in its folder; nothing else of the run is made.

    Raises:
        UserError: a source or a value cannot be used, or the folder cannot be written.
    """
    values = parse_assumptions(assume, (*TOKEN_KEYS, *RATE_KEYS))
    t = config.target
    target = inspect_target(t.model, t.revision, t.trust_remote_code, t.chat_template)
    if config.generate.engine == "vllm":
        check_model_class(target.architecture, config.generate.engine_args)
    shape, run = shape_of(target, config), RunFolder(config.run_dir, config.storage.options)
    stats = _stats(config, target, run, values, sampler)
    hardware = find_hardware(config, described or Described())
    config = settled(config, shape, hardware)
    rates = rough_rates(shape, config, hardware, stats.teacher / max(1.0, stats.tokens))
    if measure:
        rates = probe(config, stats, rates, hardware)
    rates = rates.with_values(values, "--assume")
    done = run.manifest("generate")
    plan = make_plan(
        config, shape, stats, hardware, rates, price, committed=float(done.counts["bytes"]) if done is not None else 0.0
    )
    if done is None or run.store.read_json(PLAN_FILE) is None:  # what was planned before the run is not rewritten
        run.store.write_json(PLAN_FILE, plan.to_json())
    return plan


def _stats(
    config: Config, target: TargetInfo, run: RunFolder, values: dict[str, float], sampler: Sampler
) -> TokenStats:
    named = [k for k in TOKEN_KEYS if k in values]
    if len(named) == len(TOKEN_KEYS):
        return assumed_stats(config, values)
    if not named and (known := stats_of_run(run)) is not None:
        return known
    return token_stats(config, sampler(config, target, ROWS_SAMPLED), values)


def lines_of(plan: Plan, config: Config) -> list[str]:
    run = RunFolder(config.run_dir, config.storage.options)
    return plan_lines(plan, run.url, run.store.is_local)


def compare_run(run: str) -> list[str]:
    """Lines of planned against actual for a run folder."""
    folder = RunFolder(run)
    pairs = compare(folder)
    return compare_lines(folder.url, pairs, folder.store.read_json(PLAN_FILE).get("origin", "?"))
