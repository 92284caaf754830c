"""Runs side by side: only what chance does not explain is marked, and what was set differently is listed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app import cli
from app.report.compare import RULE, compare_page, compare_runs, compare_text
from app.report.metrics import Metric, metrics_of
from app.report.speed import length_interval, position_intervals, wilson
from app.runfolder import RunFolder
from app.train.evaluate import Tally, summarise
from tests.report.made import BENCH, EVALUATE, VOCAB, change, copy_of, put


def other(finished: Path, tmp_path: Path, **bench: Any) -> str:
    """Another run with other numbers of the bench."""
    _, run = copy_of(finished, tmp_path / "other")
    change(run, "bench", **bench)
    return str(tmp_path / "other")


@pytest.mark.parametrize(
    ("new", "old", "change"),
    [
        (Metric("m", 2.0, "higher", 1.9, 2.1), Metric("m", 2.1, "higher", 2.0, 2.2), ""),  # both could be 2.05
        (Metric("m", 1.9, "higher", 1.8, 2.0), Metric("m", 2.1, "higher", 2.0, 2.2), "worse"),
        (Metric("m", 2.3, "higher", 2.2, 2.4), Metric("m", 2.1, "higher", 2.0, 2.2), "better"),
        (Metric("m", 2.3, "lower", 2.2, 2.4), Metric("m", 2.1, "lower", 2.0, 2.2), "worse"),
        (Metric("m", 9.0, None, 8.9, 9.1), Metric("m", 1.0, None, 0.9, 1.1), ""),
        # The half widths that face each other: the far sides are wide and say nothing.
        (Metric("m", 2.0, "higher", 1.0, 2.05), Metric("m", 2.1, "higher", 2.05, 9.0), "worse"),
        # Without an interval on one side the tolerance is what counts.
        (Metric("m", 96.0, "higher", 95, 97, tolerance=0.05), Metric("m", 100.0, "higher"), ""),
        (Metric("m", 94.0, "higher", tolerance=0.05), Metric("m", 100.0, "higher", 99, 101), "worse"),
        (Metric("m", 3.0, "lower", tolerance=0.2, slack=5.0), Metric("m", 1.0, "lower"), ""),  # two seconds
        (Metric("m", 1.0, "higher"), Metric("m", 1.0, "higher"), ""),
    ],
)
def test_what_chance_explains_is_not_marked(new: Metric, old: Metric, change: str) -> None:
    assert new.change_from(old) == change


def test_the_same_numbers_are_no_regression(finished: Path, tmp_path: Path) -> None:
    compared = compare_runs([str(finished), other(finished, tmp_path)])
    assert compared.regressions == [] and compared.differences == []
    text = "\n".join(compare_text(compared))
    assert "nothing is worse" in text and "the settings are the same" in text and RULE in text
    for name in ("acceptance length, vLLM", "accepted at position 3, offline", "acceptance length, chat, offline",
                 "speed-up, 3 draft tokens, 8 at once", "tokens/s with the draft", "training loss at the end",
                 "bytes a token", "seconds of train", "held-out tokens in the draft vocabulary"):  # fmt: skip
        assert name in text, name


def test_a_regression_is_marked_and_a_gain_is_said(finished: Path, tmp_path: Path) -> None:
    lower = other(
        finished, tmp_path, acceptance_length=1.7, acceptance_per_position=[0.69, 0.2, 0.1], speedup=1.4,
        tokens_per_second={"baseline": 400.0, "draft": 700.0},
    )  # fmt: skip
    compared = compare_runs([str(finished), lower])
    assert compared.regressions == [
        "other: acceptance length, vLLM", "other: accepted at position 2, vLLM",
        "other: speed-up, 3 draft tokens, 8 at once",
    ]  # fmt: skip
    lines = {line[:40].strip(): line for line in compare_text(compared)}
    assert lines["acceptance length, vLLM"].endswith("1.700 (1.500 to 1.900)  WORSE")
    assert lines["tokens/s with the draft"].endswith("700  better")
    page = compare_page(compared)
    assert page.count('class="worse"') == 3 and "3 worse:" in page
    assert "&lt;b&gt;code" in page and "<b>code" not in page and "http" not in page.replace("xmlns", "")
    # The first run is what the others are compared with.
    assert compare_runs([lower, str(finished)]).regressions == ["run: tokens/s with the draft"]


def test_speeds_on_a_busy_machine_are_not_marked(finished: Path, tmp_path: Path) -> None:
    compared = compare_runs([str(finished), other(finished, tmp_path, speedup=0.5, comparable=False)])
    assert compared.regressions == []
    assert any("other programs took the processor" in note for note in compared.notes)


def test_no_baseline_is_no_busy_machine(finished: Path, tmp_path: Path) -> None:
    alone = {"baseline": None, "draft": 620.0}
    run = other(finished, tmp_path, speedup=None, tokens_per_second=alone, output_mismatches=None, comparable=False)
    assert not any("other programs" in note for note in compare_runs([str(finished), run]).notes)


def test_a_served_length_without_an_interval_has_the_tolerance_of_a_speed() -> None:
    def length(value: float) -> Metric:
        bench = {**BENCH, "acceptance_length": value, "gauges": {}, "drafts": 0, "acceptance_per_position": []}
        return metrics_of({"bench": bench}, {})[0]

    assert length(2.19).low is None
    assert length(2.10).change_from(length(2.19)) == "" and length(2.05).change_from(length(2.19)) == "worse"
    assert "acceptance" in RULE


@pytest.mark.parametrize(
    ("length", "interval", "worse"),
    [
        (1.02, [1.0, 1.04], True),  # as engines did that lost the draft's states
        (1.04, None, True),
        (0.94 * 2.19, [0.94 * 2.19 - 0.01, 0.94 * 2.19 + 0.01], True),
        (0.94 * 2.19, None, True),
        (0.97 * 2.19, None, False),
    ],
)
def test_f77_a_drop_after_an_engine_upgrade_is_flagged_with_both_versions(
    finished: Path, tmp_path: Path, length: float, interval: list[float] | None, worse: bool
) -> None:
    """Twenty prompts in two versions of vLLM: more than 5 % less is a regression, where chance does not explain it."""
    ends = {"prompts": 20, "interval_per_position": None, "gauges": {}, "drafts": 0, "acceptance_per_position": []}
    before = other(finished, tmp_path / "a", **ends, interval=interval and [2.18, 2.20])
    after = other(finished, tmp_path / "b", **ends, interval=interval, acceptance_length=length)
    for url in (before, after) if interval is None else ():
        RunFolder(url).store.delete("evaluate")  # whose interval would stand for it
    run = RunFolder(after)
    manifest = run.manifest("bench")
    assert manifest is not None
    run.write_manifest(replace(manifest, versions={**manifest.versions, "vllm": "0.34"}))
    compared = compare_runs([before, after])
    assert ("version of vllm", ["0.33", "0.34"]) in compared.differences
    lengths = [x for x in compared.regressions if "acceptance length" in x]
    assert bool(lengths) == worse, compare_text(compared)
    assert any("version of vllm" in line and "0.34" in line for line in compare_text(compared))


def test_sampled_outputs_that_differ_are_no_number(finished: Path, tmp_path: Path) -> None:
    rows = dict(compare_runs([str(finished), other(finished, tmp_path, temperature=0.8)]).rows)
    assert rows["outputs that differ, share"][0] is not None and rows["outputs that differ, share"][1] is None


def test_settings_that_differ_are_listed_and_what_is_not_alike_is_said(finished: Path, tmp_path: Path) -> None:
    path = Path(other(finished, tmp_path)) / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("num_draft_tokens: 3", "num_draft_tokens: 5").replace("holdout: 2", "holdout: 3")
                    .replace("domain: chat", "domain: talk"))  # fmt: skip
    compared = compare_runs([str(finished), str(path.parent)])
    assert dict(compared.differences) == {
        "evaluate.num_draft_tokens": ["3", "5"], "evaluate.holdout": ["2", "3"], "sources.0.domain": ["chat", "talk"],
    }  # fmt: skip
    said = " ".join(compared.notes)
    assert "3, 5 draft tokens" in said and "held-out conversations are not the same" in said


def test_runs_that_went_less_far_are_compared_by_what_they_have(finished: Path, tmp_path: Path) -> None:
    _, run = copy_of(finished, tmp_path / "other")
    run.store.delete("bench")
    put(run, "vocab", ("generate",), {**VOCAB, "coverage": {"train": 1.0, "valid": None, "holdout": None}})
    compared = compare_runs([str(finished), run.url])
    rows = dict(compared.rows)
    assert rows["acceptance length, vLLM"][1] is None and rows["acceptance length, offline"][1] is not None
    assert "other: bench: not run" in compared.notes
    assert "-" in "\n".join(compare_text(compared))


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (["RUN"], "compare needs two runs or more"),
        (["RUN", "RUN"], "the same run twice"),
        (["RUN", "/nowhere/run"], "/nowhere/run is no run folder"),
    ],
)
def test_a_fault_is_one_sentence(
    finished: Path, capsys: pytest.CaptureFixture[str], quiet_log: None, runs: list[str], words: str
) -> None:
    assert cli.run(["compare", *(r.replace("RUN", str(finished)) for r in runs)]) == 1
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_command_line(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_log: None) -> None:
    page = tmp_path / "c.html"
    assert cli.run(["compare", str(finished), other(finished, tmp_path, speedup=1.0), "--html", str(page)]) == 0
    assert "1 worse: other: speed-up" in capsys.readouterr().out
    assert "1 worse: other: speed-up" in page.read_text()


# --- intervals ---


def test_intervals_by_position_resample_conversations() -> None:
    tallies = [Tally(f"c{i}", "chat", 10, (8.0, 2.0)) for i in range(20)]
    tallies += [Tally(f"d{i}", "chat", 10, (2.0, 2.0)) for i in range(20)]
    found = summarise(tallies, 2)
    (low, high), (same_low, same_high) = found.position_intervals
    assert found.per_position == [0.5, 0.2]
    half = 1.96 * 0.3 / 40**0.5  # shares of 0.8 and 0.2, 40 conversations of equal size
    assert low == pytest.approx(0.5 - half, abs=0.02) and high == pytest.approx(0.5 + half, abs=0.02)
    assert same_low == pytest.approx(0.2) and same_high == pytest.approx(0.2)  # no conversation differs
    assert summarise(tallies[:1], 2).position_intervals == [(0.8, 0.8), (0.2, 0.2)]


def test_served_intervals_come_from_the_best_there_is() -> None:
    assert length_interval({**BENCH, "interval": [2.1, 2.3]}, EVALUATE) == (2.1, 2.3)
    assert length_interval(BENCH, EVALUATE) == pytest.approx((1.99, 2.39))  # as wide as offline
    assert position_intervals(BENCH, EVALUATE)[0] == pytest.approx((0.59, 0.79))
    low, high = length_interval(BENCH, {**EVALUATE, "num_draft_tokens": 5}) or (0, 0)
    torch.manual_seed(0)
    joint = torch.tensor(BENCH["acceptance_per_position"])
    drawn = 1 + (torch.rand(200_000, 1) < joint).sum(-1).float()  # R by its joint rates
    assert high - low == pytest.approx(2 * 1.96 * float(drawn.std()) / 10, rel=0.02)
    assert position_intervals(BENCH, None)[0] == pytest.approx(wilson(69, 100))
    assert length_interval({**BENCH, "drafts": 0}, None) is None
    assert length_interval({**BENCH, "acceptance_per_position": []}, None) is None  # no rates, no spread


def test_wilson_is_wilsons() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
