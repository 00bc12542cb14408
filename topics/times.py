"""Times: milliseconds since 1970, datetimes in UTC, and text for people."""

from datetime import UTC, datetime, timedelta

MAX_TIME_MS = 253_402_300_799_999  # the last millisecond of the year 9999: RFC 3339 has no later one

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def time_of(ms: int) -> datetime:
    """The time of milliseconds since 1970; of more than :data:`MAX_TIME_MS`, that last one."""
    return _EPOCH + min(ms, MAX_TIME_MS) * _MILLISECOND


def epoch_ms(at: datetime) -> int:
    """Milliseconds since 1970."""
    return (at - _EPOCH) // _MILLISECOND


def rfc3339(at: datetime) -> str:
    """A time of UTC for machines, in whole seconds: ``2026-11-20T23:44:05Z``."""
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def moment(at: datetime) -> str:
    """A time as people read it: ``2026-11-20 23:44 UTC``."""
    return f"{at:%Y-%m-%d %H:%M} UTC"
