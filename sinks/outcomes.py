"""Counts the records of a sink by outcome. Each record has exactly one, or is held, or was released unfinished.

read = delivered + duplicate + dropped + dead_lettered + released + held, at any moment of a process.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec
from prometheus_client import Counter

from delivery.dead_letters import Record
from delivery.instruments import Instrument, Instruments
from delivery.watchdog import LATENESS
from sinks.series.tick import SeriesTick

log = logging.getLogger(__name__)

T = TypeVar("T")

Outcome = Literal["delivered", "duplicate", "dropped", "dead_lettered"]

OnOutcome = Callable[[str, str, int, int, Outcome], None]
"""Called with the cluster, node, run_id and seq of each tick, and its outcome."""

COMMON: tuple[Instrument, ...] = (
    Instrument("records_read_total", "counter", "Records read, to be delivered."),
    Instrument(
        "records_delivered_total",
        "counter",
        "Records delivered. Series that are left out, and a part that is refused for its time, may be missing.",
    ),
    Instrument(
        "records_duplicate_total",
        "counter",
        "Records that say nothing new: replays, deleted alerts and (not for Parquet) usage that is not final.",
    ),
    Instrument(
        "records_dropped_total",
        "counter",
        "Records refused for their time as a whole, or of which all series are left out, by reason.",
        ("reason",),
    ),
    Instrument(
        "records_dead_lettered_total", "counter", "Records that could not be decoded, or of which a part was refused."
    ),
    Instrument("records_released_total", "counter", "Records given back unfinished, for whoever reads them next."),
    Instrument("records_held", "gauge", "Records read and not finished."),
    Instrument(
        "records_expired_total",
        "counter",
        "Records that the topic's retention, or somebody, deleted before they were read.",
    ),
    Instrument(
        "new_logs_total",
        "counter",
        "Nodes whose offsets began again: gpu.samples was deleted and created again, and goes on with new records.",
    ),
    Instrument("commits_total", "counter", "Offset commits, by whether they succeeded.", ("result",)),
    Instrument("partitions", "gauge", "Partitions assigned."),
    Instrument("lag_records", "gauge", "Records not yet finished, in the partitions assigned."),
    LATENESS,
)
"""The metrics that every sink has; their full names are in each sink's list."""

DELAY_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""From the delay of an idle pipeline to the retention of ticks in Kafka."""


class Undecodable(ValueError):
    """The record is not a record of its topic: dead-letter it."""


def decoded(record: Record, decode: Callable[[bytes], T], topic: str) -> T:
    """Decode a record of a topic. Raises Undecodable."""
    try:
        return decode(record.value or b"")
    except msgspec.DecodeError as error:
        raise Undecodable(f"not a record of {topic}: {error}") from error


def delay_instrument(name: str, until: str) -> Instrument:
    """The histogram of the delay of ticks at their delivery: see :meth:`Outcomes.delay`."""
    text = f"From when a tick's GPUs were read, by the node's clock, until {until}; 0 if that clock is ahead."
    return Instrument(name, "histogram", text, buckets=DELAY_BUCKETS)


class Outcomes:
    """Counts records by outcome. ``on_outcome`` is called for each finished tick. ``clock_s``: the time of day."""

    def __init__(
        self,
        component: str,
        instruments: Instruments,
        on_outcome: OnOutcome | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._prefix = f"gpustream_{component}"
        self._instruments, self._on_outcome, self._clock_s = instruments, on_outcome, clock_s
        self._held = 0
        instruments.gauge(f"{self._prefix}_records_held").set_function(lambda: self._held)
        self._lags: dict[object, tuple[int, int]] = {}  # of each reader: how many partitions, and their lag

    def read(self, records: int) -> None:
        """Count records that were read; they are held now."""
        self._counter("records_read_total").inc(records)
        self._held += records

    def finish(self, outcome: Outcome, reason: str = "", tick: SeriesTick | None = None) -> None:
        """Count a finished record; ``tick`` is what it was, if it could be decoded as one."""
        labels = (reason,) if outcome == "dropped" else ()
        self._counter(f"records_{outcome}_total", *labels).inc()
        self._held -= 1
        if self._on_outcome is not None and tick is not None:
            self._on_outcome(tick.cluster, tick.node, tick.run_id, tick.seq, outcome)

    def delay(self, tick: SeriesTick) -> None:
        """Observe the delay of a tick that has just been delivered."""
        delay_s = max(0.0, self._clock_s() - tick.ts_ms / 1000)
        self._instruments.histogram(f"{self._prefix}_delay_seconds").observe(delay_s)

    def release(self, records: int) -> None:
        """Count records that were given up unfinished."""
        self._counter("records_released_total").inc(records)
        self._held -= records

    def expired(self, records: int) -> None:
        """Count records that were deleted before they were read."""
        self._counter("records_expired_total").inc(records)

    def new_log(self, partition: int) -> None:
        """Count a node whose offsets have started again."""
        self._counter("new_logs_total").inc()
        log.warning("partition %d: gpu.samples was deleted and created again: its new records are taken", partition)

    def committed(self, *, ok: bool) -> None:
        """Count an offset commit."""
        self._counter("commits_total", "ok" if ok else "failed").inc()

    def assigned(self, lags: Iterable[int | None], of: object = None) -> None:
        """Set the lag of each assigned partition of one reader, which ``of`` identifies.
        Until the lag of each is known, their sum does not fall."""
        lags = list(lags)
        known = sum(lag for lag in lags if lag is not None)
        _, before = self._lags.get(of, (0, 0))
        self._lags[of] = len(lags), max(known, before) if None in lags else known
        partitions, records = map(sum, zip(*self._lags.values(), strict=True))
        self._instruments.gauge(f"{self._prefix}_partitions").set(partitions)
        self._instruments.gauge(f"{self._prefix}_lag_records").set(records)

    def late(self, worst_s: float) -> None:
        """Set the greatest lateness of the event loop within the last minute."""
        self._instruments.gauge(f"{self._prefix}_loop_late_seconds").set(worst_s)

    def _counter(self, name: str, *labels: str) -> Counter:
        return self._instruments.counter(f"{self._prefix}_{name}", *labels)
