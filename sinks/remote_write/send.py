"""Sends a request until the receiver accepts or refuses it: encoding, retries, and the version of the protocol.

In: groups of samples. Out: None if they were accepted, or the refusal.
State: the protocol; the number of accepted requests; a small one of them, to be sent again when it is in doubt whether
the receiver accepts anything; why it does not.
On failure: a request is retried for as long as it takes. A receiver that refuses everything gets one small request now
and then. To give up, set ``abandon``: :class:`Abandoned` is raised after the current attempt, and the receiver may or
may not have the request then.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain
from typing import Literal

from cramjam import snappy

from delivery.clock import now_ms
from delivery.dead_letters import Abandoned
from delivery.instruments import Instruments
from delivery.tasks import set_within, until_stopped
from sinks.receiver import BACKOFF_FIRST_S, MAX_RETRY_AFTER_S, Http, pause
from sinks.remote_write import encode_v1, encode_v2
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.encode_v1 import varint
from sinks.remote_write.policy import UNTIMELY, Answer, Meaning, Protocol, Refusal, meaning, refusal
from sinks.series.model import SampleGroup, samples_of

log = logging.getLogger(__name__)

Post = Callable[[bytes, Protocol], Awaitable[Answer]]
"""Makes one attempt; an error is in the answer, too."""

WRITTEN = "X-Prometheus-Remote-Write-Samples-Written"

SERVER_ERRORS = 5
"""After this many answers of 500, 401, 403 and so on in a row, while others are accepted, the request is to blame."""

_COUNT = re.compile(r"[0-9]{1,18}")
_BACKOFF_MAX_S = 5.0
_PROBE_FIRST_S = 10.0
_PROBE_MAX_S = 60.0
_LOG_EVERY_S = 30.0
_FRAGMENT_BYTES = 64 << 10  # snappy compresses fragments of this size, and refers to nothing outside of them
_GOLDEN_RATIO = 0.618034

_NOT_2_0 = ": it does not speak remote write 2.0, use --protocol auto or 1.0"
_HINTS = {404: ": look at the path of --url"}

_HEADERS: dict[Protocol, dict[str, str]] = {
    "1.0": {
        "Content-Type": "application/x-protobuf",
        "Content-Encoding": "snappy",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    },
    "2.0": {
        "Content-Type": "application/x-protobuf;proto=io.prometheus.write.v2.Request",
        "Content-Encoding": "snappy",
        "X-Prometheus-Remote-Write-Version": "2.0.0",
    },
}


def compressed(pieces: Iterable[bytes]) -> bytes:
    """The pieces as one snappy block, each compressed while it is still in the processor's cache.

    A block is the length of the whole, then the compressed fragments one after the other.
    Source: snappy's format description.
    """
    compressed_parts, part, size, start = list[bytes](), list[bytes](), 0, 0
    for piece in chain(pieces, [b""]):
        part.append(piece)
        size += len(piece)
        if size - start >= _FRAGMENT_BYTES or not piece:
            joined = b"".join(part)
            compressed_parts.append(bytes(snappy.compress_raw(joined))[len(varint(len(joined))) :])
            part, start = [], size
    return b"".join((varint(size), *compressed_parts))


class Client:
    """The receiver over HTTP: one attempt at a time. Use :meth:`close` when done."""

    def __init__(self, settings: RemoteWriteSettings) -> None:
        self._url, self._http = settings.url, Http(settings)

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        """Make one attempt at sending a compressed request."""
        reply = await self._http.post(self._url, body, _HEADERS[protocol])
        written = reply.headers.get(WRITTEN, "")
        count = int(written) if _COUNT.fullmatch(written) else None
        return Answer(reply.status, reply.text, count, reply.retry_after_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


class RemoteWriteSender:
    """Sends the requests of one sink to its receiver; several may be in flight.

    ``failing``: why the receiver does not accept requests, None while it does. ``accepted`` counts the requests of
    which it accepted anything. ``first_s``: the first wait before a retry; it doubles up to 5 s. ``probe_s``: the first
    wait before a receiver that refuses everything is probed; it doubles up to a minute.
    """

    def __init__(
        self,
        post: Post,
        protocol: Literal["auto", "1.0", "2.0"],
        instruments: Instruments,
        *,
        first_s: float = BACKOFF_FIRST_S,
        probe_s: float = _PROBE_FIRST_S,
    ) -> None:
        self._post, self._instruments, self._first_s, self._probe_s = post, instruments, first_s, probe_s
        self._fixed = protocol != "auto"
        self.protocol: Protocol = "1.0" if protocol == "1.0" else "2.0"
        self._encoder = encode_v2.Encoder()
        self._speaks_2_0 = False
        self.accepted = 0
        self._newest: Sequence[SampleGroup] = ()
        self._logged_s = self._hold_logged_s = -math.inf
        self.failing: str | None = None
        self._holding = self._retry_logged = False
        self._probes = 0
        self._next_probe_s = 0.0
        self._taken = asyncio.Event()
        failing = instruments.gauge("gpustream_remote_write_receiver_failing")
        failing.set_function(lambda: self.failing is not None)

    async def send(self, groups: Sequence[SampleGroup], abandon: asyncio.Event) -> Refusal | None:
        """Send until accepted (None) or refused. Raises Abandoned."""
        body, protocol, errors, attempt, accepted_before = b"", self.protocol, 0, 0, self.accepted
        sent_before = False
        while True:
            await self._hold(groups, abandon)
            if not body or protocol != self.protocol:
                protocol = self.protocol
                body = self._encode(groups, protocol)
            accepted_until_now = self.accepted
            answer, means = await self._attempt(body, protocol, samples_of(groups))
            if means == "accepted":
                self._newest = groups[-1:]
                return None
            reason = answer.summary + _HINTS.get(answer.status, "")
            if means == "misconfigured" and await self.probe_or_wait(groups, accepted_until_now, reason, abandon):
                means = "server-error"  # something before the receiver objects to this request
            errors = errors + 1 if means == "server-error" else 0
            if errors == SERVER_ERRORS and self.accepted == accepted_before:
                accepts_others = self._newest and await self._probe(self._newest, 0)
                errors = errors if accepts_others else 0
            if means in {"refused", "too-large"} or errors >= SERVER_ERRORS:
                refused = refusal(answer, groups[0].ts_ms, now_ms())
                return refused._replace(sent_before=sent_before)
            if means == "not-2.0" and not self._fixed:  # what was refused too waits until a small request is accepted
                self._fall_back(answer)
                if answer.status >= 400:
                    await self.probe_or_wait(groups, self.accepted, answer.summary, abandon)
            elif means == "not-2.0":
                self._begin_hold(answer.summary + _NOT_2_0)
            else:
                sent_before = True
                await pause(attempt, answer.retry_after_s, abandon, first_s=self._first_s, max_s=_BACKOFF_MAX_S)
                attempt += 1

    async def probe_or_wait(
        self, groups: Sequence[SampleGroup], since: int, reason: str, abandon: asyncio.Event
    ) -> bool:
        """Whether the receiver, which refused these groups, accepts anything: requests after ``since``, or a probe.

        False: it did not, this has waited until it does, and the groups should be sent again. Raises Abandoned.
        """
        if self.accepted > since or await self._probe(groups, 0):
            return True
        self._begin_hold(reason)
        await self._hold(groups, abandon)
        return False

    def _begin_hold(self, reason: str) -> None:
        """The receiver refuses everything: from now on send it only a small request now and then."""
        self.failing = f"it refuses everything: {reason}"
        if self._holding:
            return
        self._holding, self._probes = True, 0
        self._next_probe_s = time.monotonic() + self._probe_s
        self._taken.clear()
        if time.monotonic() - self._hold_logged_s >= _LOG_EVERY_S:
            self._hold_logged_s = time.monotonic()
            log.warning(
                "the receiver refuses everything, and is asked now and then; the records wait in Kafka: %s", reason
            )

    async def _hold(self, groups: Sequence[SampleGroup], abandon: asyncio.Event) -> None:
        """Wait until the receiver accepts something. One of those that wait sends a small request when it is time."""
        while self._holding:
            await until_stopped(abandon, set_within(self._taken, self._next_probe_s - time.monotonic()))
            if abandon.is_set():
                raise Abandoned
            if self._holding and time.monotonic() >= self._next_probe_s:
                self._probes += 1
                wait_s = min(_PROBE_MAX_S, self._probe_s * 2 ** min(self._probes, 16))
                self._next_probe_s = time.monotonic() + wait_s
                if await self._probe(groups, self._probes):
                    self._end_hold()

    def _end_hold(self) -> None:
        if self._holding or self._retry_logged:
            log.info("the receiver accepts again")
        self._holding, self._retry_logged, self.failing = False, False, None
        self._taken.set()

    async def _probe(self, groups: Sequence[SampleGroup], turn: int) -> bool:
        """Whether a small request is accepted, or refused only for its time.

        It is, by turns, what was accepted last, as an exact duplicate changes nothing, and one of these series, a
        different one each time.
        """
        small = self._newest
        if not small or turn % 2:
            # of each set the earliest group, so that it is not later than what follows
            first = {id(group.series): group for group in reversed(groups)}
            rows = [(group, row) for group in first.values() for row in range(len(group.values))]
            group, row = rows[int(len(rows) * (turn * _GOLDEN_RATIO % 1))]  # far from those of earlier turns
            small = [group.part([row])]
        protocol = self.protocol
        answer, means = await self._attempt(self._encode(small, protocol), protocol, samples_of(small))
        if means == "not-2.0" and not self._fixed:
            self._fall_back(answer)
            return answer.status < 300
        takes = means == "accepted" or (
            means == "refused" and refusal(answer, small[0].ts_ms, now_ms()).reason in UNTIMELY
        )
        if takes:
            self._newest = self._newest or small
        return takes

    def _encode(self, groups: Sequence[SampleGroup], protocol: Protocol) -> bytes:
        return compressed(encode_v1.pieces(groups) if protocol == "1.0" else [self._encoder.encode(groups)])

    async def _attempt(self, body: bytes, protocol: Protocol, samples: int) -> tuple[Answer, Meaning]:
        """Send a body once. Returns the answer and its meaning, and counts both."""
        instruments = self._instruments
        start = time.perf_counter()
        answer = await self._post(body, protocol)
        if answer.status >= 400 and (answer.written or 0) >= samples:
            answer = answer._replace(written=0)  # Mimir counts what it was sent, whatever it refuses
        instruments.histogram("gpustream_remote_write_request_seconds").observe(time.perf_counter() - start)
        instruments.counter("gpustream_remote_write_request_bytes_total").inc(len(body))
        means = meaning(answer, protocol, samples, speaks_2_0=self._speaks_2_0)
        instruments.counter("gpustream_remote_write_requests_total", protocol, means).inc()
        self._speaks_2_0 = self._speaks_2_0 or answer.written is not None
        if means == "accepted":
            self.accepted += 1
            instruments.counter("gpustream_remote_write_samples_accepted_total").inc(samples)
            self._end_hold()
        elif means in {"again", "server-error"}:
            said = answer.summary if answer.status else answer.text
            self.failing = f"server-error: {said}" if means == "server-error" else said
            if time.monotonic() - self._logged_s >= _LOG_EVERY_S:
                self._logged_s, self._retry_logged = time.monotonic(), True
                log.warning("remote write is not accepted, trying again: %s", self.failing)
        elif not self._holding:
            self.failing = None
        if means == "refused" and answer.written:
            self.accepted += 1
        if self._holding and answer.retry_after_s is not None:
            asked_s = time.monotonic() + min(answer.retry_after_s, MAX_RETRY_AFTER_S)
            self._next_probe_s = max(self._next_probe_s, asked_s)
        return answer, means

    def _fall_back(self, answer: Answer) -> None:
        if self.protocol == "2.0":
            log.info("HTTP %d to remote write 2.0 without a count of what was written: going on in 1.0", answer.status)
            self.protocol = "1.0"
