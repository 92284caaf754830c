"""Submission: what is sent, where to, and the sentence for each thing that is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml
from ray.job_submission import JobStatus

from app import submit as submission
from app.cluster import connect
from app.config import RayConfig, load_config
from app.errors import UserError
from app.job_package import EXCLUDES, LARGE_FOLDER, LIMIT, measure
from app.job_server import PYTHONS, RAY_LEAST, Cluster
from app.lease import host_identity, process_start
from tests.job_server import JobServer, job, serving
from tests.runs import ROOT, Command, prompts, write_rows

MB = 10**6


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's Ray: no address, no token."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout, as the current folder."""
    root = tmp_path / "checkout"
    for folder in ("app", "configs", "data"):
        (root / folder).mkdir(parents=True)
    (root / "app" / "__main__.py").touch()
    write_rows(root / "data" / "rows.jsonl", prompts(3))
    (root / "configs" / "c.yaml").write_text("run_dir: runs/a\nsources: [{path: data/rows.jsonl}]\n")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def server() -> Iterator[JobServer]:
    with serving(JobServer(python=platform.python_version())) as running:
        yield running


def of_size(path: Path, size: int) -> None:
    """A file that takes no room on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal."""
    assert done.returncode == 1 and done.stdout == "", done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("draftmill: error: "), done.stderr
    return lines[0]


def files_of(root: Path) -> set[str]:
    config = root / "configs" / "c.yaml"
    return set(measure(root, load_config(str(config), []), config).files)


# The package


def test_what_is_measured_is_what_ray_packs(checkout: Path, tmp_path: Path) -> None:
    from ray._private.runtime_env.packaging import create_package

    for path in (
        ".git/objects/x", ".venv/bin/python", "venv/lib", "app/__pycache__/a.pyc", "app/a.py", "runs/a/config.yaml",
        "app/runs/kept.py", "notes.log", "kept.log", "sub/.ruff_cache/x", "sub/dropped.txt", "sub/deep/dropped.txt",
        "sub/inner/kept.txt", "big.bin", "dm.egg-info/PKG", "build/lib/a.py", "sub/build/kept.py", "empty/x/y.tmp",
        "all/x", "cache/a b [1].txt",
    ):  # fmt: skip
        of_size(checkout / path, 10)
    (checkout / ".gitignore").write_text("*.log\n!kept.log\n*.tmp\n")
    (checkout / ".rayignore").write_text("/big.bin\n")
    (checkout / "sub" / ".gitignore").write_text("dropped.txt\n")
    (checkout / "all" / ".gitignore").write_text("*\n!.gitignore\n")
    (checkout / "link").symlink_to("sub")
    (checkout / "nowhere").symlink_to("absent")
    of_size(checkout / "large [1] one" / "x.bin", LARGE_FOLDER + 1)
    config = checkout / "configs" / "c.yaml"
    package = measure(checkout, load_config(str(config), []), config)
    target = tmp_path / "package.zip"
    create_package(str(checkout), target, include_gitignore=True, excludes=list(package.excludes))
    with zipfile.ZipFile(target) as packed:
        assert {n for n in packed.namelist() if not n.endswith("/")} == set(package.files)
        folders = sum(76 + 2 * len(n) for n in packed.namelist() if n.endswith("/"))
    assert package.size + folders == target.stat().st_size - 22
    assert {"app/a.py", "app/runs/kept.py", "kept.log", "sub/inner/kept.txt", "link/inner/kept.txt"} <= set(
        package.files
    )
    assert not {p for p in package.files if p.startswith((".git/", ".venv", "venv", "runs", "build", "large"))}
    assert package.left_out == {"large [1] one": LARGE_FOLDER + 1}


def test_what_ray_takes_is_what_is_allowed() -> None:
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE
    from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE

    assert min(DASHBOARD_CLIENT_MAX_SIZE, GCS_STORAGE_MAX_SIZE) == LIMIT


def test_a_file_of_600_mb_is_named_and_a_big_git_is_not_sent(
    checkout: Path, server: JobServer, draftmill_here: Command
) -> None:
    of_size(checkout / "dump.bin", 600 * MB)
    of_size(checkout / ".git" / "objects" / "pack.pack", 900 * MB)
    said = sentence(draftmill_here("submit", "configs/c.yaml", "--address", server.url))
    assert "600.00 MB and Ray takes 104.86 MB" in said and "dump.bin 600.00 MB" in said and ".rayignore" in said
    assert ".git" not in said.replace(".gitignore", "")
    assert server.packages == [] and server.submitted == []
    (checkout / ".rayignore").write_text("dump.bin\n")
    done = draftmill_here("submit", "configs/c.yaml", "--address", server.url)
    assert done.returncode == 0, done.stderr
    assert len(server.packages) == 1 and server.packages[0] < 10_000


def test_a_data_folder_that_nothing_names_stays_here(
    checkout: Path, server: JobServer, draftmill_here: Command
) -> None:
    of_size(checkout / "corpus" / "a" / "dump.bin", 600 * MB)
    done = draftmill_here("submit", "configs/c.yaml", "--address", server.url)
    assert done.returncode == 0, done.stderr
    assert "corpus (600.00 MB) stays here for its size: the configuration names nothing in it" in done.stdout
    assert len(server.packages) == 1 and server.packages[0] < 10_000


def test_a_data_folder_that_is_named_is_measured(checkout: Path, server: JobServer, draftmill_here: Command) -> None:
    of_size(checkout / "data" / "deep" / "dump.jsonl", 600 * MB)
    of_size(checkout / "data" / "small.jsonl", 2 * MB)
    said = sentence(draftmill_here("submit", "configs/c.yaml", "--address", server.url))
    assert "the largest: data/deep/dump.jsonl 600.00 MB" in said


@pytest.mark.parametrize("value", ["data/rows.jsonl", "data", "data/*.jsonl", "./data/rows.jsonl"])
def test_what_the_configuration_names_must_be_sent(
    checkout: Path, server: JobServer, draftmill_here: Command, value: str
) -> None:
    (checkout / ".gitignore").write_text("data/\n")
    said = sentence(draftmill_here("submit", "configs/c.yaml", f"sources.0.path={value}", "--address", server.url))
    assert "sources.0.path is data" in said and "is not submitted" in said


def test_a_relative_path_out_of_the_checkout_is_refused(
    checkout: Path, server: JobServer, draftmill_here: Command
) -> None:
    write_rows(checkout.parent / "rows.jsonl", prompts(3))
    said = sentence(draftmill_here("submit", "configs/c.yaml", "sources.0.path=../rows.jsonl", "--address", server.url))
    assert "sources.0.path is ../rows.jsonl, outside of the folder that is submitted" in said


def test_run_folders_are_never_sent_wherever_they_lie(checkout: Path) -> None:
    for folder in ("old-run", "experiments/one", "runs/a"):
        for name in ("config.yaml", "ingest/manifest.json", "logs/driver.log", "generate/parts/p.safetensors"):
            of_size(checkout / folder / name, 10)
    of_size(checkout / "experiments" / "notes.txt", 10)
    assert files_of(checkout) == {"app/__main__.py", "configs/c.yaml", "data/rows.jsonl", "experiments/notes.txt"}


def test_a_link_to_a_folder_above_is_refused(checkout: Path) -> None:
    (checkout / "data" / "up").symlink_to("..")
    with pytest.raises(UserError, match="data/up is a link to a folder above it"):
        files_of(checkout)


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draftmill_here: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(f"sources: [{{path: {write_rows(tmp_path / 'r.jsonl', prompts(3))}}}]\n")
    assert "no checkout of draftmill" in sentence(draftmill_here("submit", "c.yaml"))


# Where to


class Deaf:
    """Listens and says what is no HTTP."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                one, _ = self._socket.accept()
            except OSError:
                return
            one.recv(4096)
            one.sendall(b"\x00\x00\x18\x04\x00\x00")
            one.close()

    def close(self) -> None:
        self._socket.close()


def test_a_wrong_address_is_a_sentence(checkout: Path, draftmill_here: Command) -> None:
    deaf = Deaf()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{s.getsockname()[1]}"
    for address, words in {
        f"http://{closed}": "Connection refused",
        closed: "Connection refused",
        "http://no-such-host.invalid:8265": "no Ray cluster answers at http://no-such-host.invalid:8265",
        f"http://127.0.0.1:{deaf.port}": "it does not speak HTTP",
        "http://": "no Ray cluster answers",
        "nonsense://x": "no Ray cluster answers",
    }.items():
        said = sentence(draftmill_here("submit", "configs/c.yaml", "--address", address))
        assert words in said and "--address http://HOST:8265" in said
    deaf.close()


def test_another_server_at_the_address_is_a_sentence(checkout: Path, draftmill_here: Command) -> None:
    class Other(JobServer):
        def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
            return (404, ["nothing"]) if path == "/api/version" else (200, {})

    with serving(Other()) as other:
        said = sentence(draftmill_here("submit", "configs/c.yaml", "--address", other.url))
    assert "is no Ray dashboard (HTTP 404)" in said


def test_the_address_that_is_given_wins(
    checkout: Path, server: JobServer, draftmill_here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own client takes the variable's."""
    with serving(JobServer()) as other:
        monkeypatch.setenv("RAY_ADDRESS", other.url)
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", other.url)
        for address in (server.url, server.url.removeprefix("http://"), f"{server.url}/"):
            assert draftmill_here("submit", "configs/c.yaml", "--address", address).returncode == 0
        assert (len(server.submitted), len(other.submitted)) == (3, 0)
        assert draftmill_here("submit", "configs/c.yaml").returncode == 0
        assert (len(server.submitted), len(other.submitted)) == (3, 1)
        assert os.environ["RAY_ADDRESS"] == other.url


@pytest.mark.parametrize(
    ("given", "words"),
    [(None, "asks for a token and this machine has none; copy ~/.ray/auth_token"), ("wrong", "refuses this machine's")],
)
def test_a_token_that_is_missing_or_wrong_is_a_sentence(
    checkout: Path, draftmill_here: Command, monkeypatch: pytest.MonkeyPatch, given: str | None, words: str
) -> None:
    if given is not None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", given)
    with serving(JobServer(token="right")) as guarded:
        assert words in sentence(draftmill_here("submit", "configs/c.yaml", "--address", guarded.url))
        monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
        path = checkout / "token"
        path.write_text("right\n")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
        assert draftmill_here("submit", "configs/c.yaml", "--address", guarded.url).returncode == 0


# The cluster there


@pytest.mark.parametrize(
    ("version", "python", "words"),
    [
        ("2.9.3", "3.11.7", "runs Ray 2.9.3 on Python 3.11.7, and draftmill needs Ray 2.50 or newer on Python 3.11 or"),
        ("2.60.0", "3.9.18", "runs Ray 2.60.0 on Python 3.9.18, and draftmill needs"),
        ("2.60.0", "3.14.0", "runs Ray 2.60.0 on Python 3.14.0, and draftmill needs"),
    ],
)
def test_a_cluster_of_a_version_that_does_not_do_is_refused(
    checkout: Path, draftmill_here: Command, version: str, python: str, words: str
) -> None:
    with serving(JobServer(ray_version=version, python=python)) as old:
        said = sentence(draftmill_here("submit", "configs/c.yaml", "--address", old.url))
        assert words in said and "start Ray from draftmill's own environment on every node" in said
        assert old.submitted == [] and old.packages == []


def test_a_cluster_of_another_version_that_does_is_told(checkout: Path, draftmill_here: Command) -> None:
    with serving(JobServer(ray_version="2.58.1", python="3.12.9")) as other:
        done = draftmill_here("submit", "configs/c.yaml", "--address", other.url)
        assert done.returncode == 0 and len(other.submitted) == 1
    here = f"Ray {ray.__version__} on Python {platform.python_version()}"
    assert f"the cluster runs Ray 2.58.1 on Python 3.12.9, this machine {here}: the job runs with" in done.stdout


def test_the_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">={}.{},<{}.{}".format(*PYTHONS[0], PYTHONS[-1][0], PYTHONS[-1][1] + 1)
    assert any(d.endswith(">={}.{}".format(*RAY_LEAST)) and d.startswith("ray[") for d in project["dependencies"])


def test_a_driver_of_another_version_than_its_cluster_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.utils import check_version_info

    def init(**options: Any) -> None:
        check_version_info({"ray_version": "2.9.0", "python_version": "3.9.1"}, "node 127.0.0.1")

    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        here = f"Ray {ray.__version__} on Python {platform.python_version()}"
        with pytest.raises(UserError, match=f"at {address} runs Ray 2.9.0 on Python 3.9.1, and this process {here}"):
            connect(RayConfig(address=address))


def run_module(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", f"import sys, runpy; {code}; runpy.run_module('app', run_name='__main__')"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def test_a_job_in_a_python_that_is_not_draftmills_says_so() -> None:
    assert "is Python 3" in run_module("sys.version_info = (3, 10, 2)")
    assert f"{sys.executable} lacks the package " in run_module("pass", "-S")


@pytest.mark.parametrize(
    ("gpus", "told"), [((8.0, 8.0), True), ((7.5, 8.0), True), ((7.0, 8.0), False), ((0, 0), False)]
)
def test_no_free_gpu_is_told(checkout: Path, draftmill_here: Command, gpus: tuple[float, float], told: bool) -> None:
    with serving(JobServer(gpus=gpus)) as busy:
        done = draftmill_here("submit", "configs/c.yaml", "--address", busy.url)
    assert done.returncode == 0 and len(busy.submitted) == 1
    words = f"no GPU of the cluster is free ({gpus[0]:g} of {gpus[1]:g} are in use): the job starts and waits for them"
    assert (words in done.stdout) is told


# The job


def test_the_job_names_its_run_and_stage(checkout: Path, server: JobServer, draftmill_here: Command) -> None:
    done = draftmill_here("submit", "configs/c.yaml", "train.epochs=2", "--stage", "train", "--address", server.url)
    assert done.returncode == 0, done.stderr
    run = f"{checkout}/runs/a"
    (sent,) = server.submitted
    assert sent["metadata"] == {"run_dir": run, "stage": "train"}
    assert sent["entrypoint"] == f"python -m app train configs/c.yaml train.epochs=2 run_dir={run}"
    assert sent["runtime_env"]["working_dir"].startswith("gcs://")
    assert sent["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
    assert f"submitted raysubmit_new to {server.url}; run folder {run}" in done.stdout
    assert f"draftmill stop {run} --address {server.url}" in done.stdout
    follow = f"RAY_AUTH_MODE=token ray job logs --address {server.url} --follow raysubmit_new"
    assert follow in done.stdout
    assert draftmill_here("submit", "configs/c.yaml", "--address", server.url).returncode == 0
    assert server.submitted[1]["metadata"]["stage"] == "all" and "app run configs" in server.submitted[1]["entrypoint"]


def test_env_and_dependencies_come_from_a_runtime_environment(
    checkout: Path, server: JobServer, draftmill_here: Command
) -> None:
    (checkout / "env.yaml").write_text(
        "env_vars: {HF_HOME: /shared/hf, OMP_NUM_THREADS: 4}\npip: [s3fs]\nexcludes: [/dump.bin]\n"
    )
    of_size(checkout / "dump.bin", 600 * MB)
    done = draftmill_here("submit", "configs/c.yaml", "--runtime-env", "env.yaml", "--address", server.url)
    assert done.returncode == 0, done.stderr
    env = server.submitted[0]["runtime_env"]
    assert env["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "120", "HF_HOME": "/shared/hf", "OMP_NUM_THREADS": "4"}
    assert env["pip"]["packages"] == ["s3fs"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("working_dir: /elsewhere\n", "without working_dir"),
        ("[1, 2]\n", "is no runtime environment"),
        ("env_vars: [A]\n", "is no runtime environment"),
        ("excludes: {a: b}\n", "is no runtime environment"),
        ("a: [1,\n", "cannot be read as YAML"),
        ("env_vars: {AWS_SECRET_ACCESS_KEY: abcdef}\n", "a secret (env_vars.AWS_SECRET_ACCESS_KEY)"),
        ("pip: [a]\nconda: [b]\n", "Ray does not take the runtime environment"),
    ],
)
def test_a_bad_runtime_environment_is_a_sentence(
    checkout: Path, server: JobServer, draftmill_here: Command, text: str, words: str
) -> None:
    (checkout / "env.yaml").write_text(text)
    said = sentence(draftmill_here("submit", "configs/c.yaml", "--runtime-env", "env.yaml", "--address", server.url))
    assert words in said and "env.yaml" in said
    assert server.submitted == []


def test_the_plain_line_has_the_same_runtime_environment() -> None:
    env = yaml.safe_load((ROOT / "deploy" / "runtime-env.yaml").read_text())
    assert env == {"working_dir": ".", "excludes": list(EXCLUDES), "env_vars": submission.ENV_VARS}


def test_a_run_that_is_worked_on_is_not_submitted_twice(
    checkout: Path, server: JobServer, draftmill_here: Command
) -> None:
    run = f"{checkout}/runs/a"
    server.jobs = [
        job("raysubmit_old", "FAILED", metadata={"run_dir": run}),
        job("raysubmit_one", metadata={"run_dir": "/another"}),
        job("raysubmit_two", metadata={"run_dir": run}),
    ]
    said = sentence(draftmill_here("submit", "configs/c.yaml", "--address", server.url))
    assert f"raysubmit_two works on {run} already (RUNNING)" in said and f"draftmill stop {run}" in said
    assert server.submitted == []


# Following


class Job:
    """Ray's client for one job whose log comes in pieces; each connection ends after its pieces."""

    def __init__(self, *connections: list[str], status: str = "SUCCEEDED", asked: Callable[[], None] | None = None):
        self.connections, self.status, self.asked = list(connections), status, asked
        self.message = "it failed\nfor a reason"

    async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
        pieces = self.connections.pop(0)
        for piece in pieces:
            await asyncio.sleep(0)
            yield piece
        if self.connections:
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def get_job_status(self, name: str) -> JobStatus:
        if self.asked is not None:
            self.asked()
        return JobStatus("RUNNING" if self.connections else self.status)

    def get_job_info(self, name: str) -> Any:
        return SimpleNamespace(status=JobStatus(self.status), message=self.message, driver_exit_code=None)


CLUSTER = Cluster("http://head:8265", ray.__version__, None, None)


def test_a_broken_connection_repeats_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "_RETRY_S", 0.0)
    done = submission._follow(Job(["one\n", "two\n"], ["one\ntwo\nth"], ["one\ntwo\nthree\n", "four\n"]), CLUSTER, "j")
    assert done == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\nfour\nj: SUCCEEDED\n"


def test_a_connection_may_break_as_often_as_it_comes_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "_RETRY_S", 0.0)
    lines = [f"line {i}\n" for i in range(40)]
    assert submission._follow(Job(*(lines[: i + 1] for i in range(40))), CLUSTER, "j") == 0
    assert capsys.readouterr().out == "".join(lines) + "j: SUCCEEDED\n"


def test_a_connection_that_does_not_come_back_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_RETRY_S", 0.0)

    def gone() -> None:
        raise ConnectionError("refused")

    pieces = [["one\n"] for _ in range(30)]
    with pytest.raises(UserError, match="is lost, and j goes on as long as its cluster does; follow it again with"):
        submission._follow(Job(*pieces, asked=gone), CLUSTER, "j")


def test_an_interrupt_leaves_the_job_running(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert submission._follow(Job(["one\n"], asked=interrupt), CLUSTER, "j") == 0
    said = capsys.readouterr().out
    assert "j goes on; follow it again with: RAY_AUTH_MODE=token ray job logs --address http://head:8265" in said


@pytest.mark.parametrize(("status", "fails"), [("FAILED", True), ("SUCCEEDED", False), ("STOPPED", False)])
def test_a_job_that_nobody_follows_is_looked_at_for_a_moment(status: str, fails: bool) -> None:
    assert submission._fails_at_once(Job(status=status), "j") is fails


def test_an_interrupt_ends_the_look_and_not_the_job() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert submission._fails_at_once(Job(status="FAILED", asked=interrupt), "j") is False


def test_a_job_that_runs_is_left_alone_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_FIRST_S", 0.05)
    looks: list[int] = []
    assert submission._fails_at_once(Job(["more"], asked=lambda: looks.append(1)), "j") is False
    assert len(looks) > 1


def test_a_job_that_did_not_begin_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert submission._follow(Job([], status="FAILED"), CLUSTER, "j") == 1
    assert capsys.readouterr().out == "j: FAILED before it began (it failed for a reason)\n"


# Stopping


HOLDER = """
import signal, sys, time
from app.lease import Lease
from app.storage import Store

def stop(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, stop)
lease = Lease(Store(sys.argv[1]), 60)
lease.acquire()
try:
    print("up", flush=True)
    time.sleep(600)
finally:
    lease.release()
"""


def test_stop_ends_the_driver_on_this_host(tmp_path: Path, draftmill_here: Command) -> None:
    run = tmp_path / "run"
    driver = subprocess.Popen([sys.executable, "-c", HOLDER, str(run)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None and driver.stdout.readline() == "up\n"
        done = draftmill_here("stop", str(run))
        assert done.returncode == 0, done.stderr
        assert f"stopped pid {driver.pid}; what is committed stays" in done.stdout
        assert driver.wait(10) != -15  # it cleaned up, and was not just ended
        assert not (run / "lease.json").exists()
    finally:
        driver.kill()
        driver.communicate()
    again = draftmill_here("stop", str(run))
    assert again.returncode == 0 and f"nothing runs on {run}" in again.stdout


def test_stop_ends_the_job_of_the_run(checkout: Path, server: JobServer, draftmill_here: Command) -> None:
    run = f"{checkout}/runs/a"
    server.jobs = [
        job("raysubmit_other", metadata={"run_dir": "/another"}),
        job("raysubmit_ended", "SUCCEEDED", metadata={"run_dir": run}),
        job("raysubmit_this", metadata={"run_dir": run}),
    ]
    done = draftmill_here("stop", "configs/c.yaml", "--address", server.url)
    assert done.returncode == 0, done.stderr
    assert server.stopped == ["raysubmit_this"]
    assert "raysubmit_this: STOPPED; what is committed stays, and submitting the run again resumes it" in done.stdout
    again = draftmill_here("stop", "runs/a", "--address", server.url)
    assert again.stdout.startswith(f"nothing runs on {run}, and no job of") and server.stopped == ["raysubmit_this"]


def test_stop_names_the_job_that_failed_before_it_made_a_run_folder(
    checkout: Path, server: JobServer, draftmill_here: Command
) -> None:
    metadata = {"run_dir": f"{checkout}/runs/a"}
    server.jobs = [
        job("raysubmit_late", "FAILED", metadata=metadata, start_time=2),
        job("raysubmit_early", "STOPPED", metadata=metadata, start_time=1),
    ]
    done = draftmill_here("stop", "runs/a", "--address", server.url)
    assert done.returncode == 0 and "; its last, raysubmit_late, ended: FAILED; its log: " in done.stdout
    assert "ray job logs" in done.stdout and server.stopped == []


def test_stop_knows_a_job_of_the_plain_line_by_its_driver(
    tmp_path: Path, server: JobServer, draftmill_here: Command
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    pid = os.getpid()
    lease = {"pid": pid, "host": host_identity(), "started": process_start(pid), "heartbeat": 0, "token": "t"}
    (run / "lease.json").write_text(json.dumps(lease))
    driver = {"id": "1", "node_ip_address": "127.0.0.1", "pid": str(pid)}
    server.jobs = [
        job("raysubmit_foreign", entrypoint="python train.py", driver_info=driver),
        job("raysubmit_plain", driver_info=driver),
    ]
    done = draftmill_here("stop", str(run), "--address", server.url)
    assert done.returncode == 0, done.stderr
    assert server.stopped == ["raysubmit_plain"]


def test_stop_of_what_is_elsewhere_or_unknown_is_a_sentence(
    tmp_path: Path, server: JobServer, draftmill_here: Command
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lease = {"pid": 7, "host": "elsewhere:boot", "heartbeat": time.time(), "timeout_s": 60}
    (run / "lease.json").write_text(json.dumps(lease))
    said = sentence(draftmill_here("stop", str(run)))
    assert "is held by pid 7 on elsewhere, which is no job of a cluster that is known here; give --address" in said
    assert "there is no job raysubmit_x" in sentence(draftmill_here("stop", "raysubmit_x", "--address", server.url))
    server.jobs = [job("raysubmit_y", "FAILED")]
    assert "had ended already: FAILED" in draftmill_here("stop", "raysubmit_y", "--address", server.url).stdout
    assert server.stopped == []
