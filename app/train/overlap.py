"""Training beside generate (`train.start_after`): it begins with the first committed parts while others are being made.

Generate tells of every part it commits. From the share of the conversations on that `start_after` names, the parts that
are in no window yet are sealed as the next one (app/windows.py); with the first window the vocabulary map is counted
from its parts and the workers start, from a thread of the driver. They read windows as they need them and wait where
none is left. The train stage, when its turn comes, only waits for their end.

What fails on either side ends both: training is asked to save, and the same command goes on with both.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from app.captured import require_states
from app.cluster import gpu_count
from app.errors import UserError
from app.parts import PartEntry
from app.pipeline import StageContext
from app.pipelines.vocab import freeze
from app.samples import conversation_ids, load_split
from app.sizing import train_gpus
from app.train import stage
from app.train.loop import FOLDER, Place
from app.train.state import StopRequest
from app.windows import Windows, entries_of, read_windows, write_windows

log = logging.getLogger("draftmill")
_LOOK_S = 0.5
_END_S = 60.0  # for workers that saved to be gone
_SHORT_S = 5.0  # for those that did not: they end with the cluster, or with this process


@contextlib.contextmanager
def ahead(ctx: StageContext) -> Iterator[None]:
    """Lets generate find, while the block runs, what to tell of its parts; ends a training that is under way."""
    # A finished training is done again only when all parts are there: they may turn out to be what they were.
    if ctx.config.train.start_after is None or ctx.run.manifest("train") is not None:
        yield
        return
    training = Overlap(ctx)
    ctx.ahead = training
    try:
        yield
    finally:
        ctx.ahead = None
        training.end()


class Overlap:
    """An Ahead for the train stage; called by the driver's main thread alone."""

    def __init__(self, ctx: StageContext) -> None:
        self._ctx, self._store = ctx, ctx.run.store
        self._windows: Windows | None = None  # None: nothing was committed yet in this invocation
        self._fresh: list[PartEntry] = []  # in no window yet
        self._rows = 0  # of them
        self._known: set[int] = set()  # all that are committed
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._result: Any = None
        self._fault: BaseException | None = None

    @property
    def gpus(self) -> int:
        """GPUs that training holds now."""
        runs = self._thread is not None and self._thread.is_alive()
        return train_gpus(self._ctx.config, gpu_count() > 0) if runs else 0

    def committed(self, entries: Iterable[PartEntry], parts: int) -> None:
        """Seal a window where enough parts are in none yet, and begin with the first.

        Args:
            entries: committed since the last call; at first all of them.
            parts: that there will be.

        Raises:
            UserError: training failed, or cannot begin.
        """
        self._refuse()
        new = [e for e in entries if e.part not in self._known]
        self._known |= {e.part for e in new}
        if self._windows is None:
            by_part = {e.part: e for e in new}
            self._windows = self._taken_up(by_part, parts)
            new = self._windows.unsealed_of(by_part)
        self._fresh += new
        self._rows += sum(e.rows_in for e in new)
        self._seal(whole=len(self._known) == parts)
        if self._windows.sealed and self._thread is None:
            self._began = time.monotonic()
            self._thread = threading.Thread(target=self._train, name="draftmill-training", daemon=True)
            self._thread.start()

    def finish(self) -> tuple[Any, float] | None:
        """Close the windows and wait for the end of training: what it returns, and its seconds so far; None where it
        did not begin in this invocation.

        Raises:
            UserError: it failed.
        """
        if self._thread is None:
            return None
        earlier_s = time.monotonic() - self._began
        if not stage.close_windows(self._ctx):
            raise UserError("train: the parts are others than those it began with; run the same command again")
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            if self._ctx.lease is not None:
                self._ctx.lease.check()
        self._refuse()
        return self._result, earlier_s

    def end(self) -> None:
        """Where training is still under way something else failed: it saves and ends."""
        if self._thread is None or not self._thread.is_alive():
            return
        own = self._store.sub(FOLDER)
        saved = stage.save_and_leave(own)
        if not saved:
            own.write_json(StopRequest.PATH, {})  # for workers that have not begun yet
        self._thread.join(_END_S if saved else _SHORT_S)
        log.info("train: ended with the stage beside it; the same command goes on with both")

    def _taken_up(self, entries: Mapping[int, PartEntry], parts: int) -> Windows:
        """The windows of an earlier invocation where their parts and the settings are today's; else none."""
        stage.prepare_windowed(self._ctx)
        windows = read_windows(self._store)
        if windows is not None and windows.fit(entries) and not (windows.closed and len(entries) < parts):
            return windows
        if windows is not None:
            log.warning("train: parts that it learnt from are made again; training starts over")
            self._store.delete(FOLDER)
            stage.prepare_windowed(self._ctx)
        return Windows(int(self._ctx.input("ingest").counts["kept"]))

    def _seal(self, whole: bool) -> None:
        """Seal what is in no window where it is enough, or where the parts are `whole`."""
        assert self._windows is not None
        due = self._rows >= (self._ctx.config.train.start_after or 1.0) * self._windows.planned_rows
        if not self._fresh or not (whole or due) or not (self._windows.sealed or self._teach(self._fresh)):
            return
        require_states(self._ctx, "train", self._fresh)
        self._windows = self._windows.with_window(self._fresh, last=whole)
        write_windows(self._store, self._windows)
        number, parts = len(self._windows.sealed), len(self._fresh)
        log.info("train: window %d is sealed: %d parts, %d rows", number, parts, self._rows)
        self._fresh, self._rows = [], 0

    def _teach(self, entries: list[PartEntry]) -> bool:
        """Whether any conversation of them is trained on."""
        split = load_split(self._store, entries, self._ctx.config)
        return any(split[c] == "train" for c in conversation_ids(self._store, entries))

    def _train(self) -> None:
        try:
            assert self._windows is not None
            freeze(self._ctx, entries_of(self._store, self._windows.sealed[0]))
            self._result = stage.train_in(self._ctx, Place(), windowed=True)
        except BaseException as error:
            self._fault = error

    def _refuse(self) -> None:
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
