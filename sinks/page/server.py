"""The HTTP server of the page: its files, the stream of events, and the details of a device. It is read-only.

In: requests. Out: responses; to each open page a frame each second.
State: the open pages; the last frame of each metric that one of them shows. A page that reads its frames too slowly
gets the whole fleet when it has read one, and nothing before, so unread frames never pile up.
On failure: a page that reads nothing for 20 s loses its connection, and connects again by itself.
"""

import asyncio
import contextlib
import ipaddress
import time
from collections import Counter as Count
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from delivery.clock import now_ms
from delivery.instruments import Instruments
from delivery.listening import gzip_accepted
from sinks.page import frames
from sinks.page.config import host_name
from sinks.page.fleet import Fleet
from sinks.page.frames import Versions
from topics.catalogue import CATALOGUE

OPENED = "gpustream_page_open"
REQUESTS = "gpustream_page_requests_total"
CAUGHT_UP = "gpustream_page_caught_up_total"

FRAME_EVERY_S = 1.0
MAX_PAGES = 64
"""The most pages that are open at a time. Any further one is asked to come back later."""

_CHUNK_BYTES = 64 * 1024
_WRITE_TIMEOUT_S = 20.0
_BUSY_RETRY_MS = 10_000

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
"""The headers of every response: a browser runs and shows only the page's own files, and never in another page."""


class _EncodedFrame(NamedTuple):
    """A frame as an event: plain, and compressed."""

    plain: bytes
    gzip: bytes


class PageServer:
    """Serves the page below ``prefix``, which begins and ends with a slash.

    ``hosts``: the names that a Host header may have, beside addresses and localhost; None: any name.
    """

    def __init__(self, fleet: Fleet, instruments: Instruments, prefix: str, hosts: Collection[str] | None) -> None:
        self._fleet, self._instruments, self._prefix, self._hosts = fleet, instruments, prefix, hosts
        files = {file.name: file.read_bytes() for file in _STATIC.iterdir()}
        self._files = {"": (files.pop(_INDEX), _TYPES[".html"])}
        self._files |= {name: (body, _TYPES[Path(name).suffix]) for name, body in files.items()}
        self._watched: Count[str] = Count()
        self._sent_versions: dict[str, Versions] = {}
        self._changes: dict[str, _EncodedFrame] = {}
        self._whole_frames: dict[str, tuple[int, asyncio.Task[_EncodedFrame]]] = {}
        self._number, self._next_frame = 0, asyncio.Event()
        self._ended = False

    def routes(self) -> list[web.RouteDef]:
        """All routes."""
        return [
            *[web.get(self._prefix + path, self._file) for path in self._files],
            web.get(self._prefix + "events", self._events),
            web.get(self._prefix + "device", self._device),
            web.route("*", "/{elsewhere:.*}", self._other_path),
        ]

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count the request, refuse it if it has another host's name, and give errors the common headers.

        A web site can resolve its own name to the address of this machine, and read what it serves (DNS rebinding).
        Such a request has the name of the site in its Host header.
        """
        try:
            if self._hosts is not None and not is_own(request.headers.get("Host", ""), self._hosts):
                raise web.HTTPForbidden(text="the page is not asked for by this name: --page-host NAME allows it\n")
            response = await handler(request)
        except web.HTTPException as error:
            self._instruments.counter(REQUESTS, str(error.status)).inc()
            error.headers.update(HEADERS)
            raise
        self._instruments.counter(REQUESTS, str(response.status)).inc()
        return response

    async def run(self) -> None:
        """Make the frames of each second. If that takes longer, because pages show many metrics of a large fleet, half
        of the time is left for the ticks."""
        took_s = 0.0
        while True:
            await asyncio.sleep(max(FRAME_EVERY_S, took_s))
            began_s = time.monotonic()
            self.make_frames(now_ms())
            took_s = time.monotonic() - began_s

    def make_frames(self, at_ms: int) -> None:
        """Make the next frame of each metric that a page shows."""
        self._changes.clear()
        for metric in self._watched:
            content = frames.frame(self._fleet, metric, at_ms, self._sent_versions.get(metric))
            self._sent_versions[metric], self._changes[metric] = frames.versions(self._fleet), _encode(content)
        self._number += 1
        self._whole_frames.clear()
        next_frame, self._next_frame = self._next_frame, asyncio.Event()
        next_frame.set()

    def end(self) -> None:
        """Stop sending frames."""
        self._ended = True
        self._next_frame.set()

    # -- responses

    async def _file(self, request: web.Request) -> web.Response:
        body, kind = self._files[request.path.removeprefix(self._prefix)]
        headers = {**HEADERS, "Cache-Control": "no-cache"}
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    async def _device(self, request: web.Request) -> web.Response:
        content = frames.device(self._fleet, request.query.get("uuid", ""))
        if content is None:
            raise web.HTTPNotFound(text="no device of that UUID is known\n")
        headers = {**HEADERS, "Cache-Control": "no-store"}
        return web.Response(body=msgspec.json.encode(content), content_type="application/json", headers=headers)

    async def _other_path(self, request: web.Request) -> web.Response:
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
            busy = f"retry: {_BUSY_RETRY_MS}\nevent: busy\ndata:\n\n"
            return web.Response(text=busy, content_type="text/event-stream", headers=HEADERS)
        compress = gzip_accepted(",".join(request.headers.getall("Accept-Encoding", [])))
        response = web.StreamResponse(headers={**HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        if compress:
            response.headers["Content-Encoding"] = "gzip"
        if request.method == "HEAD":
            return response
        await response.prepare(request)
        with self._watching(metric), contextlib.suppress(ConnectionResetError):  # raised when the page is closed
            try:
                if compress:
                    await response.write(frames.GZIP_HEADER)
                async for frame in self._frames(metric):
                    # in chunks: at most one of them waits in memory
                    data = frame.gzip if compress else frame.plain
                    for start in range(0, len(data), _CHUNK_BYTES):
                        async with asyncio.timeout(_WRITE_TIMEOUT_S):
                            await response.write(data[start : start + _CHUNK_BYTES])
            except TimeoutError:
                if request.transport is not None:
                    request.transport.abort()
        return response

    @contextlib.contextmanager
    def _watching(self, metric: str) -> Iterator[None]:
        """Count a page that shows this metric while the context lasts."""
        self._watched[metric] += 1
        self._instruments.gauge(OPENED).inc()
        try:
            yield
        finally:
            self._instruments.gauge(OPENED).dec()
            self._watched[metric] -= 1
            if not self._watched[metric]:
                del self._watched[metric]
                self._sent_versions.pop(metric, None)

    async def _frames(self, metric: str) -> AsyncIterator[_EncodedFrame]:
        """The frames of a page, each when it has read the one before."""
        number, frame = await self._whole_frame(metric)
        while not self._ended:
            yield frame
            if self._number == number:
                await self._next_frame.wait()
            if self._number == number + 1 and metric in self._changes:
                number, frame = self._number, self._changes[metric]
            elif not self._ended:
                self._instruments.counter(CAUGHT_UP).inc()
                number, frame = await self._whole_frame(metric)

    async def _whole_frame(self, metric: str) -> tuple[int, _EncodedFrame]:
        """The number of the last frame, and a frame of the whole fleet, made once for all pages that need it now."""
        if metric not in self._whole_frames:
            content = frames.frame(self._fleet, metric, now_ms())
            self._sent_versions.setdefault(metric, frames.versions(self._fleet))
            self._whole_frames[metric] = self._number, asyncio.ensure_future(asyncio.to_thread(_encode, content))
        number, encoding = self._whole_frames[metric]
        return number, await asyncio.shield(encoding)


def is_own(header: str, hosts: Collection[str]) -> bool:
    """Whether a Host header can't be a web site's: it is an address, localhost or one of these names, or is missing."""
    name = host_name(header)
    if name in ("", "localhost", *hosts) or name.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def _encode(content: frames.Json) -> _EncodedFrame:
    plain = frames.event(content)
    return _EncodedFrame(plain, frames.compressed(plain))
