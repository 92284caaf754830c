"""The conversations a run must not hold any more, as every later ingest reads them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from app.errors import UserError
from app.storage import Store

FORGOTTEN = "forgotten.json"
REASON, DETAIL = "forgotten", "removed by `draftmill forget`"


@dataclass(frozen=True)
class Forgotten:
    """`forgotten.json`. It names conversations by their content hashes and holds no text."""

    ids: list[str] = field(default_factory=list)  # pending ones among them
    pending: dict[str, Any] | None = None  # what a forgetting that has begun still has to do


def read_forgotten(store: Store) -> Forgotten:
    """The list of a run folder; empty where nothing was forgotten.

    Raises:
        UserError: it cannot be read: what it names must not come back by that.
    """
    data = store.read_json(FORGOTTEN)
    if data is None and not store.exists(FORGOTTEN):
        return Forgotten()
    try:
        pending = data["pending"]
        if pending is not None:
            list(map(str, pending["ids"]))
        return Forgotten(list(map(str, data["ids"])), pending)
    except (TypeError, KeyError) as error:
        raise UserError(
            f"{store.url}/{FORGOTTEN} cannot be read; restore it, or forget its conversations anew"
        ) from error


def write_forgotten(store: Store, forgotten: Forgotten) -> None:
    store.write_json(FORGOTTEN, asdict(forgotten))


def refuse_half_forgotten(store: Store) -> None:
    """Raises UserError where a forgetting was cut off: until it is done, nothing of the run may go on."""
    pending = read_forgotten(store).pending
    if pending is not None:
        raise UserError(
            f"{store.url}: a forgetting was cut off; finish it first: draftmill forget {store.url}"
            f" {' '.join(pending['ids'])}"
        )
