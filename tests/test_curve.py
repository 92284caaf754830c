"""`draftmill curve`: the law from points, the verdict, and points that are trained once."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from app.config import Config
from app.curve import Point, curve_of_runs, fit, lines_of, parse_fractions, resampled
from app.errors import UserError
from app.pipeline import Stage, StageResult, run_stage
from app.train.loop import nested
from tests.pipelines.finished import finish_generate, stage
from tests.runs import Command, draftmill, prompts, save_config, tiny_config, write_rows

SAMPLES = np.array([500.0, 1000.0, 2000.0, 4000.0])
SAME = np.ones(4)


def law(n: np.ndarray, a: float, b: float, c: float) -> np.ndarray:
    return a - b * n**-c


@pytest.mark.parametrize(("a", "b", "c"), [(3.2, 8.0, 0.25), (2.4, 30.0, 0.5), (3.9, 4.0, 0.15)])
def test_the_law_is_found_again(a: float, b: float, c: float) -> None:
    found = fit(SAMPLES, law(SAMPLES, a, b, c), SAME, 4.0)
    assert found.a == pytest.approx(a, abs=0.02) and found.c == pytest.approx(c, abs=0.02)
    assert found(1000.0) == pytest.approx(law(np.array(1000.0), a, b, c), abs=1e-3)
    assert found.doubling == pytest.approx(law(np.array(8000.0), a, b, c) - law(np.array(4000.0), a, b, c), abs=2e-3)


def test_no_law_goes_above_what_k_allows_or_down() -> None:
    """Growth without a bend would have no limit: k + 1 is one."""
    steep = fit(SAMPLES, np.array([1.0, 2.0, 3.0, 4.0]), SAME, 4.0)
    assert steep.a <= 4.0 and steep(1e9) <= 4.0
    falling = fit(SAMPLES, np.array([2.0, 1.9, 1.8, 1.7]), SAME, 4.0)
    assert falling.b == 0.0 and falling.doubling == 0.0


def test_a_doubtful_point_counts_less() -> None:
    lengths = law(SAMPLES, 3.2, 8.0, 0.25)
    lengths[0] += 0.4
    trusted, doubted = (fit(SAMPLES, lengths, np.array([w, 1.0, 1.0, 1.0]), 4.0) for w in (1.0, 1e-4))
    right = float(law(np.array(8000.0), 3.2, 8.0, 0.25) - law(np.array(4000.0), 3.2, 8.0, 0.25))
    assert abs(doubted.doubling - right) < abs(trusted.doubling - right) / 3


def points_of(lengths: np.ndarray, conversations: int = 200, seed: int = 0, noise: float = 2) -> list[Point]:
    """Points whose conversations share their difficulty, as held-out ones do."""
    rng = np.random.default_rng(seed)
    ease = rng.normal(0, 0.15, conversations)
    points = []
    for n, length in zip(SAMPLES, lengths, strict=True):
        drafts = np.full(conversations, 40.0)
        accepted = np.maximum(drafts * (length - 1 + ease) + rng.normal(0, noise, conversations), 0)
        mean = 1 + accepted.sum() / drafts.sum()
        points.append(Point(int(n), mean, mean - 0.06, mean + 0.06, 3, 10, tuple(drafts), tuple(accepted)))
    return points


def doubling_of(lines: list[str]) -> tuple[float, float, float]:
    text = next(line for line in lines if line.startswith("doubling"))
    found = re.search(r"gives ([+-][\d.]+) \(([+-][\d.]+)\.\.([+-][\d.]+)\)", text)
    assert found is not None, text
    return float(found[1]), float(found[2]), float(found[3])


def test_the_interval_holds_the_truth_and_resamples_the_same_conversations() -> None:
    lengths = law(SAMPLES, 3.2, 8.0, 0.25)
    right = float(law(np.array(8000.0), 3.2, 8.0, 0.25) - lengths[-1])
    inside = 0
    for seed in range(20):
        middle, low, high = doubling_of(lines_of(points_of(lengths, seed=seed)))
        assert low <= middle <= high
        inside += low <= right <= high
    assert inside >= 16
    draws = resampled(points_of(lengths))
    assert draws.shape == (1000, 4)
    # What one point gains on another is far surer than either: the conversations are the same.
    assert (draws[:, 3] - draws[:, 2]).std() < 0.6 * draws[:, 3].std()


def test_the_verdict_follows_the_interval() -> None:
    growing = lines_of(points_of(law(SAMPLES, 3.2, 8.0, 0.25)))
    assert "more data is worth it if" in growing[-1] and "more tokens a step" in growing[-1]
    assert "not worth it" in lines_of(points_of(np.full(4, 2.5), conversations=2000))[-1]
    few = points_of(law(SAMPLES, 3.2, 8.0, 0.25), conversations=4, noise=60)
    assert "do not settle it" in lines_of(few)[-1]
    table = "\n".join(growing)
    assert "samples" in table and "4,000" in table and "law: length = " in table and "its limit is" in table


def test_fractions_are_read_or_refused() -> None:
    assert parse_fractions(["1", "1/4", "0.5", "1/4"]) == [Fraction(1, 4), Fraction(1, 2), Fraction(1)]
    for texts in (["1/0", "1", "1/2"], ["x"], ["2", "1", "1/2"], ["0", "1/2", "1"], ["1/2", "1"]):
        with pytest.raises(UserError, match="fractions"):
            parse_fractions(texts)
    with pytest.raises(UserError, match="3 different numbers"):
        lines_of(points_of(SAMPLES * 0 + 2)[:2])


def test_smaller_shares_are_parts_of_larger_ones() -> None:
    split = {f"c{i}": "train" for i in range(80)} | {f"v{i}": "valid" for i in range(9)} | {"h": "holdout"}
    sizes, before = [], set[str]()
    for share in (1 / 8, 1 / 4, 1 / 2, 1.0):
        found = nested(split, share)
        train = {c for c, name in found.items() if name == "train"}
        assert before <= train
        assert {c: n for c, n in found.items() if n != "train"} == {c: n for c, n in split.items() if n != "train"}
        sizes.append(len(train))
        before = train
    assert sizes == [10, 20, 40, 80] and nested(split, 1.0) == split
    assert sum(n == "train" for n in nested(split, 1e-9).values()) == 1


def finished_run(tiny: Path, folder: Path, samples: int, k: int = 3, length: float = 2.0) -> Config:
    folder.mkdir(parents=True)
    config = tiny_config(tiny, folder / "run", write_rows(folder / "r.jsonl", prompts(8)))
    ctx = finish_generate(config)
    ctx.run.store.write_json(
        "evaluate/evaluate.json",
        {"acceptance_length": length, "interval": [length - 0.05, length + 0.05], "num_draft_tokens": k},
    )
    counts = {"samples": samples, "steps": samples // 10}
    run_stage(Stage("train", lambda c: StageResult(outputs=[], digest="d", counts=counts), inputs=("generate",)), ctx)
    return config


def test_finished_runs_are_points(tiny: Path, tmp_path: Path) -> None:
    lengths = law(SAMPLES, 3.2, 8.0, 0.25)
    runs = [
        finished_run(tiny, tmp_path / f"{n:.0f}", int(n), length=float(x))
        for n, x in zip(SAMPLES, lengths, strict=True)
    ]
    lines = curve_of_runs(runs)
    middle, low, high = doubling_of(lines)
    assert low < middle < high and middle == pytest.approx(0.17, abs=0.05)
    assert "as they are" in lines[-1]
    with pytest.raises(UserError, match=r"num_draft_tokens: they are no one curve"):
        curve_of_runs([*runs[:2], finished_run(tiny, tmp_path / "k5", 9, k=5)])
    other = tiny_config(tiny, tmp_path / "none", tmp_path / "500" / "r.jsonl")
    with pytest.raises(UserError, match="is not trained and evaluated"):
        curve_of_runs([*runs, other])


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_tiny_curve_is_trained_once_and_resumed(tiny: Path, tmp_path: Path, draftmill_here: Command) -> None:
    """Real Ray Train. A point that is there is not trained again."""
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(42)), evaluate__holdout=8, train__epochs=2,
        train__validation_share=0.05,
    )  # fmt: skip
    ctx = finish_generate(config)
    run_stage(stage("vocab"), ctx)
    ctx.run.write_config(config)
    folder = tmp_path / "run" / "curve"
    first = draftmill("curve", str(tmp_path / "run"), "--fractions", "1/4,1/2,1", timeout=900)
    assert first.returncode == 0, first.stderr[-3000:]
    assert "doubling the 32 samples gives" in first.stdout, first.stdout
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["1-1", "1-2", "1-4"]
    points = [json.loads((folder / name / "point.json").read_text())["point"] for name in ("1-4", "1-2", "1-1")]
    assert [p["samples"] for p in points] == [8, 16, 32]
    assert all(len(p["drafts"]) == 8 and sum(p["drafts"]) > 0 for p in points)
    assert not (folder / "1-2" / "checkpoints").exists() and (folder / "1-2" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "train").exists()

    times = {n: (folder / n / "point.json").stat().st_mtime_ns for n in ("1-4", "1-2", "1-1")}
    (folder / "curve.json").unlink()
    second = draftmill_here("curve", str(tmp_path / "run"), "--fractions", "1/4,1/2,1")
    assert second.stdout == first.stdout, second.stderr[-3000:]
    assert {n: (folder / n / "point.json").stat().st_mtime_ns for n in times} == times


def test_a_run_without_samples_says_so(tiny: Path, tmp_path: Path, draftmill_here: Command) -> None:
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(8)))
    path = save_config(config, tmp_path / "c.yaml")
    result = draftmill_here("curve", str(path))
    assert result.returncode == 1 and "stage generate has not run yet" in result.stderr, result.stderr
