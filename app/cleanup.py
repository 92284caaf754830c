"""Cleanup: what runs that ended left on this host, by process and folder, and how it goes.

A process is left when it carries the mark of an engine or a driver of this host that has ended (app/engine/warden.py);
shared memory is left when such processes alone hold it, a folder of states when the engine it is named after has ended.
What a living run holds, what another host's run holds, and what carries no mark of ours is never listed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from app.engine.warden import end_left, has_ended, owner_tag, pid_of, processes_left, state_folders
from app.errors import UserError
from app.nodes import SHARED

_PATIENCE_S = 10.0  # a killed process that holds much memory takes a while to end


@dataclass(frozen=True)
class Leftover:
    """Something whose owner has ended."""

    kind: str  # process | memory | states
    name: str  # process id, or path
    size: int  # bytes in memory or on the disk
    why: str
    run: str | None = None  # folder of the run, where it is known
    what: str = ""  # of a process: how it was called


def cleanup(kill: bool) -> list[str]:
    """Lines that say what ended runs left on this host; with `kill` it is ended and removed.

    Raises:
        UserError: something could not be ended or removed.
    """
    found = find()
    if not found:
        return ["nothing is left on this host of runs that ended"]
    lines = [line for item in found for line in _lines(item)]
    if not kill:
        return [*lines, "", f"{_count(found)} can go: `draftmill cleanup --kill` ends and removes exactly these"]
    if stays := _remove(found):
        names = ", ".join(f"{item.kind} {item.name}" for item in stays)
        raise UserError(
            f"{len(stays)} of {_count(found)} could not be removed ({names}); run the same command as"
            " the user they belong to"
        )
    return [*lines, "", f"{_count(found)} ended or removed"]


def find() -> list[Leftover]:
    """What is left now."""
    left = dict(processes_left())
    processes = [
        Leftover("process", str(pid), _resident(pid), marks.outlived or "", marks.run, _command(pid))
        for pid, marks in sorted(left.items())
    ]
    ending = {owner_tag(pid): marks.run for pid, marks in left.items()}
    runs = {marks.engine: marks.run for marks in left.values()} | ending
    memory = [
        Leftover("memory", path, _size(Path(path)), f"held by {', '.join(map(str, pids))} alone")
        for path, pids in sorted(_segments(set(left)).items())
    ]
    states = [
        Leftover("states", str(folder), _size(folder), f"of engine process {pid_of(tag)}", runs.get(tag))
        for folder, tag in sorted(state_folders())
        if has_ended(tag) or tag in ending
    ]
    return [*processes, *memory, *states]


def _remove(found: list[Leftover]) -> list[Leftover]:
    """End and remove `found`; returns what is still there."""
    for item in found:
        if item.kind == "process":
            with contextlib.suppress(PermissionError):
                end_left(int(item.name))
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        living = {str(pid) for pid, _ in processes_left()}
        stays = [item for item in found if item.kind == "process" and item.name in living]
        if not stays or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for item in found:
        path = Path(item.name)
        if item.kind == "states":
            shutil.rmtree(path, ignore_errors=True)
        elif item.kind == "memory" and not _holders({item.name}):  # a resource tracker may have been first
            with contextlib.suppress(OSError):
                path.unlink()
    return stays + [item for item in found if item.kind != "process" and Path(item.name).exists()]


def _segments(pids: set[int]) -> dict[str, list[int]]:
    """Files in shared memory that processes `pids` hold and no other does, with who holds them."""
    held = {path for pid in pids for path in _shared_files(pid)}
    holders = _holders(held)
    return {path: sorted(holders[path]) for path in held if holders.get(path) and holders[path] <= pids}


def _holders(paths: set[str]) -> dict[str, set[int]]:
    """Path -> ids of the processes that hold it, as far as they may be looked into."""
    found: dict[str, set[int]] = {}
    if paths:
        for folder in Path("/proc").glob("[0-9]*"):
            for path in _shared_files(int(folder.name)) & paths:
                found.setdefault(path, set()).add(int(folder.name))
    return found


def _shared_files(pid: int) -> set[str]:
    """Files in shared memory that a process has mapped or open and that still have their name."""
    paths = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            paths.add(line.split(maxsplit=5)[-1])
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                paths.add(os.readlink(entry))
    return {p for p in paths if p.startswith(f"{SHARED}/") and "/draftmill-states-" not in p and os.path.isfile(p)}


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        if path.is_dir():
            return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
        return path.stat().st_size
    return 0


def _resident(pid: int) -> int:
    """Bytes of memory a process has in use."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
        text = " ".join(words)
        return text if len(text) <= 60 else text[:57] + "..."
    return ""


def _lines(item: Leftover) -> list[str]:
    run = f", run {item.run}" if item.run else ""
    line = f"  {item.kind:<8} {item.name:<10} {item.size / 1e6:>9,.1f} MB  {item.why}{run}"
    return [line, f"  {'':<8} {item.what}"] if item.what else [line]


def _count(found: list[Leftover]) -> str:
    return f"{len(found)} thing{'s' if len(found) > 1 else ''}"
