"""`draftmill publish RUN DIR`: the draft's folder as it can be uploaded, with its numbers and where they are from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from app.checkpoint_files import weight_files
from app.clean import stored_entries
from app.config import Config
from app.draft_config import NORM_FLAGS
from app.errors import UserError
from app.lint.command import LintReport, lint
from app.lint.difference import SGLANG, errors_of
from app.lint.layer_ids import why_not_sglang
from app.pipelines.export import DRAFT
from app.redact import redact
from app.report.data import read_doctor, seeds_of, target_of, unfinished
from app.report.page import environment, with_interval
from app.report.samples import survey
from app.report.speed import cells_of, cost_lines, engine_of, length_interval, position_intervals
from app.report.verdict import verdict
from app.results import collect
from app.runfolder import Manifest, RunFolder
from app.serving import SERVE_FILE, serve_commands, serve_record
from app.status import config_of
from app.target import TargetInfo

CARD, PROVENANCE = "README.md", "provenance.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Of the identifiers that the hub knows, those a draft is likely to carry; any other becomes `other` with its name.
_LICENCES = (
    "apache-2.0 mit bsd-2-clause bsd-3-clause cc0-1.0 cc-by-4.0 cc-by-sa-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 openrail"
    " bigscience-openrail-m openrail++ gpl-3.0 agpl-3.0 lgpl-3.0 mpl-2.0 isc unlicense llama2 llama3 llama3.1 llama3.2"
    " llama3.3 llama4 gemma unknown other"
)
# Words of answers, names of files, an address.
_OF_THIS_RUN = ("mismatch_examples", "sets", "served_by")
# Settings that are places: files and servers.
_PLACES = ("train.init_from", "generate.endpoints", "bench.server", "bench.baseline_server", "bench.sets")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
_DEAF = 0.02  # accepted at the first position: below it the draft is served wrong, or has learnt nothing
_FALLS_SHORT = 0.5  # of what the walk predicts at least, below which another draft is served than was trained


def publish(
    run: str, folder: str, licence: str | None = None, base_model: str | None = None, force: bool = False
) -> list[str]:
    """Write `folder`: weights, config.json, serve.json, the card and `provenance.json`; returns lines for people.

    Args:
        run: run folder, or the YAML file of the run.
        licence: of the draft, as the hub writes it; left out of the card where the user does not state it.
        base_model: the target's id on the hub, where the run names it otherwise.
        force: also a draft that is broken; the card says what is wrong with it.

    Raises:
        UserError: there is no draft, the folder holds other files, or the draft is broken.
    """
    config = config_of(run, [])
    source = RunFolder(config.run_dir, config.storage.options)
    place = _place(folder)
    manifests = {n: m for n in ("ingest", "generate", "vocab", "train", "export", "evaluate", "bench")
                 if (m := source.manifest(n)) is not None}  # fmt: skip
    if "export" not in manifests:
        raise UserError(f"{source.url} has no exported draft; `draftmill export` writes one")
    base_model = _base_model(base_model, manifests)
    results = collect(source)
    with source.store.open_folder(DRAFT) as draft:
        faults = _faults(source, results, _lint(draft, config))
        if faults and not force:
            raise UserError(
                f"not published: {'; '.join(faults)}. Mend it, or give --force to publish it with these words in its"
                " card"
            )
        data = _data(source, config, manifests, results, place.name, base_model)
        _write(place, draft, data, _card(data, licence, faults))
    lines = [f"published {place}: {', '.join(sorted(p.name for p in place.iterdir()))}"]
    lines += [f"WARNING: {fault}" for fault in faults]
    if base_model is None:
        lines.append("base_model is left out of the card: give --base-model ORG/NAME, the target's id on the hub")
    if licence is None:
        lines.append("license is left out of the card: give --license ID, for example apache-2.0")
    return [*lines, f"upload it with: hf upload ORG/NAME {place}"]


def _place(folder: str) -> Path:
    """The folder to write; it is new, empty, or of an earlier `publish`."""
    if "://" in folder:
        raise UserError(f"{folder} is not on this machine; publish writes a local folder, which is then uploaded")
    place = Path(folder).expanduser().resolve()
    if place.exists() and not place.is_dir():
        raise UserError(f"{place} is a file; give a folder")
    if place.exists() and any(place.iterdir()) and not (place / PROVENANCE).exists():
        raise UserError(f"{place} holds other files; give a folder of its own")
    return place


def _base_model(given: str | None, manifests: dict[str, Manifest]) -> str | None:
    """The target's id on the hub, as given or as the run names it."""
    if given is not None:
        if not _HUB_ID.fullmatch(given):
            raise UserError(f"--base-model {given} is no id of the hub, which is ORG/NAME")
        return given
    name = str(manifests["generate"].extra["target"]["name"]) if "generate" in manifests else ""
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def _lint(draft: Path, config: Config) -> LintReport:
    """Against the target where it can be read, else the folder alone."""
    try:
        return lint(str(draft), config.target.model, trust_remote_code=config.target.trust_remote_code)
    except UserError:
        return lint(str(draft))


def _faults(run: RunFolder, results: dict[str, Any], checked: LintReport) -> list[str]:
    """Why this draft must not be given to others, in words."""
    found = [f"lint: {d}" for d in errors_of(checked.differences)]
    for stage, why in unfinished(run).items():
        if stage in ("export", "evaluate", "bench"):
            found.append(f"{stage}: {why}")
    bench, estimate = results.get("bench"), results.get("evaluate")
    if bench is not None:
        rates = bench["acceptance_per_position"]
        if rates and rates[0] < _DEAF:
            found.append(
                f"bench: {engine_of(bench)} accepts {100 * rates[0]:.1f} % of the first draft tokens; the draft is"
                " served wrong"
            )
        elif (
            estimate is not None
            and estimate["num_draft_tokens"] == bench["num_draft_tokens"]
            and not bench.get("temperature")  # the walk is of greedy answers
        ):
            least = _FALLS_SHORT * (estimate["interval"][0] - 1)
            if bench["acceptance_length"] - 1 < least:
                found.append(
                    f"bench: the acceptance length {bench['acceptance_length']:.2f} is far below the"
                    f" {estimate['acceptance_length']:.2f} that walking the same answers predicts"
                )
    doctor = read_doctor(run.store) or {}
    found += [
        f"doctor: {line.get('id', '')}, {line.get('cause', '')}"  # its evidence may name places
        for line in doctor.get("lines", [])
        if isinstance(line, dict) and line.get("state") == "failed"
    ]
    return [redact(fault) for fault in found]


def _data(
    run: RunFolder,
    config: Config,
    manifests: dict[str, Manifest],
    results: dict[str, Any],
    folder: str,
    base_model: str | None,
) -> dict[str, Any]:
    """What the card and `provenance.json` say; no text of a conversation, no place on this machine."""
    export = manifests["export"]
    draft = export.extra["draft_config"]
    target = target_of(run)
    shown = base_model or Path(str(target.get("name") or "TARGET")).name
    k = int(export.config["evaluate.num_draft_tokens"])
    info = TargetInfo.from_json(manifests["generate"].extra["target"]) if "generate" in manifests else None
    reason = why_not_sglang(bool(draft["norm_before_residual"]), draft["aux_layer_ids"], info)
    without = {} if reason is None else {SGLANG: reason}
    mix, hidden = _mix(run, config)
    return {
        "base_model": base_model,
        "target": {**target, "name": shown},
        "draft": draft,
        "num_layers": info.num_layers if info is not None else None,
        "num_draft_tokens": k,
        "verdict": verdict(results),
        "results": {
            name: _shared(results[name], hidden) for name in ("vocab", "train", "evaluate", "bench") if name in results
        },
        "data": mix,
        "datasets": [s.dataset for s in config.sources if s.dataset and not s.hides(False)],
        "settings": {
            key: _portable(value)
            for name in ("generate", "vocab", "train", "export", "evaluate", "bench")
            if name in manifests
            for key, value in manifests[name].config.items()
            if not key.startswith(("sources", "target.")) and key not in _PLACES
        },
        "seeds": seeds_of(manifests.values()),
        "versions": export.versions,
        "git_revision": export.git_revision,
        "stages": {n: {"digest": m.digest, "started": m.started, "seconds": m.seconds} for n, m in manifests.items()},
        "serve": serve_record(shown, folder, k, without),
        "commands": serve_commands(shown, folder, k, without),
    }


def _shared(found: Any, hidden: set[str]) -> Any:
    """Numbers without words of answers and, at any depth, without domains that private data alone has."""
    if isinstance(found, list):
        return [_shared(inner, hidden) for inner in found]
    if not isinstance(found, dict):
        return found
    shown = {key: value for key, value in found.items() if key not in _OF_THIS_RUN}
    if isinstance(shown.get("domains"), dict):
        shown["domains"] = {name: d for name, d in shown["domains"].items() if name not in hidden}
    return {key: _shared(value, hidden) for key, value in shown.items()}


def _portable(value: Any) -> Any:
    """Plain data without secrets and without places of this machine: of a path only its last part stays."""
    if isinstance(value, dict):
        return {key: _portable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_portable(inner) for inner in value]
    if isinstance(value, str):
        return Path(value).name if value.startswith(("/", "~", "./", "../")) else redact(value)
    return value


def _mix(run: RunFolder, config: Config) -> tuple[list[dict[str, Any]], set[str]]:
    """The data by source and domain, sources with private rows as one without a name; and domains of those alone."""
    groups = survey(run.store, stored_entries(run.store)).mix()
    private = {s.label for s in config.sources if s.hides(False)}
    private |= {g["source"] for g in groups if g["private_samples"]}
    shown: dict[tuple[str, str], dict[str, Any]] = {}
    for group in groups:
        key = ("private", "private") if group["source"] in private else (group["source"], group["domain"])
        into = shown.setdefault(
            key, {"source": key[0], "domain": key[1], "conversations": 0, "samples": 0, "tokens": 0}
        )
        into["conversations"] += group["conversations"]
        into["samples"] += group["samples"]
        into["tokens"] += group["tokens"]["supervised"]
    return list(shown.values()), {g["domain"] for g in groups} - {domain for _, domain in shown}


def _card(data: dict[str, Any], licence: str | None, faults: list[str]) -> str:
    results = data["results"]
    bench, estimate = results.get("bench"), results.get("evaluate")
    rows = []
    if bench is not None or estimate is not None:
        served = with_interval(bench["acceptance_length"], length_interval(bench, estimate)) if bench else "-"
        offline = with_interval(estimate["acceptance_length"], estimate["interval"]) if estimate else "-"
        rows.append(("acceptance length", served, offline))
    for i in range(data["num_draft_tokens"]):
        served = _position(bench, position_intervals(bench, estimate) if bench else [], i)
        offline = _position(estimate, (estimate or {}).get("interval_per_position") or [], i)
        rows.append((f"accepted at position {i + 1}", served, offline))
    # A card is Markdown, where escaping for HTML would spoil names; a cell must not end its row.
    env = environment().overlay(autoescape=False)
    env.filters["cell"] = lambda value: redact(str(value)).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return env.get_template("card.md.jinja").render(
        front=_front_matter(data, licence),
        rows=rows,
        faults=faults,
        cells=cells_of(bench) if bench else [],
        cost_lines=cost_lines(bench) if bench else [],
        flags=[name for name in NORM_FLAGS if data["draft"].get(name)],
        bench=bench,
        estimate=estimate,
        engine_name=engine_of(bench),
        with_interval=with_interval,
        **data,
    )


def _position(found: dict[str, Any] | None, intervals: list[Any], i: int) -> str:
    if found is None or i >= len(found["acceptance_per_position"]):
        return "-"
    ends = intervals[i] if i < len(intervals) else None
    return with_interval(found["acceptance_per_position"][i], ends, 1, 100, " %")


def _front_matter(data: dict[str, Any], licence: str | None) -> str:
    """YAML that the hub reads; what is not known is left out."""
    front: dict[str, Any] = {}
    if licence is not None:
        known = licence.lower()
        front |= {"license": known} if known in _LICENCES.split() else {"license": "other", "license_name": licence}
    if data["base_model"] is not None:
        front["base_model"] = data["base_model"]
    front |= {"library_name": "vllm", "pipeline_tag": "text-generation"}
    front["tags"] = ["eagle3", "speculative-decoding", "draft-model", "vllm", "sglang"]
    if data["datasets"]:
        front["datasets"] = sorted(set(data["datasets"]))
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True)


def _write(place: Path, draft: Path, data: dict[str, Any], card: str) -> None:
    """The folder; weights and indexes of another draft there go, since a loader could take them for this one's."""
    names = ["config.json", *weight_files(draft)]
    try:
        place.mkdir(parents=True, exist_ok=True)
        for old in [path for pattern in _WEIGHTS for path in place.glob(pattern) if path.name not in names]:
            old.unlink()
        for name in names:
            shutil.copyfile(draft / name, place / name)
        (place / SERVE_FILE).write_text(json.dumps(data["serve"], indent=2) + "\n", encoding="utf-8")
        told = {key: value for key, value in data.items() if key not in ("serve", "commands")}
        (place / PROVENANCE).write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (place / CARD).write_text(card, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{place} cannot be written: {error.strerror or error}") from error
