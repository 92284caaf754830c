"""Which samples make up which optimiser step, and their loading ahead of time.

The order is a function of (seed, epoch) alone, and the samples of a step do not depend on the number of
ranks: a step is chosen globally, then shared out. So every rank has the same number of steps by construction,
each sample is seen once an epoch, and a run may go on from (epoch, step) with another number of workers.
Everything is planned from lengths; states are read when their step is near. A training beside generate has its first
epoch by windows (app/train/window_plan.py).
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from app.errors import UserError
from app.train.activations import Rows
from app.train.alignment import Pack, pack

# Work of one supervised row over that of an unsupervised one, about; it only balances ranks.
SUPERVISED_COST = 8
# Samples read at once: zstd uses as many cores, an object store answers as many requests.
READERS = 8


class SampleLength(Protocol):
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_supervised(self) -> int: ...  # teacher rows


class SampleSource(Protocol):
    """Random access to samples, of several threads at once; `infos` gives their lengths without reading them."""

    @property
    def infos(self) -> Sequence[Any]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class StepPlan:
    """The samples of every step of every epoch.

    Samples that teach nothing are left out (`left_out`), too long ones are cut (`cut`, together by `cut_tokens`).
    Each of the `steps_per_epoch` steps holds at least one sample and about the same number of tokens: there is no short
    last step, and a sample of more tokens than a step is a step of its own.
    """

    open = False  # whether samples are still to come

    def __init__(
        self, infos: Sequence[SampleLength], tokens_per_step: int, seed: int, max_tokens: int,
        order: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Samples longer than `max_tokens` are planned as cut to it; of `infos` those that `order` names, or all.

        Raises:
            UserError: no sample teaches anything.
        """
        self.seed = seed
        self.max_tokens = max_tokens
        order = range(len(infos)) if order is None else order
        self.indices = [i for i in order if infos[i].num_supervised > 0]
        self.left_out = len(order) - len(self.indices)
        self._epoch: tuple[int | str, list[list[int]]] = (-1, [])  # the one asked for last
        if not self.indices:
            raise UserError("no training sample has two supervised tokens in a row; look at the loss masks")
        self.tokens = {i: min(infos[i].num_tokens, max_tokens) for i in self.indices}
        self.cost = {i: n + SUPERVISED_COST * min(infos[i].num_supervised, n) for i, n in self.tokens.items()}
        over = [infos[i].num_tokens - max_tokens for i in self.indices if infos[i].num_tokens > max_tokens]
        self.cut, self.cut_tokens = len(over), sum(over)
        total = sum(self.tokens.values())
        self.steps_per_epoch = min(max(1, round(total / tokens_per_step)), len(self.indices))

    def total(self, epochs: float) -> int:
        """Steps of so many epochs."""
        return max(1, round(epochs * self.steps_per_epoch))

    def rate_total(self, index: int, epochs: float) -> int:
        """Steps that the schedule of the learning rate reckons with at step `index`."""
        return self.total(epochs)

    def epochs_after(self, steps: int) -> float:
        """Epochs done after so many steps."""
        return steps / self.steps_per_epoch

    def place(self, steps: int) -> tuple[int, int]:
        """Epoch, and steps of it that are done."""
        return divmod(steps, self.steps_per_epoch)

    def validations(self, epochs: float, every: float) -> set[int]:
        """Steps after which to validate, every so many epochs and at the end."""
        total, between = self.total(epochs), every * self.steps_per_epoch
        return {round(i * between) for i in range(1, int(total / between) + 1)} - {0} | {total}

    def valid_count(self, steps: int, count: int) -> int:
        """How many of `count` validation samples to look at after so many steps."""
        return count

    def step(self, index: int) -> tuple[int, list[int]]:
        """The epoch of step `index`, counted over all epochs, and its sample indices."""
        epoch, at = divmod(index, self.steps_per_epoch)
        return epoch, self.steps_of(epoch)[at]

    def steps_of(self, epoch: int | str) -> list[list[int]]:
        """As `epoch`; the one asked for last is kept."""
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self.epoch(epoch))
        return self._epoch[1]

    def epoch(self, epoch: int | str) -> list[list[int]]:
        """Sample indices of each step of `epoch` (from 0), all ranks together."""
        order = list(self.indices)
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        steps: list[list[int]] = []
        left, at = sum(self.tokens.values()), 0
        for steps_left in range(self.steps_per_epoch, 0, -1):
            step: list[int] = []
            held = 0.0
            while at < len(order) and (not step or steps_left == 1 or len(order) - at >= steps_left):
                size = self.tokens[order[at]]
                # Stop where going on would miss the fair share by more than stopping does.
                if step and steps_left > 1 and held + size / 2 > left / steps_left:
                    break
                step.append(order[at])
                held += size
                at += 1
            left -= int(held)
            steps.append(step)
        return steps

    def share(self, step: Sequence[int], world: int) -> list[list[int]]:
        """Split a step's samples over `world` ranks, balanced by work; a rank may get none of a tiny step."""
        ranks: list[list[int]] = [[] for _ in range(world)]
        loads = [0] * world
        for index in sorted(step, key=lambda i: (-self.cost[i], i)):
            lightest = loads.index(min(loads))
            ranks[lightest].append(index)
            loads[lightest] += self.cost[index]
        place = {index: i for i, index in enumerate(step)}
        return [sorted(rank, key=place.__getitem__) for rank in ranks]


@dataclass(frozen=True)
class LoadedStep:
    """One rank's part of one optimiser step."""

    index: int  # from 0, over all epochs
    epoch: int
    samples: list[int]
    packs: list[Pack]  # at least one; an empty pack where this rank has nothing to do
    tokens: int


class StepLoader:
    """Reads and packs the coming steps of one rank in the background."""

    def __init__(
        self, source: SampleSource, plan: StepPlan, unroll_steps: int, rank: int = 0, world: int = 1,
        tokens_per_pass: int = 8192, pin: bool = False, ahead: int = 2,
        fits: Callable[[Rows], bool] = lambda rows: True, embedding: Tensor | None = None,
    ) -> None:  # fmt: skip
        """A rank's samples of a step become packs of about `tokens_per_pass` tokens that `fits` allows, at least one
        sample each; this bounds memory.

        `ahead` steps are kept ready; `pin` puts them into pinned memory for copies to a GPU. With `embedding` [V, H],
        on the CPU, packs bring the rows of it that they read.
        """
        self.source, self.plan, self.unroll_steps = source, plan, unroll_steps
        self.rank, self.world = rank, world
        self.tokens_per_pass, self.pin, self.ahead = tokens_per_pass, pin, ahead
        self.fits, self.embedding = fits, embedding

    def steps(self, start: int, end: int) -> Iterator[LoadedStep]:
        """The steps start .. end-1, counted over all epochs. Errors of the reading thread are raised here."""
        ready: queue.Queue[LoadedStep | BaseException | None] = queue.Queue(self.ahead)
        stop = threading.Event()

        def put(item: LoadedStep | BaseException | None) -> None:
            while not stop.is_set():
                try:
                    return ready.put(item, timeout=0.1)
                except queue.Full:
                    continue

        readers = ThreadPoolExecutor(READERS, "sample-reader")

        def read() -> None:
            try:
                for index in range(start, end):
                    if stop.is_set():
                        return
                    put(self._load(index, *self.plan.step(index), readers))
                put(None)
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=read, name="step-loader", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            readers.shutdown(cancel_futures=True)
            thread.join()

    def _load(self, index: int, epoch: int, step: list[int], readers: Executor) -> LoadedStep:
        mine = self.plan.share(step, self.world)[self.rank]
        packs: list[Pack] = []
        group: list[Any] = []
        held, rows = 0, self._nothing
        for i, sample in zip(mine, readers.map(self._read, mine), strict=True):
            size, more = self.plan.tokens[i], Rows.of_mask(sample.loss_mask, self.unroll_steps)
            if group and (held + size > self.tokens_per_pass or not self.fits(rows + more)):
                packs.append(self._pack(group))
                group, held, rows = [], 0, self._nothing
            group.append(sample)
            held, rows = held + size, rows + more
        packs.append(self._pack(group))
        return LoadedStep(index, epoch, mine, packs, sum(self.plan.tokens[i] for i in mine))

    @property
    def _nothing(self) -> Rows:
        return Rows(0, 0, (0,) * self.unroll_steps)

    def _pack(self, samples: list[Any]) -> Pack:
        packed = pack(samples, self.unroll_steps)
        if self.embedding is not None:
            packed = replace(packed, embedded=self.embedding[packed.next_ids])
        return packed.pin() if self.pin else packed

    def _read(self, index: int) -> Any:
        return cut(self.source[index], self.plan.max_tokens)


def cut(sample: Any, max_tokens: int) -> Any:
    """The first `max_tokens` tokens of `sample` with their states; a sample that fits comes back as it is."""
    if len(sample.token_ids) <= max_tokens:
        return sample
    read = sample.teacher_pos <= max_tokens - 2  # [S], the teacher at p needs x_{p+1}
    return replace(
        sample,
        token_ids=sample.token_ids[:max_tokens],
        loss_mask=sample.loss_mask[:max_tokens],
        aux=sample.aux[: max_tokens - 1],
        teacher=sample.teacher[read],
        teacher_pos=sample.teacher_pos[read],
    )


def on_device(steps: Iterator[LoadedStep], device: torch.device) -> Iterator[LoadedStep]:
    """`steps` with their packs on `device`; a GPU copies the next step while it works on this one."""
    if device.type != "cuda":
        yield from steps
        return
    copies, work = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    held: LoadedStep | None = None
    for step in steps:
        with torch.cuda.stream(copies):
            moved = replace(step, packs=[p.to(device) for p in step.packs])
        if held is not None:
            yield held
        work.wait_stream(copies)
        for p in moved.packs:
            p.used_by(work)
        held = moved
    if held is not None:
        yield held
