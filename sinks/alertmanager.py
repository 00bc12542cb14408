"""The Alertmanager sink: gpu.alerts -> one or several Alertmanagers, by API v2. Open alerts are sent periodically.

In: gpu.alerts. Out: requests to each ``--url``, one at a time, so that no older state arrives after a newer one, and
new states at once; gpu.dead-letters; the offset after each request.
State: the active alerts and the newest transition of each alert, which a restart reads back; which alerts are refused.

Each Alertmanager has a consumer group of its own, so one that is away delays only itself. An Alertmanager identifies
alerts by their labels, so each has its fingerprint as a label: the end of one never ends another with the same labels.
On failure: the sink waits for an Alertmanager or Kafka to come back, and sends open alerts while Kafka is away. An
Alertmanager keeps alerts in memory only, so all of them are sent when it is back. If this sink itself is gone, open
alerts end in Alertmanager after four times ``--resend``.
Source: api/v2/openapi.yaml (postableAlert), and alert/alert.go (Validate) of Alertmanager 0.34.
"""

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from delivery.clock import now_ms
from delivery.dead_letters import Abandoned, DeadLetters, Record, connecting
from delivery.instruments import Instrument, Instruments, named
from delivery.positions import WHOLE_LOG
from delivery.sender import Sender
from delivery.tasks import set_within
from sinks import outcomes, receiver
from sinks.alerts import Transitions, batches, key_of, read_alert
from sinks.consumer import GroupReader, Source, together
from sinks.outcomes import Outcomes, Undecodable
from sinks.receiver import BACKOFF_FIRST_S, MISCONFIGURED, Http, Post, Receiver, Request, address_of
from sinks.settings import ALERTS_PATH, AlertmanagerSettings
from topics.alerts import TOPIC, Alert

log = logging.getLogger(__name__)

COMPONENT = "alertmanager"

INSTRUMENTS: tuple[Instrument, ...] = (
    *named(
        outcomes.COMMON,
        "gpustream_alertmanager_records_read_total",
        "gpustream_alertmanager_records_delivered_total",
        "gpustream_alertmanager_records_duplicate_total",
        "gpustream_alertmanager_records_dropped_total",
        "gpustream_alertmanager_records_dead_lettered_total",
        "gpustream_alertmanager_records_released_total",
        "gpustream_alertmanager_records_held",
        "gpustream_alertmanager_records_expired_total",
        "gpustream_alertmanager_new_logs_total",
        "gpustream_alertmanager_commits_total",
        "gpustream_alertmanager_partitions",
        "gpustream_alertmanager_lag_records",
        "gpustream_alertmanager_loop_late_seconds",
    ),
    *receiver.instruments(
        "gpustream_alertmanager_requests_total",
        "gpustream_alertmanager_request_seconds",
        "gpustream_alertmanager_receiver_failing",
    ),
    Instrument("gpustream_alertmanager_open_alerts", "gauge", "Alerts that are sent again and again.", ("receiver",)),
    Instrument(
        "gpustream_alertmanager_resent_total",
        "counter",
        "Alerts that were sent again, because they are open or have ended lately.",
        ("receiver",),
    ),
    Instrument(
        "gpustream_alertmanager_refused_total",
        "counter",
        "Alerts that were refused, each time that they were sent.",
        ("receiver",),
    ),
)

FINGERPRINT = "gpustream_fingerprint"

HOLD_RESENDS = 4
"""An open alert ends by itself if it is not sent for that many times ``--resend``."""

RECOVERED_EVERY_S = 10.0
"""How often all alerts are sent at most because the Alertmanager answers again: it may have forgotten them."""

RESOLVED_FOR_MS = 15 * 60_000
"""How long the end of an alert is sent, as Prometheus does, for an Alertmanager that was away when it ended; but for
two times ``--resend`` at least."""

_REFUSES_EVERYTHING = 3
"""If this many alerts are refused and none is accepted, the Alertmanager refuses everything."""

_HEADERS = {"Content-Type": "application/json"}

Refused = dict[str, str]
"""The reasons why alerts were refused, by fingerprint."""


class ActiveAlerts:
    """The alerts of one partition that are sent periodically: open ones, and those that ended lately."""

    def __init__(self) -> None:
        self._by_fingerprint: dict[str, tuple[Alert, int]] = {}

    def put(self, alert: Alert, written_ms: int) -> None:
        """Set an alert's state, and when the broker appended it."""
        self._by_fingerprint[alert.fingerprint] = alert, written_ms

    def remove(self, fingerprint: str) -> None:
        """Forget an alert that was deleted from the topic."""
        self._by_fingerprint.pop(fingerprint, None)

    def clear(self) -> None:
        """Forget everything: the topic was recreated."""
        self._by_fingerprint.clear()

    def renamed(self, news: Iterable[Alert]) -> list[Alert]:
        """The ends of open alerts whose labels change: for an Alertmanager those are different alerts.

        They change with an update, or if it fires again and a compaction has left nothing of its end.
        """
        ends = []
        for alert in news:
            previous, _ = self._by_fingerprint.get(alert.fingerprint, (alert, 0))
            if previous.is_open and previous.labels != alert.labels:
                ends.append(msgspec.structs.replace(previous, state="resolved", ends_at=datetime.now(UTC)))
        return ends

    def count_open(self) -> int:
        """The number of open alerts."""
        return sum(alert.is_open for alert, _ in self._by_fingerprint.values())

    def due(self, now_ms: int, resolved_for_ms: int = RESOLVED_FOR_MS) -> list[str]:
        """The fingerprints of the alerts to send. Forgets those that ended longer ago than that."""
        self._by_fingerprint = {
            fingerprint: (alert, written_ms)
            for fingerprint, (alert, written_ms) in self._by_fingerprint.items()
            if alert.is_open or now_ms - written_ms <= resolved_for_ms
        }
        return list(self._by_fingerprint)

    def states(self, fingerprints: Iterable[str]) -> list[Alert]:
        """The last states of these alerts, without those that are gone."""
        return [self._by_fingerprint[fp][0] for fp in fingerprints if fp in self._by_fingerprint]


class Postable(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An alert of a request."""

    labels: dict[str, str]
    annotations: dict[str, str] = {}
    starts_at: datetime
    ends_at: datetime
    generator_url: str | None = msgspec.field(default=None, name="generatorURL")


def request(alerts: Sequence[Alert], now: datetime, resend_s: float, generator_url: str | None) -> Request:
    """The request that sends alerts in their present state."""
    body = msgspec.json.encode([postable(alert, now, resend_s, generator_url) for alert in alerts])
    return Request(body, _HEADERS)


def postable(alert: Alert, now: datetime, resend_s: float, generator_url: str | None = None) -> Postable:
    """An alert of a request.

    If its node's clock is wrong, it still starts at ``now`` at the latest, and never ends before it starts, which
    Alertmanager refuses. One that starts in the future would fire there until then, even if it is resolved.
    """
    starts_at = min(alert.starts_at, now)
    ends_at = now + timedelta(seconds=resend_s * HOLD_RESENDS) if alert.is_open else min(alert.ends_at or now, now)
    return Postable(
        labels={"alertname": alert.name, "severity": alert.severity, **alert.labels, FINGERPRINT: alert.fingerprint},
        annotations=alert.annotations,
        starts_at=starts_at,
        ends_at=max(starts_at, ends_at),
        generator_url=generator_url,
    )


class Notifier:
    """Sends to one Alertmanager. ``turn`` is held while sending, and until the active alerts are updated."""

    def __init__(
        self,
        url: str,
        settings: AlertmanagerSettings,
        post: Post,
        instruments: Instruments,
        *,
        first_s: float = BACKOFF_FIRST_S,
    ) -> None:
        base = url.rstrip("/")
        beside = [other for other in settings.urls if other != url and address_of(other) == address_of(url)]
        self.receiver = Receiver(
            base + ALERTS_PATH,
            post,
            COMPONENT,
            instruments,
            name=address_of(url) + (urlsplit(base).path if beside else ""),
            first_s=first_s,
            on_recovery=self._recovered,
            empty=Request(b"[]", _HEADERS),
        )
        self.turn = asyncio.Lock()
        self._settings = settings
        self._resent = instruments.counter("gpustream_alertmanager_resent_total", self.receiver.name)
        self._refusals = instruments.counter("gpustream_alertmanager_refused_total", self.receiver.name)
        instruments.gauge("gpustream_alertmanager_open_alerts", self.receiver.name).set_function(
            lambda: sum(active.count_open() for active, abandon in self._partitions.items() if not abandon.is_set())
        )
        self._partitions: dict[ActiveAlerts, asyncio.Event] = {}
        self._due: set[ActiveAlerts] = set()
        self._wake = asyncio.Event()
        self._all_sent_s, self._next_s = -math.inf, time.monotonic() + settings.resend_s
        self._refused: set[str] = set()

    def watch(self, active: ActiveAlerts, abandon: asyncio.Event) -> None:
        """Send a partition's active alerts, which must be complete, now and periodically until ``abandon`` is set."""
        if self._partitions.get(active) is not abandon:
            self._partitions[active] = abandon
            self._due.add(active)
            self._wake.set()

    async def send(self, alerts: Sequence[Alert], abandon: asyncio.Event) -> Refused:
        """Send alerts, and find out which are refused. Raises Abandoned.

        Alerts that were refused before are sent alone, so that the others need no further requests because of them.
        """
        others = [alert for alert in alerts if alert.fingerprint not in self._refused]
        refused = await self._bisect(others, abandon)
        for alert in alerts:
            if alert.fingerprint in self._refused:
                refused |= await self._bisect([alert], abandon)
        if alerts:
            all_refused = len(refused) == len(alerts) and len(self._refused | refused.keys()) >= _REFUSES_EVERYTHING
            self.receiver.refuses_all(next(iter(refused.values())) if all_refused else None)
        for fingerprint in refused.keys() - self._refused:
            log.warning("alert %s is refused: %s", fingerprint, refused[fingerprint])
        self._refused.difference_update(alert.fingerprint for alert in alerts)
        self._refused.update(refused)
        return refused

    async def _bisect(self, alerts: Sequence[Alert], abandon: asyncio.Event) -> Refused:
        """Send alerts in one request; in halves if it is refused."""

        def current_request() -> Request:
            return request(alerts, datetime.now(UTC), self._settings.resend_s, self._settings.generator_url)

        if not alerts:
            return {}
        most = 1 if alerts[0].fingerprint in self._refused else MISCONFIGURED
        reason = await self.receiver.send(current_request, abandon, most_misconfigured=most)
        if reason is None:
            return {}
        if len(alerts) == 1:
            self._refusals.inc()
            return {alerts[0].fingerprint: f"{self.receiver.name}: {reason}"}
        half = len(alerts) // 2
        return await self._bisect(alerts[:half], abandon) | await self._bisect(alerts[half:], abandon)

    async def resend(self) -> None:
        """Send the active alerts periodically, until cancelled."""
        while True:
            if not await set_within(self._wake, self._next_s - time.monotonic()):
                self._all_due()
            self._wake.clear()
            due, self._due = self._due, set()
            for active in due:
                await self.resend_now(active)

    async def resend_now(self, active: ActiveAlerts) -> None:
        """Send the active alerts of a partition, if it is still assigned."""
        if (abandon := self._partitions.get(active)) is None:
            return
        fingerprints = active.due(now_ms(), max(RESOLVED_FOR_MS, round(self._settings.resend_s * 2_000)))
        try:
            for start in range(0, len(fingerprints), self._settings.max_alerts):
                async with self.turn:
                    states = active.states(fingerprints[start : start + self._settings.max_alerts])
                    await self.send(states, abandon)
                    self._resent.inc(len(states))
        except Abandoned:
            self._partitions.pop(active, None)

    def _recovered(self) -> None:
        """Let all active alerts be sent soon. One that fails now and then would get them without end, if that was at
        once each time."""
        self._next_s = min(self._next_s, self._all_sent_s + RECOVERED_EVERY_S)
        self._wake.set()

    def _all_due(self) -> None:
        """Let all active alerts be sent. What was refused and is not active any more says nothing of the receiver."""
        self._all_sent_s = time.monotonic()
        self._next_s = self._all_sent_s + self._settings.resend_s
        self._partitions = {active: abandon for active, abandon in self._partitions.items() if not abandon.is_set()}
        self._refused = {alert.fingerprint for active in self._partitions for alert in active.states(self._refused)}
        if len(self._refused) < _REFUSES_EVERYTHING:
            self.receiver.refuses_all(None)
        self._due.update(self._partitions)
        self._wake.set()


class _AlertmanagerRecord(NamedTuple):
    """A record with its alert, None for a tombstone, or its error."""

    record: Record
    alert: Alert | None = None
    error: str = ""
    is_news: bool = False
    is_last: bool = False


class AlertmanagerPartition:
    """The handler of a partition, for one Alertmanager. All partitions share its notifier."""

    def __init__(self, notifier: Notifier, letters: DeadLetters, outcomes: Outcomes, max_alerts: int) -> None:
        self._notifier, self._letters, self._outcomes, self._max_alerts = notifier, letters, outcomes, max_alerts
        self._transitions = Transitions()
        self._active = ActiveAlerts()

    def recall(self, record: Record) -> None:
        """Restore an alert from a record that was sent before."""
        read = self._read(record)
        self._activate(read)
        self._finish(read)

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Send the new transitions, request by request. A refused alert is still sent periodically while it is open.

        A request has an alert only once, so firing and resolved are sent one after the other.
        """
        notifier = self._notifier
        notifier.watch(self._active, abandon)
        for batch in batches(records, self._max_alerts, key=lambda record: record.key):
            reads = [self._read(record) for record in batch]
            async with notifier.turn:
                news = [read.alert for read in reads if read.alert and read.is_news]
                refused = await notifier.send([*self._active.renamed(news), *news], abandon)
                for read in reads:
                    self._activate(read)
            errors = [read.error or (refused.get(read.alert.fingerprint, "") if read.alert else "") for read in reads]
            for read, error in zip(reads, errors, strict=True):
                if error:
                    await self._letters.write(read.record, error, abandon)
            for read, error in zip(reads, errors, strict=True):
                self._finish(read)
                self._outcomes.finish("dead_lettered" if error else "delivered" if read.is_news else "duplicate")
            yield batch[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Send the active alerts periodically from now on."""
        self._notifier.watch(self._active, abandon)

    def reset(self) -> None:
        self._transitions.clear()
        self._active.clear()

    def _read(self, record: Record) -> _AlertmanagerRecord:
        try:
            alert = read_alert(record)
        except Undecodable as error:
            return _AlertmanagerRecord(record, error=str(error))
        if alert is None:
            return _AlertmanagerRecord(record)
        is_news, is_last = self._transitions.is_news(alert), self._transitions.is_last(alert)
        return _AlertmanagerRecord(record, alert, is_news=is_news, is_last=is_last)

    def _activate(self, read: _AlertmanagerRecord) -> None:
        """Update the active alerts by a record."""
        if read.alert is not None and (read.is_news or (read.is_last and read.alert.is_open)):
            self._active.put(read.alert, read.record.timestamp)
        elif read.alert is None and not read.error:
            self._active.remove(key_of(read.record))

    def _finish(self, read: _AlertmanagerRecord) -> None:
        """Remember what a record said, once its dead letter is written: until then it is news if it is read again."""
        if read.is_news or (read.alert is None and not read.error):
            self._transitions.update(read.record, read.alert)


class AlertmanagerSink:
    """The component: :meth:`run` it until it is to stop. ``settings`` must be free of errors."""

    name = "alertmanager"

    def __init__(self, settings: AlertmanagerSettings) -> None:
        self.settings = settings
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._alertmanagers: list[tuple[Notifier, GroupReader]] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until ``stop``, or until one Alertmanager's reader fails; returns within 8 s of it.

        Raises what a retry can't mend.
        """
        http, sender = Http(self.settings), Sender(self.settings.connection(), client_id=self.settings.group)
        letters, outcomes = DeadLetters(sender, "sink alertmanager"), Outcomes(COMPONENT, self._instruments)
        for url in self.settings.urls:
            notifier = Notifier(url, self.settings, http.post, self._instruments)

            def handler(_: int, notifier: Notifier = notifier) -> AlertmanagerPartition:
                return AlertmanagerPartition(notifier, letters, outcomes, self.settings.max_alerts)

            member = dataclasses.replace(self.settings, group=self.settings.group_of(url))
            source = Source(TOPIC.name, handler, self.settings.from_, WHOLE_LOG)
            self._alertmanagers.append((notifier, GroupReader(member, [source], outcomes, letters)))
        readers = [reader for _, reader in self._alertmanagers]
        try:
            async with connecting(sender):
                await together(stop, readers, others=[notifier.resend() for notifier, _ in self._alertmanagers])
        finally:
            await http.close()

    def not_ready(self) -> list[str]:
        """Why alerts are not delivered; empty when they are."""
        if not self._alertmanagers:
            return ["not started"]
        all_reasons = []
        for notifier, reader in self._alertmanagers:
            failing = notifier.receiver.failing
            reasons = [*reader.not_ready(), *([f"does not accept: {failing}"] if failing else [])]
            all_reasons += [f"{notifier.receiver.name}: {reason}" for reason in reasons]
        return all_reasons
