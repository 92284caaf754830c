"""What a finished run, or a probe, tells of rates; and planned against actual."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

from app.errors import UserError
from app.parts import read_entry
from app.pipeline import BESIDE_S
from app.plan.estimate import PLAN_FILE
from app.runfolder import RunFolder

_PREFILL_GAIN = 2.2  # prompt tokens/s over answer tokens/s on a GPU; see rough_rates
_PREFILL_GAIN_CPU = 4.0
STAGES = ("ingest", "generate", "quality", "vocab", "train", "export", "evaluate", "bench", "report")


@dataclass(frozen=True)
class Timings:
    """Seconds and tokens of one run. Rates come out for one engine and one worker."""

    generate_s: float
    parts_s: float  # of making the parts, one after another
    prompt_tokens: int
    answer_tokens: int
    engines: int = 1
    train_s: float | None = None  # the whole stage
    train_tokens: float = 0.0  # over all epochs
    train_tokens_per_s: float | None = None  # steady, by its log
    workers: int = 1
    bench_s: float | None = None
    bench_passes_s: float = 0.0
    bench_starts: int = 2
    bench_tokens_per_s: float | None = None
    draft_tokens_per_s: float | None = None
    on_gpu: bool = False


def rates_of(t: Timings) -> dict[str, float]:
    """Values for `Rates.with_values`; what was not measured is absent."""
    gain = _PREFILL_GAIN if t.on_gpu else _PREFILL_GAIN_CPU
    busy = min(t.parts_s, t.generate_s)
    values: dict[str, float] = {}
    if busy > 0 and t.answer_tokens:
        values["generate_tokens_per_s"] = (t.answer_tokens + t.prompt_tokens / gain) / busy / t.engines
        values["prefill_tokens_per_s"] = values["generate_tokens_per_s"] * gain
        values["engine_start_s"] = max(0.1, t.generate_s - busy)
    if t.train_s is not None and t.train_tokens_per_s:
        values["train_tokens_per_s"] = t.train_tokens_per_s / t.workers
        values["train_start_s"] = max(0.1, t.train_s - t.train_tokens / t.train_tokens_per_s)
    if t.bench_s is not None and t.bench_tokens_per_s and t.draft_tokens_per_s:
        values["bench_tokens_per_s"] = t.bench_tokens_per_s
        values["draft_tokens_per_s"] = t.draft_tokens_per_s
        values["bench_start_s"] = max(0.1, (t.bench_s - t.bench_passes_s) / t.bench_starts)
    return values


def timings_of(run: RunFolder, engines: int, workers: int, on_gpu: bool) -> Timings:
    """Timings of a run whose parts were made one after another (`generate.parts_in_flight` 1).

    Raises:
        UserError: generate is not finished there.
    """
    generate = run.manifest("generate")
    if generate is None:
        raise UserError(f"{run.url}: generate is not finished, so nothing can be measured")
    entries = [read_entry(run.store, part) for part in range(int(generate.counts["parts"]))]
    tokens = generate.counts["tokens"]
    train, bench = run.manifest("train"), run.manifest("bench")
    steady, trained = _train_log(run) if train is not None else (None, 0.0)
    speed = bench.counts["tokens_per_second"] if bench is not None else {}
    return Timings(
        generate_s=generate.seconds,
        parts_s=sum(e.seconds for e in entries if e is not None) / engines,
        prompt_tokens=int(tokens["prompt"]),
        answer_tokens=int(tokens["answer"]),
        engines=engines,
        train_s=train.seconds if train is not None else None,
        train_tokens=trained,
        train_tokens_per_s=steady,
        workers=workers,
        bench_s=bench.seconds if bench is not None else None,
        bench_passes_s=bench.counts["passes_s"] if bench is not None else 0.0,
        bench_starts=bench.counts["server_starts"] if bench is not None else 2,
        bench_tokens_per_s=speed.get("baseline"),
        draft_tokens_per_s=speed.get("draft"),
        on_gpu=on_gpu,
    )


def _train_log(run: RunFolder) -> tuple[float | None, float]:
    """Tokens/s of the later half of the logged windows, validation apart, and the tokens of all of them."""
    rates, tokens, before = [], 0.0, 0.0
    for text in run.store.read_bytes("train/metrics.jsonl").decode().splitlines():
        row: dict[str, Any] = json.loads(text)
        if not row.get("tokens_per_s"):
            continue
        rates.append(float(row["tokens_per_s"]))
        tokens += rates[-1] * max(0.0, float(row["seconds"]) - before)
        before = float(row["seconds"])
    # The mean over tokens: half of the time is spent on slow windows.
    late = rates[len(rates) // 2 :]
    return (statistics.harmonic_mean(late) if late else None), tokens


def compare(run: RunFolder) -> list[tuple[str, float | None, float | None]]:
    """(what and unit, planned, actual) of a run with a plan; None where a stage is not finished.

    Raises:
        UserError: the run has no plan, or nothing of it is finished.
    """
    plan = run.store.read_json(PLAN_FILE)
    if not isinstance(plan, dict) or not {"stages", "rows", "samples", "prompt_tokens"} <= plan.keys():
        raise UserError(f"{run.url} has no {PLAN_FILE}; `draftmill plan CONFIG` writes one before the run")
    manifests = {name: run.manifest(name) for name in STAGES}
    if not any(manifests.values()):
        raise UserError(f"{run.url}: no stage is finished, so there is nothing to compare")
    generate = manifests["generate"]
    counts = generate.counts if generate is not None else {}
    tokens = counts.get("tokens", {})
    pairs: list[tuple[str, float | None, float | None]] = [
        ("conversations rows", plan["rows"], counts.get("kept")),
        ("samples n", plan["samples"], counts.get("samples")),
        ("prompt tokens n", plan["prompt_tokens"], tokens.get("prompt")),
        ("answer tokens n", plan["answer_tokens"], tokens.get("answer")),
        ("states and rows bytes", plan["bytes"], counts.get("bytes")),
    ]
    for stage in plan["stages"]:
        manifest = manifests.get(stage["name"])
        pairs.append((f"{stage['name']} s", stage["seconds"], manifest.seconds if manifest is not None else None))
    done = [(s["seconds"], m.seconds) for s in plan["stages"] if (m := manifests.get(s["name"])) is not None]
    trained = manifests["train"]  # the time in which generate and training both ran counts once
    planned, taken = (plan.get("overlap_s", 0.0), trained.extra.get(BESIDE_S, 0.0)) if trained is not None else (0, 0)
    pairs.append(("finished stages s", sum(p for p, _ in done) - planned, sum(a for _, a in done) - taken))
    return pairs
