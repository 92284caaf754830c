"""Generate: the target answers every conversation anew, and its hidden states are kept on the way, in one pass.

Ray Data streams part numbers through engine actors; a task takes a part of ingest and commits a part of samples.
States go from the engine to the shard in the actor's own process and never pass through Ray's object store.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from app.budget import STOPPED_BY, Budget, stopped_words
from app.captured import TARGET_TOKENIZER, TARGET_WEIGHTS, part_keys
from app.cluster import connect
from app.config import Config
from app.engine.base import EngineSpec
from app.engine.board import ending, start_board
from app.engine.crash_search import ATTEMPTS
from app.engine.factory import endpoint_spec
from app.engine.grouped import GroupedWorker
from app.engine.model_class import check_model_class
from app.engine.part_worker import PartWorker, WorkerConfig
from app.engine.progress import Ticker
from app.engine.vllm_args import refuse_owned_args
from app.engine.watch import Limit, Watch
from app.errors import UserError
from app.live import forget
from app.newcomers import Newcomers
from app.node_target import is_fetched
from app.nodes import look_at_cluster
from app.parts import PARTS, PartEntry, committed_parts, remove_orphans
from app.pipeline import StageContext, StageResult
from app.plan.cost import shape_of
from app.plan.estimate import check_fits
from app.plan.tokens import stats_of_ingest
from app.preflight import check_nodes, demand_of, node_lines
from app.record import record_of
from app.runfolder import digest_of
from app.sizing import Engines, gpus_in_use, need_of, placed, sized, wait_until_free

log = logging.getLogger("draftmill")
_PARTS_LOOKED_AT = 8  # of ingest, for the length of a row


def check(ctx: StageContext) -> None:
    """Raises UserError, before any stage begins, for a target that vLLM cannot capture, for engine arguments that are
    draftmill's own, and where training is to run beside the engines and the cluster does not hold both."""
    if ctx.config.generate.engine == "vllm":
        check_model_class(ctx.target.architecture, ctx.config.generate.engine_args)
        refuse_owned_args(ctx.config.generate.engine_args, "generate.engine_args")
    if ctx.ahead is not None and ctx.run.manifest("generate") is None:
        connect(ctx.config.ray)
        sized(ctx.config, need_of(shape_of(ctx.target, ctx.config), ctx.config), None, beside=True)


def run(ctx: StageContext) -> StageResult:
    """Commit a part of samples for every part of ingest, or for as many as the budget allows; committed parts are not
    touched.

    Raises:
        UserError: too many rows failed, states failed their checks, or the engine cannot run this target.
    """
    config, store = ctx.config, ctx.run.store
    keys = part_keys(ctx)
    valid, bad = _committed(ctx, keys)
    for part, reason in bad.items():
        log.warning("generate: part %d is made again: %s", part, reason)
    removed = remove_orphans(store)
    if removed:
        log.info("generate: removed %d files of parts that were not committed", removed)
    if valid:
        log.info("generate: resumed, %d of %d parts are committed", len(valid), len(keys))
    todo = [p for p in keys if p not in valid]
    rows = int(ctx.input("ingest").counts["kept"])
    if rows <= config.evaluate.holdout:
        raise UserError(
            f"evaluate.holdout keeps {config.evaluate.holdout} conversations and ingest kept only {rows};"
            " lower it or bring more prompts"
        )
    if rows < 2 * config.evaluate.holdout:
        log.warning(
            "generate: evaluate.holdout keeps %d of %d conversations, more than are left to train on",
            config.evaluate.holdout,
            rows,
        )
    budget = _budget(ctx, valid)
    if todo and budget.reached is None:
        _check_errors(_reasons(valid.values()), rows, ctx)  # before engines start: they would stop at the first part
        check_fits(ctx, todo)
        _generate_parts(ctx, todo, keys, valid, rows, budget)
    stopped = budget.record(len(valid), len(keys))
    if todo and stopped is None:
        remove_orphans(store, valid)  # captures of other settings go only when these are whole
    entries = [valid[p] for p in sorted(valid)]
    if stopped is not None:
        _check_usable(config, entries, stopped)
    return _result(ctx, entries, rows, stopped)


def _budget(ctx: StageContext, valid: dict[int, PartEntry]) -> Budget:
    before = ctx.run.manifest("generate")
    recorded = before.extra.get(STOPPED_BY) if before is not None and valid else None
    return Budget.of(ctx.config.generate, sum(e.tokens["answer"] for e in valid.values()), recorded)


def _check_usable(config: Config, entries: list[PartEntry], stopped: dict[str, Any]) -> None:
    """Raises UserError where less was made than later stages can use: at least as many conversations must be left to
    train on as are held out."""
    kept, held = sum(e.conversations for e in entries), config.evaluate.holdout
    words = stopped_words(stopped)
    if kept < max(2 * held, 1):
        raise UserError(
            f"generate: {words}. Its {kept} conversations are too few to go on with: evaluate.holdout keeps {held} and"
            " at least as many must be left to train on; raise the limit or lower evaluate.holdout"
        )
    log.warning("generate: PARTIAL: %s. What follows goes on with its %d conversations", words, kept)


def unfinished(ctx: StageContext) -> str | None:
    """Why the committed parts are not all there any more; None when they are, or when the budget ended them."""
    keys = part_keys(ctx)
    valid, bad = _committed(ctx, keys)
    if bad:
        part = min(bad)
        return f"{len(bad)} of {len(keys)} parts are to be made again (part {part}: {bad[part]})"
    recorded = ctx.input("generate")
    if len(valid) == len(keys) == recorded.counts["parts"]:
        return None
    budget = _budget(ctx, valid)
    if STOPPED_BY in recorded.extra and len(valid) == recorded.counts["parts"] and budget.reached is not None:
        return None
    return f"{len(keys) - len(valid)} of {len(keys)} parts are missing"


def outside(ctx: StageContext) -> dict[str, str]:
    return {
        TARGET_WEIGHTS: ctx.target.weights_digest,
        TARGET_TOKENIZER: ctx.target.tokenizer_digest,
    }


def _committed(ctx: StageContext, keys: dict[int, str]) -> tuple[dict[int, PartEntry], dict[int, str]]:
    """Parts that are done, and why others that left traces are not."""
    valid, bad = committed_parts(ctx.run.store, keys, ctx.config.storage.verify)
    if ctx.config.generate.retry_failed:
        failed = [part for part, entry in valid.items() if entry.rejects or entry.cut_short]
        bad |= {part: f"{len(valid[part].rejects) + len(valid[part].cut_short)} of its rows failed" for part in failed}
    if ctx.config.generate.recapture:
        bad |= {part: "its states were cleaned" for part, entry in valid.items() if entry.cleaned}
    if bad:
        valid = {part: entry for part, entry in valid.items() if part not in bad}
    return valid, bad


def _generate_parts(
    ctx: StageContext, todo: list[int], keys: dict[int, str], valid: dict[int, PartEntry], rows: int, budget: Budget
) -> None:
    """Run the engine actors over `todo`; commits arrive in `valid` as they are made."""
    config, store = ctx.config, ctx.run.store
    store.delete(ATTEMPTS)
    connect(config.ray)
    engines, on_gpu = _engines(ctx, len(todo))
    newcomers = _preflight(ctx, todo, engines, on_gpu)
    _quiet_ray_data()
    items = [(p, keys[p]) for p in todo]
    board = start_board()
    held = gpus_in_use() if on_gpu else 0.0
    worker = replace(_worker_config(ctx, on_gpu, engines), board=board)
    reasons = _reasons(valid.values())
    log.info("generate: %d parts to make on %d engine(s)", len(todo), engines.replicas)
    made = sum(e.rows_in for e in valid.values())
    watch = Watch(store, board, engines.replicas, stall_limit(config))
    progress = Ticker((len(valid), len(keys)), (made, rows), board, watch.look)
    with ending(board), budget.watched(store), placed(engines) as groups, newcomers, progress:
        try:
            if ctx.ahead is not None:
                ctx.ahead.committed(valid.values(), len(keys))
            dataset = _actors(items, worker, engines, on_gpu, config, groups)
            for row in dataset.iter_batches(batch_size=1, prefetch_batches=0):
                outcome = json.loads(row["outcome"][0])
                if "fault" in outcome:
                    raise UserError(outcome["fault"])
                if "not_begun" in outcome:
                    continue
                entry = PartEntry(**outcome)
                valid[entry.part] = entry
                watch.committed(entry)
                progress.add(entry)
                if ctx.lease is not None:
                    ctx.lease.check()
                budget.spend(entry.tokens["answer"], store)
                reasons.update(r["reason"] for r in entry.rejects)
                _check_errors(reasons, rows, ctx)
                if ctx.ahead is not None:
                    ctx.ahead.committed([entry], len(keys))
        finally:
            store.delete(ATTEMPTS)
    forget(store, "generate")
    if on_gpu:
        wait_until_free(held + (ctx.ahead.gpus if ctx.ahead is not None else 0))
    missing = sorted(set(keys) - set(valid))
    if missing and budget.reached is None:
        raise UserError(f"generate: parts {missing[:5]} were lost by the engines; run the same command again")


def _engines(ctx: StageContext, parts: int) -> tuple[Engines, bool]:
    """The engines for `parts` parts, and whether they run on GPUs.

    Raises:
        UserError: the cluster cannot hold them.
    """
    need = need_of(shape_of(ctx.target, ctx.config), ctx.config)
    engines, on_gpu = sized(ctx.config, need, parts, beside=ctx.ahead is not None)
    log.info("generate: %s", engines.why)
    return engines, on_gpu


def _preflight(ctx: StageContext, todo: list[int], engines: Engines, on_gpu: bool) -> Newcomers:
    """Say what the nodes have, and what of it is short for the parts `todo`; looks likewise at nodes that join later.

    Raises:
        UserError: it surely fails.
    """
    config, store = ctx.config, ctx.run.store
    stats = stats_of_ingest(config, store, todo[:: max(1, len(todo) // _PARTS_LOOKED_AT)])
    rows = config.storage.rows_per_part * min(parts_in_flight(config), len(todo))
    tokens, shape = stats.tokens / max(1, stats.rows), shape_of(ctx.target, config)
    demand = demand_of(config, shape, engines, on_gpu, rows, tokens, is_fetched(ctx.target))
    rooms = look_at_cluster(store.root if store.is_local else None, ctx.target.model)
    for line in node_lines(rooms, demand):
        log.info("generate: %s", line)
    for sentence in check_nodes(rooms, demand, engines.replicas, ctx.run.url):
        log.warning("generate: %s", sentence)
    return Newcomers(rooms, demand, ctx.run.store, ctx.target.model)


def parts_in_flight(config: Config) -> int:
    """Parts an engine works on at once: twice what fills its batch, since rows of a part end at different times, and
    where they end together the next ones must be waiting."""
    g = config.generate
    if g.parts_in_flight != "auto":
        return g.parts_in_flight
    return max(2, math.ceil(2 * g.max_num_seqs / config.storage.rows_per_part))


def stall_limit(config: Config) -> Limit:
    """When an engine counts as stuck; servers that do not answer are endured as long as they may be silent."""
    g = config.generate
    patience = g.endpoint_patience_s if g.endpoints and g.stall_minutes else 0.0
    return Limit(60 * g.stall_minutes + patience, g.row_timeout_s)


def _quiet_ray_data() -> None:
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.issue_detectors_config.detectors = []  # they tell of memory an engine is meant to use
    # A pool that may grow does so where all its engines have all the parts they take and a node has room for another.
    context.autoscaling_config.actor_pool_util_upscaling_threshold = 1.0
    context.autoscaling_config.actor_pool_util_downscaling_threshold = 0.0  # an engine that starts holds no part yet
    logging.getLogger("ray.data").setLevel(logging.ERROR)


def _actors(
    items: list[tuple[int, str]],
    worker: WorkerConfig,
    engines: Engines,
    on_gpu: bool,
    config: Config,
    groups: list[Any],
) -> Any:
    """A dataset of the outcomes of `items`: one pool of engine actors, or one engine in each of the placement `groups`
    with its share of the items."""
    import ray.data

    from app.engine.part_source import parts_dataset

    flight = parts_in_flight(config)

    def pool(
        kind: type, arguments: tuple[Any, ...], share: list[tuple[int, str]], size: int, most: int, **resources: Any
    ) -> Any:
        return parts_dataset(share).map_batches(
            type("generate", (kind,), {}),  # Ray shows operator and actors by it: MapBatches(generate)
            fn_constructor_args=arguments,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(
                min_size=1 if most > size else size,
                initial_size=size,
                max_size=max(size, most),
                max_tasks_in_flight_per_actor=flight,
                max_concurrent_calls_per_actor=flight,
                enable_true_multi_threading=True,  # without it Ray runs one call at a time whatever else is asked
            ),
            **resources,
        )

    if groups:
        shares = [items[i :: len(groups)] for i in range(len(groups))]
        first, *others = [
            pool(GroupedWorker, (worker, group, flight), share, 1, 0, num_cpus=0)
            for group, share in zip(groups, shares, strict=True)
        ]
        dataset = first.union(*others) if others else first
    else:
        resources: dict[str, Any] = {"resources": config.generate.resources} if config.generate.resources else {}
        resources |= {"num_gpus": engines.tensor_parallel} if on_gpu else {"num_cpus": config.ray.engine_cpus}
        dataset = pool(PartWorker, (worker,), items, engines.replicas, engines.most, **resources)
    dataset.set_name("generate")
    return dataset


def _worker_config(ctx: StageContext, on_gpu: bool, engines: Engines) -> WorkerConfig:
    config, g = ctx.config, ctx.config.generate
    spec = EngineSpec(
        model=ctx.target.model,
        aux_layer_ids=ctx.layers,
        num_layers=ctx.target.num_layers,
        capture_mode=config.capture.mode,
        dtype=config.target.dtype,
        codec=config.capture.codec,
        max_model_len=g.max_length,
        max_num_seqs=g.max_num_seqs,
        tensor_parallel_size=engines.tensor_parallel,
        enforce_eager=g.enforce_eager or not on_gpu,
        trust_remote_code=config.target.trust_remote_code,
        seed=g.seed,
        kv_cache_gib=None if on_gpu else g.kv_cache_gib,
        gpu_memory_utilization=g.gpu_memory_utilization,
        engine_process=g.engine_process,
        engine_args={**g.engine_args, **engines.engine_args},
        endpoints=endpoint_spec(config),
    )
    return WorkerConfig(
        run_url=ctx.run.url,
        options=config.storage.options,
        engine=g.engine,
        spec=spec,
        target=ctx.target.to_json(),
        chat_template=config.target.chat_template,
        template_kwargs=config.target.template_kwargs,
        max_new_tokens=g.max_new_tokens,
        keep_length_stopped=g.length_stopped == "keep",
        keep_thinking_only=g.thinking_only == "keep",
        sampling={"temperature": g.temperature, "top_p": g.top_p, "top_k": g.top_k, "seed": g.seed},
        max_bad_rows=config.capture.max_bad_rows_per_part,
        row_timeout_s=math.inf if g.endpoints else g.row_timeout_s,  # waiting for a server is no fault of a row
        max_attempts=g.max_attempts,
        spot_check=config.capture.spot_check,
        codec=config.capture.codec,
        sync=config.storage.verify == "size",
        compression=config.capture.compression,
        record=record_of(config, ctx.target, ctx.layers),
    )


def _reasons(entries: Iterable[PartEntry]) -> Counter[str]:
    return Counter(r["reason"] for e in entries for r in e.rejects)


def _check_errors(reasons: Counter[str], rows: int, ctx: StageContext) -> None:
    """Stop when more than generate.max_error_share of all `rows` failed."""
    cap = ctx.config.generate.max_error_share
    if reasons.total() > cap * rows:
        words = ", ".join(f"{r} {n}" for r, n in reasons.most_common())
        raise UserError(
            f"generate: {reasons.total()} of {rows} rows failed ({words}), more than generate.max_error_share"
            f" {cap:g}; their ids are in {ctx.run.url}/{PARTS}, and generate.retry_failed=true tries them again"
        )


def counts_of(entries: list[PartEntry]) -> dict[str, Any]:
    """What the entries of the finished stage add up to."""
    tokens: Counter[str] = Counter()
    finishes: Counter[str] = Counter()
    for e in entries:
        tokens.update(e.tokens)
        finishes.update(e.finish_reasons)
    return {
        "rows_in": sum(e.rows_in for e in entries),
        "kept": sum(e.conversations for e in entries),
        "rejected": dict(_reasons(entries)),
        "samples": sum(e.samples for e in entries),
        "tokens": dict(tokens),
        "bytes": sum(e.bytes for e in entries),
        "finish_reasons": dict(finishes),
        "cut_short": sum(len(e.cut_short) for e in entries),
        "parts": len(entries),
    }


def content_digest(entries: list[PartEntry]) -> str:
    """Digest of everything the parts hold."""
    return digest_of([[e.part, e.checksums] for e in entries])


def _result(ctx: StageContext, entries: list[PartEntry], rows: int, stopped: dict[str, Any] | None) -> StageResult:
    counts = counts_of(entries)
    _check_errors(_reasons(entries), rows, ctx)
    if counts["cut_short"]:
        log.warning(
            "generate: %d conversations stop before their last turn; the part entries say why", counts["cut_short"]
        )
    if counts["kept"] == 0:
        raise UserError("generate: no row could be answered; the reasons are in the part entries")
    whole, cut = (counts["finish_reasons"].get(k, 0) for k in ("stop", "length"))
    if cut > 0.05 * (whole + cut):
        log.warning(
            "generate: %.0f %% of the answers were stopped by length (generate.max_new_tokens %d); they are kept"
            " without an end token",
            100 * cut / (whole + cut),
            ctx.config.generate.max_new_tokens,
        )
    return StageResult(
        outputs=[],
        counts=counts,
        seeds={"generate": ctx.config.generate.seed},
        digest=content_digest(entries),
        extra={
            "layers": list(ctx.layers),
            "target": ctx.target.to_json(),
            **({STOPPED_BY: stopped} if stopped is not None else {}),
        },
    )
