"""The evaluate stage: what it reports of answers that were sampled, and of which ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from app.pipeline import StageContext, run_stage
from app.pipelines import evaluate
from tests.pipelines.finished import finish_random, stage
from tests.runs import prompts, tiny_config, write_rows


def exported(target: Path, folder: Path) -> StageContext:
    config = tiny_config(target, folder / "run", write_rows(folder / "r.jsonl", prompts(12)), evaluate__holdout=6)
    ctx = finish_random(config)
    run_stage(stage("export"), ctx)
    return ctx


def test_sampled_answers_get_both_ways_of_drafting_with_labels(
    tiny: Path, tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = exported(tiny, tmp_path)
    by_row = iter([0.8, None, 0.8, 1.0, None, 0.8])
    monkeypatch.setattr(evaluate, "plain_temperature", lambda row: next(by_row))
    with caplog.at_level(logging.INFO, "draftmill"):
        manifest, _ = run_stage(stage("evaluate"), ctx)
    counts = json.loads((tmp_path / "run" / "evaluate" / "evaluate.json").read_text())
    assert counts == manifest.counts and counts["drafting"] == "greedy" and counts["conversations"] == 6
    assert [(s["temperature"], s["greedy"]["conversations"]) for s in counts["sampled"]] == [(0.8, 3), (1.0, 1)]
    for sampled in counts["sampled"]:
        for drafting in ("greedy", "probabilistic"):
            assert sampled[drafting]["drafting"] == drafting
            assert sampled[drafting]["acceptance_length"] >= 1.0
            assert sampled[drafting]["drafts"] > 0
    assert "at temperature 0.8, expected acceptance length" in caplog.text
    assert "draft_sample_method=probabilistic" in caplog.text


def test_greedy_answers_have_no_sampled_part(tiny: Path, tmp_path: Path) -> None:
    manifest, _ = run_stage(stage("evaluate"), exported(tiny, tmp_path))
    assert manifest.counts["sampled"] == [] and manifest.counts["drafting"] == "greedy"


@pytest.mark.parametrize(
    ("sampling", "use", "expected"),
    [
        ({"temperature": 0.7}, "regenerate", 0.7),
        ({"temperature": 0.7, "seed": 3, "top_p": 1.0}, "regenerate", 0.7),
        ({"temperature": 0.7, "top_p": 0.9}, "regenerate", None),
        ({"temperature": 0.7, "top_k": 20}, "regenerate", None),
        ({"temperature": 0.7, "repetition_penalty": 1.1}, "regenerate", None),
        ({"temperature": 0.0}, "regenerate", None),
        ({"temperature": 0.7}, "as_is", None),
        (None, "as_is", None),
    ],
)
def test_only_draws_from_the_whole_softmax_count(sampling: Any, use: str, expected: float | None) -> None:
    row = {"sampling": None if sampling is None else json.dumps(sampling), "use": use}
    assert evaluate.plain_temperature(row) == expected
