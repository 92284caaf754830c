"""The plan of a run: tokens, bytes, hours and memory, what limits it, and whether it fits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from app.bench.sets import SetTurns
from app.config import Config
from app.errors import UserError
from app.pipeline import StageContext
from app.plan.bench import bench_assumptions, bench_seconds
from app.plan.cost import Shape, naive_bytes, other_bytes, part_bytes, shape_of, train_memory
from app.plan.hardware import GIB, Hardware, Rates, free_bytes
from app.plan.tokens import Length, SourceTokens, TokenStats, stats_of_ingest
from app.sizing import numbers, settled, train_gpus
from app.storage import Store

log = logging.getLogger("draftmill")
FULL = 0.9  # of the free space, what a run may take
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
PLAN_FILE = "plan.json"  # in the run folder
_ENOUGH_CUT = 0.01  # share of the samples a context length may cut unnoticed
_VOCAB_TOKENS_PER_S = 2e6
_QUALITY_TOKENS_PER_S = 150_000  # decoding and judging, one core
_INGEST_ROWS_PER_S = 800.0
_EVALUATE_GAIN = 3.0  # tokens/s of the walk over those of training


@dataclass(frozen=True)
class StagePlan:
    name: str
    seconds: float
    gpus: int  # it holds meanwhile

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.seconds / 3600


@dataclass(frozen=True)
class ContextRow:
    """What generate.max_length = `length` would do to the sampled requests."""

    length: int
    rejected: float  # share whose prompt leaves no room
    cut: float  # share whose answer ends early
    tokens_lost: float  # share of the tokens


@dataclass(frozen=True)
class Limit:
    """A need that is not met: `change` names the number."""

    what: str
    change: str


@dataclass(frozen=True)
class Plan:
    rows: int
    samples: float
    prompt_tokens: float
    answer_tokens: float
    train_tokens: float  # of one epoch
    sources: list[dict[str, Any]]
    bytes: float  # of the parts
    other_bytes: float
    forms: dict[str, float]  # storage form -> bytes
    bytes_bound: float  # should every answer reach its bound
    stages: list[StagePlan]
    second_pass_s: float
    train_memory: float  # bytes, one worker
    hardware: Hardware
    rates: Rates
    contexts: list[ContextRow]
    max_length: int
    limits: list[Limit]
    slowest: str
    advice: list[str]
    assumptions: list[str]
    origin: str
    price: float | None = None  # USD for a GPU-hour
    node: list[str] = field(default_factory=list)  # what a node has and what an engine needs of it, in words
    overlap_s: float = 0.0  # in which generate and training both run (train.start_after)

    @property
    def seconds(self) -> float:
        return sum(s.seconds for s in self.stages) - self.overlap_s

    @property
    def gpu_hours(self) -> float:
        return sum(s.gpu_hours for s in self.stages)

    @property
    def disk(self) -> float:
        return self.bytes + self.other_bytes

    @property
    def fits(self) -> bool:
        return not self.limits

    def require_fit(self) -> None:
        """Raises UserError naming the number to change, where the run cannot fit."""
        if self.limits:
            first = self.limits[0]
            raise UserError(f"this run cannot fit: {first.what}; {first.change}")

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["rates"] = self.rates.to_json()
        for stage, plan in zip(data["stages"], self.stages, strict=True):
            stage["gpu_hours"] = plan.gpu_hours
        return data | {"seconds": self.seconds, "gpu_hours": self.gpu_hours, "disk": self.disk, "fits": self.fits}


def make_plan(
    config: Config,
    shape: Shape,
    stats: TokenStats,
    hardware: Hardware,
    rates: Rates,
    price: float | None = None,
    committed: float = 0.0,
    sets: SetTurns | None = None,
) -> Plan:
    """Work it all out; nothing is read or written.

    Args:
        committed: bytes of parts that are on the disk already.
        sets: turns of `bench.sets`; None: there are no sets.
    """
    config = settled(config, shape, hardware)
    size = part_bytes(stats, shape, config.storage.rows_per_part)
    bound = part_bytes(at_bound(stats, config), shape, config.storage.rows_per_part)
    rest = other_bytes(stats, shape, config)
    train_tokens = stats.tokens * _train_share(config, stats.rows)
    sets = sets or SetTurns()
    stages = _stages(config, stats, rates, train_tokens, hardware, sets)
    longest = max((x.total for s in stats.sources for x in s.lengths), default=0)
    supervised = stats.teacher / max(1.0, stats.tokens)
    memory = train_memory(shape, config, hardware.on_gpu, longest, supervised)
    contexts = context_table(stats, config)
    second = (
        stats.samples / rates.extract_samples_per_s.value
        if rates.extract_samples_per_s is not None
        else stats.tokens / rates.extract_tokens_per_s.value / numbers(config)[0]
    )
    return Plan(
        rows=stats.rows,
        samples=stats.samples,
        prompt_tokens=stats.prompt,
        answer_tokens=stats.answer,
        train_tokens=train_tokens,
        sources=[_source_json(s, shape, config) for s in stats.sources],
        bytes=size,
        other_bytes=rest,
        forms={
            "four states of every token, float32": naive_bytes(stats.tokens, shape.hidden, 4),
            f"four states of every token, {config.target.dtype}": naive_bytes(
                stats.tokens, shape.hidden, shape.value_bytes
            ),
            "draftmill: three states, the last where it teaches": size,
        },
        bytes_bound=bound,
        stages=stages,
        second_pass_s=second,
        train_memory=memory,
        hardware=hardware,
        rates=rates,
        contexts=contexts,
        max_length=config.generate.max_length,
        limits=[
            *_row_limits(config, stats.rows),
            *disk_limits(config, stats, shape, size + rest - committed, hardware.disk_free),
            *_hardware_limits(config, shape, hardware, memory),
        ],
        slowest=max(stages, key=lambda s: s.seconds).name,
        advice=advice(config, stats, hardware, contexts),
        assumptions=[*stats.assumptions, *bench_assumptions(config, sets)],
        origin=stats.origin,
        price=price,
        overlap_s=_overlap(config, stages, rates),
    )


def at_bound(stats: TokenStats, config: Config) -> TokenStats:
    """The same samples, should every regenerated answer reach its limit."""
    g = config.generate
    sources = []
    for s in stats.sources:
        if s.use == "regenerate":
            lengths = [Length(x.prompt, min(g.max_new_tokens, g.max_length - x.prompt)) for x in s.lengths]
            s = replace(s, lengths=tuple(lengths))
        sources.append(s)
    return replace(stats, sources=tuple(sources))


def _train_share(config: Config, rows: int) -> float:
    held = min(config.evaluate.holdout, rows)
    return (1 - held / max(1, rows)) * (1 - config.train.validation_share)


def _stages(
    config: Config, stats: TokenStats, rates: Rates, train_tokens: float, hardware: Hardware, sets: SetTurns
) -> list[StagePlan]:
    t = config.train
    replicas, tensor_parallel = numbers(config)
    held = min(1.0, config.evaluate.holdout / max(1, stats.rows))
    prefilled = stats.tokens - stats.decoded
    per_engine = stats.decoded / rates.generate_tokens_per_s.value + prefilled / rates.prefill_tokens_per_s.value
    generate = rates.engine_start_s.value + per_engine / replicas
    train = rates.train_start_s.value + t.epochs * train_tokens / rates.train_tokens_per_s.value / t.workers
    walk = 1.5 + stats.tokens * held / (_EVALUATE_GAIN * rates.train_tokens_per_s.value) if held else 0.0
    engine_gpus = tensor_parallel if hardware.on_gpu else 0
    return [
        StagePlan("ingest", 0.3 + stats.rows / _INGEST_ROWS_PER_S, 0),
        StagePlan("generate", generate, engine_gpus * replicas),
        StagePlan("quality", 0.2 + stats.answer / _QUALITY_TOKENS_PER_S, 0),
        StagePlan("vocab", 0.5 + stats.answer / _VOCAB_TOKENS_PER_S, 0),
        StagePlan("train", train, t.workers if hardware.on_gpu and t.use_gpu is not False else 0),
        StagePlan("export", 0.5, 0),
        StagePlan("evaluate", walk, 0),
        StagePlan(
            "bench", bench_seconds(config, stats, rates, held, sets), engine_gpus if config.bench.server is None else 0
        ),
        StagePlan("report", 0.1, 0),
    ]


def _overlap(config: Config, stages: list[StagePlan], rates: Rates) -> float:
    """Seconds that `train.start_after` saves: of the first epoch of training what can be done before the last window is
    sealed, at the end of generate."""
    share = config.train.start_after
    if share is None:
        return 0.0
    seconds = {s.name: s.seconds for s in stages}
    beside = (1 - share) * seconds["generate"]
    start = rates.train_start_s.value
    epoch = (seconds["train"] - start) / config.train.epochs
    return min(beside, start + (1 - share) * epoch)


def _source_json(source: SourceTokens, shape: Shape, config: Config) -> dict[str, Any]:
    alone = TokenStats((source,), "")
    totals = sorted(x.total for x in source.wanted)
    return {
        "name": source.name,
        "use": source.use,
        "rows": source.rows,
        "samples": source.samples,
        "prompt_tokens": source.prompt,
        "answer_tokens": source.answer,
        "bytes": part_bytes(alone, shape, config.storage.rows_per_part),
        "quantiles": {q: totals[min(len(totals) - 1, int(q * len(totals)))] for q in (0.5, 0.9, 0.99)}
        if totals
        else {},
        "longest": totals[-1] if totals else 0,
    }


def context_table(stats: TokenStats, config: Config) -> list[ContextRow]:
    """What each candidate context length would reject and cut; lengths as wanted, max_new_tokens applied."""
    requests: list[tuple[float, Length]] = []
    for s in stats.sources:
        weight = s.samples / max(1, len(s.wanted))
        for x in s.wanted:
            answer = min(x.answer, config.generate.max_new_tokens) if s.use == "regenerate" else x.answer
            requests.append((weight, Length(x.prompt, answer)))
    count = sum(w for w, _ in requests)
    tokens = sum(w * x.total for w, x in requests)
    longest = max((x.total for _, x in requests), default=0)
    wider = next((c for c in CONTEXTS if c >= longest), CONTEXTS[-1])
    rows = []
    for length in sorted({*(c for c in CONTEXTS if c <= wider), config.generate.max_length}):
        rejected = sum(w for w, x in requests if length - x.prompt < 2)
        cut = sum(w for w, x in requests if length - x.prompt >= 2 and x.total > length)
        lost = sum(w * (x.total if length - x.prompt < 2 else max(0, x.total - length)) for w, x in requests)
        rows.append(ContextRow(length, rejected / max(count, 1e-9), cut / max(count, 1e-9), lost / max(tokens, 1e-9)))
    return rows


def disk_limits(
    config: Config, stats: TokenStats, shape: Shape, need: float, free: int | None
) -> list[Limit]:  # fmt: skip
    """The limit a disk sets: at most FULL of what is free. Says how many rows would fit."""
    if free is None or need <= FULL * free:
        return []
    room = FULL * free - other_bytes(stats.scaled(0), shape, config)
    per_row = (need - other_bytes(stats.scaled(0), shape, config)) / max(1, stats.rows)
    rows = max(0, math.floor(room / per_row)) if per_row > 0 else 0
    if rows:
        change = (
            f"lower the rows to {rows:,} (sources.N.count), lower generate.max_new_tokens"
            f" ({config.generate.max_new_tokens}), or move run_dir to a disk with {need / FULL / 1e9:,.2f} GB free"
        )
    else:
        change = f"move run_dir to a disk with {need / FULL / 1e9:,.2f} GB free"
    what = (
        f"{stats.rows:,} rows need {need / 1e9:,.2f} GB and {FULL:.0%} of what is free at {config.run_dir} is"
        f" {FULL * free / 1e9:,.2f} GB"
    )
    return [Limit(what, change)]


def _row_limits(config: Config, rows: int) -> list[Limit]:
    """generate refuses such a run too, after ingest."""
    held = config.evaluate.holdout
    if rows > held:
        return []
    what = f"evaluate.holdout keeps {held} conversations from training and the sources hold {rows} that can be used"
    return [Limit(what, "lower evaluate.holdout or bring more prompts")]


def _hardware_limits(config: Config, shape: Shape, hardware: Hardware, memory: float) -> list[Limit]:
    g, t = config.generate, config.train
    replicas, tensor_parallel = numbers(config)
    limits = []
    if hardware.on_gpu:
        need, trains = replicas * tensor_parallel, train_gpus(config, on_gpu=True)
        if t.start_after is not None and need <= hardware.gpus < need + trains:
            change = "lower train.workers or generate.replicas, or leave train.start_after out"
            limits.append(Limit(f"generate and training need {need} + {trains} GPUs of {hardware.gpus}", change))
        if need > hardware.gpus:
            limits.append(Limit(f"generate needs {need} GPUs of {hardware.gpus}", "lower generate.replicas"))
        if t.workers > hardware.gpus and t.use_gpu is not False:
            limits.append(Limit(f"training needs {t.workers} GPUs of {hardware.gpus}", "lower train.workers"))
        if hardware.gpu_memory_gib is not None:
            have = hardware.gpu_memory_gib * GIB
            weights = shape.target_bytes / tensor_parallel
            if weights > g.gpu_memory_utilization * have:
                limits.append(
                    Limit(
                        f"the target's weights are {weights / GIB:.0f} GiB for a GPU of {hardware.gpu_memory_gib:.0f}",
                        "use larger GPUs or a quantised target",
                    )
                )
            if memory > 0.95 * have and t.use_gpu is not False:
                limits.append(
                    Limit(
                        f"training needs about {memory / GIB:.0f} GiB of a GPU of {hardware.gpu_memory_gib:.0f}",
                        f"lower generate.max_length ({g.max_length}), train.unroll_steps ({t.unroll_steps}) or"
                        f" vocab.size ({shape.draft_vocab})",
                    )
                )
    elif hardware.memory_gib is not None:
        need_bytes = memory * t.workers
        if need_bytes > 0.9 * hardware.memory_gib * GIB:
            limits.append(
                Limit(
                    f"training needs about {need_bytes / GIB:.0f} GiB of {hardware.memory_gib:.0f} GiB",
                    f"lower train.workers ({t.workers}), train.tokens_per_step ({t.tokens_per_step}) or"
                    f" generate.max_length ({g.max_length})",
                )
            )
        engine = (shape.target_bytes + g.kv_cache_gib * GIB) * replicas
        if t.start_after is not None and engine + need_bytes > 0.9 * hardware.memory_gib * GIB:
            both = f"engine(s) and training need {(engine + need_bytes) / GIB:.0f} GiB together"
            change = "leave train.start_after out: then one runs after the other"
            limits.append(Limit(f"{both} of {hardware.memory_gib:.0f} GiB", change))
        if engine > 0.9 * hardware.memory_gib * GIB:
            limits.append(
                Limit(
                    f"{replicas} engine(s) need {engine / GIB:.0f} GiB of {hardware.memory_gib:.0f} GiB",
                    f"lower generate.replicas ({replicas}) or generate.kv_cache_gib ({g.kv_cache_gib:g})",
                )
            )
    return limits


def advice(config: Config, stats: TokenStats, hardware: Hardware, contexts: list[ContextRow]) -> list[str]:
    """What the numbers suggest, with the published anchors."""
    lines = []
    rows = stats.rows
    if rows < 10_000:
        lines.append(
            f"{rows:,} rows are few: for small targets returns diminish between 10,000 and 50,000; a trial, not a draft"
            " to serve"
        )
    elif rows <= 50_000:
        lines.append(f"{rows:,} rows are in the range (10,000 to 50,000) where returns diminish for small targets")
    else:
        lines.append(
            f"{rows:,} rows are beyond the 10,000 to 50,000 where returns diminish for small targets; the EAGLE-3"
            " paper used about 500,000"
        )
    now = next(r for r in contexts if r.length == config.generate.max_length)
    enough = next((r.length for r in contexts if r.cut + r.rejected <= _ENOUGH_CUT), None)
    if now.cut + now.rejected > _ENOUGH_CUT:
        hint = f"; {enough} would cut at most 1 %" if enough is not None else ""
        lines.append(
            f"generate.max_length {now.length} cuts or rejects {now.cut + now.rejected:.1%} of the samples{hint}"
        )
    elif enough is not None and enough < now.length:
        lines.append(
            f"generate.max_length {now.length} is longer than the samples need; {enough} cuts at most 1 % and saves"
            " memory"
        )
    if hardware.on_gpu:
        replicas, tensor_parallel = numbers(config)
        beside = train_gpus(config, on_gpu=True) if config.train.start_after is not None else 0
        free_engines = (hardware.gpus - beside) // tensor_parallel
        if replicas < free_engines:
            lines.append(
                f"{hardware.gpus} GPUs, and generate.replicas is {replicas}: {free_engines} engines"
                f" would take 1/{free_engines / replicas:g} of the time"
            )
        if config.train.workers < hardware.gpus:
            lines.append(f"train.workers is {config.train.workers} of {hardware.gpus} GPUs")
    return lines


def check_fits(
    ctx: StageContext,
    todo: Iterable[int],
    free: Callable[[Store], int | None] = free_bytes,
) -> None:
    """Refuse to generate the ingest parts `todo` where their states cannot fit beside what is on the disk.

    Reads prompts of ingest, no engine. Stores that do not say what is free are not checked.

    Raises:
        UserError: in one sentence, with the number to change.
    """
    parts = list(todo)
    store, config = ctx.run.store, ctx.config
    room = free(store)
    if room is None:
        log.info("generate: %s does not say what is free; the size of the states is not checked", store.url)
        return
    if not parts:
        return
    shape, stats = shape_of(ctx.target, config), stats_of_ingest(config, store, parts)
    need = part_bytes(stats, shape, config.storage.rows_per_part) + other_bytes(stats, shape, config)
    for limit in disk_limits(config, stats, shape, need, room):
        raise UserError(f"generate: this run cannot fit: {limit.what}; {limit.change}")
    bound = part_bytes(at_bound(stats, config), shape, config.storage.rows_per_part)
    log.info(
        "generate: the run will take about %.2f GB of %.2f GB free",
        need / 1e9, room / 1e9,
    )  # fmt: skip
    if bound > FULL * room:
        log.warning(
            "generate: should every answer reach generate.max_new_tokens %d, the states need %.2f GB and %.2f GB are"
            " free; lower it if answers are long",
            config.generate.max_new_tokens, bound / 1e9, room / 1e9,
        )  # fmt: skip
