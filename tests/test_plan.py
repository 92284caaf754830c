"""The plan: bytes to the percent, hours by stated rates, one sentence where a run cannot fit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.bench.sets import SetTurns
from app.config import Config, parse_config
from app.errors import UserError
from app.parts import PartEntry, write_part
from app.pipeline import refuse_foreign_folder
from app.plan.command import compare_run, lines_of, plan_run
from app.plan.cost import Shape, naive_bytes, part_bytes, shape_of
from app.plan.estimate import Plan, StagePlan, at_bound, check_fits, context_table, make_plan
from app.plan.hardware import GIB, RATE_KEYS, Described, Hardware, Rates, rough_rates
from app.plan.measured import Timings, rates_of
from app.plan.probe import probe, probe_config
from app.plan.tokens import (
    TOKEN_KEYS,
    Length,
    Request,
    SourceSample,
    SourceTokens,
    TokenStats,
    assumed_stats,
    fitted,
    parse_assumptions,
    stats_of_ingest,
    stats_of_run,
    token_stats,
)
from app.runfolder import RunFolder, sealed, unsealed
from app.storage import Store
from app.target import TargetInfo
from tests.pipelines.finished import finish_generate, stage
from tests.runs import Command, context, prompts, save_config, tiny_config, write_rows
from tests.stubs import HIDDEN, states_of

KIMI = Shape(  # CONTRACTS.md section 8
    hidden=7168, layers=61, vocab=163_840, draft_vocab=32_000, intermediate=18_432, query=7168, key=1024,
    value_bytes=2, target_parameters=3.2e10, target_bytes=600 * 10**9,
)  # fmt: skip
EIGHT = Hardware(1, 8, "H200", 141, 64, 2000, None, "test")


def a_config(**generate: object) -> Config:
    one = {"replicas": 1, "tensor_parallel": 1, **generate}
    return parse_config({"sources": [{"name": "s", "path": "x.jsonl"}], "generate": one}, "test")


def a_plan(config: Config, stats: TokenStats, shape: Shape, hardware: Hardware, **rates: float) -> Plan:
    rough = rough_rates(shape, config, hardware, 0.7)
    return make_plan(config, shape, stats, hardware, rough.with_values(rates, "test"))


def one_source(lengths: list[tuple[int, int]], use: str = "regenerate", rows: int | None = None) -> TokenStats:
    pairs = tuple(Length(p, a) for p, a in lengths)
    count = rows or len(pairs)
    return TokenStats((SourceTokens("s", use, count, float(count), pairs, pairs),), "test")


def test_the_known_job_of_the_contracts() -> None:
    config = a_config(max_length=2049, max_new_tokens=2047)
    stats = assumed_stats(config, {"rows": 100_000, "prompt_tokens": 2, "answer_tokens": 2046})
    assert stats.tokens == 100_000 * 2048
    plan = a_plan(config, stats, KIMI, EIGHT, generate_tokens_per_s=2300, extract_samples_per_s=1.48)
    naive = plan.forms["four states of every token, bfloat16"]
    assert naive / stats.tokens == 57_344
    assert 9.2e12 < plan.bytes <= naive < 11.75e12
    generate = next(s for s in plan.stages if s.name == "generate")
    assert generate.seconds / 3600 == pytest.approx(24.7, abs=0.3)  # the document says about 24
    assert plan.second_pass_s / 3600 == pytest.approx(18.8, abs=0.05)
    assert plan.second_pass_s not in [s.seconds for s in plan.stages]  # ours makes none


def test_the_other_known_job_is_the_same_with_its_real_lengths() -> None:
    """92 GB per 1,000 samples is 1,604 tokens a sample."""
    assert naive_bytes(1000 * 1604, 7168) == pytest.approx(92e9, rel=0.01)
    assert naive_bytes(100_000 * 1604, 7168) == pytest.approx(9.2e12, rel=0.01)


def test_field_cases_of_hidden_states() -> None:
    # 68k ShareGPT chats, hidden 4096, one fp16 state a token as EAGLE keeps it: 740 GB at 1,328 tokens a chat.
    assert naive_bytes(68_000 * 1328, 4096, 2, states=1) == pytest.approx(740e9, rel=0.01)
    # 53 samples of 65k tokens = 62 GB: 18 kB a token, three states of a model about 2,880 to 3,000 wide.
    assert naive_bytes(53 * 65_536, 2880, 2, states=3) == pytest.approx(62e9, rel=0.05)


@pytest.mark.parametrize("answer", [5, 60, 700])
def test_bytes_of_rows_of_known_lengths(tmp_path: Path, tiny_target: TargetInfo, answer: int) -> None:
    """100 rows on the disk, within 5 %."""
    store = Store(str(tmp_path))
    lengths = [(20 + i % 30, answer + i) for i in range(100)]
    rows, states = [], []
    for number, (prompt, count) in enumerate(lengths):
        ids = [(7 * number + 13 * t * t) % 600 for t in range(prompt + count)]
        text = " ".join(f"{t:x}w" for t in ids)
        rows.append(
            {
                "sample_id": f"{number:024x}-0", "conversation_id": f"{number:024x}", "turn": 0, "source": "s",
                "domain": "s", "use": "regenerate", "private": False, "messages": json.dumps([{"content": text}]),
                "template_kwargs": "{}", "sampling": "{}", "prompt_ids": ids[:prompt], "answer_ids": ids[prompt:],
                "loss_mask": [False] * prompt + [True] * count, "mask_method": "engine", "finish_reason": "stop",
                "truncated": False,
            }
        )  # fmt: skip
        states.append(states_of(ids).repeat(1, 1, 8))
    fixed = {
        "part": 0, "key": "k", "rows_in": 100, "conversations": 100, "rejects": [], "cut_short": [],
        "tokens": {}, "finish_reasons": {}, "layers": [2, 4, 5], "dtype": "bfloat16", "hidden_size": 8 * HIDDEN,
        "seconds": 0.0,
    }  # fmt: skip
    entry: PartEntry = write_part(store, fixed, rows, states)
    shape = replace(KIMI, hidden=8 * HIDDEN)
    estimate = part_bytes(one_source(lengths), shape, rows_per_part=100)
    assert estimate == pytest.approx(entry.bytes, rel=0.05)
    assert states[0].dtype == torch.bfloat16


def test_teacher_rows_and_positions_are_counted_as_they_are_written() -> None:
    stats = one_source([(4, 6)])  # CONTRACTS.md section 2: states at 0..8, the teacher at 4..8
    size = part_bytes(stats, KIMI, 1) - part_bytes(one_source([(4, 6)]), replace(KIMI, hidden=0), 1)
    assert size == 2 * 7168 * (3 * 9 + 5)


def test_limits_cut_and_reject_as_generate_does() -> None:
    config = a_config(max_length=100, max_new_tokens=40)
    assert fitted(Length(30, 90), "regenerate", config) == Length(30, 40)
    assert fitted(Length(80, 90), "regenerate", config) == Length(80, 20)
    assert fitted(Length(99, 5), "regenerate", config) is None
    assert fitted(Length(30, 90), "as_is", config) == Length(30, 70)
    assert fitted(Length(30, 60), "as_is", config) == Length(30, 60)  # max_new_tokens is not for them


def samples(
    requests: Sequence[Request], rows: int, use: str = "regenerate", sampled: int | None = None
) -> list[SourceSample]:
    return [SourceSample("s", use, rows, sampled or len(requests), requests)]


def test_a_sample_is_scaled_to_its_source_and_says_what_it_assumed() -> None:
    config = a_config(max_length=100, max_new_tokens=40)
    found = [Request("s", "regenerate", 10, 20), Request("s", "regenerate", 30, None)]
    found += [Request("s", "regenerate", 0, None, "bad_row"), Request("s", "regenerate", 99, 9)]
    stats = token_stats(config, samples(found, 4000), {})
    assert stats.rows == 2000
    assert stats.prompt == 2000 * 20
    assert stats.answer == 2000 * (20 + 30) / 2  # three quarters of max_new_tokens where none is recorded
    assert any("taken to be 30 tokens" in a for a in stats.assumptions)
    assert any("50.0% of the sample is rejected" in a for a in stats.assumptions)
    assumed = token_stats(config, samples(found[:2], 4000), {"answer_tokens": 8, "rows": 100})
    assert (assumed.rows, assumed.answer) == (100, 800)


def test_count_and_share_draw_from_usable_rows_and_turns_are_samples() -> None:
    data = {"sources": [{"name": "s", "path": "x", "count": 50}]}
    turns = [Request("s", "regenerate", 10, 20), Request("s", "regenerate", 40, 20)]
    stats = token_stats(parse_config(data, "test"), samples(turns, 400, sampled=1), {})
    assert (stats.rows, stats.samples) == (50, 100)


def test_the_bound_takes_every_answer_to_its_limit() -> None:
    config = a_config(max_length=100, max_new_tokens=40)
    assert at_bound(one_source([(10, 5), (70, 5)]), config).answer == 40 + 30
    assert at_bound(one_source([(10, 5)], "as_is"), config).answer == 5


def test_the_context_table_counts_what_each_length_cuts() -> None:
    config = a_config(max_length=1024, max_new_tokens=600)
    table = {r.length: r for r in context_table(one_source([(100, 100), (100, 500), (600, 900), (2000, 5)]), config)}
    assert set(table) == {512, 1024, 2048}
    assert (table[512].rejected, table[512].cut) == (0.5, 0.25)
    assert (table[1024].rejected, table[1024].cut) == (0.25, 0.25)
    assert table[2048].rejected == table[2048].cut == table[2048].tokens_lost == 0
    assert table[1024].tokens_lost == pytest.approx((2005 + 176) / (200 + 600 + 1200 + 2005))


def test_advice_has_the_published_anchors_and_names_the_length() -> None:
    """F79, before the run: a small volume is a note, the plan stands."""
    config = a_config(max_length=1024, max_new_tokens=900)
    words = {}
    for rows in (400, 20_000, 200_000):
        plan = a_plan(config, one_source([(100, 800)] * 9 + [(900, 800)], rows=rows), KIMI, EIGHT)
        words[rows] = " ".join(plan.advice)
    assert "few" in words[400] and "10,000" in words[400]
    assert "diminish" in words[20_000]
    assert "500,000" in words[200_000]
    assert "max_length 1024 cuts or rejects 10.0%" in words[400] and "2048 would cut at most 1 %" in words[400]
    assert "8 engines" in words[400]


def test_time_scales_with_engines_workers_and_epochs() -> None:
    stats = one_source([(100, 400)], rows=100_000)
    one = a_plan(a_config(), stats, KIMI, EIGHT, engine_start_s=1, train_start_s=1)
    config = parse_config(
        {
            "sources": [{"path": "x.jsonl"}], "generate": {"replicas": 8, "tensor_parallel": 1},
            "train": {"workers": 4, "epochs": 6},
        }, "test",
    )  # fmt: skip
    eight = a_plan(config, stats, KIMI, EIGHT, engine_start_s=1, train_start_s=1)
    seconds = [{s.name: s.seconds - 1 for s in p.stages} for p in (one, eight)]
    assert seconds[0]["generate"] == pytest.approx(8 * seconds[1]["generate"])
    assert seconds[0]["train"] == pytest.approx(2 * seconds[1]["train"])  # a quarter, twice the epochs
    hours = {s.name: s.gpu_hours for s in eight.stages}
    assert hours["generate"] == pytest.approx(8 * (seconds[1]["generate"] + 1) / 3600)
    assert hours["ingest"] == 0


def test_a_sweep_of_the_bench_is_planned_whole() -> None:
    """Three engines, one without the draft, and at each concurrency a pass of every one."""
    stats = one_source([(100, 400)], rows=1000)

    tokens = 64 * 400
    assert bench_plan(stats).seconds == pytest.approx(2 * 10 + tokens / 100 + tokens / 200)
    swept = bench_plan(stats, draft_tokens=[3, 5], concurrency=[1, 8, 32], repeats=2).seconds
    assert swept == pytest.approx(3 * 10 + 2 * 3 * (tokens / 100 + 2 * tokens / 200))
    two = [{"path": "x.jsonl", "domain": "chat"}, {"path": "y.jsonl", "domain": "code"}]
    by_domain = bench_plan(stats, sources=two, draft_tokens=[3, 5], concurrency=[1, 8, 32], repeats=2).seconds
    assert by_domain == pytest.approx(swept + tokens / 200)  # one pass more, with the draft, at one setting
    assert bench_plan(stats, sources=two, domain_pass=False).seconds == bench_plan(stats).seconds
    sampled = bench_plan(stats, temperature=0.7, test_prompts=4, test_samples=10, test_tokens=5).seconds
    assert sampled == pytest.approx(bench_plan(stats).seconds + 200 / 100 + 200 / 200)
    assert bench_plan(stats, max_new_tokens=256).seconds == pytest.approx(20 + tokens / 2 / 100 + tokens / 2 / 200)


def bench_plan(
    stats: TokenStats, sets: SetTurns | None = None, sources: list[dict[str, str]] | None = None, **bench: object
) -> StagePlan:
    """10 s to start an engine, 100 tokens/s without the draft, 200 with it."""
    config = parse_config({"sources": sources or [{"path": "x.jsonl"}], "bench": bench}, "test")
    rates = rough_rates(KIMI, config, EIGHT, 0.7).with_values(
        {"bench_start_s": 10, "bench_tokens_per_s": 100, "draft_tokens_per_s": 200}, "test"
    )
    plan = make_plan(config, KIMI, stats, EIGHT, rates, sets=sets)
    return next(s for s in plan.stages if s.name == "bench")


def test_sets_of_the_bench_are_planned_by_their_turns() -> None:
    """At the headline's setting, once on each side; turns before the last are answered once more, to be asked."""
    stats, sweep = one_source([(100, 400)], rows=1000), {"draft_tokens": [3, 5], "concurrency": [1, 8], "repeats": 2}
    more = bench_plan(stats, SetTurns(asked=20, earlier=5), **sweep).seconds - bench_plan(stats, **sweep).seconds
    assert more == pytest.approx(25 * 400 / 100 + 20 * 400 / 200)
    assert bench_plan(one_source([(100, 400)], "as_is"), SetTurns(20, 5)).seconds == 0  # there will be no bench


def test_a_running_server_is_not_started_and_no_gpu_of_ours() -> None:
    stats, tokens, sets = one_source([(100, 400)], rows=1000), 64 * 400, SetTurns(20, 5)
    url = "http://gpu-1:8000/v1"
    both = bench_plan(stats, sets, server=url, baseline_server=url, draft_tokens=[1, 3, 5], concurrency=[1, 8])
    plain, drafted = 2 * tokens + 25 * 400, 2 * tokens + 20 * 400  # it drafts as it was started: one number of tokens
    assert both.seconds == pytest.approx(plain / 100 + drafted / 200)
    alone = bench_plan(stats, sets, server=url)
    assert alone.seconds == pytest.approx((tokens + 25 * 400) / 200)
    assert (both.gpus, alone.gpus, both.gpu_hours) == (0, 0, 0) and bench_plan(stats).gpus > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"disk_free": 10**12}, r"lower the rows to [\d,]+ .*generate.max_new_tokens"),
        ({"gpus_per_node": 2}, "lower generate.replicas"),
        ({"gpu_memory_gib": 24.0}, "larger GPUs"),
        ({"gpu_memory_gib": 16.0}, "larger GPUs"),
    ],
)
def test_what_does_not_fit_names_the_number(change: dict[str, float], words: str) -> None:
    config = a_config(replicas=4)
    stats = one_source([(100, 400)], rows=100_000)
    shape = replace(KIMI, target_bytes=100 * GIB)
    a_plan(config, stats, shape, EIGHT).require_fit()
    with pytest.raises(UserError, match=words):
        a_plan(config, stats, shape, replace(EIGHT, **change)).require_fit()  # type: ignore[arg-type]


def test_the_rows_it_names_do_fit() -> None:
    config, stats = a_config(), one_source([(100, 400)], rows=100_000)
    tight = replace(EIGHT, disk_free=10**12, gpu_memory_gib=None)
    change = a_plan(config, stats, KIMI, tight).limits[0].change
    rows = int(change.split("rows to ")[1].split(" ")[0].replace(",", ""))
    a_plan(config, stats.scaled(rows / 100_000), KIMI, tight).require_fit()
    with pytest.raises(UserError):
        a_plan(config, stats.scaled(1.1 * rows / 100_000), KIMI, tight).require_fit()


def test_training_memory_is_a_limit() -> None:
    small = {"train": {"unroll_steps": 16}, "evaluate": {"holdout": 0}}
    config = parse_config({"sources": [{"path": "x"}], **small}, "test")
    shape = replace(KIMI, target_bytes=1)
    with pytest.raises(UserError, match=r"lower generate.max_length .*train.unroll_steps"):
        a_plan(config, one_source([(100, 400)]), shape, replace(EIGHT, gpu_memory_gib=20)).require_fit()
    # Steps made again need less: short documents fit twice that, and long ones where they are cut.
    a_plan(config, one_source([(100, 400)]), shape, replace(EIGHT, gpu_memory_gib=40)).require_fit()
    long = one_source([(536, 65_000)])
    with pytest.raises(UserError, match="training needs about"):
        a_plan(config, long, shape, replace(EIGHT, gpu_memory_gib=64)).require_fit()
    cut = config.model_copy(update={"train": config.train.model_copy(update={"max_document": 8192})})
    a_plan(cut, long, shape, replace(EIGHT, gpu_memory_gib=64)).require_fit()


@pytest.fixture
def run(tiny: Path, tmp_path: Path) -> Config:
    source = write_rows(tmp_path / "rows.jsonl", prompts(40))
    return tiny_config(tiny, tmp_path / "run", source)


def test_generate_is_refused_before_any_work(run: Config, caplog: pytest.LogCaptureFixture) -> None:
    from app.pipeline import run_stage

    ctx = context(run)
    run_stage(stage("ingest"), ctx)
    parts = range(ctx.input("ingest").counts["parts"])
    check_fits(ctx, parts, lambda store: 10**9)
    check_fits(ctx, parts, lambda store: None)  # a store that does not say
    check_fits(ctx, [], lambda store: 1)
    with pytest.raises(UserError, match=r"40 rows need .* free at .*run .*move run_dir") as caught:
        check_fits(ctx, parts, lambda store: 10**5)
    assert "\n" not in str(caught.value)
    assert not ctx.run.store.exists("generate")


def test_prompts_of_ingest_are_counted_exactly(run: Config) -> None:
    ctx = finish_generate(run)
    counts = ctx.input("generate").counts
    after = stats_of_run(ctx.run)
    assert after is not None
    before = stats_of_ingest(run, ctx.run.store, range(ctx.input("ingest").counts["parts"]))
    assert before.prompt == after.prompt and before.rows == after.rows == 40
    assert after.answer == counts["tokens"]["answer"]
    assert after.teacher == 40 * 11


def test_the_sets_are_read_before_the_run(run: Config, tmp_path: Path) -> None:
    turns = [{"turns": ["How many sacks?", "Are you sure?"]}, {"prompt": "Count them."}, {"prompt": "Beyond set_rows."}]
    path = write_rows(tmp_path / "set.jsonl", turns)

    def planned(**bench: object) -> Plan:
        return plan_run(run.model_copy(update={"bench": run.bench.model_copy(update=bench)}))

    plain, more = planned(), planned(sets=[str(path)], set_rows=2)
    assert plain.seconds < more.seconds
    assert any(a.startswith("answers to the 3 turns of bench.sets") for a in more.assumptions)
    assert any(a.startswith("bench.server is taken") for a in planned(server="http://gpu-1:8000/v1").assumptions)
    with pytest.raises(UserError, match=r"^bench\.sets: .*gone\.jsonl"):
        planned(sets=[str(tmp_path / "gone.jsonl")])


def test_compare_shows_planned_against_actual(run: Config) -> None:
    ctx = finish_generate(run)
    with pytest.raises(UserError, match=r"has no plan\.json"):
        compare_run(run.run_dir)
    plan = plan_run(run, described=Described(disk_free_tb=1))
    assert plan.bytes == pytest.approx(ctx.input("generate").counts["bytes"], rel=0.3)  # tiny parts: mostly headers
    text = "\n".join(compare_run(run.run_dir))
    assert "planned" in text and "actual/planned" in text
    rows = next(x for x in text.splitlines() if "conversations" in x)
    assert rows.split()[-3:] == ["40", "40", "1.00"]
    assert next(x for x in text.splitlines() if x.strip().startswith("train")).split()[-1] == "-"
    assert "planned from the 40 samples that" in text  # a plan made afterwards says so
    kept = (Path(run.run_dir) / "plan.json").read_bytes()
    plan_run(run, ["rows=7"])
    assert (Path(run.run_dir) / "plan.json").read_bytes() == kept


def test_a_run_without_a_finished_stage_cannot_be_compared(run: Config) -> None:
    plan_run(run)
    with pytest.raises(UserError, match="no stage is finished"):
        compare_run(run.run_dir)


def test_plan_of_a_source_samples_it_and_prints_one_screen(run: Config) -> None:
    def sampler(config: Config, target: TargetInfo, rows: int) -> list[SourceSample]:
        return [SourceSample("rows", "regenerate", 4000, 2, [Request("rows", "regenerate", 20, 10)] * 2)]

    plan = plan_run(run, described=Described(nodes=2, gpus_per_node=8, gpu_name="H100"), price=2.5, sampler=sampler)
    text = "\n".join(lines_of(plan, run))
    assert plan.rows == 4000 and plan.hardware.gpus == 16
    for words in ("4,000 rows", "USD at 2.5", "GPU-hours", "2 node(s) with 8 H100", "rough:", "verdict", "fits"):
        assert words in text
    assert json.loads((Path(run.run_dir) / "plan.json").read_text())["rows"] == 4000


def test_a_price_without_gpus_is_said_to_be_of_no_use(run: Config) -> None:
    for gpus, words in ((0, "price        --price 2.5 is of a GPU-hour and this run holds no GPU"), (8, "USD at 2.5")):
        plan = plan_run(run, described=Described(nodes=1, gpus_per_node=gpus), price=2.5)
        text = "\n".join(lines_of(plan, run))
        assert words in text and ("--price" in text) == (gpus == 0) and ("USD" in text) == (gpus > 0)


def test_repeats_are_counted_apart_and_no_rows_to_keep(run: Config, tmp_path: Path) -> None:
    rows = [*prompts(40), *prompts(25), *prompts(25), {"messages": []}]
    recorded = [{"prompt": p["prompt"], "response": "x"} for p in prompts(10)]  # of prompts that were there before
    write_rows(tmp_path / "rows.jsonl", [*rows, *recorded])
    second = {"name": "second", "path": str(write_rows(tmp_path / "second.jsonl", prompts(45)))}
    config = tiny_config(
        Path(run.target.model), tmp_path / "run", tmp_path,
        sources=[{"name": "rows", "path": str(tmp_path / "rows.jsonl")}, second],
    )  # fmt: skip
    plan = plan_run(config)
    assert [s["rows"] for s in plan.sources] == [40, 5]
    assert "rows: 60 of 101 rows (59.4%) repeat another conversation and are not counted" in " ".join(plan.assumptions)
    assert "second: 40 of 45 rows (88.9%) repeat" in " ".join(plan.assumptions)
    drawn = config.model_copy(
        update={"sources": [config.sources[0].model_copy(update={"share": 0.5}), config.sources[1]]}
    )
    assert [s["rows"] for s in plan_run(drawn).sources] == [20, 45]  # what was not drawn is no repeat later
    assert plan_run(config, ["rows=292"]).rows == 90


def test_reading_the_sources_counts_rows_and_turns(run: Config, tmp_path: Path) -> None:
    talk = [{"role": r, "content": "Please grind the corn"} for r in ("user", "assistant", "user", "assistant")]
    write_rows(tmp_path / "rows.jsonl", [*prompts(30), {"messages": talk}, "not json\n"])
    plan = plan_run(run)
    assert plan.sources[0]["samples"] == pytest.approx(32, abs=0.01)
    assert any("rejected" in a for a in plan.assumptions)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("answer=5", "knows no 'answer'; it takes rows"),
        ("rows=many", "give a number above 0"),
        ("rows=-3", "give a number above 0"),
        ("rows=nan", "give a number above 0"),
        ("rows", "not of the form name=number"),
    ],
)
def test_bad_assumptions_are_one_sentence(run: Config, tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_assumptions([text], (*TOKEN_KEYS, *RATE_KEYS))


def test_the_command_line_ends_with_a_sentence_and_status_1(
    run: Config, tmp_path: Path, draftmill_here: Command
) -> None:
    path = str(save_config(run, tmp_path / "run.yaml"))
    done = draftmill_here(
        "plan", path, "--assume", "rows=1e9,prompt_tokens=100,answer_tokens=16", "--disk-free", "0.001"
    )
    assert done.returncode == 1
    assert "this run cannot fit: 1,000,000,000 rows need" in done.stderr and "Traceback" not in done.stderr
    assert "DOES NOT FIT" in done.stdout
    assert draftmill_here("plan", path, "--nodes", "-1").returncode == 1


def test_assumed_prompts_must_leave_room() -> None:
    with pytest.raises(UserError, match="leaves no room"):
        assumed_stats(a_config(), {"rows": 1, "prompt_tokens": 5000, "answer_tokens": 1})


def test_rates_of_fake_timings() -> None:
    t = Timings(
        generate_s=70, parts_s=50, prompt_tokens=4000, answer_tokens=24_000, train_s=50, train_tokens=90_000,
        train_tokens_per_s=3000, bench_s=100, bench_passes_s=72, bench_tokens_per_s=400, draft_tokens_per_s=200,
    )  # fmt: skip
    rates = rates_of(t)
    assert rates["engine_start_s"] == 20
    assert rates["generate_tokens_per_s"] == (24_000 + 4000 / 4) / 50
    assert (rates["train_tokens_per_s"], rates["train_start_s"], rates["bench_start_s"]) == (3000, 20, 14)
    several = rates_of(replace(t, engines=2, workers=3))
    assert several["generate_tokens_per_s"] == rates["generate_tokens_per_s"] / 2
    assert several["train_tokens_per_s"] == 1000
    assert rates_of(replace(t, bench_starts=4))["bench_start_s"] == 7
    assert "bench_start_s" not in rates_of(replace(t, bench_s=None))


def test_the_probe_replaces_rough_rates_by_what_it_measured(run: Config, tmp_path: Path) -> None:
    """A probe whose pipeline is finished parts: what is measured says so, the rest stays rough."""
    stats = one_source([(20, 12)], rows=40)
    hardware = Hardware(1, 0, None, None, 2, 8, None, "test")
    rough = rough_rates(shape_of(context(run).target, run), run, hardware, 0.5)
    folders = []

    def fake(small: Config) -> None:
        folders.append(Path(small.run_dir))
        assert small.generate.parts_in_flight == small.train.workers == 1
        ctx = finish_generate(small)
        path = folders[0] / "generate/parts/part-00000.json"
        path.write_text(json.dumps(sealed({**(unsealed(json.loads(path.read_text())) or {}), "seconds": 10.0})))
        manifest = ctx.input("generate")
        tokens = {"prompt": 400, "answer": 900}
        ctx.run.write_manifest(replace(manifest, seconds=15.0, counts={**manifest.counts, "tokens": tokens}))

    rates: Rates = probe(run, stats, rough, hardware, fake)
    assert rates.generate_tokens_per_s.value == 100
    assert "measured by the probe" in rates.generate_tokens_per_s.origin
    assert rates.engine_start_s.value == 5
    assert rates.train_tokens_per_s == rough.train_tokens_per_s
    assert not folders[0].exists()


def test_a_probe_is_small_whatever_the_run() -> None:
    config = parse_config(
        {"sources": [{"name": n, "path": n, "limit": 10**6} for n in "ab"], "train": {"epochs": 50}}, "test"
    )
    hardware = Hardware(1, 0, None, None, 2, 8, None, "test")
    small_shape = replace(KIMI, hidden=576, intermediate=1536, query=576, key=192, target_parameters=1.3e8)
    stats = one_source([(60, 150)], rows=10**6)
    rates = rough_rates(small_shape, config, hardware, 0.7)
    small = probe_config(config, "/nowhere", stats, rates)
    rows = sum(s.count or 0 for s in small.sources)
    seconds = rows * 150 / rates.generate_tokens_per_s.value
    assert 20 < seconds < 130
    assert small.storage.rows_per_part > rows and small.evaluate.holdout <= rows / 4
    assert small.sources[0].limit is not None and small.sources[0].limit < 10**5


def test_a_run_begins_in_the_folder_its_plan_was_stored_in(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    refuse_foreign_folder(RunFolder(str(tmp_path)))
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(
        UserError, match=r"holds other files \(plan.json, thesis.txt\)|holds other files \(thesis.txt\)"
    ):
        refuse_foreign_folder(RunFolder(str(tmp_path)))


def test_a_source_without_rows_is_named(run: Config, tmp_path: Path) -> None:
    config = run.model_copy(deep=True)
    empty = config.sources[0].model_copy(update={"name": "empty", "path": str(write_rows(tmp_path / "e.jsonl", []))})
    both = config.model_copy(update={"sources": [*config.sources, empty]})
    assert "empty: it holds no rows, and counts for nothing" in plan_run(both).assumptions
    with pytest.raises(UserError, match=r"the sources hold no rows \(empty\); look at sources\.N\.path"):
        plan_run(config.model_copy(update={"sources": [empty]}))


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (
            ["no_prompt"] * 3 + ["bad_role"],
            r"of s can be used: 3 no_prompt, 1 bad_role; `draftmill preview` shows",
        ),
        (["prompt_too_long", "too_long"], r"can be used: 2 too long for generate\.max_length 100; raise it or look"),
        (["prompt_too_long", "no_prompt"], r"1 too long for generate\.max_length 100, 1 no_prompt; `draftmill prev"),
        ([None, None], r"can be used: 2 too long for generate\.max_length 100; raise it"),
    ],
)
def test_where_no_row_is_left_the_true_reasons_are_counted(reasons: list[str | None], words: str) -> None:
    requests = [Request("s", "regenerate", 200, None, reason) for reason in reasons]
    sample = SourceSample("s", "regenerate", len(requests), len(requests), requests)
    with pytest.raises(UserError, match=words):
        token_stats(a_config(max_length=100, max_new_tokens=40), [sample], {})


def test_where_every_source_is_skipped_it_says_so(run: Config, tmp_path: Path) -> None:
    gone = run.sources[0].model_copy(update={"path": str(tmp_path / "gone.jsonl")})
    skipping = run.ingest.model_copy(update={"on_source_error": "skip"})
    with pytest.raises(UserError, match="no source could be read, all were skipped"):
        plan_run(run.model_copy(update={"sources": [gone], "ingest": skipping}))


def test_fewer_rows_than_are_held_out_do_not_fit(run: Config) -> None:
    held = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"holdout": 40})})
    plan = plan_run(held, described=Described(disk_free_tb=1))
    with pytest.raises(UserError, match=r"holdout keeps 40 conversations .* hold 40 .*; lower evaluate\.holdout"):
        plan.require_fit()
    assert "DOES NOT FIT evaluate.holdout keeps 40" in "\n".join(lines_of(plan, held))
