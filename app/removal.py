"""Carries out the plan of a forgetting (app/forget.py): conversations leave the stored files one kind after the other.

Each step may be done again. No file gets a fresh checksum whose old one does not fit: what is damaged goes whole, and
the next run makes it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from app.captured import part_key, recorded_shape, shape_of
from app.clean import CURVE, INITIAL
from app.errors import UserError
from app.forgotten import DETAIL, REASON
from app.parts import (
    INGEST_SCHEMA,
    PARTS,
    PartEntry,
    drop_files,
    entry_fault,
    ingest_part_bytes,
    ingest_part_path,
    part_name,
    read_entry,
    remove_conversations,
    remove_orphans,
    write_entry,
)
from app.pipeline import STALE, StageContext
from app.pipelines.generate import content_digest, counts_of
from app.pipelines.ingest import OVERLAP, REJECTS
from app.runfolder import digest_of
from app.scrub import scrub
from app.stages import STAGES
from app.storage import Store

UNREADABLE = (pa.ArrowException, OSError, ValueError, LookupError, OverflowError)  # what a damaged table raises
_WHY = "a conversation was forgotten"
_NAMED_INSTEAD = "a forgotten conversation"
_AGAIN = "`draftmill run` makes it again"


class Removal:
    """A plan under way."""

    def __init__(self, ctx: StageContext, plan: dict[str, Any]) -> None:
        self._ctx, self._run, self._store, self._plan = ctx, ctx.run, ctx.run.store, plan
        self._ids: set[str] = set(plan["ids"])
        self._pattern = re.compile("|".join(sorted(self._ids)))
        self._lines: list[str] = []

    def run(self) -> list[str]:
        """Do all of it; returns lines that say what was removed where."""
        self._rejects()
        rekeyed = self._ingest_parts()
        self._generate_parts(rekeyed)
        self._manifests()
        if self._plan["learnt"]:
            self._mark_stale()
        self._other_files()
        return self._lines

    def _say(self, where: str, what: str) -> None:
        self._lines.append(told(where, what))

    def _rejects(self) -> None:
        """Every row keeps its line, without its name; before the parts, so that no row is ever without one."""
        if self._plan["rejects"] is not None and self._store.sha256(REJECTS) == self._plan["rejects"]:
            lines = json_lines(self._store, REJECTS)
            nameless = {"id": None, "reason": REASON, "detail": DETAIL}
            changed = 0
            for line in lines:
                if line.get("id") in self._ids:
                    line |= nameless
                    changed += 1
                elif self._names(str(line.get("detail"))):
                    line["detail"] = self._pattern.sub(_NAMED_INSTEAD, line["detail"])
                    changed += 1
            lines += [{"source": r["source"], "where": r["where"], **nameless} for r in self._plan["kept"]]
            text = "".join(json.dumps(x, ensure_ascii=False) + "\n" for x in lines)
            self._store.write_bytes(REJECTS, text.encode(errors="replace"))
            if changed:
                self._say(REJECTS, f"{changed} line(s) made nameless")
        overlap = self._store.read_json(OVERLAP)
        if isinstance(overlap, dict):
            kept = [r for r in overlap["rows"] if r["id"] not in self._ids]
            if gone := len(overlap["rows"]) - len(kept):
                self._store.write_json(OVERLAP, {**overlap, "rows": kept})
                self._say(OVERLAP, f"{gone} row(s)")

    def _ingest_parts(self) -> dict[int, tuple[str | None, str]]:
        """Part -> checksum before and now."""
        rekeyed: dict[int, tuple[str | None, str]] = {}
        for name, before in self._plan["parts"].items():
            path = ingest_part_path(int(name))
            rows = self._ingest_rows(path, before)
            if rows is None:
                continue
            left = [row for row in rows if row["id"] not in self._ids]
            data = ingest_part_bytes(pa.Table.from_pylist(left, INGEST_SCHEMA))
            rekeyed[int(name)] = (before, hashlib.sha256(data).hexdigest())
            if len(left) < len(rows):
                self._store.write_bytes(path, data)
                self._say(path, f"{len(rows) - len(left)} row(s)")
        return rekeyed

    def _ingest_rows(self, path: str, before: str | None) -> list[dict[str, Any]] | None:
        """Rows of an ingest part; None where it was damaged after the plan was made: it has gone then."""
        if not self._store.exists(path):
            return None
        trusted = before is not None and self._plan["ingest"] is not None
        intact = not trusted or self._store.sha256(path) == before
        rows: list[dict[str, Any]] = []
        try:
            rows = read_table(self._store, path, None).to_pylist()
            if intact or not any(row["id"] in self._ids for row in rows):  # it was rewritten before
                return rows
        except UNREADABLE:
            if trusted and intact:
                raise
        self._store.delete(path)
        self._say(path, f"removed whole: it is damaged; {_AGAIN}")
        return None

    def _generate_parts(self, rekeyed: dict[int, tuple[str | None, str]]) -> None:
        shapes: list[str] | None = None
        unreadable: list[int] = []
        for name in part_files(self._store, PARTS, ".json"):
            entry = read_entry(self._store, part_number(name))
            if entry is None:
                unreadable.append(part_number(name))
                continue
            held = self._held(entry)
            if held == set() and entry.part not in rekeyed:
                continue
            if (fault := entry_fault(self._store, entry, entry.key, "checksum")) is not None:
                self._drop(entry, f"{fault}; {_AGAIN}")
                continue
            if shapes is None:
                shapes = self._shapes()
            key = _new_key(entry.key, shapes, rekeyed.get(entry.part))
            if held and key is None:
                # Of other rows or settings than today's: no key can be given that would hold.
                self._drop(entry, "it was made from other rows or settings")
            elif held:
                assert key is not None
                left = remove_conversations(self._store, entry, self._ids, key)
                self._say(
                    f"{PARTS}/{part_name(entry.part)}",
                    f"{entry.samples - left.samples} sample(s), {(entry.bytes - left.bytes) / 1e6:.1f} MB with states",
                )
            elif key is not None and key != entry.key:
                write_entry(self._store, replace(entry, key=key))
        self._orphans(unreadable)

    def _drop(self, entry: PartEntry, why: str) -> None:
        self._store.delete(f"{PARTS}/{part_name(entry.part)}.json")
        drop_files(self._store, entry)
        self._say(f"{PARTS}/{part_name(entry.part)}", f"removed whole: {why}")

    def _orphans(self, unreadable: list[int]) -> None:
        """What no entry vouches for may hold a forgotten conversation: it goes, and is named."""
        files = self._store.files(PARTS)
        of_parts = {n: part for part in unreadable for n in files if re.match(rf"{part_name(part)}[-.]", n)}
        for part in unreadable:
            count = sum(p == part for p in of_parts.values())
            self._say(
                f"{PARTS}/{part_name(part)}",
                f"removed whole, {count} file(s): its entry cannot be read; {_AGAIN}",
            )
        if others := remove_orphans(self._store) - len(of_parts):
            self._say(PARTS, f"{others} file(s) that belong to no committed part")

    def _held(self, entry: PartEntry) -> set[str] | None:
        """Which of the ids a part holds; None where that cannot be known any more."""
        captured = captured_ids(self._store, entry)
        if captured is None:
            return None
        return (captured | {r["id"] for r in [*entry.rejects, *entry.cut_short]}) & self._ids

    def _shapes(self) -> list[str]:
        """Digests of the shapes the parts may have: the finished stage's, and today's where the target is at hand."""
        shapes = []
        if (manifest := self._run.manifest("generate")) is not None:
            shapes.append(recorded_shape(manifest))
        with contextlib.suppress(UserError):
            shapes.append(shape_of(self._ctx))
        return shapes

    def _manifests(self) -> None:
        """Ingest and generate hold again what their manifests say, so that neither is done anew."""
        ingest, plan = self._run.manifest("ingest"), self._plan["ingest"]
        if ingest is None or plan is None:
            return
        changed = [p for p in (*map(ingest_part_path, map(int, self._plan["parts"])), REJECTS, OVERLAP)]
        there = [p for p in changed if p in ingest.outputs and self._store.exists(p)]
        outputs = {**ingest.outputs, **self._run.describe_outputs(there)}
        digest = digest_of({p: o["sha256"] for p, o in outputs.items()})
        ingest = replace(ingest, outputs=outputs, digest=digest, counts=plan["counts"])
        self._run.write_manifest(ingest)
        generate = self._run.manifest("generate")
        if generate is None or generate.inputs["ingest"] not in (plan["digest"], digest):
            return
        shape = recorded_shape(generate)
        entries = [read_entry(self._store, p) for p in range(ingest.counts["parts"])]
        whole = [
            e for e in entries if e and e.key == part_key(shape, ingest.outputs[ingest_part_path(e.part)]["sha256"])
        ]
        if len(whole) == len(entries):
            self._run.write_manifest(
                replace(
                    generate,
                    inputs={**generate.inputs, "ingest": digest},
                    counts=counts_of(whole),
                    digest=content_digest(whole),
                )
            )

    def _mark_stale(self) -> None:
        after = {"generate"}
        for stage in STAGES:
            if after & set(stage.inputs):
                after.add(stage.name)
        names = [stage.name for stage in STAGES if stage.name in after - {"generate"}]
        if marked := [name for name in names if self._mark(name)]:
            self._say("stale", f"{', '.join(marked)}: `draftmill run` makes them anew; until then they are as before")
        if self._store.folders(CURVE):
            self._mark(CURVE)
            self._say(CURVE, "stale: its drafts learnt from it; `draftmill curve` trains every point anew")
        if (where := self._ctx.config.train.init_from) is not None and self._store.exists(f"train/{INITIAL[0]}"):
            self._say(f"train/{INITIAL[0]}", f"of {where}: what that draft learnt stays in it; forget it there too")

    def _mark(self, name: str) -> bool:
        """Mark a stage stale; whether it was finished."""
        manifest = self._run.manifest(name)
        if manifest is not None:
            self._run.write_manifest(replace(manifest, extra={**manifest.extra, STALE: _WHY}))
        return manifest is not None

    def _other_files(self) -> None:
        for path, what in scrub(self._store, self._pattern, bool(self._plan["learnt"])):
            self._say(path, what)

    def _names(self, text: str) -> bool:
        return bool(self._pattern.search(text))


def _new_key(key: str, shapes: Iterable[str], checksums: tuple[str | None, str] | None) -> str | None:
    """The key of a part whose rows changed; None where it was made from other rows or settings."""
    if checksums is None:
        return None
    before, now = checksums
    for shape in shapes:
        if key in (part_key(shape, now), part_key(shape, before or "")):
            return part_key(shape, now)
    return None


def told(where: str, what: str) -> str:
    """A line of what was done to a file."""
    return f"  {where:<32} {what}"


def captured_ids(store: Store, entry: PartEntry) -> set[str] | None:
    """Conversations with samples in a part; None where its rows are not those its entry vouches for."""
    try:
        return set(read_table(store, f"{PARTS}/{entry.files['rows']['name']}", ["conversation_id"])[0].to_pylist())
    except UNREADABLE:
        if entry_fault(store, entry, entry.key, "checksum") is None:
            raise
        return None


def part_files(store: Store, folder: str, ending: str) -> list[str]:
    """The parts' own files: `part-NUMBER` and the ending."""
    return [n for n in store.files(folder) if re.fullmatch(rf"part-\d+{re.escape(ending)}", n)]


def part_number(name: str) -> int:
    return int(name.split("-")[1].split(".")[0])


def read_table(store: Store, path: str, columns: list[str] | None) -> pa.Table:
    with store.fs.open(store.full(path), "rb") as file:
        return pq.read_table(file, columns=columns)


def json_lines(store: Store, path: str) -> list[dict[str, Any]]:
    try:
        lines = store.read_bytes(path).decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(row := json.loads(line), dict):  # what is no line of ours goes: nobody knows what it holds
                found.append(row)
    return found
