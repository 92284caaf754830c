"""Progress lines of the generate stage: by rows, at a steady pace, also while no part ends.

Engine actors tell a small actor (app/engine/board.py) every few seconds how they stand; the driver's ticker asks it and
writes a line every 15 seconds. A run whose small actor is lost goes on with lines by parts.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from app.engine.board import RESTS, STARTS, STORES, WORKS, Loaded, Member, UnderWay
from app.errors import first_line
from app.lease import process_start
from app.metrics import Meter
from app.nodes import space_of
from app.units import time_text

if TYPE_CHECKING:
    from app.engine.base import Engine
    from app.parts import PartEntry
    from app.storage import Store

log = logging.getLogger("draftmill")

LINE_S = 15.0  # between two lines
REPORT_S = 5.0  # between two reports of an engine
QUIET_S = 60.0  # without a row finished, after which the line names the longest row


class RowCounter:
    """Rows of one engine, counted by the threads that make them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: dict[str, float] = {}
        self._done: dict[int, tuple[int, int]] = {}  # part -> rows, tokens
        self._parts: dict[int, float] = {}  # begun, and when
        self._first_row: float | None = None
        self._rows = self._tokens = 0  # ended since the start
        self._moved = time.monotonic()

    def began(self, part: int) -> None:
        with self._lock:
            self._moved = self._parts[part] = time.monotonic()

    def started(self, row: str) -> None:
        with self._lock:
            self._moved = self._since[row] = time.monotonic()
            self._first_row = self._first_row or self._moved

    def finished(self, part: int, row: str, tokens: int) -> None:
        with self._lock:
            self._moved = time.monotonic()
            self._since.pop(row, None)
            rows, sum_ = self._done.get(part, (0, 0))
            self._done[part] = (rows + 1, sum_ + tokens)
            self._rows, self._tokens = self._rows + 1, self._tokens + tokens

    def settled(self, part: int) -> None:
        """The part is committed, or given up: the driver counts it from now on."""
        with self._lock:
            self._moved = time.monotonic()
            self._done.pop(part, None)
            self._parts.pop(part, None)

    def moved(self) -> None:
        """A sign of life of another kind."""
        with self._lock:
            self._moved = time.monotonic()

    def now(self) -> UnderWay:
        with self._lock:
            return self._under_way(time.monotonic())

    def stands(self, member: Member) -> Member:
        """`member` with what is known of its rows."""
        with self._lock:
            at = time.monotonic()
            doing = member.doing
            if doing == WORKS and not self._since:
                doing = STORES if self._parts else RESTS
            return replace(
                member,
                doing=doing,
                idle_s=at - self._moved,
                parts=tuple((part, at - since) for part, since in sorted(self._parts.items())),
                under_way=self._under_way(at),
                rows=self._rows,
                tokens=self._tokens,
                works_s=0.0 if self._first_row is None else at - self._first_row,
            )

    def _under_way(self, at: float) -> UnderWay:
        rows, tokens = (sum(d[i] for d in self._done.values()) for i in (0, 1))
        longest = max(((at - since, row) for row, since in self._since.items()), default=(0.0, ""))
        return UnderWay(rows, tokens, len(self._since), longest)


class Reports:
    """Tells the board and Ray's metrics every few seconds how one engine stands, from a thread of its own."""

    def __init__(self, rows: RowCounter, board: Any, store: Store) -> None:
        """store: the run folder. Without a board nothing is told."""
        self.engine: Engine | None = None  # None: it starts
        self._rows, self._board = rows, board
        self._folder = store.root if store.is_local else tempfile.gettempdir()  # where parts are written
        host, pid = socket.gethostname(), os.getpid()
        self._self = Member(host, pid, _node_id() if board is not None else "", process_start(pid))
        self._meter = Meter(store.url, "generate", self._self.name)
        self._steps = self._told_rows = self._told_tokens = 0
        if board is not None:
            threading.Thread(target=self._tell, name="draftmill-progress", daemon=True).start()

    def writer(self) -> dict[str, Any]:
        """Who commits a part now, as its entry tells it."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        return {"host": self._self.host, "node": self._self.node, "pid": self._self.pid, "at": now}

    def look(self) -> Member:
        """How the engine stands; a step of the engine since the last look is a sign of life."""
        engine, load = self.engine, None
        if isinstance(engine, Loaded):
            load = engine.load()
            if load.steps != self._steps:
                self._steps = load.steps
                self._rows.moved()
        doing = STARTS if engine is None else WORKS
        free = space_of(self._folder).free
        told = replace(self._self, doing=doing, load=load, says_steps=load is not None, disk_free=free)
        return self._rows.stands(told)

    def _tell(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # the actor may be gone; the run is not
                member = self.look()
                self._board.report.remote(member)
                self._measure(member)
            time.sleep(REPORT_S)

    def _measure(self, member: Member) -> None:
        self._meter.add("rows", member.rows - self._told_rows)
        self._meter.add("answer_tokens", member.tokens - self._told_tokens)
        self._told_rows, self._told_tokens = member.rows, member.tokens
        if member.load is not None:
            self._meter.set("engine_running", member.load.running)
            self._meter.set("engine_queue", member.load.queue)
            self._meter.set("kv_use", member.load.kv_use)


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


@dataclass(frozen=True)
class Standing:
    """How far the stage is."""

    parts: tuple[int, int]  # committed, and all
    rows: tuple[int, int]  # ended, and all
    tokens_per_s: float | None  # of answers, in this invocation; None: no row has begun
    left_s: float | None
    words: str  # all of it, for people


class Ticker:
    """Writes the lines while its block runs.

    Args:
        parts: committed at the start, and all.
        rows: in committed parts, and all.
        board: of `start_board`; None: lines by parts alone.
        on_line: called with every line, from the ticker's thread or whoever adds the last part.
    """

    def __init__(
        self,
        parts: tuple[int, int],
        rows: tuple[int, int],
        board: Any = None,
        on_line: Callable[[Standing], None] = lambda standing: None,
    ) -> None:
        self._on_line = on_line
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
        standing = self._standing(done, under_way, at)
        log.info("generate: %s", standing.words)
        try:
            self._on_line(standing)
        except Exception as error:  # whoever looks on must not end the lines
            log.warning("generate: the watch fails (%s)", first_line(error))

    def _standing(self, done: int, under_way: UnderWay, at: float) -> Standing:
        parts, all_rows = (self._parts, self._all_parts), (done, self._all_rows)
        words = f"{self._parts}/{self._all_parts} parts, {done}/{self._all_rows} rows"
        if self._first_row is None:
            started = at - self._started
            return Standing(
                parts, all_rows, None, None, f"{words}; no row has begun yet, engines start ({started:.0f} s)"
            )
        seconds = max(at - self._first_row, 1e-3)
        rows, tokens = done - self._rows_before, self._tokens + under_way.tokens
        rate, left = tokens / seconds, seconds / rows * (self._all_rows - done) if rows > 0 else None
        words += f", {tokens} answer tokens, {rate:.0f} tokens/s"
        if left is not None:
            words += f", {time_text(left)} left"
        if under_way.running:
            words += f"; {under_way.running} rows under way"
        if at - self._last_change >= QUIET_S and under_way.running:
            waited, row = under_way.longest
            words += f", none has ended for {at - self._last_change:.0f} s, the longest is {row} ({waited:.0f} s)"
        return Standing(parts, all_rows, rate, left, words)
