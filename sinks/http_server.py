"""The HTTP server of the sinks, which no client can block.

In: routes, an address, and optionally a TLS context. Out: the answers.
On failure: ``ListenError`` if the address is not available. A client that does not send its request is disconnected
after a while.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Middleware

IDLE_S = 20.0
"""A connection without a complete request for this time is closed."""

MAX_CLIENTS = 128
"""The most open connections; further ones are closed."""

_END_S = 1.0


class ListenError(Exception):
    """The address to listen on is not available; the message says why."""

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
    """Serve inside of the context, and yield the actual address. ``option``: where the address is from, for errors.

    ``closing`` is called before the server waits for open requests.
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
            listener = await asyncio.get_running_loop().create_server(
                connect, host, port, ssl=context, ssl_handshake_timeout=IDLE_S if context is not None else None
            )
        except OSError as error:
            raise ListenError(f"{option}: can't serve on {host}:{port}: {error.strerror or error}") from error
        yield host, listener.sockets[0].getsockname()[1]
    finally:
        if listener is not None:
            listener.close()
        closing()
        await runner.cleanup()


class _TooMany(asyncio.Protocol):
    """A connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Closes it."""
        transport.close()
