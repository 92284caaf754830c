"""Everything the report shows, each number from a file of the run folder; what has not run is told, not guessed."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable
from typing import Any

from app.clean import stored_entries
from app.errors import UserError
from app.pipeline import STALE, StageContext
from app.plan.estimate import PLAN_FILE
from app.plan.measured import compare
from app.report.samples import length_table, mask_samples, survey
from app.report.verdict import verdict
from app.results import collect, current_manifest
from app.runfolder import Manifest, RunFolder
from app.storage import Store
from app.target import load_tokenizer

STAGES = ("ingest", "generate", "quality", "vocab", "train", "export", "evaluate", "bench")
DOCTOR_FILE = "doctor.json"
_POINTS = 200  # of a curve


def report_data(ctx: StageContext) -> dict[str, Any]:
    """The report of a run, finished or not, as plain data."""
    run = ctx.run
    results = collect(run)
    manifests = {name: m for name in STAGES if (m := run.manifest(name)) is not None}
    latest = list(manifests.values())[-1] if manifests else None
    return {
        "run": run.url,
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "verdict": verdict(results),
        "unfinished": unfinished(run),
        "results": results,
        "stages": {
            n: {
                "seconds": m.seconds,
                "started": m.started,
                "digest": m.digest,
                "git_revision": m.git_revision,
                "versions": m.versions,
            }
            for n, m in manifests.items()
        },
        "versions": latest.versions if latest is not None else {},
        "git_revision": latest.git_revision if latest is not None else None,
        "seeds": seeds_of(manifests.values()),
        "target": target_of(run),
        "serve": run.store.read_json("export/serve.json") or {},
        "curve": loss_curve(run),
        "planned": planned(run),
        "doctor": read_doctor(run.store),
        **_of_samples(ctx),
    }


def unfinished(run: RunFolder) -> dict[str, str]:
    """Stages without a result that holds, and why in words."""
    found = {}
    for name in STAGES:
        manifest = run.manifest(name)
        if manifest is None:
            found[name] = "not run"
        elif STALE in manifest.extra:
            found[name] = str(manifest.extra[STALE])
        elif current_manifest(run, name) is None:
            found[name] = "out of date: what it was made from was made again since"
    return found


def seeds_of(manifests: Iterable[Manifest]) -> dict[str, int]:
    """Every seed that the finished stages were made with, by its key."""
    seeds: dict[str, int] = {}
    for manifest in manifests:
        seeds |= {key: int(value) for key, value in manifest.config.items() if key.endswith("seed")}
        for number, source in enumerate(manifest.config.get("sources", [])):
            seeds |= {f"sources.{number}.seed": int(source["seed"])} if "seed" in source else {}
    return seeds


def target_of(run: RunFolder) -> dict[str, Any]:
    """What the states were captured from, as generate recorded it."""
    manifest = run.manifest("generate")
    if manifest is None:
        return {}
    told = manifest.extra.get("target", {})
    entry = next(stored_entries(run.store), None)
    record = {} if entry is None else entry.record
    return {
        "name": told.get("name"),
        "architecture": told.get("architecture"),
        "revision": record.get("target_revision"),
        "weights_digest": told.get("weights_digest"),
        "tokenizer_digest": told.get("tokenizer_digest"),
        "engine": record.get("engine"),
        "codec": "none" if entry is None else entry.codec,
        "layers": manifest.extra.get("layers"),
    }


def loss_curve(run: RunFolder) -> dict[str, list[dict[str, Any]]]:
    """Points of the training log: `train` loss in windows of equal length, `valid` as measured."""
    try:
        text = run.store.read_bytes("train/metrics.jsonl").decode(errors="replace")
    except FileNotFoundError:
        return {"train": [], "valid": []}
    rows = [row for line in text.splitlines() if (row := _row(line)) is not None]
    train = [r for r in rows if isinstance(r.get("loss"), int | float)]
    valid = [r["validation"] for r in rows if isinstance(r.get("validation"), dict)]
    every = max(1, math.ceil(len(train) / _POINTS))
    windows = [train[i : i + every] for i in range(0, len(train), every)]
    return {
        "train": [{"step": w[-1]["step"], "value": sum(r["loss"] for r in w) / len(w)} for w in windows],
        "valid": [
            {"step": v["step"], "value": v["acceptance_length"], "interval": v.get("interval"), "loss": v.get("loss")}
            for v in valid
        ],
    }


def _row(line: str) -> dict[str, Any] | None:
    """A line of the log; None where a stopped run left half of one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def planned(run: RunFolder) -> dict[str, Any] | None:
    """Planned against actual; None where there is no plan."""
    try:
        pairs = compare(run)
    except UserError:
        return None
    plan = run.store.read_json(PLAN_FILE)
    rows = []
    for what, expected, actual in pairs:
        name, _, unit = what.rpartition(" ")
        rows.append({"what": name, "unit": unit, "planned": expected, "actual": actual})
    return {"origin": plan.get("origin", "unknown"), "rows": rows}


def read_doctor(store: Store) -> dict[str, Any] | None:
    """What `draftmill doctor` found; None where it was not asked."""
    data = store.read_json(DOCTOR_FILE)
    return data if isinstance(data, dict) else None


def _of_samples(ctx: StageContext) -> dict[str, Any]:
    """Mix, lengths and masks of the committed samples."""
    found = survey(ctx.run.store, stored_entries(ctx.run.store))
    prompts, answers = found.lengths
    data: dict[str, Any] = {
        "mix": found.mix(),
        "lengths": {
            "prompt": length_table(prompts),
            "answer": length_table(answers),
            "max_length": ctx.config.generate.max_length,
            "max_new_tokens": ctx.config.generate.max_new_tokens,
        },
        "masks": [],
        "masks_note": None,
    }
    if found.shown:
        try:
            target = ctx.config.target
            tokenizer = load_tokenizer(ctx.target.model, target.trust_remote_code, target.chat_template)
            data["masks"] = mask_samples(found, tokenizer)
        except UserError as error:
            data["masks_note"] = f"the target's tokenizer cannot be read: {error}"
    elif found.groups:
        data["masks_note"] = "every sample is private or long, so none is shown"
    return data
