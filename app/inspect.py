"""`draftmill inspect`: samples of a run, with what is learnt marked and what is wrong with them named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.errors import UserError
from app.judge import SAMPLE_CLASSES, Judge
from app.marked import CLOSE, OPEN, SPAN_LIMIT, one_line, spans_of, terminal_lines, visible
from app.parts import PARTS, PartEntry, read_entry, read_ingest_part
from app.pipelines.quality import REASON_CLASS, sample_rows
from app.redact import redact
from app.runfolder import RunFolder
from app.status import config_of
from app.target import inspect_target, load_tokenizer

ANY = "any"
CHOICES = (*SAMPLE_CLASSES, ANY)
_ENTRY = re.compile(r"part-(\d+)\.json")


@dataclass(frozen=True)
class Wanted:
    """Which samples to show."""

    rows: int = 5
    source: str | None = None
    kind: str | None = None  # of CHOICES
    id: str | None = None  # of a sample, or of a conversation


def inspect_lines(
    run: str, wanted: Wanted, colour: bool = False, show_private: bool = False, full: bool = False
) -> Iterator[str]:
    """Lines of the wanted samples of the run folder (or a configuration's run folder).

    Raises:
        UserError: there is no run, nothing is generated yet, or nothing fits.
    """
    if wanted.rows < 1:
        raise UserError(f"--rows is {wanted.rows}; give at least 1")
    config = config_of(run, [])
    folder = RunFolder(config.run_dir, config.storage.options)
    entries = _entries(folder)
    t = config.target
    target = inspect_target(t.model, t.revision, t.trust_remote_code, t.chat_template, weights=False)
    tokenizer = load_tokenizer(target.model, config.target.trust_remote_code, config.target.chat_template)
    judge = Judge(tokenizer, target.eos_token_ids, config.quality)
    shown = 0
    sources: set[str] = set()
    for row in _samples(folder, entries):
        sources.add(row["source"])
        if not _named(row, wanted):
            continue
        classes = judge.classes(row)
        if wanted.kind is not None and not (classes if wanted.kind == ANY else wanted.kind in classes):
            continue
        if not shown:
            yield "green is what the draft learns" if colour else f"{OPEN} {CLOSE} stand around what the draft learns"
        yield ""
        yield from _head(row, classes)
        if row.get("private") and not show_private:
            yield f"    {'text':<11} private, not shown (--show-private shows it)"
        else:
            yield from _messages(row)
            ids = [*row["prompt_ids"], *row["answer_ids"]]
            limit = None if full else SPAN_LIMIT
            for line in terminal_lines(spans_of(tokenizer, ids, row["loss_mask"]), colour, limit):
                yield f"    | {line}"
        shown += 1
        if shown == wanted.rows:
            return
    for fault in _not_kept(folder, entries, wanted, wanted.rows - shown, show_private):
        shown += 1
        yield ""
        yield from fault
    if not shown:
        raise UserError(_nothing(folder.url, wanted, sources))


def _entries(folder: RunFolder) -> list[PartEntry]:
    """Every readable entry: a run that was stopped half-way can be looked at too."""
    numbers = sorted(int(m[1]) for n in folder.store.files(PARTS) if (m := _ENTRY.fullmatch(n)))
    if not numbers:
        raise UserError(f"{folder.url}: no part is generated yet, so there is nothing to show")
    entries = [e for p in numbers if (e := read_entry(folder.store, p)) is not None]
    if not entries:
        raise UserError(
            f"{folder.url}: none of the {len(numbers)} entries in {PARTS} can be read; they are damaged or of another"
            " version, and `draftmill generate` makes them again"
        )
    return entries


def _samples(folder: RunFolder, entries: list[PartEntry]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        try:
            yield from sample_rows(folder.store, entry)
        except FileNotFoundError as error:
            raise UserError(
                f"{folder.url}: the rows of part {entry.part} are missing; `draftmill generate` makes them again"
            ) from error


def _named(row: dict[str, Any], wanted: Wanted) -> bool:
    if wanted.source is not None and row["source"] != wanted.source:
        return False
    return wanted.id is None or wanted.id in (row["sample_id"], row["conversation_id"])


def _head(row: dict[str, Any], classes: list[str]) -> Iterator[str]:
    prompt, answer, learnt = len(row["prompt_ids"]), len(row["answer_ids"]), sum(row["loss_mask"])
    yield f"  sample {row['sample_id']}  source {visible(row['source'])}  {row['use']}, turn {row['turn']}"
    cut = ", truncated" if row["truncated"] else ""
    yield f"    {'finish':<11} {row['finish_reason']}{cut}; classes: {', '.join(classes) or 'none'}"
    tokens = f"{prompt:,} prompt, {answer:,} answer, {learnt:,} supervised"
    yield f"    {'tokens':<11} {tokens}; mask by {row['mask_method']}"


def _messages(row: dict[str, Any]) -> Iterator[str]:
    for message in json.loads(row["messages"]):
        extra = [k for k in ("reasoning_content", "tool_calls") if message.get(k)]
        with_them = f" (+ {', '.join(extra)})" if extra else ""
        yield f"    {message['role']:<11} {one_line(message['content'])}{with_them}"


def _not_kept(
    folder: RunFolder, entries: list[PartEntry], wanted: Wanted, rows: int, show_private: bool
) -> Iterator[list[str]]:
    """What generate rejected; its answers are not stored, so only the last user turn can be shown."""
    if wanted.kind is None and wanted.id is None:
        return
    for entry in entries:
        faults = [f for f in [*entry.rejects, *entry.cut_short] if _fault_fits(f, wanted)]
        if not faults:
            continue
        by_id = {r["id"]: r for r in read_ingest_part(folder.store, entry.part)}
        for fault in faults:
            row = by_id.get(fault["id"])
            if row is None or (wanted.source is not None and row["source"] != wanted.source):
                continue
            if rows <= 0:
                return
            rows -= 1
            hidden = row.get("private") and not show_private
            said = [m["content"] for m in json.loads(row["messages"]) if m["role"] == "user"][-1:]
            yield [
                f"  row {fault['id']}  source {visible(row['source'])}  not kept: {fault['reason']},"
                f" {one_line(redact(fault['detail']), 200)}",
                f"    {'where':<11} {visible(redact(fault['where']))}",
                f"    {'user':<11} {'private, not shown' if hidden else one_line(' '.join(said))}",
            ]


def _fault_fits(fault: dict[str, str], wanted: Wanted) -> bool:
    if wanted.id is not None and wanted.id != fault["id"]:
        return False
    return wanted.kind in (None, ANY) or REASON_CLASS.get(fault["reason"]) == wanted.kind


def _nothing(url: str, wanted: Wanted, sources: set[str]) -> str:
    if wanted.source is not None and wanted.source not in sources:
        return f"{url} has no sample of source {wanted.source!r}; its sources are {', '.join(sorted(sources))}"
    if wanted.id is not None:
        return f"{url} has no sample {wanted.id!r}; quality/quality.json names some"
    return f"{url} has no sample of class {wanted.kind}"
