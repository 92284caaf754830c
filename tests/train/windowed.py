"""A training on debug tensors whose samples come in windows, sealed when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.train.trainer import TrainJob
from app.train.window_plan import Piece
from tests.train.debug import FakeSample, ListSource, debug_head, learnable_samples
from tests.train.test_trainer import make_job

SIZES = (12, 9, 11, 8)  # samples of the windows; a conversation each
VALID = (2, 2, 2, 2)
REJECTED = (6, 0, 3, 0)  # conversations without an answer, so that the windows foretell different lengths of an epoch


class ListWindows:
    """A WindowSource over samples in memory.

    Args:
        sizes: samples of each window.
        sealed: how many windows there are at each look, the last number for all that follow; None: all of them.
        told_last: the last window says that it is the last.
        rejected: conversations of each window that gave no sample.
    """

    every_s = 0.0

    def __init__(
        self,
        samples: Sequence[FakeSample],
        valid: Sequence[FakeSample],
        sizes: Sequence[int] = SIZES,
        sealed: Sequence[int] = (),
        told_last: bool = True,
        on_look: Callable[[int], None] = lambda looks: None,
        rejected: Sequence[int] = REJECTED,
    ) -> None:
        self.samples, self.all_valid, self.sizes, self.told_last = samples, valid, sizes, told_last
        self.sealed, self.on_look, self.looks = list(sealed) or [len(sizes)], on_look, 0
        self.train, self.valid = ListSource([]), ListSource([])
        self.pieces: list[Piece] = []
        self.rejected = rejected
        self.planned_rows, self.closed = sum(sizes) + sum(rejected), False
        self.take(self.look())

    def look(self) -> tuple[int, bool]:
        self.on_look(self.looks)
        count = self.sealed[min(self.looks, len(self.sealed) - 1)]
        last = self.looks >= len(self.sealed) - 1
        self.looks += 1
        return count, count == len(self.sizes) and (self.told_last or last)

    def take(self, seen: Any) -> None:
        count, self.closed = seen
        for number in range(len(self.pieces), count):
            end = sum(self.sizes[: number + 1])
            for own, held, upto in (
                (self.train, self.samples, end),
                (self.valid, self.all_valid, sum(VALID[: number + 1])),
            ):
                more = ListSource(list(held[len(own) : upto]))
                own.samples += more.samples
                own.infos += more.infos
            last = self.told_last and number == len(self.sizes) - 1
            self.pieces.append(Piece(end, len(self.valid), end + sum(self.rejected[: number + 1]), last))

    def by_part(self) -> list[int]:
        """Windows of parts that were committed out of order: the first half of the samples comes last."""
        middle = len(self.train) // 2
        return [*range(middle, len(self.train)), *range(middle)]


def windowed_job(folder: Path, windows: ListWindows | None = None, **changes: Any) -> TrainJob:
    """40 samples in four windows, ten steps of 96 tokens an epoch, three epochs."""
    head = debug_head()
    if windows is None:
        windows = make_windows()
    return make_job(
        folder, train=windows.train, valid=windows.valid, windows=windows, longest=32, head=head,
        start_after=0.2, **changes,
    )  # fmt: skip


def make_windows(**changes: Any) -> ListWindows:
    head = debug_head()
    return ListWindows(learnable_samples(40, head), learnable_samples(8, head, seed=1), **changes)
