"""A budget ends generate cleanly between two parts; what was made is used, and the rest is made when it is allowed.
And a source's own sampling. Real Ray Data, a stub engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from app.budget import STOP, STOPPED_BY, Budget
from app.captured import load_entries, part_keys
from app.config import Config
from app.errors import UserError
from app.parts import PARTS
from app.pipeline import run_pipeline, run_stage, stage_state
from app.report.page import render
from app.results import collect, summary_lines, write_results
from app.samples import SampleReader, load_split
from app.stages import stages_up_to
from app.status import status_lines
from tests.pipelines.finished import stage
from tests.pipelines.test_bench_report import report_data
from tests.runs import Command, context, prompts, save_config, tiny_config, write_rows

ANSWER = 12  # tokens of a stub answer
PART = 10 * ANSWER


def limited(tiny: Path, tmp_path: Path, **changes: Any) -> Config:
    """Eight parts, made one after another."""
    source = tmp_path / "r.jsonl"
    if not source.exists():
        write_rows(source, prompts(80))
    return tiny_config(tiny, tmp_path / "run", source, generate__parts_in_flight=1, **changes)


@pytest.mark.cluster
def test_a_token_limit_ends_the_stage_between_parts_and_the_rest_is_made_later(
    tiny: Path, tmp_path: Path, cluster: None
) -> None:
    config = limited(tiny, tmp_path, generate__max_tokens=2 * PART + 1)
    stages = stages_up_to("quality")
    run_pipeline(config, stages)
    ctx = context(config)
    made = ctx.input("generate").counts
    record = ctx.input("generate").extra[STOPPED_BY]
    assert (record["limit"], record["value"], record["of"]) == ("generate.max_tokens", 2 * PART + 1, 8)
    assert 3 <= record["parts"] == made["parts"] < 8  # the third went over; what was in flight was finished
    assert record["tokens"] == made["tokens"]["answer"] == made["parts"] * PART
    assert made["rows_in"] == made["kept"] == 10 * made["parts"]
    entries = load_entries(ctx)
    assert [e.part for e in entries] == sorted(e.part for e in entries) and len(entries) == made["parts"]
    assert not ctx.run.store.exists(STOP)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run" / PARTS).iterdir()}

    # The budget is spent: nothing is made by the same command, and later stages hold.
    assert all(t["reused"] for t in run_pipeline(config, stages).values())
    lower = limited(tiny, tmp_path, generate__max_tokens=PART)
    assert run_pipeline(lower, stages)["generate"]["reused"]

    # It says so wherever a person looks.
    (line,) = [x for x in status_lines(str(tmp_path / "run"), []) if x.startswith("  generate")]
    assert "done" in line and "PARTIAL: stopped by generate.max_tokens 241" in line
    results = write_results(ctx.run, {})
    assert any("PARTIAL" in x and "generate.max_tokens" in x for x in summary_lines("u", results))
    page = report_data("rows")
    page["results"][STOPPED_BY] = collect(ctx.run)[STOPPED_BY]
    assert "stopped by generate.max_tokens" in render(page)

    # Without the limit the rest is made, and what was there stays.
    free = limited(tiny, tmp_path)
    reasons = stage_state(stage("generate"), context(free)).reasons
    assert reasons == (f"{8 - made['parts']} of 8 parts are missing",)
    timings = run_pipeline(free, stages)
    assert not timings["generate"]["reused"] and not timings["quality"]["reused"]
    counts = context(free).input("generate").counts
    assert (counts["parts"], counts["kept"]) == (8, 80)
    assert STOPPED_BY not in context(free).input("generate").extra
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run" / PARTS).iterdir()}
    assert before.items() <= after.items()
    assert run_pipeline(config, stages)["generate"]["reused"]  # whole: a limit changes nothing any more


@pytest.mark.cluster
def test_an_hour_limit_counts_what_earlier_goes_took(
    tiny: Path, tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spend = Budget.spend

    def an_hour_a_part(budget: Budget, tokens: int, store: Any) -> None:
        budget.hours_before += 1
        spend(budget, tokens, store)

    monkeypatch.setattr(Budget, "spend", an_hour_a_part)
    stages = stages_up_to("generate")
    config = limited(tiny, tmp_path, generate__max_hours=2)
    run_pipeline(config, stages)
    record = context(config).input("generate").extra[STOPPED_BY]
    assert record["limit"] == "generate.max_hours" and 2 <= record["hours"] < record["parts"] + 1 < 8
    assert run_pipeline(config, stages)["generate"]["reused"]
    more = limited(tiny, tmp_path, generate__max_hours=record["hours"] + 0.5)
    assert not run_pipeline(more, stages)["generate"]["reused"]
    later = context(config).input("generate").extra.get(STOPPED_BY)
    assert later is None or record["hours"] + 1 <= later["hours"]


@pytest.mark.cluster
def test_a_partial_run_ends_with_status_0_and_says_so(
    tiny: Path, tmp_path: Path, cluster: None, draftmill_here: Command
) -> None:
    config = limited(tiny, tmp_path, generate__max_tokens=1, evaluate__holdout=1)
    path = str(save_config(config, tmp_path / "c.yaml"))
    result = draftmill_here("quality", path)
    assert result.returncode == 0, result.stderr
    assert "PARTIAL: stopped by generate.max_tokens 1 with" in result.stderr
    assert "PARTIAL      generate was stopped by generate.max_tokens 1" in result.stdout


@pytest.mark.cluster
def test_too_little_to_go_on_with_is_a_sentence(tiny: Path, tmp_path: Path, cluster: None) -> None:
    config = limited(tiny, tmp_path, generate__max_tokens=1, evaluate__holdout=30)
    for _ in range(2):  # the same again, and nothing more is made
        with pytest.raises(UserError, match=r"max_tokens 1 with \d of 8 parts.*holdout keeps 30.*raise the limit"):
            run_pipeline(config, stages_up_to("quality"))
    assert context(config).run.manifest("generate") is None
    made = len(list((tmp_path / "run" / PARTS).glob("*.json")))
    assert made < 6
    assert not run_pipeline(limited(tiny, tmp_path, evaluate__holdout=30), stages_up_to("generate"))["generate"][
        "reused"
    ]
    assert context(config).input("generate").counts["parts"] == 8


def test_hours_count_over_invocations() -> None:
    from app.config import GenerateConfig

    config = GenerateConfig(max_hours=2.0)
    fresh = Budget.of(config, 0, None)
    assert fresh.reached is None and fresh.record(3, 8) is None
    spent = Budget.of(config, 0, {"hours": 2.01})
    assert spent.reached == "generate.max_hours"
    record = spent.record(3, 8)
    assert record is not None and record["hours"] >= 2.01
    assert spent.record(8, 8) is None  # all parts are made: nothing was stopped
    assert Budget.of(GenerateConfig(max_hours=4.0), 0, {"hours": 2.01}).reached is None


def test_the_timer_tells_the_engines_in_the_middle_of_their_work(tmp_path: Path) -> None:
    from app.storage import Store

    store = Store(str(tmp_path))
    store.write_json(STOP, {})  # left by a run that was killed
    budget = Budget(0.2 / 3600, None, 0)
    with budget.watched(store):
        assert not store.exists(STOP)
        deadline = time.monotonic() + 20
        while not store.exists(STOP) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert store.exists(STOP)
    assert not store.exists(STOP)


# A source's own sampling


def two_sources(tiny: Path, tmp_path: Path, **of_the_second: Any) -> Config:
    rows = prompts(6)
    own = {"messages": [{"role": "user", "content": "mine"}], "sampling": {"temperature": 0.3}}
    return tiny_config(
        tiny,
        tmp_path / "run",
        tmp_path / "unused",
        sources=[
            {"name": "greedy", "path": str(write_rows(tmp_path / "a.jsonl", rows))},
            {
                "name": "warm",
                "path": str(write_rows(tmp_path / "b.jsonl", [*rows, own])),
                "sampling": {"temperature": 0.8, "top_p": 0.9, "seed": 7, **of_the_second},
            },
        ],
    )


@pytest.mark.cluster
def test_a_source_has_its_own_sampling_and_a_row_its_own_over_it(tiny: Path, tmp_path: Path, cluster: None) -> None:
    config = two_sources(tiny, tmp_path)
    run_pipeline(config, stages_up_to("generate"))
    ctx = context(config)
    entries = load_entries(ctx)
    split = load_split(ctx.run.store, entries, config)
    reader = SampleReader(ctx.run.store, entries, split, ("train", "valid", "holdout"))
    seen: dict[str, set[tuple[float, float | None, bool]]] = {}
    for index in range(len(reader)):
        row, sample = reader.row(index), reader[index]
        sampling = json.loads(row["sampling"])
        key = row["source"] + ("/own" if "mine" in row["messages"] else "")
        seen.setdefault(key, set()).add((sampling["temperature"], sampling.get("top_p"), sample.greedy))
    assert seen == {
        "greedy": {(0.0, None, True)},
        "warm": {(0.8, 0.9, False)},  # the same prompts, asked anew: other sampling makes other conversations
        "warm/own": {(0.3, 0.9, False)},
    }
    keys = part_keys(ctx)
    changed = two_sources(tiny, tmp_path, temperature=0.9)
    assert stage_state(stage("ingest"), context(changed)).state == "stale"
    run_stage(stage("ingest"), context(changed))
    assert part_keys(context(changed)) != keys
    rows = pq.read_table(tmp_path / "run" / "ingest" / "parts" / "part-00000.parquet").to_pylist()
    assert json.loads(rows[6]["sampling"]) == {"temperature": 0.9, "top_p": 0.9, "seed": 7}


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temprature": 1}, "sources.0.sampling.temprature.*did you mean"),
        ({"temperature": -1}, "sources.0.sampling.temperature = -1"),
        ({"top_p": 0}, "sources.0.sampling.top_p"),
        ({"max_new_tokens": 256}, r"sources.0.sampling.max_new_tokens \(256\) leaves no room .*max_length \(256\)"),
    ],
)
def test_sampling_of_a_source_is_checked(tiny: Path, tmp_path: Path, sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny_config(tiny, tmp_path, tmp_path, sources=[{"path": "x.jsonl", "sampling": sampling}])
    with pytest.raises(UserError, match="answers anew"):
        tiny_config(
            tiny, tmp_path, tmp_path, sources=[{"path": "x.jsonl", "use": "as_is", "sampling": {"temperature": 1}}]
        )
