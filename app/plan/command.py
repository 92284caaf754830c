"""`draftmill plan`: from the command line's words to lines of text."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import replace

from app.bench.sets import count_turns, read_sets
from app.config import Config
from app.engine.model_class import check_model_class
from app.errors import UserError
from app.nodes import Room, look_at
from app.pipelines.generate import parts_in_flight
from app.plan.cost import Shape, shape_of
from app.plan.estimate import PLAN_FILE, Plan, make_plan
from app.plan.hardware import GIB, RATE_KEYS, THIS_MACHINE, Described, Hardware, find_hardware, rough_rates
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
from app.preflight import check_nodes, demand_of, node_lines
from app.runfolder import RunFolder
from app.sizing import choose, need_of, settled
from app.sizing import described as cluster_of
from app.sources.locate import Listing
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
    target = inspect_target(t.model, t.revision, t.trust_remote_code, t.chat_template, weights=False)
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
    sets = count_turns(read_sets(config.bench.sets, config.bench.set_rows, Listing()).values())
    committed = float(done.counts["bytes"]) if done is not None else 0.0
    plan = make_plan(config, shape, stats, hardware, rates, price, committed, sets)
    plan = replace(plan, node=_node(config, shape, stats, hardware, run))
    if done is None or run.store.read_json(PLAN_FILE) is None:  # what was planned before the run is not rewritten
        run.store.write_json(PLAN_FILE, plan.to_json())
    return plan


def _node(config: Config, shape: Shape, stats: TokenStats, hardware: Hardware, run: RunFolder) -> list[str]:
    """What an engine needs of its node, and where the plan is for this machine, what it has and what is short."""
    engines = choose(config, need_of(shape, config), cluster_of(hardware))
    rows = min(config.storage.rows_per_part * parts_in_flight(config), stats.rows)
    demand = demand_of(config, shape, engines, hardware.on_gpu, rows, stats.tokens / max(1, stats.rows))
    rooms: list[Room] = []
    if hardware.origin == THIS_MACHINE:
        seen = look_at(socket.gethostname(), "/tmp/ray", run.store.root if run.store.is_local else None)
        store, cpus = round(config.ray.object_store_gib * GIB), float(hardware.cpus_per_node)
        rooms = [replace(seen, run_there=True, gpus=hardware.gpus, cpus=cpus, object_store=store)]
    lines = node_lines(rooms, demand)
    try:
        return [*lines, *check_nodes(rooms, demand, engines.replicas, run.url)]
    except UserError as fault:
        return [*lines, str(fault).removeprefix("generate: ")]


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
