"""Hidden states of running requests, kept by request and absolute position until they are taken."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.engine.host_memory import host_memory

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

    def __init__(self, capacity: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        # Pages of the part no position reaches are not touched: a generous capacity costs little memory.
        self.rows = host_memory.empty((capacity, *shape), dtype)  # [capacity, K, H]
        self.present = bytearray(capacity)  # 1 where the position has arrived

    def place(self, start: int, count: int) -> Tensor:
        """Where positions start..start+count-1 belong, [count, K, H]; call `arrived` once they are there."""
        end = start + count
        if end > self.rows.shape[0]:
            more = max(end - self.rows.shape[0], _GROWTH)
            self.rows = torch.cat([self.rows, self.rows.new_empty((more, *self.rows.shape[1:]))])
            self.present.extend(bytes(more))
        return self.rows[start:end]

    def arrived(self, start: int, count: int) -> None:
        self.present[start : start + count] = b"\1" * count

    def missing(self, count: int) -> str | None:
        """The positions of 0..count-1 that never arrived, in words, or None."""
        present = self.present[:count].ljust(count, b"\0")
        if 0 not in present:
            return None
        return f"{present.count(0)} of the positions {present.find(0)}..{present.rfind(0)}"


class CaptureStore:
    """Rows [K, H] by (request, position). Written by the worker, taken once per request by the engine.

    A position that is computed again (a preempted request starts over) overwrites itself. Rows that arrive
    after a request was taken are dropped: with asynchronous scheduling one step more may run.

    Args:
        late_rows: rows may arrive after `take`, and `forget` follows for every request.
    """

    def __init__(self, late_rows: bool = True) -> None:
        self._late_rows = late_rows
        self._slots: dict[str, _Slot] = {}
        self._taken: set[str] = set()
        self._held: dict[str, bool] = {}  # to be taken; whether the engine has reported their end already
        self._changed = threading.Condition()
        self._pending = 0  # pieces announced and not written yet
        self._fault: BaseException | None = None

    def __len__(self) -> int:
        return len(self._slots)

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

    def write(self, key: str, start: int, piece: Tensor, capacity: int) -> None:
        """Store `piece` [N, K, H] (CPU) as positions start..start+N-1 of request `key`.

        `capacity` is the number of positions the request is expected to reach.
        """
        self.write_batch(piece, [Piece(key, start, 0, piece.shape[0], capacity)])

    def write_batch(self, rows: Tensor, pieces: Sequence[Piece]) -> None:
        """Store the rows of a step's batch, [tokens, K, H] (CPU), that `pieces` describe.

        One call for all of them: at hundreds of requests a step the lock and each turn of the interpreter's
        lock, which the engine's thread needs as well, would cost more than the copying.
        """
        with self._changed:
            found = [(p, self._slot(p, rows)) for p in pieces if p.key not in self._taken]
        if not found:
            return
        with torch.inference_mode():
            places = [slot.place(p.start, p.count) for p, slot in found]
            torch._foreach_copy_(places, [rows[p.first : p.first + p.count] for p, _ in found])
        for p, slot in found:
            slot.arrived(p.start, p.count)

    def _slot(self, piece: Piece, rows: Tensor) -> _Slot:
        slot = self._slots.get(piece.key)
        if slot is None:
            # Ordinary tensors even inside inference mode: whoever takes them may train on them.
            with torch.inference_mode(False):
                slot = _Slot(max(piece.capacity, piece.start + piece.count), tuple(rows.shape[1:]), rows.dtype)
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
        """The engine reports `key` as finished or aborted: drop what is left of it, unless it is held."""
        with self._changed:
            if key in self._held:
                self._held[key] = True
                return
            self._slots.pop(key, None)
            self._taken.discard(key)


@dataclass
class WorkerStores:
    """What a worker process has captured and not handed over yet."""

    states: CaptureStore  # s_a, s_b, s_c, s_n
    embeddings: CaptureStore | None = None  # s_0, while the self-check runs
    gives_embedding: bool = False  # whether the model class yields s_0 at all
    started: bool = False  # the engine is up; what ran before was vLLM's own warm-up


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

    def start_capture(self) -> None:
        """The engine is up: keep states from now on."""
        _stores.started = True

    def capture_stores(self) -> WorkerStores:
        """The stores themselves, for an engine in the same process."""
        return _stores

    def check_embeddings(self, on: bool) -> bool:
        """Keep s_0 as well from now on, or stop; False where the model class does not give it."""
        _stores.embeddings = CaptureStore() if on and _stores.gives_embedding else None
        return _stores.gives_embedding

    def take_embeddings(self, key: str, count: int) -> Tensor | None:
        """s_0 of positions 0..count-1, [count, 1, H]; None where none is kept, and on ranks other than the first."""
        if _stores.embeddings is None or self.rank != 0:
            return None
        return _stores.embeddings.take(key, count)

    def export_states(self, key: str, count: int, path: str) -> None:
        """Write the states of a request to `path` for an engine in another process, from a thread.

        `path` appears whole; `path + ".error"` appears with the reason instead when states are missing.
        """
        if self.rank == 0:
            _stores.states.hold(key)
            threading.Thread(target=_export, args=(_stores.states, key, count, path), daemon=True).start()


def _export(store: CaptureStore, key: str, count: int, path: str) -> None:
    try:
        torch.save(store.take(key, count), path + ".part")
        os.rename(path + ".part", path)
    except (MissingStates, OSError) as error:
        with open(path + ".error.part", "w") as handle:
            handle.write(str(error))
        os.rename(path + ".error.part", path + ".error")
