"""What a worker counts between two lines of the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from app.train.loss import StepStats

T = TypeVar("T")
WAITS = "waits for parts"  # what a worker does while no sealed window is left (`train.start_after`)


class Window:
    """Sums of this rank since the last line; seconds run from the start of the window."""

    def __init__(self) -> None:
        self.stats: StepStats | None = None  # None: every step was skipped
        self.tokens = 0
        self.waited = 0.0  # seconds without data
        self.skipped: list[int] = []
        self.start = time.monotonic()

    def add(self, stats: StepStats | None, tokens: int, step: int) -> None:
        """A step that was done, or with None skipped."""
        if stats is None:
            self.skipped.append(step)
            return
        self.stats = stats if self.stats is None else self.stats + stats
        self.tokens += tokens

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start


class Waits(Generic[T]):
    """Iterates over `items` and adds up the seconds until each was there, less those that `apart` counts."""

    def __init__(self, items: Iterator[T], apart: Callable[[], float] = lambda: 0.0) -> None:
        self.items, self.apart, self.last, self.total = items, apart, 0.0, 0.0

    def __iter__(self) -> Iterator[T]:
        while True:
            started, before = time.monotonic(), self.apart()
            try:
                item = next(self.items)
            except StopIteration:
                return
            self.last = time.monotonic() - started - (self.apart() - before)
            self.total += self.last
            yield item
