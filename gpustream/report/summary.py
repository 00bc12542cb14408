"""What a report is made of: usage by team, by workload and by day, and how often and how long alerts fired. Pure.

GPU-hours are added up by the tables of ``gpustream usage``, so that both say the same of a time.
"""

import logging
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from delivery.prices import Prices
from gpustream.usage.read import Range
from gpustream.usage.table import NO_TEAM, Table, holder_name
from sinks.alerts import read_alert
from sinks.outcomes import Undecodable
from topics.alerts import Alert
from topics.times import epoch_ms
from topics.usage import HOUR_MS, Usage

log = logging.getLogger(__name__)

DAY_MS = 24 * HOUR_MS


def day_of(at_ms: int) -> int:
    """The start of the day of UTC that a time is in."""
    return at_ms // DAY_MS * DAY_MS


class Summary:
    """The usage of a time range: by team, by workload, and for each day of UTC, by its start."""

    def __init__(self, prices: Prices | None = None) -> None:
        self.teams, self.workloads = Table("team", prices), Table("workload", prices)
        self.days: dict[int, Table] = {}
        self._team_of: dict[str, set[str]] = {}

    def add(self, record: Usage) -> None:
        """Adds a record. There is one for each key."""
        day = day_of(record.start_ms)
        if day not in self.days:  # setdefault would make a table for each record
            self.days[day] = Table("team")
        for table in (self.teams, self.workloads, self.days[day]):
            table.add(record)
        if record.category == "held":
            name = holder_name(record, "workload")
            for workload in (name, f"{record.cluster}/{name}"):
                self._team_of.setdefault(workload, set()).add(record.team or NO_TEAM)

    def close(self) -> None:
        """Call it after the last record of a partition."""
        for table in (self.teams, self.workloads, *self.days.values()):
            table.close()

    def team_of(self, workload: str) -> str:
        """The team of a workload, by its name in the table; several if it changed hands."""
        return ", ".join(sorted(self._team_of[workload]))


def shares(table: Table) -> tuple[Fraction, ...]:
    """The ratios of held and unobserved to all time, and of used and idle to held time."""
    held, unobserved = table.categories["held"], table.categories["unobserved"]
    held_shares = ratio(held.used_hours, held.gpu_hours), ratio(held.idle_hours, held.gpu_hours)
    return table.share(held), table.share(unobserved), *held_shares


def ratio(value: Fraction, whole: Fraction) -> Fraction:
    """The ratio of a value to a whole; 0 if the whole is 0."""
    return value / whole if whole else Fraction(0)


class AlertSums(NamedTuple):
    """The alerts of a rule for a team: how many began, how many still fire at the end, and for how long all fired."""

    rule: str
    team: str
    fired: int
    still_firing: int
    firing_ms: int


class Firings:
    """All firings of alerts, by their last record. An alert that fires again is another firing."""

    def __init__(self) -> None:
        self._firings: dict[str, dict[int, tuple[Alert, int | None]]] = {}  # by fingerprint and start: until when

    def add(self, records: Iterable[Any]) -> None:
        """Adds records of gpu.alerts, in log order."""
        for record in records:
            try:
                alert = read_alert(record)
            except Undecodable as error:
                log.warning("%s", error, extra={"partition": record.partition, "offset": record.offset})
                continue
            if alert is not None:
                ends_ms = None if alert.is_open or alert.ends_at is None else epoch_ms(alert.ends_at)
                self._firings.setdefault(alert.fingerprint, {})[epoch_ms(alert.starts_at)] = alert, ends_ms
                continue
            firings = self._firings.get((record.key or b"").decode("utf-8", "replace"), {})
            for starts_ms, (firing, ends_ms) in firings.items():  # a tombstone: the alert is over
                firings[starts_ms] = firing, record.timestamp if ends_ms is None else ends_ms

    def during(self, time_range: Range) -> tuple[list[AlertSums], dict[int, int]]:
        """The alerts in a time range, by rule and team, the most and longest first; and how many began on each day."""
        sums: dict[tuple[str, str], list[int]] = {}
        days: dict[int, int] = {}
        for firings in self._firings.values():
            next_ms: int | None = None
            for starts_ms, (alert, recorded_ms) in sorted(firings.items(), reverse=True):
                ends_ms = next_ms if recorded_ms is None else recorded_ms  # it has ended when it fires again
                next_ms = starts_ms
                began = time_range.from_ms <= starts_ms < time_range.to_ms
                last_ms = time_range.to_ms if ends_ms is None else min(ends_ms, time_range.to_ms)
                lasted_ms = last_ms - max(time_range.from_ms, starts_ms)
                if not began and lasted_ms <= 0:
                    continue
                row = sums.setdefault((alert.name, alert.labels.get("team", NO_TEAM)), [0, 0, 0])
                row[0] += began
                row[1] += ends_ms is None or ends_ms > time_range.to_ms
                row[2] += max(0, lasted_ms)
                if began:
                    days[day_of(starts_ms)] = days.get(day_of(starts_ms), 0) + 1
        rows = [AlertSums(*key, *row) for key, row in sums.items()]
        return sorted(rows, key=lambda row: (-row.fired, -row.firing_ms, row.rule, row.team)), days
