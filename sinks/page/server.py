"""The HTTP of the page: its files, the stream of events, and what is known of one device. Nothing can be changed by it.

In: requests. Out: answers; to each open page a frame in a second.
State: the open pages; of each metric that one shows, the last frame. A page that takes its frames too slowly is given
the whole fleet when it has taken one, and no more before: what it has not taken never piles up.
On failure: a page that takes nothing for 20 s loses its connection, and comes back by itself.
"""

import asyncio
import contextlib
import ipaddress
import re
import time
from collections import Counter as Count
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from aiohttp import web
from prometheus_client import Counter, Gauge

from sinks.page import frames
from sinks.page.fleet import Fleet
from sinks.page.frames import Versions
from topics.catalogue import CATALOGUE

FRAME_EVERY_S = 1.0
MAX_PAGES = 64
"""So many pages are open at a time; a further one is asked to come back later."""

_PIECE_BYTES = 64 * 1024
_TAKE_S = 20.0
_BUSY_AGAIN_MS = 10_000

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_INDEX = "index.html"
_STATIC = Path(__file__).parent / "static"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer: only files of the page itself run or are shown, in no frame of another."""


class Pages(NamedTuple):
    """What is counted of pages: ``opened`` are open, ``caught_up`` the frames of the whole fleet for slow ones."""

    requests: Callable[[str], Counter]
    opened: Gauge
    caught_up: Counter


class _Packed(NamedTuple):
    """A frame as it is sent: as it is, and compressed."""

    plain: bytes
    gzip: bytes


class PageServer:
    """Answers below ``prefix``, which begins and ends with a slash.

    ``hosts``: the names by which it may be asked, beside addresses and localhost; None: by every name.
    """

    def __init__(self, fleet: Fleet, pages: Pages, prefix: str = "/", hosts: Collection[str] | None = None) -> None:
        self._fleet, self._pages, self._prefix, self._hosts = fleet, pages, prefix, hosts
        files = {file.name: file.read_bytes() for file in _STATIC.iterdir()}
        self._files = {"": (files.pop(_INDEX), _TYPES[".html"])}
        self._files |= {name: (body, _TYPES[Path(name).suffix]) for name, body in files.items()}
        self._watched: Count[str] = Count()
        self._known: dict[str, Versions] = {}
        self._more: dict[str, _Packed] = {}
        self._whole: dict[str, tuple[int, asyncio.Task[_Packed]]] = {}
        self._number, self._made = 0, asyncio.Event()
        self._ended = False

    def routes(self) -> list[web.RouteDef]:
        """Everything that is answered."""
        return [
            *[web.get(self._prefix + path, self._file) for path in self._files],
            web.get(self._prefix + "events", self._events),
            web.get(self._prefix + "device", self._device),
            web.route("*", "/{elsewhere:.*}", self._elsewhere),
        ]

    @web.middleware
    async def guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Counts the request, refuses it by another's name, and gives errors the headers of every answer.

        A web site can let its own name lead to the browser's machine, and read what it finds there. Its requests have
        that name, and no address.
        """
        try:
            if self._hosts is not None and not is_own(request.headers.get("Host", ""), self._hosts):
                raise web.HTTPForbidden(text="the page is not asked for by this name: --page-host NAME allows it\n")
            answer = await handler(request)
        except web.HTTPException as error:
            self._pages.requests(str(error.status)).inc()
            error.headers.update(HEADERS)
            raise
        self._pages.requests(str(answer.status)).inc()
        return answer

    async def run(self) -> None:
        """Make a frame of each metric that a page shows, again and again."""
        while True:
            await asyncio.sleep(FRAME_EVERY_S)
            self.beat(int(time.time() * 1000))

    def beat(self, at_ms: int) -> None:
        """The next frame of each metric that a page shows."""
        self._more.clear()
        for metric in self._watched:
            said = frames.frame(self._fleet, metric, at_ms, self._known.get(metric))
            self._known[metric], self._more[metric] = frames.versions(self._fleet), _pack(said)
        self._number += 1
        self._whole.clear()
        made, self._made = self._made, asyncio.Event()
        made.set()

    def end(self) -> None:
        """No page is given anything any more."""
        self._ended = True
        self._made.set()

    # -- answers

    async def _file(self, request: web.Request) -> web.Response:
        body, kind = self._files[request.path.removeprefix(self._prefix)]
        headers = {**HEADERS, "Cache-Control": "no-cache"}
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    async def _device(self, request: web.Request) -> web.Response:
        said = frames.device(self._fleet, request.query.get("uuid", ""))
        if said is None:
            raise web.HTTPNotFound(text="no device of that UUID is known\n")
        headers = {**HEADERS, "Cache-Control": "no-store"}
        return web.Response(body=msgspec.json.encode(said), content_type="application/json", headers=headers)

    async def _elsewhere(self, request: web.Request) -> web.Response:
        path = request.path
        if path == self._prefix.removesuffix("/") or (path == "/" and self._prefix != "/"):
            raise web.HTTPTemporaryRedirect(self._prefix)
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(request.method, ("GET", "HEAD"))
        raise web.HTTPNotFound(text=f"the page is at {self._prefix}\n")

    async def _events(self, request: web.Request) -> web.StreamResponse:
        metric = request.query.get("metric", "")
        if metric and metric not in CATALOGUE:
            raise web.HTTPNotFound(text="there is no such metric\n")
        if self._watched.total() >= MAX_PAGES:
            again = f"retry: {_BUSY_AGAIN_MS}\nevent: busy\ndata:\n\n"
            return web.Response(text=again, content_type="text/event-stream", headers=HEADERS)
        packed = "gzip" in request.headers.get("Accept-Encoding", "")
        response = web.StreamResponse(headers={**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        if packed:
            response.headers["Content-Encoding"] = "gzip"
        await response.prepare(request)
        with self._watching(metric):
            try:
                if packed:
                    await response.write(frames.GZIP_HEADER)
                async for frame in self._frames(metric):
                    # in pieces: no more than one waits to be taken
                    data = frame.gzip if packed else frame.plain
                    for start in range(0, len(data), _PIECE_BYTES):
                        async with asyncio.timeout(_TAKE_S):
                            await response.write(data[start : start + _PIECE_BYTES])
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
            except ConnectionResetError:
                pass  # the page was closed
        return response

    @contextlib.contextmanager
    def _watching(self, metric: str) -> Iterator[None]:
        """A page shows this metric while inside."""
        self._watched[metric] += 1
        self._pages.opened.inc()
        try:
            yield
        finally:
            self._pages.opened.dec()
            self._watched[metric] -= 1
            if not self._watched[metric]:
                del self._watched[metric]
                self._known.pop(metric, None)

    async def _frames(self, metric: str) -> AsyncIterator[_Packed]:
        """What a page is given, one after another as it takes them."""
        number, frame = await self._everything(metric)
        while not self._ended:
            yield frame
            if self._number == number:
                await self._made.wait()
            if self._number == number + 1 and metric in self._more:
                number, frame = self._number, self._more[metric]
            elif not self._ended:
                self._pages.caught_up.inc()
                number, frame = await self._everything(metric)

    async def _everything(self, metric: str) -> tuple[int, _Packed]:
        """The whole fleet, made once for all who want it at the same time; with the number of the frame before."""
        if metric not in self._whole:
            said = frames.frame(self._fleet, metric, int(time.time() * 1000))
            self._known.setdefault(metric, frames.versions(self._fleet))
            self._whole[metric] = self._number, asyncio.ensure_future(asyncio.to_thread(_pack, said))
        number, packing = self._whole[metric]
        return number, await asyncio.shield(packing)


def is_own(header: str, hosts: Collection[str]) -> bool:
    """Whether a Host header can't be a web site's: it is an address, localhost, one of these names, or not there."""
    name = re.sub(r":\d*$", "", header).strip("[]").removesuffix(".").lower()
    if name in ("", "localhost", *hosts) or name.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def _pack(said: frames.Json) -> _Packed:
    plain = frames.event(said)
    return _Packed(plain, frames.compressed(plain))
