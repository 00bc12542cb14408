"""The dashboards and the rules without their servers; tests/real asks Prometheus what their queries give."""

import enum
import functools
import itertools
import re
import tomllib
import types
import typing
from collections import Counter
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from delivery.values import milliseconds
from gpustream import reference
from streams.alerts.xids import XID_KINDS, XIDS
from tests.k8s import dashboard
from tests.k8s.dashboard import DASHBOARDS, K8S
from tests.test_compose import config
from tests.topics.records import own_labels
from topics import catalogue
from topics.alerts import RUNBOOKS
from topics.profiles import PROFILES

WIDTH = 24
GRAFANAS_OWN = {"__rate_interval", "__range"}
PROMETHEUS_OWN = {"up", "ALERTS"}
PANELS = dashboard.panels()
QUERIES = dashboard.queries()
RULES = dashboard.rules()
ALERTS = [rule for rule in RULES if "alert" in rule]
EXPRESSIONS: list[tuple[str, str]] = [
    *((str(query), query.expr) for query in [*QUERIES, *dashboard.label_queries()]),
    *((rule.get("alert") or rule["record"], rule["expr"]) for rule in RULES),
]
"""Every expression, and where it is."""

_NAME = re.compile(r"(?<![:\w])(?:gpu|gpustream)_\w+(?!:)\b")
_TEXT = re.compile(r'"[^"]*"')
_COUNTED = re.compile(r"\b(?:rate|increase)\(\s*((?:gpu|gpustream)_\w+)")
_LABELS = own_labels("otel") | {"gpu_uuid", "gpu_index", "gpu_mig_uuid", "gpu_mig_profile", "gpu_model"}

of_boards = pytest.mark.parametrize("uid", DASHBOARDS)


@functools.cache
def kinds() -> dict[str, str]:
    """Every series that gpustream has by default, its own metrics included, and whether it is a counter or a gauge."""
    kinds_by_name: dict[str, str] = {row.name: row.kind for _, rows in reference.sections() for row in rows}
    for many in PROFILES["otel"].series.values():
        kinds_by_name.update({series.name: series.kind for series in many})
    kinds_by_name.update({ratio.name: "gauge" for ratio in PROFILES["otel"].ratios})
    infos = (
        catalogue.HOLDERS,
        catalogue.POD_INFO,
        catalogue.ALERT_FIRING,
        *catalogue.USAGE.values(),
        *catalogue.FURTHER,
    )
    kinds_by_name.update({info.name: info.kind for info in infos})
    kinds_by_name.update(
        {f"{name}_bucket": "counter" for name, kind in list(kinds_by_name.items()) if kind == "histogram"}
    )
    return kinds_by_name


def squares(panel: dict[str, Any]) -> set[tuple[int, int]]:
    """The places of the grid that a panel takes."""
    position = panel["gridPos"]
    return set(
        itertools.product(
            range(position["x"], position["x"] + position["w"]), range(position["y"], position["y"] + position["h"])
        )
    )


# Grafana's schema


def wrong(value: object, kind: Any, path: str) -> list[str]:
    """Where a value, or what is in it, is not of the type that Grafana's schema gives it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object) or isinstance(kind, typing.TypeVar):
        return []
    if isinstance(value, dict) and hasattr(kind, "from_json"):  # the SDK leaves some objects as they are
        return wrong(kind.from_json(value), kind, path)
    if isinstance(kind, enum.EnumMeta):
        members: Any = kind.__members__.values()
        return [] if value in {member.value for member in members} else [f"{path}: {value!r} is none of {kind}"]
    if origin is typing.Literal:
        return [] if value in arguments else [f"{path}: {value!r}"]
    if origin in (typing.Union, types.UnionType):
        return min((wrong(value, item, path) for item in reversed(arguments)), key=len)
    if origin is list and isinstance(value, list):
        return [error for number, item in enumerate(value) for error in wrong(item, arguments[0], f"{path}[{number}]")]
    if origin is dict and isinstance(value, dict):
        return [error for name, item in value.items() for error in wrong(item, arguments[1], f"{path}.{name}")]
    if not isinstance(value, (int, float) if kind is float else origin or kind):
        return [f"{path}: {value!r} is no {kind}"]
    if not hasattr(value, "to_json"):
        return []
    fields = typing.get_type_hints(type(value))
    return [
        error
        for name, item in vars(value).items()
        if name in fields
        for error in wrong(item, fields[name], f"{path}.{name}")
    ]


def plain(value: Any) -> Any:
    """What the schema's types write, as JSON reads it."""
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def missing(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """What of a document is not in another, which may have more."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            difference
            for name, part in ours.items()
            for difference in missing(part, theirs.get(name), f"{path}.{name}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            difference
            for n, (a, b) in enumerate(zip(ours, theirs, strict=True))
            for difference in missing(a, b, f"{path}[{n}]")
        ]
    return [] if ours == theirs else [f"{path}: {ours!r}"]


@of_boards
def test_it_is_a_dashboard_of_grafanas_schema(uid: str) -> None:
    """The types are Grafana's own: its SDK is generated from the schemas of the dashboard and of each kind of panel."""
    plugins.register_default_plugins()
    read = Dashboard.from_json(DASHBOARDS[uid])
    assert wrong(read, Dashboard, uid) == []
    assert missing(DASHBOARDS[uid], plain(read)) == []


def test_what_is_not_of_the_schema_is_found() -> None:
    plugins.register_default_plugins()
    board = DASHBOARDS["gpu-fleet"]
    tile = board["panels"][0]
    for panel in (
        {**tile, "tittle": "GPUs"},
        {**tile, "options": {**tile["options"], "colour": "value"}},
        {**tile, "fieldConfig": {"defaults": {"units": "short"}, "overrides": []}},
    ):
        changed = {**board, "panels": [panel]}
        assert missing(changed, plain(Dashboard.from_json(changed))) != []
    for panel in ({**tile, "title": 7}, {**tile, "gridPos": {**tile["gridPos"], "w": "4"}}):
        assert wrong(Dashboard.from_json({**board, "panels": [panel]}), Dashboard, "") != []


@of_boards
def test_it_is_one_that_grafana_loads_from_a_file(uid: str) -> None:
    board = DASHBOARDS[uid]
    assert "id" not in board  # an id is of one database
    assert (dashboard.FOLDER / f"{uid}.json").is_file()
    assert board["schemaVersion"] >= 36  # data sources by uid and type
    assert len((dashboard.FOLDER / f"{uid}.json").read_bytes()) < 256 << 10  # what kubectl apply takes as a ConfigMap


# Panels


@of_boards
def test_every_panel_has_a_number_a_title_and_words_of_its_own(uid: str) -> None:
    panels = DASHBOARDS[uid]["panels"]
    assert [title for title, count in Counter(panel["title"] for panel in panels).items() if count > 1] == []
    assert [number for number, count in Counter(panel["id"] for panel in panels).items() if count > 1] == []
    assert [panel["title"] for panel in panels if panel["type"] != "row" and not panel["description"]] == []


@of_boards
def test_no_panel_lies_on_another_or_beyond_the_edge(uid: str) -> None:
    used = Counter(square for panel in DASHBOARDS[uid]["panels"] for square in squares(panel))
    assert [square for square, count in used.items() if count > 1] == []
    assert max(x for x, _ in used) < WIDTH


def test_every_number_has_a_unit_and_thresholds_and_every_line_a_legend() -> None:
    tiles = [panel["fieldConfig"]["defaults"] for _, panel in PANELS if panel["type"] == "stat"]
    assert [tile for tile in tiles if not tile["unit"] or not tile["thresholds"]["steps"]] == []
    lines = [panel for _, panel in PANELS if panel["type"] in {"timeseries", "state-timeline"}]
    assert [panel["title"] for panel in lines if not all(target["legendFormat"] for target in panel["targets"])] == []
    graphs = [panel["fieldConfig"]["defaults"] for panel in lines if panel["type"] == "timeseries"]
    assert [graph for graph in graphs if not graph["unit"]] == []


def test_every_column_of_a_table_has_a_heading() -> None:
    for _, panel in PANELS:
        if panel["type"] == "table":
            (organize,) = [
                transformation["options"]
                for transformation in panel["transformations"]
                if transformation["id"] == "organize"
            ]
            assert len(set(organize["renameByName"].values())) == len(organize["renameByName"])
            grouped = {name for target in panel["targets"] for name in _grouping(target["expr"])}
            assert grouped <= organize["renameByName"].keys(), panel["title"]


def _grouping(expr: str) -> list[str]:
    """The labels of an aggregation that the whole query is."""
    match = re.match(r"(?:round\()?\w+ by \(([^)]*)\)", expr)
    return [name.strip() for name in match[1].split(",")] if match else []


def test_every_query_asks_the_data_source_that_compose_provisions() -> None:
    (provisioned,) = config("grafana-data-sources")["datasources"]
    askers: list[Any] = [target for _, panel in PANELS for target in [panel, *panel["targets"]]]
    for uid in DASHBOARDS:
        variables = dashboard.variables(uid)
        assert variables["datasource"]["query"] == provisioned["type"]
        assert variables["datasource"]["current"]["value"] == provisioned["uid"]
        askers += [variable for variable in variables.values() if variable["type"] == "query"]
    source = {"type": provisioned["type"], "uid": "${datasource}"}
    assert [asker for asker in askers if asker["datasource"] != source] == []


@of_boards
def test_its_queries_have_only_variables_that_there_are(uid: str) -> None:
    known = dashboard.variables(uid).keys() | GRAFANAS_OWN
    queries = [query for query in QUERIES if query.board == uid]
    assert queries
    assert {str(query): unknown for query in queries if (unknown := dashboard.used(query.expr) - known)} == {}


@of_boards
def test_every_variable_is_used(uid: str) -> None:
    expressions = [query.expr for query in [*QUERIES, *dashboard.label_queries()] if query.board == uid]
    used = {name for expr in expressions for name in dashboard.used(expr)}
    assert dashboard.variables(uid).keys() - used == {"datasource"}


def test_all_of_a_variable_matches_what_lacks_the_label_too_but_for_the_cluster() -> None:
    of_all = [
        variable for uid in DASHBOARDS for variable in dashboard.variables(uid).values() if variable.get("includeAll")
    ]
    assert {variable["allValue"] for variable in of_all if variable["name"] != "cluster"} == {".*"}
    assert {variable["allValue"] for variable in of_all if variable["name"] == "cluster"} == {".+"}
    assert {variable["current"]["value"][0] for variable in of_all} == {"$__all"}


def test_links_lead_to_dashboards_that_there_are_and_give_variables_that_these_have() -> None:
    urls = set(re.findall(r"/d/[^\"]+", "".join(path.read_text() for path in dashboard.FOLDER.glob("*.json"))))
    assert len(urls) == 3
    for url in urls:
        uid, linked = re.match(r"/d/([\w-]+)", url), set(re.findall(r"var-(\w+)=|\$\{(\w+):queryparam\}", url))
        assert uid is not None
        assert {name for pair in linked for name in pair if name} <= dashboard.variables(uid[1]).keys()
    assert {tuple(link["tags"]) for board in DASHBOARDS.values() for link in board["links"]} == {("gpustream",)}
    assert {tuple(board["tags"]) for board in DASHBOARDS.values()} == {("gpustream",)}


def test_every_expression_is_of_series_that_gpustream_has() -> None:
    other_names = PROMETHEUS_OWN | {rule["record"] for rule in RULES if "record" in rule}
    for where, expr in EXPRESSIONS:
        named = set(_NAME.findall(_TEXT.sub("", expr))) - _LABELS
        assert named or any(name in expr for name in other_names), where
        assert named - kinds().keys() == set(), where


def test_an_hour_has_no_sample_of_the_hour_before() -> None:
    bars = [query.expr for query in QUERIES if query.board == "gpu-usage" and "$__range" not in query.expr]
    hours = [rule["expr"] for rule in RULES if rule.get("record", "").endswith(":sum1h")]
    windows = {window for expr in [*bars, *hours] for window in re.findall(r"\[(\w+)\]", expr)}
    assert (len(bars), len(hours)) == (4, 12)
    assert [milliseconds(window) for window in windows] == [3_599_000]  # both ends of a range count before Prometheus 3


def test_rates_are_of_counters() -> None:
    rated = [(where, metric) for where, expr in EXPRESSIONS for metric in _COUNTED.findall(expr)]
    assert rated
    assert [(where, metric) for where, metric in rated if kinds()[metric] != "counter"] == []


# Rules


def test_an_xid_of_prometheus_is_as_severe_as_one_of_the_alert_stream() -> None:
    stream = tomllib.loads((K8S.parent / "streams/alerts/rules/defaults.toml").read_text())["rules"]["GPUXid"]
    kinds = {kind: stream.get(f"{kind}_severity", stream["severity"]) for kind in XID_KINDS}
    for rule in [rule for rule in ALERTS if rule["alert"] == "GPUXid"]:
        kind = rule["labels"]["xid_kind"]
        assert rule["labels"]["severity"] == kinds.pop(kind)
        codes = {code for code, xid in XIDS.items() if kind in {xid.kind, "unknown"}}
        assert set(map(int, re.findall(r"\d+", re.findall(r'xid[!=]~"([^"]+)"', rule["expr"])[0]))) == codes
    assert kinds == {}


def test_every_alert_has_a_severity_words_and_a_runbook_with_commands() -> None:
    assert {rule["labels"]["severity"] for rule in ALERTS} == {"critical", "warning", "info"}
    for rule in ALERTS:
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        name = rule["annotations"]["runbook"].removeprefix(f"{RUNBOOKS}/")
        text = (K8S.parent / "docs" / "runbooks" / name).read_text()
        assert text.startswith(f"# {rule['alert']}\n")
        assert "\n## What to do\n" in text
        if rule["alert"].startswith("Gpustream"):
            assert re.search(r"```sh\n.+?```", text, re.DOTALL), rule["alert"]
