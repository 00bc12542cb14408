"""docs/consumers without a broker: its excerpts, what its programs do with single records, and the SQL's paths."""

import ast
import importlib.util
import json
import re
import sqlite3
import sys
import tomllib
from importlib.metadata import version
from types import ModuleType
from typing import Any

import msgspec
import pytest
from packaging.requirements import Requirement

from tests.docs.page import CONSUMERS, ROOT, blocks
from topics.attributed import TOPIC
from topics.catalogue import CATALOGUE

JsonDict = dict[str, Any]


def load(name: str) -> Any:
    """A program of docs/consumers as a module."""
    spec = importlib.util.spec_from_file_location(name, CONSUMERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpu_hours() -> Any:
    return load("gpu_hours")


@pytest.fixture
async def idle_gpus() -> Any:
    """New for each test, as it has its nodes, and within the test's event loop, as it has a Faust app."""
    return load("idle_gpus")


def held_by(*pods: str, **fields: Any) -> list[JsonDict]:
    return [{"namespace": "ml", "pod": pod, "container": "c", **fields} for pod in pods]


def device(uuid: str = "GPU-1", **fields: Any) -> JsonDict:
    return {"uuid": uuid, "metrics": {"gpu_utilization_ratio": 0.5}, **fields}


def tick(number: int, *devices: JsonDict, **fields: Any) -> bytes:
    """The tick at that second of the node."""
    identity = {"schema": 1, "cluster": "c", "node": "n", "run_id": 1, "seq": number, "ts_ms": number * 1000}
    return json.dumps({**identity, "offset": number, "attribution": "exact", "devices": devices, **fields}).encode()


def counted(gpu_hours: Any, *values: bytes | None) -> dict[tuple[str, str, str], tuple[float, float, float]]:
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.executescript(gpu_hours.SCHEMA)
    gpu_hours.count(database, values)
    rows = database.execute(
        "SELECT namespace, workload, device, held_seconds, measured_seconds, used_seconds FROM usage"
    )
    rows_by_key = {row[:3]: row[3:] for row in rows}
    database.close()
    return rows_by_key


def test_each_excerpt_of_a_program_is_in_its_file() -> None:
    files = {"Python": "gpu_hours.py", "Faust": "idle_gpus.py", "ClickHouse": "clickhouse_queries.sql"}
    excerpts = [b for language in ("python", "sql") for b in blocks("consumers/README.md", language)]
    compared = [block for block in excerpts if not (block.section == "Python" and block.language == "sql")]
    assert len(compared) == 4
    for block in compared:
        assert block.text in (CONSUMERS / files[block.section]).read_text()


def test_each_file_is_linked_from_the_page_and_each_link_leads_somewhere() -> None:
    page = (CONSUMERS / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page) if "://" not in link]
    assert [link for link in links if not (CONSUMERS / link).exists()] == []
    files = {path.name for path in CONSUMERS.iterdir() if path.is_file()} - {"README.md"}
    assert files - set(links) == set()


PROGRAMS = ("gpu_hours", "idle_gpus")
PACKAGE_OF = {"faust": "faust-streaming"}
CODECS = {"cramjam"}
"""What aiokafka unpacks zstd with, if it is there."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_imports_what_it_declares_and_nothing_of_gpustream(program: str) -> None:
    text = (CONSUMERS / f"{program}.py").read_text()
    (block,) = re.findall(r"^# /// script\n(.*?)^# ///$", text, re.MULTILINE | re.DOTALL)
    declared = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [])
        + ([node.module or ""] if isinstance(node, ast.ImportFrom) else [])
    } - sys.stdlib_module_names
    requirements = [Requirement(text) for text in declared["dependencies"]]
    assert {requirement.name for requirement in requirements} - CODECS == {
        PACKAGE_OF.get(name, name) for name in imported
    }
    assert [requirement for requirement in requirements if version(requirement.name) not in requirement.specifier] == []
    assert declared["requires-python"] == ">=3.11"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_fields_that_a_program_reads_are_in_the_schema_and_those_that_it_must_have_are_required(
    program: str, request: pytest.FixtureRequest
) -> None:
    module = request.getfixturevalue(program)
    names = {"Tick": "AttributedSample", "Device": "AttributedDevice"}
    schema = json.loads((ROOT / "topics" / "schemas" / "gpu.attributed.json").read_text())["$defs"]
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    assert len(kinds) > 2
    for kind in kinds:
        definition = schema[names.get(kind.__name__, kind.__name__)]
        fields = msgspec.structs.fields(kind)
        assert {field.name for field in fields} <= definition["properties"].keys()
        assert {field.name for field in fields if field.required} <= set(definition["required"])


def test_a_tick_is_the_time_since_the_last_one_of_its_run(gpu_hours: Any) -> None:
    ticks = [tick(n, device(holders=held_by("a"))) for n in (1, 2, 4)]
    assert counted(gpu_hours, *ticks) == {("ml", "Pod/a", "GPU"): (3.0, 3.0, 1.5)}


def test_neither_a_long_gap_nor_a_new_run_is_anybodys_time(gpu_hours: Any) -> None:
    ticks = [tick(n, device(holders=held_by("a"))) for n in (1, 60)]
    assert counted(gpu_hours, *ticks, tick(61, device(holders=held_by("a")), run_id=2)) == {}


def test_a_node_that_is_read_once_a_minute_is_counted_as_well(gpu_hours: Any) -> None:
    ticks = [tick(60 * n, device(holders=held_by("a")), interval_ms=60_000) for n in (1, 2, 4, 8)]
    assert counted(gpu_hours, *ticks) == {("ml", "Pod/a", "GPU"): (180.0, 180.0, 90.0)}


def test_a_record_that_comes_again_is_not_counted_again(gpu_hours: Any) -> None:
    ticks = [tick(n, device(holders=held_by("a"))) for n in (1, 2, 3)]
    assert counted(gpu_hours, *ticks, *ticks, *ticks[1:]) == counted(gpu_hours, *ticks)
    assert counted(gpu_hours, *ticks)


def test_a_shared_gpu_is_divided_by_pods_and_two_containers_are_one_pod(gpu_hours: Any) -> None:
    holders = held_by("a", "a", "b", workload={"kind": "Job", "name": "j"})
    hours = counted(gpu_hours, tick(1), tick(2, device(holders=holders[1:])))
    assert hours == {("ml", "Job/j", "GPU"): (1.0, 1.0, 0.5)}
    alone = counted(gpu_hours, tick(1), tick(2, device(holders=held_by("a", "a", "b"))))
    assert alone == {("ml", "Pod/a", "GPU"): (0.5, 0.5, 0.25), ("ml", "Pod/b", "GPU"): (0.5, 0.5, 0.25)}


def test_the_parts_that_a_record_gives_say_who_used_a_shared_gpu(gpu_hours: Any) -> None:
    holders = held_by("a", parts={"utilization_ratio": 0.4}) + held_by("b", parts={"utilization_ratio": 0.1})
    hours = counted(gpu_hours, tick(1), tick(2, device(holders=holders)))
    assert hours == {("ml", "Pod/a", "GPU"): (0.5, 0.5, 0.4), ("ml", "Pod/b", "GPU"): (0.5, 0.5, 0.1)}


def test_pods_that_share_a_gpu_have_not_used_more_than_it_did_if_a_part_is_not_known(gpu_hours: Any) -> None:
    holders = held_by("a", parts={"utilization_ratio": 0.5}) + held_by("b")
    hours = counted(gpu_hours, tick(1), tick(2, device(holders=holders)))
    assert hours == {("ml", "Pod/a", "GPU"): (0.5, 0.5, 0.5), ("ml", "Pod/b", "GPU"): (0.5, 0.0, 0.0)}


def test_a_gpu_in_mig_mode_is_not_counted_beside_its_mig_devices(gpu_hours: Any) -> None:
    mig = {"uuid": "MIG-1", "parent_uuid": "GPU-1", "profile": "1g.10gb"}
    parent, part = device(metrics={}), device("MIG-1", mig=mig, metrics={}, holders=held_by("a"))
    assert counted(gpu_hours, tick(1), tick(2, parent, part)) == {("ml", "Pod/a", "1g.10gb"): (1.0, 0.0, 0.0)}


def test_what_nobody_held_is_not_what_is_not_known(gpu_hours: Any) -> None:
    hours = counted(gpu_hours, tick(1), tick(2, device()), tick(3, device(), attribution="none"))
    assert hours.keys() == {("(nobody)", "", "GPU"), ("(unknown)", "", "GPU")}


BROKEN = [None, b"", b"not json", b"\xff", b"{}", b'{"schema": 2}', b"[" * 100_000]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_record_is_skipped_with_a_word_and_the_rest_is_counted(
    gpu_hours: Any, broken: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    ticks = [tick(n, device(holders=held_by("a"))) for n in (1, 2)]
    assert counted(gpu_hours, ticks[0], broken, ticks[1]) == counted(gpu_hours, *ticks)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_the_agent_skips_what_is_no_record_with_a_word(
    idle_gpus: Any, broken: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    idle_gpus.add_record(broken, 0.0)
    idle_gpus.add_record(tick(1, device(holders=held_by("a"))), 1.0)
    assert [node.tick.seq for node in idle_gpus.nodes.values()] == [1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def idle(module: Any, now_s: float) -> list[tuple[str, float]]:
    return [(row["pod"], row["idle_seconds"]) for row in module.rows(now_s)]


def quiet(*pods: str, uuid: str = "GPU-1") -> JsonDict:
    return device(uuid, metrics={"gpu_utilization_ratio": 0.0}, holders=held_by(*pods))


def add_tick(module: Any, value: bytes, now_s: float) -> None:
    module.add_tick(module.decoder.decode(value), now_s)


def test_a_pod_is_idle_after_ten_minutes_of_holding_a_gpu_unused(idle_gpus: Any) -> None:
    for second in (0, 300, 599):
        add_tick(idle_gpus, tick(second, quiet("a")), second)
    assert idle(idle_gpus, 599) == []
    add_tick(idle_gpus, tick(600, quiet("a")), 600)
    assert idle(idle_gpus, 600) == [("a", 600.0)]


@pytest.mark.parametrize(
    "between",
    [device(holders=held_by("a")), quiet("b"), quiet(), device(metrics={}, holders=held_by("a"))],
    ids=["used", "another's", "nobody's", "not known"],
)
def test_idleness_begins_again_after_anything_else(idle_gpus: Any, between: JsonDict) -> None:
    for second, idle_device in ((0, quiet("a")), (300, between), (301, quiet("a")), (900, quiet("a"))):
        add_tick(idle_gpus, tick(second, idle_device), second)
    assert idle(idle_gpus, 900) == []
    add_tick(idle_gpus, tick(901, quiet("a")), 901)
    assert idle(idle_gpus, 901) == [("a", 600.0)]


def test_a_replay_does_not_bring_back_what_was(idle_gpus: Any) -> None:
    for second in (0, 600):
        add_tick(idle_gpus, tick(second, quiet("a")), second)
    add_tick(idle_gpus, tick(601, quiet()), 601)
    add_tick(idle_gpus, tick(600, quiet("a")), 602)
    assert idle(idle_gpus, 602) == []


def test_a_node_that_says_nothing_for_a_minute_is_forgotten(idle_gpus: Any) -> None:
    for second in (0, 600):
        add_tick(idle_gpus, tick(second, quiet("a")), second)
    assert idle(idle_gpus, 660) == [("a", 600.0)]
    assert idle(idle_gpus, 661) == []
    assert idle_gpus.nodes == {}


def test_a_node_that_is_read_every_two_minutes_is_not_forgotten_in_between(idle_gpus: Any) -> None:
    for second in range(0, 601, 120):
        assert idle(idle_gpus, second) == []
        add_tick(idle_gpus, tick(second, quiet("a"), interval_ms=120_000), second)
    assert idle(idle_gpus, 960) == [("a", 600.0)]
    assert idle(idle_gpus, 961) == []


def _paths() -> list[tuple[str, list[str]]]:
    """What the view of clickhouse.sql reads: from the record, a device or a holder, and the path."""
    sql = (CONSUMERS / "clickhouse.sql").read_text()
    calls = re.findall(r"JSON(?:Extract\w*|Has)\((\w+), ([^()]*)(?:\(\w+\)')?\)", sql)
    assert len(calls) == sql.count("JSONExtract") + sql.count("JSONHas")
    return [
        (source, [p for p in re.findall(r"'([^']*)'", path) if not p.startswith("Nullable")]) for source, path in calls
    ]


def _has_field(source: str, path: list[str]) -> bool:
    """Whether the schema of gpu.attributed has such a path."""
    schema = json.loads((ROOT / "topics" / "schemas" / "gpu.attributed.json").read_text())["$defs"]
    name = {"record": "AttributedSample", "device": "AttributedDevice", "holder": "Holder"}[source]
    node = schema[name]
    for step in path:
        node = node.get("properties", {}).get(step) or (node.get("additionalProperties") and {})
        if node is None:
            return False
        choices = [node, *node.get("anyOf", [])]
        node = next((schema[c["$ref"].rpartition("/")[2]] for c in choices if "$ref" in c), node)
        node = next((c for c in choices if "additionalProperties" in c), node)
    return True


def test_every_path_that_the_clickhouse_view_reads_is_in_the_schema() -> None:
    paths = _paths()
    assert len(paths) > 15
    assert [(source, path) for source, path in paths if not _has_field(source, path)] == []
    assert not _has_field("device", ["mig", "parent"])
    assert not _has_field("record", ["timestamp"])


def test_every_metric_that_the_clickhouse_view_reads_is_in_the_catalogue() -> None:
    keys = {path[1] for source, path in _paths() if source == "device" and path[0] == "metrics"}
    assert keys
    assert keys <= CATALOGUE.keys()


def test_the_programs_take_the_example_of_the_topic(gpu_hours: Any, idle_gpus: Any) -> None:
    value = json.dumps(TOPIC.example).encode()
    gpu_hours.decoder.decode(value)
    idle_gpus.add_record(value, 0.0)
    assert len(idle_gpus.nodes) == 1
