"""Generate: the target answers every conversation anew, and its hidden states are kept on the way, in one pass.

Ray Data streams part numbers through engine actors; a task takes a part of ingest and commits a part of samples.
States go from the engine to the shard in the actor's own process and never pass through Ray's object store.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from app.cluster import connect, gpu_count
from app.config import Config
from app.conversations import check_prompt_length, turns_to_answer
from app.engine.base import Completion, Engine, EngineError, EngineSpec, Request
from app.engine.factory import start_engine
from app.engine.row_checks import check_states
from app.errors import RowError, UserError
from app.parts import PARTS, PartEntry, committed_parts, remove_orphans, write_part
from app.pipeline import StageContext, StageResult
from app.pipelines.ingest import part_path, read_part
from app.runfolder import digest_of, flat_config
from app.storage import Store
from app.target import Renderer, TargetInfo, load_tokenizer

log = logging.getLogger("draftmill")
ATTEMPTS = "generate/attempts"

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


@dataclass(frozen=True)
class WorkerConfig:
    """What an engine actor needs, picklable."""

    run_url: str
    options: dict[str, Any]
    engine: str
    spec: EngineSpec
    target: dict[str, Any]
    chat_template: str | None
    template_kwargs: dict[str, Any]
    max_new_tokens: int
    sampling: dict[str, Any]
    max_bad_rows: int
    row_timeout_s: float
    max_attempts: int


def run(ctx: StageContext) -> StageResult:
    """Commit a part of samples for every part of ingest; committed parts are not touched.

    Raises:
        UserError: too many rows failed, states failed their checks, or the engine cannot run this target.
    """
    config, store = ctx.config, ctx.run.store
    keys = part_keys(ctx)
    valid, bad = committed_parts(store, keys, config.storage.verify)
    for part, reason in bad.items():
        log.warning("generate: part %d is made again: %s", part, reason)
    removed = remove_orphans(store, valid)
    if removed:
        log.info("generate: removed %d files of parts that were not committed", removed)
    if valid:
        log.info("generate: resumed, %d of %d parts are committed", len(valid), len(keys))
    todo = [p for p in keys if p not in valid]
    if todo:
        _check_errors(list(valid.values()), ctx)
        _generate_parts(ctx, todo, keys, valid)
    entries = [valid[p] for p in sorted(valid)]
    return _result(ctx, entries)


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
        part: digest_of([shape_digest, ingest.outputs[part_path(part)]["sha256"]])
        for part in range(ingest.counts["parts"])
    }


def unfinished(ctx: StageContext) -> str | None:
    """Why the committed parts are not all there any more; None when they are."""
    keys = part_keys(ctx)
    valid, bad = committed_parts(ctx.run.store, keys, ctx.config.storage.verify)
    if bad:
        part = min(bad)
        return f"{len(bad)} of {len(keys)} parts are to be made again (part {part}: {bad[part]})"
    return f"{len(keys) - len(valid)} of {len(keys)} parts are missing" if len(valid) < len(keys) else None


def outside(ctx: StageContext) -> dict[str, str]:
    return {
        "target weights": ctx.target.weights_digest,
        "target tokenizer and template": ctx.target.tokenizer_digest,
    }


def load_entries(ctx: StageContext) -> list[PartEntry]:
    """Commit entries of the finished stage, in part order."""
    keys = part_keys(ctx)
    valid, _ = committed_parts(ctx.run.store, keys, "size")
    missing = sorted(set(keys) - set(valid))
    if missing:
        raise UserError(f"{ctx.run.url}: part {missing[0]} of generate is missing; run `draftmill generate` again")
    return [valid[p] for p in sorted(valid)]


def _generate_parts(ctx: StageContext, todo: list[int], keys: dict[int, str], valid: dict[int, PartEntry]) -> None:
    """Run the engine actors over `todo`; commits arrive in `valid` as they are made."""
    import ray.data

    config, store = ctx.config, ctx.run.store
    store.delete(ATTEMPTS)
    connect(config.ray)
    gpus = config.generate.tensor_parallel if gpu_count() else 0
    _check_resources(config, gpus)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.issue_detectors_config.detectors = []  # they tell of memory an engine is meant to use
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    items = [{"part": p, "key": keys[p]} for p in todo]
    replicas = min(config.generate.replicas, len(todo))
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
            _check_errors(list(valid.values()), ctx)
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


def _check_resources(config: Config, gpus: int) -> None:
    import ray

    resources = ray.cluster_resources()
    if gpus:
        need, have = gpus * config.generate.replicas, resources.get("GPU", 0)
        if need > have:
            raise UserError(
                f"generate needs {config.generate.replicas} x {gpus} = {need} GPUs and the cluster has {have:g};"
                " lower generate.replicas or generate.tensor_parallel"
            )
        return
    if config.generate.tensor_parallel > 1:
        raise UserError("generate.tensor_parallel is above 1 and the cluster has no GPU; set it to 1")
    need_cpus, have_cpus = config.ray.engine_cpus * config.generate.replicas, resources.get("CPU", 0)
    if need_cpus > have_cpus:
        raise UserError(
            f"generate needs {config.generate.replicas} x {config.ray.engine_cpus:g} = {need_cpus:g} CPUs and the"
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
        sampling={"temperature": g.temperature, "top_p": g.top_p, "top_k": g.top_k, "seed": g.seed},
        max_bad_rows=config.capture.max_bad_rows_per_part,
        row_timeout_s=g.row_timeout_s,
        max_attempts=g.max_attempts,
    )


def _check_errors(entries: list[PartEntry], ctx: StageContext) -> None:
    """Stop when more than generate.max_error_share of all rows failed."""
    rows = int(ctx.input("ingest").counts["kept"])
    reasons = Counter(r["reason"] for e in entries for r in e.rejects)
    cap = ctx.config.generate.max_error_share
    if reasons.total() > cap * rows:
        words = ", ".join(f"{r} {n}" for r, n in reasons.most_common())
        raise UserError(
            f"generate: {reasons.total()} of {rows} rows failed ({words}), more than generate.max_error_share"
            f" {cap:g}; their ids are in {ctx.run.url}/{PARTS}"
        )


def _result(ctx: StageContext, entries: list[PartEntry]) -> StageResult:
    tokens: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    finishes: Counter[str] = Counter()
    cut_short = sum(len(e.cut_short) for e in entries)
    for e in entries:
        tokens.update(e.tokens)
        finishes.update(e.finish_reasons)
        reasons.update(r["reason"] for r in e.rejects)
    rows_in = sum(e.rows_in for e in entries)
    kept = sum(e.conversations for e in entries)
    _check_errors(entries, ctx)
    if cut_short:
        log.warning("generate: %d conversations stop before their last turn; the part entries say why", cut_short)
    if kept == 0:
        raise UserError("generate: no row could be answered; the reasons are in the part entries")
    answered = finishes["stop"] + finishes["length"]
    if answered and finishes["length"] > 0.05 * answered:
        log.warning(
            "generate: %.0f %% of the answers were stopped by length (generate.max_new_tokens %d); they are kept"
            " without an end token",
            100 * finishes["length"] / answered,
            ctx.config.generate.max_new_tokens,
        )
    return StageResult(
        outputs=[],
        counts={
            "rows_in": rows_in,
            "kept": kept,
            "rejected": dict(reasons),
            "samples": sum(e.samples for e in entries),
            "tokens": dict(tokens),
            "bytes": sum(e.bytes for e in entries),
            "finish_reasons": dict(finishes),
            "cut_short": cut_short,
            "parts": len(entries),
        },
        seeds={"generate": ctx.config.generate.seed},
        digest=digest_of([[e.part, {k: f["sha256"] for k, f in e.files.items()}] for e in entries]),
        extra={"layers": list(ctx.layers), "target": ctx.target.to_json()},
    )


class PartWorker:
    """Ray Data actor: holds one engine and turns parts of conversations into committed parts of samples."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._store = Store(config.run_url, config.options)
        self._lock = threading.Lock()
        self._engine: Engine | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Make the parts named by `part` and `key`; several calls may run at once, each in a thread of its own.

        What a person can mend comes back as `{"fault": ...}`: Ray would wrap an exception in its own words.
        """
        outcomes = []
        for part, key in zip(batch["part"], batch["key"], strict=True):
            try:
                outcomes.append(asdict(self._make(int(part), str(key))))
            except UserError as error:
                outcomes.append({"fault": str(error)})
            except EngineError as error:
                # A dead engine must not take every retry: the process ends, Ray starts another and gives it the part.
                print(f"the engine failed and is replaced: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        return {"outcome": [json.dumps(o) for o in outcomes]}

    def _make(self, part: int, key: str) -> PartEntry:
        self._count_attempt(part)
        with self._lock:
            if self._engine is None:
                self._start()
        entry = asyncio.run_coroutine_threadsafe(self._make_part(part, key), self._loop).result()
        self._store.delete(f"{ATTEMPTS}/{part}.json")
        return entry

    def _count_attempt(self, part: int) -> None:
        """A part that ends the process each time it is tried must not be tried for ever."""
        path = f"{ATTEMPTS}/{part}.json"
        tried = (self._store.read_json(path) or {"tried": 0})["tried"]
        if tried >= self._config.max_attempts:
            raise UserError(
                f"generate: the engine's process ended {tried} times while making part {part}; look at the workers'"
                " logs (ray logs, or the dashboard) for its last words: out of memory is the usual one"
            )
        self._store.write_json(path, {"tried": tried + 1})

    def _start(self) -> None:
        config = self._config
        self._target = TargetInfo.from_json(config.target)
        self._tokenizer = load_tokenizer(self._target.model, config.spec.trust_remote_code, config.chat_template)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="draftmill-parts", daemon=True).start()
        self._engine = start_engine(config.engine, config.spec)

    async def _make_part(self, part: int, key: str) -> PartEntry:
        started = time.monotonic()
        rows = read_part(self._store, part)
        results = await asyncio.gather(*(self._answer(row) for row in rows))
        kept_rows: list[dict[str, Any]] = []
        states: list[Tensor] = []
        rejects: list[dict[str, str]] = []
        cut_short: list[dict[str, str]] = []
        bad_states: list[str] = []
        conversations = 0
        for row, (samples, error) in zip(rows, results, strict=True):
            if error is not None:
                fault = {
                    "id": row["id"],
                    "where": row["where"],
                    "reason": error.reason,
                    "detail": error.detail,
                }
                (cut_short if samples else rejects).append(fault)
                if error.reason == "bad_states":
                    bad_states.append(f"row {row['id']}: {error.detail}")
            conversations += bool(samples)
            for sample, state in samples:
                kept_rows.append(sample)
                states.append(state)
        if len(bad_states) > self._config.max_bad_rows:
            raise UserError(
                f"part {part}: the captured states of {len(bad_states)} rows fail their checks ({bad_states[0]});"
                " nothing learnt from such states is accepted when served. Try capture.mode=extract"
            )
        finishes = Counter(r["finish_reason"] for r in kept_rows)
        entry = {
            "part": part,
            "key": key,
            "rows_in": len(rows),
            "conversations": conversations,
            "rejects": rejects,
            "cut_short": cut_short,
            "tokens": {
                "prompt": sum(len(r["prompt_ids"]) for r in kept_rows),
                "answer": sum(len(r["answer_ids"]) for r in kept_rows),
                "supervised": sum(sum(r["loss_mask"]) for r in kept_rows),
            },
            "finish_reasons": dict(finishes),
            "layers": list(self._config.spec.aux_layer_ids),
            "dtype": self._config.spec.dtype,
            "hidden_size": self._target.hidden_size,
            "seconds": round(time.monotonic() - started, 3),
        }
        if conversations + sum(1 for r in rejects) != len(rows):
            raise RuntimeError(f"part {part}: {len(rows)} rows in, {conversations} kept, {len(rejects)} rejected")
        return await asyncio.to_thread(write_part, self._store, entry, kept_rows, states)

    async def _answer(self, row: dict[str, Any]) -> tuple[list[tuple[dict[str, Any], Tensor]], RowError | None]:
        """Samples of one conversation. A fault in a later turn keeps the turns before it."""
        samples: list[tuple[dict[str, Any], Tensor]] = []
        try:
            turns = self._as_is(row, samples) if row["use"] == "as_is" else self._regenerate(row, samples)
            await turns
        except RowError as error:
            return samples, error
        return samples, None

    async def _regenerate(self, row: dict[str, Any], samples: list[tuple[dict[str, Any], Tensor]]) -> None:
        kwargs = {**self._config.template_kwargs, **json.loads(row["template_kwargs"])}
        renderer = Renderer(self._tokenizer, kwargs)
        sampling = {**self._config.sampling, **json.loads(row["sampling"])}
        limit = int(sampling.pop("max_new_tokens", self._config.max_new_tokens))
        history: list[dict[str, Any]] = []
        for turn, group in enumerate(turns_to_answer(json.loads(row["messages"]))):
            history = [*history, *group]
            if turn == 0:
                prompt = list(row["prompt_ids"])
            else:
                prompt = await asyncio.to_thread(renderer.render, history, True)
                check_prompt_length(prompt, self._config.spec.max_model_len)
            room = self._config.spec.max_model_len - len(prompt)
            request = Request(f"{row['id']}-{turn}", prompt, min(limit, room), _sampling_of(sampling, row["id"], turn))
            done = await self._complete(request)
            if not done.answer_ids or len(done.answer_ids) < 2:
                raise RowError("empty_answer", f"turn {turn}: the target answered {len(done.answer_ids)} token(s)")
            text = self._tokenizer.decode(done.answer_ids, skip_special_tokens=True)
            history = [*history, {"role": "assistant", "content": text}]
            mask = [False] * len(prompt) + [True] * len(done.answer_ids)
            samples.append((self._sample(row, turn, history, request, done, mask, kwargs), done.states))

    async def _as_is(self, row: dict[str, Any], samples: list[tuple[dict[str, Any], Tensor]]) -> None:
        request = Request(f"{row['id']}-0", list(row["prompt_ids"]), 1, {}, list(row["answer_ids"]))
        done = await self._complete(request)
        kwargs = {**self._config.template_kwargs, **json.loads(row["template_kwargs"])}
        messages = json.loads(row["messages"])
        samples.append((self._sample(row, 0, messages, request, done, list(row["loss_mask"]), kwargs), done.states))

    async def _complete(self, request: Request) -> Completion:
        try:
            assert self._engine is not None
            done = await asyncio.wait_for(self._engine.complete(request), self._config.row_timeout_s)
        except TimeoutError as error:
            raise RowError("timeout", f"no answer within {self._config.row_timeout_s:g} s") from error
        expected = len(request.prompt_ids) + len(done.answer_ids) - 1
        if len(done.states) != expected:
            raise RowError("bad_states", f"{len(done.states)} states for {expected + 1} tokens")
        fault = check_states(done.states, (*self._config.spec.aux_layer_ids, self._config.spec.num_layers))
        if fault is not None:
            raise RowError("bad_states", fault)
        return done

    def _sample(
        self,
        row: dict[str, Any],
        turn: int,
        messages: list[dict[str, Any]],
        request: Request,
        done: Completion,
        mask: list[bool],
        template_kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        return {
            "sample_id": f"{row['id']}-{turn}",
            "conversation_id": row["id"],
            "turn": turn,
            "source": row["source"],
            "domain": row["domain"],
            "use": row["use"],
            "messages": json.dumps(messages, ensure_ascii=False),
            "template_kwargs": json.dumps(template_kwargs, ensure_ascii=False),
            "sampling": json.dumps(request.sampling),
            "prompt_ids": request.prompt_ids,
            "answer_ids": done.answer_ids,
            "loss_mask": mask,
            "mask_method": row["mask_method"],
            "finish_reason": done.finish_reason,
            "truncated": done.finish_reason == "length",
        }


def _sampling_of(values: dict[str, Any], identity: str, turn: int) -> dict[str, Any]:
    """Sampling of one request, seeded by the row: a part made again gets the same answers."""
    if values.get("temperature", 0) == 0:
        return {"temperature": 0.0}
    seed = (int(values.get("seed", 0)) + int(identity[:8], 16) + turn) % 2**31
    kept = {k: v for k, v in values.items() if k != "seed" and not (k == "top_k" and v <= 0)}
    return {**kept, "seed": seed}
