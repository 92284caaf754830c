"""One fault of a checkpoint, and the table of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

VLLM, SGLANG = "vLLM", "SGLang"
ENGINES = (VLLM, SGLANG)
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """Where, what should be there, what is, how to mend it; which engines mind it, and how much.

    An error makes those engines refuse the draft or compute another one; a warning does not.
    """

    what: str
    expected: str
    found: str
    fix: str
    engines: tuple[str, ...] = ENGINES
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}; {self.fix}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "engines": list(self.engines)}


def errors_of(differences: Sequence[Difference], engine: str | None = None) -> list[Difference]:
    """The errors among `differences`, or those of one engine."""
    return [d for d in differences if d.severity == "error" and (engine is None or engine in d.engines)]


def format_differences(differences: Sequence[Difference], width: int = 140) -> str:
    """A table for people, errors first; one line when there is nothing to say."""
    if not differences:
        return "no differences"
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in ("", "for", "what", "expected", "found", "fix"):
        table.add_column(column, overflow="fold")
    for d in sorted(differences, key=lambda d: d.severity != "error"):
        engines = "both" if len(d.engines) == len(ENGINES) else ", ".join(d.engines)
        table.add_row(d.severity, engines, d.what, d.expected, d.found, d.fix)
    text = io.StringIO()
    Console(file=text, width=width, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())
