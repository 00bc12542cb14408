"""The page's HTTP: what is answered to whom, and that slow pages hold nothing up."""

import asyncio
import gzip
import io
import json
import re
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import sinks.page
from sinks.page import frames, server
from tests.eventually import eventually
from tests.sinks.page.bench import Bench
from tests.sinks.page.ticks import START_MS, device, holder, tick


def bench_of(prefix: str = "/") -> Bench:
    """A page server with a fleet of one node."""
    bench = Bench(prefix)
    bench.fleet.add_tick(tick(1, device("GPU-a", holder("p-0"), used=0.5)), 1.0)
    return bench


async def event(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The next frame of a stream."""
    while not (line := await response.content.readline()).startswith(b"data: {"):
        assert line
    frame: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    return frame


async def test_everything_that_the_page_loads_is_its_own_and_relative() -> None:
    bench = bench_of()
    async with bench.serving() as client:
        async with client.get(bench.url) as answer:
            page = await answer.text()
        loaded = set(re.findall(r'(?:src|href)="([^"#]+)"', page))
        static = Path(sinks.page.__file__).parent / "static"
        files = {file.name for file in static.iterdir()}
        texts = [(static / name).read_text() for name in files]
        for name in loaded:
            async with client.get(f"{bench.url}/{name}") as answer:
                assert answer.status == 200

    assert loaded <= files
    assert {"page.js", "page.css"} <= loaded
    links = re.compile(r"""https?://(?!www\.w3\.org/2000/svg)[\w]|(?:from|src=|href=|fetch\(|url\()\s*["'`]/""")
    assert [link for text in texts for link in links.findall(text)] == []
    assert not re.search(r"<script(?![^>]*src=)|\sstyle=|\son\w+=", page)


async def test_every_answer_says_that_nothing_but_the_page_itself_runs_in_it() -> None:
    bench = bench_of()
    async with bench.serving() as client:
        for path in ("/", "/page.js", "/device?uuid=GPU-a", "/device?uuid=none", "/elsewhere", "/events"):
            async with client.get(bench.url + path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self';")
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    ("host", "hosts", "status"),
    [
        ("127.0.0.1:9402", (), 200),
        ("[::1]:9402", (), 200),
        ("10.1.2.3", (), 200),
        ("localhost:9402", (), 200),
        ("LOCALHOST.", (), 200),
        ("evil.example.com", (), 403),
        ("evil.example.com:9402", (), 403),
        ("127.0.0.1.evil.example.com", (), 403),
        ("localhost.evil.example.com", (), 403),
        ("evil.example.com", ("gpus.example.com",), 403),
        ("GPUs.example.com:443", ("gpus.example.com",), 200),
        ("page.gpustream.svc", None, 200),
    ],
)
async def test_a_web_site_can_not_read_the_page_by_a_name_of_its_own(
    host: str, hosts: tuple[str, ...] | None, status: int
) -> None:
    bench = Bench(hosts=hosts)
    async with bench.serving() as client:
        for path in ("/", "/device?uuid=none", "/events", "/elsewhere"):
            async with client.get(bench.url + path, headers={"Host": host}) as answer:
                assert (answer.status == 403) is (status == 403)
                assert "Content-Security-Policy" in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed(method: str) -> None:
    bench = bench_of()
    async with bench.serving() as client:
        for path in ("/", "/device", "/events", "/x"):
            async with client.request(method, bench.url + path) as answer:
                assert answer.status == 405


async def test_a_page_gets_the_fleet_and_then_what_changes_compressed_or_not() -> None:
    bench = bench_of()
    async with bench.serving() as client:
        for seq, (accepted, encoding) in enumerate(
            {"identity": "identity", "gzip": "gzip", "gzip;q=0": "identity", "*": "gzip"}.items(), 2
        ):
            async with client.get(f"{bench.url}/events", headers={"Accept-Encoding": accepted}) as answer:
                assert answer.headers.get("Content-Encoding", "identity") == encoding
                assert (await event(answer))["kind"] == "all"
                await bench.beat(seq)
                change = await event(answer)
                assert (change["kind"], change["now"][0][1]) == ("more", START_MS + seq * 1000)


def test_any_pieces_in_any_order_are_a_gzip_stream() -> None:
    pieces = [frames.compressed(text) for text in (b"first" * 100, b"second", b"")]
    stream = frames.GZIP_HEADER + pieces[1] + pieces[0] + pieces[2] + pieces[1]

    assert gzip.GzipFile(fileobj=io.BytesIO(stream)).read1() == b"second" + b"first" * 100 + b"second"


async def test_a_page_that_is_slow_is_given_the_whole_fleet_and_no_pile_of_frames() -> None:
    bench = bench_of()
    reading = bench.pages._frames("")
    with bench.pages._watching(""):
        assert b'"all"' in (await anext(reading)).plain
        await bench.beat(2)
        assert b'"more"' in (await anext(reading)).plain
        for seq in range(3, 10):
            await bench.beat(seq)
        assert b'"all"' in (await anext(reading)).plain
        await bench.beat(10)
        assert b'"more"' in (await anext(reading)).plain
    assert bench.caught_up._value.get() == 1


async def test_a_page_that_takes_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_WRITE_TIMEOUT_S", 0.05)
    bench = bench_of()
    many = [device(f"GPU-{number}", holder("p-0", team="x" * 20_000)) for number in range(1000)]  # 20 MB
    bench.fleet.add_tick(tick(1, *many, node="n2"), 1.0)
    async with bench.serving():
        _, writer = await asyncio.open_connection("127.0.0.1", int(bench.url.rpartition(":")[2]), limit=1)
        writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await eventually(lambda: bench.opened._value.get() == 1)
        await eventually(lambda: bench.opened._value.get() == 0)
        writer.close()


async def test_further_pages_than_the_most_come_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_PAGES", 1)
    bench = bench_of()
    async with bench.serving() as client, client.get(f"{bench.url}/events") as first:
        await event(first)
        async with client.get(f"{bench.url}/events") as second:
            assert (await second.text()).startswith("retry: 10000\nevent: busy\n")


async def test_head_says_what_get_would_and_opens_no_page() -> None:
    bench = bench_of()
    async with bench.serving():
        reader, writer = await asyncio.open_connection("127.0.0.1", int(bench.url.rpartition(":")[2]))
        writer.write(b"HEAD /events HTTP/1.1\r\nHost: localhost\r\n\r\nGET /none HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Type: text/event-stream\r\n" in head
        assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
        writer.close()


async def test_below_a_prefix_everything_is_below_it() -> None:
    bench = bench_of("/gpus/")
    async with bench.serving() as client:
        for path in ("/gpus/", "/gpus/page.js", "/gpus/device?uuid=GPU-a", "/gpus", "/"):
            async with client.get(bench.url + path) as answer:
                assert answer.status == 200
        async with client.get(f"{bench.url}/page.js") as answer:
            assert answer.status == 404


async def test_what_is_not_there_is_not_found() -> None:
    bench = bench_of()
    async with bench.serving() as client:
        for path in ("/device?uuid=GPU-b", "/device", "/events?metric=none", "/../pyproject.toml", "/page.js/x"):
            async with client.get(bench.url + path) as answer:
                assert answer.status == 404


async def test_the_end_does_not_wait_for_open_pages() -> None:
    bench = bench_of()
    async with asyncio.timeout(30):
        async with bench.serving() as client:
            answer = await client.get(f"{bench.url}/events")
            await event(answer)
            bench.pages.end()
            assert b"data" not in await answer.read()


async def test_frames_that_take_long_leave_half_of_the_time_for_the_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FRAME_EVERY_S", 0.001)
    bench, took_s = bench_of(), list[float]()

    def slow(_: int) -> None:
        began_s = time.monotonic()
        time.sleep(0.03)
        took_s.append(time.monotonic() - began_s)

    monkeypatch.setattr(bench.pages, "make_frames", slow)
    began_s = time.monotonic()
    running = asyncio.create_task(bench.pages.run())
    await eventually(lambda: len(took_s) >= 6, unless=running)
    running.cancel()

    assert time.monotonic() - began_s >= sum(took_s) + sum(took_s[:-1])
