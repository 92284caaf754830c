"""The stage on a run that is finished up to its captures, against fake servers: what it writes and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.bench.form import other_form
from app.bench.measure import Ask, Done, Served, do
from app.bench.server import RunningServer
from app.captured import load_entries
from app.errors import UserError
from app.pipeline import StageContext, run_pipeline
from app.pipelines import bench
from app.results import bench_lines
from app.stages import STAGES
from tests.bench.fake_server import FakeDraftServer
from tests.pipelines.finished import finish_generate
from tests.runs import context, prompts, tiny_config, write_rows

SET_ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["Count the sacks.", "Again, please."]},
    {"question": "How many sacks are three and four?", "answer": "3 + 4 = 7 #### 7"},
    {
        "task_id": "HumanEval/0",
        "prompt": "def sacks():\n",
        "canonical_solution": "x",
        "entry_point": "sacks",
        "test": "t",
    },
]


@pytest.fixture
def servers() -> Iterator[tuple[FakeDraftServer, FakeDraftServer]]:
    """Without and with a draft."""
    both = FakeDraftServer(0).start(), FakeDraftServer(2).start()
    yield both
    for server in both:
        server.stop()


def rows() -> list[dict[str, Any]]:
    return [{**row, "domain": "chat" if n % 2 else "code"} for n, row in enumerate(prompts(12))]


def run(tiny: Path, tmp_path: Path, **changes: Any) -> tuple[StageContext, dict[str, Any]]:
    source = write_rows(tmp_path / "rows.jsonl", rows())
    config = tiny_config(tiny, tmp_path / "run", source, evaluate__holdout=6, **changes)
    ctx = finish_generate(config)
    result = bench.run(ctx)
    written: dict[str, Any] = json.loads((tmp_path / "run/bench/bench.json").read_text())
    assert json.loads(json.dumps(result.counts)) == written
    return ctx, result.counts


def test_two_servers(tiny: Path, tmp_path: Path, servers: tuple[FakeDraftServer, FakeDraftServer]) -> None:
    base, draft = servers
    draft.wrong = 5
    questions = write_rows(tmp_path / "questions.jsonl", SET_ROWS)
    ctx, found = run(
        tiny, tmp_path, bench__server=draft.url, bench__baseline_server=base.url, bench__concurrency=[4, 2],
        bench__repeats=2, bench__sets=[str(questions)],
    )  # fmt: skip
    assert found["prompts"] == found["conversations"] == 6 and found["concurrency"] == 4
    assert found["acceptance_length"] == pytest.approx(1 + found["accepted"] / found["drafts"])
    assert found["output_mismatches"] == 6
    example = found["mismatch_examples"][0]
    assert example["first_difference"] == 5 and len(example["baseline_ids"]) == 5
    assert example["sample_id"] and isinstance(example["baseline"], str)
    assert set(found["domains"]) <= {"chat", "code"} and {d["source"] for d in found["domains"].values()} == {
        "counters"
    }
    assert sum(d["drafts"] for d in found["domains"].values()) == found["drafts"] / 2  # one pass of two
    assert found["sets"]["questions"]["prompts"] == 4  # two turns, one, one
    assert found["sets"]["questions"]["speedup"] > 0
    assert [(c["num_draft_tokens"], c["concurrency"]) for c in found["sweep"]] == [(2, 4), (2, 2)]  # the server's own k
    (told,) = found["by_draft_tokens"].values()
    assert list(found["by_draft_tokens"]) == ["2"] and told["acceptance_length"] == found["acceptance_length"]
    assert told["domains"].keys() == found["domains"].keys()
    for cell in found["sweep"]:
        assert cell["speedup_interval"][0] <= cell["speedup"] <= cell["speedup_interval"][1]
        assert cell["latency"]["draft"]["ttft"]["p95"] >= cell["latency"]["draft"]["ttft"]["p50"] > 0
    assert [r["concurrency"] for r in found["cost_model"]["recommended"]] == [2, 4]
    assert found["interval"][0] <= found["acceptance_length"] <= found["interval"][1]
    lines = [json.loads(x) for x in (tmp_path / "run/bench/outputs.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and all(x["baseline"] != x["draft"] for x in lines)
    text = "\n".join(" ".join(x) for x in bench_lines(found))
    assert "6 of 6 differ" in text and draft.url in text and "At 2 at once" in text
    assert bench.outside(ctx) != bench.outside(ctx)  # a running server is measured anew
    turns = [b["prompt"] for b in draft.bodies]
    assert any(len(p) > 30 for p in turns)


def test_tokens_of_private_prompts_stay_out_of_the_files(
    tiny: Path, tmp_path: Path, servers: tuple[FakeDraftServer, FakeDraftServer]
) -> None:
    base, draft = servers
    draft.wrong = 5
    own = {"path": str(write_rows(tmp_path / "own.jsonl", rows())), "private": True}
    _, found = run(tiny, tmp_path, sources=[own], bench__server=draft.url, bench__baseline_server=base.url)
    lines = [json.loads(x) for x in (tmp_path / "run/bench/outputs.jsonl").read_text().splitlines()]
    assert len(lines) == 6 == found["output_mismatches"]
    for line in lines:
        assert line.keys() == {
            "sample_id", "domain", "private", "baseline_tokens", "draft_tokens", "first_difference",
        }  # fmt: skip
        assert line["first_difference"] == 5 < line["baseline_tokens"]
    assert all(e["baseline_ids"] == [] and e["baseline"] == "(private)" for e in found["mismatch_examples"])


def test_a_server_with_nothing_to_compare(
    tiny: Path, tmp_path: Path, servers: tuple[FakeDraftServer, FakeDraftServer]
) -> None:
    _, found = run(tiny, tmp_path, bench__server=servers[1].url)
    assert found["speedup"] is None and found["output_mismatches"] is None and found["cost_model"] is None
    assert found["acceptance_length"] > 1
    text = "\n".join(" ".join(x) for x in bench_lines(found))
    assert "tokens/s with the draft" in text and "differ" not in text


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("speculative_config", {"method": "eagle", "model": "x"}, "method eagle3 with the exported draft"),
        ("speculative_config", {"method": "eagle3", "draft_tensor_parallel_size": 8}, "set bench.draft_tokens"),
        ("model", "another/target", "set target.model"),
        ("enable_prefix_caching", True, "it stays off"),
        ("tensor_parallel_size", 2, "set generate.tensor_parallel"),
    ],
)
def test_f73_arguments_that_would_measure_something_else_are_refused_before_the_run(
    tiny: Path, tmp_path: Path, name: str, value: Any, said: str
) -> None:
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "rows.jsonl", rows()), bench__engine_args={name: value, "x": 1}
    )
    with pytest.raises(UserError, match=rf"^bench.engine_args may not hold {name} \(.*{said}"):
        run_pipeline(config, list(STAGES))
    assert not (tmp_path / "run" / "ingest").exists()


@pytest.mark.parametrize(
    ("captured", "served", "said"),
    [
        ({}, {}, None),
        ({}, {"quantization": "fp8"}, "(quantization fp8) than was captured (quantization none)"),
        ({"quantization": "fp8"}, {}, "(quantization none) than was captured (quantization fp8)"),
        ({"quantization": "fp8"}, {"quantization": "fp8", "max_num_batched_tokens": 64}, None),
        ({}, {"dtype": "float32", "kv_cache_dtype": "fp8"},
         "(dtype float32, kv_cache_dtype fp8) than was captured (dtype bfloat16, kv_cache_dtype none)"),
        ({}, {"dtype": "auto", "kv_cache_dtype": "auto"}, None),
    ],
)  # fmt: skip
def test_f74_a_bench_of_another_numeric_form_is_labelled(
    tiny: Path, tmp_path: Path, servers: tuple[FakeDraftServer, FakeDraftServer], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, captured: dict[str, Any], served: dict[str, Any], said: str | None,
) -> None:  # fmt: skip
    def engines(ctx: StageContext) -> bench.Serve:
        return lambda k, job: do(RunningServer(servers[k > 0].url, "bench.server", None, lambda text: []), job)

    monkeypatch.setattr(bench, "_engines", engines)
    monkeypatch.setattr("app.pipelines.bench.log.propagate", True)
    ctx, found = run(tiny, tmp_path, generate__engine_args=captured, bench__engine_args=served)
    entry = replace(load_entries(ctx)[0], record={"quantization": "awq"})  # what a part says of itself goes first
    assert "quantization awq" in str(other_form(ctx.config, ctx.target, entry))
    warned = [m for m in caplog.messages if "another form of the target" in m]
    if said is None:
        assert found["other_form"] is None and not warned
    else:
        assert said in found["other_form"] and len(warned) == 1 and found["acceptance_length"] > 1


def test_at_a_temperature_outputs_are_tested_as_samples(
    tiny: Path, tmp_path: Path, servers: tuple[FakeDraftServer, FakeDraftServer]
) -> None:
    base, draft = servers
    draft.wrong = 2
    questions = write_rows(tmp_path / "questions.jsonl", SET_ROWS)
    _, found = run(
        tiny, tmp_path, bench__server=draft.url, bench__baseline_server=base.url, bench__temperature=0.7,
        bench__test_prompts=3, bench__test_samples=5, bench__test_tokens=4, bench__sets=[str(questions)],
    )  # fmt: skip
    test = found["distribution_test"]
    assert (test["prompts"], test["samples"], test["tokens"], test["temperature"]) == (3, 5, 4, 0.7)
    assert test["p_value"] < 0.01 and test["largest_shift"] == 1  # the fake's wrong token comes each time
    assert found["mismatch_examples"] == [] and found["output_mismatches"] is None
    assert [c["output_mismatches"] for c in found["sweep"]] == [None]
    assert found["sets"]["questions"]["output_mismatches"] is None
    drawn = [(b["temperature"], b["seed"]) for s in servers for b in s.bodies if b["max_tokens"] == 4]
    assert len(set(drawn)) == 2 * 15  # no seed twice, on either side
    assert "not of one distribution" in "\n".join(" ".join(x) for x in bench_lines(found))


def test_a_baseline_that_drafts_is_none(
    tiny: Path, tmp_path: Path, servers: tuple[FakeDraftServer, FakeDraftServer]
) -> None:
    with pytest.raises(UserError, match="drafts too"):
        run(tiny, tmp_path, bench__server=servers[1].url, bench__baseline_server=servers[1].url)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bench__concurrency": []}, "whole number above 0"),
        ({"bench__concurrency": [4, 4]}, "twice"),
        ({"bench__draft_tokens": [2, 0]}, "whole number above 0"),
        ({"bench__draft_tokens": "three"}, "whole number above 0"),
        ({"bench__server": "localhost:8000"}, "no base URL"),
        ({"bench__baseline_server": "http://x:1/v1"}, r"baseline_server = .* needs bench.server"),
    ],
)
def test_settings_that_cannot_be(tiny: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny_config(tiny, tmp_path / "run", tmp_path / "rows.jsonl", **changes)


def test_one_value_or_several(tiny: Path, tmp_path: Path) -> None:
    def settings(**changes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        config = tiny_config(tiny, tmp_path / "run", tmp_path / "rows.jsonl", **changes)
        return config.bench.concurrencies, config.bench.drafting(config.evaluate.num_draft_tokens)

    assert settings() == ((8,), (3,))
    assert settings(bench__concurrency=16, bench__draft_tokens=5) == ((16,), (5,))
    assert settings(bench__server="http://x:1/v1", bench__draft_tokens=[1, 5]) == ((8,), (3,))  # as it was started
    assert settings(bench__concurrency=[2, 8], bench__draft_tokens=[1, 5, 3]) == ((2, 8), (3, 1, 5))


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "holds no prompt"), ('{"nothing": 1}\n', "is no prompt"), (None, "bench.sets")],
)
def test_a_set_that_cannot_be_used_stops_before_the_run(
    tiny: Path, tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "set.jsonl"
    if text is not None:
        path.write_text(text)
    config = tiny_config(tiny, tmp_path / "run", tmp_path / "rows.jsonl", bench__sets=[str(path)])
    with pytest.raises(UserError, match=said):
        bench.check(context(config))


def test_a_group_without_a_draft_is_left_out_and_the_bench_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    drafted = Served([[1, 2, 3]], [1.0], 3, drafts=2, draft_tokens=4, accepted=1, accepted_per_position=[1, 0])
    none = Served([[1]], [1.0], 1)
    groups = {"domain chat": drafted, "domain yes or no": none, "set long": drafted, "set short": none}
    whole = replace(drafted, outputs=[[1, 2, 3], [1]], streamed=[[2, 1], [0, 0]])
    done = Done([whole], groups, [], {"long": [Ask([1], 3)], "short": [Ask([1], 1)]})
    asked = [{"domain": d, "conversation_id": d} for d in ("chat", "yes or no")]
    assert list(bench._domains(asked, done, 2, 10, 0)) == ["chat"]
    assert list(bench._sets(None, done, 2, False)) == ["long"]
    assert [m for m in caplog.messages if "domain yes or no" in m and "nothing was drafted" in m]
    assert [m for m in caplog.messages if "set short" in m and "nothing was drafted" in m]
