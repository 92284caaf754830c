"""What a draft costs and when it pays: times of a step fitted over the cells of a sweep.

One step of a request without a draft takes T0(c) seconds at c requests at once and gives one token. A step with k draft
tokens takes T(k, c) and gives L tokens, the acceptance length with the bonus token (CONTRACTS.md section 6). So

    speed-up            S = L * T0(c) / T(k, c)
    break-even length   L* = T(k, c) / T0(c)       above it the draft gains

    T(k, c)  = a + b*k + d*c + e*k*c
    T0(c)    = p + q*c

Each model has only the terms that the sweep can tell apart: one in k needs two values of k, one in c two concurrencies,
and k*c both and a fourth cell. Coefficients are not negative, since no step gets faster by more tokens; the squares of
relative errors are least. A GPU's step time bends where memory bounds it no longer: the largest error of a fit says how
far the cells are from these planes, and where a cell was measured its own numbers stand beside the fitted ones.

A step's time is all the time of a request, its prefill and what it waited for others included, over its steps: with the
same number of requests in flight, S is then the ratio of tokens a second, for answers as long as those of the bench.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MARGIN = 0.02  # of speed-up, below which a draft is not worth its memory


@dataclass(frozen=True)
class StepTime:
    """One measured cell: seconds of a step of one request; draft_tokens 0 is a plain step."""

    draft_tokens: int
    concurrency: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """seconds = constant + per_draft_token*k + per_request*c + per_both*k*c."""

    constant: float
    per_draft_token: float
    per_request: float
    per_both: float
    largest_error: float  # of a cell, relative

    def seconds(self, draft_tokens: int, concurrency: float) -> float:
        """Of one step."""
        return (
            self.constant
            + self.per_draft_token * draft_tokens
            + self.per_request * concurrency
            + self.per_both * draft_tokens * concurrency
        )


@dataclass(frozen=True)
class CostModel:
    """Both fits, and what follows from them."""

    draft: Fit
    plain: Fit

    def break_even(self, draft_tokens: int, concurrency: float) -> float:
        """The acceptance length at which the draft neither gains nor loses."""
        return self.draft.seconds(draft_tokens, concurrency) / self.plain.seconds(0, concurrency)

    def speedup(self, acceptance_length: float, draft_tokens: int, concurrency: float) -> float:
        """Tokens a second, against no draft."""
        return acceptance_length / self.break_even(draft_tokens, concurrency)


def fit(cells: Sequence[StepTime]) -> CostModel:
    """The model of a sweep.

    Raises:
        ValueError: there is no plain cell or none with a draft, or a time is not above 0.
    """
    if any(not c.seconds > 0 for c in cells):
        raise ValueError("a step takes more than no time")
    drafted = [c for c in cells if c.draft_tokens > 0]
    plain = [c for c in cells if c.draft_tokens == 0]
    if not drafted or not plain:
        raise ValueError("a cost model needs a cell with the draft and one without")
    return CostModel(_fitted(drafted), _fitted(plain))


def _fitted(cells: Sequence[StepTime]) -> Fit:
    by_k = len({c.draft_tokens for c in cells}) > 1
    by_c = len({c.concurrency for c in cells}) > 1
    # k*c can be told from k and c only by a fourth cell that is no line of the others; lstsq takes the least of many.
    used = [True, by_k, by_c, by_k and by_c and len(cells) > 3]
    terms = [[1.0, c.draft_tokens, c.concurrency, c.draft_tokens * c.concurrency] for c in cells]
    rows = np.array(terms) / np.array([[c.seconds] for c in cells])  # [n, 4], so that 1 is wanted of each
    found = _not_negative(rows, used)
    a, b, d, e = map(float, found)
    return Fit(a, b, d, e, float(np.abs(rows @ found - 1).max()))


def _not_negative(rows: np.ndarray[Any, Any], used: Sequence[bool]) -> np.ndarray[Any, Any]:
    """x >= 0 [4] with the least squares of rows @ x - 1, x = 0 where a term is not used: the best of all supports."""
    best, least = np.zeros(4), math.inf
    terms = [i for i in range(4) if used[i]]
    for size in range(1, len(terms) + 1):
        for support in itertools.combinations(terms, size):
            part = rows[:, support]
            x, *_ = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)
            error = float(((part @ x - 1) ** 2).sum())
            if (x >= 0).all() and error < least - 1e-15:
                best, least = np.zeros(4), error
                best[list(support)] = x
    return best


def lengths_by_draft_tokens(measured: dict[int, float], per_position: Sequence[float]) -> dict[int, float]:
    """Acceptance length for k = 1 to the largest that was measured.

    Where k was not measured it is 1 + the joint rates of the first k positions of the longest chain. Fewer draft tokens
    also move the places where drafts begin, so this is near and not exact.
    """
    longest = max(measured, default=0)
    return {k: measured.get(k, 1 + sum(per_position[:k])) for k in range(1, longest + 1)
            if k in measured or k <= len(per_position)}  # fmt: skip


def surface(
    model: CostModel, lengths: dict[int, float], concurrency: Sequence[int], measured: dict[tuple[int, int], float]
) -> dict[str, Any]:
    """Go or no-go by concurrency, as plain numbers for a report.

    Args:
        lengths: acceptance length by k, of one k at least.
        concurrency: those measured; powers of two between the least and the largest are added.
        measured: speed-up in tokens a second that was measured, by (k, concurrency).

    Returns:
        `fit`; `lengths`; `points`, one for each k and concurrency: `break_even`, `speedup` (predicted), `measured`
        (its own speed-up or null), `go`; and `recommended`, one for each concurrency: `draft_tokens`, null where no
        draft is faster, the `speedup` of it, and `best`, the point with the most gain. A k that was measured at this
        concurrency is judged by its measurement.
    """
    points, recommended = [], []
    for c in _grid(concurrency):
        here = []
        for k, length in sorted(lengths.items()):
            own = measured.get((k, c))
            predicted = model.speedup(length, k, c)
            gain = predicted if own is None else own
            here.append(
                {
                    "draft_tokens": k,
                    "concurrency": c,
                    "acceptance_length": length,
                    "break_even": model.break_even(k, c),
                    "speedup": predicted,
                    "measured": own,
                    "go": gain >= 1 + MARGIN,
                }
            )
        points += here
        best = max(here, key=_gain)
        recommended.append(
            {
                "concurrency": c,
                "draft_tokens": best["draft_tokens"] if best["go"] else None,
                "speedup": _gain(best) if best["go"] else 1.0,
                "best": best,
            }
        )
    return {
        "fit": {"draft": asdict(model.draft), "plain": asdict(model.plain)},
        "lengths": [{"draft_tokens": k, "acceptance_length": x} for k, x in sorted(lengths.items())],
        "margin": MARGIN,
        "points": points,
        "recommended": recommended,
    }


def _gain(point: dict[str, Any]) -> float:
    return float(point["speedup"] if point["measured"] is None else point["measured"])


def _grid(concurrency: Sequence[int]) -> list[int]:
    low, high = min(concurrency), max(concurrency)
    between = [2**i for i in range(high.bit_length()) if low < 2**i < high]
    return sorted({*concurrency, *between})
