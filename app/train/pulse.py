"""Whether a training worker still moves: what it tells of itself meanwhile, and what is done when it stands still.

After `train.stall_minutes` without a beat a worker writes where all its threads stand to `stall/worker-N.txt` of the
training folder, waits a little for the others to do the same, leaves the sentence that ends the stage (`FAULT`) and
ends its process. Workers wait for each other in every step, so where one stands all do, and each says where.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from app.live import EVERY_S, Live, tell
from app.nodes import space_of
from app.storage import Store
from app.train.progress import WAITS
from app.units import size_text, time_text

log = logging.getLogger("draftmill")

FAULT = "fault.json"  # in the training folder: what a person can mend, from a worker
FOLDER = "stall"  # likewise: where the threads of each worker stood
_SETTLE_S = 15.0  # for the other workers to say where they stand
_LOOK_S = 1.0
_NO_WORD = 2.0  # times the limit, after which a worker whose own watch cannot run is ended
_WAITS = 0.5  # share of the time without data that is worth a word
_OURS = str(Path(__file__).resolve().parents[1])


def own_name() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


class Pulse:
    """The beats of one worker, watched from a thread of its own while the block runs; a Tracker, too.

    Args:
        store: the run folder.
        folder: the training's in it.
        limit_s: seconds without a beat; 0: none is too long.
        rank: of this worker.
        names: host and process of every worker, by rank.
        settle_s: seconds to wait for the other workers' words.
        end: ends the process.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        limit_s: float,
        rank: int,
        names: list[str],
        settle_s: float = _SETTLE_S,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._run, self._folder, self._own = store, folder, store.sub(folder)
        self._limit_s, self._rank, self._names, self._settle_s, self._end = limit_s, rank, names, settle_s, end
        self._begun = self._last = time.monotonic()
        self._first_step: int | None = None
        self._step = self._total = 0
        self._doing = "begins"
        self._line: dict[str, float] = {}
        self._thread_id = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="draftmill-pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread_id, self._last = threading.get_ident(), time.monotonic()
        if self._rank == 0:
            self._own.delete(FOLDER)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        if self._limit_s:
            faulthandler.cancel_dump_traceback_later()

    def beat(self, step: int, total: int, doing: str) -> None:
        """A sign of life; a step of `total` was done, or something beside the steps goes on."""
        if self._first_step is None:
            self._first_step, self._begun = step, time.monotonic()
        self._step, self._total, self._doing, self._last = step, total, doing, time.monotonic()

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._line |= values

    def flush(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def live(self) -> Live:
        """What live.json is to hold."""
        rate = (self._step - (self._first_step or 0)) / max(time.monotonic() - self._begun, 1e-3)
        left = (self._total - self._step) / rate if rate > 0 else None
        words = f"step {self._step} of {self._total}" if self._total else "no step yet"
        words += f", {self._doing}" if self._doing != "trains" else ""
        for key, text in (("loss", "loss {:.3f}"), ("tokens_per_s", "{:.0f} tokens/s"),
                          ("validation/acceptance_length", "acceptance length {:.3f}")):  # fmt: skip
            words += ", " + text.format(self._line[key]) if key in self._line else ""
        words += f", {time_text(left)} left" if left is not None else ""
        idle = time.monotonic() - self._last
        numbers = {"step": self._step, "steps": self._total, "steps_per_s": rate}
        return Live(
            words=words,
            waiting_for=self._waiting_for(),
            failures=[f"no step has ended for {time_text(idle)}"] if self._limit_s and idle > self._limit_s / 2 else [],
            members=[f"worker {rank} on {name}" for rank, name in enumerate(self._names)],
            disk=self._disk(),
            numbers=numbers if left is None else numbers | {"left_s": left},
        )

    def _waiting_for(self) -> str | None:
        if self._doing == WAITS:
            return "parts that generate has under way: all that is sealed was learnt"
        share = self._line.get("data_wait_share", 0.0)
        return f"data, {100 * share:.0f} % of the time" if share > _WAITS else None

    def _disk(self) -> str:
        where = self._run.root if self._run.is_local else tempfile.gettempdir()
        return f"{size_text(space_of(where).free)} free ({'the run folder' if self._run.is_local else where})"

    def _watch(self) -> None:
        told = 0.0
        while not self._stop.wait(min(_LOOK_S, self._limit_s / 4 or _LOOK_S)):
            self._end_if_silent()
            if self._rank == 0 and time.monotonic() - told >= EVERY_S:
                told = time.monotonic()
                tell(self._run, self._folder, self.live())
            idle = time.monotonic() - self._last
            if self._limit_s and idle >= self._limit_s:
                self._give_up(idle)
                return

    def _end_if_silent(self) -> None:
        """Should this very thread get no turn any more, the process says where it stands and ends by itself."""
        if self._limit_s:
            faulthandler.dump_traceback_later(_NO_WORD * self._limit_s + self._settle_s, exit=True, file=2)

    def _give_up(self, idle: float) -> None:
        """Say where this worker stands, then, for all of them, what ends the stage."""
        self._end_if_silent()
        frame = sys._current_frames().get(self._thread_id)
        place = where(traceback.extract_stack(frame)) if frame is not None else "nowhere: its thread has ended"
        try:
            self._own.write_bytes(f"{FOLDER}/worker-{self._rank}.txt", f"{place}\n\n{stacks()}".encode())
            time.sleep(self._settle_s)
            if self._own.read_json(FAULT) is None:
                self._own.write_json(FAULT, {"message": self._sentence(idle)})
        finally:
            self._end(1)

    def _sentence(self, idle: float) -> str:
        stand = []
        for rank, name in enumerate(self._names):
            try:
                said = self._own.read_bytes(f"{FOLDER}/worker-{rank}.txt").decode(errors="replace").splitlines()[0]
                stand.append(f"worker {rank} ({name}) stands in {said}")
            except (OSError, IndexError):
                stand.append(f"worker {rank} ({name}) says nothing")
        return (
            f"train: stuck: no step has ended for {time_text(idle + self._settle_s)} (train.stall_minutes), after step"
            f" {self._step} of {self._total} ({self._doing}): {'; '.join(stand)}. All their threads are in"
            f" {self._own.url}/{FOLDER}; the same command goes on from the last checkpoint"
        )


def where(stack: list[traceback.FrameSummary] | traceback.StackSummary) -> str:
    """Where a thread stands, in words: its innermost frame, and the innermost one of ours."""
    inner = stack[-1]
    said = f"{inner.name} ({Path(inner.filename).name}:{inner.lineno})"
    for frame in reversed(stack):
        if frame.filename.startswith(_OURS + os.sep):
            ours = f"{frame.name} (app/{Path(frame.filename).relative_to(_OURS)}:{frame.lineno})"
            return ours if frame is inner else f"{said}, called by {ours}"
    return said


def stacks() -> str:
    """Where every thread of this process stands."""
    names = {t.ident: t.name for t in threading.enumerate()}
    said = []
    for ident, frame in sys._current_frames().items():
        said.append(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(said)
