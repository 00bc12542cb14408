"""Batch jobs go the whole way as pods do: from ticks of nodes without a kubelet through all streams into all sinks."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import msgspec
from click.testing import CliRunner
from cloudevents.core.bindings.http import from_http_event

from delivery import topic_admin
from delivery.values import Address
from gpustream.cli import main
from sinks.alertmanager import AlertmanagerSink
from sinks.parquet import ParquetSink
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.sink import RemoteWriteSink
from sinks.scrape.config import ScrapeSettings
from sinks.scrape.sink import ScrapeSink
from sinks.settings import AlertmanagerSettings, ParquetSettings, WebhookSettings
from sinks.webhook import WebhookSink
from streams.alerts.component import Alerts
from streams.attribution.component import Attribution
from streams.settings import AlertSettings, AttributionSettings, UsageSettings
from streams.usage.component import UsageStream
from tests.eventually import LIMIT_S, eventually
from tests.real.pipeline import lag, read_all, running, sender_to, usage_of
from tests.real.servers import AlertmanagerServer, KafkaServer, PrometheusServer
from tests.real.test_alert_sinks import hook
from tests.sinks.alerts import assert_says
from topics.alerts import Alert
from topics.topic import node_key
from topics.usage import HOURS, MINUTE_MS, MINUTES

STEP_MS = 10_000
TICKS = 300
ENDED_TICK = 240  # the tick with which the idle job has ended
CLUSTER = "hpc"
IDLE = {"id": "4242", "user": "ana", "partition": "gpu", "account": "vision"}
BUSY = {"id": "4243", "user": "bob", "partition": "long", "account": "speech"}
SECOND_JOB = {"id": "4244", "user": "eve", "partition": "long"}
NO_HOLDER: tuple[str | None, ...] = (None, None, None, None)


def jobs_of(gpu: int, tick: int) -> list[dict[str, str]]:
    """The jobs of a GPU at a tick: an idle job until it ends, none, a job that works, and two jobs at once."""
    return [[IDLE] if tick < ENDED_TICK else [], [], [BUSY], [BUSY, SECOND_JOB]][gpu]


def labels_of(gpu: int, tick: int) -> tuple[str | None, ...]:
    """The job labels of a GPU at a tick; two jobs have none."""
    jobs = jobs_of(gpu, tick)
    return tuple(jobs[0].get(name) for name in ("id", "user", "partition", "account")) if len(jobs) == 1 else NO_HOLDER


def ticks(start_ms: int) -> list[dict[str, Any]]:
    """Fifty minutes of two nodes with two GPUs each."""
    records = []
    for number in range(TICKS):
        for node in (0, 1):
            devices = [
                {
                    "uuid": f"GPU-{gpu}", "index": gpu % 2, "compute_slices": 1, "processes": [],
                    "metrics": {"gpu_utilization_ratio": 0.0 if gpu < 2 else 0.5, "memory_used_bytes": 0},
                    "jobs": jobs_of(gpu, number),
                }
                for gpu in (2 * node, 2 * node + 1)
            ]  # fmt: skip
            tick = {"schema": 1, "cluster": CLUSTER, "node": f"n{node}", "run_id": start_ms, "seq": number + 1}
            records.append(tick | {"ts_ms": start_ms + number * STEP_MS, "interval_ms": STEP_MS, "devices": devices})
    return records


def found_in(labels: Any) -> tuple[str | None, ...]:
    """The job in the labels of a series or alert, which name no pod."""
    assert not [name for name in labels if name.startswith(("k8s_pod", "k8s_namespace", "k8s_container"))]
    return tuple(labels.get(f"job_{name}") for name in ("id", "user", "partition", "account"))


async def test_jobs_are_in_every_sink(
    empty_kafka: KafkaServer,
    prometheus: PrometheusServer,
    start_alertmanager: Callable[..., AlertmanagerServer],
    tmp_path: Path,
) -> None:
    kafka = empty_kafka.address
    await topic_admin.create(empty_kafka.connection, partitions=2, replication_factor=1)
    async with sender_to(empty_kafka.connection) as sender:
        start_ms = (int(time.time() * 1000) - TICKS * STEP_MS) // MINUTE_MS * MINUTE_MS
        futures = [
            await sender.send("gpu.samples", msgspec.json.encode(tick), key=node_key(CLUSTER, tick["node"]))
            for tick in ticks(start_ms)
        ]
        await asyncio.gather(*futures)
    async with hook() as plain, hook() as events:
        manager = await asyncio.to_thread(start_alertmanager, webhook=plain.url.replace("/hook", "/none"))
        post: dict[str, Any] = {"kafka": kafka, "unsigned": True, "from_": "earliest"}
        scrape = ScrapeSink(ScrapeSettings(kafka=kafka, scrape_listen=Address("127.0.0.1", 0), from_="earliest"))
        async with running(
            Attribution(AttributionSettings(kafka=kafka)),
            Alerts(AlertSettings(kafka=kafka)),
            UsageStream(UsageSettings(kafka=kafka)),
            RemoteWriteSink(RemoteWriteSettings(kafka=kafka, url=prometheus.write_url, from_="earliest")),
            scrape,
            ParquetSink(ParquetSettings(kafka=kafka, path=tmp_path / "usage", write_every_s=0.2)),
            AlertmanagerSink(AlertmanagerSettings(kafka=kafka, urls=(manager.url,), from_="earliest")),
            WebhookSink(WebhookSettings(**post, url=plain.url, group="plain")),
            WebhookSink(WebhookSettings(**post, url=events.url, group="events", format="cloudevents")),
        ):
            await _is_in_series(prometheus, start_ms)
            firing, over = await eventually(lambda: plain.accepted if len(plain.accepted) > 1 else [])
            alerts = [msgspec.json.decode(body, type=Alert) for _, body, _ in (firing, over)]
            assert [(alert.name, alert.state, found_in(alert.labels)) for alert in alerts] == [
                ("GPUHeldIdle", "firing", labels_of(0, 0)), ("GPUHeldIdle", "resolved", labels_of(0, 0)),
            ]  # fmt: skip
            for event, alert in zip(
                await eventually(lambda: events.messages[1:] and events.messages), alerts, strict=True
            ):
                assert_says(from_http_event(event), alert)
            await _is_booked(kafka, start_ms, tmp_path / "usage")
            assert scrape.address
            page = await asyncio.to_thread(_get, "http://{}:{}/metrics".format(*scrape.address))
    line_by_gpu = {
        line.split('gpu_uuid="')[1][:5]: line for line in page.splitlines() if line.startswith("gpu_utilization{")
    }
    assert {uuid: 'job_id="4243"' in line and 'job_account="speech"' in line for uuid, line in line_by_gpu.items()} == {
        "GPU-0": False, "GPU-1": False, "GPU-2": True, "GPU-3": False,
    }  # fmt: skip
    assert await read_all(kafka, "gpu.dead-letters") == []


async def _is_in_series(prometheus: PrometheusServer, start_ms: int) -> None:
    """Whether Prometheus has each point of each GPU once, with the labels of the job that had it then."""
    expected = {(f"GPU-{gpu}", start_ms + n * STEP_MS): labels_of(gpu, n) for gpu in range(4) for n in range(TICKS)}
    query = f'gpu_utilization{{k8s_cluster_name="{CLUSTER}"}}[2h]'

    async def stored() -> dict[tuple[str, int], tuple[str | None, ...]]:
        series = await asyncio.to_thread(prometheus.query, query)
        points = [
            ((one_series.labels["gpu_uuid"], at_ms), found_in(one_series.labels))
            for one_series in series
            for at_ms, _ in one_series.points
        ]
        return dict(points) if len(points) == len(expected) else {}

    assert await eventually(stored, every_s=0.5) == expected


async def _is_booked(kafka: str, start_ms: int, files: Path) -> None:
    """Whether each whole minute of a job is booked to it, in the topic, in the files and in the output of commands."""

    def booked_ms(job: dict[str, str], gpu: int) -> int:
        own_ms = [start_ms + n * STEP_MS for n in range(TICKS) if job in jobs_of(gpu, n)]
        first, last = -(-own_ms[0] // MINUTE_MS), own_ms[-1] // MINUTE_MS
        return last - first - (gpu != 0)  # the last minute is not closed yet

    expected = {("4242", "GPU-0"): (IDLE, 0), ("4243", "GPU-2"): (BUSY, 2), ("4243", "GPU-3"): (BUSY, 3)}

    async def minutes() -> dict[tuple[str, str], int]:
        counts: dict[tuple[str, str], int] = {}
        for record in (await usage_of(kafka, MINUTES.name)).values():
            if record.category == "held" and record.pod and record.workload:
                share = 2 if record.gpu_uuid == "GPU-3" else 1
                assert (record.workload.kind, record.workload.name) == ("SlurmJob", record.pod)
                if record.device_ms == MINUTE_MS // share:
                    counts[record.pod, record.gpu_uuid] = counts.get((record.pod, record.gpu_uuid), 0) + 1
        return counts

    async def all_booked() -> bool:
        counts = await minutes()
        return all(counts.get(key, 0) >= booked_ms(*job_and_gpu) for key, job_and_gpu in expected.items())

    await eventually(all_booked, every_s=0.5)
    await eventually(lambda: _caught_up(kafka))
    hours = {key.decode(): record.device_ms for key, record in (await usage_of(kafka, HOURS.name)).items()}
    columns = "cluster, node, uuid, start_ms, coalesce(namespace, ''), coalesce(pod, ''), coalesce(pod_uid, '')"
    rows = duckdb.execute(
        f"SELECT concat_ws('/', {columns}, coalesce(container, ''), category), device_ms, pod, team, workload_kind,"  # noqa: S608
        " labels::json->>'user', labels::json->>'partition' FROM read_parquet(?)", [f"{files}/date=*/*.parquet"],
    ).fetchall()  # fmt: skip
    assert {row[0]: row[1] for row in rows} == hours
    assert {row[2:] for row in rows if row[2]} == {
        (job["id"], job.get("account"), "SlurmJob", job["user"], job["partition"]) for job in (IDLE, BUSY, SECOND_JOB)
    }
    rows_by = {by: await asyncio.to_thread(_usage_by, kafka, by) for by in ("workload", "pod", "namespace", "team")}
    assert rows_by == {
        "workload": {f"{job['partition']}/SlurmJob/{job['id']}" for job in (IDLE, BUSY, SECOND_JOB)},
        "pod": {f"{job['partition']}/{job['id']}" for job in (IDLE, BUSY, SECOND_JOB)},
        "namespace": {"gpu", "long"},
        "team": {"vision", "speech", "(no team)"},
    }
    report = await asyncio.to_thread(CliRunner().invoke, main, ["report", "--kafka", kafka, "--since", "50m"])
    assert all(word in report.output for word in ("vision", "speech", "4242", "4243", "GPUHeldIdle")), report.output


async def _caught_up(kafka: str) -> bool:
    return await lag(kafka, "gpustream-sink-parquet", [HOURS.name]) == 0


def _usage_by(kafka: str, by: str) -> set[str]:
    arguments = ["usage", "--kafka", kafka, "--by", by, "--since", "50m", "--format", "json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return {row["by"] for row in json.loads(result.stdout)["rows"] if row.get("category", "held") == "held"}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:  # noqa: S310 - http, and ours
        text: str = answer.read().decode()
        return text
