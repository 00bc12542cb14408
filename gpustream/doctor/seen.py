"""What the checks look at, and what they say."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from delivery.topic_admin import COMMAND, Mismatch
from delivery.values import duration_words
from gpustream.doctor.evidence import Fold, NodeName


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it should be."""

    finding: str
    cause: str
    evidence: str
    next: str


class Checked(NamedTuple):
    """What a check has seen, in one line, and what it has found."""

    summary: str
    findings: Sequence[Finding] = ()


class Lag(NamedTuple):
    """What a group has not finished of a topic: how many records, in which partitions, and how old the oldest is.

    ``oldest_ms`` is when it was logged; None if that is not known.
    """

    topic: str
    records: int
    partitions: tuple[int, ...]
    oldest_ms: int | None


class Group(NamedTuple):
    """A consumer group: its state as the broker calls it, how many members it has, and what it has not finished."""

    name: str
    state: str
    members: int
    lags: tuple[Lag, ...]


class Series(NamedTuple):
    """One series of a component's own metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


class OwnMetrics(NamedTuple):
    """What a component says of itself: its metrics, and why it is not ready. ``error``: why it could not be asked."""

    url: str
    series: Sequence[Series] = ()
    not_ready: str = ""
    error: str = ""

    def sums(self, suffix: str) -> dict[tuple[str, str], float]:
        """The counters that end in a suffix and are not zero, by name and reason."""
        found: dict[tuple[str, str], float] = {}
        for one in self.series:
            if one.name.endswith(suffix) and one.value:
                key = (one.name, one.labels.get("reason", ""))
                found[key] = found.get(key, 0) + one.value
        return found

    def since(self, now_ms: int) -> str:
        """For how long it has counted."""
        started = [one.value for one in self.series if one.name == "process_start_time_seconds"]
        return f"since its start {duration_words(now_ms - started[0] * 1000)} ago" if started else "since its start"


class Prometheus(NamedTuple):
    """The newest sample of each node that a Prometheus has. ``error``: why it could not be asked."""

    url: str
    newest_ms: Mapping[NodeName, int]
    error: str = ""


class Situation(NamedTuple):
    """All that the checks look at; ``fold`` is None where topics are missing, which the command ``create`` makes."""

    since_ms: int
    now_ms: int
    mismatches: Sequence[Mismatch] = ()
    create: str = COMMAND
    fold: Fold | None = None
    groups: Sequence[Group] = ()
    components: Sequence[OwnMetrics] = ()
    prometheus: Prometheus | None = None

    @property
    def window(self) -> str:
        """The time that is looked at."""
        return duration_words(self.now_ms - self.since_ms)

    def ago(self, at_ms: float) -> str:
        """How long ago something was."""
        return f"{duration_words(max(0, self.now_ms - at_ms))} ago"
