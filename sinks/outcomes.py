"""What became of each record that a sink read: it ends in exactly one outcome, or is held, or was given back.

read = delivered + duplicate + dropped + dead_lettered + released + held, at any time of a process's life.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec
from prometheus_client import Counter

from delivery.dead_letters import Record
from delivery.instruments import Instrument, Instruments
from delivery.watchdog import lateness_instrument
from sinks.series.tick import SeriesTick

log = logging.getLogger(__name__)

T = TypeVar("T")

Outcome = Literal["delivered", "duplicate", "dropped", "dead_lettered"]

OnOutcome = Callable[[str, str, int, int, Outcome], None]
"""Called with the cluster, node, run_id and seq of each tick, and what became of it."""

COMMON: tuple[Instrument, ...] = (
    Instrument("records_read_total", "counter", "Records read, to be delivered."),
    Instrument(
        "records_delivered_total",
        "counter",
        "Records delivered, but for series that are left out and a part that is refused for its time.",
    ),
    Instrument(
        "records_duplicate_total",
        "counter",
        "Records that say nothing new: replays, alerts that are deleted, usage that is not final.",
    ),
    Instrument(
        "records_dropped_total",
        "counter",
        "Records refused for their time as a whole, or of which all series are left out, by reason.",
        ("reason",),
    ),
    Instrument(
        "records_dead_lettered_total",
        "counter",
        "Records that could not be decoded, or of which a part was refused.",
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
    lateness_instrument("")._replace(name="loop_late_seconds"),
)
"""What every sink says of its records; the names are in full where a sink lists its own."""

DELAY_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
"""From what a pipeline at rest takes to how long Kafka keeps a tick."""


class Undecodable(ValueError):
    """The record is not one of its topic: dead-letter it."""


def decoded(record: Record, decode: Callable[[bytes], T], topic: str) -> T:
    """What a record of a topic says. Raises Undecodable."""
    try:
        return decode(record.value or b"")
    except msgspec.DecodeError as error:
        raise Undecodable(f"not a record of {topic}: {error}") from error


def delay_instrument(name: str, until: str) -> Instrument:
    """How old the ticks that a sink delivers are by then: observed by :meth:`Outcomes.delay`."""
    text = f"From when a tick's GPUs were read, by the node's clock, until {until}; 0 if that clock is ahead."
    return Instrument(name, "histogram", text, buckets=DELAY_BUCKETS)


def instruments(*names: str) -> tuple[Instrument, ...]:
    """The instruments that every sink has, under the names that they have in this one: one for each of ``COMMON``."""
    return tuple(row._replace(name=name) for row, name in zip(COMMON, names, strict=True))


class Outcomes:
    """Counts records by what became of them; ``on_outcome`` is called for each tick. ``clock_s``: the time of day."""

    def __init__(
        self,
        component: str,
        made: Instruments,
        on_outcome: OnOutcome | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._prefix = f"gpustream_{component}"
        self._made, self._on_outcome, self._clock_s = made, on_outcome, clock_s
        self._held = 0
        self._lags: dict[object, list[int]] = {}

    def read(self, records: int) -> None:
        """Records were read, and are held now."""
        self._counter("records_read_total").inc(records)
        self._hold(records)

    def finish(self, outcome: Outcome, reason: str = "", tick: SeriesTick | None = None) -> None:
        """A record ended, which said this tick, if it is one."""
        labels = (reason,) if outcome == "dropped" else ()
        self._counter(f"records_{outcome}_total", *labels).inc()
        self._hold(-1)
        if self._on_outcome is not None and tick is not None:
            self._on_outcome(tick.cluster, tick.node, tick.run_id, tick.seq, outcome)

    def delay(self, tick: SeriesTick) -> None:
        """A tick has just been delivered; it is finished now, or later."""
        delay_s = max(0.0, self._clock_s() - tick.ts_ms / 1000)
        self._made.histogram(f"{self._prefix}_delay_seconds").observe(delay_s)

    def release(self, records: int) -> None:
        """Records were given back unfinished."""
        self._counter("records_released_total").inc(records)
        self._hold(-records)

    def expired(self, records: int) -> None:
        """Records were gone before they were read."""
        self._counter("records_expired_total").inc(records)

    def new_log(self, partition: int) -> None:
        """A node's offsets began again."""
        self._counter("new_logs_total").inc()
        log.warning("partition %d: gpu.samples was deleted and created again: its new records are taken", partition)

    def committed(self, *, ok: bool) -> None:
        """An offset commit ended."""
        self._counter("commits_total", "ok" if ok else "failed").inc()

    def assigned(self, lags: Iterable[int], of: object = None) -> None:
        """The partitions ``of`` one of several readers, each with how many records are ahead of it."""
        self._lags[of] = list(lags)
        known = [lag for some in self._lags.values() for lag in some]
        self._made.gauge(f"{self._prefix}_partitions").set(len(known))
        self._made.gauge(f"{self._prefix}_lag_records").set(sum(known))

    def late(self, worst_s: float) -> None:
        """The most that the event loop was late within the last minute."""
        self._made.gauge(f"{self._prefix}_loop_late_seconds").set(worst_s)

    def _counter(self, name: str, *labels: str) -> Counter:
        return self._made.counter(f"{self._prefix}_{name}", *labels)

    def _hold(self, more: int) -> None:
        self._held += more
        self._made.gauge(f"{self._prefix}_records_held").set(self._held)
