"""The dashboard and the rules of Prometheus as their tests read them, and the queries as Grafana would send them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

GRAFANA = Path(__file__).parents[2] / "k8s" / "grafana"
PROMETHEUS = Path(__file__).parents[2] / "k8s" / "prometheus"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "gpu-fleet.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
VARIABLES: dict[str, dict[str, Any]] = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}

_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


class Query(NamedTuple):
    """One query of a panel, with the variables in it."""

    panel: str
    ref: str
    expr: str

    def __str__(self) -> str:
        return f"{self.panel}-{self.ref}"


def queries() -> list[Query]:
    """Every query of every panel."""
    targets = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", [])]
    return [Query(title, target["refId"], target["expr"]) for title, target in targets]


def rules() -> list[dict[str, Any]]:
    """Every rule of every file for Prometheus."""
    files = [yaml.safe_load(file.read_text()) for file in sorted(PROMETHEUS.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def label_queries() -> list[Query]:
    """The queries that fill variables, as PromQL that counts by the label."""
    filled_by_query = [variable for variable in VARIABLES.values() if variable["type"] == "query"]
    return [_label_query(variable["name"], variable["query"]["query"]) for variable in filled_by_query]


def _label_query(name: str, query: str) -> Query:
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    if found is None:
        raise ValueError(f"{name}: not label_values(SELECTOR, LABEL): {query}")
    selector, label = found.groups()
    return Query(name, label, f"count by ({label}) ({selector})")


def variables(expr: str) -> set[str]:
    """The names of the variables in a query."""
    return set(_VARIABLE.findall(expr))


def filled(expr: str, values: Mapping[str, str]) -> str:
    """The query with its variables replaced; one without a value is a KeyError."""
    return _VARIABLE.sub(lambda found: values[found[1]], expr)
