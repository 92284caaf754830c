"""Hidden states of running requests, kept by request and absolute position until they are taken."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.engine.handover import SharedPool, SharedRows, publish_fault
from app.engine.host_memory import host_memory
from app.engine.scatter import scatter
from app.packed import Packing

_GROWTH = 1024  # rows added when a request outgrows the capacity it was opened with


class MissingStates(Exception):
    """Positions of a request were never captured."""


@dataclass(slots=True)  # not frozen: hundreds are made every step, and that would triple the cost
class Piece:
    """Rows `first`..`first + count - 1` of a step's batch are positions start.. of request `key`."""

    key: str
    start: int
    first: int
    count: int
    capacity: int  # positions the request may reach


class _Slot:
    """The rows of one request: position p lies at row p, whatever order and however often it arrives."""

    def __init__(
        self, capacity: int, shape: tuple[int, ...], dtype: torch.dtype, pool: SharedPool | None = None
    ) -> None:
        # Pages of the part no position reaches are not touched: a generous capacity costs little memory.
        self.shared: SharedRows | None = None
        if pool is None:
            self.rows = host_memory.empty((capacity, *shape), dtype)  # [capacity, K, H] or [capacity, bytes]
        else:
            size = capacity * math.prod(shape) * dtype.itemsize
            self.shared = pool.take(size)
            self.rows = torch.from_numpy(self.shared.memory[:size]).view(dtype).view(capacity, *shape)
        self.address, self.capacity = self.rows.data_ptr(), capacity
        self.present = bytearray(capacity)  # 1 where the position has arrived

    def reach(self, end: int, row: int) -> None:
        """Make room for positions up to `end`, of `row` bytes each."""
        if self.shared is not None:
            if end > self.capacity:
                raise MissingStates(f"position {end - 1} of a request that was to have {self.capacity}")
            self.shared.reserve(end * row)
        elif end > self.capacity:
            more = max(end - self.capacity, _GROWTH)
            with torch.inference_mode(False):
                self.rows = torch.cat([self.rows, self.rows.new_empty((more, *self.rows.shape[1:]))])
            self.address, self.capacity = self.rows.data_ptr(), self.capacity + more
            self.present.extend(bytes(more))

    def missing(self, count: int) -> str | None:
        """The positions of 0..count-1 that never arrived, in words, or None."""
        present = self.present[:count].ljust(count, b"\0")
        if 0 not in present:
            return None
        return f"{present.count(0)} of the positions {present.find(0)}..{present.rfind(0)}"


class CaptureStore:
    """Rows, [K, H] or packed, by (request, position). Written by the worker, taken once per request by the engine.

    A position that is computed again (a preempted request starts over) overwrites itself. Rows that arrive
    after a request was taken are dropped: with asynchronous scheduling one step more may run.

    Args:
        late_rows: rows may arrive after `take`, and `forget` follows for every request.
    """

    def __init__(self, late_rows: bool = True) -> None:
        self._late_rows = late_rows
        self._pool: SharedPool | None = None  # of rows that are handed over to another process when their request ends
        self._slots: dict[str, _Slot] = {}
        self._taken: set[str] = set()
        self._held: dict[str, bool] = {}  # to be taken; whether the engine has reported their end already
        self._changed = threading.Condition()
        self._pending = 0  # pieces announced and not written yet
        self._fault: BaseException | None = None

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def folder(self) -> str | None:
        """Where rows are handed over to another process; None: they are taken in this one."""
        return None if self._pool is None else self._pool.folder

    def hand_over_in(self, folder: str | None) -> None:
        """Name the rows of requests that end in `folder` from now on, for another process."""
        self._pool = None if folder is None else SharedPool(folder)

    def announce(self) -> None:
        """A copy is on its way; `settle` follows when its rows are written."""
        with self._changed:
            self._pending += 1

    def settle(self, fault: BaseException | None = None) -> None:
        """A copy announced earlier is written, or failed with `fault`."""
        with self._changed:
            self._pending -= 1
            self._fault = self._fault or fault
            self._changed.notify_all()

    def fail(self, fault: BaseException) -> None:
        """States can be kept no more: whoever takes some is told why."""
        with self._changed:
            self._fault = self._fault or fault
            self._changed.notify_all()

    def write(self, key: str, start: int, piece: Tensor, capacity: int) -> None:
        """Store `piece` [N, K, H] (CPU) as positions start..start+N-1 of request `key`.

        `capacity` is the number of positions the request is expected to reach.
        """
        self.write_batch(piece, [Piece(key, start, 0, piece.shape[0], capacity)])

    def write_batch(self, rows: Tensor, pieces: Sequence[Piece]) -> None:
        """Store the rows of a step's batch, [tokens, K, H] (CPU), that `pieces` describe.

        One call for all of them: at hundreds of requests a step the lock, tensors made for each and each turn of the
        interpreter's lock, which the engine's thread needs as well, would cost more than the copying.
        """
        with self._changed:
            found = [(p, self._slot(p, rows)) for p in pieces if p.key not in self._taken]
        if not found:
            return
        rows = rows.contiguous()
        base, row = rows.data_ptr(), rows[0].nbytes
        for p, slot in found:
            slot.reach(p.start + p.count, row)
        scatter([(s.address + p.start * row, base + p.first * row, p.count * row) for p, s in found])
        for p, slot in found:
            slot.present[p.start : p.start + p.count] = b"\1" * p.count

    def _slot(self, piece: Piece, rows: Tensor) -> _Slot:
        slot = self._slots.get(piece.key)
        if slot is None:
            # Ordinary tensors even inside inference mode: whoever takes them may train on them.
            with torch.inference_mode(False):
                capacity = max(piece.capacity, piece.start + piece.count)
                slot = _Slot(capacity, tuple(rows.shape[1:]), rows.dtype, self._pool)
            self._slots[piece.key] = slot
        return slot

    def hold(self, key: str) -> None:
        """Request `key` will be taken: `forget` must leave its rows.

        Called before the engine's next step, which reports the request as finished; `take` may come much later.
        """
        with self._changed:
            self._held[key] = False

    def take(self, key: str, count: int, timeout_s: float = 60.0) -> Tensor:
        """The rows of positions 0..count-1, [count, K, H]; the request is forgotten.

        Waits for copies that are still under way.

        Raises:
            MissingStates: a position was never captured, or a copy failed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                slot = self._slots.get(key)
                missing = slot.missing(count) if slot is not None else f"all {count} positions"
                if slot is not None and missing is None:
                    break
                if self._fault is not None:
                    raise MissingStates(f"copying hidden states failed: {self._fault}") from self._fault
                if self._pending == 0 or time.monotonic() > deadline:
                    raise MissingStates(f"request {key}: {missing} were not captured")
                self._changed.wait(0.5)
            del self._slots[key]
            ended = self._held.pop(key, False)
            if self._late_rows and not ended:
                self._taken.add(key)
        if slot.rows.shape[0] == count:
            return slot.rows
        # What is kept, pickled or written is no larger than its rows.
        return host_memory.empty((count, *slot.rows.shape[1:]), slot.rows.dtype).copy_(slot.rows[:count])

    def forget(self, key: str) -> None:
        """The engine reports `key` as finished or aborted: hand its rows over where they go to another process, else
        drop what is left of it, unless it is held."""
        with self._changed:
            if key in self._held:
                self._held[key] = True
                return
            slot = self._slots.pop(key, None)
            self._taken.discard(key)
        if slot is not None and self._pool is not None:
            self._publish(key, slot, self._pool)

    def _publish(self, key: str, slot: _Slot, pool: SharedPool) -> None:
        """Name the rows of a request that has ended, aborted ones too: only the engine knows which nobody waits for."""
        assert slot.shared is not None
        count = slot.present.rfind(1) + 1
        missing = slot.missing(count)
        if self._fault is None and missing is None:
            pool.publish(slot.shared, key, count * slot.rows[0].nbytes)
            return
        pool.discard(slot.shared)
        publish_fault(
            pool.folder,
            key,
            f"copying hidden states failed: {self._fault}"
            if self._fault
            else f"request {key}: {missing} were not captured",
        )


@dataclass
class WorkerStores:
    """What a worker process has captured and not handed over yet."""

    states: CaptureStore  # s_a, s_b, s_c, s_n
    embeddings: CaptureStore | None = None  # s_0, while the self-check runs
    gives_embedding: bool = False  # whether the model class yields s_0 at all
    started: bool = False  # the engine is up; what ran before was vLLM's own warm-up
    packing: Packing | None = None  # how a GPU packs `states` from now on; None: as they are


# One worker per process, so one set; a KV connector has no other way to its worker.
_stores = WorkerStores(CaptureStore())


def reset_stores(late_rows: bool = True) -> WorkerStores:
    """Empty stores for a worker that starts in this process."""
    global _stores
    _stores = WorkerStores(CaptureStore(late_rows))
    return _stores


def current_stores() -> WorkerStores:
    """The stores of this process's worker."""
    return _stores


def external_key(request_id: str) -> str:
    """The id the engine gave: newer versions of vLLM append `-<random>` to it, and our ids hold no dash."""
    return request_id.partition("-")[0]


class StoreAccess:
    """Methods a worker gains, for the engine to call through vLLM's `collective_rpc`."""

    rank: int
    vllm_config: Any

    def start_capture(self, folder: str | None = None) -> None:
        """The engine is up: keep states from now on, and name them in `folder` for an engine in another process."""
        _stores.started = True
        _stores.states.hand_over_in(folder)

    def capture_stores(self) -> WorkerStores:
        """The stores themselves, for an engine in the same process."""
        return _stores

    def pack_states(self, codec: str | None, states: int) -> None:
        """Pack the `states` states of a token in `codec` from now on; no request may be under way."""
        _stores.packing = None if codec is None else packing_of(self.vllm_config.model_config, codec, states)

    def check_embeddings(self, on: bool) -> bool:
        """Keep s_0 as well from now on, or stop; False where the model class does not give it."""
        _stores.embeddings = CaptureStore() if on and _stores.gives_embedding else None
        return _stores.gives_embedding

    def take_embeddings(self, key: str, count: int) -> Tensor | None:
        """s_0 of positions 0..count-1, [count, 1, H]; None where none is kept, and on ranks other than the first."""
        if _stores.embeddings is None or self.rank != 0:
            return None
        return _stores.embeddings.take(key, count)


def packing_of(model_config: Any, codec: str, states: int) -> Packing:
    """How `states` states of a token of vLLM's model are packed."""
    return Packing(codec, int(model_config.get_hidden_size()), model_config.dtype, states)
