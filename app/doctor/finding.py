"""What one check found, and the causes that findings name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

# Causes that a failed check names.
LAYERS_OFF = "layers off by one"
SWAPPED = "swapped layers"
WRONG_LAYERS = "wrong layers"
NORM = "missing norm"
ROPE = "wrong rope base"
FIRST_N = "first-N vocabulary"
STALE_MAP = "stale map"
BAD_MAP = "broken map"
EMBEDDING = "random embeddings"
HEAD = "weights other than trained"
LAYOUT = "checkpoint layout"
FLAG = "EAGLE flag"
MASK = "shifted mask"
EMPTY_MASK = "empty mask"
TOO_LONG = "samples beyond the length limit"
ALL_MASKED = "mask of everything"
TEMPLATE = "wrong template"
BAD_STATES = "broken states"
SHIFTED_STATES = "shifted states"
OTHER_ROW = "states of another row"
OTHER_TARGET = "another target"
CONTEXT = "short context"
ORDER = "training order"
NORMS_STILL = "norms that never moved"
RESTARTED = "schedule begun again"
COUNTS = "wrong counts"
DAMAGED = "damaged file"

State = Literal["passed", "advice", "failed", "not applicable"]


class NotApplicable(Exception):
    """A check cannot say anything here; the message says why, in words."""


@dataclass(frozen=True)
class Finding:
    """State of one line of the checklist, its evidence, what to do next, and the cause where it failed."""

    state: State
    evidence: str
    next_step: str = ""
    cause: str | None = None


def passed(evidence: str, note: str = "") -> Finding:
    """Nothing is wrong; with a `note`, what a person may still want to do, the line is advice."""
    return Finding("advice" if note else "passed", evidence, note)


def failed(cause: str, evidence: str, next_step: str) -> Finding:
    return Finding("failed", evidence, next_step, cause)


@dataclass(frozen=True)
class Line:
    """One line of the checklist with what was found; `id` as in the checklist (A1, ...)."""

    id: str
    title: str
    finding: Finding

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "title": self.title, **asdict(self.finding)}
