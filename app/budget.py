"""What the generate stage may spend: hours and answer tokens. A spent budget ends it cleanly between two parts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from app.config import GenerateConfig
from app.storage import Store

STOP = "generate/stop.json"  # while it is there, no engine begins another part
STOPPED_BY = "stopped_by"  # in the manifest's `extra`


@dataclass
class Budget:
    """Counts over the invocations of one stage: committed parts tell the tokens, the manifest the hours."""

    max_hours: float | None
    max_tokens: int | None
    tokens: int  # answer tokens of the committed parts
    hours_before: float = 0.0  # of invocations that ended before this one
    _began: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, config: GenerateConfig, tokens: int, recorded: dict[str, Any] | None) -> Budget:
        """The budget as it stands, `recorded` being what an earlier stop left in the manifest."""
        return cls(config.max_hours, config.max_tokens, tokens, float((recorded or {}).get("hours", 0.0)))

    @property
    def hours(self) -> float:
        return self.hours_before + (time.monotonic() - self._began) / 3600

    @property
    def reached(self) -> str | None:
        """The key of the limit that is reached."""
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            return "generate.max_tokens"
        if self.max_hours is not None and self.hours >= self.max_hours:
            return "generate.max_hours"
        return None

    def record(self, parts: int, of: int) -> dict[str, Any] | None:
        """For the manifest: what stopped the stage with `parts` of its parts made; None where nothing did."""
        limit = self.reached if parts < of else None
        if limit is None:
            return None
        value = self.max_tokens if limit == "generate.max_tokens" else self.max_hours
        return {"limit": limit, "value": value, "hours": self.hours, "tokens": self.tokens, "parts": parts, "of": of}

    def spend(self, tokens: int, store: Store) -> None:
        """Count the answer tokens of a part; at the limit the engines are told to begin no other."""
        self.tokens += tokens
        if self.reached is not None:
            _stop(store)

    @contextlib.contextmanager
    def watched(self, store: Store) -> Iterator[None]:
        """Tells the engines when the hours are over, whatever they work on then."""
        store.delete(STOP)
        timer = None
        if self.max_hours is not None:
            timer = threading.Timer(max(0.0, self.max_hours - self.hours) * 3600, _stop, (store,))
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            store.delete(STOP)


def _stop(store: Store) -> None:
    store.write_json(STOP, {})


def stopped_words(record: dict[str, Any]) -> str:
    """One sentence on a stage that its budget ended."""
    return (
        f"stopped by {record['limit']} {record['value']:g} with {record['parts']} of {record['of']} parts made"
        f" ({record['tokens']:,} answer tokens, {record['hours']:.2f} h); the same command without the limit, or with a"
        " higher one, makes the rest"
    )
