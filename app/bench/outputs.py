"""Are the outputs the same with and without the draft? Token by token, or as samples of one distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SHOWN = 5  # tokens of each side from the first difference on


def differences(baseline: Sequence[list[int]], draft: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Where two lists of greedy outputs differ: number of the prompt, first position, a few tokens of each side.

    An output that is a beginning of the other differs from it where it ends.
    """
    found = []
    for number, (a, b) in enumerate(zip(baseline, draft, strict=True)):
        first = first_difference(a, b)
        if first is None:
            continue
        found.append(
            {
                "prompt": number,
                "first_difference": first,
                "baseline": a[first : first + SHOWN],
                "draft": b[first : first + SHOWN],
            }
        )
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position of the first token that differs, where the shorter ends if it begins the other; None: they are equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def stored(row: Mapping[str, Any], baseline: list[int] | None, draft: list[int]) -> dict[str, Any]:
    """A line of `bench/outputs.jsonl`; `baseline` is None where nothing was served without the draft.

    Of a private row it holds how long the two outputs are and where they part, and no token: no hash either, since a
    short answer is guessed from one.
    """
    line: dict[str, Any] = {"sample_id": row["sample_id"], "domain": row["domain"]}
    if not row["private"]:
        return {**line, "baseline": baseline, "draft": draft}
    return {
        **line,
        "private": True,
        "baseline_tokens": None if baseline is None else len(baseline),
        "draft_tokens": len(draft),
        "first_difference": None if baseline is None else first_difference(baseline, draft),
    }


def same_distribution(
    baseline: Sequence[Sequence[list[int]]],
    draft: Sequence[Sequence[list[int]]],
    tokens: int,
    permutations: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Test whether two sets of sampled outputs come from one distribution, prompt by prompt.

    The statistic is a sum of G = 2 * sum n ln(n / expected) over prompts and the first `tokens` positions, n the counts
    of each token there with and without the draft ("ended" is a token too). Its null distribution is made by exchange:
    outputs of one prompt are drawn independently, so under the hypothesis any of them could have come from either side.
    Whole outputs change sides, each prompt for itself, so positions of one output may depend on each other as they
    like, and no expected count need be large. The p-value (1 + as large ones) / (1 + permutations) is valid for any
    sample size. Speculative sampling is exact in exact arithmetic; the test finds a wrong acceptance rule, and not a
    difference far below the samples' own noise.

    Args:
        baseline, draft: by prompt, the outputs that were drawn; as many prompts on both sides.

    Returns:
        `statistic`, `p_value`, `prompts`, `samples` (of each side and prompt), `tokens`, `permutations`, and
        `largest_shift`: half the sum of |share - share| of the position that differs most.
    """
    generator = np.random.default_rng(seed)
    sums, largest = np.zeros(permutations + 1), 0.0
    for a, b in zip(baseline, draft, strict=True):
        first = np.zeros(len(a) + len(b), dtype=bool)
        first[: len(a)] = True
        sides = np.array([first, *(generator.permutation(first) for _ in range(permutations))], dtype=float)  # [1+R, n]
        for position in range(tokens):
            said = [x[position] if position < len(x) else -1 for x in (*a, *b)]
            _, column = np.unique(said, return_inverse=True)
            each = np.eye(column.max() + 1)[column]  # [n, C]
            ours = sides @ each  # [1+R, C]
            total = each.sum(0)  # [C]
            theirs = total - ours
            sums += _g(ours, total * len(a) / len(said)) + _g(theirs, total * len(b) / len(said))
            largest = max(largest, float(np.abs(ours[0] / len(a) - theirs[0] / len(b)).sum() / 2))
    at_least = int((sums[1:] >= sums[0] - 1e-9).sum())
    return {
        "statistic": float(sums[0]),
        "p_value": (1 + at_least) / (1 + permutations),
        "prompts": len(baseline),
        "samples": min((len(x) for x in (*baseline, *draft)), default=0),
        "tokens": tokens,
        "permutations": permutations,
        "largest_shift": largest,
    }


def _g(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """2 * sum n ln(n / expected) over the columns of counts [rows, C]; expected [C]."""
    logs = np.log(np.where(counts > 0, counts, 1.0) / expected)
    return np.asarray(2 * np.where(counts > 0, counts * logs, 0.0).sum(1))
