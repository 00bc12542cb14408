"""Receivers over HTTP: single attempts, and for alerts, retries until the receiver accepts or refuses.

:class:`Http` is the only network code of the sinks that write over HTTP; a network error is a :class:`Reply` with
status 0. :class:`Receiver` sends a request of alerts by this policy:

| answer | policy |
|---|---|
| 2xx | accepted |
| none, 408, 425, 429, 5xx | retried for as long as it takes, after `Retry-After` |
| 1xx, 3xx, 401, 403, 404, 405, 407, 410 | likewise: the configuration is wrong, unless others are accepted meanwhile |
| any other 4xx | refused; but retried once so many in a row are refused that the receiver refuses everything |

State: the current credentials from their files; which requests are being retried, and why.
On failure: a request is retried for as long as it takes. To give up, set ``abandon``: :class:`Abandoned` is raised
after the current attempt, and the receiver may or may not have the request then.
"""

import asyncio
import base64
import contextlib
import logging
import math
import random
import re
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
from delivery.proxy import proxy_of
from delivery.redaction import redact
from delivery.tasks import set_within
from sinks.settings import HttpSettings

log = logging.getLogger(__name__)

Meaning = Literal["accepted", "refused", "again", "misconfigured"]

MAX_RETRY_AFTER_S = 300.0
BACKOFF_FIRST_S = 0.2
MISCONFIGURED = 5
"""See :meth:`Receiver.send`."""

_BACKOFF_MAX_S = 15.0
_TEXT_BYTES = 16 * 1024
_TEXT_S = 5.0
_LINE_CHARACTERS = 300
_CHECK_EVERY_S = 1.0

_PATH = re.compile(r"(https?://[^\s/?#]+)[/?#]\S*")
"""The path of a URL, which may be a secret."""

_AGAIN = frozenset({0, 408, 425, 429})
_MISCONFIGURED = frozenset({401, 403, 404, 405, 407, 410})


class Reply(NamedTuple):
    """The answer to an attempt. ``status`` 0: there was none, and ``text`` says why."""

    status: int
    text: str = ""
    headers: Mapping[str, str] = {}

    @property
    def retry_after_s(self) -> float | None:
        """The wait that the receiver asks for, as a number or a date; None if it does not ask."""
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
        self._proxies: dict[str, str | None] = {}  # by URL

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Make one attempt at sending a body."""
        if self._session is None:
            given = self._settings.headers
            names = {name.lower() for name, _ in given}
            defaults = {"User-Agent": f"gpustream/{version('gpustream')}", "Accept-Encoding": "identity"}
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._settings.request_timeout_s),
                headers=(*(header for header in defaults.items() if header[0].lower() not in names), *given),
                auto_decompress=False,  # a coding that aiohttp does not know would be no answer at all
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        try:
            if url not in self._proxies:
                proxy = self._proxies[url] = proxy_of(url)
                if proxy is not None:
                    log.info("%s: reached through the proxy %s", address_of(url), address_of(proxy))
            credentials, context = self._credentials.current()
            async with self._session.post(
                url,
                data=body,
                headers={**headers, **credentials},
                proxy=self._proxies[url],
                ssl=context or True,
                allow_redirects=False,
            ) as response:
                text = b""
                with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):  # the status is the answer
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_TEXT_S):
                            async for chunk in response.content.iter_any():
                                text += chunk
                                if len(text) >= _TEXT_BYTES:
                                    break
                    text += response.content.read_nowait()  # it came while this process was stopped
                shown = redact(text[:_TEXT_BYTES].decode("utf-8", "replace"))
                return Reply(response.status, shown, response.headers)
        except aiohttp.ClientResponseError as error:  # its own text has the URL, whose path may be a secret
            return Reply(0, _line(f"{type(error).__name__}: {error.status}, {error.message}"))
        except aiohttp.InvalidURL:
            return Reply(0, "InvalidURL: not an address: look at the ports in --url and in HTTPS_PROXY")
        except TimeoutError:
            return Reply(0, f"no answer within {self._settings.request_timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = _PATH.sub(r"\1", f"{type(error).__name__}: {error}")
            return Reply(0, _line(reason).strip(": "))  # what is no HTTP may be long

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
            await asyncio.sleep(0)


def _line(text: str) -> str:
    """The beginning of a text, in one line."""
    return " ".join(text.split())[:_LINE_CHARACTERS]


def address_of(url: str) -> str:
    """The host and the port of a URL, without user and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


class Credentials:
    """The client's credentials, read from their files again when those change; that is checked once a second."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._checked_s = -math.inf
        self._stamp: list[tuple[int, int, int]] = []
        self._headers: dict[str, str] = {}
        self._context: ssl.SSLContext | None = None

    def current(self) -> tuple[dict[str, str], ssl.SSLContext | None]:
        """Headers, and the TLS context (None: the default one). Raises OSError, or ValueError with a sentence."""
        if time.monotonic() - self._checked_s < _CHECK_EVERY_S:
            return self._headers, self._context
        s = self._settings
        secret_file = s.bearer_token_file or s.basic_auth_password_file
        files = [path.stat() for path in (secret_file, s.tls_ca, s.tls_cert, s.tls_key) if path is not None]
        stamp = [(file.st_mtime_ns, file.st_size, file.st_ino) for file in files]
        if stamp != self._stamp:
            headers: dict[str, str] = {}
            if secret_file is not None:
                secret = secret_file.read_text(encoding="utf-8-sig").strip()
                pair = base64.b64encode(f"{s.basic_auth_user}:{secret}".encode()).decode()
                headers["Authorization"] = f"Basic {pair}" if s.bearer_token_file is None else f"Bearer {secret}"
            context = None
            if s.tls_ca is not None or s.tls_cert is not None:
                context = ssl.create_default_context(cafile=s.tls_ca)
            if context is not None and s.tls_cert is not None:
                try:
                    context.load_cert_chain(s.tls_cert, s.tls_key, password="")
                except ssl.SSLError as error:
                    expected = "they must be a certificate and its private key, in PEM, and the key not encrypted"
                    raise ValueError(f"--tls-cert, --tls-key: {expected} ({error.reason or error})") from None
            self._headers, self._context, self._stamp = headers, context, stamp
        self._checked_s = time.monotonic()
        return self._headers, self._context


async def pause(
    attempt: int, retry_after_s: float | None, abandon: asyncio.Event, *, first_s: float, max_s: float
) -> None:
    """Wait before the next attempt: longer each time, and at least as long as the receiver asks. Raises Abandoned."""
    delay = min(max_s, first_s * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)
    if retry_after_s is not None:
        delay = max(delay, min(retry_after_s, MAX_RETRY_AFTER_S))
    if await set_within(abandon, delay):
        raise Abandoned


class Request(NamedTuple):
    """The body and the headers of a request."""

    body: bytes
    headers: Mapping[str, str]


Post = Callable[[str, bytes, Mapping[str, str]], Awaitable[Reply]]
"""Makes one attempt at sending a body, with headers, to a URL; an error is in the reply, too."""


def meaning(status: int) -> Meaning:
    """What an answer means."""
    if status in _AGAIN or status >= 500:
        return "again"
    if status in _MISCONFIGURED or status < 200 or 300 <= status < 400:
        return "misconfigured"
    return "accepted" if status < 300 else "refused"


def instruments(requests: str, seconds: str, failing: str) -> tuple[Instrument, ...]:
    """A sink's metrics of its receivers under these names. A receiver's label is its address without path and user."""
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
    """The receiver at one URL. At most ``at_once`` attempts are in flight. ``name`` is its label: its address if None.

    After ``most_refused`` refusals in a row, a refused request is retried, until one is accepted. ``on_recovery`` is
    called when the receiver answers again. ``first_s``: the first wait before a retry. ``empty``: a request that says
    nothing, which tells a wrong configuration from a proxy that objects to what is in a request.
    """

    def __init__(
        self,
        url: str,
        post: Post,
        component: str,
        instruments: Instruments,
        *,
        name: str | None = None,
        at_once: int = 1,
        most_refused: float = math.inf,
        first_s: float = BACKOFF_FIRST_S,
        on_recovery: Callable[[], None] = lambda: None,
        empty: Request | None = None,
    ) -> None:
        self.name = address_of(url) if name is None else name
        self._url, self._post, self._instruments, self._prefix = url, post, instruments, f"gpustream_{component}"
        self._slots = asyncio.Semaphore(at_once)
        self._most_refused, self._first_s, self._on_recovery = most_refused, first_s, on_recovery
        self._empty = empty
        self._refused_in_a_row = self._accepted = 0
        self._retried: dict[object, str] = {}
        self._has_failed = False
        instruments.gauge(f"{self._prefix}_receiver_failing", self.name).set_function(lambda: bool(self._retried))

    @property
    def failing(self) -> str | None:
        """Why requests are retried, or everything is refused; None otherwise, as when what was retried is abandoned."""
        return next(reversed(self._retried.values()), None)

    async def send(
        self, request: Callable[[], Request], abandon: asyncio.Event, *, most_misconfigured: int = MISCONFIGURED
    ) -> str | None:
        """Send until it is accepted (None) or refused (the reason). Raises Abandoned.

        ``request`` is called for each attempt, because a request may contain how late it is. Answers that say that the
        configuration is wrong may come from a proxy that objects to this request only. So after ``most_misconfigured``
        of them in a row, each attempt is followed by an empty request. If two of those in a row are accepted, or the
        first one if ``most_misconfigured`` is 1, the request is refused. It is refused, too, after ``MISCONFIGURED``
        such answers if another request was accepted before each of them.
        """
        attempt, misconfigured, objections, key = 0, 0, 0, object()
        accepted, beside_accepted = self._accepted, 0
        try:
            while not abandon.is_set():
                reply = await self._attempt(request)
                means, text = meaning(reply.status), _line(reply.text)
                text = f"HTTP {reply.status}: {text}".rstrip(": ") if reply.status else text
                self._instruments.counter(f"{self._prefix}_requests_total", self.name, means).inc()
                if means == "accepted":
                    self._refused_in_a_row = 0
                    self._accepted += 1
                    self._answered(key)
                    return None
                misconfigured = misconfigured + 1 if means == "misconfigured" else 0
                beside_accepted = beside_accepted + (self._accepted > accepted) if misconfigured else 0
                accepted = self._accepted
                is_objection = misconfigured >= most_misconfigured and await self._accepts_empty()
                objections = objections + 1 if is_objection else 0
                if objections >= min(2, most_misconfigured) or beside_accepted >= MISCONFIGURED:
                    # after fewer the receiver may just have been mended, or not all of its replicas
                    means = "refused"
                self._refused_in_a_row += means == "refused"
                if means == "refused" and self._refused_in_a_row <= self._most_refused:
                    self._answered(key)
                    return text
                why = {"again": "", "refused": "it refuses everything: "}.get(means, f"{means}: ")
                self._fail(key, why + text)
                await pause(attempt, reply.retry_after_s, abandon, first_s=self._first_s, max_s=_BACKOFF_MAX_S)
                attempt += 1
            raise Abandoned
        finally:
            self._retried.pop(key, None)

    async def _accepts_empty(self) -> bool:
        """Whether an empty request is accepted. Then a proxy objects to what is in the others."""
        empty = self._empty
        return empty is not None and meaning((await self._attempt(lambda: empty)).status) == "accepted"

    async def _attempt(self, request: Callable[[], Request]) -> Reply:
        async with self._slots:
            start = time.perf_counter()
            try:
                body, headers = request()
            except (OSError, ValueError) as error:
                return Reply(0, f"{type(error).__name__}: {error}")
            reply = await self._post(self._url, body, headers)
        self._instruments.histogram(f"{self._prefix}_request_seconds", self.name).observe(time.perf_counter() - start)
        return reply

    def refuses_all(self, why: str | None) -> None:
        """Note that every request of a batch was refused by itself; None: at least one was not."""
        if why is None:
            self._answered(Receiver)
        else:
            self._fail(Receiver, f"it refuses everything: {why}")

    def _fail(self, request: object, why: str) -> None:
        """Note that a request is retried."""
        if not self._has_failed:
            log.warning("%s does not accept, trying again: %s", self.name, why)
        self._has_failed = True
        self._retried[request] = why

    def _answered(self, request: object) -> None:
        """Note that a request is accepted or refused."""
        self._retried.pop(request, None)
        if self._has_failed and self.failing is None:
            self._has_failed = False
            log.info("%s answers again", self.name)
            self._on_recovery()
