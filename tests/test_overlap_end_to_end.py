"""Training beside generate on a real cluster: with a stub where one side fails, and with vLLM from prompts to a draft.

The engine holds the prompts of the last parts back until training has done a step, so that no part of them can have
been committed before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.captured import load_entries
from app.config import Config
from app.pipeline import stage_state
from app.runfolder import RunFolder
from app.stages import stages_up_to
from app.windows import read_windows
from tests.runs import context, draftmill, prompts, save_config, tiny_config, write_rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]
ROWS, HELD = 24, 8  # conversations, and those of the last two parts


def a_config(tiny: Path, folder: Path, engine: str, args: dict[str, Any], **changes: Any) -> Config:
    rows = [*prompts(ROWS - HELD), *prompts(HELD, "Please weigh the crates of night")]
    held = {"HELD_TEXT": "crates", "HELD_UNTIL": str(folder / "run" / "train" / "metrics.jsonl"), **args}
    return tiny_config(
        tiny, folder / "run", write_rows(folder / "rows.jsonl", rows), generate__engine=f"tests.held:{engine}",
        generate__engine_args=held, generate__parts_in_flight=1, storage__rows_per_part=4, train__start_after=0.3,
        train__epochs=2, train__tokens_per_step=64, train__validation_share=0.1, train__cpus_per_worker=1, **changes,
    )  # fmt: skip


def check_trained(config: Config) -> None:
    """Windows in the order of the parts, every sample once an epoch, and nothing stale."""
    ctx, store = context(config), RunFolder(config.run_dir).store
    windows, entries = read_windows(store), load_entries(ctx)
    assert windows is not None and windows.closed
    parts = [part for window in windows.sealed for part, _ in window.parts]
    assert parts == [0, 1, 2, 3, 4, 5] and [len(w.parts) for w in windows.sealed] == [2, 2, 2]
    assert ctx.input("vocab").extra["counted_from"] == [0, 1]
    counts = ctx.input("train").counts
    assert counts["epochs"] == 2.0 and counts["samples"] == ROWS - 2 - 2  # held out, validation
    lines = [json.loads(line) for line in store.read_bytes("train/metrics.jsonl").decode().splitlines()]
    seen = [
        [x["rows_by_step"][0] for x in lines if "loss" in x and (x["epoch"] <= 1.0) is first] for first in (True, False)
    ]
    assert sum(seen[0]) == sum(seen[1]) > 0 and sum(map(len, seen)) == counts["steps"]
    assert sum(e.conversations for e in entries) == ROWS
    assert {stage_state(s, ctx).state for s in stages_up_to("train")} == {"done"}


def test_generate_fails_beside_training_and_the_same_command_goes_on_with_both(tiny: Path, tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    config = a_config(tiny, tmp_path, "HeldStub", {"HELD_FAILS": str(mended)})
    path = save_config(config, tmp_path / "c.yaml")
    failed = draftmill("train", str(path), timeout=600)
    assert failed.returncode == 1, failed.stderr[-3000:]
    assert failed.stderr.splitlines()[-1] == "draftmill: error: generate: the held engine gives up"
    assert "train: saved" in failed.stderr and "ended with the stage beside it" in failed.stderr, failed.stderr[-3000:]
    (newest,) = sorted((tmp_path / "run" / "train" / "checkpoints").iterdir())[-1:]
    step = json.loads((newest / "state.json").read_text())["step"]
    status = draftmill("status", str(path))
    assert "4 of 6 parts are committed" in status.stdout and f"step {step}, epoch" in status.stdout, status.stdout
    mended.touch()
    again = draftmill("train", str(path), timeout=600)
    assert again.returncode == 0, again.stderr[-3000:]
    assert f"resumed at step {step}," in again.stderr
    check_trained(config)


@pytest.mark.engine
def test_from_prompts_to_a_draft_with_the_first_step_before_the_last_part(tiny: Path, tmp_path: Path) -> None:
    config = a_config(
        tiny, tmp_path, "HeldVllm", {}, generate__max_new_tokens=24, generate__kv_cache_gib=0.25,
        train__min_teacher_agreement=0.8,
    )  # fmt: skip
    result = draftmill("evaluate", str(save_config(config, tmp_path / "c.yaml")), timeout=1200)
    assert result.returncode == 0, result.stderr[-3000:]
    check_trained(config)
    assert context(config).input("train").counts["teacher_agreement"]["greedy_share"] > 0.8
    assert 1 <= context(config).input("evaluate").counts["acceptance_length"] <= 4
    waits = "caught up with generate" in result.stderr
    assert waits == (context(config).input("train").counts["waited_for_parts_s"] > 0)
