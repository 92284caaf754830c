"""The run as a whole: what is refused before it begins, what a stop leaves behind, what a changed setting redoes."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.errors import UserError
from app.parts import PARTS, read_entry, write_entry
from app.pipeline import Stage, StageContext, StageResult, StageState, run_pipeline, run_stage, stage_state
from app.pipelines import generate
from app.stages import stages_up_to
from app.status import status_lines
from app.storage import Store
from app.train import stage as train
from app.train.state import load_latest, save_best, save_state
from tests.pipelines.finished import finish_generate, stage
from tests.runs import ROOT, context, prompts, save_config, tiny_config, write_rows
from tests.tiny import make_tiny


def driver_log(run: Path) -> list[str]:
    (path,) = (run / "logs").glob("driver-*.log")
    return path.read_text().splitlines()


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("this must not be reached")


# Refused before anything begins


@pytest.mark.parametrize("config_text", [None, "name: somebody's own\n"])
def test_a_folder_of_other_people_is_refused_and_not_touched(
    tiny: Path, tmp_path: Path, config_text: str | None
) -> None:
    folder = tmp_path / "papers"
    (folder / "drafts").mkdir(parents=True)
    (folder / "thesis.txt").write_text("years of work")
    (folder / "drafts" / "half.tmp-1").write_text("what a run would clear away")
    if config_text is not None:
        (folder / "config.yaml").write_text(config_text)

    def content() -> dict[str, tuple[int, bytes]]:
        files = [p for p in folder.rglob("*") if p.is_file()]
        return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}

    before, folders = content(), sorted(p.name for p in folder.rglob("*") if p.is_dir())
    config = tiny_config(tiny, folder, write_rows(tmp_path / "r.jsonl", prompts(3)))
    with pytest.raises(UserError, match=r"holds other files \(.*drafts.*\).*; give it a folder of its own") as refused:
        run_pipeline(config, [Stage("ingest", never)])
    assert "\n" not in str(refused.value)
    assert content() == before
    assert sorted(p.name for p in folder.rglob("*") if p.is_dir()) == folders


@pytest.mark.parametrize("last", ["evaluate", "bench", "report"])
def test_no_holdout_is_refused_before_any_stage_begins(tiny: Path, tmp_path: Path, last: str) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(3))
    config = tiny_config(tiny, tmp_path / "run", source, evaluate__holdout=0)
    with pytest.raises(UserError, match=r"evaluate\.holdout is 0.*set it above 0"):
        run_pipeline(config, stages_up_to(last))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["logs"]


@pytest.mark.parametrize("rows", [5, 4])
def test_a_holdout_that_takes_every_row_is_refused_before_any_engine_starts(
    tiny: Path, tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(rows))
    ctx = context(tiny_config(tiny, tmp_path / "run", source, evaluate__holdout=5))
    run_stage(stage("ingest"), ctx)
    monkeypatch.setattr(generate, "connect", never)
    with pytest.raises(UserError, match=rf"evaluate\.holdout keeps 5 conversations and ingest kept only {rows};"):
        generate.run(ctx)


def test_too_many_failed_rows_are_refused_before_any_engine_starts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an earlier stop: the parts that are missing could not make up for it."""
    source = write_rows(tmp_path / "r.jsonl", prompts(25))
    config = tiny_config(tiny, tmp_path / "run", source, generate__max_error_share=0.1)
    ctx = finish_generate(config)
    entry = read_entry(ctx.run.store, 0)
    assert entry is not None
    fault = {"id": "a", "where": "r.jsonl:1", "reason": "bad_request", "detail": "no"}
    write_entry(ctx.run.store, dataclasses.replace(entry, rejects=[fault] * 3))
    ctx.run.store.delete(f"{PARTS}/part-00002.json")
    monkeypatch.setattr(generate, "connect", never)
    with pytest.raises(UserError, match=r"3 of 25 rows failed \(bad_request 3\).*generate\.retry_failed=true"):
        generate.run(ctx)
    monkeypatch.setattr(generate, "_generate_parts", start)
    for changes in ({"generate__max_error_share": 0.2}, {"generate__retry_failed": True}):
        with pytest.raises(Started):
            generate.run(context(tiny_config(tiny, tmp_path / "run", source, **changes)))


class Started(Exception):
    """The engines would start now."""


def start(*args: Any, **kwargs: Any) -> Any:
    raise Started


@pytest.fixture
def cluster_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, float]], None]:
    """Pretend to be connected to a cluster of these resources; Started is raised in place of the engines."""
    import ray

    def pretend(resources: dict[str, float]) -> None:
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": resources}])

    monkeypatch.setattr(generate, "connect", lambda config: None)
    monkeypatch.setattr(generate, "_preflight", lambda *others: None)
    monkeypatch.setattr(generate, "start_board", start)
    return pretend


@pytest.mark.parametrize(
    ("resources", "changes", "words"),
    [
        ({"CPU": 8, "GPU": 4}, {"tensor_parallel": 2}, None),
        ({"CPU": 8}, {"tensor_parallel": 2}, r"tensor_parallel is above 1 and the cluster has no GPU"),
        ({"CPU": 8, "GPU": 2}, {"replicas": 3}, r"3 x 1 = 3 GPUs and the cluster has 2; lower generate\.replicas"),
        ({"CPU": 2}, {"replicas": 3}, r"3 x 1 = 3 CPUs and the cluster has 2; lower generate\.replicas"),
        # Three parts keep three engines busy: the others are not asked for.
        ({"CPU": 3}, {"replicas": 50}, None),
        ({"CPU": 1, "GPU": 3}, {"replicas": 50}, None),
        ({"CPU": 1, "GPU": 2}, {"replicas": 50}, r"3 x 1 = 3 GPUs and the cluster has 2"),
    ],
)
def test_engines_that_the_cluster_cannot_hold_are_refused(
    tiny: Path,
    tmp_path: Path,
    cluster_of: Callable[[dict[str, float]], None],
    resources: dict[str, float],
    changes: dict[str, int],
    words: str | None,
) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(25))
    settings = {f"generate__{key}": value for key, value in changes.items()}
    ctx = context(tiny_config(tiny, tmp_path / "run", source, **settings))
    assert run_stage(stage("ingest"), ctx)[0].counts["parts"] == 3
    cluster_of(resources)
    with pytest.raises(UserError if words else Started, match=words):
        generate.run(ctx)


# Stopped on the way


def test_what_stopped_a_run_is_in_its_log(tiny: Path, tmp_path: Path) -> None:
    def fail(ctx: StageContext) -> StageResult:
        raise UserError("the mill is dry; open the sluice")

    config = tiny_config(tiny, tmp_path / "run", tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="the mill is dry"):
        run_pipeline(config, [Stage("ingest", fail)])
    assert driver_log(tmp_path / "run")[-1].endswith("ERROR stopped: the mill is dry; open the sluice")
    assert not (tmp_path / "run" / "lease.json").exists()


# The command line as it is, with one stage that waits.
WAITING_RUN = """
import signal, sys, time
import app.stages
from app.cli import main
from app.pipeline import Stage

def wait(ctx):
    print("begun", flush=True)
    time.sleep(600)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
app.stages.stages_up_to = lambda last: [Stage("ingest", wait)]
main(["run", sys.argv[1]])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_says_so_and_gives_its_folder_back(tiny: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    config = tiny_config(tiny, run, tmp_path / "absent.jsonl")
    path = save_config(config, tmp_path / "c.yaml")
    with subprocess.Popen(
        [sys.executable, "-c", WAITING_RUN, str(path)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            assert json.loads((run / "lease.json").read_text())["pid"] == process.pid
            lines = status_lines(str(run), [])
            assert lines[1].startswith(f"running: pid {process.pid} on ")
            assert lines[2].split() == ["ingest", "running"]
            assert not any("running" in line for line in lines[3:])
            process.send_signal(number)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130
    assert said.splitlines()[-1] == "draftmill: stopped; the same command resumes from what is committed"
    assert "Traceback" not in said
    assert not (run / "lease.json").exists()
    assert driver_log(run)[-1].endswith("ERROR stopped: interrupted (Ctrl-C, SIGTERM or draftmill stop)")
    assert not any("running" in line for line in status_lines(str(run), []))


# Trained anew


@pytest.fixture
def fit_to(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int | None]]:
    """Stands in for the workers: they resume, and commit a checkpoint of the step given."""
    monkeypatch.setattr(train, "connect", lambda config: None)

    def make(step: int) -> list[int | None]:
        """The step each later training resumes at goes into the list returned."""
        resumed: list[int | None] = []

        def fit(config: Any, store: Store, loop_config: dict[str, Any]) -> None:
            folder = store.sub("train")
            saved = load_latest(folder, "same")
            resumed.append(None if saved is None else int(saved.meta["step"]))
            state = {"w": torch.full((4,), float(step))}
            save_state(folder, step, state, state, {"fingerprint": "same"}, keep=2)
            folder.write_json("summary.json", {"steps": step})
            folder.write_bytes("metrics.jsonl", b"")

        monkeypatch.setattr(train, "_fit", fit)
        return resumed

    return make


def trained(tiny: Path, tmp_path: Path) -> Callable[..., set[str]]:
    """A function that trains with changed settings and returns the checkpoints its output names."""
    source = write_rows(tmp_path / "r.jsonl", prompts(12))

    def again(**changes: Any) -> set[str]:
        ctx = finish_generate(tiny_config(tiny, tmp_path / "run", source, **changes))
        run_stage(stage("vocab"), ctx)
        return {p.split("/")[2] for p in train.run(ctx).outputs if p.startswith("train/checkpoints/")}

    return again


@pytest.mark.parametrize(
    "changes",
    [
        {"train__learning_rate": 2e-3},
        {"train__norm_before_residual": True},
        {"evaluate__holdout": 3},
        {"vocab__size": 300},
    ],
)
def test_a_checkpoint_of_other_settings_is_neither_resumed_nor_exported(
    tiny: Path, tmp_path: Path, fit_to: Callable[[int], list[int | None]], changes: dict[str, Any]
) -> None:
    train_again = trained(tiny, tmp_path)
    fit_to(9)
    assert train_again() == {"step-00000009"}
    resumed = fit_to(5)
    assert train_again(**changes) == {"step-00000005"}
    assert resumed == [None]
    assert [p.name for p in (tmp_path / "run" / "train" / "checkpoints").iterdir()] == ["step-00000005"]


def test_a_part_made_again_is_the_same_files_and_changes_nothing_after_it(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(12)))
    folder = tmp_path / "run" / PARTS
    before = finish_generate(config).input("generate").digest
    names = {p.name for p in folder.iterdir()}
    for _ in range(3):  # safetensors writes several metadata keys in random order
        for path in folder.iterdir():
            path.unlink()
        (tmp_path / "run" / "generate" / "manifest.json").unlink()
        assert finish_generate(config).input("generate").digest == before
        assert {p.name for p in folder.iterdir()} == names


def test_other_weights_of_the_same_shape_are_another_target(tiny: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(12))
    finish_generate(tiny_config(tiny, tmp_path / "run", source))
    other = make_tiny(tmp_path / "other", seed=1)
    ctx = context(tiny_config(other, tmp_path / "run", source))
    assert stage_state(stage("generate"), ctx) == StageState("stale", ("target weights changed",))


def test_a_damaged_best_checkpoint_is_trained_again(
    tiny: Path, tmp_path: Path, fit_to: Callable[[int], list[int | None]]
) -> None:
    train_again = trained(tiny, tmp_path)
    fit_to(5)
    train_again()
    config = tiny_config(tiny, tmp_path / "run", tmp_path / "r.jsonl")
    save_best(context(config).run.store.sub("train"), {"w": torch.zeros(4)}, {"step": 5})
    run_stage(stage("train"), context(config))
    best = tmp_path / "run" / "train" / "best" / "weights.safetensors"
    best.write_bytes(best.read_bytes()[:-1] + b"x")
    resumed = fit_to(5)
    run_stage(stage("train"), context(config))
    assert resumed == [None]
    assert not best.exists()


def test_a_checkpoint_of_the_same_settings_is_resumed(
    tiny: Path, tmp_path: Path, fit_to: Callable[[int], list[int | None]]
) -> None:
    train_again = trained(tiny, tmp_path)
    fit_to(5)
    train_again()
    resumed = fit_to(9)
    assert train_again() == {"step-00000009"}
    assert train_again(train__cpus_per_worker=1, generate__max_num_seqs=3) == {"step-00000009"}
    assert resumed == [5, 9]


@pytest.mark.parametrize("garbage", ["[]", "5", '{"generate"', None])
def test_checkpoints_of_unknown_origin_are_not_resumed(
    tiny: Path, tmp_path: Path, fit_to: Callable[[int], list[int | None]], garbage: str | None
) -> None:
    train_again = trained(tiny, tmp_path)
    fit_to(9)
    train_again()
    origin = tmp_path / "run" / "train" / "inputs.json"
    if garbage is None:
        origin.unlink()
    else:
        origin.write_text(garbage)
    resumed = fit_to(5)
    assert train_again() == {"step-00000005"}
    assert resumed == [None]


def test_a_key_that_came_later_had_its_default_before(tiny: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(4))
    ctx = context(tiny_config(tiny, tmp_path / "run", source))
    manifest, _ = run_stage(stage("ingest"), ctx)
    older = {k: v for k, v in manifest.config.items() if k != "ingest.over"}
    assert older != manifest.config
    ctx.run.write_manifest(dataclasses.replace(manifest, config=older))
    assert stage_state(stage("ingest"), ctx).state == "done"
    changed = context(tiny_config(tiny, tmp_path / "run", source, ingest__over="drop"))
    assert stage_state(stage("ingest"), changed).reasons == ("ingest.over changed: cut_end -> drop",)
