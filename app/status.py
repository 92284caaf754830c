"""What of a run is done, what is stale and why; of a running one how far it is and what it waits for.

All of it is read from the run folder, by anyone who can read that: no Ray, and no target where it is elsewhere.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from app.budget import STOPPED_BY, stopped_words
from app.captured import load_entries, part_keys
from app.clean import CLEANED
from app.config import Config, apply_overrides, load_config, parse_config
from app.errors import UserError, first_line
from app.forgotten import read_forgotten
from app.lease import Holder, read_holder
from app.live import EVERY_S, Live, read_live
from app.nodes import space_of
from app.parts import PARTS, committed_parts
from app.pipeline import Stage, StageContext, StageState, stage_state
from app.runfolder import Manifest, RunFolder
from app.stages import STAGES
from app.storage import Store
from app.units import size_text, time_text

_LOST_S = 4 * EVERY_S  # silence of a running stage that is worth a word
BESIDE_TRAIN = ("generate", "quality", "vocab")  # stages that training may run beside
_LOOK_S = 2.0  # between two looks of `watch` in a terminal


def status_lines(run: str, overrides: list[str]) -> list[str]:
    """One line per stage of the run folder (or of a configuration's run folder).

    Raises:
        UserError: there is no run at that place.
    """
    config = config_of(run, overrides)
    # A look must not read terabytes: sizes are compared here, checksums when the run goes on.
    config = config.model_copy(update={"storage": config.storage.model_copy(update={"verify": "size"})})
    folder = RunFolder(config.run_dir, config.storage.options)
    ctx = StageContext(config, folder)
    holder = read_holder(folder.store)
    lines = [f"run {folder.url}", *_holder_lines(holder)]
    if (pending := read_forgotten(folder.store).pending) is not None:
        lines.append(f"a forgetting was cut off; finish it: draftmill forget {folder.url} {' '.join(pending['ids'])}")
    redo: set[str] = set()
    for stage in STAGES:
        state = _state(stage, ctx, frozenset(redo))
        if state.state != "done":
            redo.add(stage.name)
            if holder is not None and (holder.stage == stage.name or stage.name in _beside(folder.store, holder)):
                state = StageState("running", state.reasons if state.state == "stale" else ())
        lines.append(_line(stage.name, state, ctx))
    return [*lines, *_now_lines(folder.store, holder, finished=not redo)]


def watch(
    run: str,
    overrides: list[str],
    show: Callable[[str], None],
    terminal: bool,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Show how a run stands, again and again, until the driver that holds it has gone; for ever where none does.

    Between two looks only manifests and the small files of the running stage are read. A store that fails after the
    first look is told of and asked again.

    Args:
        terminal: each screen takes the place of the last; else a block is shown when something changed.

    Raises:
        UserError: there is no run at that place.
    """
    config = config_of(run, overrides)
    folder = RunFolder(config.run_dir, config.storage.options)
    before, seen = "", False
    while True:
        try:
            holder = read_holder(folder.store)
            lines = [f"run {folder.url}", *_holder_lines(holder), *_stage_lines(folder, holder)]
            text = "\n".join([*lines, *_now_lines(folder.store, holder, finished=False)])
        except (UserError, OSError) as error:
            if not before:
                raise
            show(f"{folder.url} cannot be read for the moment: {first_line(error)}")
            wait(EVERY_S)
            continue
        if terminal:
            width = shutil.get_terminal_size().columns
            show("\x1b[H\x1b[2J" + "\n".join(line[:width] for line in text.splitlines()))
        elif text != before:
            show(text)
        if holder is None and seen:
            return
        before, seen = text, holder is not None
        wait(_LOOK_S if terminal else EVERY_S)


def watch_here(run: str, overrides: list[str]) -> None:
    """`watch` on standard output; Ctrl-C ends the look, never the run."""
    with contextlib.suppress(KeyboardInterrupt):
        watch(run, overrides, lambda text: print(text, flush=True), sys.stdout.isatty())


def _holder_lines(holder: Holder | None) -> list[str]:
    if holder is None:
        return []
    return [f"running: pid {holder.pid} on {holder.host}, {holder.heartbeat}"]


def _stage_lines(folder: RunFolder, holder: Holder | None) -> Iterator[str]:
    """A line per stage that is done or running, nothing compared."""
    for stage in STAGES:
        manifest = folder.manifest(stage.name)
        if holder is not None and (holder.stage == stage.name or stage.name in _beside(folder.store, holder)):
            yield f"  {stage.name:<9} running"
        elif manifest is not None:
            yield f"  {stage.name:<9} done     {manifest.seconds:>8.1f} s  {manifest.started}"


def _beside(store: Store, holder: Holder) -> list[str]:
    """Stages that the driver has under way beside the one it works on: training, with train.start_after."""
    live = read_live(store, "train") if holder.stage in BESIDE_TRAIN else None
    return ["train"] if live is not None and live.at > time.time() - _LOST_S else []


def _ended_with(told: dict[str, Live], name: str | None) -> list[str]:
    """Stages that told of themselves to the end of a run that was stopped, beside stage `name`."""
    return [other for other in told if name is not None and other != name and told[other].at > told[name].at - _LOST_S]


def _now_lines(store: Store, holder: Holder | None, finished: bool) -> list[str]:
    """How the running stage stands, or how far the one came that was stopped; and the room that is left."""
    told = {stage.name: live for stage in STAGES if (live := read_live(store, stage.name)) is not None}
    name = max(told, key=lambda n: told[n].at, default=None)
    if holder is not None and holder.stage is not None:
        name = holder.stage  # what others left is old
    live = told.get(name) if name is not None else None
    lines = []
    if holder is None and (why := _last_stop(store)) is not None:
        lines.append(_told("stopped", why))
    if live is not None:
        lines += _live_lines(str(name), live, holder)
    beside = _beside(store, holder) if holder is not None else _ended_with(told, name)
    for other in beside:
        if other in told:
            lines += _live_lines(other, told[other], holder)
    if (live is None or live.disk is None) and store.is_local and not finished:
        lines.append(_told("disk left", f"{size_text(space_of(store.root).free)} where the run folder is"))
    return lines


def _live_lines(stage: str, live: Live, holder: Holder | None) -> list[str]:
    age = time.time() - live.at
    if holder is None:
        when = f"{datetime.datetime.fromtimestamp(live.at, datetime.UTC):%Y-%m-%d %H:%M} UTC"
        return [_told("came to", f"{stage}: {live.words} ({when})"), *(_told("failure", f) for f in live.failures)]
    lines = [_told("now", f"{stage}: {live.words} ({age:.0f} s ago)")]
    if age > _LOST_S:
        lines.append(
            _told("silent", f"{stage} has told nothing for {time_text(age)}: its driver or leading worker waits")
        )
    lines.append(_told("waits for", live.waiting_for or "nothing"))
    lines += [_told("straggler", s) for s in live.stragglers]
    lines += [_told("failure", f) for f in live.failures]
    if live.disk is not None:
        lines.append(_told("disk left", live.disk))
    return lines + [f"    {member}" for member in live.members]


def _told(what: str, text: str) -> str:
    return f"  {what:<9} {text}"


def _last_stop(store: Store) -> str | None:
    """Why the newest driver stopped, by the last line of its log; None where it did not stop by a fault."""
    logs = [name for name in store.files("logs") if name.startswith("driver-") and name.endswith(".log")]
    if not logs:
        return None
    with contextlib.suppress(OSError):
        lines = store.read_bytes(f"logs/{logs[-1]}").decode(errors="replace").splitlines()
        if lines and " ERROR stopped: " in lines[-1]:
            return lines[-1].partition(" ERROR stopped: ")[2]
    return None


def _state(stage: Stage, ctx: StageContext, redo: frozenset[str]) -> StageState:
    """As `stage_state`; where what the stage depends on cannot be seen from here, compared with the rest."""
    try:
        return stage_state(stage, ctx, redo)
    except (UserError, OSError) as error:
        seen = stage_state(replace(stage, outside=None, unfinished=None), ctx, redo)
        if seen.state != "done":
            return seen
        return StageState("done", (f"not compared with what lies outside the run folder ({first_line(error)})",))


def _line(name: str, state: StageState, ctx: StageContext) -> str:
    manifest = ctx.run.manifest(name)
    if state.state == "done" and manifest is not None:
        notes = [manifest.started, *(_notes(ctx, manifest) if name == "generate" else []), *state.reasons]
        return f"  {name:<9} done     {manifest.seconds:>8.1f} s  {'; '.join(notes)}"
    details = [*state.reasons]
    if name == "generate" and (ingest := ctx.run.manifest("ingest")) is not None:
        details.append(f"{_committed(ctx)} of {ingest.counts['parts']} parts are committed")
    if name == "train" and state.state != "stale" and (row := _last_metrics(ctx)) is not None:
        details.append(f"step {row['step']}, epoch {row['epoch']:.2f} of {ctx.config.train.epochs:g}")
    return f"  {name:<9} {state.state:<8} {'; '.join(details)}".rstrip()


def _committed(ctx: StageContext) -> int:
    """How many parts are committed; by name alone where the target cannot be seen from here."""
    try:
        return len(committed_parts(ctx.run.store, part_keys(ctx), "size")[0])
    except (UserError, OSError):
        return sum(name.startswith("part-") and name.endswith(".json") for name in ctx.run.store.files(PARTS))


def _notes(ctx: StageContext, generate: Manifest) -> list[str]:
    """What a finished generate stage is not: whole, or still there."""
    stopped = generate.extra.get(STOPPED_BY)
    notes = [f"PARTIAL: {stopped_words(stopped)}"] if stopped is not None else []
    entries = load_entries(ctx) if ctx.run.store.exists(CLEANED) else []
    if cleaned := [e for e in entries if e.cleaned]:
        notes.append(f"states of {len(cleaned)} of {len(entries)} parts were cleaned ({cleaned[0].cleaned})")
    return notes


def _last_metrics(ctx: StageContext) -> dict[str, Any] | None:
    """The last whole line of the training log."""
    try:
        lines = ctx.run.store.read_bytes("train/metrics.jsonl").decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and all(isinstance(row.get(k), int | float) for k in ("step", "epoch")):
                return dict(row)
    return None


def config_of(run: str, overrides: list[str]) -> Config:
    """The configuration of a run folder, or of a YAML file.

    Raises:
        UserError: there is no run at that place.
    """
    if run.endswith((".yaml", ".yml")) and "://" not in run and Path(run).is_file():
        return load_config(run, overrides)
    folder = RunFolder(run)
    try:
        data = yaml.safe_load(folder.store.read_bytes("config.yaml"))
        if not isinstance(data, dict):
            raise ValueError("it is no mapping")
    except OSError as error:
        raise UserError(f"{run} is no run folder: it has no config.yaml; give a run folder or a YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # bytes that are no text are a ValueError
        raise UserError(
            f"{run}/config.yaml is damaged ({first_line(error)}); give the YAML file of the run in place of its folder"
        ) from error
    return parse_config(apply_overrides({**data, "run_dir": folder.url}, overrides), f"{run}/config.yaml")
