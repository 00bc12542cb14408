"""``gpustream rules``: a file's errors, and what it would have made of recorded ticks."""

import asyncio
import codecs
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner, Result

from gpustream import rules as rules_module
from gpustream.cli import main
from gpustream.embedded import EmbeddedBroker
from streams.alerts.rules import rules_file
from streams.alerts.tick import Tick
from tests.streams.alerts.ticks import DEFAULTS, START_MS, device, holder, tick

RULES = """
[rules.GPUHeldIdle]
for = "60s"
grace = "10s"
keep_firing_for = "0s"

[[rules.GPUHeldIdle.overrides]]
namespace = "other"
enabled = false
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


def story() -> list[Tick]:
    """A pod that is idle for two minutes and works then, another that is not watched, and a node that goes silent."""
    ticks = [
        tick(i, device(0, holder(), busy=0.0 if i < 120 else 0.9), device(1, holder("b", namespace="other"), busy=0.0))
        for i in range(140)
    ]
    return [*ticks, *[tick(i, device(0, busy=0.0), node="m") for i in range(400)]]


def encoded(ticks: Iterable[Tick]) -> list[bytes]:
    return [msgspec.json.encode(record) for record in ticks]


def rules(*args: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["rules", *args], input=stdin)


def fields(result: Result) -> list[dict[str, str]]:
    head, *lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert tuple(head) == rules_module.COLUMNS
    return [dict(zip(head, line, strict=True)) for line in lines]


EXPECTED = [
    {
        "fired": "2026-11-21 00:00:22Z",
        "resolved": "2026-11-21 00:01:12Z",
        "for": "50s",
        "severity": "warning",
        "alert": "GPUHeldIdle",
        "where": "c/n GPU 0",
        "who": "ml/bert-0 (Job/bert)",
        "why it ended": "condition",
        "summary": "Job ml/bert: 1 of 1 GPU idle (since 2026-11-20 23:59 UTC)",
    },
    {
        "fired": "2026-11-21 00:03:31Z",
        "resolved": "-",
        "for": "-",
        "severity": "critical",
        "alert": "NodeSilent",
        "where": "c/n",
        "who": "",
        "why it ended": "-",
        "summary": "n has sent nothing since 2026-11-21 00:01 UTC",
    },
]


def test_a_new_rule_without_a_runbook_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(
        '[rules.Mine]\nkind = "held_idle"\n[rules.Ours]\nkind = "xid"\nannotations = { runbook = "https://a/b" }'
    )
    result = rules("check", str(file))
    hints = [line for line in result.stdout.splitlines() if "hint:" in line]
    assert result.exit_code == 0
    assert [hint.partition(": give")[0] for hint in hints] == [
        f"{file}: hint: rules.Mine has no runbook, and links that of GPUHeldIdle"
    ]


def test_a_file_without_errors_is_said_to_be_one(file: Path) -> None:
    result = rules("check", str(file))
    assert (result.exit_code, result.stdout) == (0, f"{file}: no mistakes; {len(DEFAULTS.rules)} rules in force\n")


def test_every_rule_is_shown_as_it_is_by_a_file_or_by_default(file: Path) -> None:
    by_default, by_file = rules("show"), rules("show", str(file))
    printed = [line.split("\t") for line in by_default.stdout.splitlines()]
    assert {row[0] for row in printed} >= set(rules_file.defaults())
    held_idle = next(line for line in by_default.stdout.splitlines() if line.startswith("GPUHeldIdle\t"))
    assert "\theld_idle\tyes\twarning\t15m\t5m\tgrace 5m, " in held_idle
    assert held_idle not in by_file.stdout
    file.write_text("[rules.GPUHeldIdle]\nfor = 'soon'\n")
    wrong = rules("show", str(file))
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "rules.GPUHeldIdle.for" in wrong.stderr


def test_every_error_is_named_with_its_line(file: Path) -> None:
    file.write_text(RULES + "\n[rules.GPUXid]\nfor = 'x'\nidle_below = 1\n")
    result = rules("check", str(file))
    assert (result.exit_code, result.stdout) == (1, "")
    assert [line.partition(": ")[0] for line in result.stderr.splitlines()] == [
        f"{file}:12",
        f"{file}:13",
        "2 mistakes",
    ]


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    result = rules("check", str(tmp_path / "none.toml"))
    assert (result.exit_code, result.stderr) == (1, f"{tmp_path / 'none.toml'}: No such file or directory\n")


def test_recorded_lines_show_what_would_have_fired_and_when(file: Path, tmp_path: Path) -> None:
    lines = tmp_path / "ticks.jsonl"
    lines.write_bytes(b"\n".join(encoded(story())))
    result = rules("test", str(file), "--input", str(lines))
    assert fields(result) == EXPECTED
    assert result.stderr == "540 ticks of 2 nodes: 2 alerts would have fired\n"
    assert result.exit_code == 0


def test_without_a_file_the_defaults_judge(tmp_path: Path) -> None:
    lines = tmp_path / "ticks.jsonl"
    lines.write_bytes(b"\n".join(encoded(story())))
    result = rules("test", "--input", str(lines))
    assert [row["alert"] for row in fields(result)] == ["NodeSilent"]


def test_standard_input_gives_the_transitions_as_the_stream_writes_them(file: Path) -> None:
    result = rules("test", str(file), "--input", "-", "--format", "json", stdin=b"\n".join(encoded(story())))
    alerts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(alert["name"], alert["state"]) for alert in alerts] == [
        ("GPUHeldIdle", "firing"),
        ("GPUHeldIdle", "resolved"),
        ("NodeSilent", "firing"),
    ]
    assert alerts[0]["fingerprint"] == alerts[1]["fingerprint"]


def test_a_silent_node_that_returns_is_resolved_by_its_tick(file: Path) -> None:
    ticks = [tick(0, device(0)), tick(300, device(0))]
    (row,) = fields(rules("test", str(file), "--input", "-", stdin=b"\n".join(encoded(ticks))))
    assert (row["alert"], row["for"], row["why it ended"]) == ("NodeSilent", "3m 0s", "ticks")


def test_lines_that_are_no_ticks_are_named_and_left_out(file: Path) -> None:
    good = encoded(story())
    lines = [*good[:70], b"{", b"", b'{"schema": 2}', b"\xff", *good[70:140]]
    result = rules("test", str(file), "--input", "-", stdin=b"\n".join(lines))
    assert [row["alert"] for row in fields(result)] == ["GPUHeldIdle"]
    named = [line.partition(": ")[0] for line in result.stderr.splitlines()]
    assert named[:3] == [f"standard input:{number}" for number in (71, 73, 74)]
    assert "3 were none" in result.stderr
    assert result.exit_code == 1


def test_a_tick_past_the_year_9999_is_named_and_left_out(file: Path) -> None:
    good = encoded(story())
    in_nanoseconds = encoded([msgspec.structs.replace(tick(70, device(0)), ts_ms=START_MS * 1_000_000)])
    result = rules("test", str(file), "--input", "-", stdin=b"\n".join([*good[:70], *in_nanoseconds, *good[70:140]]))
    assert [row["alert"] for row in fields(result)] == ["GPUHeldIdle"]
    assert "standard input:71: not a record of gpu.attributed: ts_ms is" in result.stderr


def test_of_many_lines_that_are_no_ticks_the_first_are_named(file: Path) -> None:
    result = rules("test", str(file), "--input", "-", stdin=b"x\n" * 1000)
    assert len(result.stderr.splitlines()) == 21
    assert "0 ticks of 0 nodes, 1000 were none: 0 alerts" in result.stderr


def test_a_byte_order_mark_before_the_ticks_is_no_part_of_the_first(file: Path) -> None:
    result = rules("test", str(file), "--input", "-", stdin=codecs.BOM_UTF8 + b"\r\n".join(encoded(story())))

    assert result.exit_code == 0
    assert result.stderr.startswith("540 ticks of 2 nodes: ")


def test_ticks_that_are_there_twice_count_once(file: Path) -> None:
    good = encoded(story()[:140])
    result = rules("test", str(file), "--input", "-", stdin=b"\n".join([*good[:100], *good[50:], *good]))
    assert [row["alert"] for row in fields(result)] == ["GPUHeldIdle"]
    assert "140 ticks of 1 node, 190 more were there twice" in result.stderr


def test_errors_of_the_file_come_before_ticks_are_read(file: Path, tmp_path: Path) -> None:
    file.write_text("[rules.X]")
    result = rules("test", str(file), "--input", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "rules.X" in result.stderr
    assert "none" not in result.stderr


def test_input_that_can_not_be_read_is_a_sentence(file: Path, tmp_path: Path) -> None:
    result = rules("test", str(file), "--input", str(tmp_path / "none"))
    assert (result.exit_code, result.stderr) == (1, f"{tmp_path / 'none'}: No such file or directory\n")


@pytest.mark.parametrize("args", [(), ("--kafka", "127.0.0.1:1", "--input", "-")])
def test_ticks_come_from_one_place(file: Path, args: Sequence[str]) -> None:
    result = rules("test", str(file), *args)
    assert result.exit_code == 2
    assert "either '--kafka' or '--input'" in result.stderr


def test_a_file_of_ticks_goes_before_the_kafka_of_the_environment(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSTREAM_KAFKA", "127.0.0.1:1")
    (tmp_path / "none.jsonl").write_bytes(b"")
    result = rules("test", str(file), "--input", str(tmp_path / "none.jsonl"))
    assert (result.exit_code, result.stderr) == (0, "0 ticks of 0 nodes: 0 alerts would have fired\n")


@pytest.fixture(scope="module")
def kafka() -> Iterator[str]:
    """A broker with the story, logged as it happened and until now, and with a record that is no tick."""
    with EmbeddedBroker() as running:
        running.start({"gpu.attributed": 2})
        asyncio.run(_write(running.address))
        yield running.address


async def _write(kafka: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
        ended_ms = time.time_ns() // 1_000_000 - tick(400).ts_ms
        for record in story():
            value, partition = msgspec.json.encode(record), int(record.node == "m")
            await producer.send("gpu.attributed", value, partition=partition, timestamp_ms=record.ts_ms + ended_ms)
        await producer.send_and_wait("gpu.attributed", b"{", partition=0)


def test_what_kafka_has_shows_what_would_have_fired(file: Path, kafka: str) -> None:
    result = rules("test", str(file), "--kafka", kafka, "--from", "24h")
    assert fields(result) == EXPECTED
    assert "gpu.attributed[0]@140: not a record of gpu.attributed" in result.stderr
    assert "540 ticks of 2 nodes, 1 were none" in result.stderr
    assert result.exit_code == 1


def test_what_was_logged_before_is_not_read(file: Path, kafka: str) -> None:
    result = rules("test", str(file), "--kafka", kafka, "--from", "0")
    assert "0 ticks of 0 nodes" in result.stderr
    assert result.exit_code == 0


def test_nothing_is_judged_from_latest_on(file: Path, kafka: str) -> None:
    result = rules("test", str(file), "--kafka", kafka, "--from", "latest")
    assert (result.exit_code, "there is nothing to judge" in result.stderr) == (2, True)


def test_a_broker_that_is_not_there_is_a_sentence(file: Path) -> None:
    result = rules("test", str(file), "--kafka", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.stderr


def test_the_story_begins_at_a_time_that_is_known() -> None:
    assert START_MS == 1_795_219_152_000
