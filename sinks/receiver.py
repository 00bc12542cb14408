"""A receiver over HTTP: one attempt at a time, and for alerts, sending until it accepts or refuses.

:class:`Http` is the only network code of the sinks that write over HTTP; whatever goes wrong on the way is a
:class:`Reply` with status 0. :class:`Receiver` sends a request of alerts by this policy:

| answer | policy |
|---|---|
| 2xx | accepted |
| none, 408, 425, 429, 5xx | tried again for as long as it takes, after what `Retry-After` says |
| 1xx, 3xx, 401, 403, 404, 405, 407, 410 | likewise: the configuration is wrong, not what was sent |
| any other 4xx | refused; tried again too, if so many in a row are refused that the receiver refuses everything |

State: the credentials as they are in their files by now; which requests are tried again, and why.
On failure: a request is tried again for as long as it takes. To give up, set ``abandon``: :class:`Abandoned` is raised
after the attempt that is under way, and the receiver may have the request then, or not.
"""

import asyncio
import base64
import logging
import math
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from delivery.dead_letters import Abandoned
from delivery.instruments import Instrument, Instruments
from sinks.settings import HttpSettings

log = logging.getLogger(__name__)

Meaning = Literal["accepted", "refused", "again", "misconfigured"]

MAX_RETRY_AFTER_S = 300.0
BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 15.0
_TEXT_BYTES = 16 * 1024
_LOOK_EVERY_S = 1.0

_AGAIN = frozenset({0, 408, 425, 429})
_MISCONFIGURED = frozenset({401, 403, 404, 405, 407, 410})


class Reply(NamedTuple):
    """What came back. ``status`` 0: nothing did, and ``text`` says why."""

    status: int
    text: str = ""
    headers: Mapping[str, str] = {}

    @property
    def retry_after_s(self) -> float | None:
        """How long the receiver wants us to wait, from a number or a date; None if it does not say."""
        value = self.headers.get("Retry-After")
        if value is None:
            return None
        if value.isascii() and value.isdigit():
            return float(value)
        try:
            return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
        except (ValueError, TypeError, OverflowError):
            return None


class Http:
    """A client of receivers. Use :meth:`close` when done."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._credentials = Credentials(settings)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Make one attempt at sending a body."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._settings.request_timeout_s),
                headers={**dict(self._settings.headers), "User-Agent": f"gpustream/{version('gpustream')}"},
                auto_decompress=True,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        try:
            own, context = self._credentials.now()
            async with self._session.post(
                url, data=body, headers={**headers, **own}, ssl=context or True, allow_redirects=False
            ) as response:
                text = (await response.content.read(_TEXT_BYTES)).decode("utf-8", "replace")
                await response.read()
                return Reply(response.status, text, response.headers)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return Reply(0, f"{type(error).__name__}: {error}".strip(": "))

    async def close(self) -> None:
        """Close what is open."""
        if self._session is not None:
            await self._session.close()
            self._session = None
            await asyncio.sleep(0)


class Credentials:
    """What proves who we are: read from its files again when they change, looked at once a second."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._looked_s = -math.inf
        self._stamp: list[tuple[int, int, int]] = []
        self._headers: dict[str, str] = {}
        self._context: ssl.SSLContext | None = None

    def now(self) -> tuple[dict[str, str], ssl.SSLContext | None]:
        """Headers, and the TLS context (None: the default one). Raises OSError or ValueError for unusable files."""
        if time.monotonic() - self._looked_s < _LOOK_EVERY_S:
            return self._headers, self._context
        s = self._settings
        secret_file = s.bearer_token_file or s.basic_auth_password_file
        found = [path.stat() for path in (secret_file, s.tls_ca, s.tls_cert, s.tls_key) if path is not None]
        stamp = [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]
        if stamp != self._stamp:
            headers: dict[str, str] = {}
            if secret_file is not None:
                secret = secret_file.read_text().strip()
                pair = base64.b64encode(f"{s.basic_auth_user}:{secret}".encode()).decode()
                headers["Authorization"] = f"Basic {pair}" if s.bearer_token_file is None else f"Bearer {secret}"
            context = None
            if s.tls_ca is not None or s.tls_cert is not None:
                context = ssl.create_default_context(cafile=s.tls_ca)
            if context is not None and s.tls_cert is not None:
                context.load_cert_chain(s.tls_cert, s.tls_key)
            self._headers, self._context, self._stamp = headers, context, stamp
        self._looked_s = time.monotonic()
        return self._headers, self._context


async def pause(
    attempt: int, retry_after_s: float | None, abandon: asyncio.Event, *, first_s: float, max_s: float
) -> None:
    """Wait before the next attempt: longer each time, and as long as the receiver asks. Raises Abandoned."""
    delay = min(max_s, first_s * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)
    if retry_after_s is not None:
        delay = max(delay, min(retry_after_s, MAX_RETRY_AFTER_S))
    try:
        async with asyncio.timeout(delay):
            await abandon.wait()
    except TimeoutError:
        return
    raise Abandoned


class Request(NamedTuple):
    """What is sent."""

    body: bytes
    headers: Mapping[str, str]


Post = Callable[[str, bytes, Mapping[str, str]], Awaitable[Reply]]
"""Makes one attempt at sending a body, with headers, to a URL; whatever goes wrong is in the reply."""


def meaning(status: int) -> Meaning:
    """What to do about an answer."""
    if status in _AGAIN or status >= 500:
        return "again"
    if status in _MISCONFIGURED or status < 200 or 300 <= status < 400:
        return "misconfigured"
    return "accepted" if status < 300 else "refused"


def instruments(requests: str, seconds: str, failing: str) -> tuple[Instrument, ...]:
    """What a sink says of its receivers, each by its address without path and credentials, under these names."""
    return (
        Instrument(
            requests,
            "counter",
            "Attempts, by what the answer meant: accepted, refused, again (tried again), misconfigured (likewise).",
            ("receiver", "result"),
        ),
        Instrument(
            seconds,
            "histogram",
            "How long an attempt took.",
            ("receiver",),
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
        ),
        Instrument(
            failing, "gauge", "1 while something is tried again or everything is refused, else 0.", ("receiver",)
        ),
    )


class Receiver:
    """Where one URL leads to. At most ``at_once`` attempts are under way.

    After ``most_refused`` refusals in a row a request that is refused is tried again, until one is accepted.
    ``failing`` says why something is tried again, or everything refused; None if it is not. ``on_recovery`` is
    called when that is over. ``first_s`` is the first wait before trying again.
    """

    def __init__(
        self,
        url: str,
        post: Post,
        component: str,
        made: Instruments,
        *,
        at_once: int = 1,
        most_refused: float = math.inf,
        first_s: float = BACKOFF_FIRST_S,
        on_recovery: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = urlsplit(url).netloc.rpartition("@")[2]
        self.failing: str | None = None
        self._url, self._post, self._made, self._prefix = url, post, made, f"gpustream_{component}"
        self._slots = asyncio.Semaphore(at_once)
        self._most_refused, self._first_s, self._on_recovery = most_refused, first_s, on_recovery
        self._refused_in_a_row = 0
        self._tried_again: dict[object, str] = {}
        made.gauge(f"{self._prefix}_receiver_failing", self.name).set(0)

    async def send(self, request: Callable[[], Request], abandon: asyncio.Event) -> str | None:
        """Send until accepted (None) or refused (why). Raises Abandoned.

        ``request`` is asked again at each attempt, for what says how late it is.
        """
        attempt, this = 0, object()
        try:
            while not abandon.is_set():
                reply = await self._attempt(request)
                means, said = meaning(reply.status), " ".join(reply.text.split())[:300]
                said = f"HTTP {reply.status}: {said}".rstrip(": ") if reply.status else said
                self._made.counter(f"{self._prefix}_requests_total", self.name, means).inc()
                if means == "accepted":
                    self._refused_in_a_row = 0
                    return self._answered(this, None)
                self._refused_in_a_row += means == "refused"
                if means == "refused" and self._refused_in_a_row <= self._most_refused:
                    return self._answered(this, said)
                self._fail(this, f"{'it refuses everything' if means == 'refused' else means}: {said}")
                await pause(attempt, reply.retry_after_s, abandon, first_s=self._first_s, max_s=_BACKOFF_MAX_S)
                attempt += 1
            raise Abandoned
        finally:
            self._tried_again.pop(this, None)

    async def _attempt(self, request: Callable[[], Request]) -> Reply:
        async with self._slots:
            start = time.perf_counter()
            try:
                body, headers = request()
            except (OSError, ValueError) as error:
                return Reply(0, f"{type(error).__name__}: {error}")
            reply = await self._post(self._url, body, headers)
        self._made.histogram(f"{self._prefix}_request_seconds", self.name).observe(time.perf_counter() - start)
        return reply

    def refuses_all(self, why: str | None) -> None:
        """All that was sent together was refused, each for itself; None: something of it was not."""
        if why is None:
            self._answered(Receiver, None)
        else:
            self._fail(Receiver, f"it refuses everything: {why}")

    def _fail(self, request: object, why: str) -> None:
        """A request is tried again."""
        if self.failing is None:
            log.warning("%s does not accept, trying again: %s", self.name, why)
        self._tried_again[request] = self.failing = why
        self._made.gauge(f"{self._prefix}_receiver_failing", self.name).set(1)

    def _answered(self, request: object, refused: str | None) -> str | None:
        """A request is accepted, or refused. Gives why."""
        self._tried_again.pop(request, None)
        if self.failing is not None:
            self.failing = next(reversed(self._tried_again.values()), None)
            self._made.gauge(f"{self._prefix}_receiver_failing", self.name).set(self.failing is not None)
            if self.failing is None:
                log.info("%s answers again", self.name)
                self._on_recovery()
        return refused
