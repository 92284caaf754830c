"""Speed and acceptance as the bench measured them, in the shapes the page and the comparison want."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from app.report.charts import Estimate

Interval = tuple[float, float]


def wilson(hits: float, trials: float) -> tuple[float, float]:
    """95 % interval of a share by Wilson's score, trials taken as independent; (0, 1) without a trial."""
    if trials <= 0:
        return 0.0, 1.0
    z, p = 1.959964, hits / trials
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def engine_of(bench: dict[str, Any] | None) -> str:
    """Name of the engine that served: vLLM has counters, SGLang gauges alone."""
    return "SGLang" if bench is not None and bench.get("gauges") else "vLLM"


def position_intervals(bench: dict[str, Any], estimate: dict[str, Any] | None) -> list[Interval]:
    """95 % interval of the served acceptance at each position; see `length_interval`."""
    if bench.get("interval_per_position"):
        return [(low, high) for low, high in bench["interval_per_position"]]
    rates, drafts = bench["acceptance_per_position"], bench["drafts"]
    offline = (estimate or {}).get("interval_per_position") or []
    if len(offline) != len(rates) or estimate is None:
        return [wilson(rate * drafts, drafts) for rate in rates]
    shares = zip(rates, estimate["acceptance_per_position"], offline, strict=True)
    return [(max(0.0, rate - share + low), min(1.0, rate - share + high)) for rate, share, (low, high) in shares]


def length_interval(bench: dict[str, Any], estimate: dict[str, Any] | None) -> Interval | None:
    """95 % interval of the served acceptance length; None without counters or without rates by position.

    The bench's own where it has one. Counters do not tell conversations apart, so else the offline estimate lends its
    width: it walks the same conversations. Without it drafts are taken as independent, which is too narrow: a draft
    accepts R = 0..k tokens, and E[R], E[R^2] follow from the rates, P(R >= i) being the one at position i.
    """
    length, drafts = bench["acceptance_length"], bench["drafts"]
    if bench.get("interval"):
        low, high = bench["interval"]
        return low, high
    if estimate is not None and estimate["num_draft_tokens"] == bench["num_draft_tokens"]:
        low, high = (end - estimate["acceptance_length"] for end in estimate["interval"])
        return max(1.0, length + low), length + high
    rates = bench["acceptance_per_position"]
    if not drafts or not rates:
        return None
    square = sum((2 * i + 1) * p for i, p in enumerate(rates))
    half = 1.959964 * math.sqrt(max(0.0, square - sum(rates) ** 2) / drafts)
    return length - half, length + half


def speed_interval(bench: dict[str, Any], side: str) -> Interval | None:
    """95 % interval of the tokens/s of `baseline` or `draft`; None where there was one pass alone."""
    ends = (bench.get("tokens_per_second_interval") or {}).get(side)
    return (float(ends[0]), float(ends[1])) if ends else None


@dataclass(frozen=True)
class Cell:
    """One measured setting against no draft."""

    draft_tokens: int
    concurrency: int
    speedup: float
    low: float | None = None  # 95 %, where there were several passes
    high: float | None = None
    temperature: float = 0.0
    comparable: bool = True


def cells_of(bench: dict[str, Any]) -> list[Cell]:
    """Every setting whose speed-up was measured; without a sweep the one there is."""
    found = [_cell(raw) for raw in bench.get("sweep") or [bench]]
    return [cell for cell in found if cell is not None]


def _cell(raw: dict[str, Any]) -> Cell | None:
    """A setting as the bench writes it; None where nothing was served without the draft."""
    k, speedup = raw["num_draft_tokens"], raw["speedup"]
    if speedup is None:
        return None
    low, high = raw.get("speedup_interval") or (None, None)
    return Cell(
        int(k),
        int(raw["concurrency"]),
        float(speedup),
        low,
        high,
        float(raw.get("temperature") or 0.0),
        bool(raw["comparable"]),
    )


@dataclass(frozen=True)
class Surface:
    """Speed-ups by draft tokens (rows) and requests at once (columns); None where there is none."""

    title: str
    columns: list[str]
    rows: list[str]
    values: list[list[Estimate | None]]


def surfaces(bench: dict[str, Any]) -> list[Surface]:
    """What was measured, by temperature, and what the cost model makes of it between the measured settings."""
    cells, found = cells_of(bench), []
    for temperature in sorted({c.temperature for c in cells}):
        mine = [c for c in cells if c.temperature == temperature]
        busy = sum(not c.comparable for c in mine)
        title = f"measured, temperature {temperature:g}" + (f"; {busy} of {len(mine)} not comparable" if busy else "")
        values = {(c.draft_tokens, c.concurrency): Estimate(c.speedup, c.low, c.high) for c in mine}
        found.append(_surface(title, values))
    points = (bench.get("cost_model") or {}).get("points", [])
    fitted = {(int(p["draft_tokens"]), int(p["concurrency"])): Estimate(float(p["speedup"])) for p in points}
    if len(fitted) > 1:
        found.append(_surface("by the fitted times of a step", fitted))
    return found


def _surface(title: str, speedups: dict[tuple[int, int], Estimate]) -> Surface:
    ks, at_once = sorted({k for k, _ in speedups}), sorted({n for _, n in speedups})
    values = [[speedups.get((k, n)) for n in at_once] for k in ks]
    return Surface(title, list(map(str, at_once)), list(map(str, ks)), values)


def cost_lines(bench: dict[str, Any]) -> list[str]:
    """What the bench's cost model says, in sentences; empty where it has none."""
    return [str(line) for line in (bench.get("cost_model") or {}).get("lines", [])]
