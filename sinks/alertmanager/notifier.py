"""Keeps one Alertmanager's alerts up to date: what is new at once, what is open again and again. API v2.

In: alerts of its partitions. Out: requests, one at a time, so that no older state arrives after a newer one.
State: the alerts of the partitions that are ours; which alerts are refused.
On failure: an Alertmanager that is away is waited for. It has alerts in memory only, so all of them are sent when it is
back. It tells alerts apart by their labels alone, so each carries its fingerprint as a label too: the end of one never
ends another that has the same labels.
Source: api/v2/openapi.yaml (postableAlert), and alert/alert.go (Validate) of Alertmanager 0.34.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import msgspec

from delivery.dead_letters import Abandoned
from delivery.instruments import Instrument, Instruments
from sinks import outcomes, receiver
from sinks.alertmanager.config import AlertmanagerSettings, alerts_url
from sinks.receiver import BACKOFF_FIRST_S, Post, Receiver, Request
from topics.alerts import MAX_TIME_MS, Alert
from topics.alerts import time as time_of

log = logging.getLogger(__name__)

Refused = dict[str, str]
"""Why alerts were refused, by fingerprint."""

_REFUSES_EVERYTHING = 3
"""If so many alerts are refused and no other is accepted with them, it is not about the alerts."""

FINGERPRINT = "gpustream_fingerprint"
HOLD_RESENDS = 4
"""An open alert ends by itself if it is not sent again for so many times as long as it should be."""

_LAST = time_of(MAX_TIME_MS)
_HEADERS = {"Content-Type": "application/json"}

RESOLVED_FOR_MS = 15 * 60_000
"""For so long the end of an alert is sent, as Prometheus does: an Alertmanager that was away then must learn of it."""

COMPONENT = "alertmanager"

INSTRUMENTS: tuple[Instrument, ...] = (
    *outcomes.instruments(COMPONENT),
    *receiver.instruments(COMPONENT),
    Instrument("gpustream_alertmanager_open_alerts", "gauge", "Alerts that are told again and again.", ("receiver",)),
    Instrument(
        "gpustream_alertmanager_resent_total",
        "counter",
        "Alerts that were told again, because they are open or have ended lately.",
        ("receiver",),
    ),
    Instrument(
        "gpustream_alertmanager_refused_total",
        "counter",
        "Alerts that were refused, each time that they were told.",
        ("receiver",),
    ),
)


class _Sent(NamedTuple):
    alert: Alert
    written_ms: int


class ActiveAlerts:
    """What of one partition an Alertmanager is sent again and again: open alerts, and those that ended lately."""

    def __init__(self) -> None:
        self._by_fingerprint: dict[str, _Sent] = {}

    def put(self, alert: Alert, written_ms: int) -> None:
        """An alert's state, and when the broker got it."""
        self._by_fingerprint[alert.fingerprint] = _Sent(alert, written_ms)

    def remove(self, key: bytes | None) -> None:
        """The alert of a record's key is gone from the topic."""
        self._by_fingerprint.pop((key or b"").decode("ascii", "replace"), None)

    def clear(self) -> None:
        """The topic was created again."""
        self._by_fingerprint.clear()

    def count_open(self) -> int:
        """How many are open."""
        return sum(entry.alert.is_open for entry in self._by_fingerprint.values())

    def due(self, now_ms: int) -> list[str]:
        """The fingerprints of all that is to be sent; what ended long ago is dropped."""
        self._by_fingerprint = {
            fingerprint: entry
            for fingerprint, entry in self._by_fingerprint.items()
            if entry.alert.is_open or now_ms - entry.written_ms <= RESOLVED_FOR_MS
        }
        return list(self._by_fingerprint)

    def states(self, fingerprints: Iterable[str]) -> list[Alert]:
        """Their last states, of those that are still here."""
        return [self._by_fingerprint[fp].alert for fp in fingerprints if fp in self._by_fingerprint]


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
        self.receiver = Receiver(alerts_url(url), post, COMPONENT, made, first_s=first_s, on_recovery=self._all_due)
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
                await self._resend(active)

    async def _resend(self, active: ActiveAlerts) -> None:
        abandon = self._partitions.get(active)
        if abandon is None:
            return
        fingerprints = active.due(int(time.time() * 1000))
        try:
            for start in range(0, len(fingerprints), self._settings.max_alerts):
                async with self.turn:
                    states = active.states(fingerprints[start : start + self._settings.max_alerts])
                    await self.send(states, abandon)
                    self._resent.inc(len(states))
        except Abandoned:
            del self._partitions[active]

    def _all_due(self) -> None:
        self._partitions = {active: abandon for active, abandon in self._partitions.items() if not abandon.is_set()}
        self._due.update(self._partitions)
        self._wake.set()
