"""What the passes of a setting say: acceptance, speed, differences of outputs, and over a sweep the cost model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from app import cost_model
from app.bench.intervals import acceptance_intervals, mean_interval, ratio_interval
from app.bench.measure import Served
from app.bench.outputs import differences
from app.errors import UserError

_FOREIGN_SHARE = 0.15  # of the cores, above which a measured speed is not this program's
_FOREIGN_TOKENS = 0.02  # of a server's output, likewise
_STREAM_OFF = 0.05  # by which sizes of outputs may miss the counters and still tell conversations apart


def compare(baseline: Served | None, served: Served, num_draft_tokens: int, sampled: bool = False) -> dict[str, Any]:
    """One setting: acceptance by the one definition (CONTRACTS.md section 6), speed, and output differences.

    What needs a baseline is None without one; `sampled` outputs differ and should, so their differences are None too.
    """
    result: dict[str, Any] = acceptance(served, num_draft_tokens)
    k = result["num_draft_tokens"]
    sides = {"baseline": baseline, "draft": served}
    found = None if baseline is None or sampled else differences(baseline.outputs, served.outputs)
    lengths = {"baseline": 1.0, "draft": result["acceptance_length"]}
    return {
        **result,
        "num_draft_tokens": k,
        "tokens_per_second": {n: s and s.tokens_per_second for n, s in sides.items()},
        "tokens_per_second_interval": {n: s and mean_interval(s.speeds) for n, s in sides.items()},
        "speedup": None if baseline is None else served.tokens_per_second / baseline.tokens_per_second,
        "speedup_interval": None if baseline is None else ratio_interval(served.speeds, baseline.speeds),
        "seconds": {n: s.seconds if s is not None else [] for n, s in sides.items()},
        "latency": {n: s and s.latency for n, s in sides.items()},
        "step_seconds": {n: s and s.step_seconds(lengths[n]) for n, s in sides.items()},
        "comparable": baseline is not None and _comparable(baseline, served, result["acceptance_length"]),
        "output_mismatches": None if found is None else len(found),
        "mismatch_examples": (found or [])[:20],
    }


def acceptance(served: Served, num_draft_tokens: int) -> dict[str, Any]:
    """Length, rate, rates by position and the counts they are made of; counts are 0 where a server has only gauges.

    Raises:
        UserError: nothing was drafted.
    """
    if served.gauges is not None:
        g = served.gauges
        k = g["num_draft_tokens"] or num_draft_tokens
        rate = g["acceptance_rate"] if g["acceptance_rate"] is not None else (g["acceptance_length"] - 1) / k
        told = {"acceptance_length": g["acceptance_length"], "acceptance_rate": rate, "acceptance_per_position": []}
        return {**told, "drafts": 0, "draft_tokens": 0, "accepted": 0, "num_draft_tokens": k, "gauges": g}
    if served.drafts == 0:
        raise UserError("bench: vLLM drafted nothing; the answers are too short to measure, or the draft is not used")
    return {
        "acceptance_length": 1 + served.accepted / served.drafts,
        "acceptance_rate": served.accepted / served.draft_tokens,
        "acceptance_per_position": [n / served.drafts for n in served.accepted_per_position],
        "drafts": served.drafts,
        "draft_tokens": served.draft_tokens,
        "accepted": served.accepted,
        "num_draft_tokens": len(served.accepted_per_position) or num_draft_tokens,  # a server's own k, whatever was set
    }


def intervals(served: Served, conversations: Sequence[str], resamples: int, seed: int) -> dict[str, Any]:
    """95 % intervals of the acceptance, conversations resampled: `interval` and `interval_per_position`.

    Counters do not tell conversations apart. The sizes of the outputs do: each holds what one draft gave. They are used
    where they add up to the counters, and both keys are None where a server joined outputs or told no sizes; the second
    also where it does not count by position.
    """
    none = {"interval": None, "interval_per_position": None}
    by_conversation = joined(served.streamed, conversations)
    drafts = sum(c[0] for c in by_conversation.values())
    accepted = sum(sum(c[1:]) for c in by_conversation.values())
    if not served.drafts or abs(drafts / served.drafts - 1) > _STREAM_OFF:
        return none
    if abs(accepted - served.accepted) > _STREAM_OFF * max(1, served.accepted):
        return none
    counted = len(served.accepted_per_position)
    positions = counted or max(len(c) for c in by_conversation.values()) - 1
    found = acceptance_intervals(
        [(c + [0] * positions)[: 1 + positions] for c in by_conversation.values()], resamples, seed
    )
    return none if found is None else {"interval": found[0], "interval_per_position": found[1] if counted else None}


def joined(streamed: list[list[int]], conversations: Sequence[str]) -> dict[str, list[int]]:
    """`Served.streamed` summed by conversation."""
    found: dict[str, list[int]] = {}
    for conversation, counts in zip(conversations, streamed, strict=True):
        before = found.setdefault(conversation, [0] * len(counts))
        found[conversation] = [a + b for a, b in zip(before, counts, strict=True)]
    return found


def cost(cells: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The cost model of a sweep's cells with what it recommends, in numbers and in `lines`; None without a baseline."""
    times = [
        cost_model.StepTime(k, c["concurrency"], seconds)
        for c in cells
        for k, seconds in ((0, c["step_seconds"]["baseline"]), (c["num_draft_tokens"], c["step_seconds"]["draft"]))
        if seconds
    ]
    times = list({(t.draft_tokens, t.concurrency): t for t in times}.values())
    if not {0} < {t.draft_tokens for t in times}:
        return None
    measured: dict[int, list[float]] = defaultdict(list)
    for c in cells:
        measured[c["num_draft_tokens"]].append(c["acceptance_length"])
    longest = max(cells, key=lambda c: c["num_draft_tokens"])
    lengths = cost_model.lengths_by_draft_tokens(
        {k: sum(x) / len(x) for k, x in measured.items()}, longest["acceptance_per_position"]
    )
    if len(measured) == 1:  # what a step of fewer tokens takes is not known
        lengths = {k: x for k, x in lengths.items() if k in measured}
    speedups = {(c["num_draft_tokens"], c["concurrency"]): c["speedup"] for c in cells if c["comparable"]}
    at_once = {c["concurrency"] for c in cells}
    found = cost_model.surface(cost_model.fit(times), lengths, sorted(at_once), speedups)
    return {**found, "lines": cost_lines(found, at_once)}


def cost_lines(found: dict[str, Any], at_once: Collection[int]) -> list[str]:
    """A sentence for each concurrency that was measured, and one on the fit."""
    lines = []
    for row in found["recommended"]:
        if row["concurrency"] not in at_once:
            continue
        best = row["best"]
        tokens = f"{best['draft_tokens']} draft token{'s' * (best['draft_tokens'] != 1)}"
        pays = f"above a length of {best['break_even']:.2f}, and it is {best['acceptance_length']:.2f}"
        if row["draft_tokens"] is None:
            lines.append(f"At {row['concurrency']} at once no draft: {tokens} would pay {pays}.")
        else:
            lines.append(f"At {row['concurrency']} at once {tokens} ({row['speedup']:.2f}x): they pay {pays}.")
    off = max(found["fit"][side]["largest_error"] for side in ("draft", "plain"))
    return [*lines, f"The fitted times of a step are within {100 * off:.0f} % of the measured ones."]


def _comparable(baseline: Served, served: Served, acceptance_length: float) -> bool:
    """Whether both runs had the processor alike; other programs' work would read as the draft's gain or loss.

    No draft gains more than its acceptance length.
    """
    if served.tokens_per_second / baseline.tokens_per_second > 1.05 * acceptance_length:
        return False
    if any(s.foreign_tokens > _FOREIGN_TOKENS * max(1, sum(s.pass_tokens)) for s in (baseline, served)):
        return False
    if not baseline.cpu_share or not served.cpu_share:
        return True
    if max(baseline.foreign_share or 0, served.foreign_share or 0) > _FOREIGN_SHARE:
        return False
    return max(baseline.cpu_share, served.cpu_share) < 1.3 * min(baseline.cpu_share, served.cpu_share)
