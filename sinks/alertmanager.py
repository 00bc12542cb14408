"""The Alertmanager sink: gpu.alerts -> each of several Alertmanagers, by API v2: what is open, again and again.

In: gpu.alerts. Out: requests to each ``--url``, one at a time, so that no older state arrives after a newer one; what
is new goes at once; gpu.dead-letters; the offset after each request.
State: none that a restart does not read back: the active alerts and the newest transition of each alert; which alerts
are refused.
Each Alertmanager has a consumer group of its own, so that one that is away holds up only itself. An
Alertmanager knows alerts by their labels alone, so each carries its fingerprint as a label too: the end of one never
ends another that has the same labels.
On failure: an outage of an Alertmanager or of Kafka is waited for; what is open is sent on while Kafka is away. An
Alertmanager has alerts in memory only, so all of them are sent when it is back. If this sink itself is gone, open
alerts end in Alertmanager after four times ``--resend``.
Source: api/v2/openapi.yaml (postableAlert), and alert/alert.go (Validate) of Alertmanager 0.34.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from delivery.dead_letters import Abandoned, DeadLetters, Record, connecting
from delivery.instruments import Instrument, Instruments
from delivery.positions import WHOLE_LOG
from delivery.sender import Sender
from delivery.settings import MemberSettings
from sinks import outcomes, receiver
from sinks.alerts import Transitions, batches, key_of, read
from sinks.consumer import GroupReader, Source, together
from sinks.outcomes import Outcomes, Undecodable
from sinks.receiver import BACKOFF_FIRST_S, Http, Post, Receiver, Request
from sinks.settings import ALERTS_PATH, AlertmanagerSettings
from topics.alerts import MAX_TIME_MS, TOPIC, Alert
from topics.alerts import time as time_of

log = logging.getLogger(__name__)

COMPONENT = "alertmanager"

INSTRUMENTS: tuple[Instrument, ...] = (
    *outcomes.instruments(
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
"""An open alert ends by itself if it is not sent again for so many times as long as it should be."""

RESOLVED_FOR_MS = 15 * 60_000
"""For so long the end of an alert is sent, as Prometheus does: an Alertmanager that was away then must learn of it."""

_REFUSES_EVERYTHING = 3
"""If so many alerts are refused and no other is accepted with them, it is not about the alerts."""

_LAST = time_of(MAX_TIME_MS)
_HEADERS = {"Content-Type": "application/json"}

Refused = dict[str, str]
"""Why alerts were refused, by fingerprint."""


class ActiveAlerts:
    """What of one partition an Alertmanager is sent again and again: open alerts, and those that ended lately."""

    def __init__(self) -> None:
        self._by_fingerprint: dict[str, tuple[Alert, int]] = {}

    def put(self, alert: Alert, written_ms: int) -> None:
        """An alert's state, and when the broker got it."""
        self._by_fingerprint[alert.fingerprint] = alert, written_ms

    def remove(self, fingerprint: str) -> None:
        """An alert is gone from the topic."""
        self._by_fingerprint.pop(fingerprint, None)

    def clear(self) -> None:
        """The topic was created again."""
        self._by_fingerprint.clear()

    def renamed(self, news: Iterable[Alert]) -> list[Alert]:
        """The ends of open alerts whose labels an update changes: to an Alertmanager those are other alerts."""
        found = []
        for alert in news:
            was, _ = self._by_fingerprint.get(alert.fingerprint, (alert, 0))
            if was.is_open and was.labels != alert.labels and was.starts_at == alert.starts_at:
                found.append(msgspec.structs.replace(was, state="resolved", ends_at=datetime.now(UTC)))
        return found

    def count_open(self) -> int:
        """How many are open."""
        return sum(alert.is_open for alert, _ in self._by_fingerprint.values())

    def due(self, now_ms: int) -> list[str]:
        """The fingerprints of all that is to be sent; what ended long ago is dropped."""
        self._by_fingerprint = {
            fingerprint: (alert, written_ms)
            for fingerprint, (alert, written_ms) in self._by_fingerprint.items()
            if alert.is_open or now_ms - written_ms <= RESOLVED_FOR_MS
        }
        return list(self._by_fingerprint)

    def states(self, fingerprints: Iterable[str]) -> list[Alert]:
        """Their last states, of those that are still here."""
        return [self._by_fingerprint[fp][0] for fp in fingerprints if fp in self._by_fingerprint]


class Postable(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An alert of a request."""

    labels: dict[str, str]
    annotations: dict[str, str] = {}
    starts_at: datetime
    ends_at: datetime
    generator_url: str | None = msgspec.field(default=None, name="generatorURL")


def request(alerts: Sequence[Alert], now: datetime, resend_s: float, generator_url: str | None) -> Request:
    """The request that sends alerts, as they are now."""
    return Request(msgspec.json.encode([postable(one, now, resend_s, generator_url) for one in alerts]), _HEADERS)


def postable(alert: Alert, now: datetime, resend_s: float, generator_url: str | None = None) -> Postable:
    """One alert. It never ends before it starts, which Alertmanager refuses, whatever its node's clock says."""
    hold = timedelta(seconds=resend_s * HOLD_RESENDS)
    ends_at = max(now, min(alert.starts_at, _LAST - hold)) + hold
    if not alert.is_open:
        ends_at = min(alert.ends_at or now, now)
    return Postable(
        labels={"alertname": alert.name, "severity": alert.severity, **alert.labels, FINGERPRINT: alert.fingerprint},
        annotations=alert.annotations,
        starts_at=alert.starts_at,
        ends_at=max(alert.starts_at, ends_at),
        generator_url=generator_url,
    )


class Notifier:
    """One Alertmanager. Whoever sends to it has ``turn`` meanwhile, and until the active alerts show what was sent."""

    def __init__(
        self,
        url: str,
        settings: AlertmanagerSettings,
        post: Post,
        made: Instruments,
        *,
        first_s: float = BACKOFF_FIRST_S,
    ) -> None:
        self.receiver = Receiver(
            url.rstrip("/") + ALERTS_PATH, post, COMPONENT, made, first_s=first_s, on_recovery=self._all_due
        )
        self.turn = asyncio.Lock()
        self._settings = settings
        self._resent = made.counter("gpustream_alertmanager_resent_total", self.receiver.name)
        self._refusals = made.counter("gpustream_alertmanager_refused_total", self.receiver.name)
        made.gauge("gpustream_alertmanager_open_alerts", self.receiver.name).set_function(
            lambda: sum(one.count_open() for one, abandon in self._partitions.items() if not abandon.is_set())
        )
        self._partitions: dict[ActiveAlerts, asyncio.Event] = {}
        self._due: set[ActiveAlerts] = set()
        self._wake = asyncio.Event()
        self._refused: set[str] = set()

    def watch(self, active: ActiveAlerts, abandon: asyncio.Event) -> None:
        """Active alerts are complete, and ours until ``abandon``: they are sent now, and again and again."""
        if self._partitions.get(active) is not abandon:
            self._partitions[active] = abandon
            self._due.add(active)
            self._wake.set()

    async def send(self, alerts: Sequence[Alert], abandon: asyncio.Event) -> Refused:
        """Send alerts, and find out which are refused. Raises Abandoned.

        Those that were refused before are sent alone, so that they cost the others no more requests.
        """
        others = [one for one in alerts if one.fingerprint not in self._refused]
        refused = await self._by_halves(others, abandon)
        for one in alerts:
            if one.fingerprint in self._refused:
                refused |= await self._by_halves([one], abandon)
        if alerts:
            every = len(refused) == len(alerts) and len(self._refused | refused.keys()) >= _REFUSES_EVERYTHING
            self.receiver.refuses_all(next(iter(refused.values())) if every else None)
        for fingerprint in refused.keys() - self._refused:
            log.warning("alert %s is refused: %s", fingerprint, refused[fingerprint])
        self._refused.difference_update(one.fingerprint for one in alerts)
        self._refused.update(refused)
        return refused

    async def _by_halves(self, alerts: Sequence[Alert], abandon: asyncio.Event) -> Refused:
        def as_of_now() -> Request:
            return request(alerts, datetime.now(UTC), self._settings.resend_s, self._settings.generator_url)

        why = await self.receiver.send(as_of_now, abandon) if alerts else None
        if why is None:
            return {}
        if len(alerts) == 1:
            self._refusals.inc()
            return {alerts[0].fingerprint: f"{self.receiver.name}: {why}"}
        half = len(alerts) // 2
        return await self._by_halves(alerts[:half], abandon) | await self._by_halves(alerts[half:], abandon)

    async def resend(self) -> None:
        """Send again what is active, until cancelled."""
        next_s = time.monotonic() + self._settings.resend_s
        while True:
            try:
                async with asyncio.timeout(next_s - time.monotonic()):
                    await self._wake.wait()
            except TimeoutError:
                next_s = time.monotonic() + self._settings.resend_s
                self._all_due()
            self._wake.clear()
            due, self._due = self._due, set()
            for active in due:
                await self.resend_now(active)

    async def resend_now(self, active: ActiveAlerts) -> None:
        """Send again what is active in a partition, if it is ours."""
        if (abandon := self._partitions.get(active)) is None:
            return
        fingerprints = active.due(int(time.time() * 1000))
        try:
            for start in range(0, len(fingerprints), self._settings.max_alerts):
                async with self.turn:
                    states = active.states(fingerprints[start : start + self._settings.max_alerts])
                    await self.send(states, abandon)
                    self._resent.inc(len(states))
        except Abandoned:
            self._partitions.pop(active, None)

    def _all_due(self) -> None:
        self._partitions = {active: abandon for active, abandon in self._partitions.items() if not abandon.is_set()}
        self._due.update(self._partitions)
        self._wake.set()


class _AlertmanagerRecord(NamedTuple):
    """A record and what it says: an alert, none if it is a tombstone, or an error."""

    record: Record
    alert: Alert | None = None
    error: str = ""
    is_news: bool = False
    is_last: bool = False


class AlertmanagerPartition:
    """The handler of a partition, for one Alertmanager, of which all partitions share the notifier."""

    def __init__(self, notifier: Notifier, letters: DeadLetters, outcomes: Outcomes, max_alerts: int) -> None:
        self._notifier, self._letters, self._outcomes, self._max_alerts = notifier, letters, outcomes, max_alerts
        self._transitions = Transitions()
        self._active = ActiveAlerts()

    def recall(self, records: Sequence[Record]) -> None:
        """Know what was sent before."""
        for record in records:
            self._settle(self._read(record))

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Send what is new, request by request. An alert that is refused is sent again all the same while it is open.

        A request has an alert once, so that firing and resolved are sent one after the other.
        """
        notifier = self._notifier
        notifier.watch(self._active, abandon)
        for some in batches(records, self._max_alerts, key=lambda record: record.key):
            reads = [self._read(record) for record in some]
            async with notifier.turn:
                news = [one.alert for one in reads if one.alert and one.is_news]
                refused = await notifier.send([*self._active.renamed(news), *news], abandon)
                for one in reads:
                    self._settle(one)
            wrong = [one.error or (refused.get(one.alert.fingerprint, "") if one.alert else "") for one in reads]
            for one, error in zip(reads, wrong, strict=True):
                if error:
                    await self._letters.write(one.record, error, abandon)
            for one, error in zip(reads, wrong, strict=True):
                self._outcomes.finish("dead_lettered" if error else "delivered" if one.is_news else "duplicate")
            yield some[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """What is open is sent again and again from now on."""
        self._notifier.watch(self._active, abandon)

    def reset(self) -> None:
        """The topic was created again."""
        self._transitions.clear()
        self._active.clear()

    def _read(self, record: Record) -> _AlertmanagerRecord:
        try:
            alert = read(record)
        except Undecodable as error:
            return _AlertmanagerRecord(record, error=str(error))
        if alert is None:
            return _AlertmanagerRecord(record)
        is_news, is_last = self._transitions.is_news(alert), self._transitions.is_last(alert)
        return _AlertmanagerRecord(record, alert, is_news=is_news, is_last=is_last)

    def _settle(self, one: _AlertmanagerRecord) -> None:
        if one.error:
            return
        if one.alert is None:
            self._active.remove(key_of(one.record))
        elif one.is_news or (one.is_last and one.alert.is_open):
            self._active.put(one.alert, one.record.timestamp)
        if one.alert is None or one.is_news:
            self._transitions.learn(one.record, one.alert)


class AlertmanagerSink:
    """A component: :meth:`run` it until it is to stop. ``settings`` are to be without mistakes."""

    name = "alertmanager"

    def __init__(self, settings: AlertmanagerSettings) -> None:
        self.settings = settings
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._alertmanagers: list[tuple[Notifier, GroupReader]] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until ``stop``, or until one fails, which ends the others; returns within 8 s of it.

        Raises what cannot be waited for.
        """
        http, sender = Http(self.settings), Sender(self.settings.connection(), client_id=self.settings.group)
        letters, counted = DeadLetters(sender, "sink alertmanager"), Outcomes(COMPONENT, self._instruments)
        self._alertmanagers = [self._one(url, http, letters, counted) for url in self.settings.urls]
        readers = [reader for _, reader in self._alertmanagers]
        try:
            async with connecting(sender):
                await together(stop, readers, others=[notifier.resend() for notifier, _ in self._alertmanagers])
        finally:
            await http.close()

    def not_ready(self) -> list[str]:
        """Why nothing is delivered; empty when all is well."""
        if not self._alertmanagers:
            return ["not started"]
        found = []
        for notifier, reader in self._alertmanagers:
            failing = notifier.receiver.failing
            reasons = [*reader.not_ready(), *([f"does not accept: {failing}"] if failing else [])]
            found += [f"{notifier.receiver.name}: {reason}" for reason in reasons]
        return found

    def _one(self, url: str, http: Http, letters: DeadLetters, counted: Outcomes) -> tuple[Notifier, GroupReader]:
        """One Alertmanager, and what reads for it, in a consumer group of its own."""
        settings = self.settings
        notifier = Notifier(url, settings, http.post, self._instruments)
        shared = (notifier, letters, counted, settings.max_alerts)
        of_member = {field.name: getattr(settings, field.name) for field in dataclasses.fields(MemberSettings)}
        member = MemberSettings(**{**of_member, "group": settings.group_of(url)})
        source = Source(TOPIC.name, lambda _: AlertmanagerPartition(*shared), settings.from_, WHOLE_LOG)
        return notifier, GroupReader(member, [source], counted)
