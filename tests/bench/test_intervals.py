"""Intervals cover what they should."""

import numpy as np
import pytest

from app.bench.intervals import acceptance_intervals, mean_interval, middle_and_tail, ratio_interval, t_value


def test_of_a_mean() -> None:
    assert mean_interval([3.0]) is None
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx([2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5], rel=1e-3)
    assert (t_value(1), t_value(30), t_value(500)) == (12.706, 2.042, 1.96)


def test_of_a_ratio_covers_the_truth() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        ends = ratio_interval(generator.normal(150, 5, 5).tolist(), generator.normal(100, 5, 5).tolist())
        assert ends is not None
        hits += ends[0] <= 1.5 <= ends[1]
    assert 0.91 < hits / 400 < 0.99
    assert ratio_interval([2.0], [1.0, 1.0]) is None
    assert ratio_interval([2.0, 2.0], [1.0, 1.0]) == [2, 2]


def test_of_acceptance_resamples_conversations() -> None:
    few = [[10, 5, 1], [10, 9, 8], [10, 1, 0], [10, 5, 3]]
    found = acceptance_intervals(few, 2000, 0)
    assert found is not None
    (low, high), positions = found
    assert low < 1 + 32 / 40 < high and high - low > 0.4
    assert [a <= r <= b for (a, b), r in zip(positions, (0.5, 0.3), strict=True)] == [True, True]
    again = acceptance_intervals(few * 25, 2000, 0)
    assert again is not None and again[0][1] - again[0][0] < (high - low) / 3  # more conversations tell more
    assert acceptance_intervals(few[:1], 100, 0) is None and acceptance_intervals([[0, 0]] * 3, 100, 0) is None


def test_middle_and_tail() -> None:
    assert middle_and_tail([]) is None
    assert middle_and_tail([float(x) for x in range(101)]) == {"p50": 50, "p95": 95}
