"""`draftmill doctor RUN`, and the doctor that runs by itself before training, bench and report."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, get_args

from app.doctor.checklist import SECTIONS, walk
from app.doctor.facts import Facts
from app.doctor.finding import Line, State
from app.errors import UserError
from app.pipeline import StageContext
from app.runfolder import RunFolder

log = logging.getLogger("draftmill")

REPORT = "doctor.json"  # in the run folder
# The stages whose output exists, and counts, when the doctor runs before a stage.
BEFORE_TRAIN = ("ingest", "generate", "quality", "vocab")
BEFORE_BENCH = (*BEFORE_TRAIN, "train", "export", "evaluate")
ALL = (*BEFORE_BENCH, "bench")


@dataclass(frozen=True)
class DoctorReport:
    """What the doctor found in a run."""

    run: str
    lines: list[Line]

    @property
    def failures(self) -> list[Line]:
        return [line for line in self.lines if line.finding.state == "failed"]

    @property
    def passes(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        counts = {s: sum(x.finding.state == s for x in self.lines) for s in get_args(State)}
        return {
            "run": self.run,
            "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "passes": self.passes,
            "counts": counts,
            "causes": list(dict.fromkeys(line.finding.cause for line in self.failures)),
            "lines": [line.to_json() for line in self.lines],
        }

    def text(self) -> list[str]:
        """For people: a line for each check under its section's head, the next step below what has one."""
        out = [f"doctor {self.run}"]
        width = max(len(line.title) for line in self.lines)
        section = ""
        for line in self.lines:
            if line.id[0] != section:
                section = line.id[0]
                out += ["", f"{section}  {SECTIONS[section]}"]
            found = line.finding
            said = f"{found.cause}: {found.evidence}" if found.cause else found.evidence
            out.append(f"  {line.id}  {found.state:<14}  {line.title:<{width}}  {said}")
            if found.next_step:
                out.append(f"  {'':2}  {'':14}  {'':{width}}  -> {found.next_step}")
        return [*out, "", self.verdict()]

    def verdict(self) -> str:
        """One sentence."""
        counts = self.to_json()["counts"]
        names = {"advice": "with advice"}
        said = ", ".join(f"{count} {names.get(state, state)}" for state, count in counts.items())
        if self.passes:
            return said
        causes = dict.fromkeys(str(line.finding.cause) for line in self.failures)
        return f"{said}: {', '.join(causes)}"


def examine(ctx: StageContext, stages: Sequence[str] = ALL) -> DoctorReport:
    """Go through the checklist on what `stages` left, and keep the report in the run folder (`doctor.json`)."""
    with closing(Facts(ctx, stages)) as facts:
        report = DoctorReport(ctx.run.url, list(walk(facts)))
    ctx.run.store.write_json(REPORT, report.to_json())
    return report


def doctor(run: str, overrides: list[str]) -> DoctorReport:
    """`examine` on a run folder, or on a configuration's.

    Raises:
        UserError: there is no run, or nothing of it is done yet.
    """
    from app.jobs import settle_run_dir
    from app.status import config_of

    config = settle_run_dir(config_of(run, overrides))
    ctx = StageContext(config, RunFolder(config.run_dir, config.storage.options))
    if not any(ctx.run.manifest(stage) for stage in ALL):
        raise UserError(f"{ctx.run.url}: no stage of this run is finished yet, so there is nothing to examine")
    return examine(ctx)


def before_train(ctx: StageContext) -> None:
    """Raises UserError where a check on the samples fails, unless doctor.stop is off."""
    _before(ctx, "train", BEFORE_TRAIN)


def before_bench(ctx: StageContext) -> None:
    """Raises UserError where a check on samples, training or export fails, unless doctor.stop is off."""
    _before(ctx, "bench", BEFORE_BENCH)


def before_report(ctx: StageContext) -> None:
    """The whole checklist with the gate that compares replay and engine; what fails is told and stops nothing."""
    if "report" in ctx.config.doctor.before:
        _tell(examine(ctx), "report")


def _before(ctx: StageContext, stage: str, stages: Sequence[str]) -> None:
    settings = ctx.config.doctor
    if stage not in settings.before:
        return
    report = examine(ctx, stages)
    if settings.stop and not report.passes:
        first, more = report.failures[0], len(report.failures) - 1
        raise UserError(
            f"{stage}: the doctor finds {_words(first)}; {first.finding.next_step}"
            + (f" ({more} more: draftmill doctor {ctx.run.url})" if more else "")
            + "; doctor.stop=false goes on all the same"
        )
    _tell(report, stage)


def _tell(report: DoctorReport, stage: str) -> None:
    """The verdict as a log line, and one for each failure."""
    log.info("doctor before %s: %s", stage, report.verdict())
    for line in report.failures:
        log.warning("doctor: %s; %s", _words(line), line.finding.next_step)


def _words(line: Line) -> str:
    return f"{line.finding.cause} ({line.id}, {line.title}: {line.finding.evidence})"


def as_json(report: DoctorReport) -> str:
    return json.dumps(report.to_json(), indent=2, ensure_ascii=False)
