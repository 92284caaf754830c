"""Host memory for hidden states, recycled: blocks of tensors that were dropped serve the next requests.

A request's states are tens of megabytes. Memory fresh from the system is faulted in page by page, which costs
more than copying the states into it, and giving it back takes milliseconds with the interpreter's lock held.
"""

from __future__ import annotations

import math
import os
import threading
import weakref

import numpy
import torch
from torch import Tensor

_SMALL = 2**20  # bytes; the allocator recycles less by itself
_LARGEST_IDLE = 32 * 2**30  # bytes, and at most this share of the host's memory:
_IDLE_SHARE = 1 / 8


class HostMemory:
    """Gives out uninitialised CPU tensors and takes their memory back when nothing refers to it any more.

    Args:
        idle_bytes: how much memory nobody uses is kept.
    """

    def __init__(self, idle_bytes: int) -> None:
        self.idle_bytes = idle_bytes
        self._idle = 0
        self._free: dict[int, list[numpy.ndarray]] = {}
        self._lock = threading.RLock()  # a collection inside `empty` may drop a tensor of ours

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor whose storage has exactly the bytes of its shape."""
        size = math.prod(shape) * dtype.itemsize
        if size < _SMALL:
            return torch.empty(shape, dtype=dtype)
        whole = block_size(size)
        with self._lock:
            blocks = self._free.get(whole)
            block = blocks.pop() if blocks else None
            if block is not None:
                self._idle -= whole
        if block is None:
            block = numpy.empty(whole, dtype=numpy.uint8)
        # The storage holds this very array, so it lives as long as any tensor on the storage.
        handle = block[:size]
        weakref.finalize(handle, self._take_back, block).atexit = False
        return torch.from_numpy(handle).view(dtype).view(shape)

    def _take_back(self, block: numpy.ndarray) -> None:
        with self._lock:
            if self._idle + block.nbytes <= self.idle_bytes:
                self._idle += block.nbytes
                self._free.setdefault(block.nbytes, []).append(block)


def block_size(size: int) -> int:
    """`size` rounded up, by an eighth at most, so that requests of similar length share blocks."""
    step = 1 << (size.bit_length() - 4)
    return -(-size // step) * step


def _idle_bytes() -> int:
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_LARGEST_IDLE, int(host * _IDLE_SHARE))


host_memory = HostMemory(_idle_bytes())
