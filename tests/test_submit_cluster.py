"""A run on a real cluster: submitted, followed, let alone, stopped and submitted again by Ray's own line."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from app import job_server
from app.lease import process_start
from app.parts import PARTS
from tests.ray_head import RAY, running_head
from tests.runs import ROOT, prompts, save_config, tiny_config, write_rows
from tests.test_cleanup import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ray_head() -> Iterator[dict[str, str]]:
    with running_head() as env:
        yield env


@pytest.fixture
def checkout(tiny: Path, tmp_path: Path) -> Path:
    """A checkout with the stub engine, whose 8 parts take about two seconds each."""
    root = tmp_path / "checkout"
    for folder in ("app", "tests", "deploy"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = tiny_config(
        tiny, tmp_path / "run", write_rows(root / "rows.jsonl", prompts(80)),
        generate__engine_args={"STUB_DELAY": 1.0, "STUB_LOG": str(tmp_path / "log")}, generate__replicas=1,
        generate__parts_in_flight=1, ray__engine_cpus=1,
    )  # fmt: skip
    save_config(config, root / "c.yaml")
    return root


def committed(run: Path) -> dict[str, int]:
    """Commits of parts with the time they were written."""
    return {p.name: p.stat().st_mtime_ns for p in (run / PARTS).glob("*.json")}


def test_f40_submitted_followed_stopped_and_resumed(
    checkout: Path, tmp_path: Path, ray_head: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def draftmill(*words: str) -> list[str]:
        return [sys.executable, "-m", "app", *words]

    def finished(line: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(line, cwd=checkout, env=ray_head, capture_output=True, text=True, timeout=300)

    submit = draftmill("submit", "c.yaml", "--stage", "generate", "--follow")
    log = tmp_path / "follower.log"
    with log.open("w") as out:
        follower = subprocess.Popen(
            submit, cwd=checkout, env=ray_head, stdout=out, stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background
        )  # fmt: skip
    wait_until(lambda: "Running entrypoint" in log.read_text() or follower.poll() is not None, 240)
    job = next(w for w in log.read_text().split() if w.startswith("raysubmit_"))
    second = finished(submit)
    assert second.returncode == 1 and f"{job} works on {run} already (RUNNING)" in second.stderr
    cluster = told_by(ray_head, monkeypatch)
    assert (cluster.ray, cluster.python, cluster.gpus) == (ray.__version__, platform.python_version(), (0, 0))

    wait_until(lambda: len(committed(run)) >= 2 or follower.poll() is not None, 240)
    follower.send_signal(signal.SIGINT)
    assert follower.wait(60) == 0, log.read_text()
    assert "generate: 8 parts to make on 1 engine(s)" in log.read_text()  # as it was logged on the cluster
    assert f"{job} goes on; follow it again with: RAY_AUTH_MODE=token ray job logs" in log.read_text()
    seen = committed(run)

    stopped = finished(draftmill("stop", "c.yaml"))
    assert stopped.returncode == 0, stopped.stderr
    assert f"{job}: STOPPED" in stopped.stdout
    assert not (run / "lease.json").exists()  # it let the folder go, and was not just killed
    engines = {int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines()}
    assert len(engines) == 1
    wait_until(lambda: not any(process_start(pid) for pid in engines), 30)
    kept = committed(run)
    assert seen.items() <= kept.items() and len(kept) < 8

    plain = [
        RAY, "job", "submit", "--runtime-env", "deploy/runtime-env.yaml", "--", "python", "-m", "app", "generate",
        "c.yaml",
    ]  # fmt: skip
    again = finished(plain)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-2000:]
    assert f"generate: resumed, {len(kept)} of 8 parts are committed" in again.stdout
    done = committed(run)
    assert len(done) == 8 and kept.items() <= done.items()


def told_by(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> job_server.Cluster:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", os.path.join(env["HOME"], ".ray", "auth_token"))
    wait_until(lambda: job_server.find(env["RAY_ADDRESS"]).gpus is not None, 30)  # Ray's report comes some seconds late
    return job_server.find(env["RAY_ADDRESS"])
