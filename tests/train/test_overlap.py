"""Training beside generate: windows, the frozen map, failures on either side. No engine and no Ray: parts are committed
one by one, and the worker runs in the driver's process."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.captured import part_keys
from app.config import Config, parse_config
from app.errors import UserError
from app.parts import PARTS, PartEntry, committed_parts
from app.pipeline import BESIDE_S, Stage, StageContext, StageResult, run_pipeline, stage_state
from app.pipelines import generate
from app.pipelines.vocab import load_vocab
from app.plan.measured import compare
from app.samples import conversation_ids, load_split
from app.stages import stages_up_to
from app.storage import Store
from app.train import stage as train_stage
from app.train.loop import run_worker
from app.train.state import StopRequest, read_weights
from app.windows import Windows, content_of, read_windows, write_windows
from tests.pipelines.finished import finish_generate, make_part
from tests.runs import context, prompts, tiny_config, write_rows
from tests.stubs import answer_of

Hook = Callable[[int], None]  # called before a part is committed
LAST = 7  # of eight parts of ten rows


def fit(
    config: Config, store: Store, loop: dict[str, Any],
    on_validation: Callable[[dict[str, Any]], None] = lambda values: None,
) -> None:  # fmt: skip
    device = torch.device("cpu")
    run_worker(store, loop["config"], loop["target"], loop["entries"], device, on_validation, loop["place"])


@pytest.fixture(autouse=True)
def worker_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one worker runs in the thread that would wait for Ray's."""
    monkeypatch.setattr(train_stage, "_fit", fit)
    monkeypatch.setattr(train_stage, "connect", lambda config: None)
    monkeypatch.setattr(generate, "connect", lambda config: None)
    monkeypatch.setattr(generate, "sized", lambda *args, **more: None)  # asks Ray


def a_config(tiny: Path, run: Path, rows: int = 80, **changes: Any) -> Config:
    source = write_rows(run.parent / f"rows{rows}.jsonl", prompts(rows))
    settings = {"train__start_after": 0.25, "train__epochs": 2, "train__tokens_per_step": 128, **changes}
    return tiny_config(tiny, run, source, train__cpus_per_worker=1, **settings)


def commits(before: Hook, answer: Callable[[str, int], list[int]] = answer_of) -> Callable[[StageContext], StageResult]:
    """A generate stage that makes its parts one after another."""

    def run(ctx: StageContext) -> StageResult:
        keys = part_keys(ctx)
        valid, _ = committed_parts(ctx.run.store, keys, "size")
        if ctx.ahead is not None and len(valid) < len(keys):
            ctx.ahead.committed(valid.values(), len(keys))
        for part in [p for p in keys if p not in valid]:
            before(part)
            valid[part] = make_part(ctx, part, keys[part], answer)
            if ctx.ahead is not None:
                ctx.ahead.committed([valid[part]], len(keys))
                wait_for_first_weights(ctx)
        return generate.run(ctx)  # nothing is left to make

    return run


def wait_for_first_weights(ctx: StageContext) -> None:
    """The worker shares torch's random numbers with this process, and draws the draft's first weights from them."""
    while any(t.name == "draftmill-training" for t in threading.enumerate()) and not steps(ctx.config):
        time.sleep(0.01)


def stages(before: Hook = lambda part: None, **more: Any) -> list[Stage]:
    return [replace(s, run=commits(before, **more)) if s.name == "generate" else s for s in stages_up_to("train")]


def steps(config: Config) -> list[dict[str, Any]]:
    path = Path(config.run_dir) / "train" / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def until_step(config: Config, number: int) -> None:
    deadline = time.monotonic() + 120
    while len(steps(config)) < number:
        assert time.monotonic() < deadline, "no step came"
        time.sleep(0.02)


def stopped(tiny: Path, run: Path) -> Config:
    """A run whose generate failed at part 5, when training beside it had made two steps."""
    config = a_config(tiny, run)

    def fails(now: int) -> None:
        if now == 5:
            until_step(config, 2)
            raise UserError("generate: stop")

    with pytest.raises(UserError, match="generate: stop"):
        run_pipeline(config, stages(fails))
    return config


def weights(config: Config) -> dict[str, Tensor]:
    return read_weights(Store(config.run_dir).sub("train"), "last")[0]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def parts_of(windows: Windows | None) -> list[list[int]]:
    assert windows is not None
    return [[part for part, _ in window.parts] for window in windows.sealed]


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run that nothing interrupted, whose training did steps before the last part was committed."""
    config = a_config(tiny, tmp_path_factory.mktemp("whole") / "run")
    with pytest.MonkeyPatch.context() as patch:
        worker_here.__wrapped__(patch)  # type: ignore[attr-defined]
        run_pipeline(config, stages(lambda part: until_step(config, 2) if part == LAST else None))
    return config


def test_training_begins_with_the_first_parts_and_every_sample_is_seen_once_an_epoch(whole: Config) -> None:
    windows = read_windows(Store(whole.run_dir))
    assert parts_of(windows) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert windows is not None and windows.closed and [w.last for w in windows.sealed] == [False, False, False, True]
    summary = json.loads((Path(whole.run_dir) / "train" / "summary.json").read_text())
    assert summary["epochs"] == 2.0 and summary["samples"] == 80 - 2 - 4  # holdout, validation
    # Of a sample's twelve supervised tokens eleven are learnt at the first unroll step.
    half = [sum(s["rows_by_step"][0] for s in steps(whole) if (s["epoch"] <= 1.0) is first) for first in (True, False)]
    assert half == [74 * 11, 74 * 11]
    assert summary["validation"][-1]["conversations"] == 4


def test_nothing_is_stale_afterwards_and_the_map_is_of_the_first_window(whole: Config) -> None:
    ctx = context(whole)
    assert {s.name: stage_state(s, ctx).state for s in stages_up_to("train")} == {
        s.name: "done" for s in stages_up_to("train")
    }
    assert ctx.input("vocab").extra["counted_from"] == [0, 1]
    timings = run_pipeline(whole, stages())
    assert all(t["reused"] for t in timings.values())


def test_the_time_in_which_both_ran_counts_once(whole: Config) -> None:
    ctx, store = context(whole), Store(whole.run_dir)
    train = ctx.input("train")
    beside = train.extra[BESIDE_S]
    assert 0 < beside <= train.seconds and train.started <= ctx.input("vocab").started
    manifests = {s.name: ctx.input(s.name) for s in stages_up_to("train")}
    planned = [{"name": name, "seconds": 2.0} for name in manifests]
    plan = {"stages": planned, "rows": 1, "samples": 1, "prompt_tokens": 1, "answer_tokens": 1, "bytes": 1}
    store.write_json("plan.json", plan | {"overlap_s": 1.5})
    *_, (what, expected, actual) = compare(ctx.run)
    assert what == "finished stages s" and expected == 2.0 * len(planned) - 1.5
    assert actual == pytest.approx(sum(m.seconds for m in manifests.values()) - beside)
    store.delete("plan.json")


def test_the_frozen_map_is_another_than_that_of_all_parts(whole: Config, tiny: Path, tmp_path: Path) -> None:
    plain = a_config(tiny, tmp_path / "run", train__start_after=None)
    run_pipeline(plain, [s for s in stages() if s.name != "train"])
    ours, all_parts = (load_vocab(Store(c.run_dir)).kept_ids for c in (whole, plain))
    assert len(ours) == len(all_parts) and not torch.equal(ours, all_parts)
    assert "counted_from" not in context(plain).input("vocab").extra


@pytest.mark.parametrize("part", [3, 5, LAST])
def test_generate_fails_half_way_training_saves_and_the_same_command_goes_on_with_both(
    part: int, whole: Config, tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = a_config(tiny, tmp_path / "run")

    def fails(now: int) -> None:
        if now == part:
            until_step(config, 1)
            raise UserError("generate: the engine is gone")

    with caplog.at_level(logging.INFO, "draftmill"), pytest.raises(UserError, match="the engine is gone"):
        run_pipeline(config, stages(fails))
    assert "train: ended with the stage beside it; the same command goes on with both" in caplog.text
    ctx = context(config)
    assert ctx.run.manifest("generate") is None and ctx.run.manifest("train") is None
    own = ctx.run.store.sub("train")
    at = read_weights(own, "last")[1]["step"]
    assert not own.exists(StopRequest.PATH)
    assert at == steps(config)[-1]["step"] > 0
    caplog.clear()
    with caplog.at_level(logging.INFO, "draftmill"):
        run_pipeline(config, stages())
    assert f"resumed at step {at}," in caplog.text
    assert parts_of(read_windows(ctx.run.store)) == parts_of(read_windows(Store(whole.run_dir)))
    assert same(weights(config), weights(whole)) and len(steps(config)) == len(steps(whole))


class Killed(BaseException):
    pass


def test_killed_after_generate_the_train_stage_goes_on_by_the_windows(
    whole: Config, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_config(tiny, tmp_path / "run", train__checkpoint_every_s=1e-9)

    def killed(values: dict[str, Any]) -> None:
        raise Killed  # while it validates after the windows

    with monkeypatch.context() as patch:
        patch.setattr(train_stage, "_fit", partial(fit, on_validation=killed))
        with pytest.raises(Killed):
            run_pipeline(config, stages())
    assert context(config).run.manifest("generate") is not None and len(steps(config)) == 20
    timings = run_pipeline(config, stages())
    assert timings["generate"]["reused"] and not timings["train"]["reused"]
    assert len(steps(config)) == 40 and same(weights(config), weights(whole))


def test_what_ends_training_ends_generate_at_the_next_part(tiny: Path, tmp_path: Path) -> None:
    """The check before step 1 still looks: a stub's states are not those of its answers."""
    config = a_config(tiny, tmp_path / "run", train__min_teacher_agreement=0.9)
    made: list[int] = []
    with pytest.raises(UserError, match="do not give the tokens that were emitted"):
        run_pipeline(config, stages(made.append))
    assert made == [0, 1, 2]


def test_a_part_made_again_lets_training_start_over(tiny: Path, tmp_path: Path, caplog: Any) -> None:
    config = stopped(tiny, tmp_path / "run")
    (tmp_path / "run" / PARTS / "part-00001.json").unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "draftmill"):
        run_pipeline(config, stages(answer=lambda name, length: answer_of(name + "!", length)))
    assert "parts that it learnt from are made again; training starts over" in caplog.text
    assert context(config).run.manifest("train") is not None
    # Part 0 and those up to 4 were there, and make the first window.
    assert parts_of(read_windows(context(config).run.store))[0] == [0, 2, 3, 4]


def test_other_settings_begin_anew_and_keep_no_window(tiny: Path, tmp_path: Path) -> None:
    stopped(tiny, tmp_path / "run")
    changed = a_config(tiny, tmp_path / "run", train__learning_rate=2e-3)
    run_pipeline(changed, stages())
    assert parts_of(read_windows(context(changed).run.store))[0] == [0, 1, 2, 3, 4]
    assert [s["step"] for s in steps(changed)] == list(range(1, len(steps(changed)) + 1))


def test_more_prompts_later_train_anew_on_all_of_them(whole: Config, tiny: Path, tmp_path: Path) -> None:
    config = a_config(tiny, tmp_path / "run", rows=40)
    run_pipeline(config, stages())
    assert len(parts_of(read_windows(Store(config.run_dir)))) == 4
    more = a_config(tiny, tmp_path / "run", rows=60)
    timings = run_pipeline(more, stages())
    assert not timings["train"]["reused"] and not timings["vocab"]["reused"]
    assert context(more).input("train").counts["samples"] == 60 - 2 - 3
    assert "counted_from" not in context(more).input("vocab").extra
    assert read_windows(Store(config.run_dir)) is None  # those were of other parts


def test_everything_was_there_already(tiny: Path, tmp_path: Path) -> None:
    """`draftmill generate` first: then there is nothing to run beside, and training is the usual one."""
    config = a_config(tiny, tmp_path / "run")
    finish_generate(config).run.write_config(config)
    run_pipeline(config, stages_up_to("train"))
    assert read_windows(Store(config.run_dir)) is None
    assert context(config).input("train").counts["epochs"] == 2.0


def test_the_split_does_not_depend_on_what_is_generated_yet(tiny: Path, tmp_path: Path) -> None:
    config = a_config(tiny, tmp_path / "run")
    ctx = finish_generate(config)
    valid, _ = committed_parts(ctx.run.store, part_keys(ctx), "size")
    entries = [valid[p] for p in sorted(valid)]
    every = load_split(ctx.run.store, entries, config)
    assert load_split(ctx.run.store, entries[:2], config) == every
    assert set(every) == set(conversation_ids(ctx.run.store, entries))
    plain = a_config(tiny, tmp_path / "run", train__start_after=None)
    assert load_split(ctx.run.store, entries, plain) == every  # all of them were answered
    assert set(load_split(ctx.run.store, entries[:2], plain)) < set(every)


def entry(part: int, sha: str = "a") -> PartEntry:
    files = {kind: {"name": f"{kind}", "size": 1, "sha256": f"{sha}{part}"} for kind in ("rows", "states")}
    return PartEntry(part, "k", 10, 10, 10, [], [], {}, {}, files, [2], "bfloat16", 64, 0.0)


def test_windows_are_whole_or_not_there(tmp_path: Path) -> None:
    store, held = Store(str(tmp_path)), {p: entry(p) for p in range(4)}
    assert read_windows(store) is None
    windows = Windows(40).with_window([held[1], held[0]], last=False)
    write_windows(store, windows)
    assert read_windows(store) == windows and windows.parts == {0: content_of(held[0]), 1: content_of(held[1])}
    assert windows.unsealed_of(held) == [held[2], held[3]]
    assert windows.fit(held) and windows.fit({0: held[0], 1: held[1]})
    assert not windows.fit({0: held[0]}) and not windows.fit({**held, 1: entry(1, "b")})
    closed = windows.closed_with([])
    assert closed.closed and not closed.sealed[-1].last and not closed.fit(held)
    last = windows.closed_with([held[2], held[3]])
    assert last.closed and last.sealed[-1].last and last.fit(held)
    path = tmp_path / "train" / "windows.json"
    path.write_text(path.read_text().replace("40", "41"))  # by hand
    assert read_windows(store) is None


def test_less_than_an_epoch_is_refused(tiny: Path, tmp_path: Path) -> None:
    data = a_config(tiny, tmp_path / "run").model_dump(mode="json")
    data["train"]["epochs"] = 0.5
    with pytest.raises(UserError, match=r"train\.epochs is 0\.5; set epochs to 1 or more"):
        parse_config(data, "c.yaml")
