"""Nothing of an engine outlives the process that held it: its child processes, its folders of states.

`guard` starts a small process beside an engine's, which waits for the engine's process to end, however it ends, and
then kills what it left. What a guard that died itself has missed goes with the next `sweep` on the host.
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
from pathlib import Path

from app.lease import process_start

OWNER = "DRAFTMILL_ENGINE_OWNER"  # in the environment of what an engine starts
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


def _has_ended(tag: str) -> bool:
    """Whether the owner is gone for certain; one of another namespace cannot be seen, and counts as living."""
    namespace, _, rest = tag.partition("-")
    pid, _, start = rest.partition("-")
    return namespace == _namespace() and pid.isdigit() and process_start(int(pid)) != start


def guard() -> None:
    """Mark what this process starts from now on as its own, and start its guard."""
    global _mark
    if _mark is not None or not Path("/proc/self/ns").exists():
        return
    _mark = os.pipe()
    inode = os.fstat(_mark[0]).st_ino
    environment = {k: v for k, v in os.environ.items() if k != OWNER} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "app.engine.warden", str(os.getpid()), str(inode)]
    nothing = subprocess.DEVNULL
    subprocess.run(command, env=environment, stdin=nothing, stdout=nothing, start_new_session=True, check=False)
    os.environ[OWNER] = owner_tag()


def sweep() -> int:
    """Kill processes and delete folders of states whose owner on this host has ended; returns their number."""
    count = 0
    for pid, tag in _marked():
        if _has_ended(tag):
            count += _kill(pid)
    for root in {"/dev/shm", tempfile.gettempdir()}:
        for folder in Path(root).glob(f"{STATES_FOLDER}*-*"):
            if _has_ended(folder.name.removeprefix(STATES_FOLDER).rpartition("-")[0]):
                shutil.rmtree(folder, ignore_errors=True)
                count += 1
    return count


def _processes() -> Iterator[Path]:
    """Folders in /proc of the processes we may look into, this one left out."""
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name != str(os.getpid()):
            yield folder


def _marked() -> Iterator[tuple[int, str]]:
    """(pid, owner) of every process that carries an owner in its environment."""
    start = f"{OWNER}=".encode()
    for folder in _processes():
        with contextlib.suppress(OSError):
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(start):
                    yield int(folder.name), entry.removeprefix(start).decode()


def _forked(inode: int) -> Iterator[int]:
    """Processes that hold the pipe: forked from the engine's, so that their environment is that of its start."""
    for folder in _processes():
        with contextlib.suppress(OSError):
            for fd in (folder / "fd").iterdir():
                if os.readlink(fd) == f"pipe:[{inode}]":
                    yield int(folder.name)
                    break


def _kill(pid: int) -> int:
    """SIGKILL; Python's resource tracker is left to delete the shared memory of the dead, and ends by itself."""
    with contextlib.suppress(OSError):
        if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            return 1
    return 0


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
