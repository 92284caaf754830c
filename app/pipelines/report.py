"""Report: one self-contained HTML page from the manifests of the run."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2

from app.pipeline import StageContext, StageResult
from app.results import collect
from app.runfolder import RunFolder

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_STAGES = ("ingest", "generate", "quality", "vocab", "train", "export", "evaluate", "bench")


def run(ctx: StageContext) -> StageResult:
    """Write `report/report.html` and `report/report.json`."""
    data = report_data(ctx.run)
    ctx.run.store.write_bytes("report/report.html", render(data).encode())
    ctx.run.store.write_json("report/report.json", data)
    return StageResult(outputs=["report/report.html", "report/report.json"])


def report_data(run: RunFolder) -> dict[str, Any]:
    """Everything the page shows, each figure from a file of the run folder."""
    results = collect(run)
    manifests = {name: m for name in _STAGES if (m := run.manifest(name)) is not None}
    return {
        "run": run.url,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "verdict": verdict(results),
        "results": results,
        "stages": {n: {"seconds": m.seconds, "started": m.started, "digest": m.digest} for n, m in manifests.items()},
        "versions": manifests["generate"].versions,
        "git_revision": manifests["generate"].git_revision,
        "seeds": {k: v for m in manifests.values() for k, v in m.seeds.items()},
        "serve": run.store.read_json("export/serve.json") or {},
        "curve": loss_curve(run),
    }


def verdict(results: dict[str, Any]) -> str:
    """One sentence a person can decide by."""
    bench = results["bench"]
    speedup = bench["speedup"]
    length = f"an acceptance length of {bench['acceptance_length']:.2f}"
    at = f"at {bench['concurrency']} requests at once"
    if not bench["comparable"]:
        return (
            f"The draft is accepted, with {length}; the speeds cannot be compared, because other programs took the"
            " processor while they were measured."
        )
    if speedup >= 1.02:
        return f"The draft serves {speedup:.2f} times as fast as no draft {at}, with {length}."
    if speedup <= 0.98:
        return (
            f"The draft is accepted ({length}), but serving with it is {1 / speedup:.2f} times slower than without"
            f" {at}; leave it off here."
        )
    return f"The draft neither gains nor loses speed {at}, with {length}."


def loss_curve(run: RunFolder) -> dict[str, list[dict[str, float]]]:
    """Points of the training log, thinned to what a page can show."""
    try:
        text = run.store.read_bytes("train/metrics.jsonl").decode()
    except FileNotFoundError:
        return {"train": [], "valid": []}
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    train = [r for r in rows if "loss" in r]
    valid = [r["validation"] for r in rows if "validation" in r]
    every = max(1, len(train) // 200)
    return {
        "train": [{"step": r["step"], "value": r["loss"]} for r in train[::every]],
        "valid": [{"step": r["step"], "value": r["acceptance_length"]} for r in valid],
    }


def polyline(points: list[dict[str, float]], width: int, height: int) -> dict[str, Any]:
    """An SVG polyline of (step, value) points with the range it spans."""
    if not points:
        return {"points": "", "low": 0.0, "high": 0.0, "first": 0, "last": 0}
    steps, values = [p["step"] for p in points], [p["value"] for p in points]
    low, high = min(values), max(values)
    span_x, span_y = max(1e-9, max(steps) - min(steps)), max(1e-9, high - low)
    pairs = (
        f"{(s - min(steps)) / span_x * width:.1f},{height - (v - low) / span_y * height:.1f}"
        for s, v in zip(steps, values, strict=True)
    )
    return {"points": " ".join(pairs), "low": low, "high": high, "first": min(steps), "last": max(steps)}


def render(data: dict[str, Any]) -> str:
    """The page; everything that came from a file is escaped."""
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.globals["polyline"] = polyline
    env.filters["comma"] = lambda v: f"{v:,.0f}"
    return env.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(**data)
