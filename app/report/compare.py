"""`draftmill compare RUN RUN...`: the numbers of runs side by side, what is worse marked, what was set differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from app.config import Config
from app.errors import UserError
from app.pipeline import BESIDE_S
from app.redact import redact
from app.report.data import STAGES, unfinished
from app.report.metrics import Metric, metrics_of
from app.report.page import environment
from app.results import collect, current_manifest
from app.runfolder import Manifest, RunFolder
from app.status import config_of

RULE = (
    "Marked against the first run where the difference is more than both 95 % intervals allow; without intervals, of"
    " acceptance, speed and loss more than 5 %, of bytes 2 %, of time 20 % and 5 s."
)
_ABSENT = "unset"


@dataclass(frozen=True)
class Compared:
    """Runs side by side; the first is what the others are compared with."""

    names: list[str]
    urls: list[str]
    rows: list[tuple[str, list[Metric | None]]]  # name of the number, one for each run
    differences: list[tuple[str, list[str]]]  # setting, version or revision; one for each run
    notes: list[str]

    def mark(self, metrics: Sequence[Metric | None], run: int) -> str:
        """worse, better, or nothing, of run number `run`."""
        first, mine = metrics[0], metrics[run]
        return mine.change_from(first) if run and first is not None and mine is not None else ""

    @property
    def regressions(self) -> list[str]:
        return [
            f"{self.names[run]}: {name}"
            for name, metrics in self.rows
            for run in range(1, len(self.names))
            if self.mark(metrics, run) == "worse"
        ]


def _finished(run: RunFolder) -> dict[str, Manifest]:
    """Manifests of the stages that are done and count."""
    return {name: m for name in STAGES if (m := current_manifest(run, name)) is not None}


def compare_runs(runs: Sequence[str]) -> Compared:
    """Raises UserError where one is no run, or there is nothing to compare."""
    if len(runs) < 2:
        raise UserError("compare needs two runs or more; `draftmill report RUN --now` shows one")
    configs = [config_of(run, []) for run in runs]
    folders = [RunFolder(c.run_dir, c.storage.options) for c in configs]
    if len({f.url for f in folders}) < len(folders):
        raise UserError("compare was given the same run twice; its numbers could only be the same")
    results = [collect(folder) for folder in folders]
    found = [
        metrics_of(r, {n: m.seconds for n, m in done.items()}, sum(m.extra.get(BESIDE_S, 0.0) for m in done.values()))
        for r, done in zip(results, map(_finished, folders), strict=True)
    ]
    for folder, metrics in zip(folders, found, strict=True):
        if not metrics:
            raise UserError(f"{folder.url}: no stage is finished, so there is nothing to compare")
    names = _names([f.url for f in folders])
    notes = [note for n, f, r in zip(names, folders, results, strict=True) for note in _notes(n, f, r)]
    return Compared(
        names,
        [f.url for f in folders],
        _aligned(found),
        _differences(configs, folders),
        [*notes, *_unlike(configs, folders, results)],
    )


def compare_text(compared: Compared) -> list[str]:
    """A table for a terminal."""
    cells = [[name, *(_cell(compared, metrics, i) for i in range(len(metrics)))] for name, metrics in compared.rows]
    lines = ["", *(f"{n}: {u}" for n, u in zip(compared.names, compared.urls, strict=True)), ""]
    lines += [*_table([["", *compared.names], *cells]), "", RULE]
    lines += [f"note: {note}" for note in compared.notes]
    if compared.differences:
        rows = [[name, *values] for name, values in compared.differences]
        lines += ["", "set differently:", *_table(rows)]
    else:
        lines += ["", "the settings are the same"]
    worse = compared.regressions
    return [*lines, "", f"{len(worse)} worse: {'; '.join(worse)}" if worse else "nothing is worse", ""]


def compare_page(compared: Compared) -> str:
    """The same as a self-contained page; everything that came from a file is escaped."""
    return environment().get_template("compare.html.jinja").render(compared=compared, rule=RULE)


def _cell(compared: Compared, metrics: Sequence[Metric | None], run: int) -> str:
    metric, mark = metrics[run], compared.mark(metrics, run)
    return "-" if metric is None else metric.text() + (f"  {mark.upper() if mark == 'worse' else mark}" if mark else "")


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _names(urls: Sequence[str]) -> list[str]:
    """The last part of each place, with its number where two are called alike."""
    last = [PurePosixPath(url).name or url for url in urls]
    return [name if last.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(last)]


def _aligned(found: list[list[Metric]]) -> list[tuple[str, list[Metric | None]]]:
    """Numbers by name, in the order of the runs that have them: one that is absent stands where the others have it."""
    order: list[str] = []
    for metrics in found:
        place = 0
        for metric in metrics:
            if metric.name in order:
                place = order.index(metric.name) + 1
            else:
                order.insert(place, metric.name)
                place += 1
    by_name = [{m.name: m for m in metrics} for metrics in found]
    return [(name, [named.get(name) for named in by_name]) for name in order]


def _differences(configs: Sequence[Config], folders: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    sides = []
    for config, folder in zip(configs, folders, strict=True):
        side = {k: v for k, v in _flat(config.model_dump(mode="json")).items() if k != "run_dir"}
        manifests = [m for name in STAGES if (m := folder.manifest(name)) is not None]
        if manifests:
            side |= {f"version of {k}": v for k, v in manifests[-1].versions.items()}
            side["revision of the code"] = manifests[-1].git_revision
        sides.append(side)
    keys = list(dict.fromkeys(key for side in sides for key in side))
    rows = [(key, [_shown(side.get(key, _ABSENT)) for side in sides]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted key -> value; a list of mappings by its numbers."""
    items: list[tuple[Any, Any]] | None = None
    if isinstance(value, dict) and value:
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        items = list(enumerate(value))
    if items is None:
        return {path: value}
    flat: dict[str, Any] = {}
    for key, inner in items:
        flat |= _flat(inner, f"{path}.{key}" if path else str(key))
    return flat


def _shown(value: Any) -> str:
    text = redact(_ABSENT if value is None else str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _notes(name: str, folder: RunFolder, results: dict[str, Any]) -> list[str]:
    notes = [f"{name}: {stage}: {why}" for stage, why in unfinished(folder).items()]
    bench = results.get("bench")
    if bench is not None and bench["speedup"] is not None and not bench["comparable"]:
        notes.append(f"{name}: other programs took the processor during bench, so its speeds are not marked")
    if "stopped_by" in results:
        notes.append(f"{name}: generate was {results['stopped_by']['words']}")
    return notes


def _unlike(configs: Sequence[Config], folders: Sequence[RunFolder], results: Sequence[dict[str, Any]]) -> list[str]:
    """Why numbers of the runs are of different things."""
    notes = []
    ks = {c.evaluate.num_draft_tokens for c in configs}
    if len(ks) > 1:
        said = ", ".join(map(str, sorted(ks)))
        notes.append(f"acceptance lengths are of {said} draft tokens a step; compare them by position")
    targets = {m.inputs.get("target weights") for f in folders if (m := f.manifest("generate")) is not None}
    if len(targets) > 1:
        notes.append("the targets are not the same, so no number is of the same thing")
    rows = {m.digest if (m := f.manifest("ingest")) is not None else None for f in folders}
    if len(rows) > 1 or len({(c.evaluate.holdout, c.evaluate.holdout_seed) for c in configs}) > 1:
        notes.append("the held-out conversations are not the same, so acceptance and speed are of different prompts")
    limits = {r["bench"]["max_new_tokens"] for r in results if "bench" in r}
    if len(limits) > 1:
        notes.append("bench stopped answers at different lengths")
    return notes
