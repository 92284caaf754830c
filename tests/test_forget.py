"""Forget: a conversation leaves every stored stage, nothing else changes, and what learnt from it is stale."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from app.captured import part_keys
from app.config import Config
from app.errors import UserError
from app.forget import forget
from app.forgotten import FORGOTTEN
from app.lease import Lease
from app.parts import (
    INGEST_SCHEMA,
    PARTS,
    committed_parts,
    read_entry,
    read_ingest_part,
    write_entry,
    write_ingest_part,
)
from app.pipeline import Stage, StageContext, StageResult, run_pipeline, run_stage, stage_state
from app.runfolder import sealed
from app.status import status_lines
from app.storage import Store
from tests.pipelines.finished import finish_generate, stage
from tests.runs import Command, context, prompts, save_config, tiny_config, write_rows
from tests.stubs import states_of

SECRET = "Pelikanweg"
_TRAINED = ("quality", "vocab", "train", "export", "evaluate", "bench", "report")


def secret_rows() -> list[Any]:
    """25 prompts in three parts; number 13 and its repeat name a street."""
    rows = prompts(26)
    rows[13] = {"prompt": f"Who lives in {SECRET}?"}
    rows[20] = {"prompt": f"Who lives in {SECRET}?"}
    return rows


def config_of(tiny: Path, folder: Path, **changes: Any) -> Config:
    source = folder / "rows.jsonl"
    if not source.exists():
        write_rows(source, secret_rows())
    return tiny_config(tiny, folder / "run", source, **{"capture__codec": "bf16", **changes})  # compared bit by bit


def id_of(ctx: StageContext, text: str = SECRET) -> str:
    (found,) = {
        row["id"]
        for part in range(ctx.input("ingest").counts["parts"])
        for row in read_ingest_part(ctx.run.store, part)
        if text in row["messages"]
    }
    return str(found)


def finish_run(config: Config) -> tuple[StageContext, str]:
    """A whole run without engine and Ray, and the id of the conversation to forget."""
    ctx = finish_generate(config)
    identity = id_of(ctx)
    others = [r["id"] for r in read_ingest_part(ctx.run.store, 0)]

    def write(files: dict[str, Any]) -> Any:
        def run(ctx: StageContext) -> StageResult:
            for path, content in files.items():
                if isinstance(content, str):
                    ctx.run.store.write_bytes(path, content.encode())
                else:
                    ctx.run.store.write_json(path, content)
            return StageResult(outputs=list(files), counts=files.get("bench/bench.json", {}))

        return run

    outputs = [{"sample_id": f"{i}-0", "baseline": [1], "draft": [2]} for i in (others[0], identity, others[1])]
    made: dict[str, dict[str, Any]] = {
        "train": {"train/checkpoints/step-00000007/weights": "learnt", "train/summary.json": {"steps": 7}},
        "export": {"export/draft/weights": "learnt"},
        "evaluate": {"evaluate/evaluate.json": {"acceptance_length": 2.0, "worst": {"id": identity, "text": SECRET}}},
        "bench": {
            "bench/outputs.jsonl": "".join(json.dumps(o) + "\n" for o in outputs),
            "bench/bench.json": {"speed": 2, "mismatch_examples": [{"prompt": 1, "baseline": f"{SECRET} 5"}]},
        },
        "report": {"report/report.html": f"<p>{SECRET}</p>", "report/report.json": {"examples": [f"{identity}-0"]}},
    }
    for name in ("quality", "vocab"):
        run_stage(stage(name), ctx)
    for name, files in made.items():
        run_stage(replace(stage(name), run=write(files)), ctx)
    ctx.run.write_config(config)
    log = f"begins\nrow {identity} is odd\nbench: prompt 1 differs from token 0 on: '{SECRET}'\n"
    ctx.run.store.write_bytes("logs/driver-1.log", log.encode())
    return ctx, identity


def texts(run: Path, skip: tuple[str, ...] = (FORGOTTEN,)) -> Iterator[tuple[str, str]]:
    """Every file of a run folder as text; Parquet decoded."""
    for path in sorted(p for p in run.rglob("*") if p.is_file() and p.name not in skip):
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            yield str(path), json.dumps(table.to_pylist())
        yield str(path), path.read_bytes().decode("utf-8", "replace")


def content(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def check_states(ctx: StageContext) -> int:
    """Every sample's states are those of its tokens; returns the number of samples."""
    samples = 0
    for part in range(ctx.input("ingest").counts["parts"]):
        entry = read_entry(ctx.run.store, part)
        assert entry is not None
        rows = pq.read_table(ctx.run.store.local(f"{PARTS}/{entry.files['rows']['name']}")).to_pylist()
        tensors = load_file(str(ctx.run.store.local(f"{PARTS}/{entry.files['states']['name']}")))
        assert entry.samples == len(rows)
        assert sum(r["teacher_rows"] for r in rows) == len(tensors["teacher"])
        for row in rows:
            tokens = row["prompt_ids"] + row["answer_ids"]
            aux = tensors["aux"][row["aux_start"] : row["aux_start"] + len(tokens) - 1]
            teacher = tensors["teacher"][row["teacher_start"] : row["teacher_start"] + row["teacher_rows"]]
            expected = states_of(tokens)
            assert torch.equal(aux, expected[:, :3].reshape(len(aux), -1))
            assert torch.equal(teacher, expected[len(row["prompt_ids"]) : len(tokens) - 1, 3])
        samples += len(rows)
    return samples


def test_nothing_of_it_is_left_and_nothing_else_changes(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path)
    ctx, identity = finish_run(config)
    run = tmp_path / "run"
    before = content(run)
    assert sum(SECRET in text for _, text in texts(run)) >= 5
    lines = forget(config, [identity])
    assert not [path for path, text in texts(run) if identity in text or SECRET in text]
    assert json.loads((run / FORGOTTEN).read_text()) == {"ids": [identity], "pending": None}

    after = content(run)
    parts = {p for p in before if p.startswith(("ingest/parts", "generate/parts"))}
    assert {p for p in parts if after.get(p) != before[p]} == {p for p in parts if "part-00001" in p}
    said = dict(line.split(maxsplit=1) for line in lines)
    assert said["ingest/parts/part-00001.parquet"] == "1 row(s)"
    assert said["generate/parts/part-00001"].startswith("1 sample(s), ")
    assert said["bench/outputs.jsonl"] == "1 line(s)" and said["logs/driver-1.log"] == "2 line(s)"
    assert said["report/report.html"] == "removed whole"
    assert said["stale"].startswith("quality, vocab, train, export, evaluate, bench, report: ")

    ingest, generate = ctx.input("ingest"), ctx.input("generate")
    assert ingest.counts["rows_in"] == 26 == ingest.counts["kept"] + sum(ingest.counts["rejected"].values())
    assert (ingest.counts["kept"], ingest.counts["rejected"]) == (24, {"forgotten": 2})
    source = ingest.counts["sources"]["rows"]
    assert source["rows_in"] == source["kept"] + sum(source["rejected"].values()) + source["not_drawn"]
    rejects = [json.loads(x) for x in (run / "ingest/rejects.jsonl").read_text().splitlines()]
    assert sorted((r["where"], r["id"], r["reason"]) for r in rejects) == [
        ("rows.jsonl:14", None, "forgotten"), ("rows.jsonl:21", None, "forgotten"),
    ]  # fmt: skip
    assert generate.counts["rows_in"] == generate.counts["kept"] == generate.counts["samples"] == 24
    assert check_states(ctx) == 24
    assert [json.loads(x)["baseline"] for x in (run / "bench/outputs.jsonl").read_text().splitlines()] == [[1], [1]]
    assert json.loads((run / "bench/bench.json").read_text()) == {"speed": 2, "mismatch_examples": []}
    assert json.loads((run / "evaluate/evaluate.json").read_text()) == {"acceptance_length": 2.0}


def test_what_was_learnt_is_stale_and_parts_are_done(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path)
    ctx, identity = finish_run(config)
    assert all(" done " in line for line in status_lines(config.run_dir, [])[1:])
    forget(config, [identity])
    states = {line.split()[0]: line for line in status_lines(config.run_dir, [])[1:]}
    assert all(" done " in states[name] for name in ("ingest", "generate"))
    for name in _TRAINED:
        assert f"{name:<9} stale    a conversation was forgotten" in states[name]
    ctx = context(config)
    assert not committed_parts(ctx.run.store, part_keys(ctx), "checksum")[1]
    for name in ("ingest", "generate"):
        assert run_stage(stage(name), ctx)[1], f"{name} is done again"
    for name in ("quality", "vocab"):
        assert not run_stage(stage(name), ctx)[1]
        assert stage_state(stage(name), ctx).state == "done"


def test_a_curve_that_learnt_from_it_is_stale_and_an_earlier_draft_is_named(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path, train__init_from="/data/runs/earlier")
    ctx, identity = finish_run(config_of(tiny, tmp_path))
    ctx.run.store.write_json("curve/1-2/point.json", {"made_from": "m", "point": {"samples": 12}})
    ctx.run.store.write_bytes("train/initial.safetensors", b"weights")
    curve = Stage("curve", lambda ctx: StageResult(outputs=["curve/1-2/point.json"]), inputs=("generate", "vocab"))
    run_stage(curve, ctx)
    assert stage_state(curve, ctx).state == "done"
    said = dict(line.split(maxsplit=1) for line in forget(config, [identity]))
    assert said["curve"].startswith("stale: its drafts learnt from it; `draftmill curve`")
    assert "what that draft learnt stays in it" in said["train/initial.safetensors"]
    assert "/data/runs/earlier" in said["train/initial.safetensors"]
    state = stage_state(curve, ctx)
    assert (state.state, state.reasons) == ("stale", ("a conversation was forgotten",))


def test_a_later_ingest_leaves_it_out_and_every_other_part_as_it_was(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path)
    ctx, identity = finish_run(config)
    forget(config, [identity])
    run = tmp_path / "run"
    before = {p: c for p, c in content(run).items() if p.startswith("ingest/parts")}
    rows = [*secret_rows(), *prompts(7, "Please name the river of day"), {"prompt": f"Who lives in {SECRET}?"}]
    write_rows(tmp_path / "rows.jsonl", rows)
    manifest, reused = run_stage(stage("ingest"), ctx)
    assert not reused
    assert manifest.counts["rejected"] == {"forgotten": 3}
    assert manifest.counts["kept"] == 24 + 7
    after = content(run)
    # Places of the forgotten stay empty: full parts are the same bytes as before, rewritten by `forget` or not.
    assert all(
        after[f"ingest/parts/part-0000{p}.parquet"] == before[f"ingest/parts/part-0000{p}.parquet"] for p in (0, 1)
    )
    assert not [path for path, text in texts(run) if identity in text or SECRET in text]
    valid, bad = committed_parts(ctx.run.store, part_keys(ctx), "checksum")
    assert set(valid) == {0, 1} and set(bad) == {2}  # the one that grew


class Killed(BaseException):
    pass


def test_killed_at_any_moment_the_same_command_finishes(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "straight").mkdir()
    config = config_of(tiny, tmp_path / "straight")
    _, identity = finish_run(config)
    shutil.copytree(tmp_path / "straight" / "run", tmp_path / "made")
    forget(config, [identity])
    expected = content(tmp_path / "straight" / "run")
    whole = {name: getattr(Store, name) for name in ("write_bytes", "put", "delete")}
    monkeypatch.setattr("app.lease.time.sleep", lambda s: None)
    moments = 0
    while True:
        folder = tmp_path / f"killed-{moments}"
        shutil.copytree(tmp_path / "made", folder)
        killed = config.model_copy(update={"run_dir": str(folder)})
        left = [moments]

        def dying(name: str, left: list[int] = left) -> Any:
            def call(store: Store, *args: Any) -> Any:
                if args[-1] != "lease.json" and args[0] != "lease.json":
                    if left[0] == 0:
                        raise Killed
                    left[0] -= 1
                return whole[name](store, *args)

            return call

        for name in whole:
            monkeypatch.setattr(Store, name, dying(name))
        ended = False
        try:
            forget(killed, [identity])
            ended = True
        except Killed:
            pass
        for name, function in whole.items():
            monkeypatch.setattr(Store, name, function)
        pending = (folder / FORGOTTEN).exists() and json.loads((folder / FORGOTTEN).read_text())["pending"]
        if not ended and pending:
            with pytest.raises(UserError, match=f"a forgetting was cut off; finish it first: .* {identity}"):
                run_pipeline(killed, [])
            assert any("a forgetting was cut off" in line for line in status_lines(str(folder), []))
        if not ended:
            forget(killed, [identity])
        got = {p: c for p, c in content(folder).items() if not p.startswith("logs/driver-2")}
        assert got == expected, f"killed at write {moments}"
        if ended:
            break
        moments += 1
    assert moments > 15


def test_unknown_ids_remove_nothing_and_are_one_sentence(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path)
    _, identity = finish_run(config)
    before = content(tmp_path / "run")
    for ids, words in (
        ([identity, "0" * 24], f"holds no conversation {'0' * 24}; nothing was removed"),
        (["12"], "12 is no conversation id"),
        ([f"{identity}-0"], "is no conversation id"),
    ):
        with pytest.raises(UserError, match=words) as said:
            forget(config, ids)
        assert "\n" not in str(said.value)
    assert content(tmp_path / "run") == before
    with pytest.raises(UserError, match="is no run folder"):
        forget(config.model_copy(update={"run_dir": str(tmp_path / "nowhere")}), [identity])
    lease = Lease(Store(config.run_dir), 60)
    lease.acquire()
    try:
        with pytest.raises(UserError, match="held by a running driver"):
            forget(config, [identity])
    finally:
        lease.release()
    forget(config, [identity])
    assert forget(config, [identity]) == [f"{identity}: forgotten before, nothing is left of it"]


def test_a_rejected_conversation_is_forgotten_and_nothing_is_stale(tiny: Path, tmp_path: Path) -> None:
    rows = [*prompts(25), {"prompt": f"{SECRET} " * 200}]
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "rows.jsonl", rows))
    ctx = finish_generate(config)
    run_stage(stage("vocab"), ctx)
    ctx.run.write_config(config)
    (line,) = [json.loads(x) for x in (tmp_path / "run/ingest/rejects.jsonl").read_text().splitlines()]
    assert line["reason"] == "prompt_too_long"
    forget(config, [line["id"]])
    assert not [p for p, text in texts(tmp_path / "run") if line["id"] in text]
    assert ctx.input("ingest").counts["rejected"] == {"forgotten": 1}
    for name in ("ingest", "generate", "vocab"):
        assert stage_state(stage(name), ctx).state == "done"


def test_near_repeats_of_it_do_not_come_back_and_do_not_name_it(tiny: Path, tmp_path: Path) -> None:
    text = "The mill stands by the river and the wheel turns whenever the water is high, so count the sacks of day"
    rows = [*prompts(5), {"prompt": f"{text} one."}, {"prompt": f"{text} one, please."}, *prompts(3, "Name a river of")]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    config = tiny_config(tiny, tmp_path / "run", source, ingest={"near_duplicates": 0.7})
    ctx = finish_generate(config)
    ctx.run.write_config(config)
    identity = id_of(ctx, "wheel turns")
    forget(config, [identity])
    before = (tmp_path / "run/ingest/parts/part-00000.parquet").read_bytes()
    for _ in range(2):
        rejects = [json.loads(x) for x in (tmp_path / "run/ingest/rejects.jsonl").read_text().splitlines()]
        assert {(r["reason"], r["detail"]) for r in rejects} == {
            ("near_duplicate", "nearly the same prompts as a forgotten conversation"),
            ("forgotten", "removed by `draftmill forget`"),
        }
        assert not [p for p, t in texts(tmp_path / "run") if identity in t]
        ctx.run.store.delete("ingest/manifest.json")
        assert run_stage(stage("ingest"), ctx)[0].counts["rejected"] == {"near_duplicate": 1, "forgotten": 1}
        assert (tmp_path / "run/ingest/parts/part-00000.parquet").read_bytes() == before


def test_conversations_taken_as_they_are(tiny: Path, tmp_path: Path) -> None:
    talk = [
        {
            "messages": [
                {"role": "user", "content": f"Count {i}"},
                {"role": "assistant", "content": f"{i} and {SECRET}{i}."},
            ]
        }
        for i in range(12)
    ]
    source = write_rows(tmp_path / "talk.jsonl", talk)
    config = tiny_config(tiny, tmp_path / "run", source, sources=[{"path": str(source), "use": "as_is"}])
    ctx = context(config)
    run_stage(stage("ingest"), ctx)
    ctx.run.write_config(config)
    identity = id_of(ctx, f"{SECRET}7")
    forget(config, [identity])
    before = content(tmp_path / "run/ingest/parts")
    ctx.run.store.delete("ingest/manifest.json")
    run_stage(stage("ingest"), ctx)
    assert content(tmp_path / "run/ingest/parts") == before
    assert not [p for p, text in texts(tmp_path / "run") if f"{SECRET}7" in text or identity in text]


def test_a_whole_part_and_two_at_once(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path)
    ctx, identity = finish_run(config)
    last = [r["id"] for r in read_ingest_part(ctx.run.store, 2)]
    forget(config, [*last, identity])
    assert read_ingest_part(ctx.run.store, 2) == []
    entry = read_entry(ctx.run.store, 2)
    assert entry is not None and (entry.rows_in, entry.samples, entry.conversations) == (0, 0, 0)
    assert check_states(ctx) == 19
    for name in ("ingest", "generate"):
        assert run_stage(stage(name), ctx)[1]
    before = content(tmp_path / "run")
    ctx.run.store.delete("ingest/manifest.json")
    run_stage(stage("ingest"), ctx)
    after = content(tmp_path / "run")
    assert [p for p in before if p.startswith("ingest/parts") and after[p] != before[p]] == []


def test_parts_of_other_settings_go_too(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path)
    ctx, identity = finish_run(config)
    entry = read_entry(ctx.run.store, 1)
    assert entry is not None
    write_entry(ctx.run.store, replace(entry, key="of long ago"))
    lines = forget(config, [identity])
    assert any("removed whole: it was made from other rows or settings" in line for line in lines)
    assert not [p for p, text in texts(tmp_path / "run") if identity in text or SECRET in text]
    valid, _ = committed_parts(ctx.run.store, part_keys(ctx), "checksum")
    assert set(valid) == {0, 2}


def test_what_no_entry_vouches_for_goes_and_is_named(tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path)
    ctx, identity = finish_run(config)
    parts = tmp_path / "run" / PARTS
    (parts / "part-00001.json").write_text("{cut off")
    (parts / "part-00009-0123abcd.parquet").write_bytes(b"of a writer that was killed")
    lines = forget(config, [identity])
    assert not list(parts.glob("part-00001*")) and not list(parts.glob("part-00009*"))
    [told] = [line for line in lines if f"{PARTS}/part-00001 " in line]
    assert "removed whole, 3 file(s): its entry cannot be read; `draftmill run` makes it again" in told
    [others] = [line for line in lines if line.split()[0] == PARTS]
    assert others.endswith("1 file(s) that belong to no committed part")
    valid, _ = committed_parts(ctx.run.store, part_keys(ctx), "checksum")
    assert set(valid) == {0, 2}


def test_before_generate_and_through_ingest(tiny: Path, tmp_path: Path, draftmill_here: Command) -> None:
    config = config_of(tiny, tmp_path)
    ctx = context(config)
    run_stage(stage("ingest"), ctx)
    ctx.run.write_config(config)
    path = save_config(config, tmp_path / "c.yaml")
    done = draftmill_here("ingest", str(path), "--forget", id_of(ctx))
    assert done.returncode == 0, done.stderr
    assert "ingest: unchanged, reused" in done.stderr
    assert "1 row(s)" in done.stdout
    assert not [p for p, text in texts(tmp_path / "run") if SECRET in text]
    unknown = draftmill_here("forget", str(tmp_path / "run"), "0" * 24)
    assert unknown.returncode == 1 and unknown.stderr.count("\n") == 1, unknown.stderr


# Damage: what is broken gets no fresh checksum, and a forgetting that has begun can always be finished.


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 0x40
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def data_file(ctx: StageContext, part: int, kind: str) -> Path:
    entry = read_entry(ctx.run.store, part)
    assert entry is not None
    return Path(ctx.run.store.full(f"{PARTS}/{entry.files[kind]['name']}"))


@pytest.mark.parametrize("kind", ["rows", "states"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("begun", [False, True])
def test_a_damaged_part_goes_whole_and_is_made_again(
    tiny: Path, tmp_path: Path, kind: str, damage: Any, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`begun`: it was damaged after the plan was written."""
    config = config_of(tiny, tmp_path)
    ctx = finish_generate(config)
    ctx.run.write_config(config)
    identity = id_of(ctx)
    run_stage(stage("vocab"), ctx)
    if begun:
        with monkeypatch.context() as patch:
            patch.setattr("app.removal.Removal.run", lambda self: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                forget(config, [identity])
    damage(data_file(ctx, 1, kind))
    lines = forget(config, [identity])
    (told,) = [line for line in lines if f"{PARTS}/part-00001 " in line]
    assert "removed whole: " in told and f"{kind} file" in told and "`draftmill run` makes it again" in told
    assert not [p for p, text in texts(tmp_path / "run") if identity in text or SECRET in text]
    valid, _ = committed_parts(ctx.run.store, part_keys(ctx), "checksum")
    assert set(valid) == {0, 2}
    assert stage_state(stage("generate"), ctx).state == "stale"
    assert stage_state(stage("vocab"), ctx).reasons == ("a conversation was forgotten",)
    assert forget(config, [identity]) == [f"{identity}: forgotten before, nothing is left of it"]


def test_a_damaged_part_of_others_goes_only_where_it_cannot_be_read(tiny: Path, tmp_path: Path) -> None:
    """A look at all states would read terabytes: what is not rewritten keeps the checksum that tells."""
    config = config_of(tiny, tmp_path)
    ctx = finish_generate(config)
    ctx.run.write_config(config)
    cut(data_file(ctx, 0, "rows"))
    flip(data_file(ctx, 2, "states"))
    forget(config, [id_of(ctx)])
    valid, bad = committed_parts(ctx.run.store, part_keys(ctx), "checksum")
    assert set(valid) == {1} and set(bad) == {2} and "does not match its checksum" in bad[2]


@pytest.mark.parametrize("change", [{"files": "x"}, {"files": {"rows": {}}}, {"rejects": [5]}])
def test_a_sealed_entry_of_another_form_goes_whole(tiny: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    config = config_of(tiny, tmp_path)
    ctx = finish_generate(config)
    ctx.run.write_config(config)
    entry = read_entry(ctx.run.store, 1)
    assert entry is not None
    ctx.run.store.write_json(f"{PARTS}/part-00001.json", sealed({**entry.__dict__, **change}))
    lines = forget(config, [id_of(ctx)])
    assert any("removed whole, 3 file(s): its entry cannot be read" in line for line in lines)


def test_an_ingest_part_that_cannot_be_read_is_named_and_nothing_is_removed(
    tiny: Path, tmp_path: Path, draftmill_here: Command
) -> None:
    config = config_of(tiny, tmp_path)
    ctx = finish_generate(config)
    ctx.run.write_config(config)
    identity = id_of(ctx)
    cut(tmp_path / "run/ingest/parts/part-00002.parquet")
    before = content(tmp_path / "run")
    done = draftmill_here("forget", str(tmp_path / "run"), identity)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "ingest/parts/part-00002.parquet cannot be read" in done.stderr
    assert "nothing was removed; delete it, run `draftmill ingest`" in done.stderr
    assert content(tmp_path / "run") == before


def test_damage_of_ingest_is_not_made_valid(tiny: Path, tmp_path: Path) -> None:
    """A part that reads well and is not what ingest wrote: its manifest still says so afterwards."""
    config = config_of(tiny, tmp_path)
    ctx = finish_generate(config)
    ctx.run.write_config(config)
    identity = id_of(ctx)
    rows = read_ingest_part(ctx.run.store, 1)
    rows[0]["messages"] = rows[0]["messages"].replace("sacks", "socks")
    write_ingest_part(ctx.run.store, 1, pa.Table.from_pylist(rows, INGEST_SCHEMA))
    lines = forget(config, [identity])
    assert any("ingest/parts/part-00001.parquet" in line and "makes it again" in line for line in lines)
    assert not [p for p, text in texts(tmp_path / "run") if identity in text or SECRET in text]
    assert stage_state(stage("ingest"), ctx).state == "stale"
    manifest, reused = run_stage(stage("ingest"), ctx)
    assert not reused and manifest.counts["rejected"] == {"forgotten": 2}
    assert "socks" not in json.dumps(read_ingest_part(ctx.run.store, 1))


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_an_ingest_part_that_broke_meanwhile_holds_no_forgetting_up(
    tiny: Path, tmp_path: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tiny, tmp_path)
    ctx = finish_generate(config)
    ctx.run.write_config(config)
    identity = id_of(ctx)
    with monkeypatch.context() as patch:
        patch.setattr("app.removal.Removal.run", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forget(config, [identity])
    damage(tmp_path / "run/ingest/parts/part-00001.parquet")
    forget(config, [identity])
    assert not [p for p, text in texts(tmp_path / "run") if identity in text or SECRET in text]
    manifest, reused = run_stage(stage("ingest"), ctx)
    assert not reused and manifest.counts["rejected"] == {"forgotten": 2} and manifest.counts["kept"] == 24


@pytest.mark.cluster
def test_the_next_run_trains_anew_and_generates_nothing(
    tiny: Path, tmp_path: Path, cluster: None, draftmill_here: Command
) -> None:
    log = tmp_path / "requests.log"  # of what an engine is asked
    config = config_of(tiny, tmp_path, train__cpus_per_worker=1, generate__engine_args={"STUB_LOG": str(log)})
    path, ctx = save_config(config, tmp_path / "c.yaml"), finish_generate(config)
    ctx.run.write_config(config)
    first = draftmill_here("evaluate", str(path))
    assert first.returncode == 0, first.stderr[-2000:]
    identity = id_of(ctx)
    weights = (tmp_path / "run/export/draft/model.safetensors").read_bytes()
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run" / PARTS).iterdir()}
    done = draftmill_here("forget", str(path), identity)
    assert done.returncode == 0, done.stderr
    assert "stale" in done.stdout and "train, export, evaluate" in done.stdout
    shown = draftmill_here("status", str(path)).stdout
    assert "train     stale    a conversation was forgotten" in shown
    again = draftmill_here("evaluate", str(path))
    assert again.returncode == 0, again.stderr[-2000:]
    stages = json.loads((tmp_path / "run/results.json").read_text())["stages"]
    assert {n for n, s in stages.items() if s["reused"]} == {"ingest", "generate"}
    assert not log.exists()
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run" / PARTS).iterdir() if "00001" not in p.name} == {
        name: time for name, time in times.items() if "00001" not in name
    }
    assert (tmp_path / "run/export/draft/model.safetensors").read_bytes() != weights
    assert not [p for p, text in texts(tmp_path / "run") if identity in text or SECRET in text]
    assert " stale " not in draftmill_here("status", str(path)).stdout
