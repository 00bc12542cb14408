"""The dashboards and the rules of Prometheus as their tests read them, and the queries as Grafana would send them."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

K8S = Path(__file__).parents[2] / "k8s"
FOLDER = K8S / "components" / "dashboards"
PROMETHEUS = K8S / "prometheus"
DASHBOARDS: dict[str, dict[str, Any]] = {
    board["uid"]: board for board in (json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json")))
}

_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


class Query(NamedTuple):
    """One query of a panel, with the variables in it, and the legend of what it answers."""

    board: str
    panel: str
    ref: str
    expr: str
    legend: str

    def __str__(self) -> str:
        return f"{self.board}/{self.panel}/{self.ref}"


def panels() -> list[tuple[str, dict[str, Any]]]:
    """Every panel with its dashboard's uid, rows left out."""
    return [(uid, panel) for uid, board in DASHBOARDS.items() for panel in board["panels"] if panel["type"] != "row"]


def queries() -> list[Query]:
    """Every query of every panel."""
    return [
        Query(uid, panel["title"], target["refId"], target["expr"], target.get("legendFormat", ""))
        for uid, panel in panels()
        for target in panel["targets"]
    ]


def variables(uid: str) -> dict[str, dict[str, Any]]:
    """A dashboard's variables by name."""
    return {variable["name"]: variable for variable in DASHBOARDS[uid]["templating"]["list"]}


@functools.cache
def rules() -> list[dict[str, Any]]:
    """Every rule of every file for Prometheus."""
    files = [yaml.load(file.read_text(), yaml.CSafeLoader) for file in sorted(PROMETHEUS.glob("*.yml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def label_queries() -> list[Query]:
    """The queries that fill variables, as PromQL that counts by the label."""
    return [
        _label_query(uid, variable["name"], variable["query"]["query"])
        for uid in DASHBOARDS
        for variable in variables(uid).values()
        if variable["type"] == "query"
    ]


def _label_query(uid: str, name: str, query: str) -> Query:
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
    if match is None:
        raise ValueError(f"{name}: not label_values(SELECTOR, LABEL): {query}")
    selector, label = match.groups()
    return Query(uid, f"variable {name}", label, f"count by ({label}) ({selector})", "")


def used(expr: str) -> set[str]:
    """The names of the variables in a query."""
    return set(_VARIABLE.findall(expr))


def filled(expr: str, values: Mapping[str, str]) -> str:
    """The query with its variables replaced; one without a value is a KeyError."""
    return _VARIABLE.sub(lambda match: values[match[1]], expr)
