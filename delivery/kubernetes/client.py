"""The Kubernetes API over HTTP: requests and streams; bodies as they come.

In: the source of the credentials; the API server's answers. Out: :class:`Answer`, :class:`Stream`.
State: one connection pool, and the credentials, which are read again every minute and after a 401.
On failure: :class:`Unreachable` if there is no answer; an answer with an error status is returned as any other. If the
credentials can't be read again, the last ones stay in use.
"""

import asyncio
import contextlib
import logging
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec
from prometheus_client import Counter

from delivery.instruments import Instrument
from delivery.kafka_errors import describe
from delivery.kubernetes.credentials import SERVICE_ACCOUNT, ApiConnection, ConfigError, CredentialSource
from delivery.log_throttle import LogThrottle
from delivery.tasks import set_within
from topics.topic import UNDECODABLE

log = logging.getLogger(__name__)

REFRESH_S = 60.0
LOAD_WITHIN_S = 30.0
REFRESH_AGAIN_S = 5.0
CONNECT_WITHIN_S = 10.0
SILENCE_S = 100.0  # the server sends something on a watch every 60 s; one that is silent for so long is dead
LARGEST_ANSWER_BYTES = 256 * 1024 * 1024

LARGEST_ERROR_BYTES = 64 * 1024
ERROR_WITHIN_S = 10.0
LONGEST_RETRY_AFTER_S = 120.0
_LONGEST_MESSAGE = 300

UNREADY_AFTER_S = 30.0

_GROUP_VERSION = re.compile(r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?v[a-z0-9]{1,62}")
_NAME = re.compile(r"(?!\.{1,2}\Z)[^/%\x00-\x20\x7f]{1,253}")


class Unreachable(Exception):
    """There was no answer, or not all of it; the message says why. Ask again later."""

    def __init__(self, reason: Literal["connection", "tls", "timeout", "cut"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


def requests_instrument(name: str) -> Instrument:
    """The counter of a :class:`Client`'s requests, under its full name."""
    text = "Requests to the API server by the answer's status, or connection, tls, timeout or cut if there was none."
    return Instrument(name, "counter", text, ("code",))


def can_be_read(api_version: str, name: str) -> bool:
    """Whether there can be an object of this version and name. A tenant may write any text into an owner reference, and
    the API server takes it; in a path it could lead to something else."""
    return bool(_GROUP_VERSION.fullmatch(api_version) and _NAME.fullmatch(name))


class Answer(NamedTuple):
    """A whole answer of the API server; ``retry_after_s`` is its Retry-After header, cut to two minutes."""

    status: int
    body: bytes
    retry_after_s: float | None


class Stream:
    """An answer whose body is read while it comes."""

    def __init__(self, response: aiohttp.ClientResponse, silence_s: float) -> None:
        self._response, self._silence_s = response, silence_s
        self.status = response.status
        self.retry_after_s = retry_after_s(response)

    async def error_body(self) -> bytes:
        """The beginning of the body. Raises :class:`Unreachable`."""
        with reaching():
            async with asyncio.timeout(ERROR_WITHIN_S):
                return await read_body(self._response, LARGEST_ERROR_BYTES)

    async def lines(self, cap: int) -> AsyncGenerator[bytes | None]:
        """The lines as they come, without empty ones; None for each that is longer than ``cap`` bytes and dropped.
        Raises :class:`Unreachable`, also if the stream ends in the middle of a line, or no line ends for as long as a
        stream may be silent: a proxy may send blanks when its server is gone."""
        lines, last_line_s = LineSplitter(cap), time.monotonic()
        chunks = self._response.content.iter_any()
        while True:
            with reaching():
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            for line in lines.feed(chunk):
                yield line
                last_line_s = time.monotonic()
            if time.monotonic() - last_line_s > self._silence_s:
                raise Unreachable("timeout", f"no whole line within {self._silence_s:g} s")
        if lines.size:
            raise Unreachable("cut", "the stream ended in the middle of a line")


class LineSplitter:
    """Splits a stream of bytes into lines. ``size`` is the number of bytes of the incomplete last line.
    That line is kept as a list of parts, because it may come in thousands of them."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._parts: list[bytes] = []
        self.size = 0

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """The lines that end in this chunk; None for each that is longer than the cap."""
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._keep(end)
            if self.size:
                yield None if self.size > self._cap else b"".join(self._parts)
            self._parts, self.size = [], 0
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        self.size += len(part)
        if self.size > self._cap:
            self._parts = []
        elif part:
            self._parts.append(part)


def retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """The Retry-After header, of which two minutes count at most; the API server writes whole seconds."""
    text = response.headers.get("Retry-After", "")
    return min(float(text), LONGEST_RETRY_AFTER_S) if text.isascii() and text.isdigit() else None


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body, or the first ``max_bytes`` of it."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) >= max_bytes:
            break
    del content[max_bytes:]  # a slice would be one more copy
    return bytes(content)


@contextlib.contextmanager
def reaching(timeout_message: str = "no answer in time") -> Iterator[None]:
    """Raise every connection error of the block as :class:`Unreachable`, a timeout with ``timeout_message``."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise Unreachable("timeout", f"no connection in time ({describe(error)})") from error
    except TimeoutError as error:
        raise Unreachable("timeout", f"{timeout_message} ({describe(error)})") from error
    except (aiohttp.ClientSSLError, ssl.SSLError) as error:
        raise Unreachable("tls", f"TLS: {describe(error)}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unreachable("connection", describe(error)) from error


class Status(msgspec.Struct):
    """The object that the API server answers instead of the requested one."""

    code: int = 0
    message: str = ""
    reason: str = ""


_status = msgspec.json.Decoder(Status)


def message(body: bytes) -> str:
    """The message of an API server's Status; of any other body its beginning."""
    try:
        text = _status.decode(body).message
    except UNDECODABLE:
        text = body[: 4 * _LONGEST_MESSAGE].decode("utf-8", "replace")
    return " ".join(text.split())[:_LONGEST_MESSAGE] or "without a word"


class ApiHealth:
    """The health of some work with the API server, for the log and health checks. ``subject`` begins each sentence.
    A change is logged; a kind of problem that comes and goes is logged at most once a minute."""

    def __init__(self, subject: str, log: logging.Logger) -> None:
        self._subject, self._log = subject, log
        self._bad_since_s: float | None = None
        self._last = ""
        self._throttle = LogThrottle()
        self.problem = ""

    def good(self, state: str) -> None:
        """Note that there is no problem, and log the state unless it was logged last."""
        self.problem, self._bad_since_s = "", None
        if state != self._last:
            self._last = state
            self._log.info("%s", f"{self._subject}: {state}")

    def bad(self, kind: str, reason: str) -> None:
        """Note a problem of a kind; the reason may differ each time."""
        self.problem = reason
        if self._bad_since_s is None:
            self._bad_since_s = time.monotonic()
        if kind != self._last and self._throttle.is_due(kind):
            self._last = kind
            self._log.warning("%s", f"{self._subject}: {reason}")

    def lasting(self) -> list[str]:
        """The problem, if it has lasted for 30 s."""
        bad_s = 0.0 if self._bad_since_s is None else time.monotonic() - self._bad_since_s
        return [f"{self._subject}: {self.problem} (for {bad_s:.0f} s)"] if bad_s > UNREADY_AFTER_S else []


class Client:
    """A client of one cluster's API server. ``kubeconfig`` None: the pod's service account, else what kubectl uses.
    ``requests`` returns the counter of requests with a status, or with a reason of :class:`Unreachable`.
    Call :meth:`start` before anything else, and :meth:`close` when done."""

    def __init__(
        self,
        kubeconfig: Path | None,
        requests: Callable[[str], Counter] | None = None,
        *,
        service_account: Path = SERVICE_ACCOUNT,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._source = CredentialSource(kubeconfig, service_account)
        self._requests = requests
        self._refresh_s = refresh_s
        self._connection: ApiConnection | None = None
        self._unauthorized = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the configuration. Raises :class:`ConfigError`; whether the server answers is not checked."""
        self._connection = await self._source.connect()
        self._refreshing = asyncio.create_task(self._refresh(self._connection))

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        largest_bytes: int = LARGEST_ANSWER_BYTES,
    ) -> Answer:
        """Send a request; waits at most ``timeout_s`` for the answer. ``body`` is JSON. Raises :class:`Unreachable`;
        its reason is ``cut`` if the answer is longer than ``largest_bytes``."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_WITHIN_S)
        all_headers = {**({"Content-Type": "application/json"} if body is not None else {}), **(headers or {})}
        with self._counting_failures(), reaching(f"no answer within {timeout_s:g} s"):
            async with await self._send(
                method, path, timeout, params=params, headers=all_headers, data=body
            ) as response:
                content = await read_body(response, largest_bytes + 1)
                if len(content) > largest_bytes:
                    raise Unreachable("cut", f"the answer is longer than {largest_bytes} bytes")
        self._count(response.status)
        return Answer(response.status, content, retry_after_s(response))

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, silence_s: float = SILENCE_S
    ) -> AsyncIterator[Stream]:
        """Send a GET whose answer is read while it comes. It fails if nothing comes for ``silence_s``.
        Raises :class:`Unreachable`, on entering and while it is read."""
        connect_s = min(CONNECT_WITHIN_S, silence_s)
        timeout = aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s, sock_read=silence_s)
        with self._counting_failures(), reaching(f"no answer within {silence_s:g} s"):
            response = await self._send("GET", path, timeout, params=params, headers={})
        self._count(response.status)
        try:
            yield Stream(response, silence_s)
        finally:
            response.close()

    async def close(self) -> None:
        """Close the connections; requests in flight fail."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        if self._connection is not None:
            await self._connection.close()

    async def _send(
        self, method: str, path: str, timeout: aiohttp.ClientTimeout, **options: Any
    ) -> aiohttp.ClientResponse:
        if self._connection is None:
            raise RuntimeError("not started")
        response = await self._connection.request(method, path, timeout, **options)
        if response.status == 401:
            self._unauthorized.set()
        return response

    def _count(self, code: int | str) -> None:
        if self._requests is not None:
            self._requests(str(code)).inc()

    @contextlib.contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except Unreachable as error:
            self._count(error.reason)
            raise

    async def _refresh(self, connection: ApiConnection) -> None:
        """Read the credentials again and again: tokens change every hour, certificates every year. Never returns."""
        logged = ""
        while True:
            await set_within(self._unauthorized, self._refresh_s)
            unauthorized = self._unauthorized.is_set()
            self._unauthorized.clear()
            problem = ""
            try:
                async with asyncio.timeout(LOAD_WITHIN_S):
                    changed = await self._source.refreshed(connection, login=unauthorized)
                if changed is not None:
                    log.info("the API server's certificate authority or our certificate changed: connecting again")
                    self._connection = changed
                    await connection.close()
                    connection = changed
            except (ConfigError, TimeoutError) as error:
                problem = str(error) or f"they were not there within {LOAD_WITHIN_S:g} s"
            if problem and problem != logged:
                log.warning("the credentials could not be read again, and stay what they were: %s", problem)
            logged = problem
            await asyncio.sleep(min(REFRESH_AGAIN_S, self._refresh_s))
