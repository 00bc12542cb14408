"""The webhook sink: gpu.alerts -> one JSON POST for each transition, signed, in order for each alert.

In: gpu.alerts. Out: requests to ``--url``; gpu.dead-letters; the offset before which all records are finished. State:
the newest transition of each alert, so that a repeated record is not sent again, and the started records from the first
unfinished one on. A restart reads both back.

Transitions of the same alert wait for each other, those of different alerts do not: while one is retried, others are
read and sent. It delays others only if more than ``PENDING`` wait to be accepted, or if ``AHEAD`` records came after
it; these limits bound the memory, and what is sent again after a crash.
On failure: the sink waits for the receiver or Kafka to come back. If the process ends between the acceptance of a
transition and its commit, it is sent again, with the same bytes, signature and ``Idempotency-Key``.
"""

import asyncio
import contextlib
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
from delivery.instruments import Instrument, Instruments, named
from delivery.positions import WHOLE_LOG
from delivery.sender import Sender
from sinks import outcomes, receiver
from sinks.alerts import Transitions, read_alert
from sinks.consumer import GroupReader, Handler, Source
from sinks.outcomes import Outcome, Outcomes, Undecodable
from sinks.receiver import Http, Receiver, Request
from sinks.settings import WebhookSettings
from topics.alerts import TOPIC, Alert, cloud_event, transition_id

COMPONENT = "webhook"

INSTRUMENTS: tuple[Instrument, ...] = (
    *named(
        outcomes.COMMON,
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
        "gpustream_webhook_requests_total", "gpustream_webhook_request_seconds", "gpustream_webhook_receiver_failing"
    ),
)

MOST_REFUSED = 3
"""After this many refusals in a row the receiver counts as refusing everything, and transitions are retried."""

PENDING = 32
"""The most records of a partition that are being sent."""

AHEAD = 1000
"""The most started records of a partition, from the first unfinished one on; those after it may be finished."""

Form = Literal["record", "binary", "structured"]
"""The body: the record itself, also as a CloudEvent in binary mode, or a CloudEvent in structured mode."""

SIGNATURE = "X-Gpustream-Signature"
_CHECK_EVERY_S = 1.0
_STUCK_AFTER_S = 0.2


_PRINTABLE = "".join(map(chr, range(0x21, 0x7F))).translate({ord('"'): None, ord("%"): None})
"""The characters of a record that stay as they are in a header; others are percent-encoded UTF-8, as in CloudEvents."""


def request(alert: Alert, record: bytes, form: Form, secret: bytes | None) -> Request:
    """The request of an alert whose record has these bytes. ``secret`` None: it is not signed.

    Source: the HTTP protocol binding and the JSON event format of CloudEvents 1.0.
    """
    key = quote(transition_id(alert), _PRINTABLE)  # a state that has a line break is no header
    body, headers = record, {"Content-Type": "application/json", "Idempotency-Key": key}
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
    """The key of the signature, without surrounding white space; its file is read again once a second."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._read_s = -math.inf
        self._secret: bytes | None = None

    def current(self) -> bytes | None:
        """The key; None if requests are not signed. Raises OSError or ValueError if it can't be read."""
        if self._file is not None and time.monotonic() - self._read_s >= _CHECK_EVERY_S:
            secret = self._file.read_bytes().strip()
            if not secret:
                raise ValueError(f"{self._file} is empty")
            self._secret, self._read_s = secret, time.monotonic()
        return self._secret


class WebhookPartition(Handler):
    """The handler of a partition. All partitions of a sink share its arguments."""

    def __init__(
        self, receiver: Receiver, form: Form, secret: Secret, letters: DeadLetters, outcomes: Outcomes
    ) -> None:
        self._receiver, self._form, self._secret = receiver, form, secret
        self._letters, self._outcomes = letters, outcomes
        self._transitions = Transitions()
        self._started: deque[tuple[Record, asyncio.Task[Outcome]]] = deque()
        self._newest: dict[bytes | None, asyncio.Task[Outcome]] = {}
        self._abandon: asyncio.Event | None = None

    def recall(self, record: Record) -> None:
        """Restore the newest transition from a record that was sent before."""
        with contextlib.suppress(Undecodable):  # its dead letter has been written before
            self._transitions.update(record, read_alert(record))

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Send the records, several at once, and finish them in order. Slow ones are kept for the next call.

        Raises Abandoned, after all requests in flight have ended.
        """
        waiting = deque(records)
        if abandon is not self._abandon:  # the partition was revoked since, and its started records were released
            await self._drop()
            self._abandon = abandon
        try:
            while True:
                pending = {task for _, task in self._started if not task.done()}
                while waiting and len(pending) < PENDING and len(self._started) < AHEAD:
                    record = waiting.popleft()
                    task = asyncio.ensure_future(self._send(record, self._newest.get(record.key), abandon))
                    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # who waits raises it
                    self._newest[record.key] = task
                    self._started.append((record, task))
                    pending.add(task)
                if (offset := self._finished()) is not None:
                    yield offset
                elif pending:
                    stuck_after_s = _STUCK_AFTER_S if records else 0.0
                    timeout_s = None if waiting or abandon.is_set() else stuck_after_s
                    done, _ = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        return
                else:
                    return
        except BaseException:
            await self._drop()
            raise

    def reset(self) -> None:
        self._transitions.clear()
        self._cancel()

    def _finished(self) -> int | None:
        """Count the finished records before the first unfinished one. Returns the next offset, or raises Abandoned."""
        offset = None
        while self._started and self._started[0][1].done():
            record, task = self._started[0]
            if offset is not None and task.exception() is not None:
                break  # the records before it are committed first
            self._outcomes.finish(task.result())
            self._started.popleft()
            if self._newest.get(record.key) is task:
                del self._newest[record.key]
            offset = record.offset + 1
        return offset

    def _cancel(self) -> list[asyncio.Task[Outcome]]:
        """Cancel and forget the started records."""
        tasks = [task for _, task in self._started]
        self._started.clear()
        self._newest.clear()
        for task in tasks:
            task.cancel()
        return tasks

    async def _drop(self) -> None:
        await asyncio.gather(*self._cancel(), return_exceptions=True)

    async def _send(self, record: Record, previous: asyncio.Task[Outcome] | None, abandon: asyncio.Event) -> Outcome:
        """Send a record, after ``previous``, the one before it of the same alert. Raises Abandoned."""
        body = record.value or b""
        if previous is not None:
            await asyncio.wait((previous,))
            previous.result()  # raises Abandoned if that one did
        try:
            alert = read_alert(record)
        except Undecodable as error:
            await self._letters.write(record, str(error), abandon)
            return "dead_lettered"
        outcome: Outcome = "duplicate"
        if alert is not None and self._transitions.is_news(alert):
            refused = await self._receiver.send(
                lambda: request(alert, body, self._form, self._secret.current()), abandon
            )
            if refused is not None:
                await self._letters.write(record, f"refused: {refused}", abandon)
            outcome = "delivered" if refused is None else "dead_lettered"
        self._transitions.update(record, alert)
        return outcome


class WebhookSink:
    """The component: :meth:`run` it until it is to stop. ``settings`` must be free of errors."""

    name = "webhook"

    def __init__(self, settings: WebhookSettings) -> None:
        self.settings = settings
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._reader: GroupReader | None = None
        self._receiver: Receiver | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until ``stop``; returns within 8 s of it. Raises what a retry can't mend."""
        settings, instruments = self.settings, self._instruments
        http, sender = Http(settings), Sender(settings.connection(), client_id=settings.group)
        outcomes = Outcomes(COMPONENT, instruments)
        self._receiver = Receiver(
            settings.url, http.post, COMPONENT, instruments, at_once=settings.max_in_flight, most_refused=MOST_REFUSED
        )
        form: Form = "record" if settings.format == "record" else settings.content_mode
        secret, letters = Secret(settings.secret_file), DeadLetters(sender, "sink webhook")
        shared = (self._receiver, form, secret, letters, outcomes)
        source = Source(TOPIC.name, lambda _: WebhookPartition(*shared), settings.from_, WHOLE_LOG)
        self._reader = GroupReader(settings, [source], outcomes, letters)
        try:
            async with connecting(sender):
                await self._reader.run(stop)
        finally:
            await http.close()

    def not_ready(self) -> list[str]:
        """Why alerts are not delivered; empty when they are."""
        if self._reader is None or self._receiver is None:
            return ["not started"]
        failing = self._receiver.failing
        return [*self._reader.not_ready(), *([f"the receiver does not accept: {failing}"] if failing else [])]
