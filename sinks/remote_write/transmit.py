"""Sends requests until the receiver accepts or refuses them: encoding, retries with backoff, and which protocol it is.

In: groups of samples. Out: accepted, or why they were refused.
State: the protocol that the receiver was found to speak; how many requests it accepted, and the last of them, which is
sent again to learn whether a row of 500 is the receiver's fault or the request's; why it does not accept.
On failure: tried again for as long as it takes. Whoever must give up sets ``abandon``, and gets ``Abandoned`` after the
attempt that is under way; the request may be in then, or not.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from cramjam import snappy

from sinks.blocks import Group
from sinks.http import pause
from sinks.remote_write import encode_v1, encode_v2
from sinks.remote_write.policy import Answer, Meaning, Protocol, Refusal, meaning, refusal
from topics.instruments import Instruments

log = logging.getLogger(__name__)

Post = Callable[[bytes, Protocol], Awaitable[Answer]]
"""Makes one attempt; whatever goes wrong is in the answer."""

SERVER_ERRORS = 5
"""So many 500 in a row are the request's fault, if others are accepted meanwhile."""

_BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 30.0
_LOG_EVERY_S = 30.0


class Transmitter:
    """Sends requests of one sink to its receiver; several may be under way at once.

    ``failing`` says why the last answer was no success, None where it was. ``first_s`` is the first wait before trying
    again; it doubles, to half a minute.
    """

    def __init__(
        self,
        post: Post,
        protocol: Literal["auto", "1.0", "2.0"],
        instruments: Instruments,
        *,
        first_s: float = _BACKOFF_FIRST_S,
    ) -> None:
        self._post = post
        self._fixed = protocol != "auto"
        self.protocol: Protocol = "1.0" if protocol == "1.0" else "2.0"
        self._instruments = instruments
        self._first_s = first_s
        self._encoder = encode_v2.Encoder()
        self._speaks_2_0 = False
        self._accepted = 0
        self._newest: Sequence[Group] = ()
        self._logged_s = -_LOG_EVERY_S
        self.failing: str | None = None

    async def send(self, groups: Sequence[Group], abandon: asyncio.Event) -> Refusal | None:
        """Send until accepted (None) or refused. Raises Abandoned."""
        samples = sum(len(group.values) for group in groups)
        body, protocol, errors, attempt, accepted_before = b"", self.protocol, 0, 0, self._accepted
        while True:
            if not body or protocol != self.protocol:
                protocol = self.protocol
                body = self._encode(groups, protocol)
            answer = await self._attempt(body, protocol)
            means = meaning(answer, protocol, samples, speaks_2_0=self._speaks_2_0)
            self._note(means, answer, protocol, samples)
            if means == "accepted":
                self._newest = groups[:1]
                return None
            errors = errors + 1 if means == "server-error" else 0
            if errors == SERVER_ERRORS and self._accepted == accepted_before:
                errors = 0 if not await self._still_accepts() else errors
            if means == "refused" or errors >= SERVER_ERRORS:
                return refusal(answer, groups[0].ts_ms, int(time.time() * 1000))
            if means == "not-2.0" and not self._fixed:
                self._fall_back(answer)
                continue
            await pause(attempt, answer.retry_after_s, abandon, first_s=self._first_s, max_s=_BACKOFF_MAX_S)
            attempt += 1

    async def _still_accepts(self) -> bool:
        """Whether the receiver takes again what it took last: an exact duplicate, which changes nothing."""
        if not self._newest:
            return False
        protocol, samples = self.protocol, sum(len(group.values) for group in self._newest)
        answer = await self._attempt(self._encode(self._newest, protocol), protocol)
        return meaning(answer, protocol, samples, speaks_2_0=self._speaks_2_0) == "accepted"

    def _encode(self, groups: Sequence[Group], protocol: Protocol) -> bytes:
        body = encode_v1.encode(groups) if protocol == "1.0" else self._encoder.encode(groups)
        return bytes(snappy.compress_raw(body))

    async def _attempt(self, body: bytes, protocol: Protocol) -> Answer:
        start = time.perf_counter()
        answer = await self._post(body, protocol)
        self._instruments.histogram("gpustream_remote_write_request_seconds").observe(time.perf_counter() - start)
        self._instruments.counter("gpustream_remote_write_request_bytes_total").inc(len(body))
        return answer

    def _note(self, means: Meaning, answer: Answer, protocol: Protocol, samples: int) -> None:
        self._instruments.counter("gpustream_remote_write_requests_total", protocol, means).inc()
        if answer.written is not None:
            self._speaks_2_0 = True
        if means in {"accepted", "refused"}:
            self._accepted += means == "accepted"
            self.failing = None
        else:
            self.failing = f"{means}: HTTP {answer.status}: {answer.text[:200]}" if answer.status else answer.text
            self._complain(means)
        if means == "accepted":
            self._instruments.counter("gpustream_remote_write_samples_accepted_total").inc(samples)
        self._instruments.gauge("gpustream_remote_write_receiver_failing").set(self.failing is not None)

    def _complain(self, means: Meaning) -> None:
        now = time.monotonic()
        if now - self._logged_s < _LOG_EVERY_S or (means == "not-2.0" and not self._fixed):
            return
        self._logged_s = now
        hint = (
            "; the receiver does not speak remote write 2.0: use --protocol auto or 1.0" if means == "not-2.0" else ""
        )
        log.warning("remote write is not accepted, trying again: %s%s", self.failing, hint)

    def _fall_back(self, answer: Answer) -> None:
        if self.protocol == "2.0":
            log.info("HTTP %d to remote write 2.0 without a count of what was written: going on in 1.0", answer.status)
            self.protocol = "1.0"
