"""The webhook sink: gpu.alerts -> one JSON POST for each transition, signed, in order for each alert.

In: gpu.alerts. Out: requests to ``--url``; gpu.dead-letters; the offset before which all is finished.
State: none that a restart does not read back: the newest transition of each alert, so that one that is written again is
not sent again, and the records that are begun, from the first unfinished one on.
Transitions of one alert wait for one another, and no other alert's do: one that the receiver does not accept yet is
tried again while others are read and sent. It holds others up only if more than ``PENDING`` wait to be accepted, or
``AHEAD`` records came after it: that bounds what is kept in memory, and what is sent again after a crash.
On failure: an outage of the receiver or of Kafka is waited for. A transition that was accepted and not yet committed
when the process ended is sent again, with the same bytes, and so the same signature, under the same
``Idempotency-Key``.
"""

import asyncio
import hashlib
import hmac
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from delivery.dead_letters import DeadLetters, Record, connecting
from delivery.instruments import Instrument, Instruments
from delivery.positions import WHOLE_LOG
from delivery.sender import Sender
from sinks import outcomes, receiver
from sinks.alerts import Transitions, read_alert
from sinks.consumer import GroupReader, Source
from sinks.outcomes import Outcome, Outcomes, Undecodable
from sinks.receiver import Http, Receiver, Request
from sinks.settings import WebhookSettings
from topics.alerts import TOPIC, Alert, cloud_event, transition_id

COMPONENT = "webhook"

INSTRUMENTS: tuple[Instrument, ...] = (
    *outcomes.instruments(
        "gpustream_webhook_records_read_total",
        "gpustream_webhook_records_delivered_total",
        "gpustream_webhook_records_duplicate_total",
        "gpustream_webhook_records_dropped_total",
        "gpustream_webhook_records_dead_lettered_total",
        "gpustream_webhook_records_released_total",
        "gpustream_webhook_records_held",
        "gpustream_webhook_records_expired_total",
        "gpustream_webhook_new_logs_total",
        "gpustream_webhook_commits_total",
        "gpustream_webhook_partitions",
        "gpustream_webhook_lag_records",
        "gpustream_webhook_loop_late_seconds",
    ),
    *receiver.instruments(
        "gpustream_webhook_requests_total",
        "gpustream_webhook_request_seconds",
        "gpustream_webhook_receiver_failing",
    ),
)

MOST_REFUSED = 3
"""After so many refusals in a row the receiver refuses everything, and transitions are kept."""

PENDING = 32
"""So many records of a partition are under way at a time."""

AHEAD = 1000
"""So many records of a partition are begun, from the first unfinished one on; those after it may be finished."""

Form = Literal["record", "binary", "structured"]
"""What is posted: the record as it is, also as a CloudEvent in binary mode, or within one in structured mode."""

SIGNATURE = "X-Gpustream-Signature"
_LOOK_EVERY_S = 1.0
_STUCK_AFTER_S = 0.2


_PRINTABLE = "".join(map(chr, range(0x21, 0x7F))).translate({ord('"'): None, ord("%"): None})
"""What a value of a CloudEvent in an HTTP header has as it is; all else is percent-encoded UTF-8."""


def request(alert: Alert, record: bytes, form: Form, secret: bytes | None) -> Request:
    """The request of an alert whose record has these bytes. ``secret`` None: it is not signed.

    Source: the HTTP protocol binding and the JSON event format of CloudEvents 1.0.
    """
    body, headers = record, {"Content-Type": "application/json", "Idempotency-Key": transition_id(alert)}
    if form == "binary":
        event = cloud_event(alert).items()
        headers |= {f"ce-{name}": quote(value, _PRINTABLE) for name, value in event if name != "datacontenttype"}
    elif form == "structured":
        headers["Content-Type"] = "application/cloudevents+json"
        body = msgspec.json.encode({**cloud_event(alert), "data": msgspec.Raw(record)})
    if secret is not None:
        headers[SIGNATURE] = signature(body, secret)
    return Request(body, headers)


def signature(body: bytes, secret: bytes) -> str:
    """``sha256=`` and the HMAC-SHA256 of the body in hex."""
    return f"sha256={hmac.new(secret, body, hashlib.sha256).hexdigest()}"


class Secret:
    """The key of the signature, as it is in its file by now, looked at once a second, without space around it."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._looked_s = -math.inf
        self._secret: bytes | None = None

    def now(self) -> bytes | None:
        """The key; None if there is to be none. Raises OSError or ValueError if it can't be had."""
        if self._file is not None and time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            secret = self._file.read_bytes().strip()
            if not secret:
                raise ValueError(f"{self._file} is empty")
            self._secret, self._looked_s = secret, time.monotonic()
        return self._secret


class WebhookPartition:
    """The handler of a partition. All partitions of a sink share what it works with."""

    def __init__(
        self, receiver: Receiver, form: Form, secret: Secret, letters: DeadLetters, outcomes: Outcomes
    ) -> None:
        self._receiver, self._form, self._secret = receiver, form, secret
        self._letters, self._outcomes = letters, outcomes
        self._transitions = Transitions()
        self._begun: deque[tuple[Record, asyncio.Task[Outcome]]] = deque()
        self._newest: dict[bytes | None, asyncio.Task[Outcome]] = {}
        self._abandon: asyncio.Event | None = None

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was sent before."""
        for record in records:
            try:
                self._transitions.update(record, read_alert(record))
            except Undecodable:
                continue  # its dead letter was written then

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Send the records, several at once, and finish them in order; what takes long is kept for the next call.

        Raises Abandoned, when all that was under way has ended.
        """
        waiting = deque(records)
        if abandon is not self._abandon:  # the partition was away, and what was begun then was given back
            await self._drop()
            self._abandon = abandon
        try:
            while True:
                pending = {end for _, end in self._begun if not end.done()}
                while waiting and len(pending) < PENDING and len(self._begun) < AHEAD:
                    record = waiting.popleft()
                    task = asyncio.ensure_future(self._end(record, self._newest.get(record.key), abandon))
                    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waits raises it
                    self._newest[record.key] = task
                    self._begun.append((record, task))
                    pending.add(task)
                if (offset := self._finished()) is not None:
                    yield offset
                elif pending:
                    patience_s = _STUCK_AFTER_S if records else 0.0
                    timeout_s = None if waiting or abandon.is_set() else patience_s
                    done, _ = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        return
                else:
                    return
        except BaseException:
            await self._drop()
            raise

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Nothing is due by itself."""

    def reset(self) -> None:
        """The topic was created again."""
        self._transitions.clear()
        self._cancel()

    def _finished(self) -> int | None:
        """Count the records that ended, up to the first that has not. Gives the offset after them. Raises Abandoned."""
        offset = None
        while self._begun and self._begun[0][1].done():
            record, end = self._begun[0]
            if offset is not None and end.exception() is not None:
                break  # what ended before it is finished first
            self._outcomes.finish(end.result())
            self._begun.popleft()
            if self._newest.get(record.key) is end:
                del self._newest[record.key]
            offset = record.offset + 1
        return offset

    def _cancel(self) -> list[asyncio.Task[Outcome]]:
        """Give up what is begun."""
        begun = [end for _, end in self._begun]
        self._begun.clear()
        self._newest.clear()
        for end in begun:
            end.cancel()
        return begun

    async def _drop(self) -> None:
        await asyncio.gather(*self._cancel(), return_exceptions=True)

    async def _end(self, record: Record, before: asyncio.Task[Outcome] | None, abandon: asyncio.Event) -> Outcome:
        """Finish a record, when the one before of the same alert is. Raises Abandoned."""
        body = record.value or b""
        if before is not None:
            await asyncio.wait((before,))
            before.result()  # of one that was abandoned, that is raised here too
        try:
            alert = read_alert(record)
        except Undecodable as error:
            await self._letters.write(record, str(error), abandon)
            return "dead_lettered"
        outcome: Outcome = "duplicate"
        if alert is not None and self._transitions.is_news(alert):
            refused = await self._receiver.send(lambda: request(alert, body, self._form, self._secret.now()), abandon)
            if refused is not None:
                await self._letters.write(record, f"refused: {refused}", abandon)
            outcome = "delivered" if refused is None else "dead_lettered"
        self._transitions.update(record, alert)
        return outcome


class WebhookSink:
    """A component: :meth:`run` it until it is to stop. ``settings`` are to be without mistakes."""

    name = "webhook"

    def __init__(self, settings: WebhookSettings) -> None:
        self.settings = settings
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._reader: GroupReader | None = None
        self._receiver: Receiver | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until ``stop``; returns within 8 s of it. Raises what cannot be waited for."""
        settings, made = self.settings, self._instruments
        http, sender = Http(settings), Sender(settings.connection(), client_id=settings.group)
        counted = Outcomes(COMPONENT, made)
        self._receiver = Receiver(
            settings.url, http.post, COMPONENT, made, at_once=settings.max_in_flight, most_refused=MOST_REFUSED
        )
        form: Form = "record" if settings.format == "record" else settings.content_mode
        secret, letters = Secret(settings.secret_file), DeadLetters(sender, "sink webhook")
        shared = (self._receiver, form, secret, letters, counted)
        source = Source(TOPIC.name, lambda _: WebhookPartition(*shared), settings.from_, WHOLE_LOG)
        self._reader = GroupReader(settings, [source], counted)
        try:
            async with connecting(sender):
                await self._reader.run(stop)
        finally:
            await http.close()

    def not_ready(self) -> list[str]:
        """Why nothing is delivered; empty when all is well."""
        if self._reader is None or self._receiver is None:
            return ["not started"]
        failing = self._receiver.failing
        return [*self._reader.not_ready(), *([f"the receiver does not accept: {failing}"] if failing else [])]
