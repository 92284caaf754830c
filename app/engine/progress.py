"""Progress lines of the generate stage: by rows, at a steady pace, also while no part ends.

Engine actors tell a small actor every few seconds what they have under way; the driver's ticker asks it and writes a
line every 15 seconds. Nothing waits for that actor, and a run whose actor is lost goes on with lines by parts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.parts import PartEntry

log = logging.getLogger("draftmill")

LINE_S = 15.0  # between two lines
REPORT_S = 5.0  # between two reports of an engine
FORGET_S = 30.0  # silence after which an engine's report no longer counts: its rows went with it
QUIET_S = 60.0  # without a row finished, after which the line names the longest row


@dataclass(frozen=True)
class UnderWay:
    """What engines have begun and not committed."""

    finished: int = 0  # rows of parts that are not committed yet
    tokens: int = 0  # of their answers
    running: int = 0  # rows
    longest: tuple[float, str] = (0.0, "")  # seconds and id of the row that runs longest

    def __add__(self, other: UnderWay) -> UnderWay:
        return UnderWay(
            self.finished + other.finished,
            self.tokens + other.tokens,
            self.running + other.running,
            max(self.longest, other.longest),
        )


class RowCounter:
    """Rows of one engine, counted by the threads that make them, and reported from a thread of its own."""

    def __init__(self, report: Callable[[UnderWay], None] | None) -> None:
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}
        self._done: dict[int, tuple[int, int]] = {}  # part -> rows, tokens
        if report is not None:
            threading.Thread(target=self._tell, args=(report,), name="draftmill-progress", daemon=True).start()

    def started(self, row: str) -> None:
        with self._lock:
            self._since[row] = time.monotonic()

    def finished(self, part: int, row: str, tokens: int) -> None:
        with self._lock:
            self._since.pop(row, None)
            rows, sum_ = self._done.get(part, (0, 0))
            self._done[part] = (rows + 1, sum_ + tokens)

    def settled(self, part: int) -> None:
        """The part is committed, or given up: the driver counts it from now on."""
        with self._lock:
            self._done.pop(part, None)

    def now(self) -> UnderWay:
        with self._lock:
            rows, tokens = (sum(d[i] for d in self._done.values()) for i in (0, 1))
            at = time.monotonic()
            longest = max(((at - since, row) for row, since in self._since.items()), default=(0.0, ""))
            return UnderWay(rows, tokens, len(self._since), longest)

    def _tell(self, report: Callable[[UnderWay], None]) -> None:
        while True:
            with contextlib.suppress(Exception):  # the actor may be gone; the run is not
                report(self.now())
            time.sleep(REPORT_S)


class Board:
    """The small actor: the last report of each engine."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, UnderWay]] = {}

    def report(self, engine: str, what: UnderWay) -> None:
        self._reports[engine] = (time.monotonic(), what)

    def read(self) -> UnderWay:
        at = time.monotonic()
        self._reports = {k: r for k, r in self._reports.items() if at - r[0] < FORGET_S}
        return sum((r for _, r in self._reports.values()), UnderWay())


def start_board() -> Any:
    """Handle of the small actor, on the driver's node where it can be."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(Board).options(num_cpus=0, scheduling_strategy=here).remote()


class Ticker:
    """Writes the lines while its block runs.

    Args:
        parts: committed at the start, and all.
        rows: in committed parts, and all.
        board: of `start_board`; None: lines by parts alone.
    """

    def __init__(self, parts: tuple[int, int], rows: tuple[int, int], board: Any = None) -> None:
        self._parts, self._all_parts = parts
        self._rows, self._all_rows = rows
        self._rows_before = self._rows
        self._board = board
        self._tokens = 0
        self._last_line = self._last_change = self._started = time.monotonic()
        self._first_row: float | None = None  # when rows began to run: engines take minutes to start
        self._seen = self._rows
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="draftmill-ticker", daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def add(self, entry: PartEntry) -> None:
        """A part was committed."""
        self._parts += 1
        self._rows += entry.rows_in
        self._tokens += entry.tokens["answer"]
        if self._parts == self._all_parts:
            self._line(UnderWay())

    def _tick(self) -> None:
        while not self._stop.wait(min(1.0, LINE_S)):
            if time.monotonic() - self._last_line >= LINE_S:
                self._line(self._ask())

    def _ask(self) -> UnderWay:
        if self._board is None:
            return UnderWay()
        import ray

        try:
            found: UnderWay = ray.get(self._board.read.remote(), timeout=5)
        except Exception:
            return UnderWay()
        return found

    def _line(self, under_way: UnderWay) -> None:
        at = self._last_line = time.monotonic()
        done = min(self._rows + under_way.finished, self._all_rows)
        if self._first_row is None and (under_way.running or done > self._rows_before):
            self._first_row = self._started if self._parts == self._all_parts else at - under_way.longest[0]
        if done != self._seen:
            self._seen, self._last_change = done, at
        log.info("generate: %s", self._words(done, under_way, at))

    def _words(self, done: int, under_way: UnderWay, at: float) -> str:
        words = f"{self._parts}/{self._all_parts} parts, {done}/{self._all_rows} rows"
        if self._first_row is None:
            return f"{words}; no row has begun yet, engines start ({at - self._started:.0f} s)"
        seconds = max(at - self._first_row, 1e-3)
        rows, tokens = done - self._rows_before, self._tokens + under_way.tokens
        words += f", {tokens} answer tokens, {tokens / seconds:.0f} tokens/s"
        if rows > 0:
            words += f", {seconds / rows * (self._all_rows - done):.0f} s left"
        if under_way.running:
            words += f"; {under_way.running} rows under way"
        if at - self._last_change >= QUIET_S and under_way.running:
            waited, row = under_way.longest
            words += f", none has ended for {at - self._last_change:.0f} s, the longest is {row} ({waited:.0f} s)"
        return words
