"""What a running stage tells of itself: `STAGE/live.json` of the run folder, for whoever looks from anywhere.

Written every 15 seconds while the stage runs and deleted when it is done; one that was left says how far a stopped
stage came. It holds counts, places and row ids, never text of a row.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from app.redact import redact
from app.storage import Store

EVERY_S = 15.0
_MOST_LINES = 16  # of members, stragglers, failures


@dataclass(frozen=True)
class Live:
    """How a stage stands, in words; numbers beside them where a program may want them."""

    words: str  # how far, how fast, how long yet
    waiting_for: str | None = None
    stragglers: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)  # engines or workers, a line each
    disk: str | None = None  # what is left where the stage writes
    numbers: dict[str, float] = field(default_factory=dict)  # done, all, rate_per_s, left_s
    at: float = field(default_factory=time.time)  # unix seconds


def live_path(stage: str) -> str:
    return f"{stage}/live.json"


def tell(store: Store, stage: str, live: Live) -> None:
    """Write it; a store that fails for the moment is no fault of the stage.

    store: the run folder.
    """
    data = _clean(asdict(live))
    for name in ("stragglers", "failures", "members"):
        if len(data[name]) > _MOST_LINES:
            data[name] = [*data[name][:_MOST_LINES], f"and {len(data[name]) - _MOST_LINES} more"]
    with contextlib.suppress(Exception):
        store.write_json(live_path(stage), data, sync=False)


def _clean(value: Any) -> Any:
    """Plain data whose strings hold no secret."""
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    return redact(value) if isinstance(value, str) else value


def forget(store: Store, stage: str) -> None:
    """The stage is done: its manifest tells the rest."""
    with contextlib.suppress(Exception):
        store.delete(live_path(stage))


def read_live(store: Store, stage: str) -> Live | None:
    """What the stage told last; None where it told nothing, or what is there is none of ours."""
    data: Any = store.read_json(live_path(stage))
    try:
        live = Live(**data)
        return live if isinstance(live.words, str) and float(live.at) > 0 else None
    except (TypeError, ValueError):
        return None
