"""When a counter began, as Prometheus reads it: with its feature on, it puts a zero there."""

import asyncio
import time
from pathlib import Path

from delivery.instruments import Instruments
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.refusals import Deliverer
from sinks.remote_write.send import Client, RemoteWriteSender
from sinks.remote_write.sink import INSTRUMENTS
from sinks.series.cache import Cache
from sinks.series.translation import Translator
from tests.real.conftest import need
from tests.real.servers import PrometheusServer, find_prometheus
from tests.sinks.conftest import sample
from topics.profiles import PROFILES

ZEROS = ("--enable-feature=created-timestamp-zero-ingestion",)


async def test_prometheus_learns_from_2_0_when_the_counters_of_xid_errors_began(tmp_path: Path) -> None:
    need(find_prometheus)
    now_ms = int(time.time() * 1000)
    start_ms = now_ms - 60_000
    gpu = {"uuid": "GPU-a", "index": 0, "metrics": {"energy_joules_total": 5, "power_watts": 1}, "xids": {"79": 3}}
    tick = sample(1, gpu, run_id=start_ms, ts_ms=now_ms)
    _, groups = Translator([PROFILES["otel"]]).translate(tick, Cache())
    instruments = Instruments(INSTRUMENTS)
    with PrometheusServer(tmp_path, options=ZEROS) as prometheus:
        client = Client(RemoteWriteSettings(kafka="none", url=prometheus.write_url, protocol="2.0"))
        sender = RemoteWriteSender(client.post, "2.0", instruments)
        (delivered,) = await Deliverer(sender, instruments).deliver([groups], asyncio.Event())
        await client.close()
        series = prometheus.query('{__name__=~"gpu_.+"}[5m]', now_ms + 1)

    assert not delivered.refused
    assert {counter_series.labels["__name__"]: counter_series.points for counter_series in series} == {
        "gpu_energy_consumption": [(now_ms, 5000.0)],
        "gpu_holders": [(now_ms, 0.0)],
        "gpu_power_draw": [(now_ms, 1.0)],
        "gpu_xid_errors": [(start_ms, 0.0), (now_ms, 3.0)],
        "gpu_xid_errors_total": [(start_ms, 0.0), (now_ms, 3.0)],
    }
