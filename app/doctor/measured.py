"""Section M: measured wrongly."""

from __future__ import annotations

import math
from itertools import pairwise

from app.doctor.facts import Facts
from app.doctor.finding import COUNTS, Finding, NotApplicable, failed, passed


def counter_differences(facts: Facts) -> Finding:
    """M1: acceptance is 1 + accepted / drafts, of counter differences, and positions, where counted, add up."""
    b = facts.manifest("bench").counts
    positions, drafts = b["acceptance_per_position"], b["drafts"]
    if not drafts:
        raise NotApplicable("the server tells averages, no counters")
    length = 1 + b["accepted"] / max(1, drafts)
    right = math.isclose(b["acceptance_length"], length, rel_tol=1e-6)
    if positions:  # a server may count drafts and not positions
        right &= math.isclose(length - 1, sum(positions), rel_tol=1e-3, abs_tol=1e-6)
    right &= b["draft_tokens"] <= b["num_draft_tokens"] * drafts and all(a >= b for a, b in pairwise(positions))
    said = f"1 + {b['accepted']:,} accepted / {drafts:,} drafts = {length:.3f}, the target's own token counted"
    if not right:
        step = "bench again on a server of its own: counters of other traffic were read too"
        return failed(COUNTS, f"{said}, but the positions add up to {1 + sum(positions):.3f}", step)
    return passed(said)


def baseline(facts: Facts) -> Finding:
    """M2: the speed without a draft, at the same concurrency."""
    b = facts.manifest("bench").counts
    speed = b["tokens_per_second"]
    if not speed.get("baseline"):
        raise NotApplicable("nothing without a draft was measured (bench.baseline_server)")
    said = f"{speed['baseline']:,.0f} without, {speed['draft']:,.0f} with the draft"
    note = "" if b.get("comparable", True) else "other programs took the processor: the two cannot be compared"
    return passed(f"{said} tokens/s", note)


def overlap(facts: Facts) -> Finding:
    """M3: how many training rows hold a benchmark's prompt."""
    count = facts.manifest("ingest").counts.get("overlap", 0)
    if not facts.config.ingest.benchmark_sets:
        raise NotApplicable("no ingest.benchmark_sets are given; the held-out conversations are never trained on")
    dropped = " (dropped)" if facts.config.ingest.drop_overlap else ""
    note = f"see ingest/overlap.json{'' if dropped else ', or set ingest.drop_overlap=true'}" if count else ""
    return passed(f"{count} rows hold a prompt of a benchmark{dropped}", note)
