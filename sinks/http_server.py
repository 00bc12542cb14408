"""The HTTP server of the sinks, which no client can block.

In: routes, an address, and optionally a TLS context. Out: the answers.
On failure: ``ListenError`` if the address is not available. A client that does not send its request is disconnected
after a while.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

log = logging.getLogger(__name__)

IDLE_S = 20.0
"""A connection without a complete request for this time is closed."""

MAX_CLIENTS = 128
"""The most open connections; further ones are closed."""

_MAX_HEADERS = 512
"""The API server sends a header for each group of a user, of which directories give hundreds."""

_END_S = 1.0
_RETRY_S = 1.0


class ListenError(Exception):
    """The address to listen on is not available; the message says why."""

    exit_code = 1


def _keep_log_record(record: logging.LogRecord) -> bool:
    """Whether to keep a log record of aiohttp: not that a client sends no proper request, or breaks off."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, ConnectionError | HttpProcessingError | web.RequestPayloadError)


_requests_log = log.getChild("requests")
_requests_log.addFilter(_keep_log_record)


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
        application,
        handle_signals=False,
        access_log=None,
        logger=_requests_log,
        shutdown_timeout=_END_S,
        keepalive_timeout=IDLE_S,
        max_headers=_MAX_HEADERS,
    )
    await runner.setup()
    server = cast("web.Server", runner.server)  # it has one, since it is set up

    (host, port), listeners = address, list[socket.socket]()
    opening: set[asyncio.Future[Any]] = set()
    accepting: list[asyncio.Future[None]] = []
    try:
        try:
            bound = await asyncio.get_running_loop().create_server(server, host, port, start_serving=False)
            listeners = [listener.dup() for listener in bound.sockets]
            bound.close()
            for listener in listeners:
                listener.listen()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            raise ListenError(f"{option}: can't serve on {host}:{port}: {reason}") from error  # asyncio says it twice
        accepting = [asyncio.ensure_future(_accept(listener, server, context, opening)) for listener in listeners]
        yield host, listeners[0].getsockname()[1]
    finally:
        for task in (*accepting, *opening):
            task.cancel()
        await asyncio.gather(*accepting, *opening, return_exceptions=True)
        for listener in listeners:
            listener.close()
        closing()
        await runner.cleanup()


async def _accept(
    listener: socket.socket, server: web.Server, context: ssl.SSLContext | None, opening: set[asyncio.Future[Any]]
) -> None:
    """Accept connections until cancelled. ``opening``: those of all listeners that are not the server's yet.

    A connection counts while it is there, although the server knows it only after its handshake.
    """
    loop, handshake_s = asyncio.get_running_loop(), IDLE_S if context is not None else None

    def opened(connection: asyncio.Future[Any]) -> None:
        opening.discard(connection)
        if not connection.cancelled():
            connection.exception()  # a client that breaks off is no error

    while True:
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError as error:  # the process has too many files open, or the client has gone already
            log.warning("a connection can't be accepted: %s", error.strerror or error)
            await asyncio.sleep(_RETRY_S)
            continue
        if len(server.connections) + len(opening) >= MAX_CLIENTS:
            client.close()
        else:
            connection = asyncio.ensure_future(
                loop.connect_accepted_socket(server, client, ssl=context, ssl_handshake_timeout=handshake_s)
            )
            opening.add(connection)
            connection.add_done_callback(opened)
        await asyncio.sleep(0)  # many clients at once keep no other work waiting
