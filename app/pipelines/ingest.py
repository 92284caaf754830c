"""Ingest: source files to numbered parts of conversations with stable ids; every row kept or rejected."""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from app.config import Config, SourceConfig
from app.errors import RowError, UserError
from app.forgotten import DETAIL, REASON, read_forgotten
from app.parts import ingest_part_path, ingest_table, write_ingest_part
from app.pipeline import StageContext, StageResult
from app.privacy import BenchmarkPrompts, NearRepeats
from app.redact import redact
from app.rows import Outcome, RowPool, RowSettings
from app.sources.logs import join_streams
from app.sources.readers import SourceError, read_rows, source_digest
from app.sources.shapes import to_raw
from app.storage import Store, explained
from app.target import TargetInfo

log = logging.getLogger("draftmill")
REJECTS = "ingest/rejects.jsonl"
OVERLAP = "ingest/overlap.json"
_LINE_EVERY_S = 15
# Reasons that say nothing against a source: repeats, and the other lines of a server's log.
EXPECTED = ("duplicate", "near_duplicate", "benchmark_overlap", "not_a_request", "no_prompt", REASON)


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


def run(ctx: StageContext) -> StageResult:
    """Read every source, write `ingest/parts/*.parquet`, `ingest/rejects.jsonl` and `ingest/overlap.json`.

    Raises:
        UserError: a source is missing or malformed, too many rows are rejected, or none is left.
    """
    config = ctx.config
    check_settings(config, ctx.target)
    skipped: dict[str, str] = {}
    benchmarks = _benchmark_prompts(config)
    with RowPool(RowSettings.of(config, ctx.target), config.ingest.workers or os.cpu_count() or 1) as pool:
        if config.capture.mask == "generation_tags" and not pool.local.renderer.has_generation_tags:
            raise UserError(
                "capture.mask=generation_tags, but the target's chat template has no {% generation %} tags:"
                " every mask would be empty; use capture.mask=auto or give a template with tags in"
                " target.chat_template"
            )
        while True:
            try:
                done = _Ingest(ctx, pool, benchmarks).run([s for s in config.sources if s.label not in skipped])
                break
            except SourceError as error:
                if config.ingest.on_source_error == "stop":
                    raise
                # What a source gave before it failed is not kept: the others are read again without it.
                log.warning("ingest: SKIPPED %s", error)
                skipped[error.label] = str(error)
                if len(skipped) == len(config.sources):
                    raise UserError(f"every source failed; the last one: {error}") from error
    return done.result(skipped)


def outside(ctx: StageContext) -> dict[str, str]:
    """Digests of what ingest reads: source files, benchmark sets, the target's tokenizer with its template."""
    digests: dict[str, str] = {}
    for source in ctx.config.sources:
        try:
            digests[f"source {source.label}"] = source_digest(source)
        except SourceError:
            if ctx.config.ingest.on_source_error == "stop":
                raise
            digests[f"source {source.label}"] = "unreadable"
    for path in ctx.config.ingest.benchmark_sets:
        digests[f"benchmark set {path}"] = source_digest(_benchmark_source(path))
    return {**digests, "target tokenizer and template": ctx.target.tokenizer_digest}


def check_settings(config: Config, target: TargetInfo) -> None:
    """Raises UserError for settings that fit no row."""
    if config.generate.max_length > target.max_position_embeddings:
        raise UserError(
            f"generate.max_length is {config.generate.max_length} and the target holds"
            f" {target.max_position_embeddings}; lower it"
        )
    method = config.capture.mask
    as_is = [s.label for s in config.sources if s.use == "as_is"]
    regenerate = [s.label for s in config.sources if s.use == "regenerate"]
    if method == "engine" and as_is:
        raise UserError(f"capture.mask=engine fits regenerated sources only, and {as_is[0]} is taken as it is")
    if method not in ("auto", "engine") and regenerate:
        log.info("capture.mask=%s applies to as_is sources; regenerated ones keep the engine's boundary", method)
    if method == "all" and as_is:
        log.warning("capture.mask=all: every token of %s is supervised, the user's too", ", ".join(as_is))


class _Ingest:
    """One reading of all sources."""

    def __init__(self, ctx: StageContext, pool: RowPool, benchmarks: BenchmarkPrompts | None) -> None:
        self._config, self._store, self._url = ctx.config, ctx.run.store, ctx.run.url
        self._target = ctx.target
        self._pool, self._benchmarks = pool, benchmarks
        self._near = NearRepeats(n) if (n := ctx.config.ingest.near_duplicates) is not None else None
        self._forgotten = frozenset(read_forgotten(self._store).ids)
        self._seen: set[bytes] = set()
        self._counts: dict[str, SourceCount] = {}
        self._methods: Counter[str] = Counter()
        self._mixable: dict[str, Counter[str]] = {}
        self._overlap: list[dict[str, str]] = []
        self._supervised = self._total = self._rows = 0
        self._last_line = time.monotonic()

    def run(self, sources: list[SourceConfig]) -> _Ingest:
        self._store.delete("ingest")
        self._writer = _PartWriter(self._store, self._config.storage.rows_per_part)
        path = self._store.scratch() / f"rejects.tmp-{os.getpid()}"
        try:
            with explained(self._url), open(path, "w", encoding="utf-8", errors="replace") as rejects:
                for source in sources:
                    self._source(source, rejects)
        finally:  # also of an ingest that stops: they say why
            self._store.put(path, REJECTS)
        self._outputs = [*self._writer.close(), REJECTS]
        if not any(c.kept for c in self._counts.values()):
            raise UserError(
                f"no row of {', '.join(self._counts)} can be used; the reasons are in {self._url}/{REJECTS}"
            )
        self._check_mix()
        if self._benchmarks is not None:
            self._store.write_json(OVERLAP, {"prompts": len(self._benchmarks), "rows": self._overlap})
            self._outputs.append(OVERLAP)
        return self

    def result(self, skipped: dict[str, str]) -> StageResult:
        self._report()
        counts = self._counts.values()
        return StageResult(
            outputs=self._outputs,
            counts={
                "rows_in": sum(c.rows_in for c in counts),
                "kept": sum(c.kept for c in counts),
                "not_drawn": sum(c.not_drawn for c in counts),
                "rejected": dict(sum((c.rejected for c in counts), Counter())),
                "sources": {name: c.to_json() for name, c in self._counts.items()},
                "skipped_sources": skipped,
                "overlap": len(self._overlap),
                "mask_methods": dict(self._methods),
                "parts": self._writer.parts,
                "rows_per_part": self._config.storage.rows_per_part,
            },
            seeds={f"draw of {s.label}": s.seed for s in self._config.sources if s.count or s.share},
        )

    def _source(self, source: SourceConfig, rejects: TextIO) -> None:
        count = self._counts.setdefault(source.label, SourceCount())
        drawn = self._draw(source, count)
        for number, outcome in enumerate(self._pool.outcomes(source, join_streams(read_rows(source)))):
            count.rows_in += 1
            self._rows += 1
            if drawn is not None and outcome.reject is None and number not in drawn:
                if outcome.id is not None and _key(outcome.id) in self._seen:
                    outcome.reject = ("duplicate", f"the same conversation as {outcome.id}")
                else:
                    count.not_drawn += 1
                    continue
            reject = outcome.reject or self._refused(outcome)
            if outcome.id in self._forgotten:
                if reject is None:  # its place stays, so that no other part changes
                    self._seen.add(_key(outcome.id))
                    self._writer.skip()
                outcome.id, reject = None, (REASON, DETAIL)
            if reject is not None:
                self._reject(source, count, outcome, reject, rejects)
            else:
                self._keep(count, outcome)
            self._progress()
        self._check_source(source, count)

    def _draw(self, source: SourceConfig, count: SourceCount) -> set[int] | None:
        """Numbers of the rows that `count` or `share` draws: the lowest hashes of seed and id; None: all."""
        if source.count is None and source.share is None:
            return None
        ranks: dict[bytes, tuple[int, int]] = {}
        for number, outcome in enumerate(self._pool.outcomes(source, join_streams(read_rows(source)), False)):
            if outcome.id is None or _key(outcome.id) in self._seen or _key(outcome.id) in ranks:
                continue
            rank = hashlib.sha256(f"{source.seed}:{outcome.id}".encode()).digest()[:8]
            ranks[_key(outcome.id)] = (int.from_bytes(rank), number)
        count.asked = source.count if source.count is not None else round((source.share or 0) * len(ranks))
        if count.asked > len(ranks):
            log.warning("ingest: %s: %d asked and only %d found", source.label, count.asked, len(ranks))
        return {number for _, number in heapq.nsmallest(count.asked, ranks.values())}

    def _refused(self, outcome: Outcome) -> tuple[str, str] | None:
        """Why a usable row is not kept all the same."""
        assert outcome.id is not None and outcome.row is not None
        if _key(outcome.id) in self._seen:
            return "duplicate", f"the same conversation as {outcome.id}"
        looked_at = self._benchmarks is not None or self._near is not None
        messages = json.loads(outcome.row["messages"]) if looked_at else []
        overlaps = self._benchmarks is not None and self._benchmarks.holds(messages)
        if overlaps and self._config.ingest.drop_overlap:
            return "benchmark_overlap", "holds a prompt of ingest.benchmark_sets"
        if self._near is not None and (earlier := self._near.earlier(outcome.id, messages)) is not None:
            named = "a forgotten conversation" if earlier in self._forgotten else earlier
            return "near_duplicate", f"nearly the same prompts as {named}"
        if overlaps and outcome.id not in self._forgotten:
            self._overlap.append({"id": outcome.id, "where": outcome.where})
        return None

    def _reject(
        self, source: SourceConfig, count: SourceCount, outcome: Outcome, reject: tuple[str, str], rejects: TextIO
    ) -> None:
        reason, detail = reject
        count.rejected[reason] += 1
        count.examples.setdefault(reason, f"{outcome.where}: {detail}")
        line = {
            "source": source.label,
            "where": outcome.where,
            "id": outcome.id,
            "reason": reason,
            "detail": redact(detail),
        }
        rejects.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _keep(self, count: SourceCount, outcome: Outcome) -> None:
        assert outcome.id is not None and outcome.row is not None
        self._seen.add(_key(outcome.id))
        count.kept += 1
        count.notes.update(outcome.notes)
        self._methods[outcome.row["mask_method"]] += 1
        for key, value in outcome.mixable.items():
            self._mixable.setdefault(key, Counter())[json.dumps(value)] += 1
        for request in outcome.row["requests"]:
            if request["loss_mask"] is not None:
                self._supervised += int(request["loss_mask"].sum())
                self._total += len(request["loss_mask"])
        self._writer.add(outcome.row)

    def _check_source(self, source: SourceConfig, count: SourceCount) -> None:
        if count.rows_in == 0:
            raise SourceError(source.label, f"{redact(source.location)} holds no rows")
        if count.rejected["cut_file"] and source.max_reject_share < 1:
            raise SourceError(
                source.label,
                f"a file is damaged and only a part of it was read ({redact(count.examples['cut_file'])[:200]});"
                " mend it, or set max_reject_share to 1 to take what was read",
            )
        empty = count.rejected["empty_mask"]
        if empty > self._config.capture.max_empty_mask_share * count.rows_in:
            raise SourceError(
                source.label,
                f"{empty} of {count.rows_in} rows have an empty loss mask (method {self._config.capture.mask});"
                " the chat template does not mark the assistant's tokens. Nothing would be learnt: use"
                " capture.mask=auto or another target.chat_template",
            )
        bad = count.rejected.total() - sum(count.rejected[r] for r in EXPECTED)
        if bad > source.max_reject_share * count.rows_in:
            reasons = [
                f"{reason} {n}, first {redact(count.examples[reason])[:200]}"
                for reason, n in count.rejected.most_common()
                if reason not in EXPECTED
            ]
            raise SourceError(
                source.label,
                f"{bad} of {count.rows_in} rows are rejected ({'; '.join(reasons[:3])}), more than max_reject_share"
                f" {source.max_reject_share:g}; mend the rows or raise it. All are in {self._url}/{REJECTS}",
            )

    def _check_mix(self) -> None:
        """A draft learns one way of answering; two in one run must be meant."""
        if self._config.ingest.allow_mixed_thinking:
            return
        for key, values in self._mixable.items():
            kept = sum(c.kept for c in self._counts.values())
            unset = kept - values.total()
            if unset:
                values["the template's default"] = unset
            if len(values) > 1:
                words = " and ".join(f"{value} ({n} rows)" for value, n in values.most_common())
                raise UserError(
                    f"the rows ask for {key} = {words}: the draft would learn both and serve one; set"
                    " ingest.allow_mixed_thinking=true if that is meant"
                )

    def _progress(self) -> None:
        if time.monotonic() - self._last_line > _LINE_EVERY_S:
            self._last_line = time.monotonic()
            log.info("ingest: %d rows read, %d kept", self._rows, sum(c.kept for c in self._counts.values()))

    def _report(self) -> None:
        for name, count in self._counts.items():
            reasons = ", ".join(f"{r} {n}" for r, n in count.rejected.most_common()) or "none"
            asked = f"{count.asked} asked, " if count.asked is not None else ""
            drawn = f", {count.not_drawn} not drawn" if count.not_drawn else ""
            log.info(
                "ingest: %s: %d rows, %s%d kept, rejected: %s%s", name, count.rows_in, asked, count.kept, reasons, drawn
            )
        log.info("ingest: loss mask by %s", ", ".join(f"{m} ({n} rows)" for m, n in self._methods.items()))
        if self._total:
            share = self._supervised / self._total
            log.info("ingest: %.1f %% of the tokens taken as they are are supervised", 100 * share)
            if not 0.05 <= share <= 0.95:
                log.warning("ingest: a supervised share of %.1f %% is unusual; look at the loss masks", 100 * share)
        for source in self._config.sources:
            if source.label in self._counts:
                self._tell(source, self._counts[source.label].notes, self._counts[source.label].kept)
        if self._overlap:
            log.warning(
                "ingest: %d kept rows hold a prompt of ingest.benchmark_sets (ids in %s/%s); ingest.drop_overlap=true"
                " rejects them",
                len(self._overlap), self._url, OVERLAP,
            )  # fmt: skip

    def _tell(self, source: SourceConfig, notes: Counter[str], kept: int) -> None:
        """What a person should know of a source that is kept."""
        name = source.label
        for note, words in (
            ("leading_assistant_dropped", "opened with an assistant turn, which was dropped"),
            ("role_repeats", "repeat a role"),
            ("truncated", f"were cut at max_length ({self._config.ingest.over})"),
        ):
            if notes[note]:
                log.info("ingest: %s: %d conversations %s", name, notes[note], words)
        for thing in ("tool_calls", "tools"):
            if notes[thing] > notes[f"{thing}_rendered"]:
                log.warning(
                    "ingest: %s: the target's chat template ignores the %s of %d of %d conversations that have some",
                    name, thing.replace("_", " "), notes[thing] - notes[f"{thing}_rendered"], notes[thing],
                )  # fmt: skip
        if source.use == "as_is":
            if notes["reasoning"]:
                log.info("ingest: %s: reasoning: %d/%d rendered", name, notes["reasoning_rendered"], notes["reasoning"])
            if self._pool.local.renderer.thinks and notes["reasoning"] < kept:
                log.warning(
                    "ingest: %s: %d of %d conversations have no reasoning although the target is a reasoning model;"
                    " the draft will not learn to draft it. use: regenerate brings it back",
                    name, kept - notes["reasoning"], kept,
                )  # fmt: skip


def _key(identity: str) -> bytes:
    return bytes.fromhex(identity)


def _benchmark_source(path: str) -> SourceConfig:
    return SourceConfig(name=f"benchmark set {path}", path=path)


def _benchmark_prompts(config: Config) -> BenchmarkPrompts | None:
    if not config.ingest.benchmark_sets:
        return None
    return BenchmarkPrompts(_prompts_of(config.ingest.benchmark_sets))


def _prompts_of(paths: list[str]) -> Iterator[str]:
    """The first user turn of each row; the later ones of a benchmark are too common ("Explain.") to count."""
    for path in paths:
        source = _benchmark_source(path)
        for where, row in read_rows(source):
            try:
                if isinstance(row, RowError):
                    raise row
                messages = to_raw(row, {}).messages
            except RowError as error:
                raise SourceError(source.label, f"{where}: {error.detail}") from error
            first = next((m["content"] for m in messages if m["role"] == "user"), None)
            if isinstance(first, str):
                yield first


class _PartWriter:
    """Fills parts row by row: part boundaries depend on the rows alone."""

    def __init__(self, store: Store, rows_per_part: int) -> None:
        self._store, self._rows_per_part = store, rows_per_part
        self._rows: list[dict[str, Any]] = []
        self._places = 0  # of this part, taken
        self._paths: list[str] = []

    @property
    def parts(self) -> int:
        return len(self._paths)

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self.skip()

    def skip(self) -> None:
        """Take a place of the part."""
        self._places += 1
        if self._places == self._rows_per_part:
            self._flush()

    def close(self) -> list[str]:
        if self._places:
            self._flush()
        return self._paths

    def _flush(self) -> None:
        part = len(self._paths)
        write_ingest_part(self._store, part, ingest_table(self._rows))
        self._paths.append(ingest_part_path(part))
        self._rows, self._places = [], 0
