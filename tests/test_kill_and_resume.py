"""F22: SIGKILL of the driver or a worker at five random moments, then the same command again, ends as if none was."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from app.captured import load_entries
from app.config import Config
from app.parts import PARTS, read_entry
from app.pipeline import run_stage
from app.storage import Store
from app.train.loop import run_worker
from app.train.state import read_weights
from tests.pipelines.finished import finish_generate, stage
from tests.runs import ROOT, context, draftmill, prompts, save_config, tiny_config, write_rows

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]
ROWS, PARTS_OF_TEN = 200, 20
CPU = torch.device("cpu")
# About 400 steps: seconds, in which a training can be killed twice.
TRAINING = {
    "train__epochs": 15,
    "train__checkpoint_every_s": 0.3,
    "train__validate_every_epochs": 5,
    "train__cpus_per_worker": 1,
}


def commit_times(run: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in (run / PARTS).glob("part-*")}


def committed(config: Config) -> set[int]:
    store = context(config).run.store
    return {p for p in range(PARTS_OF_TEN) if read_entry(store, p) is not None}


def requests(log: Path) -> list[tuple[str, int]]:
    """(request id, pid) of every finished request, in order."""
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(line[0], int(line[1])) for line in lines if len(line) == 2]


class Run:
    """A run in a process of its own."""

    def __init__(self, path: Path, log: Path, delay: float) -> None:
        self.log = log
        self.before = len(requests(log))
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by kill)
        env = {**os.environ, "STUB_LOG": str(log), "STUB_DELAY": str(delay)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "app", "evaluate", str(path)],
            env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=self.stderr,
        )  # fmt: skip

    def wait_for(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and self.process.poll() is None and not what():
            time.sleep(0.02)
        if self.process.poll() is not None:
            self.stderr.seek(0)
            pytest.fail(f"the run ended before it could be killed: {self.stderr.read()[-2000:]}")

    def requests(self) -> int:
        return len(requests(self.log)) - self.before

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.stderr.close()
        time.sleep(1)  # the local cluster dies with its driver


def test_five_kills_lose_nothing_repeat_what_was_in_flight_and_change_no_weight(tiny: Path, tmp_path: Path) -> None:
    rng = random.Random(20)
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(tmp_path / "r.jsonl", prompts(ROWS)),
        generate__parts_in_flight=2, generate__replicas=2, **TRAINING,
    )  # fmt: skip
    path, log, run = save_config(config, tmp_path / "c.yaml"), tmp_path / "requests.log", tmp_path / "run"
    metrics = run / "train" / "metrics.jsonl"
    kept: dict[str, int] = {}

    for moment in (rng.randrange(5, 40), rng.randrange(5, 40)):  # two drivers while generating
        one = Run(path, log, delay=0.2)
        one.wait_for(lambda one=one, moment=moment: one.requests() >= moment)
        one.kill()
        times = commit_times(run)
        assert all(times[name] == at for name, at in kept.items())
        names = {
            f["name"] for p in committed(config) for f in (read_entry(context(config).run.store, p)).files.values()
        }
        kept = {n: t for n, t in times.items() if n in names}

    first = Run(path, log, delay=0.2)  # then a worker: its parts go to its successor, the driver lives on
    moment = rng.randrange(5, 15)
    first.wait_for(lambda: first.requests() >= moment)
    os.kill(requests(log)[-1][1], signal.SIGKILL)
    first.wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= rng.randrange(5, 40))
    first.kill()  # and the driver while training

    before_training = commit_times(run)
    second = Run(path, log, delay=0)
    trained = len(metrics.read_text().splitlines())
    second.wait_for(lambda: len(metrics.read_text().splitlines()) > max(60, trained + 20))
    second.wait_for(lambda: any((run / "train" / "checkpoints").glob("step-*/state.json")))
    second.kill()

    done_before = len(requests(log))
    result = draftmill("evaluate", str(path), env={"STUB_LOG": str(log)}, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(requests(log)) == done_before  # nothing was generated again after generate was complete
    assert "resumed at step" in result.stderr

    times = commit_times(run)
    assert times == before_training
    assert all(times[name] == at for name, at in kept.items())
    rows = []
    for entry in load_entries(context(config)):
        rows += pq.read_table(run / PARTS / entry.files["rows"]["name"]).to_pylist()
    ids = [r["conversation_id"] for r in rows]
    ingested = {r["id"] for p in (run / "ingest" / "parts").glob("*.parquet") for r in pq.read_table(p).to_pylist()}
    assert len(ids) == ROWS and set(ids) == ingested
    # Work was repeated for parts in flight alone: at most two parts of each of two engines at each of three kills.
    repeats = len(requests(log)) - ROWS
    assert 0 <= repeats <= 3 * 4 * 10
    assert not list(run.rglob("*.tmp-*"))
    assert not (run / "lease.json").exists()
    assert not (run / "generate" / "attempts").exists()
    check_as_if_whole(tiny, tmp_path, run)


def check_as_if_whole(tiny: Path, tmp_path: Path, killed: Path) -> None:
    """The same rows and settings without a kill, and in this process: the killed run's weights are equal to those,
    bit for bit."""
    ctx = finish_generate(tiny_config(tiny, tmp_path / "whole", tmp_path / "r.jsonl", **TRAINING))
    run_stage(stage("vocab"), ctx)
    threads = torch.get_num_threads()
    run_worker(ctx.run.store, ctx.config.model_dump(mode="json"), ctx.target.to_json(), load_entries(ctx), CPU)
    torch.set_num_threads(threads)
    weights = []
    for folder in (tmp_path / "whole", killed):
        tensors, state = read_weights(Store(str(folder / "train")), "last")
        weights.append(tensors)
        lines = [json.loads(x) for x in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
        steps = [x["step"] for x in lines if "loss" in x]
        assert steps == list(range(1, state["step"] + 1))
    assert weights[0].keys() == weights[1].keys()
    assert all(bool((weights[0][k] == weights[1][k]).all()) for k in weights[0])
