"""``gpustream usage`` on a broker: its three forms, the times that it takes, and what it says of what it can't know."""

import asyncio
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner, Result

from gpustream.cli import main
from gpustream.embedded import EmbeddedBroker
from gpustream.usage.command import TEXT_WIDTH, parse_time, requested_range
from gpustream.usage.read import Range
from tests.usage_records import START_MS, usage
from topics.usage import HOUR_MS, HOURS, MINUTE_MS, MINUTES, Usage

FROM, TO = "2026-11-20", "2026-11-20T02:00"
LONG = "a-pod-of-a-name-that-is-longer-than-a-line-of-a-terminal-is-wide-0"
MIG: dict[str, Any] = {"gpu_uuid": "GPU-2", "of": 7}
RECORDS = [
    usage("ml", used_us=HOUR_MS * 950, idle_ms=60_000, energy_mj=2_520_000_000, team="vision"),
    usage("ml", start_ms=START_MS + HOUR_MS, device_ms=HOUR_MS // 2, energy_mj=1_000_000),
    usage(start_ms=START_MS + HOUR_MS, device_ms=HOUR_MS // 4),
    usage(start_ms=START_MS + HOUR_MS, device_ms=HOUR_MS // 4, category="unobserved"),
    usage("serving", LONG, **MIG, uuid="MIG-1", slice_ms=3 * HOUR_MS),
    usage(**MIG, slice_ms=4 * HOUR_MS),
    usage("serving", **MIG, start_ms=START_MS + HOUR_MS, slice_ms=7 * HOUR_MS, final=False),
    usage("elsewhen", start_ms=START_MS - HOUR_MS),
    usage("elsewhen", start_ms=START_MS + 2 * HOUR_MS),
]  # fmt: skip

PRICES = """
currency: EUR
prices:
  - {model: "NVIDIA H100*", per_gpu_hour: 3.00}
"""


@pytest.fixture(scope="module")
def kafka() -> Iterator[str]:
    with EmbeddedBroker() as running:
        running.start({HOURS.name: 2, MINUTES.name: 2})
        _write(running.address, RECORDS)
        yield running.address


def _write(kafka: str, records: Sequence[Usage]) -> None:
    async def write() -> None:
        async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
            for record in records:
                topic = HOURS if record.end_ms - record.start_ms == HOUR_MS else MINUTES
                value, key = msgspec.json.encode(record), record.key.encode()
                await producer.send_and_wait(topic.name, value, key=key, partition=0)  # that of their node

    asyncio.run(write())


def _usage(kafka: str, *args: str) -> Result:
    return CliRunner().invoke(main, ["usage", "--kafka", kafka, *args])


def test_as_json_it_is_the_object_of_the_contract(kafka: str) -> None:
    result = _usage(kafka, "--from", FROM, "--to", "2026-11-20T01:00", "--format", "json")
    assert result.exit_code == 0
    row = {"held_ms": HOUR_MS, "used_us": 0, "idle_ms": 0, "energy_mj": 0, "cost": None}
    of_ml = {"by": "ml", "used_us": 950 * HOUR_MS, "idle_ms": 60_000, "energy_mj": 2_520_000_000}
    assert json.loads(result.stdout) == {
        "from_ms": START_MS,
        "to_ms": START_MS + HOUR_MS,
        "rows": [{**row, **of_ml}, {**row, "by": "serving"}],
        "slice_ms": {"held": 4 * HOUR_MS, "free": 4 * HOUR_MS, "unobserved": 0, "lost": 0},
    }


def test_a_time_of_which_nothing_is_known_is_not_taken_for_one_without_use(kafka: str) -> None:
    note = "nothing is known of this time: does `gpustream stream usage` run?"
    assert note in _usage(kafka, "--from", "2026-11-10", "--to", "2026-11-11").stderr
    assert note not in _usage(kafka, "--from", FROM, "--to", TO).stderr


def test_with_prices_costs_are_decimals_and_the_currency_is_named(kafka: str, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    arguments = ("--from", FROM, "--to", TO, "--prices", str(tmp_path / "prices.yaml"))
    report = json.loads(_usage(kafka, *arguments, "--format", "json").stdout)
    assert {row["by"]: row["cost"] for row in report["rows"]} == {"ml": "4.50", "serving": "4.29"}
    assert (report["currency"], report["not_final_ms"]) == ("EUR", [START_MS + HOUR_MS])
    rows = list(csv.DictReader(io.StringIO(_usage(kafka, *arguments, "--format", "csv").stdout)))
    assert [(row["by"], row["category"], row["cost"], row["final"]) for row in rows] == [
        ("ml", "held", "4.50", "true"),
        ("serving", "held", "4.29", "false"),
        ("", "free", "2.46", "true"),
        ("", "unobserved", "0.75", "true"),
        ("", "lost", "0.00", "true"),
    ]
    assert {row["currency"] for row in rows} == {"EUR"}


def test_the_text_closes_and_fits_a_terminal(kafka: str, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    result = _usage(
        kafka, "--from", FROM, "--to", TO, "--by", "pod", "--prices", str(tmp_path / "prices.yaml"), "--format", "text"
    )
    lines = result.stdout.splitlines()
    assert [line for line in lines if len(line) > TEXT_WIDTH] == []
    assert lines[0] == "GPU usage by pod, 2026-11-20 00:00Z to 2026-11-20 02:00Z (UTC)"
    assert [line.split()[0] for line in lines[3:6]] == ["ml/ml-0", "serving/serving-0*", lines[5].split()[0]]
    assert lines[-1] == "2 GPUs x 2.00 hours = 4.00 GPU-hours"
    assert next(line for line in lines if line.startswith("all")).split()[1:] == [
        "4.00", "0.95", "0.02", "100.0%", "0.70", "12.00",
    ]  # fmt: skip
    assert "not final: 1 window from 2026-11-20 01:00Z on may still change; rows that have" in result.stderr


@pytest.mark.parametrize(
    ("form", "shown"),
    [("text", "marked with *"), ("csv", "final is false"), ("json", "not_final_ms has their beginnings")],
)
def test_where_a_form_shows_what_is_not_final_is_said(kafka: str, form: str, shown: str) -> None:
    result = _usage(kafka, "--from", FROM, "--to", TO, "--by", "pod", "--format", form)

    assert [line for line in result.stderr.splitlines() if "not final" in line and shown in line]


def test_a_bill_is_divided_and_what_became_of_its_charges_is_said(kafka: str, tmp_path: Path) -> None:
    (tmp_path / "bill.csv").write_text(
        "ResourceId,ChargePeriodStart,ChargePeriodEnd,BilledCost\n"
        "n1,2026-11-20T00:00:00Z,2026-11-20T01:00:00Z,10.00\n"
        "vol-1,2026-11-20T00:00:00Z,2026-11-20T02:00:00Z,1.00\n"
    )
    out = tmp_path / "out.csv"
    result = _usage(kafka, "--focus-origin", str(tmp_path / "bill.csv"), "--focus", str(out), "--format", "json")
    assert (json.loads(result.stdout)["from_ms"], json.loads(result.stdout)["to_ms"]) == (
        START_MS,
        START_MS + 2 * HOUR_MS,
    )
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [(row["AllocatedResourceName"], row["x_UsageCategory"], row["BilledCost"]) for row in rows] == [
        ("ml", "held", "5.00"), ("serving", "held", "2.14"), ("", "free", "2.86"), ("", "", "1.00"),
    ]  # fmt: skip
    assert f"{out}: 1 charge divided\n1 charge as before: of no node or GPU that has usage" in result.stderr


@pytest.mark.parametrize(("line", "is_said"), [("i-0ab n1", False), ("n1 i-0ab", True)])
def test_a_file_of_nodes_of_which_none_has_usage_is_said(kafka: str, tmp_path: Path, line: str, is_said: bool) -> None:
    bill, nodes = tmp_path / "bill.csv", tmp_path / "nodes"
    bill.write_text(
        "ResourceId,ChargePeriodStart,ChargePeriodEnd,BilledCost\ni-0ab,2026-11-20T00:00Z,2026-11-20T01:00Z,1\n"
    )
    nodes.write_text(f"{line}\n")
    out = ("--focus", str(tmp_path / "out.csv"))
    result = _usage(kafka, "--focus-origin", str(bill), *out, "--focus-nodes", str(nodes))
    assert ("--focus-nodes: no node of it has usage: first in a line is" in result.stderr, result.exit_code) == (
        is_said,
        0,
    )


def test_nodes_of_one_name_that_share_a_charge_are_said(tmp_path: Path) -> None:
    bill = tmp_path / "bill.csv"
    bill.write_text(
        "ResourceId,ChargePeriodStart,ChargePeriodEnd,BilledCost\nn1,2026-11-20T00:00Z,2026-11-20T01:00Z,1\n"
    )
    with EmbeddedBroker() as running:
        running.start({HOURS.name: 2, MINUTES.name: 2})
        _write(running.address, [usage("ml"), usage("other", cluster="c2", gpu_uuid="GPU-2")])
        result = _usage(running.address, "--focus-origin", str(bill), "--focus", str(tmp_path / "out.csv"))
    assert "nodes of one name in several clusters share their charges, such as n1: --focus-nodes" in result.stderr


def test_a_field_with_a_carriage_return_is_one_field_of_the_bill_that_is_written(kafka: str, tmp_path: Path) -> None:
    bill, out = tmp_path / "bill.csv", tmp_path / "out.csv"
    bill.write_text(
        "ResourceId,ChargePeriodStart,ChargePeriodEnd,BilledCost,ChargeDescription\n"
        'n1,2026-11-20T00:00Z,2026-11-20T01:00Z,10.00,"a\r=1"\n',
        newline="",
    )
    _usage(kafka, "--focus-origin", str(bill), "--focus", str(out))
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["AllocatedResourceName"], row["ChargeDescription"]) for row in rows] == [
        ("ml", "a\r=1"), ("serving", "a\r=1"), ("", "a\r=1"),
    ]  # fmt: skip


def test_a_bill_that_can_not_be_divided_leaves_no_file(kafka: str, tmp_path: Path) -> None:
    bill, out = tmp_path / "bill.csv", tmp_path / "out.csv"
    bill.write_text(
        "ResourceId,ChargePeriodStart,ChargePeriodEnd,BilledCost\nn1,2026-11-20T00:00Z,2026-11-20T01:00Z,ten\n"
    )
    result = _usage(kafka, "--focus-origin", str(bill), "--focus", str(out))
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [bill])
    assert "row 1: BilledCost is 'ten'" in result.stderr


def test_a_bill_whose_time_is_not_over_is_one_sentence(kafka: str, tmp_path: Path) -> None:
    bill = tmp_path / "bill.csv"
    bill.write_text(
        "ResourceId,ChargePeriodStart,ChargePeriodEnd,BilledCost\nn1,2126-11-20T00:00Z,2126-11-20T01:00Z,1\n"
    )
    result = _usage(kafka, "--focus-origin", str(bill), "--focus", str(tmp_path / "out.csv"))
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [bill])
    assert "no hour is over" in result.stderr


def test_a_time_that_no_zone_is_given_for_is_said_to_be_utc(kafka: str) -> None:
    assert "UTC" in _usage(kafka, "--from", FROM, "--to", TO).stderr
    assert "UTC" not in _usage(kafka, "--from", "2026-11-20T01:00+01:00", "--to", "2026-11-20T02:00Z").stderr
    assert "UTC" not in _usage(kafka, "--from", "2026-11-20T01:00+01", "--to", "20261120T0000-02").stderr


def test_minutes_are_read_where_a_time_is_no_whole_hour() -> None:
    minutes = [
        usage("ml", start_ms=start_ms, end_ms=start_ms + MINUTE_MS, device_ms=MINUTE_MS)
        for start_ms in range(START_MS, START_MS + HOUR_MS, MINUTE_MS)
    ]
    with EmbeddedBroker() as running:
        running.start({HOURS.name: 1, MINUTES.name: 1})
        _write(running.address, [usage("ml"), *minutes])
        result = _usage(running.address, "--from", FROM, "--to", "2026-11-20T00:15Z", "--format", "json")
    assert json.loads(result.stdout)["rows"][0]["held_ms"] == 15 * MINUTE_MS


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2026-11-20", START_MS),
        ("2026-11-20T00:00Z", START_MS),
        ("2026-11-20 01:00+01:00", START_MS),
        ("20261120T010000+0100", START_MS),
        ("2026-11-20t01:00:00+01:00", START_MS),
        ("2026-11-20t00:00:00z", START_MS),
    ],
)
def test_a_time_is_iso_8601(text: str, ms: int) -> None:
    assert parse_time(text).at_ms(0) == ms


def test_a_time_may_be_so_long_ago() -> None:
    assert parse_time("7d").at_ms(START_MS) == START_MS - 7 * 24 * HOUR_MS
    now_ms = START_MS + 59_999
    assert requested_range(None, None, None, now_ms) == Range(START_MS - 24 * HOUR_MS, START_MS)
    assert requested_range(None, parse_time("2h"), parse_time("1h"), now_ms) == Range(
        START_MS - 2 * HOUR_MS, START_MS - HOUR_MS
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--from", "yesterday"], "is not a time: write 2026-11-01"),
        (["--from", "yesterday", "--to", "2020-01-01"], "is not a time: write 2026-11-01"),
        (["--from", "1h", "--to", "today"], "is not a time: write 2026-11-01"),
        (["--from", "2026-11-01T10:00:30"], "usage is counted by the minute"),
        (["--from", "1969-12-31"], "is before 1970"),
        (["--since", "90s"], "usage is counted by the minute"),
        (["--since", "0"], "usage is counted by the minute"),
        (["--since", "tomorrow"], "is not a duration"),
        (["--since", "1h", "--from", "2026-11-01"], "--since: not together with --from and --to"),
        (["--to", "2026-11-01"], "--to: needs --from"),
        (["--from", "2026-11-02", "--to", "2026-11-01"], "--from: must be before --to"),
        (["--focus", "out.csv"], "--focus-origin and --focus go together"),
        (["--focus-origin", __file__], "--focus-origin and --focus go together"),
        (["--focus-origin", __file__, "--focus", __file__], "--focus: must not be the bill itself"),
        (["--focus-origin", __file__, "--focus", "x" * 300, "--prices", "none"], "--prices"),  # not a traceback
        (["--focus-label", "a"], "--focus-label: needs --focus-origin"),
    ],
)
def test_a_time_that_is_none_is_one_sentence(arguments: list[str], sentence: str) -> None:
    result = _usage("127.0.0.1:1", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "mistakes" not in result.stderr


def test_a_broker_without_usage_is_one_sentence() -> None:
    with EmbeddedBroker() as running:
        running.start({"gpu.samples": 1})
        result = _usage(running.address)
    assert result.exit_code == 1
    assert result.stderr.startswith("there is no topic gpu.usage")


def test_a_model_without_a_price_can_not_steer_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    with EmbeddedBroker() as running:
        running.start({HOURS.name: 2, MINUTES.name: 2})
        _write(running.address, [usage("ml", model="x\x1b]0;t\x07\x9b31m\u202e")])
        result = _usage(running.address, "--from", FROM, "--to", TO, "--prices", str(tmp_path / "prices.yaml"))

    assert "no price for x?]0;t??31m?: 1.00 GPU-hours of it are not in the cost\n" in result.stderr
