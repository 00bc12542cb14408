"""ClickHouse's tables for gpu.usage: what they read is in the schema, and of each key the row that counts is kept."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.docs.page import CONSUMERS, ROOT
from tests.usage_records import START_MS, usage
from topics.usage import HOUR_MS

TABLES = (CONSUMERS / "clickhouse_usage.sql").read_text()
QUERIES = (CONSUMERS / "clickhouse_usage_queries.sql").read_text()


def statements(text: str) -> list[str]:
    bare = "\n".join(line.partition("--")[0] for line in text.splitlines())
    return [statement.strip() for statement in bare.split(";") if statement.strip()]


def test_every_path_that_the_view_reads_is_in_the_schema() -> None:
    schema = json.loads((ROOT / "topics" / "schemas" / "gpu.usage.json").read_text())["$defs"]
    paths = [re.findall(r"'(\w+)'", path) for path in re.findall(r"JSON(?:Extract\w+|Has)\(record, ([^)]*)\)", TABLES)]
    assert len(paths) > 20
    assert [path for path in paths if path[0] not in schema["Usage"]["properties"]] == []
    assert {path[1] for path in paths if len(path) > 1} == set(schema["Workload"]["properties"])


def test_the_sorting_key_is_the_records_key() -> None:
    (order,) = re.findall(r"ORDER BY \((.*?)\)", TABLES)
    assert [name.replace("start", "start_ms") for name in order.split(", ")] == list(usage("ml").key._fields)


def test_of_each_key_the_highest_generation_and_revision_is_kept(tmp_path: Path) -> None:
    session = _clickhouse(tmp_path)
    records = [
        usage("ml", team="vision", revision=2, used_us=HOUR_MS * 500, workload={"kind": "Job", "name": "it's"}),
        usage("ml", team="vision", revision=9, device_ms=HOUR_MS // 2),
        usage("ml", team="vision", revision=1, generation=1, used_us=HOUR_MS * 250),
        usage("ml", team="vision", gpu_uuid="GPU-2", uuid="MIG-1", of=7, slice_ms=2 * HOUR_MS, used_us=HOUR_MS * 1000),
        usage(gpu_uuid="GPU-2", of=7, slice_ms=5 * HOUR_MS),
        usage("ml", gpu_uuid="GPU-3", device_ms=HOUR_MS - 1),
        usage("ml", gpu_uuid="GPU-4", device_ms=1, final=False),
    ]
    lines = [*(msgspec.json.encode(record).decode() for record in (*records, *records)), "not json", "{}"]
    values = ",".join("('" + line.replace("\\", "\\\\").replace("'", "\\'") + "')" for line in lines)
    session.query("INSERT INTO gpu_usage_queue VALUES " + values)  # noqa: S608 - the lines are escaped
    hours, open_ = statements(QUERIES)
    month = re.search(r"start >= .*", hours)
    assert month is not None
    (row, without_team) = _answer(session, hours.replace(month[0], f"start = toDateTime({START_MS // 1000}, 'UTC')"))
    assert (row["team"], without_team["team"]) == ("vision", "")
    assert row["gpu_hours"] == pytest.approx(1 + 2 / 7)
    assert row["used_hours"] == pytest.approx(0.25 + 2 / 7)
    assert [row["gpu_uuid"] for row in _answer(session, open_)] == ["GPU-3"]


def _clickhouse(directory: Path) -> Any:
    """ClickHouse in this process, with the table and the view; what is inserted stands for Kafka's."""
    session = pytest.importorskip("chdb.session", reason="OPTIONAL: ClickHouse in a process, pip install chdb").Session(
        str(directory / "clickhouse")
    )
    queue, *rest = statements(TABLES)
    assert queue.startswith("CREATE TABLE gpu_usage_queue (record String)")
    for statement in (
        "CREATE DATABASE consumers",
        "USE consumers",
        "CREATE TABLE gpu_usage_queue (record String) ENGINE = Null",
        *rest,
    ):
        session.query(statement)
    return session


def _answer(session: Any, query: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in str(session.query(query, "JSONEachRow")).splitlines()]
