"""The dashboard file as Grafana's own model reads it, and beside the dashboards that Ray brings along.

Grafana itself comes with no Python package: that it draws the panels was never seen. What is proved is that its
published model knows every field but one, that the file has the form of Ray's, and (`test_watching.py`) that Ray
exports every metric and label in its queries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard, VariableHide, VariableRefresh, VariableSort, VariableType
from ray.dashboard.modules.metrics import grafana_dashboard_factory as of_ray

from tests.runs import ROOT

FILE = ROOT / "deploy" / "grafana" / "draftmill.json"
RAYS = {
    "default": of_ray.generate_default_grafana_dashboard,
    "data": of_ray.generate_data_grafana_dashboard,
    "train": of_ray.generate_train_grafana_dashboard,
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# What Grafana writes beside a variable's query, and its model does not list.
UNLISTED = {f".templating.list[{n}].definition" for n in (1, 2)}

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # Ray's, of its own templates


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    register_default_plugins()  # the model of Prometheus' queries


@pytest.fixture
def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def rays(name: str) -> dict[str, Any]:
    """A dashboard that Ray makes."""
    found: dict[str, Any] = json.loads(RAYS[name]()[0])
    return found


def lost(ours: Any, read: Any, at: str = "") -> Iterator[str]:
    """Places of `ours` that `read` lacks or has otherwise."""
    if isinstance(ours, dict):
        for key, value in ours.items():
            if not isinstance(read, dict) or key not in read:
                yield f"{at}.{key}"
            else:
                yield from lost(value, read[key], f"{at}.{key}")
    elif isinstance(ours, list):
        if not isinstance(read, list) or len(ours) != len(read):
            yield at
            return
        for number, (a, b) in enumerate(zip(ours, read, strict=True)):
            yield from lost(a, b, f"{at}[{number}]")
    elif ours != read:
        yield at


def unread(board: dict[str, Any]) -> set[str]:
    """Places that Grafana's model drops or changes when it reads and writes the dashboard."""
    return set(lost(board, json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))))


def test_grafanas_model_knows_every_field(board: dict[str, Any]) -> None:
    assert unread(board) == UNLISTED
    panel, variable = board["panels"][0], board["templating"]["list"][1]
    panel["tittle"] = panel["targets"][0]["exprs"] = panel["fieldConfig"]["defaults"]["units"] = "x"
    variable["sorted"] = 2
    assert unread(board) - UNLISTED == {
        ".panels[0].tittle", ".panels[0].targets[0].exprs", ".panels[0].fieldConfig.defaults.units",
        ".templating.list[1].sorted",
    }  # fmt: skip
    assert variable["definition"] == variable["query"]["query"]


def test_data_sources_are_references(board: dict[str, Any]) -> None:
    """A name in their place is mended only in files of schema version 32 and below, as Ray's are."""
    assert board["schemaVersion"] > 32 >= max(rays(name)["schemaVersion"] for name in RAYS)
    first, *others = board["templating"]["list"]
    assert (first["name"], first["type"]) == ("datasource", "datasource") and "datasource" not in first
    assert all(x["datasource"] == SOURCE for x in (*others, *board["panels"]))
    with pytest.raises(AttributeError):
        Dashboard.from_json({**board, "panels": [{**board["panels"][0], "datasource": "${datasource}"}]})


def test_values_are_of_grafanas_sets(board: dict[str, Any]) -> None:
    for variable in board["templating"]["list"]:
        VariableType(variable["type"])
        VariableRefresh(variable["refresh"])
        VariableHide(variable["hide"])
        VariableSort(variable.get("sort", 0))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) and {panel["type"] for panel in board["panels"]} == {"timeseries"}
    for panel in board["panels"]:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters))


@pytest.mark.parametrize("name", RAYS)
def test_it_stands_beside_rays(board: dict[str, Any], name: str) -> None:
    """In one folder of dashboards: names of its own, the same hidden data source and session filter, the same grid."""
    other = rays(name)
    assert board["uid"] != other["uid"] and board["title"] != other["title"]
    ours, theirs = ({v["name"]: v for v in b["templating"]["list"]} for b in (board, other))
    for variable, same in (
        ("datasource", ("type", "query", "hide", "refresh", "multi", "includeAll")),
        ("SessionName", ("type", "hide", "includeAll", "multi", "sort")),
    ):
        assert {k: ours[variable][k] for k in same} == {k: theirs[variable][k] for k in same}
    assert ours["SessionName"]["query"].keys() == theirs["SessionName"]["query"].keys()
    width, height = of_ray.PANEL_WIDTH, of_ray.PANEL_HEIGHT
    taken = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert taken == [(width * (n % 2), height * (n // 2)) for n in range(len(taken))]
    assert {(p["gridPos"]["w"], p["gridPos"]["h"]) for p in board["panels"]} == {(width, height)}
    assert "rayMeta" not in board  # for pages of Ray's that embed a dashboard by its uid, which ours is none of
