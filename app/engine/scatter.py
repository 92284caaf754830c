"""Many copies of memory at once, without the interpreter's lock."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_LARGE = 2**18  # bytes: copied by a call of its own
_THREADS = 4
_MOST = 1024  # copies that the system takes in one call (IOV_MAX)

_libc = ctypes.CDLL(None)  # its functions run without the interpreter's lock
_memmove = _libc.memmove
_memmove.argtypes, _memmove.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
_writev = getattr(_libc, "process_vm_writev", None)  # Linux: many copies in one call, here within this process
if _writev is not None:
    _writev.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    _writev.restype = ctypes.c_ssize_t


def scatter(moves: Sequence[tuple[int, int, int]]) -> None:
    """Copy pieces of memory, each (to, from, bytes) by addresses in this process, to where they belong.

    Large pieces, of a prefill, are shared among a few threads. Small ones, hundreds in every step of decoding, go in
    one call of the system: a call each would pass the interpreter's lock to and fro hundreds of times a step, and to
    hold it for as long as they all take would stop the engine's thread.
    """
    large = [m for m in moves if m[2] >= _LARGE]
    if len(large) > 1:
        with ThreadPoolExecutor(min(_THREADS, len(large))) as threads:
            list(threads.map(lambda m: _memmove(*m), large))
    elif large:
        _memmove(*large[0])
    small = [m for m in moves if m[2] < _LARGE] if large else moves
    for first in range(0, len(small), _MOST):
        _copy_small(small[first : first + _MOST])


def _copy_small(moves: Sequence[tuple[int, int, int]]) -> None:
    """At most _MOST copies."""
    table = np.array(moves, np.uint64)
    to, source = table[:, ::2].copy(), table[:, 1:].copy()  # (address, bytes) each: the system's struct iovec
    count, wanted = len(moves), int(table[:, 2].sum())
    if _writev is not None and _writev(os.getpid(), source.ctypes.data, count, to.ctypes.data, count, 0) == wanted:
        return
    for move in moves:  # the system does not let us, or did some: again does no harm
        _memmove(*move)
