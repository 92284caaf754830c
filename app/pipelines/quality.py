"""Quality: what the answers look like, counted by source, before anything is trained on them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from app.captured import load_entries
from app.config import QualityConfig
from app.errors import UserError
from app.judge import COLUMNS, SAMPLE_CLASSES, Judge
from app.parts import PARTS, PartEntry, ingest_part_path
from app.pipeline import StageContext, StageResult
from app.storage import Store
from app.target import load_tokenizer

log = logging.getLogger("draftmill")
QUALITY = "quality/quality.json"
CLASSES = (*SAMPLE_CLASSES, "rejected")
# The class an answer belongs to that generate did not keep; of any other reason it is `rejected`.
REASON_CLASS = {
    "empty_answer": "empty",
    "stopped_by_length": "cut",
    "leftover_tag": "leftover",
    "thinking_only": "thinking_only",
}
_EXAMPLES = 5
_WORTH_A_WARNING = 0.05
_LINE_EVERY_S = 15


@dataclass
class Tally:
    """Answers of one source."""

    answers: int = 0  # samples, and what generate did not keep
    classes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)  # class -> sample ids; of rejects, row ids
    reasons: Counter[str] = field(default_factory=Counter)  # of what generate did not keep

    def add(self, identity: str, classes: list[str]) -> None:
        self.answers += 1
        self.classes.update(classes)
        for name in classes:
            examples = self.examples.setdefault(name, [])
            if len(examples) < _EXAMPLES:
                examples.append(identity)

    def shares(self) -> dict[str, float]:
        return {c: round(self.classes[c] / max(1, self.answers), 6) for c in CLASSES}

    def to_json(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "counts": {c: self.classes[c] for c in CLASSES},
            "shares": self.shares(),
            "reasons": dict(self.reasons),
            "examples": self.examples,
        }


def run(ctx: StageContext) -> StageResult:
    """Write `quality/quality.json`: per source and class the share of answers, and ids of examples; no text.

    Raises:
        UserError: a share is above its threshold.
    """
    config, target = ctx.config, ctx.target
    tokenizer = load_tokenizer(target.model, config.target.trust_remote_code, config.target.chat_template)
    judge = Judge(tokenizer, target.eos_token_ids, config.quality)
    tallies = tally_parts(ctx.run.store, load_entries(ctx), judge)
    ctx.run.store.write_json(QUALITY, {"sources": {name: t.to_json() for name, t in tallies.items()}})
    for line in table_lines(tallies):
        log.info("quality: %s", line)
    _warn(tallies, config.quality)
    _check(tallies, config.quality, ctx.run.url)
    sources = {name: {"answers": t.answers, "shares": t.shares()} for name, t in tallies.items()}
    return StageResult(outputs=[QUALITY], counts={"sources": sources})


def tally_parts(store: Store, entries: list[PartEntry], judge: Judge) -> dict[str, Tally]:
    """Tallies by source of all samples and rejects of committed parts; the states are not read."""
    tallies: dict[str, Tally] = {}
    last_line = time.monotonic()
    for number, entry in enumerate(entries):
        for row in sample_rows(store, entry, list(COLUMNS)):
            tallies.setdefault(row["source"], Tally()).add(row["sample_id"], judge.classes(row))
        for source, fault, kept in _not_kept(store, entry):
            tally = tallies.setdefault(source, Tally())
            tally.reasons[fault["reason"]] += 1
            name = REASON_CLASS.get(fault["reason"])
            if name is not None or not kept:
                tally.add(fault["id"], [name or "rejected"])
        if time.monotonic() - last_line > _LINE_EVERY_S:
            last_line = time.monotonic()
            log.info("quality: %d of %d parts looked at", number + 1, len(entries))
    return tallies


def sample_rows(store: Store, entry: PartEntry, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Parquet rows of a committed part (SAMPLE_SCHEMA), or `columns` of them."""
    table = pq.read_table(store.local(f"{PARTS}/{entry.files['rows']['name']}"), columns=columns)
    for batch in table.to_batches():
        yield from batch.to_pylist()


def _not_kept(store: Store, entry: PartEntry) -> Iterator[tuple[str, dict[str, str], bool]]:
    """Source, fault, and whether earlier turns of the conversation were kept, of each answer that was not."""
    if not entry.rejects and not entry.cut_short:
        return
    data = pa.BufferReader(store.read_bytes(ingest_part_path(entry.part)))
    sources = {r["id"]: r["source"] for r in pq.read_table(data, columns=["id", "source"]).to_pylist()}
    for faults, kept in ((entry.rejects, False), (entry.cut_short, True)):
        for fault in faults:
            yield sources[fault["id"]], fault, kept


def table_lines(tallies: dict[str, Tally]) -> list[str]:
    """A heading and a line per source, shares in per cent."""
    width = max([6, *(len(name) for name in tallies)])
    heads = [c.replace("_", " ") for c in CLASSES]
    lines = [f"{'source':<{width}} {'answers':>9}" + "".join(f" {h:>13}" if " " in h else f" {h:>9}" for h in heads)]
    for name, tally in tallies.items():
        cells = [f"{100 * share:.1f} %" for share in tally.shares().values()]
        padded = "".join(f" {c:>{13 if ' ' in h else 9}}" for c, h in zip(cells, heads, strict=True))
        lines.append(f"{name:<{width}} {tally.answers:>9,}{padded}")
    return lines


def _limits(config: QualityConfig) -> dict[str, float | None]:
    return {c: getattr(config, f"max_{c}") for c in CLASSES}


def _warn(tallies: dict[str, Tally], config: QualityConfig) -> None:
    limits = _limits(config)
    for name, tally in tallies.items():
        for kind, share in tally.shares().items():
            if limits[kind] is None and share > _WORTH_A_WARNING:
                log.warning(
                    "quality: %s: %.1f %% of %d answers are of class %s (%s, say); set quality.max_%s to stop at that",
                    name, 100 * share, tally.answers, kind, tally.examples[kind][0], kind,
                )  # fmt: skip


def _check(tallies: dict[str, Tally], config: QualityConfig, url: str) -> None:
    limits = _limits(config)
    over = [
        (share / max(limit, 1e-9), name, kind, share, limit)
        for name, tally in tallies.items()
        if tally.answers >= config.min_answers
        for kind, share in tally.shares().items()
        if (limit := limits[kind]) is not None and share > limit
    ]
    if not over:
        return
    _, name, kind, share, limit = max(over)
    others = f" ({len(over) - 1} more in {url}/{QUALITY})" if len(over) > 1 else ""
    example = tallies[name].examples[kind][0]
    raise UserError(
        f"quality: {100 * share:.1f} % of the answers of source {name} are of class {kind}, more than"
        f" quality.max_{kind} {limit:g}{others}, for example {example}: look with"
        f" `draftmill inspect {url} --id {example}`, then mend the source or raise the threshold"
    )
