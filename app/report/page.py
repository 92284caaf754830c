"""The report as one HTML page: charts drawn here, words in `page.html.jinja`; nothing is fetched, nothing runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from app.plan.text import size_text, time_text
from app.report import charts
from app.report.charts import Bar, Estimate, Line, Row
from app.report.speed import cost_lines, engine_of, position_intervals, surfaces

_FOLDER = Path(__file__).parent
# What a page of an earlier or a half-made run may lack.
_ABSENT: dict[str, Any] = {
    "unfinished": {},
    "target": {},
    "planned": None,
    "doctor": None,
    "mix": [],
    "lengths": {"prompt": None, "answer": None, "max_length": None, "max_new_tokens": None},
    "masks": [],
    "masks_note": None,
}


def render(data: dict[str, Any]) -> str:
    """The page; everything that came from a file is escaped."""
    data = {**_ABSENT, **data}
    bench = data["results"].get("bench")
    made = {
        "charts": _charts(data),
        "cells": _cells(data),
        "cost_lines": cost_lines(bench or {}),
        "engine_name": engine_of(bench),
    }
    return environment().get_template("page.html.jinja").render(**data, **made, checks=doctor_checks(data["doctor"]))


def environment() -> jinja2.Environment:
    """Templates of this folder; what they are given is escaped."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {"comma": lambda v: f"{v:,.0f}", "size": size_text, "time": time_text, "said": said}
    env.filters["milliseconds"] = lambda seconds: f"{1000 * seconds:,.0f}"
    env.globals["value_text"] = value_text
    return env


def said(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def value_text(value: float | None, unit: str) -> str:
    """A planned or measured value with its unit."""
    if value is None:
        return "-"
    if unit == "bytes":
        return size_text(value)
    return time_text(value) if unit == "s" else f"{value:,.0f}"


def with_interval(value: float, interval: Any, digits: int = 3, scale: float = 1.0, unit: str = "") -> str:
    """`value (low to high)`, or the value alone."""
    text = f"{value * scale:.{digits}f}{unit}"
    if not interval:
        return text
    return f"{text} ({interval[0] * scale:.{digits}f} to {interval[1] * scale:.{digits}f})"


def doctor_checks(doctor: dict[str, Any] | None) -> list[dict[str, str]]:
    """Lines of the doctor's checklist: name, state, evidence, next step."""
    if doctor is None:
        return []
    lines = doctor.get("lines", [])
    return [
        {
            "name": f"{line.get('id', '')} {line.get('title', '')}".strip(),
            "state": str(line.get("state", "")),
            "evidence": ": ".join(str(line[k]) for k in ("cause", "evidence") if line.get(k)),
            "next_step": str(line.get("next_step") or ""),
        }
        for line in lines
        if isinstance(line, dict)
    ]


def _charts(data: dict[str, Any]) -> dict[str, Markup]:
    results, curve = data["results"], data["curve"]
    bench, estimate = results.get("bench"), results.get("evaluate")
    return {
        "rows": _rows(results),
        "tokens": _tokens(results),
        **_mix(data["mix"]),
        "prompt_lengths": _lengths(data["lengths"]["prompt"], "prompt tokens of a sample"),
        "answer_lengths": _lengths(data["lengths"]["answer"], "answer tokens of a sample"),
        "loss": _loss(curve),
        "validation": _validation(curve),
        "positions": _positions(bench, estimate),
        "domains": _domains(bench, estimate),
        "planned": _planned(data["planned"]),
        "times": _times(data["stages"]) if data["planned"] is None else Markup(""),
    }


def _rows(results: dict[str, Any]) -> Markup:
    if "rows" not in results:
        return Markup("")
    rows = results["rows"]
    steps = [("rows in", rows["in"]), ("drawn from the sources", rows["in"] - rows["not_drawn"])]
    steps += [("conversations kept", rows["kept"])]
    if "samples" in results:
        steps.append(("samples (a turn each)", results["samples"]))
    if "train" in results and "samples" in results["train"]:
        steps.append(("samples trained on", results["train"]["samples"]))
    return charts.bars([Bar(name, f"{n:,.0f}", [n]) for name, n in steps], "rows from the sources to training")


def _tokens(results: dict[str, Any]) -> Markup:
    if "tokens_by_kind" not in results:
        return Markup("")
    kinds = results["tokens_by_kind"]
    steps = [("seen by the target", results["tokens"]), ("answered", kinds["answer"])]
    steps.append(("supervised", kinds["supervised"]))
    if "vocab" in results:
        vocab = results["vocab"]
        train = vocab["supervised_tokens"]["train"]
        steps += [("of them for training", train), ("in the draft's vocabulary", train * vocab["coverage"]["train"])]
    return charts.bars([Bar(name, f"{n:,.0f}", [n]) for name, n in steps], "tokens from the target to the draft")


def _mix(mix: list[dict[str, Any]]) -> dict[str, Markup]:
    """Supervised tokens by source and by domain."""
    found = {}
    for part in ("source", "domain"):
        tokens: Counter[str] = Counter()
        samples: Counter[str] = Counter()
        for group in mix:
            tokens[group[part]] += group["tokens"]["supervised"]
            samples[group[part]] += group["samples"]
        total = max(1, sum(tokens.values()))
        rows = [
            Bar(name, f"{100 * n / total:.1f} %, {samples[name]:,} samples", [float(n)])
            for name, n in tokens.most_common(20)
        ]
        found[f"mix_{part}"] = charts.bars(rows, f"supervised tokens by {part}")
    return found


def _lengths(table: dict[str, Any] | None, title: str) -> Markup:
    if table is None:
        return Markup("")
    bins = [(f"{edge:,}", count) for edge, count in zip(table["edges"], table["counts"], strict=False)]
    return charts.histogram(bins, title, f"{table['edges'][-1]:,}")


def _loss(curve: dict[str, list[dict[str, Any]]]) -> Markup:
    lines = [Line("training", [(p["step"], p["value"]) for p in curve["train"]])]
    valid = [(p["step"], p["loss"]) for p in curve["valid"] if p.get("loss") is not None]
    lines += [Line("validation", valid, dots=True)] if valid else []
    return charts.line_chart(lines, "loss by step")


def _validation(curve: dict[str, list[dict[str, Any]]]) -> Markup:
    points = [(p["step"], p["value"]) for p in curve["valid"]]
    band = [(p["step"], *p["interval"]) for p in curve["valid"] if p.get("interval")]
    return charts.line_chart([Line("acceptance length", points, band, dots=True)], "acceptance length by step")


def _positions(bench: dict[str, Any] | None, estimate: dict[str, Any] | None) -> Markup:
    """By position: what the engine accepted, and what the walk predicted."""
    served = bench["acceptance_per_position"] if bench else []
    offline = estimate["acceptance_per_position"] if estimate else []
    served_ends = position_intervals(bench, estimate) if bench else []
    offline_ends = (estimate or {}).get("interval_per_position", [])
    rows = []
    for i in range(max(len(served), len(offline))):
        estimates, words = [], []
        for series, (values, ends) in enumerate(((served, served_ends), (offline, offline_ends))):
            if i < len(values):
                low, high = ends[i] if i < len(ends) else (None, None)
                estimates.append(Estimate(values[i], low, high, series))
                words.append(with_interval(values[i], ends[i] if i < len(ends) else None, 1, 100, " %"))
        rows.append(Row(f"position {i + 1}", "; ".join(words), estimates))
    return charts.intervals(rows, "acceptance by position", percent=True)


def _domains(bench: dict[str, Any] | None, estimate: dict[str, Any] | None) -> Markup:
    rows = []
    served = (bench or {}).get("domains") or {}
    offline = (estimate or {}).get("domains", {})
    for name in sorted(served.keys() | offline.keys()):
        estimates, words = [], []
        for series, found in enumerate((served.get(name), offline.get(name))):
            if found is None:
                continue
            one = found.get("conversations") == 1  # which has no interval
            low, high = (None, None) if one else found.get("interval") or (None, None)
            estimates.append(Estimate(found["acceptance_length"], low, high, series))
            words.append(with_interval(found["acceptance_length"], None if one else found.get("interval")))
        rows.append(Row(name, "; ".join(words), estimates))
    return charts.intervals(rows, "acceptance length by domain")


def _planned(planned: dict[str, Any] | None) -> Markup:
    if planned is None:
        return Markup("")
    rows = [
        Bar(
            r["what"],
            f"{value_text(r['planned'], 's')} planned, {value_text(r['actual'], 's')}",
            [r["planned"], r["actual"]],
        )
        for r in planned["rows"]
        if r["unit"] == "s" and not r["what"].startswith("finished")
    ]
    return charts.bars(rows, "seconds planned and taken")


def _times(stages: dict[str, dict[str, Any]]) -> Markup:
    return charts.bars([Bar(n, time_text(s["seconds"]), [s["seconds"]]) for n, s in stages.items()], "time by stage")


def _cells(data: dict[str, Any]) -> list[dict[str, Any]]:
    """One map of speed-ups for each domain and temperature that the bench went through."""
    bench = data["results"].get("bench")
    if bench is None:
        return []
    axes = ("draft tokens", "requests at once")
    return [
        {"title": s.title, "chart": charts.heatmap(axes, s.columns, s.rows, s.values, f"speed-up, {s.title}")}
        for s in surfaces(bench)
    ]
