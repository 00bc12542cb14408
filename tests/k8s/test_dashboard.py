"""k8s/grafana and k8s/prometheus without their servers; tests/real asks Prometheus what these queries give."""

import functools
import itertools
import re
from collections import Counter
from typing import Any

import pytest

from gpustream import reference
from tests.k8s import dashboard
from tests.k8s.dashboard import DASHBOARD, PANELS, VARIABLES, Query
from tests.test_compose import config
from tests.topics.records import own_labels
from topics import catalogue
from topics.profiles import PROFILES

WIDTH = 24
GRAFANAS_OWN = {"__rate_interval"}
PROMETHEUS_OWN = {"up", "ALERTS"}
RULES = dashboard.rules()
EXPRESSIONS: dict[str, str] = {
    **{str(query): query.expr for query in [*dashboard.queries(), *dashboard.label_queries()]},
    **{rule["alert"]: rule["expr"] for rule in RULES},
}

_NAME = re.compile(r"\b(?:gpu|gpustream)_\w+")
_TEXT = re.compile(r'"[^"]*"')
_COUNTED = re.compile(r"\b(?:rate|increase)\(\s*((?:gpu|gpustream)_\w+)")
_LABELS = own_labels("otel") | {"gpu_uuid", "gpu_index", "gpu_mig_uuid"}


@functools.cache
def kinds() -> dict[str, str]:
    """Every series that gpustream has by default, its own metrics included, and whether it is a counter or a gauge."""
    found: dict[str, str] = {row.name: row.kind for section in reference.sections() for row in section.rows}
    for many in PROFILES["otel"].series.values():
        found.update({series.name: series.kind for series in many})
    found.update({ratio.name: "gauge" for ratio in PROFILES["otel"].ratios})
    found.update({info.name: info.kind for info in catalogue.FURTHER})
    return found


def squares(panel: dict[str, Any]) -> set[tuple[int, int]]:
    """The places of the grid that a panel takes."""
    at = panel["gridPos"]
    return set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))


def test_every_panel_has_a_number_and_a_title_of_its_own() -> None:
    assert [title for title, count in Counter(panel["title"] for panel in PANELS).items() if count > 1] == []
    assert [number for number, count in Counter(panel["id"] for panel in PANELS).items() if count > 1] == []
    assert [panel for panel in PANELS if not panel["title"] or panel["id"] < 1] == []


def test_no_panel_lies_on_another_or_beyond_the_edge() -> None:
    taken = Counter(square for panel in PANELS for square in squares(panel))
    assert [square for square, count in taken.items() if count > 1] == []
    assert max(x for x, _ in taken) < WIDTH


def test_every_panel_says_what_it_shows() -> None:
    assert [panel["title"] for panel in PANELS if panel["type"] != "row" and not panel["description"]] == []


def test_every_query_asks_the_data_source_that_compose_provisions() -> None:
    (provisioned,) = config("grafana-data-sources")["datasources"]
    assert VARIABLES["datasource"]["query"] == provisioned["type"]
    assert VARIABLES["datasource"]["current"]["value"] == provisioned["uid"]
    asked = [panel for panel in PANELS if panel["type"] != "row"]
    asked += [target for panel in asked for target in panel["targets"]]
    asked += [variable for variable in VARIABLES.values() if variable["type"] == "query"]
    assert {tuple(sorted(one["datasource"].items())) for one in asked} == {
        (("type", provisioned["type"]), ("uid", "${datasource}"))
    }


@pytest.mark.parametrize("query", dashboard.queries(), ids=str)
def test_a_query_has_only_variables_that_there_are(query: Query) -> None:
    assert dashboard.variables(query.expr) <= VARIABLES.keys() | GRAFANAS_OWN


def test_every_variable_is_used() -> None:
    used = {name for expr in EXPRESSIONS.values() for name in dashboard.variables(expr)}
    assert VARIABLES.keys() - used == {"datasource"}


def test_all_of_a_variable_matches_what_lacks_the_label_too() -> None:
    filters = [variable for variable in VARIABLES.values() if variable["type"] == "query"]
    assert {variable["allValue"] for variable in filters} == {".*"}
    assert {variable["current"]["value"][0] for variable in filters} == {"$__all"}


def test_a_query_of_gpus_is_filtered_by_cluster_and_node() -> None:
    expressions = [query.expr for query in dashboard.queries()]
    selectors = [found for expr in expressions for found in re.findall(r"\bgpu_\w+(\{.*?\})?", _without_labels(expr))]
    assert len(selectors) > 20
    assert [one for one in selectors if '=~"$cluster"' not in one or '=~"$node"' not in one] == []


@pytest.mark.parametrize("expr", EXPRESSIONS.values(), ids=list(EXPRESSIONS))
def test_an_expression_is_of_series_that_gpustream_has(expr: str) -> None:
    named = set(_NAME.findall(_TEXT.sub("", expr))) - _LABELS
    assert named or any(own in expr for own in PROMETHEUS_OWN)
    assert named - kinds().keys() == set()


@pytest.mark.parametrize("expr", EXPRESSIONS.values(), ids=list(EXPRESSIONS))
def test_rates_are_of_counters(expr: str) -> None:
    assert {metric for metric in _COUNTED.findall(expr) if kinds()[metric] != "counter"} == set()


def test_every_alert_has_a_name_a_severity_and_words() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    assert {rule["labels"]["severity"] for rule in RULES} == {"critical", "warning", "info"}
    assert [rule["alert"] for rule in RULES if rule["annotations"].keys() != {"summary", "description"}] == []


def test_the_dashboard_is_one_that_grafana_loads_from_a_file() -> None:
    assert "id" not in DASHBOARD  # an id is of one database
    assert DASHBOARD["uid"] == "gpu-fleet"
    assert DASHBOARD["schemaVersion"] >= 36  # data sources by uid and type
    assert {panel["type"] for panel in PANELS} <= {"row", "stat", "table", "timeseries"}


def _without_labels(expr: str) -> str:
    """The expression without the label names of groupings and matchings."""
    return re.sub(r"\b(by|ignoring|on) \([^)]*\)", "", expr)
