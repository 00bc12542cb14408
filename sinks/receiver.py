"""A receiver of alerts over HTTP: sends until it accepts or refuses, and says which of its answers means what.

| answer | policy |
|---|---|
| 2xx | accepted |
| none, 408, 425, 429, 5xx | tried again for as long as it takes, after what `Retry-After` says |
| 1xx, 3xx, 401, 403, 404, 405, 407, 410 | likewise: the configuration is wrong, not what was sent |
| any other 4xx | refused; tried again too, if so many in a row are refused that the receiver refuses everything |

In: requests. Out: accepted, or why it was refused.
State: which requests are tried again, and why; how many were refused since one was accepted.
On failure: tried again for as long as it takes. Whoever must give up sets ``abandon``, and gets ``Abandoned`` after the
attempt that is under way; the request may be in then, or not.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from delivery.dead_letters import Abandoned
from delivery.instruments import Instrument, Instruments
from sinks.http import Reply, pause

log = logging.getLogger(__name__)

Meaning = Literal["accepted", "refused", "again", "misconfigured"]

Post = Callable[[str, bytes, Mapping[str, str]], Awaitable[Reply]]
"""Makes one attempt at sending a body, with headers, to a URL; whatever goes wrong is in the reply."""

_AGAIN = frozenset({0, 408, 425, 429})
_MISCONFIGURED = frozenset({401, 403, 404, 405, 407, 410})
BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 15.0


class Request(NamedTuple):
    """What is sent."""

    body: bytes
    headers: Mapping[str, str]


def meaning(status: int) -> Meaning:
    """What to do about an answer."""
    if status in _AGAIN or status >= 500:
        return "again"
    if status in _MISCONFIGURED or status < 200 or 300 <= status < 400:
        return "misconfigured"
    return "accepted" if status < 300 else "refused"


def instruments(component: str) -> tuple[Instrument, ...]:
    """What a sink says of its receivers, each by its address without path and credentials."""
    prefix = f"gpustream_{component}"
    return (
        Instrument(
            f"{prefix}_requests_total",
            "counter",
            "Attempts, by what the answer meant: accepted, refused, again (tried again), misconfigured (likewise).",
            ("receiver", "result"),
        ),
        Instrument(
            f"{prefix}_request_seconds",
            "histogram",
            "How long an attempt took.",
            ("receiver",),
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
        ),
        Instrument(
            f"{prefix}_receiver_failing",
            "gauge",
            "1 while something is tried again or everything is refused, else 0.",
            ("receiver",),
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
        self._url = url
        self._post = post
        self._prefix = f"gpustream_{component}"
        self._made = made
        self._slots = asyncio.Semaphore(at_once)
        self._most_refused = most_refused
        self._first_s = first_s
        self._on_recovery = on_recovery
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
                means = meaning(reply.status)
                self._made.counter(f"{self._prefix}_requests_total", self.name, means).inc()
                if means == "accepted":
                    self._refused_in_a_row = 0
                    return self._answered(this, None)
                self._refused_in_a_row += means == "refused"
                if means == "refused" and self._refused_in_a_row <= self._most_refused:
                    return self._answered(this, _said(reply))
                self._fail(this, f"{'it refuses everything' if means == 'refused' else means}: {_said(reply)}")
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


def _said(reply: Reply) -> str:
    """One line of what came back."""
    text = " ".join(reply.text.split())[:300]
    return f"HTTP {reply.status}: {text}".rstrip(": ") if reply.status else text
