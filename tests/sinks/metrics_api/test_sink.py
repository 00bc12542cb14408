"""The metrics API as a component."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from delivery.ledger import Partition
from delivery.positions import StartFrom, initial_offset
from delivery.values import Address
from sinks.metrics_api.config import MetricsApiSettings
from sinks.metrics_api.sink import MetricsApiSink
from tests.eventually import eventually
from tests.real.accounting import assert_accounted
from tests.sinks.conftest import sample
from tests.sinks.metrics_api.ticks import device, of_deployment
from tests.sinks.records import ConsumedRecord, FakeGroup, encoded
from topics.attributed import TOPIC

NOWHERE = "127.0.0.1:1"
EVERYWHERE = Address("0.0.0.0", 8443)  # noqa: S104 - nobody listens there
SETTINGS = MetricsApiSettings(kafka=NOWHERE, cluster="c1", metrics_listen=Address("127.0.0.1", 0))


def test_every_error_of_the_settings_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    wrong = {
        "--serving-cert and --serving-key go together": {"serving_cert": file},
        "--client-ca: it is of no use without TLS": {"client_ca": file},
        "--client-names: it is of no use without --custom-metrics": {"client_names": ("a",)},
        "--metrics-listen: off is not possible": {"metrics_listen": None},
        "--metrics-listen: beyond loopback only with --client-ca or --client-token-file": {
            "metrics_listen": EVERYWHERE, "serving_cert": file, "serving_key": file,
        },
    }  # fmt: skip

    assert SETTINGS.errors() == []
    for expected, options in wrong.items():
        (error,) = replace(SETTINGS, **options).errors()  # type: ignore[arg-type]
        assert error.startswith(expected)
    assert len(replace(SETTINGS, metrics_listen=EVERYWHERE).errors()) == 2
    served = replace(SETTINGS, metrics_listen=EVERYWHERE, serving_cert=file, serving_key=file, client_ca=file)
    assert served.errors() == []


def record(
    seq: int, *devices: dict[str, Any], age_s: float = 0.0, logged_s: float = 0.0, **more: Any
) -> ConsumedRecord:
    """A record of a tick that was read so long ago, and logged so long ago."""
    now_ms = int(time.time() * 1000)
    tick = sample(seq, *devices, ts_ms=now_ms - int(age_s * 1000), **more)
    return ConsumedRecord(seq, encoded(tick), now_ms - int(logged_s * 1000), f"{tick.cluster}/{tick.node}".encode())


USED = device("GPU-a", of_deployment("p"), used=0.5)


@pytest.mark.parametrize(
    ("age_s", "logged_s", "status"), [(0, 0, 200), (29, 0, 200), (31, 0, 404), (-3600, 0, 200), (-3600, 31, 404)]
)
async def test_a_tick_that_comes_late_counts_only_while_it_is_not_too_old(
    age_s: float, logged_s: float, status: int
) -> None:
    sink, stop = MetricsApiSink(SETTINGS), asyncio.Event()
    running = asyncio.create_task(sink.run(stop))
    await eventually(lambda: sink.address, unless=running)
    sink.take(TOPIC.name, [record(1, USED, age_s=age_s, logged_s=logged_s)])

    url = "http://{}:{}/v1/workloads/ml/Deployment/infer".format(*sink.address or ())
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        assert answer.status == status
    assert sink.not_ready()
    stop.set()
    await running


@pytest.mark.parametrize(("age_s", "nodes"), [(0, 1), (31, 0)])
def test_what_comes_after_all_was_read_is_answered_although_the_brokers_clock_is_behind(
    age_s: float, nodes: int
) -> None:
    sink = MetricsApiSink(SETTINGS)
    sink.tail.read_to_end_s = time.monotonic()
    sink.take(TOPIC.name, [record(1, USED, age_s=age_s, logged_s=300)])
    sink._holdings.expire(time.monotonic())
    assert len(sink._holdings) == nodes


async def test_a_replica_that_starts_has_every_node_also_if_each_is_read_once_in_five_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the sum of a workload would be that of the few pods whose nodes were read in the last seconds."""
    start: dict[str, StartFrom] = {}

    def tail(_: Any, from_: dict[str, StartFrom], *__: Any, **___: Any) -> Any:
        start.update(from_)
        return SimpleNamespace(age_s=lambda age_s, _: age_s)

    monkeypatch.setattr("sinks.metrics_api.sink.Tail", tail)
    sink, log = MetricsApiSink(SETTINGS), []
    for offset, age_s in enumerate(range(3000, 0, -30)):  # ten nodes, one after the other
        node = {"node": f"n{offset % 10}", "interval_ms": 300_000}
        log.append(record(offset, USED, age_s=age_s, logged_s=age_s, **node)._replace(offset=offset))
    kafka: Any = FakeGroup(log)
    offset = await initial_offset(kafka.offsets_at, Partition(TOPIC.name, 0), start[TOPIC.name], 0, len(log))
    sink.take(TOPIC.name, log[offset:])
    sink._holdings.expire(time.monotonic())
    assert len(sink._holdings) == 10
    delays = {sample.name: sample.value for family in sink.registry.collect() for sample in family.samples}
    assert delays["gpustream_metrics_api_delay_seconds_sum"] < 31 * 900, "of what is answered, and not of the past"


def test_every_record_is_accounted_for() -> None:
    sink = MetricsApiSink(SETTINGS)
    first = record(1, USED)
    of_other_cluster = record(1, USED, cluster="c2")
    records = [
        first,
        first,
        of_other_cluster,
        first._replace(value=b"{"),
        of_other_cluster._replace(key=None),
        first._replace(value=None),
    ]
    sink.take(TOPIC.name, records)

    books = assert_accounted(sink.registry)["metrics_api", ""]
    assert books == {
        "received": 6,
        "records_delivered_total": 1,
        "records_duplicate_total": 1,
        "records_dropped_total": 4,
    }


async def test_without_a_way_to_the_api_server_it_does_not_start(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config"}))
    sink = MetricsApiSink(replace(SETTINGS, custom_metrics="a/b", kubeconfig=config))

    with pytest.raises(Exception, match="kubeconfig"):
        await sink.run(asyncio.Event())


async def test_while_the_api_server_is_away_it_can_be_stopped(tmp_path: Path) -> None:
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    content = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "clusters": [cluster]}
    content |= {"contexts": [context], "users": [{"name": "u", "user": {"token": "t"}}]}
    config = tmp_path / "config"
    config.write_text(json.dumps(content))
    sink, stop = MetricsApiSink(replace(SETTINGS, custom_metrics="a/b", kubeconfig=config)), asyncio.Event()
    running = asyncio.create_task(sink.run(stop))

    await eventually(lambda: "the API server" in str(sink.not_ready()), unless=running)
    stop.set()
    await running
