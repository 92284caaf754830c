"""Retention: what can go is told before it goes, what is gone is named by whoever needs it, and a live driver's folder
is not touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.captured import load_entries, part_keys
from app.clean import CLEANED, INITIAL, after_evaluate, after_report, after_train, clean
from app.config import Config
from app.errors import UserError
from app.forget import forget
from app.lease import Lease
from app.parts import PARTS, committed_parts, ingest_part_path
from app.pipeline import Stage, StageContext, StageResult, run_pipeline, run_stage, stage_state
from app.pipelines import evaluate, generate
from app.pipelines import vocab as vocab_stage
from app.samples import load_split
from app.stages import stages_up_to
from app.status import status_lines
from app.storage import Store
from app.train import stage as train
from tests.pipelines.finished import finish_generate, stage
from tests.runs import Command, context, prompts, tiny_config, write_rows


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Config:
    """Four parts of ten conversations, one of which is held out; generate and vocab are finished."""
    source = write_rows(tmp_path / "r.jsonl", prompts(40))
    config = tiny_config(tiny, tmp_path / "run", source, evaluate__holdout=1)
    ctx = finish_generate(config)
    ctx.run.write_config(config)
    run_stage(stage("vocab"), ctx)
    return config


def changed(config: Config, section: str, **values: Any) -> Config:
    old = getattr(config, section)
    return config.model_copy(update={section: old.model_copy(update=values)})


def pretend(ctx: StageContext, name: str, outputs: list[str] | None = None) -> None:
    """A finished stage that read the states."""

    def done(ctx: StageContext) -> StageResult:
        return StageResult(outputs=outputs or [], digest="d")

    real = stage(name)
    run_stage(
        Stage(name, done, inputs=real.inputs, config_keys=real.config_keys, execution_keys=real.execution_keys), ctx
    )


def finished(config: Config) -> StageContext:
    """Training and evaluation are done, with three checkpoints of which the last is named."""
    ctx = context(config)
    for step in (1, 2, 3):
        for file in ("weights.safetensors", "state.json"):
            ctx.run.store.write_bytes(f"train/checkpoints/step-{step:08d}/{file}", b"x" * 1000)
    pretend(ctx, "train", ["train/checkpoints/step-00000003/weights.safetensors"])
    pretend(ctx, "export")
    pretend(ctx, "evaluate")
    for number in range(3):
        ctx.run.store.write_bytes(f"logs/driver-2026010{number}T000000-1.log", b"line\n")
    return ctx


def states(config: Config) -> list[str]:
    return [n for n in context(config).run.store.files(PARTS) if n.endswith(".safetensors")]


def files(config: Config) -> dict[str, bytes]:
    root = Path(config.run_dir)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def row(lines: list[str], kind: str) -> list[str]:
    (line,) = [x for x in lines if x[12:].startswith(kind)]
    return line.split()


def test_it_says_what_would_go_and_touches_nothing(run: Config) -> None:
    finished(run)
    before = files(run)
    lines = clean(run, False, [])
    assert files(run) == before
    size = sum((Path(run.run_dir) / PARTS / n).stat().st_size for n in states(run))
    assert row(lines, "states")[-2:] == ["4", f"{size / 1e6:,.1f}"]
    assert row(lines, "checkpoints")[-2] == "4" and row(lines, "logs")[-2] == "2" and row(lines, "captures")[-2] == "0"
    assert "--apply" in lines[-1]


def test_what_is_applied_is_gone_and_written_down(run: Config) -> None:
    ctx = finished(run)
    lines = clean(run, True, [])
    assert lines[-1].startswith("freed ")
    assert states(run) == []
    store = ctx.run.store
    assert store.folders("train/checkpoints") == ["step-00000003"]
    assert store.files("logs") == ["driver-20260102T000000-1.log"]
    assert {d["class"]: d["files"] for d in store.read_json(CLEANED)} == {"states": 4, "checkpoints": 4, "logs": 2}
    assert not store.exists("lease.json")
    assert all(r[-2] == "0" for r in (row(clean(run, False, []), kind) for kind in ("states", "checkpoints", "logs")))


def test_one_class_alone(run: Config) -> None:
    ctx = finished(run)
    clean(run, True, ["logs"])
    assert len(states(run)) == 4 and len(ctx.run.store.files("logs")) == 1
    with pytest.raises(UserError, match=r"no class 'log'.*captures, states, checkpoints, initial, logs"):
        clean(run, True, ["log"])


@pytest.mark.parametrize("missing", ["train", "evaluate"])
def test_states_stay_until_they_were_used(run: Config, missing: str) -> None:
    ctx = finished(run)
    ctx.run.store.delete(f"{missing}/manifest.json")
    lines = clean(run, True, [])
    assert len(states(run)) == 4
    assert f"they stay: {missing} is not finished" in "\n".join(lines)


def test_states_of_a_generate_that_was_made_anew_since_the_training_stay(run: Config, tmp_path: Path) -> None:
    finished(run)
    write_rows(tmp_path / "r.jsonl", prompts(50))
    finish_generate(run)
    clean(run, True, ["states"])
    assert len(states(run)) == 5


def test_captures_of_other_settings_go_and_todays_stay(run: Config) -> None:
    ctx = finished(run)
    kept = states(run)
    longer = changed(run, "generate", max_new_tokens=12)
    other = context(longer)
    keys = part_keys(other)
    # What a run with other settings has begun: its parts are today's work, the finished ones still are named.
    from dataclasses import replace

    from app.parts import write_entry

    first = load_entries(ctx)[0]
    write_entry(ctx.run.store, replace(first, key="of settings before these"))
    ctx.run.store.write_bytes(f"{PARTS}/part-00009-0badc0de.safetensors", b"left over")
    lines = clean(run, True, ["captures"])
    assert row(lines, "captures")[-2] == "4"  # an entry, its two files, and the left over
    assert states(run) == [n for n in kept if not n.startswith("part-00000")]
    assert len(committed_parts(ctx.run.store, part_keys(ctx), "checksum")[0]) == 3
    write_entry(ctx.run.store, replace(load_entry(ctx, 1), key=keys[1]))
    clean(longer, True, ["captures"])
    assert len(states(run)) == 3


def load_entry(ctx: StageContext, part: int) -> Any:
    from app.parts import read_entry

    return read_entry(ctx.run.store, part)


def with_curve(ctx: StageContext) -> None:
    """A measured point that a kill left its checkpoints, and one whose training is under way; both began elsewhere."""
    for point in ("curve/1-8", "curve/1-4"):
        for path in ("checkpoints/step-00000002/weights.safetensors", "best/state.json", "metrics.jsonl", *INITIAL):
            ctx.run.store.write_bytes(f"{point}/{path}", b"x" * 1000)
    ctx.run.store.write_json("curve/1-8/point.json", {"made_from": "m", "point": {}})
    for path in INITIAL:
        ctx.run.store.write_bytes(f"train/{path}", b"x" * 1000)


def test_of_a_curve_what_is_measured_goes_and_what_is_under_way_stays(run: Config) -> None:
    ctx = finished(run)
    with_curve(ctx)
    lines = clean(run, False, [])
    assert "they stay: a curve is not finished with them" in "\n".join(lines)
    assert "those of a curve stay: it is not finished" in "\n".join(lines)
    assert "those of unfinished trainings stay" in "\n".join(lines)
    clean(run, True, [])
    assert len(states(run)) == 4
    left = {path for path in files(run) if path.startswith(("curve/", "train/initial"))}
    under_way = {path for path in left if path.startswith("curve/1-4/")}
    assert len(under_way) == 5 and left - under_way == {"curve/1-8/metrics.jsonl", "curve/1-8/point.json"}

    ctx.run.store.write_json("curve/1-4/point.json", {"made_from": "m", "point": {}})
    clean(run, True, [])
    assert states(run) == []
    assert {p.split("/")[-1] for p in files(run) if p.startswith("curve/")} == {"metrics.jsonl", "point.json"}


def test_a_draft_to_start_from_stays_until_train_is_done(run: Config) -> None:
    ctx = finished(run)
    for path in INITIAL:
        ctx.run.store.write_bytes(f"train/{path}", b"x" * 1000)
    ctx.run.store.delete("train/manifest.json")
    lines = clean(run, True, ["initial"])
    assert lines[-1] == "freed 0.0 MB" and "those of unfinished trainings stay" in lines[3]
    pretend(ctx, "train", ["train/checkpoints/step-00000003/weights.safetensors"])
    clean(run, True, ["initial"])
    assert not [path for path in files(run) if "initial" in path]


def test_a_living_driver_keeps_its_folder(run: Config) -> None:
    finished(run)
    lease = Lease(Store(run.run_dir), 60)
    lease.acquire()
    try:
        before = {k: v for k, v in files(run).items() if k != "lease.json"}
        assert "a driver works on it now" in clean(run, False, [])[-1]
        with pytest.raises(UserError, match="held by a running driver"):
            clean(run, True, [])
        assert {k: v for k, v in files(run).items() if k != "lease.json"} == before
    finally:
        lease.release()


# After it


def test_generate_still_counts_as_done_and_status_says_what_is_gone(run: Config) -> None:
    finished(run)
    clean(run, True, ["states"])
    ctx = context(run)
    assert stage_state(stage("generate"), ctx).state == "done"
    assert len(load_entries(ctx)) == 4
    run_stage(stage("quality"), ctx)  # reads rows alone
    assert vocab_stage.run(ctx).counts  # as well
    (line,) = [x for x in status_lines(run.run_dir, []) if x.startswith("  generate")]
    assert "done" in line and "states of 4 of 4 parts were cleaned (20" in line


def test_training_and_evaluating_anew_name_the_command(run: Config) -> None:
    finished(run)
    clean(run, True, ["states"])
    ctx = context(run)
    command = rf"were cleaned \(20.*draftmill generate {run.run_dir}/config\.yaml generate\.recapture=true"
    for again in (train.run, evaluate.run):
        with pytest.raises(UserError, match=command):
            again(ctx)


def test_recapture_makes_the_cleaned_parts_again_and_only_those(run: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = finished(run)
    from app.clean import delete_states

    delete_states(ctx, [e for e in load_entries(ctx) if e.part in (1, 3)])
    asked = changed(run, "generate", recapture=True)
    state = stage_state(stage("generate"), context(asked))
    assert state.reasons == ("2 of 4 parts are to be made again (part 1: its states were cleaned)",)
    todo: list[int] = []

    def make(ctx: StageContext, parts: list[int], keys: Any, valid: Any, *others: Any) -> None:
        todo.extend(parts)
        raise UserError("the engines would start now")

    monkeypatch.setattr(generate, "_generate_parts", make)
    with pytest.raises(UserError, match="would start"):
        generate.run(context(asked))
    assert todo == [1, 3]
    assert generate.unfinished(context(run)) is None


def test_a_conversation_is_forgotten_where_its_states_were_cleaned(run: Config) -> None:
    import pyarrow.parquet as pq

    ctx = finished(run)
    clean(run, True, ["states"])
    path = Path(run.run_dir) / ingest_part_path(2)
    identity = pq.read_table(path)["id"][4].as_py()
    forget(run, [identity])
    entry = load_entry(ctx, 2)
    assert (entry.samples, bool(entry.cleaned)) == (9, True)
    assert stage_state(stage("generate"), context(run)).state == "done"
    assert not any(
        identity in text.decode("utf-8", "replace") for p, text in files(run).items() if "forgotten" not in p
    )


# By storage.keep_states


def test_until_trained_keeps_the_held_out_conversations_until_they_are_evaluated(run: Config) -> None:
    config = changed(run, "storage", keep_states="until_trained")
    ctx = context(config)
    split = load_split(ctx.run.store, load_entries(ctx), config)
    after_train(ctx)
    (left,) = states(config)
    entry = load_entry(ctx, int(left.split("-")[1]))
    assert not entry.cleaned
    import pyarrow.parquet as pq

    rows = pq.read_table(Path(run.run_dir) / PARTS / entry.files["rows"]["name"])["conversation_id"].to_pylist()
    assert any(split[c] == "holdout" for c in rows)
    generate_done = stage_state(stage("generate"), ctx)
    assert generate_done.state == "done"
    after_train(ctx)  # again: nothing more
    assert len(states(config)) == 1
    after_evaluate(ctx)
    assert states(config) == []


def test_always_is_the_default_and_until_done_waits_for_the_report(run: Config) -> None:
    for hook in (after_train, after_evaluate, after_report):
        hook(context(run))
    assert len(states(run)) == 4
    config = changed(run, "storage", keep_states="until_done")
    after_train(context(config))
    after_evaluate(context(config))
    assert len(states(config)) == 4
    after_report(context(config))
    assert states(config) == []


def test_the_pipeline_cleans_as_its_stages_end(run: Config) -> None:
    config = changed(run, "storage", keep_states="until_trained")
    called: list[str] = []
    stages = [
        Stage(s.name, s.run, s.inputs, s.config_keys, s.execution_keys, s.outside, s.unfinished, after=s.after)
        for s in stages_up_to("vocab")
    ]
    stages[-1] = Stage(**{**stages[-1].__dict__, "after": lambda ctx: called.append("vocab")})
    assert all(t["reused"] for n, t in run_pipeline(config, stages).items() if n != "quality")
    assert called == ["vocab"]
    hooks = {s.name: s.after for s in stages_up_to("report") if s.after is not None}
    assert hooks == {"train": after_train, "evaluate": after_evaluate, "report": after_report}


def test_the_command_line(run: Config, draftmill_here: Command) -> None:
    finished(run)
    told = draftmill_here("clean", run.run_dir)
    assert told.returncode == 0 and "--apply" in told.stdout and len(states(run)) == 4
    done = draftmill_here("clean", run.run_dir, "--only", "states", "--apply")
    assert done.returncode == 0 and "freed" in done.stdout, done.stderr
    assert states(run) == []
    wrong = draftmill_here("clean", str(Path(run.run_dir) / "ingest"))
    assert wrong.returncode == 1 and "is no run folder" in wrong.stderr
