"""Nothing of an engine outlives the process that held it: its child processes, its folders of states.

`guard` starts a small process beside an engine's, which waits for the engine's process to end, however it ends, and
then kills what it left. What a guard that died itself has missed goes with the next `sweep` on the host, and with
`draftmill cleanup`, which also knows what outlived its driver.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.lease import process_start

OWNER = "DRAFTMILL_ENGINE_OWNER"  # in the environment of what an engine starts
DRIVER = "DRAFTMILL_DRIVER"  # in the environment of what a driver starts: its host, a dot, and its owner tag
RUN = "DRAFTMILL_RUN"  # beside it: the run folder
STATES_FOLDER = "draftmill-states-"  # then the owner, a dash and something unique
_PATIENCE_S = 10.0  # how long the guard looks for children that are just being started
_mark: tuple[int, int] | None = None  # both ends of the pipe that forked children inherit


def owner_tag(pid: int | None = None) -> str:
    """Names a process for good: its namespace, id and start. The id alone would be used again."""
    pid = os.getpid() if pid is None else pid
    return f"{_namespace()}-{pid}-{process_start(pid)}"


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return "".join(c for c in os.readlink("/proc/self/ns/pid") if c.isdigit())
    return "0"


def has_ended(tag: str) -> bool:
    """Whether the owner is gone for certain; one of another namespace cannot be seen, and counts as living."""
    namespace, _, rest = tag.partition("-")
    pid, _, start = rest.partition("-")
    return namespace == _namespace() and pid.isdigit() and process_start(int(pid)) != start


@dataclass(frozen=True)
class Marks:
    """What a process carries in its environment of those it belongs to; None where it carries nothing."""

    engine: str | None = None  # owner tag of the engine's process
    driver: str | None = None  # host and owner tag of the driver
    run: str | None = None  # folder of the run

    @property
    def outlived(self) -> str | None:
        """The one who has ended, in words; None where all that can be seen are living."""
        if self.engine is not None and has_ended(self.engine):
            return f"engine process {pid_of(self.engine)} ended"
        if self.driver is not None:
            host, _, tag = self.driver.partition(".")
            if host == _host() and has_ended(tag):  # a driver of another host cannot be seen from here
                return f"driver {pid_of(tag)} ended"
        return None


def pid_of(tag: str) -> str:
    """The process id in an owner tag."""
    return tag.split("-")[1] if tag.count("-") >= 2 else "?"


def _host() -> str:
    """This boot of this host: process namespaces have the same number on every host."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return "0"


@contextlib.contextmanager
def driving(run: str) -> Iterator[None]:
    """Mark what this process starts meanwhile, Ray's workers included, as belonging to it and to the run `run`."""
    before = {name: os.environ.get(name) for name in (DRIVER, RUN)}
    os.environ.update({DRIVER: f"{_host()}.{owner_tag()}", RUN: run})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def guard() -> None:
    """Mark what this process starts from now on as its own, and start its guard."""
    global _mark
    if _mark is not None or not Path("/proc/self/ns").exists():
        return
    _mark = os.pipe()
    inode = os.fstat(_mark[0]).st_ino
    ours = (OWNER, DRIVER, RUN)  # not the guard's: nobody but itself ends it
    environment = {k: v for k, v in os.environ.items() if k not in ours} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "app.engine.warden", str(os.getpid()), str(inode)]
    nothing = subprocess.DEVNULL
    subprocess.run(command, env=environment, stdin=nothing, stdout=nothing, start_new_session=True, check=False)
    os.environ[OWNER] = owner_tag()


def sweep() -> int:
    """Kill processes and delete folders of states whose engine on this host has ended; returns their number."""
    count = 0
    for pid, marks in marked():
        if marks.engine is not None and has_ended(marks.engine):
            count += _kill(pid)
    for folder, tag in state_folders():
        if has_ended(tag):
            shutil.rmtree(folder, ignore_errors=True)
            count += 1
    return count


def state_folders() -> Iterator[tuple[Path, str]]:
    """Folders of states on this host, each with the owner tag of its engine."""
    for root in sorted({"/dev/shm", tempfile.gettempdir()}):
        for folder in Path(root).glob(f"{STATES_FOLDER}*-*"):
            yield folder, folder.name.removeprefix(STATES_FOLDER).rpartition("-")[0]


def processes_left() -> Iterator[tuple[int, Marks]]:
    """Processes on this host that outlived their engine or their driver."""
    for pid, marks in marked():
        if marks.outlived is not None and not _is_tracker(pid):
            yield pid, marks


def end_left(pid: int) -> None:
    """SIGKILL process `pid` if it still is one that outlived its owner, and not another that got its number.

    Raises:
        PermissionError: it belongs to another user.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if marks_of(pid).outlived is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os.close(process)


def _processes() -> Iterator[Path]:
    """Folders in /proc of the processes we may look into, this one left out."""
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name != str(os.getpid()):
            yield folder


def marked() -> Iterator[tuple[int, Marks]]:
    """Every process that carries marks of ours, this one left out."""
    for folder in _processes():
        marks = marks_of(int(folder.name))
        if marks != Marks():
            yield int(folder.name), marks


def marks_of(pid: int) -> Marks:
    """The marks in a process's environment; none where it is gone or another user's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return Marks()
    found = dict(e.decode(errors="replace").split("=", 1) for e in entries if e.startswith(b"DRAFTMILL_") and b"=" in e)
    return Marks(found.get(OWNER), found.get(DRIVER), found.get(RUN))


def _forked(inode: int) -> Iterator[int]:
    """Processes that hold the pipe: forked from the engine's, so that their environment is that of its start."""
    for folder in _processes():
        with contextlib.suppress(OSError):
            for fd in (folder / "fd").iterdir():
                if os.readlink(fd) == f"pipe:[{inode}]":
                    yield int(folder.name)
                    break


def _kill(pid: int) -> int:
    """SIGKILL, except of a resource tracker."""
    with contextlib.suppress(OSError):
        if not _is_tracker(pid):
            os.kill(pid, signal.SIGKILL)
            return 1
    return 0


def _is_tracker(pid: int) -> bool:
    """Whether it is Python's resource tracker: it deletes the shared memory of the dead, and ends by itself."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _watch(pid: int, inode: int) -> None:
    """Wait for process `pid` to end, then remove what it left."""
    try:
        waiting = os.pidfd_open(pid)
    except ProcessLookupError:
        waiting = None
    if waiting is not None:
        select.select([waiting], [], [])
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        left = sum([_kill(p) for p in _forked(inode)]) + sweep()
        if left == 0:
            return
        time.sleep(0.2)


def main() -> None:
    """`python -m app.engine.warden PID INODE`: the guard, detached so that nothing ends it with its starter."""
    pid, inode = int(sys.argv[1]), int(sys.argv[2])
    if os.fork() == 0:
        _watch(pid, inode)


if __name__ == "__main__":
    main()
