"""Ingest: source files to numbered parts of conversations with stable ids; every row kept or rejected."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TextIO

from app.config import Config, SourceConfig
from app.errors import UserError
from app.forgotten import DETAIL, REASON, read_forgotten
from app.ingest_report import SourceCount, Tally, report
from app.parts import ingest_part_path, ingest_table, write_ingest_part
from app.pipeline import StageContext, StageResult
from app.privacy import BenchmarkPrompts, NearRepeats
from app.redact import redact
from app.rows import Outcome, RowPool, RowSettings
from app.sources.benchmarks import benchmark_digests, benchmark_prompts
from app.sources.locate import SourceError, source_digest
from app.sources.logs import join_streams
from app.sources.readers import read_rows
from app.storage import Store, explained
from app.target import TargetInfo
from app.template_probe import ignores_messages

log = logging.getLogger("draftmill")
REJECTS = "ingest/rejects.jsonl"
OVERLAP = "ingest/overlap.json"
_LINE_EVERY_S = 15
# Reasons that say nothing against a source: repeats, and the other lines of a server's log.
EXPECTED = ("duplicate", "near_duplicate", "benchmark_overlap", "not_a_request", "no_prompt", REASON)


@dataclass(frozen=True)
class _Draw:
    """A row to be read again."""

    id: str
    reject: tuple[str, str] | None  # for a near repeat of another one that was drawn


def run(ctx: StageContext) -> StageResult:
    """Read every source, write `ingest/parts/*.parquet`, `ingest/rejects.jsonl` and `ingest/overlap.json`.

    Raises:
        UserError: a source is missing or malformed, too many rows are rejected, or none is left.
    """
    config = ctx.config
    check_settings(config, ctx.target)
    skipped: dict[str, str] = {}
    benchmarks = benchmark_prompts(config.ingest.benchmark_sets, ctx.listing)
    with RowPool(RowSettings.of(config, ctx.target), config.ingest.workers or os.cpu_count() or 1) as pool:
        if config.capture.mask == "generation_tags" and not pool.local.renderer.has_generation_tags:
            raise UserError(
                "capture.mask=generation_tags, but the target's chat template has no {% generation %} tags:"
                " every mask would be empty; use capture.mask=auto or give a template with tags in"
                " target.chat_template"
            )
        if (words := ignores_messages(pool.local.renderer)) is not None:
            log.warning("ingest: the target's chat template %s", words)
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
            digests[f"source {source.label}"] = source_digest(source, ctx.listing.files(source))
        except SourceError:
            if ctx.config.ingest.on_source_error == "stop":
                raise
            digests[f"source {source.label}"] = "unreadable"
    digests |= benchmark_digests(ctx.config.ingest.benchmark_sets, ctx.listing)
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
        self._listing = ctx.listing
        self._pool, self._benchmarks = pool, benchmarks
        self._near = NearRepeats(n) if (n := ctx.config.ingest.near_duplicates) is not None else None
        self._forgotten = frozenset(read_forgotten(self._store).ids)
        self._seen: set[bytes] = set()
        self._tally = Tally()
        self._mixable: dict[str, Counter[str]] = {}
        self._rows = 0
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
        if not any(c.kept for c in self._tally.sources.values()):
            raise UserError(
                f"no row of {', '.join(self._tally.sources)} can be used; the reasons are in {self._url}/{REJECTS}"
            )
        self._check_mix()
        if self._benchmarks is not None:
            self._store.write_json(OVERLAP, {"prompts": len(self._benchmarks), "rows": self._tally.overlap})
            self._outputs.append(OVERLAP)
        return self

    def result(self, skipped: dict[str, str]) -> StageResult:
        report(self._config, self._pool.local.renderer, self._tally, f"{self._url}/{OVERLAP}")
        counts = self._tally.sources.values()
        return StageResult(
            outputs=self._outputs,
            counts={
                "rows_in": sum(c.rows_in for c in counts),
                "kept": sum(c.kept for c in counts),
                "not_drawn": sum(c.not_drawn for c in counts),
                "rejected": dict(sum((c.rejected for c in counts), Counter())),
                "sources": {name: c.to_json() for name, c in self._tally.sources.items()},
                "skipped_sources": skipped,
                "overlap": len(self._tally.overlap),
                "mask_methods": dict(self._tally.methods),
                "parts": self._writer.parts,
                "rows_per_part": self._config.storage.rows_per_part,
            },
            seeds={f"draw of {s.label}": s.seed for s in self._config.sources if s.count or s.share},
        )

    def _source(self, source: SourceConfig, rejects: TextIO) -> None:
        """Take a source in: all of it in one reading, a draw in two."""
        count = self._tally.sources.setdefault(source.label, SourceCount())
        if source.count is None and source.share is None:
            for outcome in self._outcomes(source, count):
                reject = self._unusable(outcome)
                if reject is None and self._near is not None:
                    reject = self._near_repeat(str(outcome.id), self._near.sketch(_messages(outcome)))
                self._take(source, count, outcome, reject, rejects)
        else:
            drawn = sorted(self._draw(source, count, rejects).items())
            numbers = {number for number, _ in drawn}
            rows = (row for number, row in enumerate(self._rows_of(source)) if number in numbers)
            for (_, draw), outcome in zip_longest(drawn, self._pool.outcomes(source, rows)):
                if outcome is None or outcome.id != draw.id:
                    raise SourceError(
                        source.label, "it changed between two readings; run again when nothing writes to it"
                    )
                self._take(source, count, outcome, draw.reject, rejects)
        self._check_source(source, count)

    def _rows_of(self, source: SourceConfig) -> Iterator[tuple[str, Any]]:
        return join_streams(read_rows(source, self._listing.files(source)))

    def _outcomes(self, source: SourceConfig, count: SourceCount) -> Iterator[Outcome]:
        """The outcome of every row, counted."""
        for outcome in self._pool.outcomes(source, self._rows_of(source)):
            count.rows_in += 1
            self._rows += 1
            self._progress()
            yield outcome

    def _draw(self, source: SourceConfig, count: SourceCount, rejects: TextIO) -> dict[int, _Draw]:
        """The rows that `count` or `share` draws, by their number: of the usable ones those with the lowest hashes of
        seed and id, and the near repeats met on the way. What cannot be used is rejected here.

        Holds ids and hashes of the usable rows alone.
        """
        found: dict[bytes, tuple[int, int]] = {}  # id -> rank, number
        sketches: dict[int, Any] = {}
        for number, outcome in enumerate(self._outcomes(source, count)):
            reject = self._unusable(outcome, found)
            if reject is not None:
                self._take(source, count, outcome, reject, rejects)
                continue
            rank = hashlib.sha256(f"{source.seed}:{outcome.id}".encode()).digest()[:8]
            found[_key(str(outcome.id))] = (int.from_bytes(rank), number)
            if self._near is not None:
                sketches[number] = self._near.sketch(_messages(outcome))
        asked = source.count if source.count is not None else round((source.share or 0) * len(found))
        drawn: dict[int, _Draw] = {}
        left = asked
        for key, (_, number) in sorted(found.items(), key=lambda item: item[1]):
            if not left:
                break
            reject = self._near_repeat(key.hex(), sketches[number]) if sketches else None
            drawn[number] = _Draw(key.hex(), reject)
            left -= reject is None
        if left:
            log.warning("ingest: %s: %d asked and only %d found", source.label, asked, asked - left)
        count.asked, count.not_drawn = asked, len(found) - len(drawn)
        return drawn

    def _unusable(self, outcome: Outcome, found: Container[bytes] = ()) -> tuple[str, str] | None:
        """Why a row cannot be used; `found` are ids this source gave before, beside those that are kept."""
        if outcome.reject is not None:
            return outcome.reject
        key = _key(str(outcome.id))
        if key in self._seen or key in found:
            return "duplicate", f"the same conversation as {outcome.id}"
        if self._config.ingest.drop_overlap and self._overlaps(outcome):
            return "benchmark_overlap", "holds a prompt of ingest.benchmark_sets"
        return None

    def _overlaps(self, outcome: Outcome) -> bool:
        return self._benchmarks is not None and self._benchmarks.holds(_messages(outcome))

    def _near_repeat(self, identity: str, sketch: Any) -> tuple[str, str] | None:
        """Why a usable row is a near repeat; else None, and later ones are compared with it."""
        assert self._near is not None
        earlier = self._near.earlier(identity, sketch)
        if earlier is None:
            return None
        named = "a forgotten conversation" if earlier in self._forgotten else earlier
        return "near_duplicate", f"nearly the same prompts as {named}"

    def _take(
        self,
        source: SourceConfig,
        count: SourceCount,
        outcome: Outcome,
        reject: tuple[str, str] | None,
        rejects: TextIO,
    ) -> None:
        """Keep a row or reject it. A forgotten one is rejected without its name and, were it kept, leaves its place
        empty, so that no other part changes."""
        if outcome.id is not None and outcome.id in self._forgotten:
            if reject is None:
                self._seen.add(_key(outcome.id))
                self._writer.skip()
            outcome.id, reject = None, (REASON, DETAIL)
        if reject is not None:
            self._reject(source, count, outcome, reject, rejects)
        else:
            self._keep(count, outcome)

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
        if not self._config.ingest.drop_overlap and self._overlaps(outcome):
            self._tally.overlap.append({"id": outcome.id, "where": outcome.where})
        count.notes.update(outcome.notes)
        self._tally.methods[outcome.row["mask_method"]] += 1
        for key, value in outcome.mixable.items():
            shown = json.dumps(value) if isinstance(value, bool) or not outcome.row["private"] else "a private value"
            self._mixable.setdefault(key, Counter())[shown] += 1
        for request in outcome.row["requests"]:
            if request["loss_mask"] is not None:
                self._tally.supervised += int(request["loss_mask"].sum())
                self._tally.total += len(request["loss_mask"])
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
            kept = sum(c.kept for c in self._tally.sources.values())
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
            log.info("ingest: %d rows read, %d kept", self._rows, sum(c.kept for c in self._tally.sources.values()))


def _key(identity: str) -> bytes:
    return bytes.fromhex(identity)


def _messages(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.row is not None
    messages: list[dict[str, Any]] = json.loads(outcome.row["messages"])
    return messages


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
