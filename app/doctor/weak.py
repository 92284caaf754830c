"""Section E: right but weak."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from app.doctor.facts import Facts
from app.doctor.finding import NORMS_STILL, RESTARTED, Finding, NotApplicable, failed, passed
from app.target import name_list
from app.train.guards import NORM_CHECK_STEPS

_USUAL_SAMPLES = 50_000  # few published drafts were made from fewer
_LITTLE = 5_000  # samples that prove the plumbing only
_COVERAGE = 0.95


def enough_data(facts: Facts) -> Finding:
    """E1: samples, tokens, epochs, share of the target's own answers."""
    counts = facts.manifest("generate").counts
    samples, tokens = counts["samples"], counts["tokens"].get("answer", 0)
    said = f"{samples:,} samples, {tokens:,} answer tokens"
    if facts.has("train"):
        said += f", {facts.manifest('train').counts.get('epochs', 0):.2g} epochs"
    said += f", {100 * facts.own_share:.0f} % of the samples looked at answered by the target itself"
    little = f"far below the usual volume of {_USUAL_SAMPLES:,} samples and more: it shows that all parts fit, no more"
    some = f"published drafts use {_USUAL_SAMPLES:,} samples and more"
    note = little if samples < _LITTLE else some if samples < _USUAL_SAMPLES else ""
    return passed(said, f"{note} (`draftmill curve` says what more would bring)" if note else "")


def norms_moved(facts: Facts) -> Finding:
    """E2: norm gains left 1.0."""
    steps = int(facts.manifest("train").counts.get("steps", 0))
    gains = {n: t for n, t in facts.trained_weights.items() if "norm" in n}
    still = [name for name, gain in gains.items() if bool((gain == 1).all())]
    if still and steps >= NORM_CHECK_STEPS:
        said = f"{name_list(still)} still exactly 1 after {steps} steps"
        return failed(NORMS_STILL, said, "train with fp32 masters, or raise train.learning_rate")
    return passed(f"{len(gains) - len(still)} of {len(gains)} moved in {steps} steps")


def vocabulary_covers(facts: Facts) -> Finding:
    """E3: the draft can say what the held-out answers say."""
    counts = facts.manifest("vocab").counts
    shares = counts.get("coverage", {})
    share = next((shares[name] for name in ("holdout", "valid", "train") if shares.get(name) is not None), None)
    if share is None:
        raise NotApplicable("no coverage was counted")
    note = "" if share >= _COVERAGE else "raise vocab.size, or bring more prompts of this kind"
    return passed(f"{100 * share:.2f} % of the held-out tokens, {counts['draft_vocab_size']:,} ids", note)


def resumed_right(facts: Facts) -> Finding:
    """E4: the log of steps goes on without a gap to the last step."""
    steps = int(facts.manifest("train").counts.get("steps", 0))
    logged = [int(r["step"]) for r in _metrics(facts) if "loss" in r]
    if not logged:
        raise NotApplicable("no step was logged")
    if any(b <= a for a, b in pairwise(logged)) or logged[-1] > steps:
        said = f"steps go back in train/metrics.jsonl, or beyond the {steps} that were made"
        return failed(RESTARTED, said, "remove the run's train folder and train again")
    return passed(f"steps {logged[0]} to {logged[-1]} of {steps}, none twice")


def long_contexts(facts: Facts) -> Finding:
    """E5: lengths in training against the limit."""
    limit = facts.config.generate.max_length
    lengths = sorted(look.row["num_tokens"] for look in facts.looks)
    middle, long = lengths[len(lengths) // 2], sum(n > limit / 2 for n in lengths)
    said = f"half of the samples have {middle:,} tokens or more, {long} of {len(lengths)} more than {limit // 2:,}"
    return passed(said, "" if long else "long contexts are served worse: bring some if your traffic has them")


def _metrics(facts: Facts) -> list[dict[str, Any]]:
    try:
        text = facts.store.read_bytes("train/metrics.jsonl").decode()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if line.strip()]
