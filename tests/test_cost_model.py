"""The cost model finds the truth it was made of, and what it recommends follows from it."""

import pytest

from app.cost_model import MARGIN, StepTime, fit, lengths_by_draft_tokens, surface

KS, AT_ONCE = (1, 2, 3, 5), (1, 4, 8, 16)


def plain(c: int) -> float:
    return 0.010 + 0.0002 * c


def drafted(k: int, c: int) -> float:
    return 0.011 + 0.001 * k + 0.0003 * c + 0.0002 * k * c


def sweep(ks: tuple[int, ...] = KS, at_once: tuple[int, ...] = AT_ONCE) -> list[StepTime]:
    cells = [StepTime(0, c, plain(c)) for c in at_once]
    return cells + [StepTime(k, c, drafted(k, c)) for k in ks for c in at_once]


def test_coefficients_and_break_even_are_the_truth() -> None:
    model = fit(sweep())
    found = (model.draft.constant, model.draft.per_draft_token, model.draft.per_request, model.draft.per_both)
    assert found == pytest.approx((0.011, 0.001, 0.0003, 0.0002), rel=1e-6)
    assert (model.plain.constant, model.plain.per_request) == pytest.approx((0.010, 0.0002), rel=1e-6)
    assert model.plain.per_draft_token == model.plain.per_both == 0
    assert max(model.draft.largest_error, model.plain.largest_error) < 1e-9
    for k, c in ((4, 8), (3, 12)):  # neither was measured
        even = drafted(k, c) / plain(c)
        assert model.break_even(k, c) == pytest.approx(even)
        assert model.speedup(even, k, c) == pytest.approx(1)
        assert model.speedup(2 * even, k, c) == pytest.approx(2)


def test_noise_moves_the_fit_a_little_and_is_told() -> None:
    noisy = [
        StepTime(s.draft_tokens, s.concurrency, s.seconds * (1.03 if i % 2 else 0.97)) for i, s in enumerate(sweep())
    ]
    model = fit(noisy)
    assert model.break_even(3, 8) == pytest.approx(drafted(3, 8) / plain(8), rel=0.05)
    assert 0.01 < model.draft.largest_error < 0.06


@pytest.mark.parametrize(("ks", "at_once"), [((3,), (8,)), ((1, 3), (8,)), ((3,), (2, 8)), ((1, 3), (2, 8))])
def test_few_cells_are_met_exactly_with_fewer_terms(ks: tuple[int, ...], at_once: tuple[int, ...]) -> None:
    model = fit(sweep(ks, at_once))
    for k in ks:
        for c in at_once:
            assert model.draft.seconds(k, c) == pytest.approx(drafted(k, c))
            assert model.plain.seconds(0, c) == pytest.approx(plain(c))
    used = (model.draft.per_draft_token > 0, model.draft.per_request > 0)
    assert used == (len(ks) > 1, len(at_once) > 1)


def test_no_step_is_faster_for_more_tokens() -> None:
    falling = [StepTime(0, 8, 0.01), StepTime(1, 8, 0.02), StepTime(3, 8, 0.01)]
    model = fit(falling)
    assert model.draft.per_draft_token == 0
    assert model.draft.largest_error > 0.2


@pytest.mark.parametrize("cells", [sweep()[:4], sweep()[4:], [StepTime(0, 1, 0.0), StepTime(1, 1, 1.0)]])
def test_what_cannot_be_fitted_is_refused(cells: list[StepTime]) -> None:
    with pytest.raises(ValueError, match=r"cost model needs|more than no time"):
        fit(cells)


def test_the_surface_recommends_by_concurrency() -> None:
    """Cheap drafting at few requests, none at many: the sign of the truth at each."""
    lengths = {1: 1.6, 2: 1.9, 3: 2.05, 5: 2.15}
    found = surface(fit(sweep()), lengths, AT_ONCE, {})
    assert [r["concurrency"] for r in found["recommended"]] == [1, 2, 4, 8, 16]
    for row in found["recommended"]:
        c = row["concurrency"]
        gains = {k: lengths[k] * plain(c) / drafted(k, c) for k in lengths}
        best = max(gains, key=lambda k: gains[k])
        assert row["draft_tokens"] == (best if gains[best] >= 1 + MARGIN else None)
    assert found["recommended"][0]["draft_tokens"] == 2
    points = {(p["draft_tokens"], p["concurrency"]): p for p in found["points"]}
    assert len(points) == 4 * 5
    assert points[5, 16]["break_even"] == pytest.approx(drafted(5, 16) / plain(16))
    assert points[5, 16]["go"] is False and points[2, 1]["go"] is True


def test_no_draft_is_recommended_where_none_gains() -> None:
    found = surface(fit(sweep()), {1: 1.05, 3: 1.1}, AT_ONCE, {})
    assert [r["draft_tokens"] for r in found["recommended"]] == [None] * 5
    assert all(r["speedup"] == 1 for r in found["recommended"])


def test_a_measurement_goes_before_the_prediction() -> None:
    found = surface(fit(sweep()), {3: 3.0}, (1,), {(3, 1): 0.9})
    assert found["points"][0]["speedup"] > 1.5 and found["points"][0]["go"] is False
    assert found["recommended"][0]["draft_tokens"] is None


def test_lengths_of_chains_that_were_not_measured() -> None:
    assert lengths_by_draft_tokens({3: 1.95}, [0.6, 0.25, 0.1]) == pytest.approx({1: 1.6, 2: 1.85, 3: 1.95})
    assert lengths_by_draft_tokens({2: 1.8, 4: 2.1}, []) == {2: 1.8, 4: 2.1}  # gauges tell no positions
