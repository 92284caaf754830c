"""Cleanup lists and ends what ended runs left on the host, and nothing of a living run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cleanup import Leftover, cleanup, find
from app.engine import warden
from app.errors import UserError
from app.parts import PARTS
from tests.runs import ROOT, draftmill, prompts, save_config, tiny_config, write_rows

# An engine without a guard, as if the guard had died: two children that ignore SIGTERM, one started and one forked,
# which hold a file in shared memory, and a folder of states.
ENGINE = """
import json, mmap, os, signal, subprocess, sys, tempfile
from app.engine.warden import OWNER, STATES_FOLDER, owner_tag
run, segment = sys.argv[1:]
os.environ[OWNER] = owner_tag()
open(segment, "wb").write(bytes(5000))
held = mmap.mmap(os.open(segment, os.O_RDWR), 5000)
forked = os.fork()
if forked == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()
held.close()
code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
started.stdout.readline()
folder = tempfile.mkdtemp(prefix=f"{STATES_FOLDER}{owner_tag()}-", dir="/dev/shm")
open(f"{folder}/r1", "wb").write(bytes(3000))
print(json.dumps({"engine": os.getpid(), "forked": forked, "started": started.pid, "folder": folder}), flush=True)
signal.pause()
"""
DRIVER = f"""
import subprocess, sys
from app.engine.warden import driving
with driving(sys.argv[1]):
    subprocess.run([sys.executable, "-c", {ENGINE!r}, *sys.argv[1:]])
"""


class FakeRun:
    """A driver, its engine and what that started."""

    def __init__(self, name: str) -> None:
        self.name, self.segment = name, Path(f"/dev/shm/test-{uuid.uuid4().hex}")
        self.driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, name, str(self.segment)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self.driver.stdout is not None
        with self.driver.stdout as answer:
            said: dict[str, Any] = json.loads(answer.readline())
        self.folder = Path(said.pop("folder"))
        self.pids: dict[str, int] = said

    def end(self, *names: str) -> None:
        """SIGKILL its driver, and then processes of these names."""
        self.driver.kill()
        self.driver.wait()
        for name in names:
            os.kill(self.pids[name], signal.SIGKILL)
        wait_until(lambda: not any(lives(self.pids[name]) for name in names))

    def found(self) -> dict[str, Leftover]:
        """What is listed of this run: name of a process, `segment` or `folder` -> the line's content."""
        ours = {str(pid): name for name, pid in self.pids.items()}
        ours |= {str(self.segment): "segment", str(self.folder): "folder"}
        return {ours[item.name]: item for item in find() if item.name in ours}

    @property
    def whole(self) -> bool:
        return all(map(lives, self.pids.values())) and self.segment.exists() and self.folder.is_dir()

    def clear(self) -> None:
        self.driver.kill()
        self.driver.wait()
        for pid in filter(lives, self.pids.values()):
            os.kill(pid, signal.SIGKILL)
        self.segment.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def start() -> Iterator[Callable[[str], FakeRun]]:
    runs: list[FakeRun] = []

    def run(name: str) -> FakeRun:
        runs.append(FakeRun(name))
        return runs[-1]

    yield run
    for made in runs:
        made.clear()


def test_f40_what_a_killed_run_left_is_listed_and_goes_and_a_living_run_is_untouched(
    start: Callable[[str], FakeRun],
) -> None:
    dead, living = start("/runs/dead"), start("/runs/living")
    assert not dead.found() and not living.found()
    dead.end("engine")
    found = dead.found()
    assert found.keys() == {"forked", "started", "segment", "folder"} and not living.found()
    assert {found[name].run for name in ("forked", "started", "folder")} == {"/runs/dead"}
    assert found["forked"].why == f"driver {dead.driver.pid} ended"
    assert found["started"].why == f"engine process {dead.pids['engine']} ended"
    assert (found["segment"].size, found["folder"].size) == (5000, 3000)
    looked = draftmill("cleanup")
    assert looked.returncode == 0
    for name in (str(dead.pids["forked"]), str(dead.pids["started"]), str(dead.segment), str(dead.folder)):
        assert name in looked.stdout
    assert "run /runs/dead" in looked.stdout and "`draftmill cleanup --kill`" in looked.stdout
    assert "/runs/living" not in looked.stdout
    assert lives(dead.pids["forked"]) and dead.segment.exists() and dead.folder.is_dir()

    ended = draftmill("cleanup", "--kill", timeout=30)
    assert ended.returncode == 0, ended.stderr
    wait_until(lambda: not lives(dead.pids["forked"]) and not lives(dead.pids["started"]), 10)
    assert not dead.segment.exists() and not dead.folder.exists()
    assert living.whole and not dead.found()


def test_an_engine_that_outlived_its_driver_is_left_with_all_it_started(start: Callable[[str], FakeRun]) -> None:
    run = start("/runs/orphan")
    run.end()
    assert run.found().keys() == {"engine", "forked", "started", "segment", "folder"}
    cleanup(kill=True)
    wait_until(lambda: not any(map(lives, run.pids.values())), 10)
    assert not run.segment.exists() and not run.folder.exists()


def test_memory_that_somebody_else_holds_too_stays(start: Callable[[str], FakeRun]) -> None:
    run = start("/runs/shared")
    with run.segment.open("rb"):
        run.end("engine")
        assert run.found().keys() == {"forked", "started", "folder"}
        cleanup(kill=True)
        assert run.segment.exists()


def test_marks_that_cannot_be_judged_are_left_alone() -> None:
    """A driver of another host, an engine of another process namespace, and no mark at all."""
    with subprocess.Popen(["true"]) as gone:
        tag = warden.owner_tag(gone.pid)
    other = {warden.DRIVER: f"0123abcd.{tag}", warden.OWNER: "1-2-3"}
    unmarked = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTMILL_")}
    for environment in ({**unmarked, **other}, unmarked):
        with subprocess.Popen(["sleep", "60"], env=environment) as process:
            try:
                wait_until(lambda p=process: b"sleep" in Path(f"/proc/{p.pid}/cmdline").read_bytes())
                assert str(process.pid) not in {item.name for item in find()}
                warden.end_left(process.pid)
                time.sleep(0.2)
                assert process.poll() is None
            finally:
                process.kill()


def test_what_cannot_be_ended_is_a_sentence(monkeypatch: pytest.MonkeyPatch, start: Callable[[str], FakeRun]) -> None:
    run = start("/runs/foreign")
    run.end("engine")

    def refused(pid: int) -> None:
        raise PermissionError

    monkeypatch.setattr("app.cleanup.end_left", refused)
    monkeypatch.setattr("app.cleanup._PATIENCE_S", 0.2)
    with pytest.raises(
        UserError, match=rf"could not be removed \(.*process {run.pids['forked']}.*run the same command"
    ):
        cleanup(kill=True)


@pytest.mark.cluster
def test_what_ray_runs_for_a_driver_carries_its_run_and_ends_with_it(tiny: Path, tmp_path: Path) -> None:
    left, run = tmp_path / "left", tmp_path / "run"
    config = tiny_config(
        tiny, run, write_rows(tmp_path / "r.jsonl", prompts(60)), generate__parts_in_flight=1,
        generate__engine_args={"STUB_DELAY": 1.0, "STUB_CHILD": "fork", "STUB_LEFT": str(left)},
    )  # fmt: skip
    path = save_config(config, tmp_path / "c.yaml")
    command = [sys.executable, "-m", "app", "generate", str(path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as driver:
        try:
            wait_until(lambda: len(list((run / PARTS).glob("*.json"))) >= 1, 120)
            engine, child, folder = left.read_text().split()[:3]
            for pid in (int(engine), int(child)):
                marks = warden.marks_of(pid)
                assert marks.run == str(run) and marks.outlived is None
                assert str(marks.driver).endswith(warden.owner_tag(driver.pid))
            assert not {item.name for item in find()} & {engine, child, folder}
        finally:
            driver.kill()
    cleanup(kill=True)
    wait_until(lambda: not lives(int(engine)) and not lives(int(child)) and not Path(folder).exists(), 10)
    assert not [item for item in find() if item.run == str(run)]
