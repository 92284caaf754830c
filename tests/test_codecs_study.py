"""The study of codecs runs on a small run, without Ray, and its numbers are those of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.errors import UserError
from app.pipeline import run_stage
from app.runfolder import RunFolder
from benchmarks.codecs import FORMS, open_run, study, text_of
from tests.pipelines.finished import finish_generate, stage
from tests.runs import prompts, tiny_config, write_rows


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Path:
    source = write_rows(tmp_path / "rows.jsonl", prompts(24))
    ctx = finish_generate(
        tiny_config(tiny, tmp_path / "run", source, train__validation_share=0.1, capture__codec="bf16")
    )
    run_stage(stage("vocab"), ctx)
    ctx.run.write_config(ctx.config)
    return tmp_path / "run"


def test_bytes_errors_and_acceptance_of_every_form(run: Path) -> None:
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    lines = study(open_run(str(run), None, None), FORMS, [0], 2, torch.device("cpu"))
    assert [(x["codec"], x["compression"]) for x in lines] == FORMS
    by_form = {(x["codec"], x["compression"]): x for x in lines}
    for codec, compression in FORMS:
        line = by_form[codec, compression]
        assert line["error"] == by_form[codec, "none"]["error"]
        assert line["acceptance_lengths"] == by_form[codec, "none"]["acceptance_lengths"]
        assert 1 <= line["acceptance_lengths"][0] <= 4
        assert "acceptance length" in text_of(line)
    assert set(by_form["bf16", "planes"]["error"].values()) == {0.0}
    errors = [max(by_form[c, "none"]["error"].values()) for c in ("int8", "fp8", "int4")]
    assert 0 < errors[0] < errors[1] < 0.04 < errors[2] < 0.2
    ratios = [by_form[c, "none"]["ratio"] for c in ("int4", "fp8", "bf16")]
    assert ratios[0] < ratios[1] < ratios[2]
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files


def test_what_the_study_cannot_use_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="generate and vocab are not both finished"):
        open_run(str(tmp_path / "absent"), None, None)
    RunFolder(str(run)).store.delete("generate/parts")
    with pytest.raises(UserError, match=r"needs states stored with capture\.codec=bf16"):
        open_run(str(run), None, None)
