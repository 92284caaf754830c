"""`draftmill doctor`, and the doctor that runs by itself before training, bench and report."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.config import Config
from app.doctor import checklist
from app.doctor import finding as f
from app.doctor.checklist import CHECKS, SECTIONS
from app.doctor.command import BEFORE_TRAIN, before_report, examine
from app.doctor.facts import Facts
from app.doctor.finding import Finding
from app.doctor.weak import enough_data
from app.errors import UserError
from app.parts import read_ingest_part
from app.pipeline import Stage, StageContext, StageResult, run_stage
from app.stages import STAGES
from tests.doctor.test_matrix import eagle_command, states_of
from tests.doctor.tiny_run import Target, copied, generated, run_config
from tests.pipelines.finished import finish_generate, stage
from tests.runs import Command, context, prompts, save_config, tiny_config, write_rows


def test_the_command_prints_every_line_in_order_and_exits_by_what_it_found(
    healthy: Config, tmp_path: Path, draftmill_here: Command
) -> None:
    config = copied(healthy, tmp_path / "run")
    path = save_config(config, tmp_path / "run.yaml")
    done = draftmill_here("doctor", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("  ") and "->" not in line[:70]]
    ids = [line.split()[0] for line in lines]
    assert ids == [name for name, _, _ in CHECKS] and sorted(SECTIONS) == sorted({i[0] for i in ids})
    states = {line[6:20].strip() for line in lines}
    assert states == {"passed", "advice", "not applicable"}
    told = {line.split()[0] for line, below in pairwise(done.stdout.splitlines()) if below.lstrip().startswith("->")}
    assert told == {line.split()[0] for line in lines if line[6:20].strip() == "advice"} and "E1" in told
    assert re.search(r"\n\d+ passed, \d+ with advice, 0 failed, \d+ not applicable\n$", done.stdout)

    eagle_command(config)
    context(config).run.write_config(config)
    done = draftmill_here("doctor", config.run_dir, "--json")  # a run folder will do
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["causes"] == [f.FLAG] and report["counts"]["failed"] == 1 and not report["passes"]
    (line,) = [x for x in report["lines"] if x["state"] == "failed"]
    assert line["id"] == "A1" and "EAGLE" in line["evidence"] and "EAGLE3" in line["next_step"]
    assert json.loads((tmp_path / "run" / "doctor.json").read_text())["causes"] == [f.FLAG]


def test_a_run_that_has_not_begun_is_told_so(tiny: Path, tmp_path: Path, draftmill_here: Command) -> None:
    config = run_config(tiny, tmp_path)
    path = save_config(config, tmp_path / "run.yaml")
    done = draftmill_here("doctor", str(path))
    assert done.returncode == 1 and "nothing to examine" in done.stderr


def test_what_has_not_run_is_not_applicable_with_the_reason(tiny: Path, tmp_path: Path, target: Target) -> None:
    config = run_config(tiny, tmp_path, 12)
    generated(config, target)
    report = examine(context(config))
    assert report.passes
    said = {line.id: line.finding.evidence for line in report.lines if line.finding.state == "not applicable"}
    assert {said[i] for i in ("A5", "A6", "E3")} == {"vocab has not run yet"}
    assert {said[i] for i in ("A1", "A7", "C3", "C6")} == {"export has not run yet"}
    assert {said[i] for i in ("A8", "D8", "M1", "M2", "P2")} == {"bench has not run yet"}
    too_large = config.model_copy(update={"doctor": config.doctor.model_copy(update={"recompute_gib": 0.0})})
    without = examine(context(too_large))
    said = {line.id: line.finding.evidence for line in without.lines if line.finding.state == "not applicable"}
    assert "doctor.recompute_gib (0)" in said["A3"] and without.passes


def guarded(name: str) -> Stage:
    """The real stage with its guard; its work is left out."""
    real = stage(name)
    return Stage(name, lambda ctx: StageResult([], digest="d"), real.inputs, before=real.before)


def settings(config: Config, **doctor: Any) -> StageContext:
    chosen = {"before": ["train", "bench", "report"], **doctor}
    return context(config.model_copy(update={"doctor": config.doctor.model_copy(update=chosen)}))


def test_training_on_wrong_states_is_refused_in_one_sentence(
    tiny: Path, tmp_path: Path, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(tiny, tmp_path, 12)
    run_stage(stage("vocab"), generated(config, target, states_of(3, 5, 6)))
    with pytest.raises(UserError) as refused:
        run_stage(guarded("train"), settings(config))
    said = str(refused.value)
    assert "layers off by one" in said and "capture again" in said and "doctor.stop=false" in said and "\n" not in said
    assert context(config).run.manifest("train") is None
    with caplog.at_level(logging.WARNING, "draftmill"):
        run_stage(guarded("train"), settings(config, stop=False))
    assert "layers off by one" in caplog.text and context(config).run.manifest("train") is not None
    run_stage(guarded("train"), settings(config))  # up to date: nothing is done, so nothing is asked


def test_bench_is_refused_where_the_export_is_wrong_and_report_is_only_told(
    healthy: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = copied(healthy, tmp_path / "run")
    (tmp_path / "run" / "bench" / "manifest.json").unlink()
    eagle_command(config)
    with pytest.raises(UserError, match="bench: the doctor finds EAGLE flag"):
        run_stage(guarded("bench"), settings(config))
    with caplog.at_level(logging.WARNING, "draftmill"):
        before_report(settings(config))
    assert "doctor: EAGLE flag" in caplog.text
    run_stage(guarded("bench"), settings(config, before=[]))


def test_f74_a_bench_of_another_form_is_noted(healthy: Config, tmp_path: Path) -> None:
    config = copied(healthy, tmp_path / "run")
    fp8 = config.bench.model_copy(update={"engine_args": {"quantization": "fp8"}})
    report = examine(context(config.model_copy(update={"bench": fp8})))
    (line,) = [line for line in report.lines if line.id == "B5"]
    assert line.finding.state == "advice" and "(quantization fp8) than was captured (quantization none)" in (
        line.finding.next_step or ""
    )


@pytest.mark.parametrize(
    ("samples", "note"),
    [(100, "far below the usual volume"), (20_000, "published drafts use 50,000 samples and more"), (68_000, "")],
)
def test_f79_a_small_volume_is_advice_and_no_fault(healthy: Config, samples: int, note: str) -> None:
    facts = Facts(context(healthy), ("ingest", "generate", "vocab", "train"))
    generate = facts.manifest("generate")
    counts = {**generate.counts, "samples": samples}
    with pytest.MonkeyPatch.context() as patch:
        of_train = facts.manifest("train")
        patch.setattr(facts, "manifest", lambda s: of_train if s == "train" else replace(generate, counts=counts))
        found = enough_data(facts)
    assert found.state == ("advice" if note else "passed") and found.cause is None
    assert found.next_step.startswith(note) and bool(found.next_step) == bool(note)
    for words in (f"{samples:,} samples", "answer tokens", "20 epochs", "100 % of the samples looked at answered by"):
        assert words in found.evidence, words


def test_an_older_run_s_export_is_not_judged_before_training(healthy: Config, tmp_path: Path) -> None:
    config = copied(healthy, tmp_path / "run")
    eagle_command(config)
    assert examine(context(config), BEFORE_TRAIN).passes


def test_a_bench_of_an_older_export_says_nothing(healthy: Config, tmp_path: Path) -> None:
    config = copied(healthy, tmp_path / "run")
    run = context(config).run
    manifest = run.manifest("export")
    assert manifest is not None
    run.write_manifest(replace(manifest, digest="exported again"))
    lines = {line.id: line.finding for line in examine(context(config)).lines}
    assert {lines[i].evidence for i in ("M1", "P2")} == {"the bench is of an older export; run it again"}


def test_a_check_that_breaks_costs_no_run(
    healthy: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(facts: Facts) -> Finding:
        raise KeyError("gone")

    monkeypatch.setattr(checklist, "CHECKS", (("A1", "breaks", breaks), *CHECKS[1:]))
    report = examine(context(healthy))
    assert report.passes and report.lines[0].finding.state == "not applicable"
    assert "KeyError" in report.lines[0].finding.evidence and "breaks broke" in caplog.text


def test_the_stages_that_cost_are_guarded() -> None:
    guards: dict[str, Callable[[StageContext], None] | None] = {s.name: s.before for s in STAGES}
    assert [name for name, before in guards.items() if before is not None] == ["train", "bench", "report"]


def test_states_of_a_stub_are_called_another_target_s(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(6)))
    finish_generate(config)
    report = examine(context(config), BEFORE_TRAIN)
    assert {line.finding.cause for line in report.failures} == {f.OTHER_TARGET}


def test_no_text_and_no_id_is_in_the_report(healthy: Config) -> None:
    ctx = context(healthy)
    text = json.dumps(examine(ctx).to_json())
    ids = [row["id"] for row in read_ingest_part(ctx.run.store, 0)]
    assert "Please" not in text and not [i for i in ids if i in text]
