"""The HTTP server of every component: its own metrics, whether it lives, and whether it is ready.

In:       the registries and the readiness reasons of the components of this process.
Out:      ``/metrics`` (Prometheus text or OpenMetrics; ``?name[]=`` picks samples), ``/healthz`` (200 while the event
          loop turns, else 503), ``/readyz`` (503 and the reasons until there are none).
On failure: ``ListenError`` if it can't listen on the address.
It answers from threads of its own, so that it can report that the event loop hangs. It imports nothing that
prometheus-client does not import anyway: a node's producer has to stay small.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import gzip
import io
import logging
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from importlib.metadata import version
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import Metric
from prometheus_client.exposition import ThreadingWSGIServer, choose_encoder
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from delivery.instruments import Instrument, Instruments
from delivery.listening import bound_host, gzip_accepted
from delivery.redaction import redact
from delivery.values import Address

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

T = TypeVar("T")

INSTRUMENTS = (
    Instrument("gpustream_build_info", "gauge", "Always 1; the version is a label.", ("version",)),
    Instrument("gpustream_ready", "gauge", "Whether the process is ready, as /readyz says: 1 or 0."),
    Instrument("gpustream_loop_lag_seconds", "gauge", "By how much the event loop was late at its last beat."),
)

HUNG_AFTER_S = 10.0
"""An event loop that has not turned for this long hangs."""

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_ORIGIN = re.compile("^https?://[^/?]*", re.IGNORECASE)
_BEAT_S = 1.0
_ANSWER_WITHIN_S = 2.0
_POLL_S = 0.1

CLIENT_S = 10.0
"""How long a client may take to send its request, and again to receive the answer."""

MAX_CLIENTS = 64
"""At most this many connections are served at once, each by a thread. A further one takes the place of the oldest, so
that clients that only hold connections do not keep the kubelet's probes out."""

MAX_REQUEST_BYTES = 128 * 1024
"""A longer request is not read to its end: the library takes 6 MiB of headers from a client, and copies them."""


class ListenError(Exception):
    """The process can't listen on the address."""

    exit_code = 1


class Health:
    """The health and own metrics of a process. ``not_ready`` returns the reasons of all its components.

    Made on the event loop; every method but :meth:`beat` may be called from any other thread.
    """

    def __init__(self, registries: Iterable[Collector], not_ready: Callable[[], list[str]]) -> None:
        self._not_ready = not_ready
        self._loop = asyncio.get_running_loop()
        self._beat_s = time.monotonic()
        self.instruments = Instruments(INSTRUMENTS)
        self.instruments.gauge("gpustream_build_info", version("gpustream")).set(1)
        ProcessCollector(registry=self.instruments.registry)
        GCCollector(registry=self.instruments.registry)
        self._families = Families(
            [*registries, self.instruments.registry],
            at_once=lambda collect: self._on_the_loop(collect, collect),  # beside it, if it does not answer
        )

    def reasons(self) -> list[str]:
        """Why the process is not ready. The components are asked on their own thread."""
        silent = [f"the event loop has not answered for {_ANSWER_WITHIN_S:.0f} s"]
        return [*descriptor_errors(), *self._on_the_loop(self._not_ready, lambda: silent)]

    def _on_the_loop(self, function: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Calls a function on the event loop, between two steps of the components, so that their counts are consistent.

        If the event loop does not answer, the result is that of ``otherwise``.
        """

        async def call() -> T:
            return function()

        future = asyncio.run_coroutine_threadsafe(call(), self._loop)
        try:
            return future.result(_ANSWER_WITHIN_S)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            return otherwise()

    def hung(self) -> bool:
        """Whether the event loop has not turned for too long."""
        return time.monotonic() - self._beat_s > HUNG_AFTER_S

    def answer(self, environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        """The WSGI application."""
        status, headers, path = "200 OK", [("Content-Type", "text/plain; charset=utf-8")], environ.get("PATH_INFO", "")
        if path == "/metrics":
            status, headers, body = self._metrics(environ)
        elif path == "/healthz":
            body = b"ok\n"
            if self.hung():
                status, body = "503 Service Unavailable", b"the event loop hangs\n"
        elif path == "/readyz":
            body = b"ready\n"
            if reasons := self.reasons():
                status, body = "503 Service Unavailable", "".join(f"{redact(reason)}\n" for reason in reasons).encode()
        else:
            status, body = "404 Not Found", b"/metrics, /healthz and /readyz are here\n"
        start(status, [*headers, ("Content-Length", str(len(body)))])
        return [] if environ.get("REQUEST_METHOD") == "HEAD" else [body]

    def _metrics(self, environ: "WSGIEnvironment") -> tuple[str, list[tuple[str, str]], bytes]:
        if environ.get("REQUEST_METHOD", "GET") not in ("GET", "HEAD"):
            return "405 Method Not Allowed", [("Allow", "GET,HEAD")], b"GET and HEAD are what can be asked here\n"
        self.instruments.gauge("gpustream_ready").set(not self.reasons())
        try:
            encode, content_type = choose_encoder(environ.get("HTTP_ACCEPT", ""))
        except (TypeError, ValueError):  # the library raises these for a version that is no number
            encode, content_type = choose_encoder("")
        names = parse_qs(environ.get("QUERY_STRING", "")).get("name[]")
        body = encode(self._families if names is None else self._families.restricted_registry(names))
        headers = [("Content-Type", content_type), ("Vary", "Accept, Accept-Encoding")]
        if gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", "")):
            return "200 OK", [*headers, ("Content-Encoding", "gzip")], gzip.compress(body)
        return "200 OK", headers, body

    async def beat(self) -> None:
        """Measures, for ever, how late the event loop is."""
        while True:
            due_s = time.monotonic() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self._beat_s = time.monotonic()
            self.instruments.gauge("gpustream_loop_lag_seconds").set(max(0.0, self._beat_s - due_s))


def descriptor_errors() -> list[str]:
    """A sentence if the process has no file descriptor left for a file or a connection; else nothing."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        if error.errno not in _NO_DESCRIPTOR:
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return [f"no file descriptor is left ({error.strerror}; the limit is {limit}): raise it, see `ulimit -n`"]
    return []


Collect = Callable[[], list[Metric]]


class Families(Collector):
    """Several registries as one: a metric that two of them have is exposed once, with the samples of both.

    ``at_once`` calls the function that collects, so that nothing changes meanwhile. ``names``: only samples with these
    names; None: all.
    """

    def __init__(
        self,
        registries: Iterable[Collector],
        *,
        at_once: Callable[[Collect], list[Metric]],
        names: Iterable[str] | None = None,
    ) -> None:
        self._registries, self._at_once = list(registries), at_once
        self._names = None if names is None else frozenset(names)

    def restricted_registry(self, names: Iterable[str]) -> "Families":
        """Only the samples with one of these names."""
        return Families(self._registries, at_once=self._at_once, names=names)

    def collect(self) -> Iterator[Metric]:
        """Every metric family once, without the ``_created`` series that the client library adds."""
        merged: dict[str, Metric] = {}
        families = self._at_once(lambda: [family for registry in self._registries for family in registry.collect()])
        for family in families:
            samples = [
                sample
                for sample in family.samples
                if not sample.name.endswith("_created") and (self._names is None or sample.name in self._names)
            ]
            existing = merged.setdefault(family.name, family)
            existing.samples = samples if existing is family else [*existing.samples, *samples]
        yield from (family for family in merged.values() if family.samples or self._names is None)


@contextlib.asynccontextmanager
async def listening(application: "WSGIApplication", address: Address | None) -> AsyncIterator[Address | None]:
    """Serves the application while inside; gives the address it got, or None if it is off."""
    if address is None:
        yield None
        return
    try:
        server = _Server(address)
    except OSError as error:
        raise ListenError(f"--listen: can't listen on {address}: {error.strerror or error}") from error
    server.set_app(application)
    threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="health", daemon=True).start()
    try:
        yield Address(address.host, server.server_port)
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


class _LimitedReader(io.RawIOBase):
    """Reads from a client until a deadline of the monotonic clock, and then raises TimeoutError; of a request that is
    too long, ConnectionAbortedError."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self._connection = connection
        self._deadline_s = deadline_s
        self._left_bytes = MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Waits for bytes until the deadline, and reads them."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if self._left_bytes <= 0:
            raise ConnectionAbortedError
        self._connection.settimeout(left_s)
        try:
            count = self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(CLIENT_S)
        self._left_bytes -= count
        return count


class _TimedWriter(io.BufferedIOBase):
    """Writes to a client. One that takes the answer too slowly is gone: wsgiref prints any other error."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._connection.sendall(data)
        except TimeoutError as error:
            raise ConnectionAbortedError from error
        return len(data)


class _Handler(WSGIRequestHandler):
    """Logs no requests, and drops a client that does not send its whole request in time."""

    def setup(self) -> None:
        """Sets a deadline for the whole request, so that one that comes byte by byte gets no more time."""
        super().setup()
        self.connection.settimeout(CLIENT_S)
        self.rfile.close()
        self.rfile = io.BufferedReader(_LimitedReader(self.connection, time.monotonic() + CLIENT_S))
        self.wfile = _TimedWriter(self.connection)

    def get_environ(self) -> "WSGIEnvironment":
        """The request for WSGI. Its target may be a whole address (RFC 9112, 3.2.2), of which the path counts."""
        self.path = _ORIGIN.sub("", self.path)
        return super().get_environ()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parameter's name where it is called
        """Nothing is logged."""


class _Server(ThreadingWSGIServer):
    """The library's server, at an IPv4 or IPv6 address, which never asks a name server for its own name.

    It keeps a file descriptor in reserve, so that it can answer when the process has none left.
    """

    request_queue_size = 32

    def __init__(self, address: Address) -> None:
        results = socket.getaddrinfo(bound_host(address.host), address.port, type=socket.SOCK_STREAM)
        # of a name that has both, IPv4
        self.address_family, _, _, _, resolved = min(results, key=lambda result: result[0] != socket.AF_INET)
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        self._clients: dict[socket.socket, None] = {}  # the oldest first
        self._reserve: int | None = os.open(os.devnull, os.O_RDONLY)
        super().__init__((str(resolved[0]), address.port), _Handler)

    def get_request(self) -> Any:
        """Accepts a client, with the descriptor in reserve if no other is left."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None
        try:
            return super().get_request()
        except OSError:  # somebody else took it, and the client, which waits, would be accepted again at once
            time.sleep(_POLL_S)
            raise

    def close_request(self, request: Any) -> None:
        """Closes a client's connection, and takes a descriptor in reserve again if the reserve was used."""
        super().close_request(request)
        if self._reserve is None:
            with contextlib.suppress(OSError):
                self._reserve = os.open(os.devnull, os.O_RDONLY)

    def server_close(self) -> None:
        """Closes the listening socket and the descriptor in reserve."""
        super().server_close()
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a client in a thread of its own. If too many are served, the oldest one loses its connection."""
        if not self._slots.acquire(blocking=False):
            for oldest in list(self._clients)[:1]:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            if not self._slots.acquire(timeout=_POLL_S):
                self.shutdown_request(request)
                return
        self._clients[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._clients.pop(request, None)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or was too slow is no fault of ours; anything else is."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("a request of %s failed", client_address, exc_info=error)

    def server_bind(self) -> None:
        """Binds, and sets the environment that WSGI needs."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment] # a TCP address
        self.setup_environ()
