"""Outputs with and without a draft: the first difference, and the test of their distribution."""

import json
import random
from typing import Any

import pytest

from app.bench.outputs import differences, same_distribution, stored

Draws = list[list[list[int]]]


def test_the_first_difference_is_shown() -> None:
    base = [[1, 2, 3, 4], [5, 6], [7, 8, 9], [1] * 9]
    draft = [[1, 2, 3, 4], [5, 7], [7, 8], [1, 1, 2, 2, 2, 2, 2, 2, 2]]
    found = differences(base, draft)
    assert found[0] == {"prompt": 1, "first_difference": 1, "baseline": [6], "draft": [7]}
    assert found[1] == {"prompt": 2, "first_difference": 2, "baseline": [9], "draft": []}
    assert found[2] == {"prompt": 3, "first_difference": 2, "baseline": [1] * 5, "draft": [2] * 5}
    assert len(found) == 3


@pytest.mark.parametrize(
    ("base", "draft", "told"),
    [
        ([901, 902, 903], [901, 902, 903], {"baseline_tokens": 3, "draft_tokens": 3, "first_difference": None}),
        ([901, 902, 903], [901, 904], {"baseline_tokens": 3, "draft_tokens": 2, "first_difference": 1}),
        ([901, 902, 903], [901], {"baseline_tokens": 3, "draft_tokens": 1, "first_difference": 1}),
        (None, [901], {"baseline_tokens": None, "draft_tokens": 1, "first_difference": None}),
    ],
)
def test_of_a_private_row_no_token_is_stored(base: list[int] | None, draft: list[int], told: dict[str, Any]) -> None:
    row = {"sample_id": "s-0", "domain": "d", "private": True, "prompt_ids": [905], "answer_ids": [901]}
    line = stored(row, base, draft)
    assert line == {"sample_id": "s-0", "domain": "d", "private": True, **told} and "90" not in json.dumps(line)
    assert stored({**row, "private": False}, base, draft) == {
        "sample_id": "s-0", "domain": "d", "baseline": base, "draft": draft,
    }  # fmt: skip


def chain(weights: list[float], tokens: int, source: random.Random) -> list[int]:
    """Tokens that depend on the one before, and may end early."""
    out = [source.choices(range(len(weights)), weights)[0]]
    while len(out) < tokens and source.random() < 0.9:
        out.append((out[-1] + source.choices(range(len(weights)), weights)[0]) % len(weights))
    return out


def draws(weights: list[float], seed: int, prompts: int = 6, samples: int = 24) -> Draws:
    source = random.Random(seed)
    return [[chain(weights, 4, source) for _ in range(samples)] for _ in range(prompts)]


def test_p_values_are_even_where_the_distributions_are_one() -> None:
    """Valid: under the hypothesis a share a of the p-values lies below a."""
    weights = [0.5, 0.3, 0.2]
    values = [
        same_distribution(draws(weights, 2 * s), draws(weights, 2 * s + 1), 4, permutations=99, seed=s)["p_value"]
        for s in range(200)
    ]
    assert 0.42 < sum(values) / len(values) < 0.58
    assert sum(v <= 0.05 for v in values) <= 20  # 10 are expected; 20 and more has a chance of 0.3 %
    assert sum(v <= 0.5 for v in values) > 75


def test_a_wrong_rule_is_found() -> None:
    sides = (draws([0.5, 0.3, 0.2], 1, samples=64), draws([0.7, 0.2, 0.1], 2, samples=64))
    found = same_distribution(*sides, tokens=4, permutations=499)
    assert found["p_value"] <= 0.01
    assert found["largest_shift"] > 0.2
    assert (found["prompts"], found["samples"], found["tokens"]) == (6, 64, 4)


def test_a_difference_past_the_first_token_is_found() -> None:
    """The first token of an answer is no draft's: a rule that is wrong shows only later."""
    source = random.Random(3)
    base = [[[1, source.randrange(4)] for _ in range(40)]]
    same = [[[1, source.randrange(4)] for _ in range(40)]]
    other = [[[1, 0] for _ in range(40)]]
    assert same_distribution(base, same, 2)["p_value"] > 0.05
    assert same_distribution(base, other, 2)["p_value"] < 0.01


def test_it_compares_prompt_by_prompt() -> None:
    """Two prompts that exchange their outputs are not the same, though the sums over prompts are."""
    found = same_distribution([[[1]] * 20, [[2]] * 20], [[[2]] * 20, [[1]] * 20], 1)
    assert found["p_value"] < 0.01 and found["largest_shift"] == pytest.approx(1)


def test_ends_are_tokens_too() -> None:
    assert same_distribution([[[1]] * 20], [[[1, 1]] * 20], 2)["p_value"] < 0.01
    assert same_distribution([[[1]] * 20], [[[1]] * 20], 2)["p_value"] == 1.0
