"""Generate: parts committed once each, whatever dies; states belong to their row. Real Ray Data, a stub engine."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from app.captured import load_entries, part_keys
from app.errors import UserError
from app.parts import PARTS, committed_parts, read_entry
from app.pipeline import StageContext, run_pipeline, run_stage
from app.samples import SampleReader, load_split
from app.stages import stages_up_to
from tests.runs import context, draftmill, prompts, save_config, tiny_config, write_rows
from tests.stubs import answer_of, states_of

pytestmark = pytest.mark.cluster


def sample_rows(ctx: StageContext) -> list[dict[str, Any]]:
    """Rows of every committed part."""
    rows = []
    for entry in load_entries(ctx):
        rows += pq.read_table(ctx.run.store.local(f"{PARTS}/{entry.files['rows']['name']}")).to_pylist()
    return rows


def commit_times(run: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in (run / PARTS).glob("part-*")}


SPLITS = ("train", "valid", "holdout")


def test_states_belong_to_their_rows(tiny: Path, tmp_path: Path, cluster: None) -> None:
    talk = {"messages": [{"role": "user", "content": "One"}, {"role": "assistant", "content": "old"},
                         {"role": "user", "content": "Two"}]}  # fmt: skip
    source = write_rows(tmp_path / "r.jsonl", [*prompts(24), talk])
    config = tiny_config(tiny, tmp_path / "run", source, capture__codec="bf16")  # compared bit by bit
    timings = run_pipeline(config, stages_up_to("generate"))
    assert not timings["generate"]["reused"]
    ctx = context(config)
    counts = ctx.input("generate").counts
    assert (counts["rows_in"], counts["kept"], counts["samples"], counts["parts"]) == (25, 25, 26, 3)
    assert counts["bytes"] == sum(p.stat().st_size for p in (tmp_path / "run" / PARTS).glob("part-*-*"))
    entries = load_entries(ctx)
    reader = SampleReader(ctx.run.store, entries, load_split(ctx.run.store, entries, config), SPLITS)
    assert len(reader) == 26
    for index in range(len(reader)):
        sample, row = reader[index], reader.row(index)
        assert row["answer_ids"] == answer_of(sample.sample_id, 12)
        states = states_of(row["prompt_ids"] + row["answer_ids"])
        assert torch.equal(sample.aux, states[:, :3].reshape(len(states), -1))
        assert sample.teacher_pos.tolist() == list(range(len(row["prompt_ids"]), len(sample.token_ids) - 1))
        assert torch.equal(sample.teacher, states[sample.teacher_pos, 3])
        assert sample.greedy
    turns = [r for r in sample_rows(ctx) if r["turn"] == 1]
    assert len(turns) == 1
    history = json.loads(turns[0]["messages"])
    assert [m["role"] for m in history] == ["user", "assistant", "user", "assistant"]
    assert history[1]["content"] != "old"  # the target's own answer, not the recorded one


def test_f35_damaged_parts_are_found_named_and_made_again(
    tiny: Path,
    tmp_path: Path,
    cluster: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(60)))
    run_pipeline(config, stages_up_to("generate"))
    folder = tmp_path / "run" / PARTS
    before = commit_times(tmp_path / "run")
    ctx = context(config)
    names = [e.files["states"]["name"] for e in load_entries(ctx)]
    data = (folder / names[0]).read_bytes()
    (folder / names[0]).write_bytes(data[:-1])  # cut by one byte
    (folder / names[1]).write_bytes(b"")  # empty
    flipped = bytearray((folder / names[2]).read_bytes())
    flipped[-5] ^= 1
    (folder / names[2]).write_bytes(bytes(flipped))  # one bit
    (folder / "part-00003.json").write_bytes((folder / "part-00003.json").read_bytes()[:40])  # entry cut
    (folder / "part-00004.json").unlink()  # killed between data and commit
    (folder / "part-00004-00000000.parquet").write_bytes(b"left over")
    (tmp_path / "run" / "tmp").mkdir(exist_ok=True)
    (tmp_path / "run" / "tmp" / "part-00004.safetensors.tmp-1").write_bytes(b"half")
    monkeypatch.setattr("app.pipeline.log.propagate", True)
    run_pipeline(config, stages_up_to("generate"))
    for part, reason in (
        (0, "bytes instead of"),
        (1, "0 bytes"),
        (2, "checksum"),
        (3, "entry cannot be read"),
    ):
        assert any(f"part {part} is made again" in m and reason in m for m in caplog.messages), (
            part,
            caplog.messages,
        )
    after = commit_times(tmp_path / "run")
    kept = [n for n in before if n.startswith("part-00005")]
    assert len(kept) == 3 and all(before[n] == after[n] for n in kept)
    assert "part-00004-00000000.parquet" not in after
    assert not list((tmp_path / "run").rglob("*.tmp-*"))
    ids = [r["conversation_id"] for r in sample_rows(context(config))]
    assert len(ids) == len(set(ids)) == 60


@pytest.mark.parametrize("fault", ["STUB_DIE_ONCE", "STUB_ENGINE_ERROR_ONCE"])
def test_a_dead_worker_or_engine_is_replaced_and_no_row_is_lost(
    tiny: Path, tmp_path: Path, cluster: None, fault: str
) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(30))
    faulty = {fault: str(tmp_path / "died"), "STUB_DELAY": 0.05}
    config = tiny_config(tiny, tmp_path / "run", source, generate__engine_args=faulty)
    run_pipeline(config, stages_up_to("generate"))
    assert (tmp_path / "died").exists()
    ids = [r["conversation_id"] for r in sample_rows(context(config))]
    assert len(ids) == len(set(ids)) == 30


@pytest.mark.parametrize(
    ("fault", "words"),
    [("nan", "layer 4"), ("zero", "layer 5"), ("partly_zero", "layer 2"), ("short", "states for")],
)
def test_f51_bad_states_stop_the_run_with_the_layer_named(
    tiny: Path, tmp_path: Path, cluster: None, fault: str, words: str
) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(10))
    faulty = {"STUB_BAD_STATES": fault}
    config = tiny_config(tiny, tmp_path / "run", source, generate__engine_args=faulty)
    with pytest.raises(UserError, match=rf"states of 1 rows fail .*{words}"):
        run_pipeline(config, stages_up_to("generate"))
    # Allowed by the user: that row alone is rejected, the rest stays, the counts add up.
    config = tiny_config(
        tiny, tmp_path / "run", source, generate__engine_args=faulty,
        capture__max_bad_rows_per_part=1, generate__max_error_share=0.2,
    )  # fmt: skip
    run_pipeline(config, stages_up_to("generate"))
    entry = read_entry(context(config).run.store, 0)
    assert entry is not None
    assert (entry.rows_in, entry.conversations, len(entry.rejects)) == (10, 9, 1)
    assert words in entry.rejects[0]["detail"]


def test_f28_failed_rows_are_counted_and_capped(tiny: Path, tmp_path: Path, cluster: None) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(40))
    refusing = {"generate__engine_args": {"STUB_RAISE": 5, "STUB_RAISE_UNTIL": str(tmp_path / "passed")}}
    config = tiny_config(tiny, tmp_path / "run", source, generate__max_error_share=0.1, **refusing)
    with pytest.raises(UserError, match=r"bad_request.*generate\.max_error_share 0\.1"):
        run_pipeline(config, stages_up_to("generate"))
    config = tiny_config(tiny, tmp_path / "run", source, generate__max_error_share=0.3, **refusing)
    run_pipeline(config, stages_up_to("generate"))
    counts = context(config).input("generate").counts
    assert counts["rows_in"] == 40 == counts["kept"] + counts["rejected"]["bad_request"]
    (tmp_path / "passed").touch()
    assert run_pipeline(config, stages_up_to("generate"))["generate"]["reused"]
    again = tiny_config(
        tiny, tmp_path / "run", source, generate__max_error_share=0.3, generate__retry_failed=True, **refusing
    )
    assert not run_pipeline(again, stages_up_to("generate"))["generate"]["reused"]
    counts = context(config).input("generate").counts
    assert (counts["kept"], counts["rejected"]) == (40, {})
    assert run_pipeline(config, stages_up_to("generate"))["generate"]["reused"]


def test_a_part_that_kills_every_engine_stops_the_run_with_a_sentence(tiny: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(4))
    path = save_config(tiny_config(tiny, tmp_path / "run", source, generate__max_attempts=1), tmp_path / "c.yaml")
    result = draftmill("generate", str(path), env={"STUB_CRASH_ON": "count"})
    assert result.returncode == 1
    assert "process ended 3 times while making part 0" in result.stderr
    assert "Traceback" not in result.stderr


def test_only_what_depends_on_a_change_is_redone(tiny: Path, tmp_path: Path, cluster: None) -> None:
    source = write_rows(tmp_path / "r.jsonl", prompts(20))
    config = tiny_config(tiny, tmp_path / "run", source)
    stages = stages_up_to("generate")
    run_pipeline(config, stages)
    again = run_pipeline(config, stages)
    assert all(t["reused"] for t in again.values())
    # Speed settings redo nothing, sampling redoes generate, appended rows redo the last part alone.
    assert run_pipeline(tiny_config(tiny, tmp_path / "run", source, generate__max_num_seqs=3), stages)["generate"][
        "reused"
    ]
    before = commit_times(tmp_path / "run")
    write_rows(source, prompts(25))
    timings = run_pipeline(config, stages)
    assert not timings["ingest"]["reused"] and not timings["generate"]["reused"]
    after = commit_times(tmp_path / "run")
    assert all(after[n] == before[n] for n in before)
    changed = tiny_config(tiny, tmp_path / "run", source, generate__max_new_tokens=12)
    assert run_pipeline(changed, stages)["ingest"]["reused"]
    valid, bad = committed_parts(context(config).run.store, part_keys(context(config)), "size")
    assert not valid and set(bad.values()) == {"made from other inputs or settings"}


def test_a_run_folder_is_held_by_one_driver(tiny: Path, tmp_path: Path) -> None:
    from app.lease import Lease
    from app.storage import Store

    config = tiny_config(tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(5)))
    lease = Lease(Store(str(tmp_path / "run")), 60)
    lease.acquire()
    try:
        with pytest.raises(UserError, match="held by a running driver"):
            run_pipeline(config, stages_up_to("ingest"))
    finally:
        lease.release()
    assert run_stage(stages_up_to("ingest")[0], context(config))[1] is False
