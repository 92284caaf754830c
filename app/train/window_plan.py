"""The steps of a training whose samples come in sealed windows (`train.start_after`, app/windows.py).

Epoch 0 goes through the windows as they were sealed, each shuffled by itself: the order in window w is a function of
the seed, w and the parts in it. The epochs after it are those of a training that had everything from the start. So the
samples of a step are a function of the sealed windows alone, and a training that was killed goes on as if it had not
been.

How many steps there will be is not known before the last window. What the schedule of the learning rate reckons with
at a step is worked out from the windows up to the step's own: tokens so far, times conversations of ingest over
conversations so far. It changes from window to window, and is exact from the last one on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.errors import UserError
from app.train.data import SampleLength, SampleSource, StepPlan


@dataclass(frozen=True)
class Piece:
    """What a worker holds of a window. Counts are of all windows up to it."""

    samples: int
    valid: int  # validation samples
    rows: int  # conversations of ingest
    last: bool  # sealed in the knowledge that none comes after it


class WindowSource(Protocol):
    """The windows of a run, as they are sealed."""

    pieces: list[Piece]  # taken so far
    planned_rows: int  # conversations of ingest
    closed: bool  # no piece comes after these
    every_s: float  # seconds between two looks

    @property
    def train(self) -> SampleSource: ...

    def look(self) -> Any:
        """What is sealed now, to be given to `take` of every worker."""

    def take(self, seen: Any) -> None:
        """Take the windows that are new in what `look` saw."""

    def by_part(self) -> list[int]:
        """Indices of the training samples in the order of their parts."""


@dataclass(frozen=True)
class _Planned:
    plan: StepPlan | None  # None: no sample teaches anything
    first: int  # step
    end: int
    epoch_tokens: float  # of the whole epoch, as far as could be told when the window was sealed
    epoch_steps: int  # likewise
    valid: int


class WindowPlan(StepPlan):
    """A StepPlan that grows with the windows of `source`; see there for what it gives."""

    def __init__(self, source: WindowSource, tokens_per_step: int, seed: int, max_tokens: int) -> None:
        self.source, self.seed, self.max_tokens, self.tokens_per_step = source, seed, max_tokens, tokens_per_step
        self.indices: list[int] = []
        self.tokens: dict[int, int] = {}
        self.cost: dict[int, int] = {}
        self.left_out = self.cut = self.cut_tokens = 0
        self.open = True
        self._planned: list[_Planned] = []
        self._whole: StepPlan | None = None  # of the epochs after the first
        self.grow()

    def grow(self) -> bool:
        """Plan the windows that came; whether anything is new.

        Raises:
            UserError: none comes any more and no sample teaches anything.
        """
        pieces, before = self.source.pieces, (self.taken, self.open)
        for number in range(len(self._planned), len(pieces)):
            self._add(pieces[number - 1].samples if number else 0, pieces[number])
        if self.source.closed and self._whole is None:
            infos = self.source.train.infos
            self._whole = StepPlan(infos, self.tokens_per_step, self.seed, self.max_tokens, self.source.by_part())
            self.open = False
        self.steps_per_epoch = self._planned[-1].epoch_steps if self._whole is None else self._whole.steps_per_epoch
        return (self.taken, self.open) != before

    @property
    def taken(self) -> int:
        """Windows that are planned."""
        return len(self._planned)

    def _add(self, start: int, piece: Piece) -> None:
        infos: Sequence[SampleLength] = self.source.train.infos
        order, first, plan = range(start, piece.samples), self.ready, None
        if any(infos[i].num_supervised > 0 for i in order):
            plan = StepPlan(infos, self.tokens_per_step, self.seed, self.max_tokens, order)
            self.indices += plan.indices
            self.tokens |= plan.tokens
            self.cost |= plan.cost
            self.cut, self.cut_tokens = self.cut + plan.cut, self.cut_tokens + plan.cut_tokens
        self.left_out += len(order) - (len(plan.indices) if plan is not None else 0)
        end, held = first + (plan.steps_per_epoch if plan is not None else 0), sum(self.tokens.values())
        whole = float(held if piece.last else held * self.source.planned_rows / max(1, piece.rows))
        rest = 0 if piece.last else max(1, round((whole - held) / self.tokens_per_step))
        self._planned.append(_Planned(plan, first, end, whole, end + rest, piece.valid))

    @property
    def ready(self) -> int:
        """Steps of the windows that are there."""
        return self._planned[-1].end if self._planned else 0

    def total(self, epochs: float) -> int:
        if self._whole is None:
            return self._estimate(self._planned[-1], epochs)
        return self.ready + round((epochs - 1) * self._whole.steps_per_epoch)

    def _estimate(self, window: _Planned, epochs: float) -> int:
        return window.epoch_steps + round((epochs - 1) * max(1, round(window.epoch_tokens / self.tokens_per_step)))

    def rate_total(self, index: int, epochs: float) -> int:
        return self._estimate(self._window(index), epochs) if index < self.ready else self.total(epochs)

    def epochs_after(self, steps: int) -> float:
        if self._whole is not None and steps >= self.ready:
            return 1 + (steps - self.ready) / self._whole.steps_per_epoch
        return min(1.0, steps / self._window(steps - 1).epoch_steps)

    def place(self, steps: int) -> tuple[int, int]:
        if self._whole is None or steps < self.ready:
            return 0, steps
        epoch, done = divmod(steps - self.ready, self._whole.steps_per_epoch)
        return 1 + epoch, done

    def validations(self, epochs: float, every: float) -> set[int]:
        """Steps of the windows so far after which to validate; once they are closed, of all epochs."""
        found: set[int] = set()
        for window in self._planned:
            between = every * window.epoch_steps
            multiples = (round(i * between) for i in range(1, int(window.end / between) + 2))
            found |= {step for step in multiples if window.first < step <= window.end}
        if self._whole is not None:
            total, between = self.total(epochs), every * self._whole.steps_per_epoch
            later = (self.ready + round(i * between) for i in range(1, int((total - self.ready) / between) + 1))
            found |= {*later, total}
        return found - {0}

    def valid_count(self, steps: int, count: int) -> int:
        """Those of the windows up to the step's own, so that a validation is the same in a training that goes on."""
        return self._window(steps - 1).valid if steps <= self.ready else count

    def step(self, index: int) -> tuple[int, list[int]]:
        if index >= self.ready:
            assert self._whole is not None
            epoch, at = divmod(index - self.ready, self._whole.steps_per_epoch)
            return 1 + epoch, self._whole.steps_of(1 + epoch)[at]
        number, window = next((n, w) for n, w in enumerate(self._planned) if index < w.end)
        assert window.plan is not None
        return 0, window.plan.steps_of(f"window {number}")[index - window.first]

    def _window(self, index: int) -> _Planned:
        """The window of step `index`, or the last one."""
        return next((w for w in self._planned if index < w.end), self._planned[-1])

    def epoch(self, epoch: int | str) -> list[list[int]]:
        """Steps of an epoch whose windows are all there."""
        if epoch == 0:
            return [self.step(index)[1] for index in range(self.ready)]
        if self._whole is None:
            raise UserError("the windows are not closed yet")
        return self._whole.epoch(epoch)
