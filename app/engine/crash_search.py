"""Which row ends the engine's process: what a part had under way when it ended, and the halving that finds the row.

The record is one small file per part, `generate/attempts/PART.json`, written before rows start and deleted with the
commit. A successor that finds rows under way knows that the process ended on them. It runs them again in halves, each
alone in its process, so that the next end says which half; a row that ends the process alone is blamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

from app.errors import UserError
from app.storage import Store

ATTEMPTS = "generate/attempts"


@dataclass
class Attempts:
    """What is known of a part whose engine's process ended, by row id."""

    ended: int = 0  # times the process ended while rows of this part were under way
    in_vain: int = 0  # of these, those since rows last ran to their end
    start_ups: int = 0  # times it ended while the engine started for this part
    starting: bool = False
    under_way: list[str] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)  # to run one after the other
    blamed: list[str] = field(default_factory=list)  # ended a process alone

    @property
    def searching(self) -> bool:
        """Whether rows of this part are suspects: then it must be alone in its process."""
        return self.ended > 0


class AttemptRecord:
    """The attempts of one part, kept in the run folder."""

    def __init__(self, store: Store, part: int, ids: list[str], max_attempts: int) -> None:
        """Read what earlier attempts left, and divide the rows that one ended on.

        Raises:
            UserError: the part has ended too many processes.
        """
        self._store, self._part, self._path = store, part, f"{ATTEMPTS}/{part}.json"
        found = store.read_json(self._path)
        self.now = Attempts(**found) if found is not None else Attempts(groups=[ids])
        if self.now.starting:
            self.now.start_ups += 1
        elif self.now.under_way:
            self.now.ended += 1
            self.now.in_vain += 1
            self._divide(self.now.under_way)
        self.now.starting, self.now.under_way = False, []
        # A row at fault is found by log2 ends, and others run to their end beside it: beyond that it is not a row.
        halvings = math.ceil(math.log2(max(2, len(ids))))
        if self.now.in_vain >= max_attempts + halvings or len(self.now.blamed) > max_attempts:
            raise self._too_often(self.now.ended, f"making part {part}")
        if self.now.start_ups >= max_attempts:
            raise self._too_often(self.now.start_ups, f"it started for part {part}")

    def _too_often(self, times: int, doing: str) -> UserError:
        return UserError(
            f"generate: the engine's process ended {times} times while {doing}; look at the workers' logs (ray logs,"
            " or the dashboard) for its last words: out of memory is the usual one"
        )

    def _divide(self, suspects: list[str]) -> None:
        rest = [g for g in self.now.groups if not set(g) & set(suspects)]
        if len(suspects) == 1:
            self.now.blamed.extend(suspects)
            self.now.groups = rest
            return
        middle = len(suspects) // 2
        # Suspects first: until they have passed, every other row's work would be lost with the next end.
        self.now.groups = [suspects[:middle], suspects[middle:], *rest]

    def starts_engine(self) -> None:
        self.now.starting = True
        self._write()

    def engine_started(self) -> None:
        self.now.starting = False

    def begin(self, group: list[str]) -> None:
        """Rows `group` are about to start: recorded before they do."""
        self.now.under_way = group
        self._write()

    def passed(self, group: list[str]) -> None:
        """Rows `group` have run to their end in this process: they wait behind the suspects from now on."""
        self.now.groups = [*(g for g in self.now.groups if g != group), group]
        self.now.under_way, self.now.in_vain = [], 0

    def forget(self) -> None:
        """The part is committed."""
        self._store.delete(self._path)

    def _write(self) -> None:
        self._store.write_json(self._path, asdict(self.now), sync=False)  # it outlives the process; no more is needed


class Gate:
    """Lets parts into the process together, or one alone. Belongs to one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._claimed = False  # somebody is alone inside, or waits to be

    @contextlib.asynccontextmanager
    async def enter(self, alone: bool) -> AsyncIterator[None]:
        """Wait to be let in; `alone`: until nobody is inside, and nobody enters before the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._claimed)
            if alone:
                self._claimed = True
                await self._changed.wait_for(lambda: self._inside == 0)
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._claimed = self._claimed and not alone
                self._changed.notify_all()
