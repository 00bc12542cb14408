"""The HTTP server that Prometheus scrapes: ``/metrics`` (``?name[]=`` picks), and a page at ``/`` that leads there.

In: requests. Out: the renderings. A client that does not take the answer loses its connection after a while.
"""

import asyncio
import contextlib
from collections.abc import Callable

from aiohttp import web

from delivery.listening import gzip_accepted
from sinks import http_server
from sinks.scrape.exposition import TEXT_UTF8, GivenUp, Renderings, accepted, pieces

ANSWER_S = 60.0
"""A client has so long to take an answer."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><title>gpustream</title></head>
<body><h1>gpustream</h1><p>The latest value of every GPU's series: <a href="/metrics">/metrics</a></p></body>
</html>
"""


def serving(
    renderings: Renderings, address: tuple[str, int], on_scrape: Callable[[], None]
) -> contextlib.AbstractAsyncContextManager[tuple[str, int]]:
    """Serves while inside; gives the address that it got. ``on_scrape`` is called at each scrape."""

    async def root(_: web.Request) -> web.Response:
        return web.Response(text=_PAGE, content_type="text/html")

    async def metrics(request: web.Request) -> web.StreamResponse:
        content_type = accepted(",".join(request.headers.getall("Accept", [])))
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        if request.method == "HEAD":
            return web.StreamResponse(headers=headers)
        on_scrape()
        utf8 = content_type == TEXT_UTF8
        names = frozenset(name for name in request.query.getall("name[]", []) if name) or None
        try:
            body = await renderings.compressed(names, utf8=utf8)
        except GivenUp as error:
            raise web.HTTPServiceUnavailable(text="stopping\n") from error
        packed = gzip_accepted(",".join(request.headers.getall("Accept-Encoding", [])))
        coding = {"Content-Encoding": "gzip", "Content-Length": str(len(body))} if packed else {}
        response = web.StreamResponse(headers=headers | coding)
        try:
            async with asyncio.timeout(ANSWER_S):
                await response.prepare(request)
                for piece in pieces(body, packed=packed):
                    await response.write(piece)
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

    routes = [web.get("/", root), web.get("/metrics", metrics), web.route("*", "/{elsewhere:.*}", elsewhere)]
    return http_server.listening(routes, address, option="--scrape-listen", closing=renderings.close)
