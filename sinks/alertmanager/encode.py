"""Alerts as Alertmanager's API v2 takes them.

Alertmanager tells alerts apart by their labels alone, so each carries its fingerprint as a label too: the end of one
never ends another that has the same labels.
Source: api/v2/openapi.yaml (postableAlert), and alert/alert.go (Validate) of Alertmanager 0.34.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from sinks.receiver import Request
from topics.alerts import MAX_TIME_MS, Alert, time

FINGERPRINT = "gpustream_fingerprint"
HOLD_RESENDS = 4
"""An open alert ends by itself where it is not told again for so many times as long as it should be."""

_LAST = time(MAX_TIME_MS)
_HEADERS = {"Content-Type": "application/json"}


class Postable(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An alert of a request."""

    labels: dict[str, str]
    annotations: dict[str, str] = {}
    starts_at: datetime
    ends_at: datetime
    generator_url: str | None = msgspec.field(default=None, name="generatorURL")


def request(alerts: Sequence[Alert], now: datetime, resend_s: float, generator_url: str | None) -> Request:
    """The request that tells alerts, as it is now."""
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
