"""The HTTP server that Prometheus scrapes: ``/metrics`` (``?name[]=`` picks), and a page at ``/`` that leads there.

In:       requests. Out: the renderings. On failure: ``ListenError`` if the address can't be had.
A client that does not send its request, or does not take the answer, loses its connection after a while.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import cast

from aiohttp import web

from sinks.scrape.exposition import GivenUp, Renderings, accepted, gzip_accepted

IDLE_S = 20.0
"""A connection without a whole request for so long is closed."""

ANSWER_S = 60.0
"""A client has so long to take an answer."""

MAX_CLIENTS = 128
"""So many connections are open at once; further ones are closed."""

_END_S = 1.0
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><title>gpustream</title></head>
<body><h1>gpustream</h1><p>The latest value of every GPU's series: <a href="/metrics">/metrics</a></p></body>
</html>
"""


class ListenError(Exception):
    """The address to serve on can't be had; the message says why."""

    exit_code = 1


@contextlib.asynccontextmanager
async def serving(
    renderings: Renderings, address: tuple[str, int], on_scrape: Callable[[], None]
) -> AsyncIterator[tuple[str, int]]:
    """Serves while inside; gives the address that it got. ``on_scrape`` is called at each scrape."""
    application = web.Application()
    application.add_routes(_routes(renderings, on_scrape))
    runner = web.AppRunner(
        application, handle_signals=False, access_log=None, shutdown_timeout=_END_S, keepalive_timeout=IDLE_S
    )
    await runner.setup()
    server = cast("web.Server", runner.server)  # it has one, since it is set up

    def connect() -> asyncio.Protocol:
        return server() if len(server.connections) < MAX_CLIENTS else _TooMany()

    (host, port), listener = address, None
    try:
        try:
            listener = await asyncio.get_running_loop().create_server(connect, host, port)
        except OSError as error:
            raise ListenError(f"can't serve metrics on {host}:{port}: {error.strerror or error}") from error
        yield host, listener.sockets[0].getsockname()[1]
    finally:
        if listener is not None:
            listener.close()
        renderings.close()
        await runner.cleanup()


class _TooMany(asyncio.Protocol):
    """A connection that finds no place."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes it."""
        transport.close()


def _routes(renderings: Renderings, on_scrape: Callable[[], None]) -> list[web.RouteDef]:
    """What is answered, and what is not."""

    async def root(_: web.Request) -> web.Response:
        return web.Response(text=_PAGE, content_type="text/html")

    async def metrics(request: web.Request) -> web.StreamResponse:
        format_ = accepted(",".join(request.headers.getall("Accept", [])))
        headers = {"Content-Type": format_.content_type, "Vary": "Accept, Accept-Encoding"}
        if request.method == "HEAD":
            return web.StreamResponse(headers=headers)
        on_scrape()
        names = frozenset(name for name in request.query.getall("name[]", []) if name) or None
        try:
            if gzip_accepted(",".join(request.headers.getall("Accept-Encoding", []))):
                headers["Content-Encoding"] = "gzip"
                body = await renderings.compressed(format_, names)
            else:
                body = await renderings.text(format_, names)
        except GivenUp as error:
            raise web.HTTPServiceUnavailable(text="stopping\n") from error
        response = web.Response(body=body, headers=headers)
        try:
            async with asyncio.timeout(ANSWER_S):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionAbortedError("the client does not take the answer") from error
        return response

    async def elsewhere(request: web.Request) -> web.Response:
        if request.path in ("/", "/metrics"):
            raise web.HTTPMethodNotAllowed(request.method, ("GET", "HEAD"))
        raise web.HTTPNotFound(text="/metrics is here\n")

    return [web.get("/", root), web.get("/metrics", metrics), web.route("*", "/{elsewhere:.*}", elsewhere)]
