"""What a process says of itself over HTTP."""

import asyncio
import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from delivery.instruments import Instruments
from delivery.values import Address
from gpustream import health as module
from gpustream.health import Health, ListenError, listening
from tests.eventually import LIMIT_S, eventually
from tests.gpustream.fakes import INSTRUMENTS
from tests.real.faults import no_descriptors
from tests.real.pipeline import Gpustream

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

ANYWHERE = Address("127.0.0.1", 0)


class Answer(NamedTuple):
    """What a path answered."""

    status: int
    text: str
    content_type: str


def _health(*reasons: str) -> Health:
    first, second = Instruments(INSTRUMENTS), Instruments(INSTRUMENTS)
    first.counter("gpustream_fake_steps_total", "a").inc()
    second.counter("gpustream_fake_steps_total", "b").inc(2)
    return Health([first.registry, second.registry], lambda: list(reasons))


@asynccontextmanager
async def _served(health: Health) -> AsyncIterator[Address]:
    async with listening(health.answer, ANYWHERE) as address:
        assert address is not None
        yield address


def _ask(address: Address, path: str, accept: str = "*/*") -> Answer:
    request = urllib.request.Request(f"http://{address}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310 - http, as written above
            return Answer(answer.status, answer.read().decode(), answer.headers["Content-Type"])
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode(), error.headers["Content-Type"])


async def _get(health: Health, path: str, accept: str = "*/*") -> Answer:
    async with _served(health) as address:
        return await asyncio.to_thread(_ask, address, path, accept)


async def test_a_metric_of_two_components_is_one_family_with_the_samples_of_both() -> None:
    answer = await _get(_health(), "/metrics")

    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    steps = families["gpustream_fake_steps"].samples
    assert {(s.labels["kind"], s.value) for s in steps} == {("a", 1.0), ("b", 2.0)}
    assert answer.text.count("# TYPE gpustream_fake_steps_total") == 1
    assert answer.content_type.startswith("text/plain")


async def test_the_process_says_its_version_readiness_and_memory() -> None:
    answer = await _get(_health("starting"), "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}

    assert families["gpustream_build_info"].samples[0].labels == {"version": "0.1.0"}
    assert families["gpustream_ready"].samples[0].value == 0.0
    assert families["process_resident_memory_bytes"].samples[0].value > 0


async def test_who_asks_for_openmetrics_gets_it() -> None:
    answer = await _get(_health(), "/metrics", "application/openmetrics-text; version=1.0.0")

    assert answer.content_type.startswith("application/openmetrics-text")
    assert "gpustream_fake_steps" in {family.name for family in openmetrics(answer.text)}  # type: ignore[no-untyped-call]


async def test_names_in_the_query_pick_samples() -> None:
    answer = await _get(_health(), "/metrics?name[]=gpustream_ready&name[]=gpustream_fake_steps_total&name[]=none")

    families = list(text_string_to_metric_families(answer.text))
    assert answer.status == 200
    assert {family.name for family in families} == {"gpustream_ready", "gpustream_fake_steps"}
    assert sum(len(family.samples) for family in families) == 3


@pytest.mark.parametrize(
    "query", ["name[]=x", "name[]=", "name[]=%ff%00", "name[]", "%", "&&;=&=", "a" * 5000, "name[]=\u00e9"]
)
@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
async def test_no_query_is_an_error(path: str, query: str) -> None:
    answer = await _get(_health(), f"{path}?{quote(query, safe='%[]=&;')}")

    assert answer.status == 200


@pytest.mark.parametrize(
    "accept",
    ["nonsense", "application/openmetrics-text;version=banana", ";q=;;,", "text/plain;version=;escaping=no", ","],
)
async def test_no_accept_header_is_an_error(accept: str) -> None:
    answer = await _get(_health(), "/metrics?name[]=gpustream_ready", accept)

    assert (answer.status, "gpustream_ready 1.0" in answer.text) == (200, True)


async def _raw(address: Address, request: str) -> tuple[bytes, bytes]:
    """The head and the body of what a request of these lines is answered."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write("".join(f"{line}\r\n" for line in (*request.splitlines(), "Host: x", "")).encode())
    head, _, body = (await asyncio.wait_for(reader.read(), LIMIT_S)).partition(b"\r\n\r\n")
    writer.close()
    return head, body


@pytest.mark.parametrize("path", ["/metrics?name[]=gpustream_ready", "/healthz", "/readyz", "/elsewhere"])
async def test_head_is_answered_as_get_without_the_body(path: str) -> None:
    async with _served(_health("starting")) as address:
        got, asked = await _raw(address, f"GET {path} HTTP/1.1"), await _raw(address, f"HEAD {path} HTTP/1.1")

    assert (asked[0].splitlines()[0], asked[1]) == (got[0].splitlines()[0], b"")
    assert f"Content-Length: {len(got[1])}".encode() in asked[0].splitlines()


async def test_a_request_may_name_the_whole_address() -> None:
    async with _served(_health()) as address:
        for target in ("http://x/healthz", "HTTP://x:9401/healthz?a=b", "https://[::1]:9401/healthz"):
            assert (await _raw(address, f"GET {target} HTTP/1.1"))[1] == b"ok\n"


@pytest.mark.parametrize(("accepted", "is_gzip"), [("gzip", True), ("gzip;q=0", False), ("gzip;q=0, *", False)])
async def test_who_refuses_gzip_gets_text(accepted: str, is_gzip: bool) -> None:
    async with _served(_health()) as address:
        head, body = await _raw(address, f"GET /metrics HTTP/1.1\nAccept-Encoding: {accepted}")

    assert (b"Content-Encoding: gzip" in head, body.startswith(b"# HELP")) == (is_gzip, not is_gzip)


async def test_a_client_that_sends_its_request_byte_by_byte_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_S", 0.3)
    async with _served(_health()) as address:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        dribbling = asyncio.create_task(dribble(writer))
        assert await asyncio.wait_for(reader.read(), 10) == b""
        dribbling.cancel()
        writer.close()


async def dribble(writer: asyncio.StreamWriter) -> None:
    """A request that never ends, a little at a time."""
    writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
    while True:
        writer.write(b"x")
        await asyncio.sleep(0.02)


async def test_a_client_that_sends_headers_without_end_is_let_go_and_they_take_no_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _served(_health()) as address:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        with contextlib.suppress(ConnectionError):  # it is let go while it sends
            writer.write(b"GET /metrics HTTP/1.1\r\n" + (b"X: " + b"x" * 60_000 + b"\r\n") * 50 + b"\r\n")
            await writer.drain()
            assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()

    assert caplog.records == []


async def test_a_client_that_does_not_take_the_answer_is_let_go_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLIENT_S", 0.3)
    long, threads = bytes(32 << 20), list[threading.Thread]()

    def answer(_: "WSGIEnvironment", start: "StartResponse") -> list[bytes]:
        threads.append(threading.current_thread())
        start("200 OK", [("Content-Length", str(len(long)))])
        return [long]

    async with listening(answer, ANYWHERE) as address:
        assert address is not None
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        (thread,) = await eventually(lambda: threads)
        await asyncio.to_thread(thread.join)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(len(long))
        writer.close()

    assert (capfd.readouterr().err, caplog.records) == ("", [])


@pytest.mark.slow
async def test_half_sent_requests_take_no_more_than_their_places_and_leave_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CLIENT_S", 1.0)
    monkeypatch.setattr(module, "MAX_CLIENTS", 8)
    async with _served(_health()) as address:
        open_ = [await asyncio.open_connection(address.host, address.port) for _ in range(80)]
        for _, writer in open_:
            writer.write(b"GET /metrics HT")
        ends = await asyncio.wait_for(
            asyncio.gather(*(reader.read() for reader, _ in open_), return_exceptions=True), 20
        )
        assert all(end == b"" or isinstance(end, ConnectionError) for end in ends)
        assert sum(thread.name.startswith("Thread") for thread in threading.enumerate()) <= 8
        for _, writer in open_:
            writer.close()
        answer = await asyncio.to_thread(_ask, address, "/healthz")
    assert answer.status == 200


async def test_clients_that_hold_all_connections_do_not_keep_a_probe_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLIENTS", 8)
    async with _served(_health()) as address:
        held = [await asyncio.open_connection(address.host, address.port) for _ in range(8)]
        statuses = [(await asyncio.to_thread(_ask, address, "/healthz")).status for _ in range(3)]
        assert await asyncio.wait_for(held[0][0].read(), LIMIT_S) == b"", "the oldest one has made room"
        for _, writer in held:
            writer.close()

    assert statuses == [200, 200, 200]


async def test_not_ready_is_503_with_the_reasons() -> None:
    answer = await _get(_health("fake: no assignment yet", "fake: no broker"), "/readyz")

    assert answer[:2] == (503, "fake: no assignment yet\nfake: no broker\n")


async def test_reasons_show_no_secret_because_anyone_may_ask_for_them() -> None:
    answer = await _get(_health("fake: it answers 400 (client_secret=s3cret is wrong)"), "/readyz")

    assert answer.text == "fake: it answers 400 (client_secret=*** is wrong)\n"


async def test_ready_and_alive_are_200_and_the_rest_is_not_there() -> None:
    async with _served(_health()) as address:
        statuses = {
            path: (await asyncio.to_thread(_ask, address, path)).status for path in ("/readyz", "/healthz", "/")
        }

    assert statuses == {"/readyz": 200, "/healthz": 200, "/": 404}


@pytest.mark.slow
async def test_a_hanging_event_loop_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HUNG_AFTER_S", 0.2)
    monkeypatch.setattr(module, "_ANSWER_WITHIN_S", 0.2)
    async with _served(_health()) as address:
        asking = [
            asyncio.get_running_loop().run_in_executor(None, _later, address, path) for path in ("/healthz", "/readyz")
        ]
        await asyncio.sleep(0.05)
        time.sleep(2)  # noqa: ASYNC251 - the hang
        alive, ready = await asyncio.gather(*asking)

    assert (alive.status, ready.status) == (503, 503)
    assert "has not answered" in ready.text


def _later(address: Address, path: str) -> Answer:
    time.sleep(0.5)
    return _ask(address, path)


class _ThreadRecorder(Collector):
    """Notes which thread collects."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def collect(self) -> Iterator[Metric]:
        self.threads.append(threading.current_thread())
        return iter(())


async def test_all_metrics_are_of_one_moment_between_two_steps_of_the_components() -> None:
    recorder = _ThreadRecorder()
    assert (await _get(Health([recorder], list), "/metrics")).status == 200
    assert recorder.threads == [threading.current_thread()]


@pytest.mark.slow
async def test_a_process_whose_loop_hangs_still_has_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_WITHIN_S", 0.2)
    recorder = _ThreadRecorder()
    async with _served(Health([recorder], list)) as address:
        asking = asyncio.get_running_loop().run_in_executor(None, _later, address, "/metrics")
        await asyncio.sleep(0.05)
        time.sleep(2)  # noqa: ASYNC251 - the hang
        assert (await asking).status == 200
    assert recorder.threads[0] is not threading.current_thread()


async def test_the_loop_is_alive_while_it_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BEAT_S", 0.01)
    health = _health()
    health._beat_s -= 60
    assert health.hung()

    beat = asyncio.create_task(health.beat())
    await asyncio.sleep(0.2)
    beat.cancel()

    assert not health.hung()


async def test_a_client_that_says_nothing_does_not_keep_others_waiting() -> None:
    async with _served(_health()) as address:
        with socket.create_connection((address.host, address.port)):
            answer = await asyncio.to_thread(_ask, address, "/healthz")

    assert answer.status == 200


async def test_listening_on_port_0_says_the_port() -> None:
    async with _served(_health()) as address:
        assert address.port > 0


async def test_an_ipv6_address_is_served() -> None:
    async with listening(_health().answer, Address("::1", 0)) as address:
        assert address is not None
        assert (await asyncio.to_thread(_ask, address, "/healthz")).status == 200


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])  # noqa: S104 - for a moment
async def test_every_interface_is_of_ipv4_and_ipv6(everywhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(_health().answer, Address(everywhere, 0)) as address:
        assert address is not None
        for host in ("127.0.0.1", "::1"):
            assert (await asyncio.to_thread(_ask, Address(host, address.port), "/healthz")).status == 200

    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: False)  # the kernel has no IPv6
    async with listening(_health().answer, Address(everywhere, 0)) as address:
        assert address is not None
        assert (await asyncio.to_thread(_ask, Address("127.0.0.1", address.port), "/healthz")).status == 200
        with pytest.raises(OSError, match="refused"), socket.create_connection(("::1", address.port)):
            pass


@pytest.mark.parametrize(("addresses", "served"), [(["::1"], "::1"), (["::1", "127.0.0.1"], "127.0.0.1")])
async def test_a_name_is_served_at_its_ipv4_address_if_it_has_one(
    addresses: list[str], served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = socket.getaddrinfo

    def resolve(host: str, *args: Any, **options: Any) -> list[Any]:
        hosts = addresses if host == "gpu-node-1.example" else [host]
        return [result for each in hosts for result in lookup(each, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with listening(_health().answer, Address("gpu-node-1.example", 0)) as address:
        assert address is not None
        assert (await asyncio.to_thread(_ask, Address(served, address.port), "/healthz")).status == 200


async def test_off_listens_nowhere() -> None:
    async with listening(_health().answer, None) as address:
        assert address is None


async def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ListenError, match=rf"--listen: can't listen on 127\.0\.0\.1:{port}: .*in use"):
            async with listening(_health().answer, Address("127.0.0.1", port)):
                pass


async def test_a_name_that_can_not_be_had_is_a_clear_error() -> None:
    with pytest.raises(ListenError, match=r"can't listen on no-such-host\.invalid:1"):
        async with listening(_health().answer, Address("no-such-host.invalid", 1)):
            pass


@pytest.mark.slow
async def test_a_process_without_a_file_descriptor_left_says_so_and_is_well_when_it_has_some_again(
    tmp_path: Path,
) -> None:
    process = Gpustream(tmp_path, "sink", "scrape", "--kafka", "127.0.0.1:1", "--scrape-listen", "off")
    address = Address("127.0.0.1", process.ports[0].number)
    try:
        process.begin()
        await asyncio.to_thread(process.wait_until, lambda: "waiting for topics" in process.log.read_text())
        with no_descriptors(process):
            answers = [await asyncio.to_thread(_ask, address, path) for path in ("/readyz", "/readyz", "/healthz")]
        after = await asyncio.to_thread(_ask, address, "/readyz")
    finally:
        process.close()
    assert [answer.status for answer in answers] == [503, 503, 200]
    assert all(answer.text.startswith("no file descriptor is left (Too many open files;") for answer in answers[:2])
    assert "descriptor" not in after.text
