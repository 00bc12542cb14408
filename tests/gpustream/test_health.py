"""What a process says of itself over HTTP."""

import socket

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from gpustream.health import Health, ListenError, listening
from gpustream.values import Address
from tests.gpustream.fakes import INSTRUMENTS
from topics.instruments import Instruments


def _health(*reasons: str) -> Health:
    one, other = Instruments(INSTRUMENTS), Instruments(INSTRUMENTS)
    one.counter("gpustream_fake_steps_total", "a").inc()
    other.counter("gpustream_fake_steps_total", "b").inc(2)
    return Health([one.registry, other.registry], lambda: list(reasons))


def test_a_metric_of_two_components_is_one_family_with_the_samples_of_both() -> None:
    text = _health().metrics().decode()

    families = {family.name: family for family in text_string_to_metric_families(text)}
    steps = families["gpustream_fake_steps"].samples
    assert {(s.labels["kind"], s.value) for s in steps} == {("a", 1.0), ("b", 2.0)}
    assert text.count("# TYPE gpustream_fake_steps_total") == 1


def test_the_process_tells_its_version_readiness_and_memory() -> None:
    families = {f.name: f for f in text_string_to_metric_families(_health("starting").metrics().decode())}

    assert families["gpustream_build_info"].samples[0].labels == {"version": "0.1.0"}
    assert families["gpustream_ready"].samples[0].value == 0.0
    assert families["process_resident_memory_bytes"].samples[0].value > 0


async def test_not_ready_is_503_with_the_reasons() -> None:
    async with TestClient(TestServer(_health("fake: no assignment yet").application())) as client:
        answer = await client.get("/readyz")

        assert (answer.status, await answer.text()) == (503, "fake: no assignment yet\n")


async def test_ready_and_alive_are_200() -> None:
    async with TestClient(TestServer(_health().application())) as client:
        assert (await client.get("/readyz")).status == 200
        assert (await client.get("/healthz")).status == 200
        metrics = await client.get("/metrics")
        assert metrics.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_listening_on_port_0_tells_the_port() -> None:
    async with listening(_health().application(), Address("127.0.0.1", 0)) as address:
        assert address is not None
        assert address.port > 0


async def test_off_listens_nowhere() -> None:
    async with listening(_health().application(), None) as address:
        assert address is None


async def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=rf"can't listen on 127\.0\.0\.1:{port}: .*in use"):
            async with listening(_health().application(), Address("127.0.0.1", port)):
                pass
