"""The page in a real Chromium: a fleet that is simulated, and its truth; a server that goes away; a hostile tenant."""

import asyncio
import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from sinks.page import server
from sinks.page.fleet import FORGET_S, IDLE_AFTER_MS
from tests.eventually import eventually
from tests.real.chromium import Chromium, Page, chromium, find_chromium
from tests.real.conftest import need
from tests.sinks.page.bench import Bench
from tests.sinks.page.ticks import START_MS, alert, device, holder, hour, tick
from topics.attributed import AttributedDevice
from topics.idleness import device_activity

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = "</script><img src=x onerror=window.hit=1><svg onload=window.hit=1>"
ROWS = """[...document.querySelectorAll("#rows tr")].map((row) => ({uuid: row.dataset.uuid, ts: Number(row.dataset.ts),
    cells: [...row.cells].map((cell) => cell.textContent)}))"""
COLOUR = "getComputedStyle(document.querySelector('#states [data-word={word}] rect')).fill"
PIXEL = """(() => {
    const map = document.getElementById("map"), tip = document.getElementById("tip").style;
    const [x, y] = [parseFloat(tip.left) - 14 - 15, parseFloat(tip.top) - 16 - 15];
    const [left, top] = [map.getBoundingClientRect().left, map.getBoundingClientRect().top];
    const data = map.getContext("2d").getImageData(x - left, y - top, 1, 1).data;
    return `rgb(${data[0]}, ${data[1]}, ${data[2]})`; })()"""
"""The colour of the chosen tile, beside its mark."""
MARKED = """(() => {
    const data = document.getElementById("map").getContext("2d").getImageData(0, 20, 60, 40).data;
    const [red, green, blue] = getComputedStyle(document.body).color.match(/\\d+/g).map(Number);
    return data.some((value, at) => at % 4 === 0 && value === red && data[at + 1] === green && data[at + 2] === blue);
})()"""
"""Whether the first tile, which is busy, has the mark of an alert."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Chromium]:
    need(find_chromium)
    async with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


class ReverseProxy:
    """A reverse proxy like nginx: it strips the prefix /gpus, forwards requests, and can be stopped."""

    def __init__(self, upstream: str) -> None:
        self.upstream, self.port = upstream, 0
        self._stack = contextlib.AsyncExitStack()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/gpus/"

    async def start(self) -> None:
        client = await self._stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))

        async def hand_on(request: web.Request) -> web.StreamResponse:
            path = request.raw_path.removeprefix("/gpus/")
            headers = {"Accept-Encoding": request.headers.get("Accept-Encoding", "identity")}
            async with client.get(self.upstream + path, headers=headers) as answer:
                headers_kept = {
                    k: v for k, v in answer.headers.items() if k not in ("Transfer-Encoding", "Content-Length")
                }
                response = web.StreamResponse(status=answer.status, headers=headers_kept)
                await response.prepare(request)
                with contextlib.suppress(ConnectionResetError):
                    async for piece in answer.content.iter_any():
                        await response.write(piece)
                return response

        application = web.Application()
        application.router.add_get("/gpus/{path:.*}", hand_on)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        await self._stack.aclose()


@dataclass
class Served:
    """A run with a simulated fleet whose page is behind a reverse proxy, and the file with its truth."""

    proxy: ReverseProxy
    truth: Path

    def reported(self) -> dict[str, list[dict[str, Any]]]:
        """The truth of each device, tick by tick."""
        rows_by_node = defaultdict(list)
        for line in self.truth.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                row = json.loads(line)
                rows_by_node[row["uuid"]].append(row)
        return rows_by_node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    truth = tmp_path_factory.mktemp("page") / "truth.jsonl"
    fleet = ("--simulate", "2x8", "--seed", "4", "--pod-life", "20s", "--truth", str(truth))
    off = ("--listen", "off", "--scrape-listen", "127.0.0.1:0", "--duration", "10m", "--log-format", "json")
    command = [sys.executable, "-m", "gpustream", "run", *fleet, *off, "--page-listen", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        while "the page is at" not in (line := await process.stderr.readline()).decode():
            assert line, "the run ended"
        proxy = ReverseProxy(str(json.loads(line)["message"]).rpartition(" ")[2])
        reading = asyncio.ensure_future(process.stderr.read())
        await proxy.start()
        yield Served(proxy, truth)
        await proxy.stop()
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Chromium) -> AsyncIterator[Page]:
    async with browser.page() as opened:
        yield opened
        assert opened.errors == []


def word_of(rows: list[dict[str, Any]], ts_ms: int) -> str:
    """The activity of a device by the truth: one that worked within the last 10 s is busy."""
    current = next(row for row in rows if row["ts_ms"] == ts_ms)
    lately = [row for row in rows if ts_ms - IDLE_AFTER_MS < row["ts_ms"] <= ts_ms]
    while lately and pods(lately[0]) != pods(current):
        lately.pop(0)
    last = max([n for n, row in enumerate(lately) if pods(row) != pods(current)], default=-1)
    activities = [
        device_activity(msgspec.convert({**row, "holders": row["reported"]}, AttributedDevice))
        for row in lately[last + 1 :]
    ]
    return "busy" if activities[-1] == "idle" and "busy" in activities else activities[-1]


def pods(row: dict[str, Any]) -> set[str]:
    return {f"{holder['namespace']}/{holder['pod']}" for holder in row["reported"]}


async def choose(page: Page, control: str, value: str) -> None:
    """Chooses a value of a control of the page."""
    script = f"{{ const one = document.getElementById('{control}'); one.value = {json.dumps(value)};"
    await page.value(script + " one.dispatchEvent(new Event(one.tagName === 'SELECT' ? 'change' : 'input')); }")


async def test_what_a_tile_and_a_row_say_is_what_the_truth_says(page: Page, served: Served) -> None:
    await page.open(served.proxy.url)
    await page.shows("#total", "2 nodes, 16 GPUs")
    await choose(page, "metric", "memory_used_bytes")
    await page.press("t")
    states_seen: set[str] = set()

    async def is_enough() -> bool:
        rows, truth = await page.value(ROWS), served.reported()
        for row in rows:
            uuid, ts_ms, cells = row["uuid"], row["ts"], row["cells"]
            row_at = next((candidate for candidate in truth[uuid] if candidate["ts_ms"] == ts_ms), None)
            if row_at is None or cells[2] == "not known":
                continue
            assert cells[1] == word_of(truth[uuid], ts_ms), (row, row_at)
            assert set(filter(None, cells[3].split(", "))) == pods(row_at)
            gib = row_at["memory_used_bytes"] / 2**30
            assert abs(float(cells[2].removesuffix(" GiB").replace(",", "")) - gib) <= max(0.01, gib / 100)
            states_seen.add(cells[1])
        return {"busy", "idle", "free"} <= states_seen and len(rows) >= 16

    await eventually(is_enough, every_s=0.5)
    assert all(url.startswith(served.proxy.url) for url in page.requests)


async def test_by_the_keyboard_each_tile_has_the_colour_of_what_is_said_of_it(page: Page, served: Served) -> None:
    await page.open(served.proxy.url)
    await page.wait_until("document.body?.dataset.painted")
    await page.value("document.getElementById('map').focus()")
    right, left = ("ArrowRight", "ArrowLeft"), ("ArrowLeft", "ArrowRight")
    words_seen = set()
    for key, back in (("Home", "ArrowRight"), *[right] * 7, ("ArrowDown", "ArrowUp"), *[left] * 7):

        async def word_of_the_colour(key: str = key, back: str = back) -> str | None:
            await page.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            texts = (await page.text("#said")).split(", ")
            if "g." in texts[0]:
                return "narrow"  # a MIG device is narrower than what is looked at
            word = next((text.partition(":")[0] for text in texts if ": " in text), None)  # None: nothing is said yet
            if word and await page.value(PIXEL) == await page.value(COLOUR.format(word=word[0])):
                return word
            await page.press(back)  # the text is of the moment of the key, and the tile may have changed since
            await page.press(key)
            return None

        await page.press(key)
        words_seen.add(await eventually(word_of_the_colour))
    words_seen.discard("narrow")
    assert len(words_seen) > 1
    await page.press("Enter")
    await page.shows("#detail h2", "sim-000")
    await page.wait_until("document.activeElement?.getAttribute('aria-label')", lambda label: label == "Close")
    await page.press("Escape")
    await page.wait_until("document.activeElement?.id", lambda element_id: element_id == "map")


async def test_it_is_live_again_after_the_server_was_away(page: Page, served: Served) -> None:
    await page.open(served.proxy.url)
    await page.shows("#status-text", "live, ")
    await served.proxy.stop()
    await page.wait_until("'stale' in document.body.dataset")
    assert "not live" in await page.text("#status-text")
    await served.proxy.start()
    await page.wait_until("!('stale' in document.body.dataset)")
    assert (await page.text("#total")) == "2 nodes, 16 GPUs"
    page.errors.clear()  # that nobody answered


async def test_the_keyboard_goes_on_from_its_tile_when_the_whole_fleet_comes_again(page: Page) -> None:
    bench = Bench()
    bench.fleet.add_tick(tick(1, device("GPU-z"), node="n2"), 1.0)
    gpus = [device(f"GPU-{name}", index=number) for number, name in enumerate("abc")]
    bench.fleet.add_tick(tick(1, *gpus), FORGET_S)
    async with bench.serving():
        await page.open(bench.url)
        await page.shows("#total", "2 nodes, 4 GPUs")
        await page.value("document.getElementById('map').focus()")
        await page.press("Home", "ArrowRight")
        bench.fleet.expire(FORGET_S + 2)
        bench.pages.make_frames(START_MS + 2000)
        await page.shows("#total", "1 node, 3 GPUs")
        await page.press("ArrowRight")
        assert "n1 GPU 2" in await page.text("#said")


async def test_a_gpu_that_moved_to_another_node_stays_when_its_old_node_ticks_without_it(page: Page) -> None:
    bench, moved = Bench(), device("GPU-a", holder("p-0"), used=0.5)
    bench.fleet.add_tick(tick(1, moved), 1.0)
    async with bench.serving():
        await page.open(bench.url)
        await page.shows("#total", "1 node, 1 GPU")
        bench.fleet.add_tick(tick(1, moved, node="n2"), 2.0)
        bench.pages.make_frames(START_MS + 2000)
        await page.shows("#total", "2 nodes, 1 GPU")
        bench.fleet.add_tick(tick(3, device("GPU-b")), 3.0)
        bench.pages.make_frames(START_MS + 3000)
        await page.shows("#total", "2 nodes, 2 GPUs")
        assert "1 device" in await page.text("#who")


async def test_a_gpu_that_two_nodes_have_stays_when_one_of_them_ticks_without_it(page: Page) -> None:
    bench, cloned = Bench(), device("GPU-a", holder("p-0"), used=0.5)
    bench.fleet.add_tick(tick(1, cloned), 1.0)
    bench.fleet.add_tick(tick(2, cloned, node="n2"), 2.0)
    async with bench.serving():
        await page.open(bench.url)
        await page.shows("#total", "2 nodes, 1 GPU")
        bench.fleet.add_tick(tick(3, device("GPU-b"), node="n2"), 3.0)
        bench.pages.make_frames(START_MS + 3000)
        await page.shows("#total", "2 nodes, 2 GPUs")
        assert "1 device" in await page.text("#who")


async def test_an_alert_that_comes_before_the_ticks_of_its_gpu_leads_to_it(page: Page) -> None:
    bench = Bench()
    bench.fleet.set_alert(b"1", alert(gpus=[], labels={"gpu_uuid": "GPU-a"}))
    async with bench.serving():
        await page.open(bench.url)
        await page.shows("#alerts-title", "1")
        bench.fleet.add_tick(tick(1, device("GPU-a", holder("p-0"), used=0.5)), 1.0)
        bench.pages.make_frames(START_MS + 1000)
        await page.shows("#total", "1 node, 1 GPU")
        await page.value("document.querySelector('#alerts button').click()")
        await page.shows("#holders", "ml/p-0")


async def test_a_gpu_that_is_cut_is_found_and_marked_by_its_alerts_and_counts_once_for_its_holder(page: Page) -> None:
    bench = Bench()
    migs = [{"uuid": f"MIG-{number}", "parent_uuid": "GPU-a", "profile": "1g.10gb"} for number in range(2)]
    parts = [device(part["uuid"], holder(f"p-{number}"), used=0.5, mig=part) for number, part in enumerate(migs)]
    bench.fleet.add_tick(tick(1, device("GPU-a"), *parts), 1.0)
    async with bench.serving():
        await page.open(bench.url)
        await page.shows("#total", "1 node, 1 GPU")
        assert "2 devices" in await page.text("#who")
        assert not await page.value(MARKED)
        bench.fleet.set_alert(b"1", alert(gpus=[], labels={"gpu_uuid": "GPU-a"}))
        bench.pages.make_frames(START_MS + 2000)
        await page.shows("#alerts-title", "1")
        await page.wait_until(MARKED)
        await page.value("document.querySelector('#alerts button').click()")
        await page.shows("#holders", "ml/p-0, ml/p-1")
        await choose(page, "search", "GPU-a")
        assert await page.value("document.getElementById('none').hidden")


async def test_batch_jobs_of_one_id_in_two_clusters_are_two(page: Page) -> None:
    bench = Bench()
    for cluster, gpus in {"c1": 1, "c2": 2}.items():
        job = holder("4242", namespace="gpu", workload={"kind": "SlurmJob", "name": "4242"})
        devices = [device(f"GPU-{cluster}-{number}", job, used=0.5) for number in range(gpus)]
        bench.fleet.add_tick(tick(1, *devices, cluster=cluster), 1.0)
    async with bench.serving():
        await page.open(bench.url)
        await page.shows("#who", "3 devices")  # of their team
        for by, name in {"workload": "gpu/SlurmJob/4242", "pod": "gpu/4242"}.items():
            await page.value(f"document.querySelector('[data-by={by}]').click()")
            await page.shows("#who", f"c2/{name}2 devices")
            await page.shows("#who", f"c1/{name}1 device")


async def test_an_alert_about_mig_devices_is_about_as_many_gpus_as_they_are_cut_from(page: Page) -> None:
    bench = Bench()
    migs = [{"uuid": f"MIG-{n}", "parent_uuid": f"GPU-{n // 3}", "profile": "1g.10gb"} for n in range(6)]
    parts = [device(part["uuid"], holder("p-0"), mig=part) for part in migs]
    bench.fleet.add_tick(tick(1, device("GPU-0"), device("GPU-1"), *parts), 1.0)
    bench.fleet.set_alert(b"1", alert(gpus=[{"uuid": part["uuid"], "node": "n1"} for part in migs]))
    async with bench.serving():
        await page.open(bench.url)
        await page.shows("#alerts", ", 2 GPUs")


async def test_a_gpu_that_is_cut_has_the_colour_of_its_own_temperature(page: Page) -> None:
    bench = Bench()
    part = {"uuid": "MIG-1", "parent_uuid": "GPU-a", "profile": "1g.10gb"}
    devices = device("GPU-a", metrics={"temperature_celsius": 88}), device("MIG-1", mig=part), device("GPU-b")
    bench.fleet.add_tick(tick(1, *devices), 1.0)
    async with bench.serving():
        await page.open(bench.url)
        await page.shows("#total", "1 node, 2 GPUs")
        await choose(page, "metric", "temperature_celsius")
        await page.shows("#scale", "88 °C")
        await page.value("document.getElementById('map').focus()")
        await page.press("Home")
        assert "temperature of its GPU: 88 °C" in await page.text("#said")
        assert await page.value(PIXEL) == "rgb(254, 232, 56)"
        await page.press("ArrowRight")
        assert "temperature: not known" in await page.text("#said")


async def test_a_page_too_many_says_that_it_is(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_PAGES", 0)
    bench = Bench()
    async with bench.serving():
        await page.open(bench.url)
        await page.wait_until("performance.getEntriesByType('resource').some((one) => one.name.includes('/events'))")
        await page.shows("#status-text", "too many pages are open")


async def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page, served: Served) -> None:
    await page.open(served.proxy.url, 390, 844, dark=True, phone=True)
    await page.wait_until("document.body?.dataset.painted")
    assert await page.value("document.documentElement.scrollWidth") <= 390
    assert await page.value("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"


async def test_what_tenants_write_is_text_and_never_markup(page: Page) -> None:
    bench = Bench()
    evil = holder(HOSTILE, team=HOSTILE, namespace=HOSTILE, workload={"kind": HOSTILE, "name": HOSTILE})
    labels = {"topology.kubernetes.io/zone": HOSTILE}
    bench.fleet.add_tick(tick(1, device("GPU-a", evil, used=0.5, model=HOSTILE), node_labels=labels), 1.0)
    annotations = {"summary": HOSTILE, "runbook": "javascript:window.hit=1"}
    bench.fleet.set_alert(b"1", alert(name=HOSTILE, annotations=annotations, severity=HOSTILE))
    bench.fleet.add_usage(b"1", hour(team=HOSTILE))
    async with bench.serving():
        await page.open(bench.url)
        await page.wait_until("document.body?.dataset.painted")
        for group in ("zone", "team", "workload", "model"):
            await choose(page, "group", group)
        for by in ("team", "workload", "pod"):
            await page.value(f"document.querySelector('[data-by={by}]').click()")
            assert HOSTILE in await page.text("#who")
        await page.value("document.getElementById('map').focus()")
        await page.press("Home", "Enter")
        await page.shows("#holders", HOSTILE)
        await page.press("Escape", "t")
        for selector in ("#said", "#tip", "#alerts", "#usage", "#rows"):
            await page.shows(selector, HOSTILE)
        await choose(page, "search", HOSTILE)
        assert await page.value("[window.hit ?? 0, document.images.length, document.scripts.length]") == [0, 0, 1]
        assert await page.value("[...document.links].filter((one) => !/^https?:/.test(one.href)).length") == 0
