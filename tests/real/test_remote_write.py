"""The remote-write sink between a real Kafka and a real Prometheus in its default configuration."""

import asyncio
import contextlib
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiokafka import AIOKafkaConsumer

from delivery.clock import now_ms
from sinks.remote_write import send
from sinks.remote_write.sink import RemoteWriteSink
from tests.eventually import eventually
from tests.real.accounting import assert_accounted
from tests.real.pipeline import lag
from tests.real.remote_write_fleet import (
    PARTITIONS,
    SERIES,
    VALUES,
    Fleet,
    count,
    ends,
    expected,
    running,
    sink,
    write,
)
from tests.real.remote_write_process import MAX_REQUEST_SAMPLES
from tests.real.servers import KafkaServer, PrometheusServer

Forward = Callable[[], Awaitable[web.Response]]
Receive = Callable[[web.Request, Forward], Awaitable[web.StreamResponse]]

ALERT_PARTITIONS = 1
SAMPLES_WRITTEN = "X-Prometheus-Remote-Write-Samples-Written"


@pytest.fixture
def attributed(empty_kafka: KafkaServer) -> KafkaServer:
    """Kafka with the topics that the sink uses."""
    by_node = dict.fromkeys(("gpu.attributed", "gpu.usage"), PARTITIONS)
    empty_kafka.create_ours({**by_node, "gpu.alerts": ALERT_PARTITIONS, "gpu.dead-letters": 1})
    return empty_kafka


@asynccontextmanager
async def receiver(prometheus: PrometheusServer, receive: Receive) -> AsyncIterator[str]:
    """A receiver of the test's own, which may forward its requests to Prometheus; yields its address."""
    async with aiohttp.ClientSession() as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.read()

            async def forward() -> web.Response:
                headers = {name: request.headers[name] for name in request.headers if name != "Host"}
                async with session.post(prometheus.write_url, data=body, headers=headers) as answer:
                    counted = (
                        {SAMPLES_WRITTEN: answer.headers[SAMPLES_WRITTEN]} if SAMPLES_WRITTEN in answer.headers else {}
                    )
                    return web.Response(status=answer.status, text=await answer.text(), headers=counted)

            return await receive(request, forward)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/write", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/write"
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("protocol", ["1.0", "2.0", "auto"])
async def test_every_sample_is_stored_once_with_its_timestamp(
    attributed: KafkaServer, prometheus: PrometheusServer, protocol: str
) -> None:
    fleet, outcome_counts = Fleet(), Counter[tuple[Any, ...]]()
    records = fleet.history(now_ms(), 40, 5)
    await write(attributed, records)
    outcomes = lambda *outcome_key: outcome_counts.update([outcome_key])  # noqa: E731
    sink_ = sink(attributed, prometheus.write_url, protocol=protocol, on_outcome=outcomes)
    async with running(sink_):
        await eventually(lambda: sum(ends(sink_).values()) == 200, "200 records finished")
    assert ends(sink_) == {"delivered": 200}
    assert_accounted(sink_.registry)
    assert count(sink_, "values_delivered_total") == 200 * VALUES
    assert await fleet.stored(prometheus, "gpu_utilization") == expected(records)
    zeros = await fleet.stored(prometheus, "gpu_temperature")
    assert [value for points in zeros.values() for _, value in points] == [0.0] * 200
    assert await fleet.stored(prometheus, "gpu_power_draw") == {}
    assert outcome_counts == Counter(
        (fleet.cluster, record["node"], 1, record["seq"], "delivered") for record in records
    )


@pytest.mark.parametrize("protocol", ["1.0", "2.0"])
async def test_a_kill_between_an_accepted_write_and_its_commit_loses_and_repeats_nothing(
    attributed: KafkaServer, prometheus: PrometheusServer, protocol: str
) -> None:
    fleet = Fleet()
    records = fleet.history(now_ms(), 30, 5)
    await write(attributed, records)
    accepted = 0
    process: asyncio.subprocess.Process | None = None

    async def accept_then_kill(_: web.Request, forward: Forward) -> web.StreamResponse:
        nonlocal accepted
        answer = await forward()
        accepted += 1
        if accepted >= 2 and process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return answer

    async with receiver(prometheus, accept_then_kill) as url:
        for _ in range(2):
            accepted = 0
            process = await start(attributed, url, protocol)
            try:
                assert await asyncio.wait_for(process.wait(), 300) == -signal.SIGKILL
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process = None
        options = {"instance_id": "only", "session_timeout_s": 6.0, "max_request_samples": MAX_REQUEST_SAMPLES}
        last = sink(attributed, url, protocol=protocol, **options)
        async with running(last):
            await eventually(lambda: caught_up(attributed), "the rest delivered")
    assert set(ends(last)) == {"delivered"}
    assert await fleet.stored(prometheus, "gpu_utilization") == expected(records)


async def test_with_a_resolution_each_window_is_stored_once_with_its_last_and_highest_value_whoever_writes_it(
    attributed: KafkaServer, prometheus: PrometheusServer
) -> None:
    fleet, nodes, window_ms = Fleet(), 5, 5_000
    records = fleet.history(now_ms(), 40, nodes)
    for record in records:
        record["devices"][0]["metrics"]["power_watts"] = 900.0 if record["seq"] == 17 else 100.0
    windows = {(record["node"], record["ts_ms"] // window_ms): record for record in records}  # the last of each
    spikes = {record["ts_ms"] // window_ms for record in records if record["seq"] == 17}
    first_part, rest = records[: 18 * nodes], records[18 * nodes :]  # cut within a window
    settings = {"protocol": "auto", "resolution_s": window_ms / 1000, "aggregate": ("max",)}

    await write(attributed, first_part)
    first = sink(attributed, prometheus.write_url, **settings)
    async with running(first):
        await eventually(
            lambda: count(first, "records_read_total") == len(first_part) and ends(first), "windows written"
        )
    await write(attributed, rest)
    second = sink(attributed, prometheus.write_url, stale_after_s=2.0, **settings)
    series = SERIES + 1 + 4  # with the power, and the highest of each gauge
    async with running(second):
        await eventually(lambda: count(second, "markers_total") == nodes * series, "all windows and series ended")

    assert_accounted(second.registry)
    assert await fleet.stored(prometheus, "gpu_utilization") == expected(windows.values())
    highest = await fleet.stored(prometheus, "gpu_power_draw_max")
    assert [(at_ms, value) for at_ms, value in highest["node-0 pod-0"]] == [
        (record["ts_ms"], 900.0 if bucket in spikes else 100.0)
        for (node, bucket), record in windows.items()
        if node == "node-0"
    ]


async def start(kafka: KafkaServer, url: str, protocol: str) -> asyncio.subprocess.Process:
    """A sink in a process of its own."""
    arguments = ("-m", "tests.real.remote_write_process", kafka.address, url, protocol)
    return await asyncio.create_subprocess_exec(sys.executable, *arguments)


async def caught_up(kafka: KafkaServer) -> bool:
    """Whether the group of the sink has committed all there is."""
    return await lag(kafka.address, "gpustream-sink-remote-write", ["gpu.attributed"]) == 0


@pytest.mark.parametrize("protocol", ["1.0", "2.0"])
async def test_requests_of_several_ticks_of_a_node_whose_answers_are_lost_lose_nothing_and_count_as_delivered(
    attributed: KafkaServer, prometheus: PrometheusServer, protocol: str
) -> None:
    fleet, largest, lost = Fleet(), 0, set[bytes]()
    records = fleet.history(now_ms(), 40, 4)
    await write(attributed, records)

    async def lose_first_answers(request: web.Request, forward: Forward) -> web.StreamResponse:
        nonlocal largest
        body, answer = await request.read(), await forward()
        if answer.status < 300:
            largest = max(largest, int(answer.headers.get(SAMPLES_WRITTEN, 0)))
            if len(lost) < 10 and body not in lost and request.transport is not None:
                lost.add(body)
                request.transport.abort()
        return answer

    async with receiver(prometheus, lose_first_answers) as url:
        sink_ = sink(attributed, url, protocol=protocol)
        async with running(sink_):
            await eventually(lambda: sum(ends(sink_).values()) == 160, "160 records finished")
    assert ends(sink_) == {"delivered": 160}
    assert count(sink_, "values_delivered_total") == 160 * VALUES
    assert protocol == "1.0" or largest > 4 * SERIES, "requests had several ticks of a node"
    refused = {"protocol": protocol, "result": "refused"}
    assert (sink_.registry.get_sample_value("gpustream_remote_write_requests_total", refused) or 0) > 0
    assert await fleet.stored(prometheus, "gpu_utilization") == expected(records)


async def test_a_receiver_that_says_204_to_2_0_and_stores_nothing_gets_1_0(
    attributed: KafkaServer, prometheus: PrometheusServer
) -> None:
    fleet = Fleet()
    records = fleet.history(now_ms(), 20, 4)
    await write(attributed, records)

    async def only_1_0(request: web.Request, forward: Forward) -> web.StreamResponse:
        if request.headers["X-Prometheus-Remote-Write-Version"] == "2.0.0":
            return web.Response(status=204)
        return await forward()

    async with receiver(prometheus, only_1_0) as url:
        sink_ = sink(attributed, url, protocol="auto")
        async with running(sink_):
            await eventually(lambda: ends(sink_) == {"delivered": 80}, "80 records delivered")
    assert await fleet.stored(prometheus, "gpu_utilization") == expected(records)


async def test_an_explicit_2_0_waits_where_only_1_0_is_spoken(
    attributed: KafkaServer, prometheus: PrometheusServer
) -> None:
    fleet, requests = Fleet(), 0
    await write(attributed, fleet.history(now_ms(), 2, 1))

    async def no_2_0(_: web.Request, __: Forward) -> web.StreamResponse:
        nonlocal requests
        requests += 1
        return web.Response(status=204)

    async with receiver(prometheus, no_2_0) as url:
        sink_ = sink(attributed, url, protocol="2.0")
        async with running(sink_):
            refuses = "the receiver does not accept: it refuses everything: HTTP 204"
            await eventually(
                lambda: requests > 0 and [reason.startswith(refuses) for reason in sink_.not_ready()] == [True]
            )
            assert "use --protocol auto or 1.0" in sink_.not_ready()[0]
    assert ends(sink_) == {}
    assert_accounted(sink_.registry)


async def test_an_outage_of_the_receiver_is_waited_for(
    attributed: KafkaServer, prometheus: PrometheusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "_BACKOFF_MAX_S", 0.2)
    fleet, requests = Fleet(), 0
    records = fleet.history(now_ms(), 20, 4)
    await write(attributed, records)

    async def comes_back(_: web.Request, forward: Forward) -> web.StreamResponse:
        nonlocal requests
        requests += 1
        if requests < 12:
            return web.Response(status=503) if requests % 2 else await forward() and web.Response(status=502)
        return await forward()

    async with receiver(prometheus, comes_back) as url:
        sink_ = sink(attributed, url)
        async with running(sink_):
            await eventually(lambda: ends(sink_) == {"delivered": 80}, "80 records delivered")
    assert await fleet.stored(prometheus, "gpu_utilization") == expected(records)


async def test_a_pod_that_ends_and_a_node_that_goes_silent_get_staleness_markers(
    attributed: KafkaServer, prometheus: PrometheusServer
) -> None:
    fleet, start_ms = Fleet(), now_ms() - 20_000
    ticks = [
        fleet.tick(0, 1, start_ms, "before"),
        fleet.tick(1, 1, start_ms, "silent"),
        fleet.tick(0, 2, start_ms + 1000, "after"),
    ]
    await write(attributed, ticks)
    sink_ = sink(attributed, prometheus.write_url, stale_after_s=3.0)
    async with running(sink_):
        await eventually(lambda: ends(sink_) == {"delivered": 3}, "three ticks delivered")
        assert await fleet.now(prometheus, "gpu_utilization", start_ms + 500) == {
            "node-0 before": 0.001,
            "node-1 silent": 0.001,
        }
        assert "node-0 before" not in await fleet.now(prometheus, "gpu_utilization", start_ms + 1000)
        await eventually(lambda: count(sink_, "markers_total") == 3 * SERIES, "silent nodes ended")
        assert await fleet.now(prometheus, "gpu_utilization", start_ms + 5000) == {}
        late_tick = fleet.tick(1, 2, start_ms + 2000, "silent")
        await write(attributed, [late_tick])
        await eventually(lambda: ends(sink_) == {"delivered": 4}, "late data still fits")
    assert await fleet.stored(prometheus, "gpu_utilization") == expected([*ticks, late_tick])


async def test_a_restarted_sink_ends_the_series_that_its_last_life_opened(
    attributed: KafkaServer, prometheus: PrometheusServer
) -> None:
    fleet, start_ms = Fleet(), now_ms() - 20_000
    await write(attributed, [fleet.tick(0, 1, start_ms, "before")])
    first = sink(attributed, prometheus.write_url)
    async with running(first):
        await eventually(lambda: ends(first) == {"delivered": 1}, "the first tick delivered")
    await write(attributed, [fleet.tick(0, 1, start_ms, "before"), fleet.tick(0, 2, start_ms + 1000, "after")])
    second = sink(attributed, prometheus.write_url)
    async with running(second):
        await eventually(lambda: ends(second) == {"delivered": 1, "duplicate": 1}, "a replay and the next tick")
    assert await fleet.now(prometheus, "gpu_utilization", start_ms + 1500) == {"node-0 after": 0.002}


@pytest.mark.parametrize("protocol", ["1.0", "2.0"])
async def test_a_node_far_ahead_and_one_behind_cost_the_others_nothing(
    attributed: KafkaServer, prometheus: PrometheusServer, protocol: str
) -> None:
    fleet, at_ms = Fleet(), now_ms()
    good = fleet.history(at_ms, 10, 9)
    ahead = [fleet.tick(9, seq, at_ms + 3_600_000 + seq * 1000) for seq in range(1, 4)]
    behind = [fleet.tick(0, 11, at_ms - 5_000, "pod-0")]
    await write(attributed, [*good[:45], *ahead, *good[45:], *behind, b"{nonsense"])
    sink_ = sink(attributed, prometheus.write_url, protocol=protocol)
    async with running(sink_):
        await eventually(lambda: sum(ends(sink_).values()) == 95, "95 records finished")
    assert ends(sink_) == {"delivered": 90, "dead_lettered": 4, "dropped": 1}
    assert (
        sink_.registry.get_sample_value("gpustream_remote_write_records_dropped_total", {"reason": "out_of_order"}) == 1
    )
    assert await fleet.stored(prometheus, "gpu_utilization") == expected(good)
    errors = [dict(letter.headers)["error"].decode() for letter in await dead_letters(attributed, 4)]
    assert sorted(error.split(":")[0] for error in errors) == ["not a record of gpu.attributed", *["too_far_ahead"] * 3]


async def dead_letters(kafka: KafkaServer, expected_count: int) -> list[Any]:
    """Reads so many dead letters."""
    async with AIOKafkaConsumer(
        "gpu.dead-letters", bootstrap_servers=kafka.address, auto_offset_reset="earliest"
    ) as consumer:
        return [await asyncio.wait_for(consumer.getone(), 120) for _ in range(expected_count)]


async def test_members_that_come_and_go_lose_and_repeat_nothing(
    attributed: KafkaServer, prometheus: PrometheusServer
) -> None:
    fleet, at_ms = Fleet(), now_ms()
    records = fleet.history(at_ms, 90, 6)
    stays = sink(attributed, prometheus.write_url, session_timeout_s=6.0)
    async with running(stays):
        members = [stays]
        for part in range(3):
            other = sink(attributed, prometheus.write_url, session_timeout_s=6.0)
            members.append(other)
            async with running(other):
                await write(attributed, records[part * 180 : part * 180 + 180])
                await eventually(
                    lambda: all(count(member, "partitions") for member in members[-1:]), "the member has partitions"
                )
        await eventually(lambda: sum(ends(member).get("delivered", 0) for member in members) >= 540, "all delivered")
    for member in members:
        assert_accounted(member.registry)
    assert all(set(ends(member)) <= {"delivered", "duplicate"} for member in members)
    assert await fleet.stored(prometheus, "gpu_utilization") == expected(records)


def has_delivered(sink_: RemoteWriteSink, least: int) -> bool:
    return ends(sink_).get("delivered", 0) >= least


async def test_a_sink_that_is_restarted_with_other_options_loses_no_tick_and_series_of_other_labels_linger(
    attributed: KafkaServer, prometheus: PrometheusServer
) -> None:
    fleet, start_ms = Fleet(), now_ms() - 120_000
    lives: list[dict[str, Any]] = [
        {"protocol": "auto"},
        {"protocol": "1.0", "resolution_s": 5.0},
        {"protocol": "auto", "resolution_s": 7.0, "aggregate": ("max",)},
        {"names": ("otel", "dcgm")},
        {"external_labels": (("env", "lab"),)},
    ]
    delivered = 0
    for number, options in enumerate(lives, 1):
        seqs = range(10 * number - 9, 10 * number + 1)
        await write(attributed, [fleet.tick(0, seq, start_ms + 1000 * seq) for seq in seqs])
        sink_ = sink(attributed, prometheus.write_url, **options)
        least = seqs[0 if "resolution_s" in options else -1] - delivered  # an open window is left to the next life
        async with running(sink_):
            await eventually(partial(has_delivered, sink_, least), f"{least} ticks delivered")
        delivered += ends(sink_)["delivered"]
        assert ends(sink_).keys() == {"delivered"}
        assert_accounted(sink_.registry)
    assert delivered == 10 * len(lives)
    query = f'gpu_utilization{{k8s_cluster_name="{fleet.cluster}"}}'
    series_list = await asyncio.to_thread(prometheus.query, query, start_ms + 1000 * delivered)
    assert {series.labels.get("env"): series.value for series in series_list} == {None: 0.04, "lab": 0.05}
