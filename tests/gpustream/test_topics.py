"""``topics create`` and ``topics list`` against brokers that are there, and one that is not."""

from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from delivery import topic_admin
from delivery.kafka_admin import TopicDescription
from gpustream import topics as topics_module
from gpustream.cli import main
from gpustream.embedded import PARTITIONS, EmbeddedBroker
from topics import TOPICS
from topics.topic import load_topics

NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def embedded() -> Iterator[str]:
    """A broker with every topic."""
    with EmbeddedBroker() as running:
        running.start(dict.fromkeys(TOPICS, PARTITIONS))
        yield running.address


def _topics(*args: str) -> Result:
    return CliRunner().invoke(main, ["topics", *args])


def test_a_row_says_what_is_missing_or_wrong() -> None:
    topics = list(load_topics().values())
    descriptions = {topic.name: TopicDescription(4) for topic in topics if topic.name != "gpu.alerts"} | {
        "gpu.workloads": TopicDescription(8)
    }
    table = {
        row.topic: row for row in topics_module.rows(topics, descriptions, topic_admin.mismatches(topics, descriptions))
    }

    assert table["gpu.samples"].verdict == "yes"
    assert table["gpu.alerts"].verdict == "missing"
    assert table["gpu.alerts"].partitions == "-"
    assert table["gpu.workloads"].verdict == "its number of partitions is 8, must be 4, as gpu.samples has"


@pytest.mark.parametrize(
    ("retention_ms", "shown"), [("604800000", "168 h"), ("-1", "for ever"), ("600000", "10m"), (None, "24 h")]
)
def test_a_row_says_how_long_the_broker_keeps_records(retention_ms: str | None, shown: str) -> None:
    topic = load_topics()["gpu.samples"]
    settings = topic.settings() | {"retention.ms": retention_ms} if retention_ms is not None else None

    (row,) = topics_module.rows([topic], {topic.name: TopicDescription(4, settings)}, [])
    assert row.retention == shown


def test_a_piped_list_is_tab_separated_and_0_where_all_is_well(embedded: str) -> None:
    result = _topics("list", "--kafka", embedded)

    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert lines[1] == ["gpu.samples", "cluster/node", "4", "delete", "24 h", "yes"]
    assert len(lines) == 1 + len(load_topics())
    assert "settings were not compared" in result.stderr


@pytest.mark.parametrize("option", ["--partitions", "--replication-factor"])
def test_a_number_that_no_request_can_hold_is_an_error_of_the_command_line(option: str) -> None:
    result = CliRunner().invoke(main, ["topics", "create", "--kafka", "127.0.0.1:1", option, str(2**31)])
    assert (result.exit_code, f"Invalid value for '{option}'" in result.stderr) == (2, True)


def test_topics_cannot_be_created_on_a_broker_without_settings(embedded: str) -> None:
    result = _topics("create", "--kafka", embedded, "--partitions", "4")

    assert result.exit_code == 1
    assert "can't be created" in result.stderr


@pytest.mark.parametrize("command", ["list", "create"])
def test_a_broker_that_is_not_there_is_one_sentence(command: str) -> None:
    result = _topics(command, "--kafka", NOWHERE)

    assert result.exit_code == 1
    assert NOWHERE in result.stderr
    assert "Traceback" not in result.stderr
