"""Components and a Prometheus are asked over HTTP; whatever they answer, the doctor goes on."""

import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from delivery.connection import Connection
from delivery.kafka_admin import BrokerError
from gpustream import history
from gpustream.doctor import brokers, checks
from gpustream.doctor.evidence import NodeName
from gpustream.doctor.gather import Scope, gather, query_components, query_prometheus
from gpustream.doctor.situation import Kafka

METRICS = 'x_total{reason="a"} 2.0\nprocess_start_time_seconds 5.0\n'


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    """A component that is not ready, and a Prometheus."""

    async def query(_: web.Request) -> web.Response:
        rows = [
            {"metric": {"k8s_cluster_name": "c", "k8s_node_name": "n", "cluster": "other"}, "value": [0, "1.5"]},
            {"metric": {"cluster": "c", "hostname": "m"}, "value": [0, "2"]},
            {"metric": {"cluster": "c", "node": "m"}, "value": [0, "3"]},
        ]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": rows}})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="no topic\nno broker\n", status=503)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/readyz", readyz), web.get("/api/v1/query", query)])
    running = TestServer(app)
    await running.start_server()
    yield running
    await running.close()


async def test_a_component_says_its_metrics_and_why_it_is_not_ready(server: TestServer) -> None:
    first, second = await query_components([str(server.make_url("/metrics")), str(server.make_url("/"))])

    assert first == second
    assert first.sums("_total") == {("x_total", "a"): 2.0}
    assert first.since(65_000) == "since its start 1m ago"
    assert first.not_ready == "no topic; no broker"


async def test_the_newest_sample_of_each_node_is_found_by_any_profiles_labels(server: TestServer) -> None:
    prometheus = await query_prometheus(str(server.make_url("/")))

    assert prometheus.newest_ms == {NodeName("c", "n"): 1500, NodeName("c", "m"): 3000}


async def test_the_newest_sample_is_found_where_a_file_of_counters_leaves_out_gpu_info() -> None:
    series = {"DCGM_FI_DEV_XID_ERRORS": {"n"}, "DCGM_FI_DEV_GPU_UTIL": {"n", "m"}}

    async def query(request: web.Request) -> web.Response:
        expression = request.query["query"]
        if "__name__" in expression:
            rows = [({"__name__": name}, str(len(nodes))) for name, nodes in series.items()]
        else:
            selected = next((nodes for name, nodes in series.items() if f"timestamp({name})" in expression), ())
            rows = [({"cluster": "c", "hostname": node}, "2") for node in selected]
        result = [{"metric": labels, "value": [0, value]} for labels, value in rows]
        return web.json_response({"status": "success", "data": {"resultType": "vector", "result": result}})

    app = web.Application()
    app.router.add_get("/api/v1/query", query)
    async with TestServer(app) as prometheus:
        found = await query_prometheus(str(prometheus.make_url("/")))
    assert found.newest_ms == {NodeName("c", "n"): 2000, NodeName("c", "m"): 2000}


async def test_what_does_not_answer_is_said_and_no_password_is(server: TestServer, unused_tcp_port: int) -> None:
    away = f"http://user:secret@127.0.0.1:{unused_tcp_port}"
    (component,), prometheus = await query_components([away]), await query_prometheus(f"{server.make_url('/x')}")

    assert component.error
    assert prometheus.error
    assert "secret" not in repr((component, await query_prometheus(away)))


async def test_a_proxy_that_can_not_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://user:secret@proxy.example:1080")
    (component,), prometheus = await query_components(["http://a.example"]), await query_prometheus("http://b.example")

    for error in (component.error, prometheus.error):
        assert "HTTP_PROXY names a socks5 proxy" in error
        assert "secret" not in error


async def test_values_that_are_no_numbers_are_left_out() -> None:
    names = "gpustream_node_kubelet_age_seconds", "process_start_time_seconds", 'x_records_dropped_total{reason="a"}'

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="".join(f"{name} {value}\n" for name in names for value in ("NaN", "+Inf")))

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/readyz", metrics)])
    async with TestServer(app) as odd:
        (component,) = await query_components([str(odd.make_url("/"))])
    assert component.series == []
    assert component.error == ""


@pytest.mark.parametrize("text", ['a{b="c", ="d"} 2', "<style>p { color: red, = }</style>", 'a{b="', "a b c d"])
async def test_an_address_that_answers_no_metrics_does_not_end_the_doctor(text: str) -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/readyz", metrics)])
    async with TestServer(app) as odd:
        (component,) = await query_components([str(odd.make_url("/"))])
    assert component.error


@pytest.mark.parametrize(
    "data",
    [
        {"result": [], "groups": None},
        {"result": [], "groups": [{"name": "x", "rules": None}]},
        {"result": [{"metric": {}, "value": []}]},
        {"result": [{"metric": {}, "value": [0, "+Inf"]}]},
        {"result": [], "groups": ["x"]},
        {"result": [], "groups": [{"rules": ["x"]}]},
        {"result": None},
        None,
    ],
)
async def test_what_prometheus_answers_does_not_end_the_doctor(data: object) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"status": "success", "data": data})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as odd:
        prometheus = await query_prometheus(str(odd.make_url("/")))
    assert prometheus.newest_ms == {}
    assert prometheus.broken_rules == {}


async def test_a_component_that_hangs_does_not_make_this_machines_clock_look_behind(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records come while it is waited for: now is when they are read."""
    answered_ms = 0

    async def inspect(connection: Connection) -> Kafka:
        nonlocal answered_ms
        await query_components([str(server.make_url("/"))])
        answered_ms = time.time_ns() // 1_000_000
        return Kafka("k:9092", "User:x", error="no Kafka broker answers at k:9092")

    monkeypatch.setattr(brokers, "inspect", inspect)
    assert (await gather(Connection("k:9092"), Scope(60.0))).now_ms >= answered_ms > 0


async def test_a_kafka_that_stops_answering_while_it_is_read_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inspect(_: Connection) -> Kafka:
        return Kafka("k:9092", "User:x")

    def opened(*_: object, **__: object) -> None:
        raise BrokerError("no record for 30 s")

    monkeypatch.setattr(brokers, "inspect", inspect)
    monkeypatch.setattr(history, "opened", opened)
    found = checks.run(await gather(Connection("k:9092"), Scope(60.0)))

    assert [finding.cause for finding in found["broker"].findings] == ["no record for 30 s"]
