"""The HTTP server that Prometheus scrapes: ``/metrics``, and a page at ``/`` that leads there.

In:       requests. Out: the renderings. On failure: ``ListenError`` if the address can't be had.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web

from sinks.scrape.families import GivenUp
from sinks.scrape.formats import Format, accepted, gzip_accepted
from sinks.scrape.rendering import Renderings

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
    """Serves while inside; gives the address that it got. ``on_scrape`` is told of each scrape."""
    application = web.Application()
    application.add_routes(_Pages(renderings, on_scrape).routes())
    runner = web.AppRunner(application, handle_signals=False, access_log=None, shutdown_timeout=_END_S)
    await runner.setup()
    try:
        yield await _listen(runner, *address)
    finally:
        renderings.close()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int) -> tuple[str, int]:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ListenError(f"can't serve metrics on {host}:{port}: {error.strerror or error}") from error
    return host, runner.addresses[0][1]


class _Pages:
    def __init__(self, renderings: Renderings, on_scrape: Callable[[], None]) -> None:
        self._renderings = renderings
        self._on_scrape = on_scrape

    def routes(self) -> list[web.RouteDef]:
        """What is answered, and what is not."""
        return [
            web.get("/", self._root),
            web.get("/metrics", self._metrics),
            web.route("*", "/{elsewhere:.*}", self._elsewhere),
        ]

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        format_ = accepted(",".join(request.headers.getall("Accept", [])))
        headers = {"Content-Type": format_.content_type, "Vary": "Accept, Accept-Encoding"}
        if request.method == "HEAD":
            return web.StreamResponse(headers=headers)
        self._on_scrape()
        try:
            return await self._rendered(request, format_, headers)
        except GivenUp as error:
            raise web.HTTPServiceUnavailable(text="stopping\n") from error

    async def _rendered(self, request: web.Request, format_: Format, headers: Mapping[str, str]) -> web.Response:
        if not gzip_accepted(",".join(request.headers.getall("Accept-Encoding", []))):
            return web.Response(body=await self._renderings.text(format_), headers=headers)
        body = await self._renderings.compressed(format_)
        return web.Response(body=body, headers={**headers, "Content-Encoding": "gzip"})

    async def _root(self, _: web.Request) -> web.Response:
        return web.Response(text=_PAGE, content_type="text/html")

    async def _elsewhere(self, request: web.Request) -> web.Response:
        if request.path in ("/", "/metrics"):
            raise web.HTTPMethodNotAllowed(request.method, ("GET", "HEAD"))
        raise web.HTTPNotFound(text="/metrics is here\n")
