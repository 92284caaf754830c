"""Report: one self-contained HTML page from the files of the run, and the same numbers as JSON."""

from __future__ import annotations

from app.pipeline import StageContext, StageResult
from app.report.data import report_data
from app.report.page import render

PAGE, DATA = "report/report.html", "report/report.json"


def run(ctx: StageContext) -> StageResult:
    """Write `report/report.html` and `report/report.json`, also of a run that is not finished."""
    data = report_data(ctx)
    ctx.run.store.write_bytes(PAGE, render(data).encode())
    ctx.run.store.write_json(DATA, data)
    return StageResult(outputs=[PAGE, DATA])
