"""Acceptance as a running server tells it on /metrics.

vLLM counts, and differences of its counters are CONTRACTS.md section 6 as it stands:

    vllm:spec_decode_num_drafts_total                             D
    vllm:spec_decode_num_draft_tokens_total                       k D
    vllm:spec_decode_num_accepted_tokens_total                    A, without the bonus token: length = 1 + A / D
    vllm:spec_decode_num_accepted_tokens_per_pos_total{position}  drafts that accepted at least position + 1

SGLang (0.4 to 0.5, --enable-metrics) has gauges, each of the last `decode_log_interval` decode steps (40 by default)
and not of all:

    sglang:spec_accept_length     tokens given over verification steps, the bonus token included: the same length as
                                  above, of a window
    sglang:spec_accept_rate       later versions: accepted over proposed drafts, as above; earlier ones: over all tokens
                                  verified, the root of the chain among them. Which it is cannot be told from the text,
                                  so it is kept under SGLang's name alone, and our rate is (length - 1) / k
    sglang:spec_num_steps         k of a chain, where the version has it
    sglang:spec_num_draft_tokens  tokens verified in a step, the root included: k + 1 of a chain

There are no rates by position and no count of drafts. The gauges are read all through a pass and averaged: a last
window that never filled is missing, and two readings of one window count twice.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_DRAFTING = "vllm:spec_decode_num_"
_LENGTH, _RATE = "sglang:spec_accept_length", "sglang:spec_accept_rate"
_STEPS, _VERIFIED = "sglang:spec_num_steps", "sglang:spec_num_draft_tokens"


@dataclass(frozen=True)
class Reading:
    """One look at /metrics; counters since the server started, summed over its engines."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    generated: int = 0  # output tokens
    prefix_hits: int = 0  # tokens
    gauges: dict[str, float] = field(default_factory=dict)  # SGLang's, by its names; means over its ranks
    engine: str = ""  # vLLM | SGLang | "": neither says a word

    def since(self, before: Reading) -> Reading:
        """What was counted after `before`; gauges as they are now.

        Raises:
            ValueError: a counter went back: the server was started anew.
        """
        was = (*before.accepted_per_position, *([0] * len(self.accepted_per_position)))
        found = Reading(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            tuple(a - b for a, b in zip(self.accepted_per_position, was, strict=False)),
            self.generated - before.generated,
            self.prefix_hits - before.prefix_hits,
            self.gauges,
            self.engine,
        )
        if min(found.drafts, found.draft_tokens, found.accepted, found.generated) < 0:
            raise ValueError("its counters went back, so it was started anew meanwhile")
        return found


def read_metrics(text: str) -> Reading:
    """The text of /metrics (Prometheus) as a Reading; lines of others are passed over."""
    sums: dict[str, float] = defaultdict(float)
    gauges: dict[str, list[float]] = defaultdict(list)
    positions: dict[int, float] = defaultdict(float)
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or not match[1].startswith(("vllm:", "sglang:")):
            continue
        name, value = match[1], float(match[3])
        labels = dict(_LABEL.findall(match[2] or ""))
        if name.removesuffix("_total") == f"{_DRAFTING}accepted_tokens_per_pos":
            positions[int(labels["position"])] += value
        elif name in (_LENGTH, _RATE, _STEPS, _VERIFIED):
            gauges[name].append(value)
        sums[name.removesuffix("_total")] += value
    engines = [e for e, prefix in (("vLLM", "vllm:"), ("SGLang", "sglang:")) if any(n.startswith(prefix) for n in sums)]
    return Reading(
        drafts=int(sums[f"{_DRAFTING}drafts"]),
        draft_tokens=int(sums[f"{_DRAFTING}draft_tokens"]),
        accepted=int(sums[f"{_DRAFTING}accepted_tokens"]),
        accepted_per_position=tuple(int(positions[i]) for i in range(max(positions, default=-1) + 1)),
        generated=int(sums["vllm:generation_tokens"] + sums["sglang:generation_tokens"]),
        prefix_hits=int(sums["vllm:prefix_cache_hits"] + sums["sglang:cached_tokens"]),
        gauges={name: sum(values) / len(values) for name, values in gauges.items()},
        engine=engines[0] if engines else "",
    )


def of_gauges(readings: Sequence[Reading]) -> dict[str, Any] | None:
    """SGLang's acceptance over readings of one pass; None where it drafts nothing.

    Returns:
        `acceptance_length` in our sense, `acceptance_rate` in ours or None where k is unknown, `num_draft_tokens` or
        None, `readings` that went in, and `sglang`: its own gauges, averaged, by its names.
    """
    drafting = [r.gauges for r in readings if r.gauges.get(_LENGTH, 0) >= 1]
    if not drafting:
        return None
    own = {name: sum(g.get(name, 0.0) for g in drafting) / len(drafting) for name in drafting[-1]}
    k = own.get(_STEPS) or (own[_VERIFIED] - 1 if own.get(_VERIFIED) else 0)
    return {
        "acceptance_length": own[_LENGTH],
        "acceptance_rate": (own[_LENGTH] - 1) / k if k > 0 else None,
        "num_draft_tokens": round(k) if k > 0 else None,
        "readings": len(drafting),
        "sglang": own,
    }
