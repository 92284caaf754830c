"""What the driver of generate makes of what the engines tell: live.json, metrics, stragglers, stuck engines.

An engine is stuck when it has work and shows no sign of life for `generate.stall_minutes`: no step, no row begun or
ended, no word at all. Its process is killed where it runs; Ray starts another, on any node with room, and gives it
the parts again, as after any other death of an engine (app/engine/crash_search.py).
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.engine.board import FORGET_S, RESTS, STARTS, STORES, WORKS, Member
from app.engine.progress import Standing
from app.errors import first_line
from app.lease import process_start
from app.live import Live, tell
from app.metrics import Meter
from app.nodes import space_of
from app.parts import PartEntry
from app.storage import Store
from app.units import size_text, time_text

log = logging.getLogger("draftmill")

SLOWER = 4.0  # times the limit, while an engine starts or a part is read or written
_SLOW_RATE, _SLOW_AFTER_S = 0.5, 120.0  # share of the median rate below which an engine straggles, once it has worked
_SLOW_PART = 3.0  # times the median seconds of a part
_ACT_S = 30.0  # for a node to end a process


@dataclass(frozen=True)
class Limit:
    """Seconds without a sign of life after which an engine is stuck."""

    seconds: float  # 0: none is too long
    row_s: float  # that a row may take: no less is enough where an engine tells of rows alone


def stuck(member: Member, silent_s: float, limit: Limit) -> str | None:
    """Why an engine counts as stuck, in words; None where it does not.

    silent_s: seconds since it last told anything.
    """
    limit_s = limit.seconds
    if limit_s <= 0 or not (member.parts or member.doing == STARTS):
        return None
    if silent_s >= max(limit_s, FORGET_S):
        return f"has told nothing for {time_text(silent_s)}"
    idle = member.idle_s + silent_s
    if member.doing == STARTS:
        return f"has not started within {time_text(idle)}" if idle >= SLOWER * limit_s else None
    if member.doing == WORKS and idle >= (limit_s if member.says_steps else max(limit_s, limit.row_s)):
        made = "made no step and " if member.says_steps else ""
        return f"has {made}ended no row for {time_text(idle)}"
    if member.doing == STORES and idle >= SLOWER * limit_s:
        return f"has neither read nor written a part for {time_text(idle)}"
    return None


def end_process(member: Member) -> bool:
    """Kill the engine's process on its node; whether it still ran."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(member.node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(_end).options(scheduling_strategy=there)
    return bool(ray.get(task.remote(member.pid, member.started), timeout=_ACT_S))


def _end(pid: int, started: str | None) -> bool:
    if started is None or process_start(pid) != started:
        return False
    os.kill(pid, signal.SIGKILL)
    return True


class Watch:
    """Called by the ticker with every line.

    Args:
        store: the run folder.
        engines: how many are asked for.
        end: ends a member's process, whether it still ran.
    """

    def __init__(
        self, store: Store, board: Any, engines: int, limit: Limit, end: Callable[[Member], bool] = end_process
    ) -> None:
        self._store, self._board, self._engines, self._limit, self._end = store, board, engines, limit, end
        self._meter = Meter(store.url, "generate", "driver")
        self._rejects: Counter[str] = Counter()
        self._seconds: list[float] = []  # of each committed part
        self._rows = self._bytes = 0  # of them
        self._stalls: list[str] = []
        self._lost: set[str] = set()  # engines that are heard of no more

    def committed(self, entry: PartEntry) -> None:
        """A part was committed."""
        self._seconds.append(entry.seconds)
        self._rows, self._bytes = self._rows + entry.rows_in, self._bytes + entry.bytes
        reasons = Counter(reject["reason"] for reject in entry.rejects)
        self._rejects += reasons
        self._meter.add("parts", 1)
        self._meter.add("bytes_written", entry.bytes)
        for reason, count in reasons.items():
            self._meter.add("rejects", count, reason=reason)

    def look(self, standing: Standing) -> None:
        """See to the engines that are stuck, and tell how all stand."""
        reports = self._ask()
        heard = [m for silent_s, m in reports if silent_s < FORGET_S]
        self._lost |= {m.name for silent_s, m in reports if silent_s >= FORGET_S}
        self._lost -= {m.name for m in heard}
        for silent_s, member in reports:
            why = stuck(member, silent_s, self._limit)
            if why is not None and self._act(member, why, silent_s):
                heard = [m for m in heard if m.name != member.name]
        self._meter.set("engines", len(heard))
        self._meter.set("rows_left", standing.rows[1] - standing.rows[0])
        self._meter.set("stalls", len(self._stalls))
        tell(self._store, "generate", self.live(standing, heard))

    def live(self, standing: Standing, heard: list[Member]) -> Live:
        """What live.json is to hold."""
        (parts, parts_all), (rows, rows_all) = standing.parts, standing.rows
        numbers = {"parts": parts, "parts_all": parts_all, "rows": rows, "rows_all": rows_all}
        measured = {"tokens_per_s": standing.tokens_per_s, "left_s": standing.left_s}
        return Live(
            words=standing.words,
            waiting_for=self._waiting_for(heard),
            stragglers=self.stragglers(heard),
            failures=self._failures(),
            members=[_line(m) for m in heard],
            disk=self._disk(standing, heard),
            numbers=numbers | {k: v for k, v in measured.items() if v is not None},
        )

    def _ask(self) -> list[tuple[float, Member]]:
        if self._board is None:
            return []
        import ray

        try:
            found: list[tuple[float, Member]] = ray.get(self._board.members.remote(), timeout=5)
        except Exception:
            return []
        return found

    def _act(self, member: Member, why: str, silent_s: float) -> bool:
        """End a stuck engine; whether it is gone."""
        try:
            was_there = self._end(member)
        except Exception as error:  # its node may be gone; then Ray gives its parts to others by itself
            log.warning("generate: engine %s %s, and cannot be ended (%s)", member.name, why, first_line(error))
            return False
        if self._board is not None:
            self._board.drop.remote(member.name)
        if was_there:
            self._stalls.append(_sentence(member, why, silent_s))
            log.warning("generate: stuck: %s", self._stalls[-1])
        return True

    def _waiting_for(self, heard: list[Member]) -> str | None:
        notes = [m.load.note for m in heard if m.load is not None and m.load.note is not None]
        if notes:
            return notes[0]
        missing, starting = self._engines - len(heard), [m for m in heard if m.doing == STARTS]
        said = []
        if missing > 0:
            said.append(f"{missing} of {self._engines} engines have no place yet: Ray starts them where there is room")
        if starting:
            longest = time_text(max(m.idle_s for m in starting))
            said.append(f"{len(starting)} of {self._engines} engines start (for {longest})")
        return "; ".join(said) or None

    def stragglers(self, heard: list[Member]) -> list[str]:
        """Engines that are slow beside the others, and parts that take long beside those committed."""
        rates = {m.name: m.tokens / m.works_s for m in heard if m.works_s >= _SLOW_AFTER_S and m.doing != RESTS}
        said = []
        if len(rates) > 1:
            usual = statistics.median(rates.values())
            said += [
                f"engine {name}: {rate:.0f} tokens/s, the median is {usual:.0f}"
                for name, rate in rates.items()
                if rate < _SLOW_RATE * usual
            ]
        if len(self._seconds) < 3:
            return said
        usual = statistics.median(self._seconds)
        for m in heard:
            said += [
                f"part {part} on {m.name}: {time_text(seconds)}, the median is {time_text(usual)}"
                for part, seconds in m.parts
                if seconds > max(_SLOW_PART * usual, _SLOW_AFTER_S)
            ]
        return said

    def _failures(self) -> list[str]:
        said = list(self._stalls)
        if self._lost:
            names = ", ".join(sorted(self._lost)[:4])
            said.append(f"{len(self._lost)} engine process(es) ended or fell silent: {names}")
        if self._rejects:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self._rejects.most_common())
            said.append(f"{self._rejects.total()} rows rejected ({reasons})")
        return said

    def _disk(self, standing: Standing, heard: list[Member]) -> str | None:
        places = [(m.disk_free, m.host) for m in heard if m.disk_free is not None]
        if self._store.is_local:
            places = [(space_of(self._store.root).free, "the run folder")]
        if not places:
            return None
        free, where = min(places)
        said = f"{size_text(free)} free ({where})"
        if self._rows and self._store.is_local:
            size = self._bytes / self._rows * (standing.rows[1] - standing.rows[0])
            said += f", about {size_text(size)} still to be written"
        return said


def _sentence(member: Member, why: str, silent_s: float) -> str:
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=member.idle_s + silent_s)
    held = ", ".join(str(part) for part, _ in member.parts[:4])
    parts = f" with part{'s' if len(member.parts) > 1 else ''} {held} under way" if held else ""
    return (
        f"engine {member.name} (process {member.pid} on node {member.host}) {why}, since {since:%H:%M:%S} UTC,{parts};"
        " its process is ended and another engine makes what it held"
    )


def _line(m: Member) -> str:
    said = f"engine {m.name} {m.doing}: {m.under_way.running} rows under way, {m.rows} ended"
    if m.works_s:
        said += f", {m.tokens / m.works_s:.0f} tokens/s"
    if m.load is not None:
        said += f", queue {m.load.queue}"
        said += f", KV cache {m.load.kv_use:.0%}" if m.load.kv_use is not None else ""
    return said
