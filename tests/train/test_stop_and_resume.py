"""A training that is killed or stopped anywhere goes on as if nothing had been: bit-equal on a CPU."""

from __future__ import annotations

import json
import logging
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.storage import Store
from app.train import trainer as trainer_module
from app.train.state import Metrics, StopRequest, ask_to_stop, has_best, load_latest, read_weights
from app.train.trainer import Trainer
from tests.pipelines.finished import finish_generate
from tests.runs import ROOT, draftmill, prompts, save_config, tiny_config, write_rows
from tests.train.killable import killable_job
from tests.train.test_trainer import Killed, KilledAt, mixed_job, spawn_workers, weights_of


def finished(folder: Path) -> dict[str, Tensor]:
    """Weights, moments and the best weights of a finished training."""
    store = Store(str(folder))
    last = load_latest(store, Trainer(killable_job(folder)).fingerprint)
    assert last is not None and last.meta["step"] == last.meta["total_steps"] == 30
    best, meta = read_weights(store, "best")
    moments = {f"moments/{n}": t for n, t in last.optimizer.items() if not n.startswith("rng")}
    scores = torch.tensor([v["acceptance_length"] for v in last.meta["validations"]] + [meta["step"]])
    return {**last.weights, **moments, **{f"best/{n}": t for n, t in best.items()}, "scores": scores}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The end of a training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Trainer(killable_job(folder)).run()
    result = finished(folder)
    torch.set_num_threads(threads)
    return result


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(
    "path",
    [
        "checkpoints/step-00000013/weights.safetensors",
        "checkpoints/step-00000013/optimizer.safetensors",
        "checkpoints/step-00000013/state.json",
        "best/weights.safetensors",
        "best/state.json",
        "metrics.jsonl",
    ],
)
def test_killed_while_a_file_is_written(
    path: str, tmp_path: Path, whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file and what comes after it are missing, what was begun lies about."""
    put, write = Store.put, Store.write_bytes
    looks = {"best/weights.safetensors": 2, "best/state.json": 2, "metrics.jsonl": 7}
    left = looks.get(path, 1)  # the second best, some later flush

    def hit(name: str) -> None:
        nonlocal left
        left -= name == path
        if left == 0 and name == path:
            raise Killed

    def killing_put(self: Store, local: Path, name: str, *rest: Any, **more: Any) -> None:
        hit(name)
        put(self, local, name, *rest, **more)

    def killing_write(self: Store, name: str, *rest: Any, **more: Any) -> None:
        hit(name)
        write(self, name, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put", killing_put)
        patch.setattr(Store, "write_bytes", killing_write)
        with pytest.raises(Killed):
            Trainer(killable_job(tmp_path, checkpoint_every_s=1e-9)).run()
    if path.startswith("best/"):
        assert not has_best(Store(str(tmp_path)))  # new weights never stand beside the old state
    resumed = Trainer(killable_job(tmp_path, checkpoint_every_s=1e-9))
    assert 0 < resumed.step < 30
    resumed.run()
    assert same(finished(tmp_path), whole)


def test_a_best_that_was_lost_is_made_by_the_next_validation(tmp_path: Path) -> None:
    """Where arithmetic is not the same to the bit the validation may not be the best again."""
    store, first = Store(str(tmp_path)), Trainer(killable_job(tmp_path, epochs=2.0))
    first.run()
    store.delete("best")
    trainer = Trainer(killable_job(tmp_path, epochs=2.0))
    trainer.validations = [{**v, "acceptance_length": 4.0} for v in trainer.validations]
    trainer._validate(Metrics(store, trainer.step))
    assert has_best(store)


def test_killed_while_validating(tmp_path: Path, whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    walk, calls = trainer_module.walk, [0]

    def killing(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise Killed
        return walk(*args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "walk", killing)
        with pytest.raises(Killed):
            Trainer(killable_job(tmp_path)).run()
    resumed = Trainer(killable_job(tmp_path))
    assert len(resumed.validations) == 2 and resumed.step < 15
    resumed.run()
    assert same(finished(tmp_path), whole)


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.train.killable", str(folder), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    path, deadline = folder / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and len(path.read_text().splitlines()) >= step):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.005)


def test_sigkill_at_any_moment(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    rng = random.Random(7)
    for step in (4, 14, 24):
        process = start(tmp_path, 0.01)
        wait_for_step(tmp_path, step, process)
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    output = subprocess.run(
        [sys.executable, "-m", "tests.train.killable", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert output.stdout == "done at step 30\n" and "resumed at step" in output.stderr
    assert same(finished(tmp_path), whole)


def test_sigterm_saves_and_ends_and_the_next_run_goes_on_at_that_step(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    process = start(tmp_path, 0.02)
    wait_for_step(tmp_path, 8, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    step = int(out.removeprefix("stopped at step "))
    assert 8 <= step < 30 and f"stopped at step {step} of 30 as asked" in err
    saved = json.loads((tmp_path / "checkpoints" / f"step-{step:08d}" / "state.json").read_text())
    assert saved["step"] == step
    again = start(tmp_path, 0.0)
    out, err = again.communicate(timeout=120)
    rate = saved["learning_rate"]
    words = f"resumed at step {step}, epoch {step // 10} (step {step % 10} of it), learning rate {rate:.3g}, last loss"
    assert f"{words} {saved['loss']:.4f}" in err
    assert out == "done at step 30\n"
    assert same(finished(tmp_path), whole)


def test_a_driver_asks_by_a_file(tmp_path: Path, whole: dict[str, Tensor], caplog: pytest.LogCaptureFixture) -> None:
    store = Store(str(tmp_path))
    assert not ask_to_stop(store, 1.0)  # nothing runs
    trainer = Trainer(killable_job(tmp_path, 0.02))
    threads = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(1)
        trainer.run()

    thread = threading.Thread(target=run)
    thread.start()
    while not store.exists(Metrics.PATH):
        time.sleep(0.01)
    with caplog.at_level(logging.INFO, "draftmill"):
        assert ask_to_stop(store, 60.0)
    thread.join()
    torch.set_num_threads(threads)
    assert trainer.stopped and 0 < trainer.step < 30 and not store.exists(StopRequest.PATH)
    torch.set_num_threads(1)
    resumed = Trainer(killable_job(tmp_path))
    assert resumed.step == trainer.step
    resumed.run()
    assert not resumed.stopped and same(finished(tmp_path), whole)
    assert ask_to_stop(store, 0.0)  # nothing is left to save, and nobody to do it


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_resumed_on_another_number_of_workers_each_row_is_seen_once_an_epoch(
    first: int, then: int, tmp_path: Path
) -> None:
    straight, changed = tmp_path / "straight", tmp_path / "changed"
    Trainer(mixed_job(straight)).run()
    if first == 2:
        with pytest.raises(Exception, match="Killed"):
            spawn_workers(2, changed, fail_at=60)
    else:
        job = mixed_job(changed)
        with pytest.raises(Killed):
            Trainer(replace(job, train=KilledAt(job.train, 120))).run()  # type: ignore[arg-type]
    saved = read_weights(Store(str(changed)), "last")[1]
    assert 0 < saved["step"] < saved["total_steps"] and saved["world"] == first
    spawn_workers(then, changed)
    lines = [
        [x for x in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in x]
        for folder in (straight, changed)
    ]
    assert [x["step"] for x in lines[1]] == list(range(1, saved["total_steps"] + 1))
    assert [x["rows_by_step"] for x in lines[0]] == [x["rows_by_step"] for x in lines[1]]  # the same samples a step
    one, other = weights_of(straight), weights_of(changed)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_sigterm_of_the_driver_lets_the_workers_save(tiny: Path, tmp_path: Path) -> None:
    """`draftmill train` on Ray: exit 130, a checkpoint at the last step, and the same command goes on there."""
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(30)),
        train__epochs=100, train__checkpoint_every_s=1e6, train__validate_every_epochs=100, train__cpus_per_worker=1,
    )  # fmt: skip
    finish_generate(config).run.write_config(config)
    path, folder = save_config(config, tmp_path / "c.yaml"), tmp_path / "run" / "train"
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "train", str(path)],
        cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 400
    while not ((folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_text().splitlines()) > 20):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1][-3000:]
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=200)[1]
    assert process.returncode == 130, err[-3000:]
    assert "train: saved" in err and "Traceback" not in err, err[-3000:]
    step = read_weights(Store(str(folder)), "last")[1]["step"]
    steps = [json.loads(x)["step"] for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == step > 20
    result = draftmill("train", str(path), "train.checkpoint_every_s=1000", timeout=400)
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"resumed at step {step}," in result.stderr
