"""Retention: what a run keeps that it no longer needs, and its deletion.

A part whose states are deleted says so in its entry, so that it still counts as made: the rows, and with them export
and bench, need no states. Only training and the offline estimate do, and they ask for the states by name.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from app.captured import part_key, recorded_shape, shape_of
from app.config import Config
from app.errors import UserError
from app.lease import Lease, read_holder
from app.parts import (
    PARTS,
    PartEntry,
    committed_parts,
    entry_readers,
    ingest_part_path,
    part_name,
    read_entry,
    write_entry,
)
from app.pipeline import STALE, StageContext, refuse_foreign_folder, terminated_cleanly
from app.runfolder import RunFolder
from app.samples import conversation_ids, load_split
from app.storage import Store

log = logging.getLogger("draftmill")
CLEANED = "cleaned.json"  # what was deleted and when
_CHECKPOINTS = "train/checkpoints"
CURVE, POINT = "curve", "point.json"  # `draftmill curve`: a training in a folder of its own for each point
INITIAL = ("initial.safetensors", "initial.json")  # in a training's folder, with train.init_from
CLASSES = {
    "captures": "captures of other settings",
    "states": "hidden states",
    "checkpoints": "checkpoints before the last",
    "initial": "drafts trainings began from",
    "logs": "logs before the newest",
}
_AHEAD = 64  # entries
_STAGE = {"captures": "generate", "states": "generate", "checkpoints": "train", "initial": "train", "logs": "-"}


@dataclass(frozen=True)
class Freeable:
    """Files of one class that can go, and why others of it stay."""

    kind: str  # of CLASSES
    files: dict[str, int]  # path -> bytes
    stays: str = ""

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


def clean(config: Config, apply: bool, kinds: list[str]) -> list[str]:
    """Lines that say what the run folder of `config` could do without; with `apply` it is deleted.

    Args:
        kinds: of CLASSES; empty: all.

    Raises:
        UserError: no such class, no run folder, or with `apply` a living driver holds it.
    """
    if unknown := [k for k in kinds if k not in CLASSES]:
        raise UserError(f"there is no class {unknown[0]!r} to clean; the classes are {', '.join(CLASSES)}")
    run = RunFolder(config.run_dir, config.storage.options)
    if not run.store.exists("config.yaml"):
        raise UserError(f"{run.url} is no run folder: it has no config.yaml")
    refuse_foreign_folder(run)
    if not apply:
        lines = _lines(find(StageContext(config, run), kinds), run.url, applied=False)
        if (holder := read_holder(run.store)) is not None:
            lines.append(f"a driver works on it now (pid {holder.pid} on {holder.host}): nothing can be cleaned yet")
        return lines
    with terminated_cleanly():
        lease = Lease(run.store, config.storage.lease_timeout_s)
        lease.acquire()
        try:
            lease.announce("clean")
            ctx = StageContext(config, run, lease)
            found = find(ctx, kinds)
            for item in found:
                _delete(ctx, item)
            return _lines(found, run.url, applied=True)
        finally:
            lease.release()


def find(ctx: StageContext, kinds: list[str]) -> list[Freeable]:
    """What of each class can go now."""
    looks = {
        "captures": _captures,
        "states": _states,
        "checkpoints": _checkpoints,
        "initial": _initial,
        "logs": _logs,
    }
    return [look(ctx) for kind, look in looks.items() if not kinds or kind in kinds]


def _lines(found: list[Freeable], url: str, applied: bool) -> list[str]:
    lines = [f"draftmill clean {url}", "", f"  {'stage':<9} {'class':<12} {'what':<28} {'files':>6} {'MB':>10}"]
    for item in found:
        row = f"  {_STAGE[item.kind]:<9} {item.kind:<12} {CLASSES[item.kind]:<28} {len(item.files):>6,}"
        note = f"  ({item.stays})" if item.stays else ""
        lines.append(f"{row} {item.bytes / 1e6:>10,.1f}{note}")
    total = sum(item.bytes for item in found) / 1e6
    if applied:
        return [*lines, "", f"freed {total:,.1f} MB"]
    return [*lines, "", f"{total:,.1f} MB can go: the same command with --apply deletes it (--only CLASS: one alone)"]


def _captures(ctx: StageContext) -> Freeable:
    """Files of parts that neither the finished stage nor today's settings name."""
    store = ctx.run.store
    ingest = ctx.run.manifest("ingest")
    shapes = _shapes(ctx)
    if ingest is None or not shapes:
        return Freeable("captures", {}, "ingest is not finished, or the target is not at hand to compare with")
    wanted: set[str] = set()
    for entry in stored_entries(store):
        output = ingest.outputs.get(ingest_part_path(entry.part))
        if output is not None and entry.key in {part_key(shape, output["sha256"]) for shape in shapes}:
            wanted |= {f"{part_name(entry.part)}.json", *(str(f["name"]) for f in entry.files.values())}
    return Freeable("captures", _sizes(store, [f"{PARTS}/{n}" for n in store.files(PARTS) if n not in wanted]))


def _shapes(ctx: StageContext) -> list[str]:
    shapes = []
    if (manifest := ctx.run.manifest("generate")) is not None:
        shapes.append(recorded_shape(manifest))
    with contextlib.suppress(UserError):
        shapes.append(shape_of(ctx))
    return shapes


def _states(ctx: StageContext) -> Freeable:
    """States of parts that the draft was trained on and evaluated with."""
    for stage in ("train", "evaluate"):
        if not _follows(ctx, stage):
            return Freeable("states", {}, f"they stay: {stage} is not finished with them")
    if _points(ctx.run.store, measured=False):
        return Freeable("states", {}, "they stay: a curve is not finished with them")
    return Freeable("states", _sizes(ctx.run.store, [_states_path(e) for e in _with_states(ctx)]))


def _follows(ctx: StageContext, stage: str) -> bool:
    """Whether `stage` is finished with the very parts of today's generate stage."""
    manifest, generate = ctx.run.manifest(stage), ctx.run.manifest("generate")
    if manifest is None or generate is None or STALE in manifest.extra:
        return False
    return manifest.inputs.get("generate") == generate.digest


def _checkpoints(ctx: StageContext) -> Freeable:
    """Checkpoints of a finished training that are not its last, and those of measured points of a curve."""
    store = ctx.run.store
    folders, stays = _before_the_last(ctx)
    for point in _points(store, measured=True):  # a kill between measuring and deleting leaves some
        folders += [f"{point}/checkpoints/{name}" for name in store.folders(f"{point}/checkpoints")]
        folders.append(f"{point}/best")
    if _points(store, measured=False):
        stays = "; ".join(filter(None, (stays, "those of a curve stay: it is not finished")))
    paths = [f"{folder}/{file}" for folder in folders for file in store.files(folder)]
    paths.sort(key=lambda path: not path.endswith("state.json"))  # first: without it the others count for nothing
    return Freeable("checkpoints", _sizes(store, paths), stays)


def _before_the_last(ctx: StageContext) -> tuple[list[str], str]:
    """Folders of the run's own training that are not needed, and why others stay."""
    manifest = ctx.run.manifest("train")
    if manifest is None:
        return [], "they stay: train is not finished"
    kept = {path.split("/")[2] for path in manifest.outputs if path.startswith(f"{_CHECKPOINTS}/")}
    if not kept:
        return [], "they stay: train names no last one"
    names = ctx.run.store.folders(_CHECKPOINTS)
    return [f"{_CHECKPOINTS}/{name}" for name in names if name.startswith("step-") and name not in kept], ""


def _initial(ctx: StageContext) -> Freeable:
    """Drafts that finished trainings began from; another training lays its own down again."""
    store, manifest = ctx.run.store, ctx.run.manifest("train")
    done = manifest is not None and STALE not in manifest.extra
    folders = [*(["train"] if done else []), *_points(store, measured=True)]
    found = _sizes(store, [f"{folder}/{name}" for folder in folders for name in INITIAL])
    waits = [] if done else ["train"]
    waits += _points(store, measured=False)
    needed = any(store.exists(f"{folder}/{INITIAL[0]}") for folder in waits)
    return Freeable("initial", found, "those of unfinished trainings stay" if needed else "")


def _points(store: Store, measured: bool) -> list[str]:
    """Folders of a curve's points: those that are measured, or those whose training was begun and is not."""
    folders = [f"{CURVE}/{name}" for name in store.folders(CURVE)]
    return [f for f in folders if store.exists(f"{f}/{POINT}") == measured]


def _logs(ctx: StageContext) -> Freeable:
    names = [n for n in ctx.run.store.files("logs") if n.startswith("driver-") and n.endswith(".log")]
    return Freeable("logs", _sizes(ctx.run.store, [f"logs/{n}" for n in names[:-1]]))


def _delete(ctx: StageContext, item: Freeable) -> None:
    """Delete, and keep a line of it in `cleaned.json`."""
    store = ctx.run.store
    if not item.files:
        return
    if item.kind == "states":
        delete_states(ctx, [e for e in _with_states(ctx) if _states_path(e) in item.files])
        return
    for path in item.files:
        _check(ctx)
        store.delete(path)
    if item.kind == "checkpoints":
        for folder in {path.rpartition("/")[0] for path in item.files}:
            store.delete(folder)
    _record(store, item)


def delete_states(ctx: StageContext, entries: list[PartEntry]) -> None:
    """Delete the states of parts; each entry says so before its file goes."""
    store = ctx.run.store
    now = _now()
    files: dict[str, int] = {}
    for entry in entries:
        _check(ctx)
        write_entry(store, replace(entry, cleaned=now))
        path = _states_path(entry)
        if store.exists(path):
            store.forget_copy(path)
            store.delete(path)
        files[path] = int(entry.files["states"]["size"])
    if files:
        _record(store, Freeable("states", files))
        log.info("cleaned the states of %d parts, %.1f MB", len(files), sum(files.values()) / 1e6)


def _check(ctx: StageContext) -> None:
    if ctx.lease is not None:
        ctx.lease.check()


def _record(store: Store, item: Freeable) -> None:
    before = store.read_json(CLEANED)
    done = {"when": _now(), "class": item.kind, "files": len(item.files), "bytes": item.bytes}
    store.write_json(CLEANED, [*(before if isinstance(before, list) else []), done])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


# By storage.keep_states, as the stages of a run end.


def after_train(ctx: StageContext) -> None:
    """until_trained: states of the parts that hold no held-out conversation."""
    if ctx.config.storage.keep_states != "until_trained":
        return
    store, entries = ctx.run.store, _with_states(ctx)
    if not entries:
        return
    split = load_split(store, _finished_entries(ctx), ctx.config)
    held = {conversation for conversation, part in split.items() if part == "holdout"}
    delete_states(ctx, [e for e in entries if held.isdisjoint(conversation_ids(store, [e]))])


def after_evaluate(ctx: StageContext) -> None:
    """until_trained: the states that are left."""
    if ctx.config.storage.keep_states == "until_trained":
        delete_states(ctx, _with_states(ctx))


def after_report(ctx: StageContext) -> None:
    """until_done: all states."""
    if ctx.config.storage.keep_states == "until_done":
        delete_states(ctx, _with_states(ctx))


def _finished_entries(ctx: StageContext) -> list[PartEntry]:
    """Entries of the parts that the finished generate stage names."""
    ingest, generate = ctx.input("ingest"), ctx.input("generate")
    shape = recorded_shape(generate)
    keys = {
        e.part: part_key(shape, ingest.outputs[ingest_part_path(e.part)]["sha256"])
        for e in stored_entries(ctx.run.store)
        if ingest_part_path(e.part) in ingest.outputs
    }
    valid, _ = committed_parts(ctx.run.store, keys, "size")
    return [valid[p] for p in sorted(valid)]


def _with_states(ctx: StageContext) -> list[PartEntry]:
    """Those of them whose states are on the disk."""
    names = set(ctx.run.store.files(PARTS))
    return [e for e in _finished_entries(ctx) if e.files["states"]["name"] in names]


def stored_entries(store: Store) -> Iterator[PartEntry]:
    """Every readable entry, in order; some are read at once, and no more than a few ahead of what is asked for."""
    names = [n.removeprefix("part-").removesuffix(".json") for n in store.files(PARTS) if n.endswith(".json")]
    numbers = [int(name) for name in names if name.isdigit()]
    with entry_readers(store) as pool:
        for first in range(0, len(numbers), _AHEAD):
            found = pool.map(lambda number: read_entry(store, number), numbers[first : first + _AHEAD])
            yield from (entry for entry in found if entry is not None)


def _states_path(entry: PartEntry) -> str:
    return f"{PARTS}/{entry.files['states']['name']}"


def _sizes(store: Store, paths: list[str]) -> dict[str, int]:
    return {path: size for path in paths if (size := store.size(path)) is not None}
