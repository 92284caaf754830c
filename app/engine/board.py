"""Who works on the generate stage and how each stands: engines tell a small actor, the driver asks it.

Nothing waits for that actor, and a run whose actor is lost goes on without it. Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

FORGET_S = 30.0  # silence after which an engine's report no longer counts: its rows went with it

STARTS, WORKS, STORES, RESTS = "starts", "works", "reads or writes", "waits for parts"


@dataclass(frozen=True)
class Load:
    """How busy an engine is."""

    steps: int  # or answers, so far: a number that grows while the engine works
    running: int  # requests it works on
    queue: int  # requests that wait for it
    kv_use: float | None = None  # tokens held over those that the KV cache holds; None: not known
    note: str | None = None  # what it waits for outside itself


@runtime_checkable
class Loaded(Protocol):
    """An engine that says how busy it is, from any thread and without waiting. Others show life by rows alone."""

    def load(self) -> Load: ...


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


@dataclass(frozen=True)
class Member:
    """One engine's actor, as it stands."""

    host: str
    pid: int
    node: str = ""  # Ray's id of it
    started: str | None = None  # of the process, as the kernel counts: a reused pid is not meant
    doing: str = WORKS  # STARTS | WORKS | STORES | RESTS
    idle_s: float = 0.0  # since its last sign of life: a row begun or ended, a step of the engine, a part begun
    says_steps: bool = False  # whether the engine tells of its steps; else rows alone show life
    parts: tuple[tuple[int, float], ...] = ()  # begun and not committed: number, seconds since
    under_way: UnderWay = UnderWay()
    rows: int = 0  # ended since its process started
    tokens: int = 0  # of their answers
    works_s: float = 0.0  # since its first row
    load: Load | None = None
    disk_free: int | None = None  # bytes, where it writes

    @property
    def name(self) -> str:
        return f"{self.host}:{self.pid}"


class Board:
    """The small actor: the last report of each engine."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Member]] = {}

    def report(self, member: Member) -> None:
        self._reports[member.name] = (time.monotonic(), member)

    def read(self) -> UnderWay:
        """The sum over the engines that are heard of."""
        return sum((m.under_way for silent, m in self.members() if silent < FORGET_S), UnderWay())

    def members(self) -> list[tuple[float, Member]]:
        """Every engine that ever reported, with the seconds since it last did."""
        at = time.monotonic()
        return [(at - heard, member) for heard, member in self._reports.values()]

    def drop(self, name: str) -> None:
        """Forget an engine whose process has ended."""
        self._reports.pop(name, None)


def start_board() -> Any:
    """Handle of the small actor, on the driver's node where it can be; Ray shows it by the stage's name."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    named = type("generate_board", (Board,), {})
    return ray.remote(named).options(num_cpus=0, scheduling_strategy=here).remote()


@contextlib.contextmanager
def ending(board: Any) -> Iterator[None]:
    """End the small actor with the block, however that ends: what Ray Data keeps of a dataset holds its handle, and it
    would stay as long as the driver."""
    try:
        yield
    finally:
        if board is not None:
            import ray

            with contextlib.suppress(Exception):  # the cluster may be lost, and it with that
                ray.kill(board)
