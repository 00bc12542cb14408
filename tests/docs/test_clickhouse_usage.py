"""ClickHouse's tables for gpu.usage: what they read is in the schema, and of each key the row that counts is kept."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from tests.docs.clickhouse import ClickHouse, statements
from tests.docs.page import CONSUMERS, ROOT
from tests.usage_records import START_MS, usage
from topics.usage import HOUR_MS

TABLES = (CONSUMERS / "clickhouse_usage.sql").read_text()
QUERIES = (CONSUMERS / "clickhouse_usage_queries.sql").read_text()


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
    clickhouse = ClickHouse(tmp_path, TABLES)
    records = [
        usage("ml", team="vision", revision=2, used_us=HOUR_MS * 500, workload={"kind": "Job", "name": "it's"}),
        usage("ml", team="vision", revision=9, device_ms=HOUR_MS // 2),
        usage("ml", team="vision", revision=1, generation=1, used_us=HOUR_MS * 250),
        usage("ml", team="vision", gpu_uuid="GPU-2", uuid="MIG-1", of=7, slice_ms=2 * HOUR_MS, used_us=HOUR_MS * 1000),
        usage(gpu_uuid="GPU-2", of=7, slice_ms=5 * HOUR_MS),
        usage("ml", gpu_uuid="GPU-3", device_ms=HOUR_MS - 1),
        usage("ml", gpu_uuid="GPU-4", device_ms=1, final=False),
        usage("ml", gpu_uuid="GPU-1", pod="guest", team="vision", policy="equal", device_ms=0, used_us=HOUR_MS * 100),
    ]
    lines = [*(msgspec.json.encode(record).decode() for record in (*records, *records)), "not json", "{}"]
    clickhouse.insert(lines)
    hours, open_ = statements(QUERIES)
    month = re.search(r"start >= .*", hours)
    assert month is not None
    (row, without_team) = clickhouse.answer(hours.replace(month[0], f"start = toDateTime({START_MS // 1000}, 'UTC')"))
    assert (row["team"], without_team["team"]) == ("vision", "")
    assert row["gpu_hours"] == pytest.approx(1 + 2 / 7)
    assert row["used_hours"] == pytest.approx(0.25 + 2 / 7 + 0.1)
    assert [row["gpu_uuid"] for row in clickhouse.answer(open_)] == ["GPU-3"]
