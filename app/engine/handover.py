"""States of finished requests from a worker in another process: one file of shared memory each, mapped by both.

The worker files the rows of a request in a file of a folder that both know. When the request has ended the file gets
the request's name beside its own; the engine's side maps it and removes that name. Nothing is copied while there is
room, and no call has to cross: a name that appears is whole.

Files are used again. Memory fresh from the system is zeroed and faulted in page by page, which would stop the worker
for a gigabyte at a time where hundreds of requests grow in step. So the worker keeps its files mapped, and takes one
that was given back for the next request. The last page of a file says what its size no longer does, as 64-bit words:

    whose it is (0: the worker's, 1: the receiver's) | bytes that count | bytes of files that nobody uses

The receiver writes the first word when nothing refers to its rows any more, and touches the file no more after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.engine.host_memory import block_size, host_memory
from app.nodes import SHARED_LEAST

_OWN = ".rows-"  # names of the files themselves
_FAULT = ".error"  # why the states of a request are missing
_WORKERS, _RECEIVERS = 0, 1  # whose a file is
_PAGE = mmap.PAGESIZE
_STEP = 2**18  # bytes reserved at a time by the thread that files rows
_AHEAD_STEP = 2**20  # and by the one that goes ahead
_POLL_S = 0.002
_SHARE = 0.5  # of the folder's file system that stays free for rows of requests under way
_PLENTY = 0.75  # of it free: room to reserve whole files ahead of need
_IDLE_SHARE = 0.25  # of it, and SHARED_LEAST at most, in files that nobody uses
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE (Linux 5.14), which the mmap module does not name
_numbers = itertools.count()
_to_unmap: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()  # addresses and sizes; a finaliser may put
_unmapping = 0  # the process whose thread unmaps

_libc = ctypes.CDLL(None, use_errno=True)  # its functions run without the interpreter's lock
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A file of rows in memory. Unlike Python's mmap it keeps no descriptor open, of which hundreds would be needed,
    and it is unmapped without the interpreter's lock.

    Arrays and tensors on `array` keep it; with the last of them it goes.
    """

    def __init__(self, file: int, size: int) -> None:
        address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
        if address in (None, _FAILED):
            number = ctypes.get_errno()
            raise OSError(number, f"{size} bytes of states cannot be mapped: {os.strerror(number)}")
        self.address: int = address
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        self.words = (ctypes.c_int64 * 3).from_address(address + size - _PAGE)  # for as long as this object lives

    @property
    def array(self) -> np.ndarray:
        """[bytes] uint8, the last page included."""
        return np.asarray(self)


def _release(address: int, size: int, owner: int, give_back: bool) -> None:
    """Unmap a file; hand it back to the worker before, as the last touch."""
    if os.getpid() != owner:  # forked: the original is still in use
        return
    if give_back:
        ctypes.c_int64.from_address(address + size - _PAGE).value = _WORKERS
    _to_unmap.put((address, size))


def _unmap() -> None:
    while True:
        _munmap(*_to_unmap.get())


def _start_unmapping() -> None:
    """Mappings go in a thread of their own: a part lets go of a gigabyte at once, and whoever drops the last reference
    would wait for it."""
    global _unmapping
    if _unmapping != os.getpid():
        _unmapping = os.getpid()
        threading.Thread(target=_unmap, name="draftmill-unmap", daemon=True).start()


def _map(file: int, size: int, give_back: bool = False) -> _Mapping:
    _start_unmapping()
    mapping = _Mapping(file, size)
    weakref.finalize(mapping, _release, mapping.address, size, os.getpid(), give_back).atexit = False
    return mapping


class SharedRows:
    """The worker's end of one file: memory for the rows of a request after the other.

    Args:
        folder: where the files are.
        capacity: bytes it may hold; only what is reserved takes memory.
        make_room: gives memory of the folder up, and says whether it could.
    """

    def __init__(self, folder: str, capacity: int, make_room: Callable[[], bool] = lambda: False) -> None:
        self.capacity = -(-max(1, capacity) // _PAGE) * _PAGE
        self.reserved = self._needed = 0  # bytes that take memory, and those that rows lie in
        self._make_room = make_room
        self._lock = threading.Lock()  # of `reserved`: two threads extend it
        self._under_way = True
        self._path = Path(folder, f"{_OWN}{os.getpid()}-{next(_numbers)}")
        file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.ftruncate(file, self.capacity + _PAGE)
            self._with_room(lambda: os.posix_fallocate(file, self.capacity, _PAGE))
            self._mapping = _map(file, self.capacity + _PAGE)
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        self.memory = self._mapping.array[: self.capacity]

    def _with_room(self, reserve: Callable[[], None]) -> None:
        """Call `reserve`, and again while it lacks room and some can be made."""
        while True:
            try:
                return reserve()
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._make_room():
                    raise

    def reserve(self, size: int) -> None:
        """Make sure of the first `size` bytes.

        Raises:
            OSError: there is no room; without this the process would be killed as it writes.
        """
        self._needed = max(self._needed, size)
        if size > self.reserved:
            self._with_room(lambda: self._extend(max(size, self.reserved + _STEP)))

    def reserve_ahead(self) -> bool:
        """Reserve some more, and map it, so that the first write finds its page; whether more can follow."""
        before = self.reserved
        with contextlib.suppress(OSError):  # the thread that needs it will say so
            self._extend(before + _AHEAD_STEP, populate=True)
        return before < self.reserved < self.capacity

    def _extend(self, upto: int, populate: bool = False) -> None:
        with self._lock:
            size = min(self.capacity, upto) - self.reserved
            if size <= 0 or not self._under_way:
                return
            file = os.open(self._path, os.O_RDWR)
            try:
                os.posix_fallocate(file, self.reserved, size)
            finally:
                os.close(file)
            if populate:
                first = self.reserved // _PAGE * _PAGE
                _madvise(self._mapping.address + first, self.reserved + size - first, _POPULATE_WRITE)
            self.reserved += size

    def trim(self) -> bool:
        """Give up what is reserved beyond the rows; whether it was anything."""
        with self._lock:
            first = -(-self._needed // _PAGE) * _PAGE
            size = self.reserved - first
            if size <= 0 or _madvise(self._mapping.address + first, -(-size // _PAGE) * _PAGE, mmap.MADV_REMOVE):
                return False
            self.reserved = first
            return True

    def begin(self) -> None:
        """The next request starts."""
        self._needed, self._under_way = 0, True

    def end(self) -> None:
        """No more is reserved until the next request."""
        with self._lock:
            self._under_way = False

    def publish(self, folder: str, key: str, size: int, idle: int) -> None:
        """Give the first `size` bytes the name of request `key`, too."""
        self._mapping.words[:] = [_RECEIVERS, size, idle]
        os.link(self._path, Path(folder, key))

    @property
    def given_back(self) -> bool:
        """Whether the receiver has let go of it."""
        return self._mapping.words[0] == _WORKERS

    def give_up(self) -> None:
        """Free the memory and the name."""
        # At once, though the receiver may be about to unmap it: it touches it no more.
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self._path, 0)
            self._path.unlink()


class SharedPool:
    """The files of one worker: of requests under way, with the receiver, and free. Used by one thread at a time.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        about = os.statvfs(folder)
        self._most_idle = min(SHARED_LEAST, int(about.f_blocks * about.f_frsize * _IDLE_SHARE))  # bytes
        self._under_way: set[SharedRows] = set()
        self._handed: list[SharedRows] = []
        self._free: deque[SharedRows] = deque()  # what came back first is first
        self._idle = 0  # bytes reserved in `_free`
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="draftmill-reserve")

    def take(self, size: int) -> SharedRows:
        """A file for a request of up to `size` bytes: the smallest free one that holds them, else a new one."""
        rows = self._fitting(size)
        if rows is None:
            self._collect()
            rows = self._fitting(size)
        if rows is None:
            rows = SharedRows(self.folder, block_size(max(size, _PAGE)), self._make_room)
        else:
            self._free.remove(rows)
            self._idle -= rows.reserved
            rows.begin()
        self._under_way.add(rows)
        if rows.reserved < rows.capacity:
            self._ahead.submit(self._reserve_ahead, rows)
        return rows

    def _fitting(self, size: int) -> SharedRows | None:
        return min((r for r in self._free if r.capacity >= size), key=lambda r: r.capacity, default=None)

    def _reserve_ahead(self, rows: SharedRows) -> None:
        """In turns, a little of every file at a time: requests that started together grow together."""
        if _has_room(self.folder, self._idle, _PLENTY) and rows.reserve_ahead():
            self._ahead.submit(self._reserve_ahead, rows)

    def publish(self, rows: SharedRows, key: str, size: int) -> None:
        """Hand the first `size` bytes of `rows` over under the name of request `key`."""
        rows.end()
        self._under_way.discard(rows)
        self._collect()
        if not _has_room(self.folder, self._idle):
            rows.trim()
        rows.publish(self.folder, key, size, self._idle)
        self._handed.append(rows)

    def discard(self, rows: SharedRows) -> None:
        """The rows of a request are of no use."""
        rows.end()
        self._under_way.discard(rows)
        self._keep([rows])

    def _collect(self) -> None:
        """Take back what the receiver has let go of."""
        seen = [(rows, rows.given_back) for rows in self._handed]  # asked once: it may change in between
        back = [rows for rows, given_back in seen if given_back]
        if back:
            self._handed = [rows for rows, given_back in seen if not given_back]
            self._keep(back)

    def _keep(self, back: list[SharedRows]) -> None:
        self._free.extend(back)
        self._idle += sum(rows.reserved for rows in back)
        while self._idle > self._most_idle:
            self._give_up()

    def _give_up(self) -> None:
        rows = self._free.popleft()
        self._idle -= rows.reserved
        rows.give_up()

    def _make_room(self) -> bool:
        """Give up a free file; where there is none, what requests under way have more than they need."""
        self._collect()
        if self._free:
            self._give_up()
            return True
        return any([rows.trim() for rows in self._under_way])


def publish_fault(folder: str, key: str, why: str) -> None:
    """Say why the states of request `key` are missing."""
    scratch = Path(folder, f"{_OWN}{key}{_FAULT}")
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
        OSError: they cannot be mapped.
    """
    path, fault = Path(folder, key), Path(folder, key + _FAULT)
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if fault.exists():
            raise LookupError(fault.read_text())
        if ended() or time.monotonic() > deadline:
            raise LookupError(f"request {key}: no states came from the worker within {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    mapping = _receive_file(path)
    row = int(np.prod(shape)) * dtype.itemsize
    _, size, idle = mapping.words
    if size < count * row:
        raise LookupError(f"request {key}: {size // row} of {count} positions were captured")
    rows = torch.from_numpy(mapping.array[: count * row]).view(dtype).view(count, *shape)
    # Rows wait in memory until their part is committed: here while there is room, so that new ones find theirs.
    return rows if _has_room(folder, idle) else host_memory.empty(tuple(rows.shape), dtype).copy_(rows)


def _receive_file(path: Path) -> _Mapping:
    """What the worker named `path`; it goes back to the worker with the last reference to it."""
    file = os.open(path, os.O_RDWR)
    try:
        path.unlink()
        return _map(file, os.fstat(file).st_size, give_back=True)
    finally:
        os.close(file)


def _has_room(folder: str, idle: int, share: float = _SHARE) -> bool:
    """Whether more than `share` of the file system is free, or held by files that nobody uses, `idle` bytes."""
    about = os.statvfs(folder)
    return about.f_bavail + idle / about.f_frsize > about.f_blocks * share


def drop(folder: str, key: str) -> bool:
    """Give back what the worker named of a request that nobody waits for; whether it was there."""
    with contextlib.suppress(FileNotFoundError):
        _receive_file(Path(folder, key))
        return True
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, key + _FAULT))
        return True
    return False
