"""Training by sealed windows: the order, the schedule, and that a kill anywhere changes nothing, bit by bit."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.storage import Store
from app.train.progress import WAITS
from app.train.ranks import Ranks
from app.train.state import StopRequest, load_latest
from app.train.trainer import Trainer, TrainJob, learning_rate
from app.train.window_plan import WindowPlan
from tests.train.debug import run_workers
from tests.train.test_trainer import Killed, make_job
from tests.train.windowed import SIZES, ListWindows, make_windows, windowed_job

STEPS = (3, 2, 3, 2)  # of the windows


def plan_of(windows: ListWindows, seed: int = 0) -> WindowPlan:
    return WindowPlan(windows, 96, seed, 512)


def killed(job: TrainJob, step: int) -> TrainJob:
    """`job`, killed after step `step` and before its checkpoint."""

    def pulse(done: int, total: int, doing: str) -> None:
        if done == step and doing == "trains":
            raise Killed

    return replace(job, pulse=pulse)


def end_of(folder: Path, fingerprint: str) -> dict[str, Tensor]:
    """Weights and moments of the last checkpoint, and the supervised rows and the loss of every step."""
    saved = load_latest(Store(str(folder)), fingerprint)
    assert saved is not None
    moments = {f"moments/{n}": t for n, t in saved.optimizer.items() if not n.startswith("rng")}
    lengths = torch.tensor([v["acceptance_length"] for v in saved.meta["validations"]])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows, losses = (torch.tensor([x[key] for x in lines if "loss" in x]) for key in ("rows_by_step", "loss"))
    return {**saved.weights, **moments, "rows": rows, "losses": losses, "lengths": lengths}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], str]:
    """The end of a training that saw its windows one by one and was never interrupted, and its fingerprint."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = Trainer(windowed_job(folder, make_windows(sealed=(1, 1, 2, 3, 3, 4))))
    summary = trainer.run()
    assert (summary["steps"], summary["epochs"], summary["samples"]) == (30, 3.0, 40)
    return end_of(folder, trainer.fingerprint), trainer.fingerprint


def test_each_window_in_its_turn_and_every_sample_once_an_epoch() -> None:
    plan = plan_of(make_windows())
    assert not plan.open and plan.ready == sum(STEPS) and plan.total(3) == 30
    steps = [plan.step(index) for index in range(30)]
    assert [epoch for epoch, _ in steps] == [0] * 10 + [1] * 10 + [2] * 10
    for epoch in range(3):
        assert Counter(i for e, step in steps if e == epoch for i in step) == Counter(range(40))
    first = 0
    for number, count in enumerate(STEPS):
        start = sum(SIZES[:number])
        held = [i for _, step in steps[first : first + count] for i in step]
        assert set(held) == set(range(start, start + SIZES[number])) and held != sorted(held)
        first += count


def test_the_order_does_not_depend_on_when_windows_are_seen_and_does_on_the_seed() -> None:
    late, early = plan_of(make_windows()), plan_of(make_windows(sealed=(1, 2, 3, 4)))
    seen = [early.step(index) for index in range(early.ready)]
    rates = [early.rate_total(index, 3) for index in range(early.ready)]
    while early.open:
        early.source.take(early.source.look())
        early.grow()
        seen += [early.step(index) for index in range(len(seen), early.ready)]
        rates += [early.rate_total(index, 3) for index in range(len(rates), early.ready)]
    assert seen == [late.step(index) for index in range(10)]
    assert rates == [late.rate_total(index, 3) for index in range(10)] and len(set(rates)) > 1
    assert [early.step(i) for i in range(10, 30)] == [late.step(i) for i in range(10, 30)]
    other = plan_of(make_windows(), seed=1)
    assert all(other.step(i) != late.step(i) for i in (0, 5, 15))


def test_later_epochs_are_those_of_a_training_that_had_everything() -> None:
    """Whatever the order in which parts were committed."""
    windows = make_windows()
    plan, order = plan_of(windows), windows.by_part()
    usual = Trainer(make_job(Path("/nonexistent"), epochs=2)).plan
    for index in range(10, 20):
        assert plan.step(index)[1] == [order[i] for i in usual.step(index)[1]]


def test_the_schedule_reckons_with_what_the_windows_show_and_ends_exactly() -> None:
    plan = plan_of(make_windows(sealed=(1,), rejected=(0, 0, 0, 0)))
    # 12 of 40 conversations have 288 tokens: 960 in all, ten steps an epoch.
    assert plan.open and (plan.ready, plan.steps_per_epoch, plan.total(3)) == (3, 10, 30)
    assert plan.epochs_after(3) == 0.3 and plan.validations(3, 0.25) == {2}
    fewer = plan_of(make_windows(sealed=(1,)))  # 12 of the first 18 were answered, so 33 of 49 are expected
    assert (fewer.ready, fewer.steps_per_epoch, fewer.total(3)) == (3, 8, 24)
    plan = plan_of(make_windows())
    config = windowed_job(Path("/nonexistent")).config
    last = learning_rate(config, 29, plan.rate_total(29, 3))
    assert last == learning_rate(config, 29, 30) < 0.02 * config.learning_rate
    assert plan.validations(3, 1.0) == {10, 20, 30}
    assert plan.validations(3, 0.5) == {4, 10, 15, 20, 25, 30}  # half of the nine steps that the second foretold


def test_windows_that_turn_out_to_be_all(tmp_path: Path) -> None:
    """A budget may end generate when all it made is sealed: the estimate was wrong, and the training ends well."""
    windows = make_windows(sealed=(1, 2, 3, 4, 4), told_last=False)
    trainer = Trainer(windowed_job(tmp_path, windows, epochs=1))
    summary = trainer.run()
    assert (summary["steps"], summary["epochs"]) == (10, 1.0)
    assert summary["validation"][-1]["step"] == 10 and summary["validation"][-1]["conversations"] == 8
    saved = load_latest(Store(str(tmp_path)), trainer.fingerprint)
    assert saved is not None and saved.meta["step"] == saved.meta["total_steps"] == 10


@pytest.mark.parametrize("step", [2, 3, 4, 5, 9, 10, 11, 24])
@pytest.mark.parametrize("then", ["one by one", "all at once"])
def test_killed_in_a_window_between_windows_and_after_them(
    step: int, then: str, tmp_path: Path, whole: tuple[dict[str, Tensor], str]
) -> None:
    weights, fingerprint = whole
    with pytest.raises(Killed):
        Trainer(killed(windowed_job(tmp_path, make_windows(sealed=(1, 2, 3, 4))), step)).run()
    # What was sealed stays sealed: as many windows as the step lies in, at least.
    sealed = [number for number in range(1, 5) if step <= sum(STEPS[:number]) or number == 4]
    again = Trainer(windowed_job(tmp_path, make_windows(sealed=sealed if then == "one by one" else ())))
    assert again.step == step - 1 and again.fingerprint == fingerprint
    again.run()
    assert same(end_of(tmp_path, fingerprint), weights)


def test_it_waits_where_it_caught_up_and_says_so(
    tmp_path: Path, whole: tuple[dict[str, Tensor], str], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[int, str]] = []
    windows = make_windows(sealed=(1, 1, 1, 2, 3, 4))
    job = replace(windowed_job(tmp_path, windows), pulse=lambda step, steps, doing: told.append((step, doing)))
    with caplog.at_level(logging.INFO, "draftmill"):
        Trainer(job).run()
    assert [step for step, doing in told if doing == WAITS] == [3, 3]
    assert "caught up with generate at step 3, and waits for parts" in caplog.text
    assert "goes on, 21 samples in 2 windows" in caplog.text
    assert same(end_of(tmp_path, whole[1]), whole[0])


def test_a_stop_while_it_waits_saves_and_the_next_run_goes_on(
    tmp_path: Path, whole: tuple[dict[str, Tensor], str]
) -> None:
    """As where generate fails: the driver asks, and nothing that was learnt is lost."""
    store = Store(str(tmp_path))

    def ask(looks: int) -> None:
        if looks == 3:
            store.write_json(StopRequest.PATH, {})

    job = replace(windowed_job(tmp_path, make_windows(sealed=(1,), on_look=ask)))
    trainer = Trainer(replace(job, config=job.config.model_copy(update={"checkpoint_every_s": 1e9})))
    trainer.run()
    assert trainer.stopped and trainer.step == 3 and not store.exists(StopRequest.PATH)
    resumed = Trainer(windowed_job(tmp_path))
    assert resumed.step == 3
    resumed.run()
    assert same(end_of(tmp_path, whole[1]), whole[0])


def test_a_window_that_teaches_nothing_is_passed_over() -> None:
    windows = make_windows()
    for i in range(12, 21):
        windows.train.infos[i] = replace(windows.train.infos[i], num_supervised=0)
    plan = plan_of(windows)
    assert plan.ready == 8 and plan.left_out == 9
    assert {i for index in range(8) for i in plan.step(index)[1]} == {*range(12), *range(21, 40)}


def test_validation_looks_at_what_the_windows_up_to_the_step_hold(tmp_path: Path) -> None:
    """Else the number would depend on how far generate had come, and a resumed training would find another."""
    plan = plan_of(make_windows())
    assert [plan.valid_count(step, 8) for step in (1, 3, 4, 8, 9, 10, 11, 30)] == [2, 2, 4, 6, 8, 8, 8, 8]
    trainer = Trainer(windowed_job(tmp_path, validate_every_epochs=0.3))
    found = trainer.run()["validation"]
    assert [v["conversations"] for v in found if v["step"] <= 10] == [2, 4, 6, 8]
    assert {v["conversations"] for v in found if v["step"] > 10} == {8}


class LeadingAlone(ListWindows):
    """Only the leading rank may look, and the others never do."""

    rank = 0

    def look(self) -> tuple[int, bool]:
        assert self.rank == 0 or self.looks == 0
        return super().look()


def _train(rank: int, folder: Path, world: int) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    base = make_windows()
    # The others would see windows at other times.
    windows = LeadingAlone(base.samples, base.all_valid, sealed=(1, 1, 2, 4) if rank == 0 else (1, 4))
    windows.rank = rank
    Trainer(windowed_job(folder / "run", windows), Ranks()).run()
    dist.destroy_process_group()


def test_all_ranks_take_the_windows_that_the_leading_one_sees(
    tmp_path: Path, whole: tuple[dict[str, Any], str]
) -> None:
    run_workers(_train, (tmp_path, 2), 2)
    ours = end_of(tmp_path / "run", whole[1])
    assert torch.equal(ours["rows"], whole[0]["rows"])  # the same samples a step
    torch.testing.assert_close(ours["losses"], whole[0]["losses"], rtol=2e-2, atol=0)
