"""``gpustream report`` on a broker: it says what ``gpustream usage`` says, what fired, and what it can't know."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner, Result

from delivery.ledger import Partition
from gpustream.cli import main
from gpustream.embedded import EmbeddedBroker
from gpustream.history import History, Span
from gpustream.report import forms
from gpustream.report.command import previous_range
from gpustream.report.forms import WIDTH
from gpustream.report.summary import Summary
from gpustream.usage.read import Range
from tests.eventually import LIMIT_S
from tests.usage_records import START_MS, usage
from topics import alerts
from topics.alerts import Alert
from topics.times import time_of
from topics.usage import HOUR_MS, HOURS, MINUTES, Usage

TIME = ("--from", "2026-11-20", "--to", "2026-11-20T04:00Z")
HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m&\"'https://evil.example"
JOB = {"kind": "Job", "name": "train"}
RECORDS = [
    usage("ml", used_us=HOUR_MS * 950, idle_ms=60_000, energy_mj=2_520_000_000, team="vision", workload=JOB),
    usage("ml", "ml-1", start_ms=START_MS + HOUR_MS, device_ms=HOUR_MS // 2, team="vision", workload=JOB),
    usage(start_ms=START_MS + HOUR_MS, device_ms=HOUR_MS // 4),
    usage(start_ms=START_MS + HOUR_MS, device_ms=HOUR_MS // 4, category="unobserved"),
    usage("serving", start_ms=START_MS + 2 * HOUR_MS, idle_ms=HOUR_MS, team=HOSTILE, workload={**JOB, "name": HOSTILE}),
    usage("serving", start_ms=START_MS + 3 * HOUR_MS, idle_ms=HOUR_MS // 2, of=7, gpu_uuid="GPU-2", final=False),
    usage("ml", start_ms=START_MS - HOUR_MS, team="vision", workload=JOB),
    usage("ml", start_ms=START_MS + 4 * HOUR_MS, team="later"),
]  # fmt: skip
PRICES = 'currency: EUR\nprices:\n  - {model: "NVIDIA H100*", per_gpu_hour: 3.00}\n'


def _alert(number: int, from_h: float, to_h: float | None = None, **more: Any) -> Alert:
    ends = None if to_h is None else time_of(START_MS + round(to_h * HOUR_MS))
    fields = {"name": "GPUHeldIdle", "labels": {"team": "vision"}, "cluster": "c1", "node": "n1", **more}
    fields |= {"fingerprint": f"{number:016x}", "severity": "warning", "schema": 1, "ends_at": ends}
    starts = time_of(START_MS + round(from_h * HOUR_MS))
    return Alert(starts_at=starts, state="firing" if ends is None else "resolved", **fields)


ALERTS = [
    _alert(1, -3, -2),  # over before
    _alert(2, -1),
    _alert(2, -1, 1),  # began before, an hour of it counts
    _alert(2, 2),
    _alert(2, 2, revision=1),  # an update is no other firing
    _alert(3, 3),  # its end is not in the log any more: it fires again
    _alert(3, 3.5, 3.75),
    _alert(4, 1, 5),  # ends after the time
    _alert(5, 3, name="GPULost", labels={}),
    _alert(6, 4.5),
]


@pytest.fixture(scope="module")
def kafka() -> Iterator[str]:
    with EmbeddedBroker() as running:
        running.start({HOURS.name: 2, MINUTES.name: 2, alerts.TOPIC.name: 1})
        written: list[tuple[str, bytes, Usage | Alert]] = [
            (HOURS.name, record.key.encode(), record) for record in RECORDS
        ]
        written += [(alerts.TOPIC.name, record.fingerprint.encode(), record) for record in ALERTS]

        async def write() -> None:
            async with AIOKafkaProducer(bootstrap_servers=running.address) as producer:
                for topic, key, record in written:
                    await producer.send_and_wait(topic, msgspec.json.encode(record), key=key, partition=0)

        asyncio.run(write())
        yield running.address


@pytest.fixture
def prices(tmp_path: Path) -> str:
    (tmp_path / "prices.yaml").write_text(PRICES)
    return str(tmp_path / "prices.yaml")


def _run(command: str, kafka: str, *args: str) -> Result:
    return CliRunner().invoke(main, [command, "--kafka", kafka, *args])


def _section(text: str, title: str) -> list[list[str]]:
    """The lines of a table, in fields."""
    lines = text.split(f"\n{title}\n\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return [re.split(r"  +", line.strip()) for line in lines]


@pytest.mark.parametrize(("by", "title"), [("team", "By team"), ("workload", "By workload")])
def test_the_sums_are_those_of_usage_to_the_integer(kafka: str, prices: str, by: str, title: str) -> None:
    args = (*TIME, "--prices", prices)
    expected = json.loads(_run("usage", kafka, *args, "--by", by, "--format", "json").stdout)
    page = _run("report", kafka, *args, "--format", "html").stdout
    table = page.split(f"<h2>{title}</h2>")[1].split("</section>")[0]
    exact = re.findall(r'data-held-ms="(\d+)" data-used-us="(\d+)" data-idle-ms="(\d+)">(.*)</tr>', table)
    rows = [(int(held), int(used), int(idle), re.findall(r"<td>(.*?)</td>", row)[4]) for held, used, idle, row in exact]
    keys = ("held_ms", "used_us", "idle_ms", "cost")
    assert rows == [tuple(row[key] for key in keys) for row in expected["rows"]]
    assert len(rows) == 3


def test_the_text_says_how_the_time_was_spent_and_fits(kafka: str, prices: str) -> None:
    result = _run("report", kafka, *TIME, "--prices", prices)
    assert (result.exit_code, result.stderr) == (0, "times without a zone are taken as UTC\n")
    lines = result.stdout.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    assert lines[0] == "GPU report, 2026-11-20 00:00Z to 2026-11-20 04:00Z (UTC)"
    assert lines[2].startswith("2 GPUs, 4.00 GPU-hours: 87.5% held, 6.2% unobserved")
    assert _section(result.stdout, "All time of the GPUs")[1:] == [
        ["held*", "3.50", "87.5%", "0.95", "1.52", "0.70", "10.50", "1.00"],
        ["free", "0.25", "6.2%", "0.00", "0.00", "0.00", "0.75", "0.00"],
        ["unobserved", "0.25", "6.2%", "0.00", "0.00", "0.00", "0.75", "0.00"],
        ["lost", "0.00", "0.0%", "0.00", "0.00", "0.00", "0.00", "0.00"],
        ["all*", "4.00", "100.0%", "0.95", "1.52", "0.70", "12.00", "1.00"],
    ]
    assert ["vision", "1.50", "0.95", "0.02", "1.1%", "4.50", "1.00"] in _section(result.stdout, "By team")
    assert "not final: 1 window from 2026-11-20 03:00Z on" in result.stdout


def test_the_worst_offender_is_who_left_most_idle_and_the_rest_is_one_row(kafka: str, prices: str) -> None:
    result = _run("report", kafka, *TIME, "--prices", prices, "--top", "2")
    worst = _section(result.stdout, "Worst offenders")
    assert worst[0] == ["workload", "team", "idle GPU-hours", "of held", "idle cost EUR"]
    assert [row[-3:] for row in worst[1:]] == [["1.00", "100.0%", "3.00"], ["0.50", "50.0%", "1.50"]]
    assert _section(result.stdout, "By workload")[-1] == ["(1 other)", "1.00", "0.00", "0.50", "50.0%", "3.00"]


def test_the_trend_has_each_day_and_the_time_before(kafka: str) -> None:
    trend = _section(_run("report", kafka, *TIME).stdout, "Trend")
    assert trend[1:5] == [
        ["2026-11-20", "4.00", "87.5%", "6.2%", "27.1%", "43.3%", "5"],
        ["all", "4.00", "87.5%", "6.2%", "27.1%", "43.3%", "5"],
        ["before", "1.00", "100.0%", "0.0%", "0.0%", "0.0%"],
        ["change", "+300.0%", "-12.5", "+6.2", "+27.1", "+43.3"],
    ]


def test_a_time_before_of_which_nothing_is_known_is_not_compared(kafka: str) -> None:
    result = _run("report", kafka, "--from", "2026-11-19T23:00Z", "--to", "2026-11-20T04:00Z")
    assert "is not compared: nothing is known of it" in " ".join(result.stdout.split())
    assert "\nchange" not in result.stdout


def test_what_is_deleted_while_the_report_is_made_is_said_and_a_time_before_without_it_is_not_compared(
    kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_records = History.records

    async def shrinking(reader: History, spans: Mapping[Partition, Span], *args: Any, **more: Any) -> Any:
        if on_deleted := more.get("on_deleted"):
            on_deleted(Partition(HOURS.name, 0), 0)
        async for records in read_records(reader, spans, *args, **more):
            yield records

    monkeypatch.setattr(History, "records", shrinking)
    text = " ".join(_run("report", kafka, *TIME).stdout.split())
    assert "records of gpu.usage were deleted while this was read: what only they had is not counted" in text
    assert "is not compared: Kafka does not have all of it any more" in text


def test_a_time_of_which_nothing_is_known_is_not_taken_for_one_without_waste(kafka: str) -> None:
    result = _run("report", kafka, "--from", "2026-11-10", "--to", "2026-11-11")
    assert "nothing is known of this time: does `gpustream stream usage` run?" in " ".join(result.stdout.split())
    assert "nothing is known of this time" not in _run("report", kafka, *TIME).stdout


@pytest.mark.parametrize(
    ("hours", "before"),
    [((10, 14), (6, 10)), ((10.5, 11.5), (9.5, 10.5)), ((200, 367.8), (32, 200)), ((200.2, 368.2), (32, 200))],
)
def test_the_time_before_is_as_long_and_of_whole_hours_if_it_is_a_day(
    hours: tuple[float, float], before: tuple[float, float]
) -> None:
    first, last = (round(hour * HOUR_MS) for hour in hours)
    assert previous_range(Range(first, last)) == tuple(round(hour * HOUR_MS) for hour in before)


def test_alerts_are_counted_by_rule_and_team_in_that_time_only(kafka: str) -> None:
    assert _section(_run("report", kafka, *TIME).stdout, "Alerts")[1:3] == [
        ["GPUHeldIdle", "vision", "4", "2", "6h 45m"],  # 1 h + 2 h + 0.5 h + 0.25 h + 3 h
        ["GPULost", "(no team)", "1", "1", "1h 0m"],
    ]


class _Page(HTMLParser):
    """The tags of a page, its attributes, and whether each tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag


def test_the_page_is_one_file_in_which_a_hostile_label_is_text(kafka: str, tmp_path: Path) -> None:
    out = tmp_path / "week.html"
    result = _run("report", kafka, *TIME, "--format", "html", "--output", str(out))
    assert (result.exit_code, result.stdout) == (0, "")
    text, page = out.read_text(), _Page()
    page.feed(text)
    assert page.open == []
    assert not page.tags & {"script", "link", "img", "iframe", "object", "a", "base", "form"}
    assert not {name for name in page.attributes if name.startswith("on")} | page.attributes & {"src", "href", "style"}
    assert "&lt;script&gt;alert(1)&lt;/script&gt;??[31m&amp;&quot;&#x27;https://evil.example" in text
    assert not re.search(r"url\(|@import|https?://(?!evil\.example)", text)
    assert "color-scheme: light dark" in text
    assert "<svg" in text
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("form", ["text", "html"])
def test_the_same_records_make_the_same_bytes(kafka: str, form: str) -> None:
    assert len({_run("report", kafka, *TIME, "--format", form).stdout for _ in range(2)}) == 1
    assert "\u202e" not in _run("report", kafka, *TIME, "--format", form).stdout


def test_a_pipe_or_a_link_is_written_to_and_not_replaced(kafka: str, tmp_path: Path) -> None:
    pipe, link, out = tmp_path / "pipe", tmp_path / "link", tmp_path / "week.txt"
    os.mkfifo(pipe)
    link.symlink_to(out)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        assert _run("report", kafka, *TIME, "--output", str(pipe)).exit_code == 0
        written = reader.communicate(timeout=LIMIT_S)[0]
    assert _run("report", kafka, *TIME, "--output", str(link)).exit_code == 0
    reading, writing = os.pipe()
    assert _run("report", kafka, *TIME, "--output", f"/dev/fd/{writing}").exit_code == 0
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as through_link:
        assert through_link.read() == written

    assert pipe.is_fifo()
    assert link.is_symlink()
    assert written == out.read_text() == _run("report", kafka, *TIME).stdout


def test_what_can_not_be_done_is_one_sentence(kafka: str, tmp_path: Path) -> None:
    result = _run("report", kafka, *TIME, "--output", str(tmp_path / "missing" / "week.txt"))
    assert (result.exit_code, "it can't be written" in result.stderr) == (1, True)
    assert "it is empty: write a path" in _run("report", kafka, "--output", "").stderr
    assert "--to: needs --from" in _run("report", kafka, "--to", "2026-11-20").stderr
    assert _run("report", kafka, "--top", "0").exit_code == 2


def test_a_category_of_a_later_version_that_only_the_time_before_has_is_a_row() -> None:
    def summary(*records: Usage) -> Summary:
        result = Summary()
        for record in records:
            result.add(record)
        result.close()
        return result

    before = summary(usage(category="lent", start_ms=START_MS - HOUR_MS))
    time = Range(START_MS, START_MS + HOUR_MS)
    text = "\n".join(forms.as_text(forms.report(time, summary(usage()), before, ([], {}), 10, [])))

    rows = {row[0]: row for row in _section(text, "All time of the GPUs")}
    assert [rows[name][-1] for name in ("lent", "all")] == ["1.00", "1.00"]
    assert rows["lent"][1] == "0.00"
