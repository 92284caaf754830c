"""What of a run is done, what is stale and why."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import yaml

from app.budget import STOPPED_BY, stopped_words
from app.captured import load_entries, part_keys
from app.clean import CLEANED
from app.config import Config, apply_overrides, load_config, parse_config
from app.errors import UserError
from app.forgotten import read_forgotten
from app.lease import read_holder
from app.parts import committed_parts
from app.pipeline import StageContext, StageState, stage_state
from app.runfolder import Manifest, RunFolder
from app.stages import STAGES


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
    lines = [f"run {folder.url}"]
    holder = read_holder(folder.store)
    if holder is not None:
        lines.append(f"running: pid {holder.pid} on {holder.host}, last heartbeat {holder.age:.0f} s ago")
    if (pending := read_forgotten(folder.store).pending) is not None:
        lines.append(f"a forgetting was cut off; finish it: draftmill forget {folder.url} {' '.join(pending['ids'])}")
    redo: set[str] = set()
    for stage in STAGES:
        state = stage_state(stage, ctx, frozenset(redo))
        if state.state != "done":
            redo.add(stage.name)
            if holder is not None and holder.stage == stage.name:
                state = StageState("running", state.reasons if state.state == "stale" else ())
        lines.append(_line(stage.name, state, ctx))
    return lines


def _line(name: str, state: StageState, ctx: StageContext) -> str:
    manifest = ctx.run.manifest(name)
    if state.state == "done" and manifest is not None:
        notes = [manifest.started, *(_notes(ctx, manifest) if name == "generate" else [])]
        return f"  {name:<9} done     {manifest.seconds:>8.1f} s  {'; '.join(notes)}"
    details = [*state.reasons]
    if name == "generate" and ctx.run.manifest("ingest") is not None:
        keys = part_keys(ctx)
        valid, _ = committed_parts(ctx.run.store, keys, "size")
        details.append(f"{len(valid)} of {len(keys)} parts are committed")
    if name == "train" and state.state != "stale" and (row := _last_metrics(ctx)) is not None:
        details.append(f"step {row['step']}, epoch {row['epoch']:.2f} of {ctx.config.train.epochs:g}")
    return f"  {name:<9} {state.state:<8} {'; '.join(details)}".rstrip()


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
            raise FileNotFoundError
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{run} is no run folder: it has no config.yaml; give a run folder or a YAML file") from error
    return parse_config(apply_overrides({**data, "run_dir": folder.url}, overrides), f"{run}/config.yaml")
