"""The HTTP server of the sinks, which no client can block.

In: routes, an address, and optionally a TLS context. Out: the answers.
On failure: ``ListenError`` if the address is not available. A client that does not send its request is disconnected
after a while.
"""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, cast

from aiohttp import web
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from delivery.listening import bound_host
from delivery.values import Address

log = logging.getLogger(__name__)

IDLE_S = 20.0
"""A connection without a complete request for this time is closed."""

MAX_CLIENTS = 128
"""The most open connections. A further one takes the place of the oldest that asks nothing, so that clients that only
hold connections keep nobody out."""

MAX_HEADERS = 64
"""The most headers of a request. Each may have 8 KiB, and they wait in memory until the last one is there."""

_END_S = 1.0
_RETRY_S = 1.0


class ListenError(Exception):
    """The address to listen on is not available; the message says why."""

    exit_code = 1


_OF_A_CLIENT = (ConnectionError, HttpProcessingError, web.RequestPayloadError)
"""A client has sent no proper request, or has broken off. What aiohttp logs of that is not kept."""

_requests_log = log.getChild("requests")
_requests_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], _OF_A_CLIENT)))


class _Clients:
    """The clients' ``connections``, the oldest first; one in its handshake is not done."""

    def __init__(self) -> None:
        self.connections: dict[asyncio.Future[tuple[asyncio.Transport, Any]], None] = {}
        self._answering: set[object] = set()  # the protocols of those that wait for an answer

    @web.middleware
    async def note_answering(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note for how long a connection waits for an answer."""
        self._answering.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self._answering.discard(request.protocol)

    def make_room(self, server: web.Server) -> None:
        """Forget the connections that are gone. If all are there, close the oldest one that asks nothing, or the
        oldest."""
        open_ = set(server.connections)
        for connection in list(self.connections):
            is_failed = connection.done() and (connection.cancelled() or connection.exception() is not None)
            if is_failed or (connection.done() and connection.result()[1] not in open_):
                del self.connections[connection]
        if len(self.connections) >= MAX_CLIENTS:
            idle = (each for each in self.connections if not each.done() or each.result()[1] not in self._answering)
            oldest = next(idle, next(iter(self.connections)))
            del self.connections[oldest]
            if oldest.done():
                oldest.result()[0].abort()
            else:
                oldest.cancel()


@contextlib.asynccontextmanager
async def listening(
    routes: Iterable[web.RouteDef],
    address: tuple[str, int],
    *,
    option: str,
    context: ssl.SSLContext | None = None,
    middlewares: Iterable[Middleware] = (),
    closing: Callable[[], None] = lambda: None,
    cancel_on_leave: bool = True,
    max_headers: int = MAX_HEADERS,
) -> AsyncIterator[tuple[str, int]]:
    """Serve inside of the context, and yield the actual address. ``option``: where the address is from, for errors.

    ``closing`` is called before the server waits for open requests. ``cancel_on_leave``: a handler is cancelled when
    its client leaves, so that requests of clients that ask and leave do not pile up.
    """
    clients = _Clients()
    application = web.Application(middlewares=[clients.note_answering, _close_without_length, *middlewares])
    application.add_routes(routes)
    runner = web.AppRunner(
        application,
        handle_signals=False,
        handler_cancellation=cancel_on_leave,
        access_log=None,
        logger=_requests_log,
        shutdown_timeout=_END_S,
        keepalive_timeout=IDLE_S,
        max_headers=max_headers,
        auto_decompress=False,  # nothing reads a body: the gigabytes that a small one may become must cost nothing
    )
    await runner.setup()
    server = cast("web.Server", runner.server)  # it has one, since it is set up
    server.request_factory = functools.partial(_without_expectation, server.request_factory)

    (host, port), listeners = address, list[socket.socket]()
    accepting: list[asyncio.Future[None]] = []
    try:
        try:
            listeners = await _bound_sockets(server, host, port)
            for listener in listeners:
                listener.listen()
        except OSError as error:
            # asyncio's own text says it twice
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
            raise ListenError(f"{option}: can't serve on {Address(host, port)}: {reason}") from error
        accepting = [asyncio.ensure_future(_accept(listener, server, context, clients)) for listener in listeners]
        yield host, listeners[0].getsockname()[1]
    finally:
        tasks: list[asyncio.Future[Any]] = [*accepting, *clients.connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in listeners:
            listener.close()
        closing()
        await runner.cleanup()


@web.middleware
async def _close_without_length(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Close the connection after an answer without a length to a client of HTTP/1.0: nothing else says where it ends.
    aiohttp leaves it open if the client wants to keep it."""
    response = await handler(request)
    if request.version < HttpVersion11 and response.content_length is None:
        response.force_close()
    return response


def _without_expectation(
    make: Callable[..., web.BaseRequest], message: RawRequestMessage, *connection: Any
) -> web.BaseRequest:
    """A request without what its client expects before it sends a body: nothing reads one. aiohttp's own answer repeats
    what is no ``100-continue``, and fails on bytes that are no text."""
    if "Expect" in message.headers:
        headers = message.headers.copy()
        headers.popall("Expect")
        message = message._replace(headers=type(message.headers)(headers))
    return make(message, *connection)


async def _bound_sockets(server: web.Server, host: str, port: int) -> list[socket.socket]:
    """A socket for each address of a host, for both families if it is all addresses. Raises OSError."""
    if (bind := bound_host(host)) == "::":  # asyncio would take IPv6 only
        listener = socket.create_server((bind, port), family=socket.AF_INET6, dualstack_ipv6=True)
        listener.setblocking(False)
        return [listener]
    bound = await asyncio.get_running_loop().create_server(server, bind, port, start_serving=False)
    listeners = [listener.dup() for listener in bound.sockets]
    bound.close()
    return listeners


async def _accept(
    listener: socket.socket, server: web.Server, context: ssl.SSLContext | None, clients: _Clients
) -> None:
    """Accept connections until cancelled. ``clients``: those of all listeners.

    A connection counts while it is there, although the server knows it only after its handshake.
    """
    loop, handshake_s = asyncio.get_running_loop(), IDLE_S if context is not None else None
    while True:
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError as error:  # the process has too many files open, or the client has gone already
            log.warning("a connection can't be accepted: %s", error.strerror or error)
            await asyncio.sleep(_RETRY_S)
            continue
        if len(clients.connections) >= MAX_CLIENTS:
            clients.make_room(server)
        connecting = loop.connect_accepted_socket(server, client, ssl=context, ssl_handshake_timeout=handshake_s)
        clients.connections[asyncio.ensure_future(connecting)] = None
        await asyncio.sleep(0)  # many clients at once keep no other work waiting
