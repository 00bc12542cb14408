"""What a Lease says, and what it says next. Pure.

Source: the Lease's fields as client-go's leader election writes them.
"""

import contextlib
import math
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

DURATION_S = 10.0

LONGEST_DURATION_S = 60.0
"""However long a Lease says that it holds: every leader is one of ours, and a slip must not stop the next for a day."""

_LAST_YEAR = 9000  # above it there is little left to count up in
_MOST_TRANSITIONS = 2**31 - 2
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Json = dict[str, Any]


class Record(NamedTuple):
    """What a Lease says. Times are microseconds since the epoch, of the clock of whoever wrote them."""

    holder: str = ""
    duration_s: float = DURATION_S
    acquired_us: int = 0
    renewed_us: int = 0
    transitions: int = 0

    @property
    def epoch(self) -> int:
        """When the holder took it, in milliseconds since the epoch."""
        return self.acquired_us // 1000


def record_of(lease: Json) -> Record:
    """What a Lease says; what is missing or makes no sense in it is as in one that nobody holds."""
    spec = lease.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    holder, transitions = spec.get("holderIdentity"), spec.get("leaseTransitions")
    return Record(
        holder=holder if isinstance(holder, str) else "",
        duration_s=_duration_s(spec.get("leaseDurationSeconds")),
        acquired_us=_micros(spec.get("acquireTime")),
        renewed_us=_micros(spec.get("renewTime")),
        transitions=min(max(transitions, 0), _MOST_TRANSITIONS) if isinstance(transitions, int) else 0,
    )


def spec_of(record: Record) -> Json:
    """A record as a Lease's spec."""
    return {
        "holderIdentity": record.holder,
        "leaseDurationSeconds": math.ceil(record.duration_s),
        "acquireTime": _time(record.acquired_us),
        "renewTime": _time(record.renewed_us),
        "leaseTransitions": record.transitions,
    }


def taken(last: Record, identity: str, *, duration_s: float, now_us: int) -> Record:
    """The record of whoever takes the Lease after ``last``: its epoch is above, even where clocks stepped back."""
    acquired_us = max(now_us, (last.epoch + 1) * 1000)
    return Record(identity, duration_s, acquired_us, now_us, last.transitions + 1)


def _duration_s(value: Any) -> float:
    return float(min(max(value, 1), LONGEST_DURATION_S)) if isinstance(value, int) else DURATION_S


def _micros(value: Any) -> int:
    """A time of the API in microseconds since the epoch; 0 where it is none."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        time_of_day = datetime.fromisoformat(value).astimezone(UTC)
        return (time_of_day - _EPOCH) // timedelta(microseconds=1) if time_of_day.year < _LAST_YEAR else 0
    return 0


def _time(micros: int) -> str:
    return (_EPOCH + timedelta(microseconds=micros)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
