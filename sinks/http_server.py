"""An HTTP server whose clients can't hold it up: what the sinks serve, they serve by this one.

In: routes, an address, and a TLS context if there is one. Out: the answers. On failure: ``ListenError`` if the address
can't be had. A client that does not send its request loses its connection after a while.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Middleware

IDLE_S = 20.0
"""A connection without a whole request for so long is closed."""

MAX_CLIENTS = 128
"""So many connections are open at once; further ones are closed."""

_END_S = 1.0


class ListenError(Exception):
    """The address to serve on can't be had; the message says why."""

    exit_code = 1


@contextlib.asynccontextmanager
async def listening(
    routes: Iterable[web.RouteDef],
    address: tuple[str, int],
    *,
    option: str,
    context: ssl.SSLContext | None = None,
    middlewares: Iterable[Middleware] = (),
    closing: Callable[[], None] = lambda: None,
) -> AsyncIterator[tuple[str, int]]:
    """Serves while inside; gives the address that it got. ``option`` is the one that gave the address, for errors.

    ``closing`` is called before open requests are waited for.
    """
    application = web.Application(middlewares=middlewares)
    application.add_routes(routes)
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
            listener = await asyncio.get_running_loop().create_server(connect, host, port, ssl=context)
        except OSError as error:
            raise ListenError(f"{option}: can't serve on {host}:{port}: {error.strerror or error}") from error
        yield host, listener.sockets[0].getsockname()[1]
    finally:
        if listener is not None:
            listener.close()
        closing()
        await runner.cleanup()


class _TooMany(asyncio.Protocol):
    """A connection that finds no place."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes it."""
        transport.close()
