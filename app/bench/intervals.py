"""95 % intervals of what a bench measured: of means of passes, of ratios, of acceptance over conversations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Student's t, two-sided 95 %, by degrees of freedom; 1.96 beyond.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
      2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
      2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


def t_value(freedom: float) -> float:
    """The 97.5 % point of Student's t, rounded to fewer degrees of freedom."""
    return _T[int(freedom) - 1] if 1 <= freedom <= len(_T) else _T[0] if freedom < 1 else 1.96


def mean_interval(values: Sequence[float]) -> list[float] | None:
    """Of the mean; None for a single value, which tells nothing of the spread."""
    n = len(values)
    if n < 2:
        return None
    half = t_value(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    mean = float(np.mean(values))
    return [mean - half, mean + half]


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> list[float] | None:
    """Of mean(above) / mean(below), the two independent: by the logarithm, with Welch's degrees of freedom."""
    if len(above) < 2 or len(below) < 2:
        return None
    ratio = float(np.mean(above) / np.mean(below))
    parts = [float(np.var(x, ddof=1)) / len(x) / float(np.mean(x)) ** 2 for x in (above, below)]
    if sum(parts) == 0:
        return [ratio, ratio]
    freedom = sum(parts) ** 2 / sum(p**2 / (len(x) - 1) for p, x in zip(parts, (above, below), strict=True))
    half = t_value(freedom) * math.sqrt(sum(parts))
    return [ratio * math.exp(-half), ratio * math.exp(half)]


def acceptance_intervals(
    counts: Sequence[Sequence[float]], resamples: int, seed: int
) -> tuple[list[float], list[list[float]]] | None:
    """Of the acceptance length and of the rate at each position, conversations resampled; None for less than two.

    Args:
        counts: [C, 1 + k] by conversation: drafts, then those that accepted at least 1, 2, .. k tokens.
    """
    table = np.array(counts, dtype=float)
    if len(table) < 2 or table.ndim != 2 or not table[:, 0].sum():
        return None
    picks = np.random.default_rng(seed).integers(0, len(table), (resamples, len(table)))  # [B, C]
    sums = table[picks].sum(1)  # [B, 1 + k]
    rates = sums[:, 1:] / np.maximum(sums[:, :1], 1)  # [B, k]
    ends = [np.quantile(x, (0.025, 0.975)).tolist() for x in (1 + rates.sum(1), *rates.T)]
    return ends[0], ends[1:]


def middle_and_tail(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 95th percentile, seconds; None of nothing."""
    if not len(values):
        return None
    return {"p50": float(np.quantile(values, 0.5)), "p95": float(np.quantile(values, 0.95))}
