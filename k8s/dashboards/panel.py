"""Grafana's JSON, as little of it as the dashboards need: panels, variables, links, and a dashboard of them.

In: titles, words and PromQL. Out: dicts of the types of Grafana's own schema. Panels are placed from left to right in
the order in which they are given. A tile and a table ask for one moment, a graph and a timeline for the time shown.
"""

from collections.abc import Iterable, Sequence
from string import ascii_uppercase
from typing import Any, NamedTuple

Json = dict[str, Any]

WIDTH = 24
TAG = "gpustream"
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 41

GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"
PLAIN = ((None, BLUE),)
BAD_ABOVE_ZERO = ((None, GREEN), (1, RED))
LOOK_ABOVE_ZERO = ((None, GREEN), (1, YELLOW))
SHARE_IS_GOOD = ((None, RED), (0.3, YELLOW), (0.6, GREEN))
SHARE_IS_BAD = ((None, GREEN), (0.1, YELLOW), (0.3, RED))
HOT = ((None, GREEN), (80, YELLOW), (88, RED))
FULL = ((None, GREEN), (0.85, YELLOW), (0.95, RED))

Steps = Sequence[tuple[float | None, str]]

HEADINGS = {
    "k8s_cluster_name": "cluster",
    "k8s_node_name": "node",
    "k8s_namespace_name": "namespace",
    "k8s_pod_name": "pod",
    "k8s_workload_kind": "kind",
    "k8s_workload_name": "workload",
    "gpu_index": "index",
    "gpu_uuid": "GPU",
    "gpu_model": "model",
    "gpu_mig_profile": "MIG profile",
    "gpu_mig_uuid": "MIG device",
    "driver_version": "driver",
    "cuda_version": "CUDA",
    "vbios_version": "VBIOS",
    "mig_mode": "MIG mode",
    "processes_visible": "processes visible",
    "xid": "XID",
    "alertname": "alert",
}
"""What a table calls a label, if not by its own name."""

LINKS = {
    "k8s_node_name": (
        "the node",
        "/d/gpu-node?var-cluster=${__data.fields.cluster}&var-node=${__data.fields.node}&${__url_time_range}",
    ),
    "gpu_uuid": (
        "the GPU",
        "/d/gpu-device?${cluster:queryparam}&${node:queryparam}&var-gpu=${__data.fields.GPU}&${__url_time_range}",
    ),
    "k8s_workload_name": (
        "this workload alone",
        "/d/gpu-workload?var-namespace=${__data.fields.namespace}&var-workload=${__data.fields.workload}"
        "&${__url_time_range}",
    ),
}
"""What a click on a label's value opens: its title and URL."""


class Column(NamedTuple):
    """A column of a table: its heading, the query that fills it, and its unit."""

    heading: str
    expr: str
    unit: str = "short"
    steps: Steps = PLAIN


def _thresholds(steps: Steps) -> Json:
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in steps]}


def _target(number: int, expr: str, legend: str = "", **fields: Any) -> Json:
    legend_field = {"legendFormat": legend} if legend else {}
    return {"refId": ascii_uppercase[number], "datasource": DATASOURCE, "expr": expr, **legend_field, **fields}


def _panel(kind: str, title: str, description: str, size: tuple[int, int], **fields: Any) -> Json:
    grid = {"x": 0, "y": 0, "w": size[0], "h": size[1]}
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "gridPos": grid,
        **fields,
    }


def tile(title: str, description: str, expr: str, unit: str = "short", steps: Steps = PLAIN, *, width: int = 4) -> Json:
    """One number, coloured by its thresholds."""
    return _panel(
        "stat",
        title,
        description,
        (width, 4),
        targets=[_target(0, expr, instant=True, range=False)],
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "textMode": "value",
        },
        fieldConfig={"defaults": {"unit": unit, "thresholds": _thresholds(steps)}, "overrides": []},
    )


def graph(
    title: str,
    description: str,
    queries: Iterable[tuple[str, str]],
    unit: str = "short",
    *,
    stacked: bool = False,
    bars: bool = False,
    steps: Steps | None = None,
    width: int = 12,
    **fields: Any,
) -> Json:
    """Lines over time, each query with its legend; thresholds are drawn as lines."""
    custom: Json = {"fillOpacity": 25 if stacked or bars else 6, "lineWidth": 1, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    if bars:
        custom["drawStyle"] = "bars"
    defaults: Json = {"unit": unit, "custom": custom, "color": {"mode": "palette-classic"}}
    if unit == "percentunit":
        defaults |= {"min": 0, "max": 1}
    if steps is not None:
        defaults["thresholds"] = _thresholds(steps)
        custom["thresholdsStyle"] = {"mode": "dashed"}
    return _panel(
        "timeseries",
        title,
        description,
        (width, 8),
        targets=[_target(number, expr, legend) for number, (legend, expr) in enumerate(queries)],
        options={
            "legend": {"displayMode": "table", "placement": "right", "showLegend": True, "calcs": ["lastNotNull"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        fieldConfig={"defaults": defaults, "overrides": []},
        **fields,
    )


def holders(description: str, expr: str, legend: str) -> Json:
    """A row for each series, coloured while it is there: who holds what when."""
    mapping = {"type": "value", "options": {"1": {"text": "held", "color": GREEN, "index": 0}}}
    return _panel(
        "state-timeline",
        "Holders",
        description,
        (WIDTH, 8),
        targets=[_target(0, expr, legend)],
        options={
            "mergeValues": True,
            "showValue": "never",
            "rowHeight": 0.8,
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
            "tooltip": {"mode": "single", "sort": "none"},
        },
        fieldConfig={
            "defaults": {
                "mappings": [mapping],
                "thresholds": _thresholds(PLAIN),
                "custom": {"fillOpacity": 80, "lineWidth": 0},
            },
            "overrides": [],
        },
    )


def table(
    title: str, description: str, labels: str, columns: Sequence[Column], *, opens: str = "", width: int = WIDTH
) -> Json:
    """A row for each set of ``labels``, a column for each query, largest first by the first one.

    A click on the label ``opens`` opens what is in ``LINKS``.
    """
    headings = {label: HEADINGS.get(label, label) for label in labels.split()}
    names = {
        "Value" if len(columns) == 1 else f"Value #{ascii_uppercase[n]}": column for n, column in enumerate(columns)
    }
    overrides = [
        _override(column.heading, unit=column.unit, thresholds=_thresholds(column.steps)) for column in columns
    ]
    if opens:
        link_title, url = LINKS[opens]
        overrides.append(_override(headings[opens], links=[{"title": link_title, "url": url}]))
    return _panel(
        "table",
        title,
        description,
        (width, 9),
        targets=[
            _target(number, column.expr, format="table", instant=True, range=False)
            for number, column in enumerate(columns)
        ],
        options={"showHeader": True, "sortBy": [{"displayName": columns[0].heading, "desc": True}]},
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True},
                    "indexByName": {name: number for number, name in enumerate([*headings, *names])},
                    "renameByName": {**headings, **{name: column.heading for name, column in names.items()}},
                },
            },
        ],
        fieldConfig={"defaults": {"custom": {"filterable": True, "align": "auto"}}, "overrides": overrides},
    )


def _override(heading: str, **properties: Any) -> Json:
    return {
        "matcher": {"id": "byName", "options": heading},
        "properties": [{"id": name, "value": value} for name, value in properties.items()],
    }


def row(title: str) -> Json:
    """A heading above the panels that follow."""
    return {
        "type": "row",
        "title": title,
        "collapsed": False,
        "gridPos": {"x": 0, "y": 0, "w": WIDTH, "h": 1},
        "panels": [],
    }


def choice(name: str, label: str, metric: str, *, single: bool = False) -> Json:
    """A variable that is filled by the values of a label, of which one or several may be chosen; All matches what
    lacks the label, too. But all of ``otel`` has a cluster, and what other profiles write beside it has not."""
    query = f"label_values({metric}, {label})"
    multiple: Json = {
        "multi": True,
        "includeAll": True,
        "allValue": ".+" if name == "cluster" else ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
    return {
        "name": name,
        "label": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,
        "sort": 1,
        **({"multi": False, "includeAll": False} if single else multiple),
    }


def listed(name: str, label: str, values: Sequence[str], chosen: str) -> Json:
    """A variable of fixed values."""
    return {
        "name": name,
        "label": label,
        "type": "custom",
        "query": ",".join(values),
        "options": [{"text": value, "value": value, "selected": value == chosen} for value in values],
        "current": {"text": chosen, "value": chosen},
    }


def typed(name: str, label: str, value: str) -> Json:
    """A variable that the reader types."""
    current = {"text": value, "value": value}
    return {"name": name, "label": label, "type": "textbox", "query": value, "options": [], "current": current}


def dashboard(
    uid: str, title: str, description: str, variables: Sequence[Json], panels: Iterable[Json], since: str = "now-1h"
) -> Json:
    """The dashboard, with links to all others of gpustream that keep the time and the variables."""
    data_source = {
        "name": "datasource",
        "label": "data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": "Prometheus", "value": "prometheus"},
    }
    link = {
        "type": "dashboards",
        "title": "gpustream",
        "tags": [TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "the other dashboards",
        "url": "",
    }
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": since, "to": "now"},
        "links": [link],
        "annotations": {"list": []},
        "templating": {"list": [data_source, *variables]},
        "panels": placed(panels),
    }


def placed(panels: Iterable[Json]) -> list[Json]:
    """The panels with their numbers and places: a line is full when the next one has no room in it."""
    positioned: list[Json] = []
    x = y = height = 0
    for number, panel in enumerate(panels, 1):
        grid = panel["gridPos"]
        if x + grid["w"] > WIDTH or panel["type"] == "row":
            x, y, height = 0, y + height, 0
        positioned.append({"id": number, **panel, "gridPos": {**grid, "x": x, "y": y}})
        x, height = x + grid["w"], max(height, grid["h"])
    return positioned
