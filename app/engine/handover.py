"""States of finished requests from a worker in another process: one file of shared memory each, mapped by both.

The worker files the rows of a request in a file of a folder that both know. When the request has ended it cuts the file
to its rows and gives it the request's name; the engine's side maps it and removes the name. Nothing is copied while
there is room, and no call has to cross: a name that appears is whole.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.engine.host_memory import host_memory

_UNNAMED = ".rows-"  # of requests under way
_FAULT = ".error"  # why the states of a request are missing
_STEP = 4 * 2**20  # bytes asked of the system at a time
_POLL_S = 0.002
_SHARE = 0.5  # of the folder's file system that stays free for rows of requests under way
_numbers = itertools.count()


class SharedRows:
    """Memory for the rows of one request, in a file without a name of its own yet.

    Args:
        folder: where the files are.
        capacity: bytes it may grow to; only what is reserved takes memory.
    """

    def __init__(self, folder: str, capacity: int) -> None:
        self._path = Path(folder, f"{_UNNAMED}{os.getpid()}-{next(_numbers)}")
        self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        self.capacity, self._reserved = max(1, capacity), 0
        os.ftruncate(self._file, self.capacity)
        self.memory = np.frombuffer(mmap.mmap(self._file, self.capacity), np.uint8)

    def reserve(self, size: int) -> None:
        """Make sure of the first `size` bytes.

        Raises:
            OSError: there is no room; without this the process would be killed as it writes.
        """
        if size > self._reserved:
            upto = min(self.capacity, max(size, self._reserved + _STEP))
            os.posix_fallocate(self._file, self._reserved, upto - self._reserved)
            self._reserved = upto

    def publish(self, folder: str, key: str, size: int) -> None:
        """Give the first `size` bytes the name of request `key`."""
        os.ftruncate(self._file, size)
        self._path.rename(Path(folder, key))
        os.close(self._file)

    def discard(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)


def publish_fault(folder: str, key: str, why: str) -> None:
    """Say why the states of request `key` are missing."""
    scratch = Path(folder, f"{_UNNAMED}{key}{_FAULT}")
    scratch.write_text(why)
    scratch.rename(Path(folder, key + _FAULT))


def receive(
    folder: str, key: str, count: int, shape: tuple[int, ...], dtype: torch.dtype, ended: Callable[[], bool],
    timeout_s: float = 120.0,
) -> Tensor:  # fmt: skip
    """Rows 0..count-1 of request `key`, [count, *shape]; waits until the worker names them.

    Args:
        ended: whether the worker is known to be gone.

    Raises:
        LookupError: the worker says they are missing, they are fewer, or none came.
    """
    path, fault = Path(folder, key), Path(folder, key + _FAULT)
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if fault.exists():
            raise LookupError(fault.read_text())
        if ended() or time.monotonic() > deadline:
            raise LookupError(f"request {key}: no states came from the worker within {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    with open(path, "r+b") as file:
        path.unlink()
        row = int(np.prod(shape)) * dtype.itemsize
        size = os.fstat(file.fileno()).st_size
        if size < count * row:
            raise LookupError(f"request {key}: {size // row} of {count} positions were captured")
        mapped = mmap.mmap(file.fileno(), size)
    rows = torch.from_numpy(np.frombuffer(mapped, np.uint8)[: count * row]).view(dtype).view(count, *shape)
    # Rows wait in memory until their part is committed: here while there is room, so that new ones find theirs.
    return rows if _has_room(folder) else host_memory.empty(tuple(rows.shape), dtype).copy_(rows)


def _has_room(folder: str) -> bool:
    about = os.statvfs(folder)
    return about.f_bavail > about.f_blocks * _SHARE


def drop(folder: str, key: str) -> bool:
    """Remove what the worker named of a request that nobody waits for; whether it was there."""
    for name in (key, key + _FAULT):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
            return True
    return False
