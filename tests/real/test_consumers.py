"""docs/consumers as a reader follows it: its programs and commands on Apache Kafka, held against the truth.

One fleet, run once, while the two programs of the page read along; the one that counts is killed twice. Afterwards some
records of gpu.attributed are sent again, as a stream that crashed would.
"""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import ConsumerGroupState, Producer

from delivery import topic_admin
from tests.docs.clickhouse import ClickHouse
from tests.docs.page import CONSUMERS, blocks
from tests.eventually import LIMIT_S, eventually_sync
from tests.real.conftest import need
from tests.real.consumers_truth import (
    Row,
    Sums,
    devices,
    elapsed,
    idle_since,
    last_ticks,
    pods,
    surely_idle,
    surely_idle_pods,
    true_sums,
    true_use,
    with_parts,
    with_workloads,
)
from tests.real.pipeline import Gpustream, lag, read_all
from tests.real.process import Server
from tests.real.servers import KafkaServer, Missing

CLUSTER = "consumers"
FLEET_S = 12.0
IDLE_AFTER_S = 3.0
REPLAYED = 100


@dataclass(frozen=True)
class Filled:
    """The results: the broker's address, the truth, the records, and the output of the two programs."""

    kafka: str
    truth: list[Row]
    ticks: list[Row]
    database: Path
    idle: list[Row]
    exits: dict[str, int | None]
    report: str


class Program(Server):
    """A program of the page, by the page's own command, in a directory of its own."""

    def __init__(self, directory: Path, section: str, kafka: str) -> None:
        super().__init__(directory)
        (block,) = blocks("consumers/README.md", "sh", section)
        self.line = command(block.text).replace("6066", str(self.ports[0].number))
        self.kafka = kafka

    def command(self) -> list[str]:
        """The command in the foreground."""
        return ["env", *(f"{k}={v}" for k, v in environment(self.kafka).items()), "bash", "-c", f"exec {self.line}"]

    def ready(self) -> bool:
        """Always: whether it reads is visible in its group."""
        return True

    def idle(self) -> list[Row]:
        """What its page answers; nothing while it has none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[0].number}/idle/", timeout=5) as answer:
                rows: list[Row] = json.load(answer)
                return rows
        except OSError:
            return []

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while it runs."""
        return None if self._process is None else self._process.poll()


def command(text: str) -> str:
    """A command of the page, for another directory than the repository's root, with this Python for that of uv."""
    return text.strip().replace("docs/consumers/", f"{CONSUMERS}/").replace("uv run", "python -I")


def environment(kafka: str) -> dict[str, str]:
    """The environment of a command of the page: the broker, and this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"KAFKA": kafka, "PATH": path, "IDLE_AFTER_SECONDS": str(int(IDLE_AFTER_S))}


@pytest.fixture(scope="module")
def filled(kafka: KafkaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """The fleet for some seconds with the programs beside it, until all is counted; some records are sent again."""
    kafka.empty()
    directory = tmp_path_factory.mktemp("consumers")
    with ExitStack() as servers:
        asyncio.run(topic_admin.create(kafka.connection, partitions=4, replication_factor=1))
        yield _fill(servers, directory, kafka)


def _fill(servers: ExitStack, directory: Path, kafka: KafkaServer) -> Filled:
    stream = Gpustream(directory / "stream", "stream", "attribution", "--kafka", kafka.address)
    programs = {name: Program(directory / name, name, kafka.address) for name in ("Python", "Faust")}
    for server in (stream, *programs.values()):
        servers.enter_context(server)
        servers.callback(server.stop)  # it leaves its group
    eventually_sync(lambda: _stable(kafka, "gpu-hours", "idle-gpus", "gpustream-attribution"))
    truth = _run_fleet(servers, directory, kafka, programs["Python"])
    eventually_sync(lambda: asyncio.run(lag(kafka.address, "gpustream-attribution", ["gpu.samples"])) == 0)
    idle = surely_idle(truth)
    eventually_sync(
        lambda: idle <= {(row["node"], row["uuid"], row["pod"], row["ts_ms"]) for row in programs["Faust"].idle()}
    )
    _send_again(kafka.address)
    eventually_sync(lambda: _lags(kafka.address) == [0, 0])
    rows = programs["Faust"].idle()
    for program in programs.values():
        program.stop()
    exits = {name: program.returncode for name, program in programs.items()}
    ticks = [json.loads(record.value) for record in asyncio.run(read_all(kafka.address, "gpu.attributed"))]
    database = programs["Python"].directory / "gpu-hours.db"
    report = programs["Python"].log.read_text()
    return Filled(kafka.address, with_parts(truth, ticks), ticks, database, rows, exits, report)


def _run_fleet(servers: ExitStack, directory: Path, kafka: KafkaServer, counting: Program) -> list[Row]:
    """The fleet for its time, a sample that is none after it. What counts is killed and started again, twice."""
    truth = directory / "truth.jsonl"
    options = ("--kafka", kafka.address, "--cluster", CLUSTER, "--fleet", "12x8", "--seed", "3", "--truth", str(truth))
    fleet = servers.enter_context(Gpustream(directory / "fleet", "produce", "simulated", *options))
    for _ in range(2):
        time.sleep(FLEET_S / 3)
        counting.kill9()
        counting.start()
    time.sleep(FLEET_S / 3)
    _produce(kafka.address, [("gpu.samples", 0, b"consumers/broken", b"not json")])
    fleet.stop()
    return [json.loads(line) for line in truth.read_text().splitlines()]


def _stable(kafka: KafkaServer, *groups: str) -> bool:
    admin = kafka.admin()
    descriptions = [
        future.result(10) for future in admin.describe_consumer_groups(list(groups), request_timeout=10).values()
    ]
    return all(group.state == ConsumerGroupState.STABLE for group in descriptions)


def _lags(kafka: str) -> list[int]:
    return [asyncio.run(lag(kafka, group, ["gpu.attributed"])) for group in ("gpu-hours", "idle-gpus")]


def _send_again(kafka: str) -> None:
    records = asyncio.run(read_all(kafka, "gpu.attributed"))
    repeated = [record for record in records if record.offset < REPLAYED / 4]
    assert repeated
    _produce(kafka, [(record.topic, record.partition, record.key, record.value) for record in repeated])


def _produce(kafka: str, records: list[tuple[str, int, bytes, bytes]]) -> None:
    producer = Producer({"bootstrap.servers": kafka})
    for topic, partition, key, value in records:
        producer.produce(topic, value, key, partition)
    assert producer.flush(30) == 0


def run(filled: Filled, text: str) -> str:
    """The output of a command of the page."""
    line = f"set -o pipefail; {command(text)}"
    result = subprocess.run(
        ["bash", "-c", line],
        env=os.environ | environment(filled.kafka),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_programs_end_in_good_order(filled: Filled) -> None:
    assert filled.exits == {"Python": 0, "Faust": 0}


def test_records_came_twice_and_still_all_of_the_truth_came(filled: Filled) -> None:
    identities = [(tick["node"], tick["run_id"], tick["seq"]) for tick in filled.ticks]
    assert set(identities) == {(row["node"], row["run_id"], row["seq"]) for row in filled.truth}
    assert len(identities) >= len(set(identities)) + 20


def _used(database: Path, column: str) -> Sums:
    sums = f"SELECT namespace, workload, device, sum({column}) FROM usage GROUP BY 1, 2, 3"  # noqa: S608
    with closing(sqlite3.connect(database)) as opened:
        return {row[:3]: row[3] for row in opened.execute(sums)}


def test_gpu_hours_counts_each_tick_once_for_who_held_the_device(filled: Filled) -> None:
    expected = true_sums(filled.truth, elapsed(filled.truth))
    hours = with_workloads(filled.truth, _used(filled.database, "held_seconds"))
    assert hours == pytest.approx(expected)
    assert len(expected) > 10


def test_gpu_hours_counts_what_of_that_time_was_used(filled: Filled) -> None:
    seconds = elapsed(filled.truth)
    expected = true_use(filled.truth, seconds)
    hours = with_workloads(filled.truth, _used(filled.database, "used_seconds"))
    assert {key: value for key, value in hours.items() if value} == pytest.approx(expected)
    assert len(expected) > 5


def test_gpu_hours_knows_each_node_to_its_last_tick(filled: Filled) -> None:
    newest: dict[str, Row] = {}
    for tick in filled.ticks:
        newest[tick["node"]] = max(tick, newest.get(tick["node"], tick), key=lambda tick: tick["offset"])
    with closing(sqlite3.connect(filled.database)) as database:
        positions = {row[0]: row[1:] for row in database.execute('SELECT node, "offset", run_id, ts_ms FROM nodes')}
    assert positions == {node: (tick["offset"], tick["run_id"], tick["ts_ms"]) for node, tick in newest.items()}


def test_gpu_hours_counts_nothing_again_when_its_group_is_set_back(filled: Filled, tmp_path: Path) -> None:
    database = Path(shutil.copy(filled.database, tmp_path))
    before = _used(database, "held_seconds")
    arguments = ("--kafka", filled.kafka, "--database", str(database), "--group", "set-back")
    with subprocess.Popen(
        [sys.executable, CONSUMERS / "gpu_hours.py", *arguments], stdout=subprocess.DEVNULL
    ) as process:
        try:
            eventually_sync(lambda: asyncio.run(lag(filled.kafka, "set-back", ["gpu.attributed"])) == 0)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert _used(database, "held_seconds") == before


def test_gpu_hours_prints_its_sums(filled: Filled) -> None:
    (example,) = blocks("consumers/README.md", "text", "Python")
    lines = [line for line in filled.report.splitlines() if line.startswith("ml-research")]
    assert lines
    assert all(len(line) == len(example.text.splitlines()[0]) for line in lines)


def test_the_page_asks_the_database_for_hours_per_namespace(filled: Filled) -> None:
    (query,) = blocks("consumers/README.md", "sql", "Python")
    with closing(sqlite3.connect(filled.database)) as database:
        rows = database.execute(query.text).fetchall()
    expected: dict[str, float] = defaultdict(float)
    for (namespace, _, kind), seconds in true_sums(filled.truth, elapsed(filled.truth)).items():
        if kind == "GPU":
            expected[namespace] += seconds / 3600
    actual: dict[str, float] = defaultdict(float)
    for _, namespace, hours in rows:  # the hour may have changed in between
        actual[namespace] += hours
    assert actual == pytest.approx(expected)


def test_the_agent_knows_who_holds_idle_gpus(filled: Filled) -> None:
    since = idle_since(filled.truth)
    idle_rows = {(row["node"], row["uuid"], row["pod"], row["ts_ms"]): row for row in filled.idle}
    assert surely_idle(filled.truth)
    assert surely_idle(filled.truth) <= idle_rows.keys() <= since.keys()
    for key, row in idle_rows.items():
        assert IDLE_AFTER_S <= row["idle_seconds"] <= (key[3] - since[key]) / 1000
        assert row["cluster"] == CLUSTER


def _find(program: str) -> Callable[[], Path]:
    def find() -> Path:
        path = shutil.which(program)
        if not path:
            raise Missing(f"no {program} on PATH: Debian's package `{program}` has it")
        return Path(path)

    return find


def _kcat(number: int, total: int = 5) -> str:
    need(_find("kcat"), _find("jq"))
    commands = blocks("consumers/README.md", "sh", "kcat and jq")
    assert len(commands) == total
    return commands[number].text


def test_kcat_shows_the_last_tick_of_each_partition(filled: Filled) -> None:
    rows = [json.loads(line) for line in run(filled, _kcat(0)).splitlines()]
    counts = {(tick["node"], tick["seq"]): len(tick["devices"]) for tick in filled.ticks}
    assert 1 <= len(rows) <= 4
    assert all(counts[row["node"], row["seq"]] == row["devices"] for row in rows)
    assert {row["attribution"] for row in rows} == {"exact"}


def test_kcat_and_jq_say_who_holds_what(filled: Filled) -> None:
    rows = [line.split("\t") for line in run(filled, _kcat(1)).splitlines()]
    holders = {(node, uuid, pod): (kind, used) for node, uuid, kind, pod, used in rows}
    last, expected = last_ticks(filled.truth), {}
    for row in devices(filled.truth):
        if row["ts_ms"] == last[row["node"]]:
            for pod in [f"{ns}/{name}" for ns, name in pods(row)] or ["-"]:
                expected[f"{CLUSTER}/{row['node']}", row["uuid"], pod] = row["utilization_ratio"]
    assert holders.keys() == expected.keys()
    assert len(rows) == len(holders)
    for key, used in expected.items():
        assert holders[key][1] == "?" if used is None else float(holders[key][1]) == used
        assert (holders[key][0] == "GPU") == key[1].startswith("GPU-")


def test_kcat_and_jq_add_up_gpu_seconds(filled: Filled) -> None:
    rows = [line.split("\t") for line in run(filled, _kcat(2)).splitlines()]
    hours = with_workloads(filled.truth, {(ns, workload, kind): float(value) for ns, workload, kind, value in rows})
    held_seconds = {key: v for key, v in true_sums(filled.truth, lambda _: 1.0).items() if key[0] != "(nobody)"}
    assert hours == pytest.approx(held_seconds, abs=1.0)  # each line is rounded to a tenth
    assert len(rows) > 10


def test_jq_counts_a_tick_for_as_long_as_its_nodes_interval(filled: Filled, tmp_path: Path) -> None:
    holder = {"namespace": "ml", "pod": "bert-0"}
    tick = {**filled.ticks[0], "interval_ms": 10_000, "devices": [{"uuid": "GPU-1", "holders": [holder]}]}
    (tmp_path / "ticks.jsonl").write_text(json.dumps(tick) + "\n")
    assert run(filled, f"cat {tmp_path}/ticks.jsonl |{_kcat(2).partition('|')[2]}") == "ml\tPod/bert-0\tGPU\t10\n"


def test_kcat_and_jq_find_devices_that_are_lost(filled: Filled, tmp_path: Path) -> None:
    text = _kcat(3)
    assert run(filled, text) == ""
    tick = {**filled.ticks[0], "devices": [{"uuid": "GPU-1", "state": "lost"}, {"uuid": "GPU-2"}]}
    (tmp_path / "ticks.jsonl").write_text(json.dumps(tick) + "\n")
    lost_devices = run(filled, f"cat {tmp_path}/ticks.jsonl |{text.partition('|')[2]}")
    expected = {"node": tick["node"], "ts_ms": tick["ts_ms"], "uuid": "GPU-1", "state": "lost"}
    assert [json.loads(line) for line in lost_devices.splitlines()] == [expected]


def test_kcat_shows_what_could_not_be_used_and_why(filled: Filled) -> None:
    headers, value = run(filled, _kcat(4)).splitlines()
    assert value == "not json"
    assert "topic=gpu.samples" in headers
    assert "error=" in headers


def test_clickhouse_keeps_each_tick_once_and_adds_up_the_hours_that_were_held(filled: Filled, tmp_path: Path) -> None:
    clickhouse = ClickHouse(tmp_path, (CONSUMERS / "clickhouse.sql").read_text())
    clickhouse.insert([*map(json.dumps, filled.ticks), "not json", "{}"])
    text = (CONSUMERS / "clickhouse_queries.sql").read_text()
    yesterday = "ts >= toStartOfDay(now('UTC')) - INTERVAL 1 DAY AND ts < toStartOfDay(now('UTC'))"
    assert text.count(yesterday) == 2
    hours, idle, unheld = text.replace(yesterday, "true").strip().rstrip(";").split(";")
    held_hours = true_sums(filled.truth, lambda _: 1 / 3600)
    rows = clickhouse.answer(hours)
    hours_by_workload = {(row["namespace"], row["workload"], row["device"]): row["hours"] for row in rows}
    assert with_workloads(filled.truth, hours_by_workload) == pytest.approx(
        {key: value for key, value in held_hours.items() if key[0] != "(nobody)"}
    )
    nobodys: dict[str, float] = defaultdict(float)
    for row in clickhouse.answer(unheld):
        nobodys["GPU" if row["device"] == "GPU" else "MIG"] += row["hours"]
    assert nobodys == pytest.approx({key[2]: value for key, value in held_hours.items() if key[0] == "(nobody)"})
    assert clickhouse.answer(idle) == []  # none for half an hour yet
    since = idle.replace("INTERVAL 29 MINUTE", "INTERVAL 0 MINUTE").replace("INTERVAL 1 MINUTE", "INTERVAL 30 MINUTE")
    assert surely_idle_pods(filled.truth) <= {(row["uuid"], row["pod_name"]) for row in clickhouse.answer(since)}
