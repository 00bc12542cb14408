"""Nodes whose clocks are wrong, through attribution and remote write into a Prometheus in its default configuration.

A clock that is wrong costs its own node what Prometheus does not take, the metrics say just that, and no other node
loses a tick. A tick is known by its value, which no other tick of its node has.
"""

import time
from collections import Counter
from collections.abc import Callable

from aiokafka import AIOKafkaProducer

from delivery import topic_admin
from producers.records import Numbering
from sinks.outcomes import Outcome
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.sink import RemoteWriteSink
from streams.attribution.component import Attribution
from streams.settings import AttributionSettings
from tests.eventually import eventually
from tests.real.accounting import assert_accounted
from tests.real.pipeline import read_all, running
from tests.real.servers import KafkaServer, PrometheusServer
from topics.topic import node_key

TICKS, EVERY_S = 40, 5
SET, SET_RIGHT = 10, 20
CLUSTER = "clocks"
WRONG_CLOCKS: dict[str, Callable[[int], int]] = {
    "right": lambda _: 0,
    "ahead-61s": lambda tick: 61 if SET <= tick < SET_RIGHT else 0,
    "ahead-9m": lambda tick: 540 if SET <= tick < SET_RIGHT else 0,
    "ahead-2h": lambda tick: 7200 if SET <= tick < SET_RIGHT else 0,
    "back-61s": lambda tick: -61 if tick >= SET else 0,
    "back-9m": lambda tick: -540 if tick >= SET else 0,
    "back-2h": lambda tick: -7200 if tick >= SET else 0,
    "still": lambda tick: (SET - 1 - tick) * EVERY_S if SET <= tick < SET_RIGHT else 0,
}
"""By how many seconds a node's clock is wrong at each of its ticks."""

Fate = tuple[Outcome, str]
"""What becomes of a tick, and why."""


def times_ms(node: str, start_ms: int) -> list[int]:
    """The times of a node's ticks, by its own clock."""
    return [start_ms + (tick * EVERY_S + WRONG_CLOCKS[node](tick)) * 1000 for tick in range(TICKS)]


def fates(times: list[int], now_ms: int) -> list[Fate]:
    """The outcome of a node's ticks in a Prometheus without an out-of-order window: it refuses what is not newer."""
    newest_ms, expected_fates = 0, list[Fate]()
    for ts_ms in times:
        if ts_ms > now_ms + 600_000:
            expected_fates.append(("dead_lettered", "too_far_ahead"))
        elif ts_ms == newest_ms:
            expected_fates.append(("delivered", "duplicate"))  # what has not changed is there, what has is missing
        elif ts_ms < newest_ms:
            expected_fates.append(("dropped", "too_old" if newest_ms - ts_ms > 3_600_000 else "out_of_order"))
        else:
            newest_ms = ts_ms
            expected_fates.append(("delivered", ""))
    return expected_fates


async def write(kafka: KafkaServer, start_ms: int) -> None:
    """The ticks of all nodes, as their producers number them."""
    numbering = {node: Numbering(cluster=CLUSTER, node=node, run_id=start_ms) for node in WRONG_CLOCKS}
    times = {node: times_ms(node, start_ms) for node in WRONG_CLOCKS}
    async with AIOKafkaProducer(bootstrap_servers=kafka.address) as producer:
        for tick in range(TICKS):
            metrics = {"gpu_utilization_ratio": tick / 1000, "memory_total_bytes": 80 << 30}
            for node in WRONG_CLOCKS:
                numbered = numbering[node].step(
                    times[node][tick], [{"uuid": "GPU-0", "index": 0, "metrics": metrics}], None
                )
                await producer.send("gpu.samples", numbered.value, key=node_key(CLUSTER, node))


async def test_a_wrong_clock_costs_its_own_node_what_prometheus_refuses_and_no_other_node_anything(
    empty_kafka: KafkaServer, start_prometheus: Callable[..., PrometheusServer]
) -> None:
    prometheus = start_prometheus()
    await topic_admin.create(empty_kafka.connection, partitions=3, replication_factor=1)
    now_ms = int(time.time() * 1000)
    start_ms = now_ms - TICKS * EVERY_S * 1000
    await write(empty_kafka, start_ms)
    outcomes: dict[str, Counter[str]] = {node: Counter() for node in WRONG_CLOCKS}
    settings = RemoteWriteSettings(kafka=empty_kafka.address, url=prometheus.write_url, from_="earliest")
    sink = RemoteWriteSink(settings, lambda _c, node, _run, _seq, outcome: outcomes[node].update([outcome]))
    stream = Attribution(AttributionSettings(kafka=empty_kafka.address))
    expected = {node: fates(times_ms(node, start_ms), now_ms) for node in WRONG_CLOCKS}

    def finished() -> bool:
        assert_accounted(sink.registry)
        assert_accounted(stream.registry)
        return sum(ends.total() for ends in outcomes.values()) == TICKS * len(WRONG_CLOCKS)

    async with running(stream, sink):
        await eventually(finished, "all ticks have ended")

    assert {node: dict(ends) for node, ends in outcomes.items()} == {
        node: Counter(outcome for outcome, _ in ends) for node, ends in expected.items()
    }
    assert outcomes["right"] == {"delivered": TICKS}
    stored = {node: set[float]() for node in WRONG_CLOCKS}
    query = f'gpu_utilization{{k8s_cluster_name="{CLUSTER}"}}[1h]'
    for series in prometheus.query(query, now_ms + 1_200_000):
        stored[series.labels["k8s_node_name"]] |= {value for _, value in series.points}
    assert stored == {
        node: {tick / 1000 for tick, fate in enumerate(ends) if fate == ("delivered", "")}
        for node, ends in expected.items()
    }
    missing = Counter(reason for ends in expected.values() for _, reason in ends if reason)
    values = {reason: count * (1 if reason == "duplicate" else 2) for reason, count in missing.items()}
    counted = {
        sample.labels["reason"]: int(sample.value)
        for metric in sink.registry.collect()
        for sample in metric.samples
        if sample.name == "gpustream_remote_write_values_refused_total"
    }
    assert counted == values
    value, delay = sink.registry.get_sample_value, "gpustream_remote_write_delay_seconds"
    assert value(f"{delay}_count") == sum(ends["delivered"] for ends in outcomes.values())
    assert value(f"{delay}_bucket", {"le": "0.02"}) == SET_RIGHT - SET  # of ahead-9m: no time is negative
    letters = await read_all(empty_kafka.address, "gpu.dead-letters")
    assert {letter.key for letter in letters} == {node_key(CLUSTER, "ahead-2h")}
    assert len(letters) == missing["too_far_ahead"]
