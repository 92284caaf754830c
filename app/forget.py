"""Forget: a conversation leaves every stored stage of a run, and what was learnt from it counts as stale.

The list of forgotten ids is written first, with a plan that says what the numbers will be, and closed last: a
forgetting that is killed is finished by the same command, and until then no stage goes on. A forgotten conversation
leaves its place in its part empty, here and in every later ingest, so that no other part changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from app.captured import part_key, recorded_shape, shape_of
from app.clean import CURVE, INITIAL
from app.config import Config
from app.errors import UserError
from app.forgotten import DETAIL, REASON, Forgotten, read_forgotten, write_forgotten
from app.lease import Lease
from app.parts import (
    INGEST_SCHEMA,
    PARTS,
    PartEntry,
    ingest_part_bytes,
    ingest_part_path,
    part_name,
    read_entry,
    remove_conversations,
    remove_orphans,
    write_entry,
)
from app.pipeline import STALE, StageContext, refuse_foreign_folder, terminated_cleanly
from app.pipelines.generate import content_digest, counts_of
from app.pipelines.ingest import OVERLAP, REJECTS
from app.runfolder import Manifest, RunFolder, digest_of
from app.scrub import scrub
from app.stages import STAGES
from app.storage import Store

_ID = re.compile(r"[0-9a-f]{24}")
_INGEST_PARTS = "ingest/parts"
_WHY = "a conversation was forgotten"
_NAMED_INSTEAD = "a forgotten conversation"


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
        UserError: no such conversation, or another driver holds the folder.
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
        lines += _Removal(ctx, known.pending).run()
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
    plan = {
        "ids": new,
        "kept": found.kept,
        "rejects": store.sha256(REJECTS) if store.exists(REJECTS) else None,
        "parts": {str(p): _sha256(manifest, p) for p in found.parts},
        "ingest": {"digest": manifest.digest, "counts": _counts(manifest, found)} if manifest is not None else None,
        "learnt": found.learnt,
    }
    all_ids = [*known.ids, *new]
    write_forgotten(store, Forgotten(all_ids, plan))
    lines += _Removal(ctx, plan).run()
    write_forgotten(store, Forgotten(all_ids))
    return lines


def _look(store: Store, ids: set[str]) -> _Found:
    """Where `ids` stand in the parts of both stages and among the rejects."""
    wanted = pa.array(sorted(ids))

    def in_ingest(name: str) -> tuple[int, list[dict[str, Any]]]:
        table = _read(store, f"{_INGEST_PARTS}/{name}", ["id", "source", "where", "mask_method"])
        return _number(name), table.filter(pc.is_in(table["id"], wanted)).to_pylist()

    def in_generate(name: str) -> tuple[set[str], set[str]]:
        entry = read_entry(store, _number(name))
        if entry is None or not store.exists(f"{PARTS}/{entry.files['rows']['name']}"):
            return set(), set()
        captured = ids & set(_read(store, f"{PARTS}/{entry.files['rows']['name']}", ["conversation_id"])[0].to_pylist())
        return captured, captured | (ids & {r["id"] for r in entry.rejects})

    with ThreadPoolExecutor(8) as pool:
        parts = [(p, rows) for p, rows in pool.map(in_ingest, _names(store, _INGEST_PARTS, ".parquet")) if rows]
        generated = list(pool.map(in_generate, _names(store, PARTS, ".json")))
    overlap = store.read_json(OVERLAP)
    return _Found(
        kept=[row for _, rows in parts for row in rows],
        rejected=[line for line in _json_lines(store, REJECTS) if line.get("id") in ids],
        overlap=sum(row["id"] in ids for row in overlap["rows"]) if isinstance(overlap, dict) else 0,
        parts=[p for p, _ in parts],
        generated=set().union(*(g for _, g in generated)),
        learnt=any(captured for captured, _ in generated),
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


class _Removal:
    """Carries a plan out; each step may be done again."""

    def __init__(self, ctx: StageContext, plan: dict[str, Any]) -> None:
        self._ctx, self._run, self._store, self._plan = ctx, ctx.run, ctx.run.store, plan
        self._ids: set[str] = set(plan["ids"])
        self._pattern = re.compile("|".join(sorted(self._ids)))
        self._lines: list[str] = []

    def run(self) -> list[str]:
        self._rejects()
        rekeyed = self._ingest_parts()
        self._generate_parts(rekeyed)
        self._manifests()
        if self._plan["learnt"]:
            self._mark_stale()
        self._other_files()
        return self._lines

    def _say(self, where: str, what: str) -> None:
        self._lines.append(f"  {where:<32} {what}")

    def _rejects(self) -> None:
        """Every row keeps its line, without its name; before the parts, so that no row is ever without one."""
        if self._plan["rejects"] is not None and self._store.sha256(REJECTS) == self._plan["rejects"]:
            lines = _json_lines(self._store, REJECTS)
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
            part = int(name)
            table = _read(self._store, ingest_part_path(part), None)
            rows = [row for row in table.to_pylist() if row["id"] not in self._ids]
            left = pa.Table.from_pylist(rows, INGEST_SCHEMA)
            data = ingest_part_bytes(left)
            rekeyed[part] = (before, hashlib.sha256(data).hexdigest())
            if len(left) < len(table):
                self._store.write_bytes(ingest_part_path(part), data)
                self._say(ingest_part_path(part), f"{len(table) - len(left)} row(s)")
        return rekeyed

    def _generate_parts(self, rekeyed: dict[int, tuple[str | None, str]]) -> None:
        shapes: list[str] | None = None
        unreadable: list[int] = []
        for name in _names(self._store, PARTS, ".json"):
            entry = read_entry(self._store, _number(name))
            if entry is None:
                unreadable.append(_number(name))
                continue
            held = self._held(entry)
            if not held and entry.part not in rekeyed:
                continue
            if shapes is None:
                shapes = self._shapes()
            key = _new_key(entry.key, shapes, rekeyed.get(entry.part))
            if held and key is None:
                # Of other rows or settings than today's: no key can be given that would hold.
                self._store.delete(f"{PARTS}/{name}")
                for file in entry.files.values():
                    self._store.delete(f"{PARTS}/{file['name']}")
                self._say(f"{PARTS}/{part_name(entry.part)}", "removed whole: it was made from other rows or settings")
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

    def _orphans(self, unreadable: list[int]) -> None:
        """What no entry vouches for may hold a forgotten conversation: it goes, and is named."""
        files = self._store.files(PARTS)
        of_parts = {n: part for part in unreadable for n in files if re.match(rf"{part_name(part)}[-.]", n)}
        for part in unreadable:
            count = sum(p == part for p in of_parts.values())
            self._say(
                f"{PARTS}/{part_name(part)}",
                f"removed whole, {count} file(s): its entry cannot be read; `draftmill run` makes it again",
            )
        if others := remove_orphans(self._store) - len(of_parts):
            self._say(PARTS, f"{others} file(s) that belong to no committed part")

    def _held(self, entry: PartEntry) -> set[str]:
        held = {r["id"] for r in [*entry.rejects, *entry.cut_short]}
        path = f"{PARTS}/{entry.files['rows']['name']}"
        if self._store.exists(path):
            held |= set(_read(self._store, path, ["conversation_id"])[0].to_pylist())
        return held & self._ids

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
        outputs = {**ingest.outputs, **self._run.describe_outputs([p for p in changed if p in ingest.outputs])}
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


def _names(store: Store, folder: str, ending: str) -> list[str]:
    """The parts' own files: `part-NUMBER` and the ending."""
    return [n for n in store.files(folder) if re.fullmatch(rf"part-\d+{re.escape(ending)}", n)]


def _number(name: str) -> int:
    return int(name.split("-")[1].split(".")[0])


def _sha256(manifest: Manifest | None, part: int) -> str | None:
    output = manifest.outputs.get(ingest_part_path(part)) if manifest is not None else None
    return output["sha256"] if output is not None else None


def _read(store: Store, path: str, columns: list[str] | None) -> pa.Table:
    with store.fs.open(store.full(path), "rb") as file:
        return pq.read_table(file, columns=columns)


def _json_lines(store: Store, path: str) -> list[dict[str, Any]]:
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
