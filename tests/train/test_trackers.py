"""Where a training's numbers go: TensorBoard for real, MLflow and W&B as stand-in modules, Ray's gauges."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from app.errors import UserError
from app.metrics import METRICS
from app.storage import Store
from app.train import progress
from app.train.progress import Waits, Window
from app.train.trackers import RayMetrics, flat_numbers, open_trackers, require_trackers
from app.train.trainer import Trainer
from tests.train.test_trainer import make_job

LINE = {"step": 3, "loss": 1.5, "loss_by_step": [1.0, 0.5], "skipped": [2], "note": "x", "flag": True, "none": None}


def test_numbers_of_a_line_by_name() -> None:
    assert flat_numbers(LINE) == {
        "step": 3.0,
        "loss": 1.5,
        "loss_by_step/0": 1.0,
        "loss_by_step/1": 0.5,
        "skipped/0": 2.0,
    }
    assert flat_numbers({"validation": {"interval": [1, 2]}}) == {
        "validation/interval/0": 1,
        "validation/interval/1": 2,
    }


class Recorder:
    """Stands in for a tracker's package; remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def note(self, name: str, result: Any = None) -> Any:
        def call(*args: Any, **values: Any) -> Any:
            self.calls.append((name, values or args))
            return result

        return call

    def of(self, name: str) -> list[Any]:
        return [values for call, values in self.calls if call == name]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    module: Any = ModuleType("mlflow")
    for name in ("set_tracking_uri", "set_experiment", "set_tags", "log_params", "log_metrics", "end_run"):
        setattr(module, name, recorder.note(name))
    module.start_run = recorder.note("start_run", SimpleNamespace(info=SimpleNamespace(run_id="r-1")))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return recorder


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    module: Any = ModuleType("wandb")
    run = SimpleNamespace(id="w-1", log=recorder.note("log"), finish=recorder.note("finish"))
    module.init = recorder.note("init", run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return recorder


def trained(folder: Path, *names: str, **changes: Any) -> Trainer:
    """A training with trackers, the run folder being `folder`."""
    store = Store(str(folder / "train"))
    settings = {"train.epochs": 3}
    job = make_job(folder / "train", **changes)
    trainer = Trainer(replace(job, trackers=lambda step: open_trackers(names, str(folder), store, settings, step)))
    trainer.run()
    return trainer


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "train" / "metrics.jsonl").read_text().splitlines()]


def events(folder: Path) -> list[tuple[int, str, float]]:
    """Scalars of TensorBoard's event files, in order of writing; a purge drops what came after its step."""
    from tensorboardX.proto.event_pb2 import Event

    out: list[tuple[int, str, float]] = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            if event.HasField("session_log") and event.session_log.status == 1 and event.step:
                out = [e for e in out if e[0] < event.step]
            out += [(event.step, v.tag, v.simple_value) for v in event.summary.value if v.HasField("simple_value")]
    return out


def test_tensorboard_gets_every_number_and_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    trained(tmp_path / "run-a", "tensorboard")
    folder = tmp_path / "run-a" / "train" / "tensorboard"
    found = events(folder)
    losses = {step: value for step, tag, value in found if tag == "loss"}
    lines = lines_of(tmp_path / "run-a")
    assert losses == {x["step"]: pytest.approx(x["loss"], rel=1e-6) for x in lines if "loss" in x}
    assert {step for step, tag, _ in found if tag == "validation/acceptance_length"} == {10, 20, 30}
    assert {"data_wait_share", "tokens_per_s", "loss_by_step/2"} <= {tag for _, tag, _ in found}
    assert any(str(tmp_path / "run-a").encode() in p.read_bytes() for p in folder.iterdir())


def test_tensorboard_of_an_object_store_goes_up(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    store = Store("memory://tracked/train")
    (tracker,) = open_trackers(["tensorboard"], "memory://tracked", store, {}, 0)
    tracker.log({"loss": 2.0}, 1)
    tracker.flush()
    (name,) = store.files("tensorboard")
    tracker.log({"loss": 1.0}, 2)
    tracker.close()
    (tmp_path / name).write_bytes(store.read_bytes(f"tensorboard/{name}"))
    assert events(tmp_path) == [(1, "loss", 2.0), (2, "loss", 1.0)]


def test_steps_that_come_again_after_a_resume_replace_the_first_ones(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    store = Store(str(tmp_path))
    for resume_step, values in ((0, {1: 9.0, 2: 8.0, 3: 7.0}), (1, {2: 5.0, 3: 4.0})):
        (tracker,) = open_trackers(["tensorboard"], str(tmp_path), store, {}, resume_step)
        for step, value in values.items():
            tracker.log({"loss": value}, step)
        tracker.close()
        for path in (tmp_path / "tensorboard").glob("events*"):  # the name is that of a second
            path.rename(path.with_name(f"{resume_step}"))
    assert events(tmp_path / "tensorboard") == [(1, "loss", 9.0), (2, "loss", 5.0), (3, "loss", 4.0)]


def test_mlflow_has_name_folder_settings_and_goes_on_in_the_same_run(tmp_path: Path, mlflow: Recorder) -> None:
    trained(tmp_path / "run-b", "mlflow")
    assert mlflow.of("start_run") == [{"run_id": None, "run_name": "run-b"}]
    assert mlflow.of("set_tags") == [({"run_folder": str(tmp_path / "run-b")},)]
    assert mlflow.of("log_params") == [({"train.epochs": "3"},)]
    assert mlflow.of("set_tracking_uri") == [(f"file://{tmp_path}/run-b/train/mlruns",)]
    assert [c["step"] for c in mlflow.of("log_metrics")] == [x["step"] for x in lines_of(tmp_path / "run-b")]
    assert len(mlflow.of("end_run")) == 1
    trained(tmp_path / "run-b", "mlflow")  # finished: resumed at its end
    assert mlflow.of("start_run")[1] == {"run_id": "r-1", "run_name": None}


def test_wandb_has_name_folder_settings_and_goes_on_in_the_same_run(tmp_path: Path, wandb: Recorder) -> None:
    trained(tmp_path / "run-c", "wandb")
    (begun,) = wandb.of("init")
    assert begun["name"] == "run-c" and begun["id"] is None
    assert begun["config"]["run_folder"] == str(tmp_path / "run-c") and begun["config"]["train.epochs"] == 3
    assert wandb.of("finish")
    trained(tmp_path / "run-c", "wandb")
    assert wandb.of("init")[1]["id"] == "w-1"


def test_a_tracker_that_fails_does_not_end_the_training(
    tmp_path: Path, wandb: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    def log(*args: Any, **values: Any) -> None:
        raise ConnectionError("the network is down")

    sys.modules["wandb"].init = lambda **values: SimpleNamespace(id="w", log=log, finish=lambda: None)  # type: ignore[attr-defined]
    assert trained(tmp_path, "wandb").step == 30
    assert caplog.text.count("wandb fails (the network is down) and gets no more numbers") == 1


def test_trackers_are_closed_when_the_training_breaks(tmp_path: Path, wandb: Recorder) -> None:
    from tests.train.test_guards import broken

    job = make_job(tmp_path)
    with pytest.raises(UserError):
        trained(tmp_path, "wandb", train=broken(job.train, (5,)), max_bad_steps=0)
    assert wandb.of("finish")


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_an_absent_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    hidden = ("tensorboard", "tensorboardX", "mlflow", "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda m, *rest: None if m in hidden else real(m, *rest))
    require_trackers([])
    with pytest.raises(UserError, match=rf"train\.trackers names {name}.*pip install {name}"):
        require_trackers([name])
    with pytest.raises(UserError, match="pip install"):
        open_trackers([name], str(tmp_path), Store(str(tmp_path)), {}, 0)


def test_nothing_is_imported_that_is_not_configured() -> None:
    import subprocess

    code = "import sys, app.train.trackers; print([m for m in ('tensorboardX', 'mlflow', 'wandb') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_rays_gauges_carry_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {}

    class Gauge:
        def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] = ()) -> None:
            assert description and tag_keys == ("run", "stage", "source")
            self.name = name

        def set_default_tags(self, tags: dict[str, str]) -> None:
            assert tags == {"run": "demo", "stage": "train", "source": "worker 0"}

        def set(self, value: float, tags: None) -> None:
            values[self.name] = value

    module: Any = ModuleType("ray.util.metrics")
    module.Gauge = Gauge
    monkeypatch.setitem(sys.modules, "ray.util.metrics", module)
    trainer = Trainer(replace(make_job(tmp_path), trackers=lambda step: [RayMetrics("s3://runs/demo/")]))
    summary = trainer.run()
    assert set(values) == {metric.name for metric in METRICS.values() if metric.name.startswith("draftmill_train_")}
    assert values["draftmill_train_step"] == 30
    assert values["draftmill_train_acceptance_length"] == summary["validation"][-1]["acceptance_length"]


def test_the_time_without_data_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def slow() -> Any:
        for seconds in (3.0, 0.0, 1.0):
            now[0] += seconds  # before it is there
            yield seconds

    waits, window, seen = Waits(slow()), Window(), []
    for item in waits:
        now[0] += 4.0  # the step's own work
        seen.append((item, waits.last))
        window.waited += waits.last
    assert seen == [(3.0, 3.0), (0.0, 0.0), (1.0, 1.0)] and waits.total == 4.0
    assert (window.waited, window.seconds) == (4.0, 16.0)


def test_the_share_without_data_is_in_lines_summary_and_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.train import trainer as module

    monkeypatch.setattr(module, "LOG_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, "draftmill"):
        summary = Trainer(make_job(tmp_path)).run()
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= x["data_wait_share"] <= 1 for x in lines if "loss" in x)
    assert 0 < summary["data_wait_share"] <= 1
    assert "% of the time without data" in caplog.text
