"""What ingest counts, and what it says of it when it is done."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from app.config import Config, SourceConfig
from app.target import Renderer
from app.template_probe import ignored_roles

log = logging.getLogger("draftmill")


@dataclass
class SourceCount:
    """Rows of one source: rows_in = kept + rejected + not_drawn."""

    asked: int | None = None  # conversations, by `count` or `share`
    rows_in: int = 0
    kept: int = 0
    not_drawn: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first row rejected by it

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "rows_in": self.rows_in,
            "kept": self.kept,
            "not_drawn": self.not_drawn,
            "rejected": dict(self.rejected),
            "notes": {k: v for k, v in self.notes.items() if v},
        }


@dataclass
class Tally:
    """What an ingest has taken in."""

    sources: dict[str, SourceCount] = field(default_factory=dict)
    methods: Counter[str] = field(default_factory=Counter)  # mask method -> rows
    overlap: list[dict[str, str]] = field(default_factory=list)  # id and place of kept rows with a benchmark prompt
    supervised: int = 0  # tokens of rows taken as they are
    total: int = 0  # of them all


def report(config: Config, renderer: Renderer, tally: Tally, overlap: str) -> None:
    """Log what became of each source, and what a person should know of it.

    Args:
        overlap: where the list of overlapping rows is.
    """
    for name, count in tally.sources.items():
        reasons = ", ".join(f"{r} {n}" for r, n in count.rejected.most_common()) or "none"
        asked = f"{count.asked} asked, " if count.asked is not None else ""
        drawn = f", {count.not_drawn} not drawn" if count.not_drawn else ""
        log.info(
            "ingest: %s: %d rows, %s%d kept, rejected: %s%s", name, count.rows_in, asked, count.kept, reasons, drawn
        )
    log.info("ingest: loss mask by %s", ", ".join(f"{m} ({n} rows)" for m, n in tally.methods.items()))
    if tally.total:
        share = tally.supervised / tally.total
        log.info("ingest: %.1f %% of the tokens taken as they are are supervised", 100 * share)
        if not 0.05 <= share <= 0.95:
            log.warning("ingest: a supervised share of %.1f %% is unusual; look at the loss masks", 100 * share)
    for source in config.sources:
        if source.label in tally.sources:
            _tell(config, renderer, source, tally.sources[source.label])
    if tally.overlap:
        log.warning(
            "ingest: %d kept rows hold a prompt of ingest.benchmark_sets (ids in %s); ingest.drop_overlap=true"
            " rejects them",
            len(tally.overlap), overlap,
        )  # fmt: skip


def _tell(config: Config, renderer: Renderer, source: SourceConfig, count: SourceCount) -> None:
    name, notes, kept = source.label, count.notes, count.kept
    for note, words in (
        ("leading_assistant_dropped", "opened with an assistant turn, which was dropped"),
        ("role_repeats", "repeat a role"),
        ("truncated", f"were cut at max_length ({config.ingest.over})"),
    ):
        if notes[note]:
            log.info("ingest: %s: %d conversations %s", name, notes[note], words)
    for thing in ("tool_calls", "tools"):
        if notes[thing] > notes[f"{thing}_rendered"]:
            log.warning(
                "ingest: %s: the target's chat template ignores the %s of %d of %d conversations that have some",
                name, thing.replace("_", " "), notes[thing] - notes[f"{thing}_rendered"], notes[thing],
            )  # fmt: skip
    for role in ignored_roles(renderer):
        if notes[f"role:{role}"]:
            log.warning(
                "ingest: %s: the target's chat template leaves out what %s messages say, and the source has %d",
                name, role, notes[f"role:{role}"],
            )  # fmt: skip
    if source.use == "as_is":
        if notes["reasoning"]:
            log.info("ingest: %s: reasoning: %d/%d rendered", name, notes["reasoning_rendered"], notes["reasoning"])
        if renderer.thinks and notes["reasoning"] < kept:
            log.warning(
                "ingest: %s: %d of %d conversations have no reasoning although the target is a reasoning model;"
                " the draft will not learn to draft it. use: regenerate brings it back",
                name, kept - notes["reasoning"], kept,
            )  # fmt: skip
