"""The sealed windows of a run as one worker takes them: its readers grow by the parts of each."""

from __future__ import annotations

from collections.abc import Callable

from app.engine.patience import persistently
from app.errors import UserError
from app.parts import PartEntry
from app.samples import SampleReader
from app.storage import Store
from app.train.ranks import Ranks
from app.train.window_plan import Piece
from app.windows import Windows, entries_of, read_windows


class Feed:
    """A WindowSource over the run folder. The leading rank looks, and all take what it saw.

    Args:
        store: the run folder.
        split: conversation id -> split, of all conversations, answered or not.
        accept: raises UserError for parts that do not go with this run.
    """

    def __init__(self, store: Store, split: dict[str, str], accept: Callable[[list[PartEntry]], None]) -> None:
        self._store, self._accept = store, accept
        self.train = SampleReader(store, [], split, ("train",))
        self.valid = SampleReader(store, [], split, ("valid",))
        self.pieces: list[Piece] = []
        self.entries: list[PartEntry] = []
        self.planned_rows, self.closed = 0, False
        self.every_s = 1.0 if store.is_local else 5.0

    @classmethod
    def begin(
        cls, store: Store, split: dict[str, str], accept: Callable[[list[PartEntry]], None], ranks: Ranks
    ) -> Feed:
        """With the windows that there are, the same on every rank.

        Raises:
            UserError: none is sealed.
        """
        feed = cls(store, split, accept)
        feed.take(ranks.gather((feed.look() if ranks.leads else None,))[0][0])
        if not feed.pieces:
            raise UserError(f"{store.url}: no window of parts is sealed; run the same command again")
        return feed

    def look(self) -> Windows | None:
        """What is sealed now."""
        return persistently(lambda: read_windows(self._store), self._store.url)

    def take(self, seen: Windows | None) -> None:
        """Read the ids and lengths of the windows that are new.

        Raises:
            UserError: a part is not what was sealed.
        """
        if seen is None:
            return
        for window in seen.sealed[len(self.pieces) :]:
            try:
                entries = entries_of(self._store, window)
            except ValueError as error:
                raise UserError(f"train: {error}, it was made again since; run the same command again") from error
            self._accept(entries)
            self.train.extend(entries)
            self.valid.extend(entries)
            self.entries += entries
            rows = window.rows + (self.pieces[-1].rows if self.pieces else 0)
            self.pieces.append(Piece(len(self.train), len(self.valid), rows, window.last))
        self.planned_rows, self.closed = seen.planned_rows, seen.closed

    def by_part(self) -> list[int]:
        """Indices of the training samples in the order of their parts."""
        return self.train.by_part()
