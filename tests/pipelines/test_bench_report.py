"""Bench arithmetic and the report: one definition of acceptance, differences shown, everything escaped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.bench.measure import Served
from app.bench.settings import compare
from app.errors import UserError
from app.pipelines import bench
from app.report.data import loss_curve
from app.report.page import render
from app.report.verdict import verdict
from app.results import summary_lines
from app.runfolder import RunFolder
from tests.runs import context, prompts, tiny_config, write_rows

BASE = Served(outputs=[[1, 2, 3, 4], [5, 6], [7, 8, 9]], seconds=[2.0, 1.0, 4.0], tokens=9)
DRAFT = Served(
    outputs=[[1, 2, 3, 4], [5, 7], [7, 8]],
    seconds=[1.5],
    tokens=8,
    drafts=10,
    draft_tokens=30,
    accepted=12,
    accepted_per_position=[7, 4, 1],
)


def test_acceptance_follows_the_one_definition_and_differences_are_shown() -> None:
    result = compare(BASE, DRAFT, 3)
    assert result["acceptance_length"] == pytest.approx(1 + 12 / 10)
    assert result["acceptance_rate"] == pytest.approx(12 / 30)
    assert result["acceptance_per_position"] == [0.7, 0.4, 0.1]
    assert result["tokens_per_second"] == {"baseline": pytest.approx(5.25), "draft": 8 / 1.5}  # the mean of passes
    assert result["output_mismatches"] == 2
    assert result["mismatch_examples"][0] == {"prompt": 1, "first_difference": 1, "baseline": [6], "draft": [7]}
    assert result["mismatch_examples"][1]["first_difference"] == 2  # one is a beginning of the other
    with pytest.raises(UserError, match="drafted nothing"):
        compare(BASE, replace(DRAFT, drafts=0), 3)


@pytest.mark.parametrize(
    ("speedup", "words"), [(1.5, "1.50 times as fast"), (0.5, "2.00 times slower"), (1.0, "neither gains nor loses")]
)
def test_the_verdict_says_what_was_measured(speedup: float, words: str) -> None:
    bench = {"speedup": speedup, "acceptance_length": 2.1, "concurrency": 8, "comparable": True}
    assert words in verdict({"bench": bench})


def test_a_busy_machine_is_no_speed_up() -> None:
    even = compare(replace(BASE, cpu_share=0.9), replace(DRAFT, cpu_share=0.8), 3)
    assert even["comparable"]
    busy = compare(replace(BASE, cpu_share=0.1), replace(DRAFT, cpu_share=0.9), 3)
    assert not busy["comparable"]
    assert "cannot be compared" in verdict({"bench": busy | {"concurrency": 8}})
    both = (replace(BASE, cpu_share=0.5, foreign_share=0.4), replace(DRAFT, cpu_share=0.5, foreign_share=0.4))
    assert not compare(*both, 3)["comparable"]  # starved alike is no measurement either
    quiet = (replace(BASE, cpu_share=0.9, foreign_share=0.05), replace(DRAFT, cpu_share=0.9, foreign_share=0.1))
    assert compare(*quiet, 3)["comparable"]


def test_text_of_private_prompts_is_not_shown(tiny: Path, tmp_path: Path) -> None:
    ctx = context(tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(3))))
    examples = compare(BASE, DRAFT, 3)["mismatch_examples"]
    shown = bench._in_words(ctx, examples, {1})
    assert [shown[0]["baseline"], shown[0]["draft"]] == ["(private)", "(private)"]
    assert shown[1]["baseline"] != "(private)"


def report_data(source: str) -> dict[str, Any]:
    bench = compare(BASE, DRAFT, 3) | {"prompts": 3, "concurrency": 8, "max_new_tokens": 4}
    estimate = {
        "acceptance_length": 2.2,
        "interval": [2.0, 2.4],
        "acceptance_per_position": [0.7, 0.4, 0.1],
        "conversations": 3,
        "domains": {"chat": {"acceptance_length": 2.2, "interval": [2.0, 2.4], "conversations": 3}},
    }
    results = {
        "rows": {"in": 4, "kept": 3, "rejected": 1, "not_drawn": 0},
        "reject_reasons": {"duplicate": 1},
        "sources": {source: {"asked": None, "rows_in": 4, "kept": 3, "not_drawn": 0, "rejected": {"duplicate": 1}}},
        "skipped_sources": {"gone": "source gone: nothing is found"},
        "tokens": 20,
        "tokens_by_kind": {"prompt": 11, "answer": 9, "supervised": 9},
        "bytes": 1234,
        "samples": 3,
        "finish_reasons": {"stop": 3},
        "aux_layers": [2, 4, 5],
        "bench": bench,
        "evaluate": estimate,
        "stages": {"ingest": {"seconds": 1.0, "reused": True}, "report": {"seconds": 1.0, "reused": False}},
    }
    return {
        "run": "/runs/x",
        "made": "now",
        "verdict": verdict(results),
        "results": results,
        "stages": {"ingest": {"seconds": 1.0, "started": "then", "digest": "d"}},
        "versions": {"ray": "2.60"},
        "git_revision": None,
        "seeds": {"train": 0},
        "serve": {"vLLM": "vllm serve x --speculative-config '{\"a\": 1}'"},
        "curve": {"train": [{"step": 1, "value": 3.0}, {"step": 9, "value": 1.0}], "valid": []},
    }


def test_the_page_is_self_contained_and_escaped() -> None:
    page = render(report_data("<script>alert(1)</script>"))
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "http://" not in page and "https://" not in page  # no network
    for figure in ("2.200", "70.0 %", "duplicate 1", "outputs differ", "2, 4, 5", "chat"):
        assert figure in page
    assert "<svg" in page


def test_the_summary_fits_one_screen() -> None:
    results = report_data("rows")["results"]
    lines = summary_lines("/runs/x", results)
    assert len(lines) <= 40 and all(len(line) <= 120 for line in lines)
    text = "\n".join(lines)
    for words in ("4 in, 3 kept, 1 rejected (duplicate 1)", "acceptance length 2.200 in vLLM", "70.0 %, 40.0 %, 10.0 %",
                  "2 of 3 differ", "reused", "report.html"):  # fmt: skip
        assert words in text, text


def test_curves_come_from_the_training_log(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    assert loss_curve(run) == {"train": [], "valid": []}
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "validation": {"step": 2, "acceptance_length": 1.5}}]
    run.store.write_bytes("train/metrics.jsonl", "".join(json.dumps(x) + "\n" for x in lines).encode())
    (valid,) = loss_curve(run)["valid"]
    assert loss_curve(run)["train"] == [{"step": 1, "value": 3.0}]
    assert (valid["step"], valid["value"]) == (2, 1.5)
