"""Ingest: source files to numbered parts of conversations with stable ids; every row kept or rejected."""

from __future__ import annotations

import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from app.config import Config, SourceConfig
from app.conversations import RESERVED_KWARGS, Conversation, Tokenised, parse_row, tokenise_as_is, tokenise_regenerate
from app.errors import RowError, UserError
from app.parts import INGEST_SCHEMA, ingest_part_path
from app.pipeline import StageContext, StageResult
from app.redact import redact
from app.storage import Store, file_sha256
from app.target import Renderer, TargetInfo, load_tokenizer

log = logging.getLogger("draftmill")


@dataclass
class SourceCount:
    """Rows of one source: rows_in = kept + rejected."""

    rows_in: int = 0
    kept: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


def run(ctx: StageContext) -> StageResult:
    """Read every source, write `ingest/parts/*.parquet` and `ingest/rejects.jsonl`.

    Raises:
        UserError: a source is missing or malformed, too many rows are rejected, or none is left.
    """
    config, store = ctx.config, ctx.run.store
    store.delete("ingest")
    tokenise = _tokeniser(config, ctx.target)
    writer = _PartWriter(store, config.storage.rows_per_part)
    rejects: list[dict[str, Any]] = []
    counts: dict[str, SourceCount] = {}
    methods: Counter[str] = Counter()
    supervised = total = 0
    seen: set[str] = set()
    for source in config.sources:
        count = counts.setdefault(source.label, SourceCount())
        for where, row in read_rows(source):
            count.rows_in += 1
            identity = None
            try:
                if isinstance(row, RowError):
                    raise row
                conversation = parse_row(row, source.system_prompt, source.use)
                identity = conversation.id(source.use)
                if identity in seen:
                    raise RowError("duplicate", f"the same conversation as {identity}")
                tokens = tokenise(source, conversation)
            except RowError as error:
                count.rejected[error.reason] += 1
                rejects.append(
                    {
                        "source": source.label,
                        "where": where,
                        "id": identity,
                        "reason": error.reason,
                        "detail": redact(error.detail),
                    }
                )
                continue
            seen.add(identity)
            count.kept += 1
            methods[tokens.method] += 1
            supervised += sum(tokens.loss_mask or [])
            total += len(tokens.loss_mask or [])
            writer.add(_row(source, where, conversation, identity, tokens))
        _check_source(source, count, config)
    outputs = writer.close()
    lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rejects)
    store.write_bytes("ingest/rejects.jsonl", lines.encode("utf-8", "replace"))
    kept = sum(c.kept for c in counts.values())
    if kept == 0:
        raise UserError(
            f"no row of {', '.join(counts)} can be used; the reasons are in {ctx.run.url}/ingest/rejects.jsonl"
        )
    _report(counts, methods, supervised, total)
    return StageResult(
        outputs=[*outputs, "ingest/rejects.jsonl"],
        counts={
            "rows_in": sum(c.rows_in for c in counts.values()),
            "kept": kept,
            "rejected": dict(sum((c.rejected for c in counts.values()), Counter())),
            "sources": {
                n: {"rows_in": c.rows_in, "kept": c.kept, "rejected": dict(c.rejected)} for n, c in counts.items()
            },
            "mask_methods": dict(methods),
            "parts": len(outputs),
            "rows_per_part": config.storage.rows_per_part,
        },
    )


def outside(ctx: StageContext) -> dict[str, str]:
    """Digests of what ingest reads: the source files and the target's tokenizer with its template."""
    digests = {f"source {s.label}": _source_digest(s) for s in ctx.config.sources}
    return {**digests, "target tokenizer and template": ctx.target.tokenizer_digest}


def read_rows(source: SourceConfig) -> Iterator[tuple[str, Any]]:
    """(file:line, parsed row or RowError) of a source, in file order; blank lines are no rows.

    Raises:
        UserError: nothing matches the path, or it cannot be opened.
    """
    taken = 0
    for fs, path in _source_files(source):
        name = path.rsplit("/", 1)[-1]
        with (
            fs.open(path, "rb") as raw,
            io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape") as text,
        ):
            for number, line in enumerate(text, 1):
                if not line.strip():
                    continue
                if source.limit is not None and taken >= source.limit:
                    return
                taken += 1
                yield f"{name}:{number}", _parse_line(line)


def _parse_line(line: str) -> Any:
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:
        return RowError("bad_encoding", "the line is not UTF-8")
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return RowError("bad_encoding", "the row holds half a surrogate pair")
    except (ValueError, RecursionError) as error:
        return RowError("bad_json", str(error)[:200])
    return row


def _source_files(source: SourceConfig) -> list[tuple[Any, str]]:
    try:
        fs, path = fsspec.core.url_to_fs(source.path)
        paths = sorted(fs.glob(path)) if re.search(r"[*?\[]", path) else [path]
        paths = [p for p in paths if not fs.isdir(p)]
        if not paths or not all(fs.exists(p) for p in paths):
            where = source.path if "://" in source.path else str(Path(source.path).expanduser().absolute())
            raise UserError(f"source {source.label}: nothing is found at {redact(where)}; check sources[].path")
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"source {source.label}: {redact(source.path)} cannot be opened ({error})") from error
    return [(fs, p) for p in paths]


def _source_digest(source: SourceConfig) -> str:
    from app.runfolder import digest_of

    parts = []
    for fs, path in _source_files(source):
        local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
        if local:
            parts.append(file_sha256(Path(path)))
        else:
            parts.append(fs.ukey(path))
    return digest_of(parts)


def _tokeniser(config: Config, target: TargetInfo) -> Any:
    """A function (source, conversation) -> Tokenised for this target."""
    tokenizer = load_tokenizer(target.model, config.target.trust_remote_code, config.target.chat_template)
    eos = frozenset(target.eos_token_ids)
    max_length = config.generate.max_length
    if max_length > target.max_position_embeddings:
        raise UserError(
            f"generate.max_length is {max_length} and the target holds {target.max_position_embeddings}; lower it"
        )
    method = config.capture.mask
    as_is = [s.label for s in config.sources if s.use == "as_is"]
    regenerate = [s.label for s in config.sources if s.use == "regenerate"]
    if method == "engine" and as_is:
        raise UserError(f"capture.mask=engine fits regenerated sources only, and {as_is[0]} is taken as it is")
    if taken := sorted(RESERVED_KWARGS & config.target.template_kwargs.keys()):
        raise UserError(f"target.template_kwargs may not hold {', '.join(taken)}: draftmill sets these itself")
    renderer = Renderer(tokenizer, config.target.template_kwargs)
    if method == "generation_tags" and not renderer.has_generation_tags:
        raise UserError(
            "capture.mask=generation_tags, but the target's chat template has no {% generation %} tags:"
            " every mask would be empty; use capture.mask=auto or give a template with tags in target.chat_template"
        )
    if method not in ("auto", "engine") and regenerate:
        log.info("capture.mask=%s applies to as_is sources; regenerated ones keep the engine's boundary", method)
    if method == "all" and as_is:
        log.warning("capture.mask=all: every token of %s is supervised, the user's too", ", ".join(as_is))

    def tokenise(source: SourceConfig, conversation: Conversation) -> Tokenised:
        kwargs = {**config.target.template_kwargs, **conversation.template_kwargs}
        row_renderer = renderer if kwargs == renderer.template_kwargs else Renderer(tokenizer, kwargs)
        if source.use == "regenerate":
            return tokenise_regenerate(row_renderer, conversation.messages, max_length)
        return tokenise_as_is(row_renderer, conversation.messages, max_length, method, eos)

    return tokenise


def _row(
    source: SourceConfig, where: str, conversation: Conversation, identity: str, tokens: Tokenised
) -> dict[str, Any]:
    return {
        "id": identity,
        "source": source.label,
        "domain": conversation.domain or source.domain or source.label,
        "use": source.use,
        "where": where,
        "messages": json.dumps(conversation.messages, ensure_ascii=False),
        "template_kwargs": json.dumps(conversation.template_kwargs, ensure_ascii=False),
        "sampling": json.dumps(conversation.sampling),
        "prompt_ids": tokens.prompt_ids,
        "answer_ids": tokens.answer_ids,
        "loss_mask": tokens.loss_mask,
        "mask_method": tokens.method,
    }


class _PartWriter:
    """Fills parts row by row: part boundaries depend on the rows alone."""

    def __init__(self, store: Store, rows_per_part: int) -> None:
        self._store, self._rows_per_part = store, rows_per_part
        self._rows: list[dict[str, Any]] = []
        self._paths: list[str] = []

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if len(self._rows) == self._rows_per_part:
            self._flush()

    def close(self) -> list[str]:
        if self._rows:
            self._flush()
        return self._paths

    def _flush(self) -> None:
        buffer = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(self._rows, INGEST_SCHEMA), buffer)
        path = ingest_part_path(len(self._paths))
        self._store.write_bytes(path, buffer.getvalue().to_pybytes())
        self._paths.append(path)
        self._rows = []


def _check_source(source: SourceConfig, count: SourceCount, config: Config) -> None:
    if count.rows_in == 0:
        raise UserError(f"source {source.label}: {redact(source.path)} holds no rows")
    empty = count.rejected["empty_mask"]
    if empty > config.capture.max_empty_mask_share * count.rows_in:
        raise UserError(
            f"source {source.label}: {empty} of {count.rows_in} rows have an empty loss mask (method"
            f" {config.capture.mask}); the chat template does not mark the assistant's tokens."
            " Nothing would be learnt: use capture.mask=auto or another target.chat_template"
        )
    bad = count.rejected.total() - count.rejected["duplicate"]
    if bad > source.max_reject_share * count.rows_in:
        reasons = ", ".join(f"{r} {n}" for r, n in count.rejected.most_common() if r != "duplicate")
        raise UserError(
            f"source {source.label}: {bad} of {count.rows_in} rows are rejected ({reasons}), more than"
            f" max_reject_share {source.max_reject_share:g}; mend the rows or raise it"
        )


def _report(counts: dict[str, SourceCount], methods: Counter[str], supervised: int, total: int) -> None:
    for name, count in counts.items():
        reasons = ", ".join(f"{r} {n}" for r, n in count.rejected.most_common()) or "none"
        log.info("ingest: %s: %d rows, %d kept, rejected: %s", name, count.rows_in, count.kept, reasons)
    log.info("ingest: loss mask by %s", ", ".join(f"{m} ({n} rows)" for m, n in methods.items()))
    if total:
        share = supervised / total
        log.info("ingest: %.1f %% of the tokens taken as they are are supervised", 100 * share)
        if not 0.05 <= share <= 0.95:
            log.warning("ingest: a supervised share of %.1f %% is unusual; look at the loss masks", 100 * share)
