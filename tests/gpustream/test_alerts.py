"""``gpustream alerts``: what people, and what programs, learn of gpu.alerts."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner, Result
from rich.console import Console

from delivery.policies import Bounds
from gpustream import alerts
from gpustream.alerts import LatestAlerts
from gpustream.cli import main
from gpustream.embedded import EmbeddedBroker
from gpustream.output import table
from tests.sinks.alerts import START_MS, alert, alert_record
from topics.alerts import Alert, AlertGpu
from topics.times import time_of
from topics.workloads import NodeWorkloads, Pod

LABELS = {
    "gpu_index": "0",
    "k8s_namespace_name": "ml",
    "k8s_pod_name": "a",
    "k8s_workload_kind": "Job",
    "k8s_workload_name": "train",
}


@pytest.fixture(scope="module")
def kafka() -> Iterator[str]:
    """A broker with alerts: one that fires, one that ended, one that was deleted, and no alert at all."""
    with EmbeddedBroker() as running:
        running.start({"gpu.alerts": 2})
        fires, ended = alert("a", labels=LABELS), alert("b", ends_ms=START_MS + 5_000)
        deleted = alert("c")
        _write(
            running.address,
            [
                (fires.fingerprint, msgspec.json.encode(fires)),
                (ended.fingerprint, msgspec.json.encode(alert("b"))),
                (ended.fingerprint, msgspec.json.encode(ended)),
                (deleted.fingerprint, msgspec.json.encode(deleted)),
                (deleted.fingerprint, None),
                ("junk", b"{"),
            ],
        )
        yield running.address


def _write(kafka: str, records: Sequence[tuple[str, bytes | None]], topic: str = "gpu.alerts") -> None:
    async def write() -> None:
        async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
            for key, value in records:
                await producer.send_and_wait(topic, value, key=key.encode())

    asyncio.run(write())


def _alerts(*args: str) -> Result:
    return CliRunner().invoke(main, ["alerts", *args])


def test_a_piped_list_has_the_open_alerts_and_nothing_else(kafka: str) -> None:
    result = _alerts("--kafka", kafka)

    head, *lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert head == list(alerts.COLUMNS)
    ((since, _, *rest),) = lines
    assert since == "2026-11-20 23:59:12Z"
    summary = "ml/a holds GPU 0 of n1 and has not used it for 15m"
    assert rest == ["warning", "GPUHeldIdle", "c1/n1 GPU 0", "ml/a (Job/train)", summary]


def test_as_json_they_are_the_records_of_the_topic(kafka: str) -> None:
    result = _alerts("--kafka", kafka, "--format", "json")

    assert result.stdout_bytes == msgspec.json.encode(alert("a", labels=LABELS)) + b"\n"


def test_the_rules_of_the_environment_are_for_policies_and_for_the_stream(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules.toml").write_text("")
    assert "'--rules' is for '--policies'" in _alerts("--kafka", kafka, "--rules", str(tmp_path / "rules.toml")).stderr
    monkeypatch.setenv("GPUSTREAM_RULES", str(tmp_path / "rules.toml"))
    assert _alerts("--kafka", kafka).exit_code == 0


def test_policies_are_not_followed(kafka: str) -> None:
    result = _alerts("--kafka", kafka, "--policies", "--follow")
    assert (result.exit_code, "'--follow' is for alerts" in result.stderr) == (2, True)


@pytest.mark.slow
def test_following_reports_each_transition_once() -> None:
    with EmbeddedBroker() as running:
        running.start({"gpu.alerts": 1})
        fires, ended = alert("a"), alert("a", ends_ms=START_MS + 65_000)
        _write(running.address, [(fires.fingerprint, msgspec.json.encode(fires))])
        command = [sys.executable, "-m", "gpustream", "alerts", "--kafka", running.address, "--follow"]
        with subprocess.Popen([*command, "--format", "json"], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                lines = [json.loads(process.stdout.readline())]
                again = [fires, ended, ended, alert("b")]
                _write(running.address, [(record.fingerprint, msgspec.json.encode(record)) for record in again])
                lines += [json.loads(process.stdout.readline()) for _ in range(2)]
            finally:
                process.terminate()

    assert [(line["fingerprint"], line["state"]) for line in lines] == [
        (fires.fingerprint, "firing"),
        (fires.fingerprint, "resolved"),
        (alert("b").fingerprint, "firing"),
    ]


def test_a_broker_that_is_not_there_or_has_no_alerts_is_one_sentence() -> None:
    with EmbeddedBroker() as running:
        running.start({"gpu.samples": 1})
        address = running.address
        without = _alerts("--kafka", address)
    nowhere = _alerts("--kafka", "127.0.0.1:1")

    assert (without.exit_code, nowhere.exit_code) == (1, 1)
    assert without.stderr == f"there is no topic gpu.alerts at {address}: `gpustream topics create` makes it\n"
    assert "no Kafka broker answers at 127.0.0.1:1 (KafkaConnectionError): is one up there" in nowhere.stderr


def test_what_sinks_take_for_no_alert_is_not_shown() -> None:
    latest, over = LatestAlerts(), alert(ends_ms=START_MS + 5)
    assert latest.update(alert_record(alert(), key=b"0" * 16)) is None
    assert latest.update(alert_record(msgspec.structs.replace(over, ends_at=None))) is None
    assert latest.firing() == []


def test_the_most_severe_come_first_then_the_oldest() -> None:
    latest = LatestAlerts()
    written = [
        alert("new", START_MS + 1, severity="critical"),
        alert("old", START_MS, severity="critical"),
        alert("far", START_MS - 9, severity="info"),
        alert("mid", START_MS - 5),
    ]
    for expected in written:
        assert latest.update(alert_record(expected)) == expected
        assert latest.update(alert_record(expected)) is None
    assert [firing.labels["k8s_pod_name"] for firing in latest.firing()] == ["old", "new", "mid", "far"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (59, "59s"), (60, "1m 0s"), (7_505, "2h 5m"), (86_400, "1d 0h"), (10**7, "115d 17h")],
)
def test_how_long_it_lasted_is_said_in_two_units(seconds: int, text: str) -> None:
    assert alerts.lasted(timedelta(seconds=seconds)) == text


def test_what_a_tenant_wrote_can_neither_steer_a_terminal_nor_break_a_table() -> None:
    evil = alert("a", labels={"k8s_pod_name": "\x1b[31m[red]x[/nonsense]"}, annotations={"summary": "a\tb\n\x07c"})
    row = alerts.row(evil, time_of(START_MS))
    console = Console(width=200)
    with console.capture() as printed:
        console.print(table(alerts.COLUMNS, [row], alerts.style))
    assert row.who == "[31m[red]x[/nonsense]"
    assert row.summary == "a b c"
    assert "[red]x[/nonsense]" in printed.get()


def test_a_state_of_a_later_version_can_not_steer_a_terminal_either(capsys: pytest.CaptureFixture[str]) -> None:
    alerts._print_transition(msgspec.structs.replace(alert(), state="paused\x07\n"), "table")
    assert capsys.readouterr().out.split("\t")[1] == "paused??"


def test_an_alert_of_a_node_says_so() -> None:
    node: Alert = alert("", name="NodeSilent", labels={}, annotations={}, severity="critical")
    row = alerts.row(node, time_of(START_MS + 90_000))
    assert (row.where, row.who, row.lasted) == ("c1/n1", "", "1m 30s")


def test_an_alert_about_the_gpu_of_a_batch_job_says_whose_it_is() -> None:
    xid = alert("x", labels={"gpu_index": "3", "job_id": "4242", "job_user": "ana"})
    assert alerts.row(xid, time_of(START_MS)).who == "job 4242"


def test_an_alert_about_mig_devices_is_about_as_many_gpus_as_they_are_cut_from() -> None:
    parts = [
        AlertGpu(uuid=f"MIG-{node}-{index}-{number}", node=node, index=index)
        for node, index, number in product(("n1", "n2"), (0, 1), range(7))
    ]
    where = [alerts.row(alert("x", gpus=tuple(gpus)), time_of(START_MS)).where for gpus in (parts, parts[:14])]

    assert where == ["c1: 4 GPUs of 2 nodes", "c1/n1 GPU 0, 1"]


def test_policies_are_listed_with_what_of_them_counts() -> None:
    def pod(name: str, **fields: Any) -> Pod:
        return msgspec.convert({"namespace": "ml", "name": name, "uid": name, "phase": "Running", **fields}, Pod)

    node = NodeWorkloads(
        schema=1, cluster="c", node="n", epoch=1, seq=1, ts_ms=1,
        pods=(
            pod("off", annotations={"gpustream.dev/alerts": "off"}),
            pod("long", annotations={"gpustream.dev/idle-after": "10d"}),
            pod("hours", namespace_labels={"gpustream.dev/idle-after": "2h"}),
            pod("ended", ended_ms=5, annotations={"gpustream.dev/alerts": "off"}),
            pod("none"),
        ),
    )  # fmt: skip
    assert alerts.policy_rows(node, Bounds()) == [
        ("ml", "off", "c/n", "gpustream.dev/alerts=off", "no alerts about its doing, for 1d after it got a GPU"),
        ("ml", "long", "c/n", "gpustream.dev/idle-after=10d",
         "the annotation gpustream.dev/idle-after is '10d', and 1d is the most that counts here"),
        ("ml", "hours", "c/n", "gpustream.dev/idle-after=2h", "its GPUs may be idle for 2h"),
    ]  # fmt: skip


def test_the_policies_are_those_that_the_newest_leader_wrote() -> None:
    def listed(epoch: int, seq: int, policy: str) -> bytes:
        pod = Pod("ml", "a", "u", annotations={"gpustream.dev/idle-after": policy})
        return msgspec.json.encode(
            NodeWorkloads(schema=1, cluster="c", node="n", epoch=epoch, seq=seq, ts_ms=1, pods=(pod,))
        )

    with EmbeddedBroker() as running:
        running.start({"gpu.workloads": 1})
        records = [listed(2, 1, "1h"), listed(2, 2, "2h"), listed(1, 9, "9h")]
        _write(running.address, [("c/n", record) for record in records], topic="gpu.workloads")
        (policy,) = _alerts("--kafka", running.address, "--policies", "--format", "json").stdout.splitlines()

    assert json.loads(policy)["policy"] == "gpustream.dev/idle-after=2h"
