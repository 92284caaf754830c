"""Forget: a conversation leaves every stored stage of a run, and what was learnt from it counts as stale.

The list of forgotten ids is written first, with a plan that says what the numbers will be, and closed last: a
forgetting that is killed is finished by the same command, and until then no stage goes on. A forgotten conversation
leaves its place in its part empty, here and in every later ingest, so that no other part changes.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from app.config import Config
from app.errors import UserError, first_line
from app.forgotten import REASON, Forgotten, read_forgotten, write_forgotten
from app.lease import Lease
from app.parts import PARTS, ingest_part_path, read_entry
from app.pipeline import StageContext, refuse_foreign_folder, terminated_cleanly
from app.pipelines.ingest import OVERLAP, REJECTS
from app.removal import UNREADABLE, Removal, captured_ids, json_lines, part_files, part_number, read_table, told
from app.runfolder import Manifest, RunFolder
from app.storage import Store

_ID = re.compile(r"[0-9a-f]{24}")
_INGEST_PARTS = "ingest/parts"


@dataclass(frozen=True)
class _Found:
    """Where conversations stand, before anything is removed."""

    kept: list[dict[str, Any]]  # id, source, where, mask_method of rows in ingest parts
    rejected: list[dict[str, Any]]  # lines of the reject file
    overlap: int
    parts: list[int]  # ingest parts to rewrite
    generated: set[str]  # ids in parts of samples
    learnt: bool  # samples of them were captured

    @property
    def ids(self) -> set[str]:
        return {r["id"] for r in [*self.kept, *self.rejected]} | self.generated


def forget(config: Config, ids: list[str]) -> list[str]:
    """Remove conversations from the run folder of `config`; returns lines that say what was removed where.

    Raises:
        UserError: no such conversation, another driver holds the folder, or a part of ingest cannot be read.
    """
    for identity in ids:
        if not _ID.fullmatch(identity):
            raise UserError(
                f"{identity} is no conversation id (24 hex digits, as in ingest/parts, sample ids up to the dash)"
            )
    run = RunFolder(config.run_dir, config.storage.options)
    if not run.store.exists("config.yaml"):
        raise UserError(f"{run.url} is no run folder: it has no config.yaml")
    refuse_foreign_folder(run)
    with terminated_cleanly():
        lease = Lease(run.store, config.storage.lease_timeout_s)
        lease.acquire()
        try:
            lease.announce("forget")
            run.store.remove_temporary()
            return _forget(StageContext(config, run, lease), list(dict.fromkeys(ids)))
        finally:
            lease.release()


def _forget(ctx: StageContext, ids: list[str]) -> list[str]:
    store = ctx.run.store
    known = read_forgotten(store)
    lines: list[str] = []
    if known.pending is not None:
        lines += Removal(ctx, known.pending).run()
        known = Forgotten(known.ids)
        write_forgotten(store, known)
    new = [i for i in ids if i not in known.ids]
    if not new:
        return lines or [f"{', '.join(ids)}: forgotten before, nothing is left of it"]
    found = _look(store, set(new))
    unknown = [i for i in new if i not in found.ids]
    if unknown:
        raise UserError(f"{ctx.run.url} holds no conversation {', '.join(unknown)}; nothing was removed")
    manifest = ctx.run.manifest("ingest")
    fault = _fault(ctx.run, manifest, found.parts)
    if fault is not None:
        lines.append(told("ingest", f"{fault}: `draftmill run` makes it again"))
    plan = {
        "ids": new,
        "kept": found.kept,
        "rejects": store.sha256(REJECTS) if store.exists(REJECTS) else None,
        "parts": {str(p): _sha256(manifest, p) for p in found.parts},
        "ingest": {"digest": manifest.digest, "counts": _counts(manifest, found)} if manifest and not fault else None,
        "learnt": found.learnt,
    }
    all_ids = [*known.ids, *new]
    write_forgotten(store, Forgotten(all_ids, plan))
    lines += Removal(ctx, plan).run()
    write_forgotten(store, Forgotten(all_ids))
    return lines


def _fault(run: RunFolder, manifest: Manifest | None, parts: list[int]) -> str | None:
    """Which of the files to rewrite is not as ingest wrote it, in words; None where all are."""
    if manifest is None:
        return None
    paths = [p for p in (*map(ingest_part_path, parts), REJECTS, OVERLAP) if p in manifest.outputs]
    return run.output_fault(replace(manifest, outputs={p: manifest.outputs[p] for p in paths}), "checksum")


def _look(store: Store, ids: set[str]) -> _Found:
    """Where `ids` stand in the parts of both stages and among the rejects.

    Raises:
        UserError: a part of ingest cannot be read.
    """
    wanted = pa.array(sorted(ids))

    def in_ingest(name: str) -> tuple[int, list[dict[str, Any]]]:
        path = f"{_INGEST_PARTS}/{name}"
        try:
            table = read_table(store, path, ["id", "source", "where", "mask_method"])
            return part_number(name), table.filter(pc.is_in(table["id"], wanted)).to_pylist()
        except UNREADABLE as error:
            raise UserError(
                f"{store.url}/{path} cannot be read ({first_line(error)}), so nothing was removed; delete it, run"
                " `draftmill ingest` with the run's configuration, which makes it again, then the same command"
            ) from error

    def in_generate(name: str) -> tuple[int, set[str] | None, set[str]]:
        entry = read_entry(store, part_number(name))
        captured = captured_ids(store, entry) if entry is not None else None
        rejected = {r["id"] for r in entry.rejects} if entry is not None else set()
        return part_number(name), None if captured is None else captured & ids, rejected & ids

    with ThreadPoolExecutor(8) as pool:
        parts = {p: rows for p, rows in pool.map(in_ingest, part_files(store, _INGEST_PARTS, ".parquet")) if rows}
        generated = list(pool.map(in_generate, part_files(store, PARTS, ".json")))
    overlap = store.read_json(OVERLAP)
    return _Found(
        kept=[row for rows in parts.values() for row in rows],
        rejected=[line for line in json_lines(store, REJECTS) if line.get("id") in ids],
        overlap=sum(row["id"] in ids for row in overlap["rows"]) if isinstance(overlap, dict) else 0,
        parts=list(parts),
        generated=set().union(*((captured or set()) | rejected for _, captured, rejected in generated)),
        # What a damaged part held is not known: its own conversations count as captured.
        learnt=any(part in parts if captured is None else captured for part, captured, _ in generated),
    )


def _counts(manifest: Manifest, found: _Found) -> dict[str, Any]:
    """The counts of ingest as they will be: whole numbers to set, since a plan may be carried out twice."""
    counts: dict[str, Any] = json.loads(json.dumps(manifest.counts))

    def move(source: str, reason: str | None) -> None:
        for part in (counts, counts["sources"][source]):
            if reason is None:
                part["kept"] -= 1
            else:
                part["rejected"][reason] -= 1
                if not part["rejected"][reason]:
                    del part["rejected"][reason]
            part["rejected"][REASON] = part["rejected"].get(REASON, 0) + 1

    for row in found.kept:
        move(row["source"], None)
        counts["mask_methods"][row["mask_method"]] -= 1
    for line in found.rejected:
        move(line["source"], line["reason"])
    counts["overlap"] -= found.overlap
    return counts


def _sha256(manifest: Manifest | None, part: int) -> str | None:
    output = manifest.outputs.get(ingest_part_path(part)) if manifest is not None else None
    return output["sha256"] if output is not None else None
