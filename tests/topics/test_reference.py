"""The pages that are generated from the tables: fresh, complete, and never written by the check."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from topics import TOPICS, dead_letters, reference
from topics.catalogue import CATALOGUE, FURTHER, HOLDERS, POD_INFO, XIDS
from topics.profiles import PROFILES, ProfileName
from topics.topic import PARTITIONS, REPLICATION_FACTOR, SCHEMA, Topic, load_topics

WHOLE_TEXT = (".", "A-Z a-z 0-9 . _ -")
"""How a sentence that describes a field ends."""


def section(profile: ProfileName) -> str:
    return reference.metrics_markdown().partition(f"### {profile}\n")[2].partition("\n### ")[0]


def test_the_pages_and_schemas_in_the_tree_are_those_of_the_tables() -> None:
    assert reference.stale(reference.files()) == []


def test_the_page_says_how_topics_are_created_and_which_version_their_records_have() -> None:
    page = (reference.DOCS / "topics.md").read_text()

    assert f"with {PARTITIONS} partitions and a replication factor of {REPLICATION_FACTOR} unless" in page
    assert set(re.findall(r"`schema: (\d+)`", page)) == {str(SCHEMA)}


def test_a_page_without_a_place_for_a_table_is_not_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- written: one -->\n\nold\n\n<!-- end -->\n\nby hand\n")

    assert reference.filled(page, {"one": "new"}) == "<!-- written: one -->\n\nnew\n\n<!-- end -->\n\nby hand\n"
    with pytest.raises(ValueError, match=r"it needs them for one, two"):
        reference.filled(page, {"one": "new", "two": "new"})


def test_every_topic_has_a_section_with_its_settings() -> None:
    page = reference.topics_markdown()

    assert [name for name in TOPICS if f"\n## {name}\n" not in page] == []
    assert page.count("`message.timestamp.type` | `LogAppendTime`") == len(TOPICS)


def test_every_key_has_a_row() -> None:
    page = reference.metrics_markdown()

    assert [key for key in CATALOGUE if f"\n| `{key}` |" not in page] == []


RECORDS = [topic for topic in load_topics().values() if topic.record is not None]


def fields(topic: Topic) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a topic's record and of the objects in it, with its schema in the tree."""
    schema = json.loads((reference.SCHEMAS / f"{topic.name}.json").read_text())
    for name, kind in schema["$defs"].items():
        assert kind["description"], name
        yield from ((f"{name}.{key}", field) for key, field in kind.get("properties", {}).items())
        yield from ((f"{name} at {index}", field) for index, field in enumerate(kind.get("prefixItems", ())))


def has_number(schema: Any) -> bool:
    """Whether a value of that schema is a number or holds numbers, other than in an object with fields of its own."""
    if isinstance(schema, list):
        return any(map(has_number, schema))
    if not isinstance(schema, dict):
        return False
    inner = [schema.get(key) for key in ("anyOf", "items", "additionalProperties")]
    numbers = [word for word in schema.get("enum", ()) if isinstance(word, int)]
    return schema.get("type") in ("integer", "number") or bool(numbers) or has_number(inner)


@pytest.mark.parametrize("topic", RECORDS, ids=lambda topic: topic.name)
def test_every_field_has_a_meaning_and_every_number_a_unit_or_none(topic: Topic) -> None:
    documented = dict(fields(topic))

    assert [name for name, field in documented.items() if not field.get("description", "").endswith(WHOLE_TEXT)] == []
    assert [name for name, field in documented.items() if has_number(field) != bool(field.get("x-unit"))] == []


@pytest.mark.parametrize("topic", RECORDS, ids=lambda topic: topic.name)
def test_every_field_has_a_row_in_the_table_of_its_object(topic: Topic) -> None:
    page = reference.topics_markdown()
    for name, field in fields(topic):
        kind, _, key = name.partition(".")
        if key:
            table = page.partition(f"\n### {kind}\n")[2].partition("\n#")[0]
            (row,) = [line for line in table.splitlines() if line.startswith(f"| `{key}` |")]
            linked = re.sub(r"docs/reference/((\w+)\.md)", r"[\2](\1)", field["description"])
            assert linked.replace("|", "\\|") in row
            assert f"| {field.get('x-unit', '')} |" in row
            assert row.endswith("| 0.1.0 |") or "x-since" in field


@pytest.mark.parametrize(
    "row",
    [
        "| `ts_ms` | integer | required | ms since the epoch | When the producer made the tick, by the node's clock. |",
        '| `state` | string: `ok` or `lost` or `timeout` | `"ok"` |  | ok: it answered. ',
        "| `attribution` | string: `exact` or `late` or `none` |  |  | What these holders rest on,",
        "| `devices` | array of [AttributedDevice](#attributeddevice) |  |  | Every GPU and MIG device of the node,",
        "| `starts_at` | string, RFC 3339 | required |  | When it fired, by the time of the tick that made it fire.",
        "| `metrics` | object of number |  | that of the key |",
    ],
)
def test_a_row_of_a_field_has_type_default_unit_and_meaning(row: str) -> None:
    assert row in reference.topics_markdown()


def test_every_header_of_a_dead_letter_has_a_row() -> None:
    headers = dead_letters.letter(None, b"{", dead_letters.Origin("t", 0, 1), stage="s", error="e", at_ms=1).headers
    section = reference.topics_markdown().partition("\n## gpu.dead-letters\n")[2]

    assert [name for name, _ in headers if section.count(f"\n| `{name}` |") != 1] == []
    assert [name for name, _ in headers] == list(dead_letters.HEADERS)


def test_an_object_of_several_topics_is_described_once() -> None:
    page = reference.topics_markdown()

    assert page.count("\n### Alert\n") == 1
    assert page.count("\nThe record is [Usage](#usage).\n") == 2


@pytest.mark.parametrize("profile", PROFILES)
def test_every_series_of_a_profile_has_a_row_in_its_section_and_in_no_other(profile: ProfileName) -> None:
    rows = [line for line in section(profile).splitlines() if line.startswith("| `")]
    series = [s for series_of_key in PROFILES[profile].series.values() for s in series_of_key]

    infos = [HOLDERS, XIDS, *([POD_INFO] if PROFILES[profile].labels.tenants else [])]
    assert len(rows) == len(series) + len(PROFILES[profile].ratios) + len(infos)
    assert all(any(row.startswith(f"| `{info.name}`") for row in rows) for info in infos)
    assert all(any(row.startswith(f"| `{s.name}") for row in rows) for s in series)


def test_series_beside_the_metrics_have_a_section_of_their_own() -> None:
    rows, _, alerts = reference.metrics_markdown().partition("### With all names\n")[2].partition("### Of alerts\n")

    assert rows.count("\n| `gpu_") == len(FURTHER)
    assert [metric.name for metric in FURTHER if rows.count(f"| `{metric.name}") != 1] == []
    assert "| `gpu_xid_errors_total{xid}` | errors | counter |" in rows
    assert "| `gpu_alert_firing{alertname,severity,fingerprint}` |" in alerts


@pytest.mark.parametrize(
    ("profile", "row"),
    [
        ("otel", '| `gpu_clock_frequency{gpu_clock_type="sm"}` | MHz | gauge | `sm_clock_hz` |'),
        ("otel", "| `gpu_memory_used_percent` | 0-100 | gauge | `memory_used_bytes` / `memory_total_bytes` |"),
        (
            "otel",
            '| `gpu_throttle_reason{gpu_throttle_cause="syncboost"}` | 0 or 1 | gauge | `clock_event_reasons` & 0x10 |',
        ),
        ("dcgm", "| `DCGM_FI_DEV_FB_USED` | MiB | gauge | `memory_used_bytes` |"),
        ("dcgm", "| `DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION` | mJ | counter | `energy_joules_total` |"),
        ("dcgm-legacy", "| `dcgm_gpu_utilization` | 0-100 | gauge | `gpu_utilization_ratio` |"),
    ],
)
def test_a_row_has_unit_kind_and_source(profile: ProfileName, row: str) -> None:
    assert row in section(profile)


def test_a_page_is_the_same_each_time_it_is_written() -> None:
    assert reference.files() == reference.files()


def test_files_are_written_if_they_are_missing_or_stale(tmp_path: Path) -> None:
    fresh, old, missing = tmp_path / "fresh", tmp_path / "old", tmp_path / "folder" / "missing"
    fresh.write_text("1")
    old.write_text("0")
    files = {fresh: "1", old: "2", missing: "3"}

    assert reference.stale(files) == [old, missing]
    assert reference.generate(files, "topics.reference", []) == 0
    assert reference.stale(files) == []
    assert [path.read_text() for path in files] == ["1", "2", "3"]


def test_the_check_names_stale_files_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.samples.json"
    files = {path: "new"}

    assert reference.generate(files, "topics.reference", ["--check"]) == 1
    assert capsys.readouterr().err == f"{path} is stale: `make format` writes it\n"
    assert list(tmp_path.iterdir()) == []


def test_the_check_passes_if_nothing_is_stale(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")

    assert reference.generate({tmp_path / "a": "a"}, "topics.reference", ["--check"]) == 0


def test_wrong_arguments_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.generate({}, "topics.reference", ["--fix"]) == 2
    assert "usage: python -m topics.reference [--check]" in capsys.readouterr().err
