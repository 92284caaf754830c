"""The numbers of a run that can be set beside those of another, with what is known of their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from app.report.speed import cells_of, engine_of, length_interval, position_intervals, speed_interval, wilson

Better = Literal["higher", "lower"]
# What may change without being told of, of numbers whose interval is not known.
_SPEED, _TIME, _BYTES, _LOSS = 0.05, 0.2, 0.02, 0.05
_SECONDS = 5.0  # of a stage, by which it may take longer whatever its time


@dataclass(frozen=True)
class Metric:
    """One number; `tolerance` is relative, and used where one of two runs has no interval."""

    name: str
    value: float
    better: Better | None = None  # None: neither way is a gain
    low: float | None = None
    high: float | None = None
    tolerance: float = 0.0
    slack: float = 0.0  # the same as a difference: what is smaller is never marked
    form: str = ",.3f"

    def text(self) -> str:
        """`value (low to high)`."""
        said = f"{self.value:{self.form}}"
        if self.low is None or self.high is None:
            return said
        return f"{said} ({self.low:{self.form}} to {self.high:{self.form}})"

    def change_from(self, other: Metric) -> Literal["worse", "better", ""]:
        """Whether this is worse or better than `other` beyond what both could be by chance.

        With intervals: by more than the root of the sum of the squares of the two half widths that face each other.
        """
        gain = self.value - other.value if self.better == "higher" else other.value - self.value
        if self.better is None or gain == 0:
            return ""
        chance = _chance(self, other)
        if abs(gain) <= (max(self.slack, self.tolerance * abs(other.value)) if chance is None else chance):
            return ""
        return "better" if gain > 0 else "worse"


def _chance(new: Metric, old: Metric) -> float | None:
    if new.low is None or new.high is None or old.low is None or old.high is None:
        return None
    rose = new.value > old.value
    mine = new.value - new.low if rose else new.high - new.value
    theirs = old.high - old.value if rose else old.value - old.low
    return math.hypot(mine, theirs)


def metrics_of(results: dict[str, Any], seconds: dict[str, float], beside_s: float = 0.0) -> list[Metric]:
    """Every number of `collect`'s results, in the order they are shown; `seconds` are of the stages, in `beside_s` of
    which two ran at once."""
    sizes = _sizes(results, seconds, beside_s)
    return [*_served(results), *_offline(results), *_speed(results), *_learnt(results), *sizes]


def _served(results: dict[str, Any]) -> Iterator[Metric]:
    bench = results.get("bench")
    if bench is None:
        return
    low, high = length_interval(bench, results.get("evaluate")) or (None, None)
    engine = engine_of(bench)
    yield Metric(f"acceptance length, {engine}", bench["acceptance_length"], "higher", low, high, _SPEED)
    intervals = position_intervals(bench, results.get("evaluate"))
    for i, (rate, ends) in enumerate(zip(bench["acceptance_per_position"], intervals, strict=True)):
        yield Metric(f"accepted at position {i + 1}, {engine}", rate, "higher", *ends)
    for name, found in sorted((bench.get("domains") or {}).items()):
        low, high = found.get("interval") or (None, None)
        yield Metric(f"acceptance length, {name}, {engine}", found["acceptance_length"], "higher", low, high, _SPEED)


def _offline(results: dict[str, Any]) -> Iterator[Metric]:
    found = results.get("evaluate")
    if found is None:
        return
    yield Metric("acceptance length, offline", found["acceptance_length"], "higher", *found["interval"])
    intervals = found.get("interval_per_position") or []
    for i, rate in enumerate(found["acceptance_per_position"]):
        low, high = intervals[i] if i < len(intervals) else (None, None)
        yield Metric(f"accepted at position {i + 1}, offline", rate, "higher", low, high, _SPEED)
    for name, domain in sorted(found["domains"].items()):
        low, high = domain["interval"] if domain["conversations"] > 1 else (None, None)
        name = f"acceptance length, {name}, offline"
        yield Metric(name, domain["acceptance_length"], "higher", low, high, _SPEED)


def _speed(results: dict[str, Any]) -> Iterator[Metric]:
    bench = results.get("bench")
    if bench is None:
        return
    for cell in cells_of(bench):
        warm = f", temperature {cell.temperature:g}" if cell.temperature else ""
        name = f"speed-up, {cell.draft_tokens} draft tokens, {cell.concurrency} at once{warm}"
        better: Better | None = "higher" if cell.comparable else None
        yield Metric(name, cell.speedup, better, cell.low, cell.high, _SPEED, form=".2f")
    better = "higher" if bench["comparable"] else None
    for side, words in (("baseline", "without the draft"), ("draft", "with the draft")):
        if (speed := bench["tokens_per_second"][side]) is not None:
            low, high = speed_interval(bench, side) or (None, None)
            yield Metric(f"tokens/s {words}", speed, better, low, high, _SPEED, form=",.0f")
    if bench.get("output_mismatches") is not None and not bench.get("temperature"):
        share = bench["output_mismatches"] / bench["prompts"]
        yield Metric(
            "outputs that differ, share", share, "lower", *wilson(bench["output_mismatches"], bench["prompts"])
        )


def _learnt(results: dict[str, Any]) -> Iterator[Metric]:
    if "vocab" in results:
        vocab = results["vocab"]
        tokens = vocab["supervised_tokens"]["holdout"]
        share = vocab["coverage"]["holdout"]
        if share is not None:
            yield Metric("held-out tokens in the draft vocabulary", share, "higher", *wilson(share * tokens, tokens))
    if "train" in results:
        train = results["train"]
        yield Metric("training loss at the end", train["loss"], "lower", tolerance=_LOSS)
        if train.get("best_acceptance_length") is not None:
            yield Metric("best acceptance length, validation", train["best_acceptance_length"], None)
        yield Metric("training steps", train["steps"], None, form=",.0f")


def _sizes(results: dict[str, Any], seconds: dict[str, float], beside_s: float) -> Iterator[Metric]:
    if "samples" in results:
        yield Metric("samples", results["samples"], None, form=",.0f")
        yield Metric("supervised tokens", results["tokens_by_kind"]["supervised"], None, form=",.0f")
        yield Metric("bytes of shards", results["bytes"], None, form=",.0f")
        per_token = results["bytes"] / max(1, results["tokens"])
        yield Metric("bytes a token", per_token, "lower", tolerance=_BYTES, form=",.0f")
    for name, taken in seconds.items():
        yield Metric(f"seconds of {name}", taken, "lower", tolerance=_TIME, slack=_SECONDS, form=",.1f")
    if seconds:
        whole = sum(seconds.values()) - beside_s
        yield Metric("seconds of all stages", whole, "lower", tolerance=_TIME, slack=_SECONDS, form=",.1f")
