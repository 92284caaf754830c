"""Generate: the target answers every conversation anew, and its hidden states are kept on the way, in one pass.

Ray Data streams part numbers through engine actors; a task takes a part of ingest and commits a part of samples.
States go from the engine to the shard in the actor's own process and never pass through Ray's object store.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from app.captured import TARGET_TOKENIZER, TARGET_WEIGHTS, part_keys
from app.cluster import connect, gpu_count
from app.config import Config
from app.engine.base import EngineSpec
from app.engine.part_worker import ATTEMPTS, PartWorker, WorkerConfig
from app.errors import UserError
from app.parts import PARTS, PartEntry, committed_parts, remove_orphans
from app.pipeline import StageContext, StageResult
from app.plan.estimate import check_fits
from app.runfolder import digest_of

log = logging.getLogger("draftmill")


def run(ctx: StageContext) -> StageResult:
    """Commit a part of samples for every part of ingest; committed parts are not touched.

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
    if todo:
        check_fits(ctx, todo)
        _generate_parts(ctx, todo, keys, valid, rows)
        remove_orphans(store, valid)  # captures of other settings go only when these are whole
    entries = [valid[p] for p in sorted(valid)]
    return _result(ctx, entries, rows)


def unfinished(ctx: StageContext) -> str | None:
    """Why the committed parts are not all there any more; None when they are."""
    keys = part_keys(ctx)
    valid, bad = _committed(ctx, keys)
    if bad:
        part = min(bad)
        return f"{len(bad)} of {len(keys)} parts are to be made again (part {part}: {bad[part]})"
    return f"{len(keys) - len(valid)} of {len(keys)} parts are missing" if len(valid) < len(keys) else None


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
        valid = {part: entry for part, entry in valid.items() if part not in bad}
    return valid, bad


def _generate_parts(
    ctx: StageContext, todo: list[int], keys: dict[int, str], valid: dict[int, PartEntry], rows: int
) -> None:
    """Run the engine actors over `todo`; commits arrive in `valid` as they are made."""
    import ray.data

    config, store = ctx.config, ctx.run.store
    store.delete(ATTEMPTS)
    connect(config.ray)
    gpus = config.generate.tensor_parallel if gpu_count() else 0
    replicas = min(config.generate.replicas, len(todo))
    _check_resources(config, gpus, replicas)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.issue_detectors_config.detectors = []  # they tell of memory an engine is meant to use
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    items = [{"part": p, "key": keys[p]} for p in todo]
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        PartWorker,
        fn_constructor_args=(_worker_config(ctx, gpus > 0),),
        batch_size=1,
        num_cpus=None if gpus else config.ray.engine_cpus,
        num_gpus=gpus or None,
        compute=ray.data.ActorPoolStrategy(
            size=replicas,
            max_tasks_in_flight_per_actor=config.generate.parts_in_flight,
            max_concurrent_calls_per_actor=config.generate.parts_in_flight,
        ),
    )
    started = time.monotonic()
    tokens = 0
    reasons = _reasons(valid.values())
    log.info("generate: %d parts to make on %d engine(s)", len(todo), replicas)
    try:
        for row in dataset.iter_batches(batch_size=1, prefetch_batches=0):
            outcome = json.loads(row["outcome"][0])
            if "fault" in outcome:
                raise UserError(outcome["fault"])
            entry = PartEntry(**outcome)
            valid[entry.part] = entry
            tokens += entry.tokens["answer"]
            _progress(len(valid), len(keys), len(todo), tokens, time.monotonic() - started)
            if ctx.lease is not None:
                ctx.lease.check()
            reasons.update(r["reason"] for r in entry.rejects)
            _check_errors(reasons, rows, ctx)
    finally:
        store.delete(ATTEMPTS)
    missing = sorted(set(keys) - set(valid))
    if missing:
        raise UserError(f"generate: parts {missing[:5]} were lost by the engines; run the same command again")


def _progress(done: int, of: int, todo: int, tokens: int, seconds: float) -> None:
    made = done - (of - todo)
    eta = seconds / made * (todo - made)
    log.info(
        "generate: %d/%d parts, %d answer tokens, %.0f tokens/s, %.0f s left",
        done,
        of,
        tokens,
        tokens / seconds,
        eta,
    )


def _check_resources(config: Config, gpus: int, replicas: int) -> None:
    import ray

    resources = ray.cluster_resources()
    if gpus > 1:
        raise UserError(
            f"generate.tensor_parallel is {gpus}: capture with one engine on several GPUs hangs in this version;"
            " set it to 1 and use generate.replicas for more GPUs"
        )
    if gpus:
        need, have = gpus * replicas, resources.get("GPU", 0)
        if need > have:
            raise UserError(
                f"generate needs {replicas} x {gpus} = {need} GPUs and the cluster has {have:g};"
                " lower generate.replicas or generate.tensor_parallel"
            )
        return
    if config.generate.tensor_parallel > 1:
        raise UserError("generate.tensor_parallel is above 1 and the cluster has no GPU; set it to 1")
    need_cpus, have_cpus = config.ray.engine_cpus * replicas, resources.get("CPU", 0)
    if need_cpus > have_cpus:
        raise UserError(
            f"generate needs {replicas} x {config.ray.engine_cpus:g} = {need_cpus:g} CPUs and the"
            f" cluster has {have_cpus:g}; lower generate.replicas or ray.engine_cpus"
        )


def _worker_config(ctx: StageContext, on_gpu: bool) -> WorkerConfig:
    config, g = ctx.config, ctx.config.generate
    spec = EngineSpec(
        model=ctx.target.model,
        aux_layer_ids=ctx.layers,
        num_layers=ctx.target.num_layers,
        capture_mode=config.capture.mode,
        dtype=config.target.dtype,
        max_model_len=g.max_length,
        max_num_seqs=g.max_num_seqs,
        tensor_parallel_size=g.tensor_parallel,
        enforce_eager=g.enforce_eager or not on_gpu,
        trust_remote_code=config.target.trust_remote_code,
        seed=g.seed,
        kv_cache_gib=None if on_gpu else g.kv_cache_gib,
        gpu_memory_utilization=g.gpu_memory_utilization,
        engine_args=g.engine_args,
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
        row_timeout_s=g.row_timeout_s,
        max_attempts=g.max_attempts,
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
    return digest_of([[e.part, {k: f["sha256"] for k, f in e.files.items()}] for e in entries])


def _result(ctx: StageContext, entries: list[PartEntry], rows: int) -> StageResult:
    counts = counts_of(entries)
    _check_errors(_reasons(entries), rows, ctx)
    if counts["cut_short"]:
        log.warning(
            "generate: %d conversations stop before their last turn; the part entries say why", counts["cut_short"]
        )
    if counts["kept"] == 0:
        raise UserError("generate: no row could be answered; the reasons are in the part entries")
    stopped, cut = (counts["finish_reasons"].get(k, 0) for k in ("stop", "length"))
    if cut > 0.05 * (stopped + cut):
        log.warning(
            "generate: %.0f %% of the answers were stopped by length (generate.max_new_tokens %d); they are kept"
            " without an end token",
            100 * cut / (stopped + cut),
            ctx.config.generate.max_new_tokens,
        )
    return StageResult(
        outputs=[],
        counts=counts,
        seeds={"generate": ctx.config.generate.seed},
        digest=content_digest(entries),
        extra={"layers": list(ctx.layers), "target": ctx.target.to_json()},
    )
