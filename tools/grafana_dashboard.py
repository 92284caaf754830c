"""Prints deploy/grafana/draftmill.json from app/metrics.py: `python tools/grafana_dashboard.py > deploy/grafana/...`.

The form is that of the dashboards Ray brings along: a hidden `datasource` variable, filters by Ray session, two panels
a row, so that it stands among them where Grafana reads Ray's folder of dashboards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from app.metrics import METRICS

_UID = "draftmillDashboard"
_WHERE = '{SessionName=~"$SessionName",run=~"$run"}'
_WIDTH, _HEIGHT, _A_ROW = 12, 8, 2
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}  # a plain name is what Grafana read before schema version 33


@dataclass(frozen=True)
class Panel:
    """One graph; `queries` are (what is drawn, legend), in which a key of METRICS stands in angle brackets."""

    title: str
    unit: str  # as Grafana names it
    queries: tuple[tuple[str, str], ...]


PANELS = (
    Panel("Answer tokens per second", "short", (("sum(rate(<answer_tokens>[1m])) by (run)", "{{run}}"),)),
    Panel("Answer tokens per second, by engine", "short", (("rate(<answer_tokens>[1m])", "{{source}}"),)),
    Panel("Rows per second", "short", (("sum(rate(<rows>[1m])) by (run)", "{{run}}"),)),
    Panel(
        "Rows left, parts committed",
        "short",
        (("max(<rows_left>) by (run)", "{{run}}: rows left"), ("sum(<parts>) by (run)", "{{run}}: parts")),
    ),
    Panel("Rejected rows, by reason", "short", (("sum(<rejects>) by (run, reason)", "{{run}}: {{reason}}"),)),
    Panel(
        "Engines, and those ended for want of life",
        "short",
        (("max(<engines>) by (run)", "{{run}}: engines"), ("max(<stalls>) by (run)", "{{run}}: stalls")),
    ),
    Panel(
        "Engine queue",
        "short",
        (("<engine_queue>", "{{source}}: waiting"), ("<engine_running>", "{{source}}: running")),
    ),
    Panel("KV cache in use", "percentunit", (("<kv_use>", "{{source}}"),)),
    Panel("Bytes written per second", "Bps", (("sum(rate(<bytes_written>[5m])) by (run)", "{{run}}"),)),
    Panel("Training steps", "short", (("max(<step>) by (run)", "{{run}}"),)),
    Panel("Training loss", "short", (("max(<loss>) by (run)", "{{run}}"),)),
    Panel(
        "Acceptance length of the validation walk",
        "short",
        (("max(<validation/acceptance_length>) by (run)", "{{run}}"),),
    ),
    Panel("Tokens trained on per second", "short", (("max(<tokens_per_s>) by (run)", "{{run}}"),)),
    Panel("Time that training waits for data", "percentunit", (("max(<data_wait_share>) by (run)", "{{run}}"),)),
)  # fmt: skip


def query(text: str) -> str:
    """A query as Prometheus takes it."""
    for key, metric in METRICS.items():
        text = text.replace(f"<{key}>", metric.exported + _WHERE)
    return text


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    place = {"x": _WIDTH * (number % _A_ROW), "y": _HEIGHT * (number // _A_ROW), "w": _WIDTH, "h": _HEIGHT}
    targets = [
        {"refId": chr(ord("A") + i), "expr": query(text), "legendFormat": legend}
        for i, (text, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number + 1, "type": "timeseries", "title": panel.title, "datasource": _SOURCE, "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []}, "targets": targets,
    }  # fmt: skip


def _variable(label: str) -> dict[str, Any]:
    """A choice among the values of `label` that any of our metrics has."""
    text = f'label_values({{__name__=~"ray_draftmill_.*"}}, {label})'
    return {
        "name": label, "type": "query", "datasource": _SOURCE, "definition": text,
        "query": {"query": text, "refId": "StandardVariableQuery"}, "refresh": 2, "hide": 0, "includeAll": True,
        "multi": False, "allValue": ".*", "sort": 2,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """What Grafana is to read."""
    source = {
        "name": "datasource", "type": "datasource", "query": "prometheus", "refresh": 1, "hide": 2, "includeAll": False,
        "multi": False,
    }  # fmt: skip
    return {
        "title": "draftmill", "uid": _UID, "version": 1, "schemaVersion": 39, "editable": True, "graphTooltip": 1,
        "refresh": "15s", "tags": ["ray", "draftmill"], "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, _variable("SessionName"), _variable("run")]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }  # fmt: skip


def main() -> None:
    print(json.dumps(dashboard(), indent=2))


if __name__ == "__main__":
    main()
