"""The alert stream: judges every node's ticks by the rules, and writes what becomes of each alert.

In: gpu.attributed; gpu.alert-state, whole; of gpu.workloads, which nodes were removed.
Out: gpu.alerts by fingerprint, gpu.alert-state.
State: one :class:`~streams.alerts.node.Node` a node, whose state is written whenever it changes.
On failure: what can't be decoded goes to gpu.dead-letters; an output that is not acknowledged ends the process.
"""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from delivery.instruments import Instrument, Instruments
from delivery.topic_admin import TopicCheck
from delivery.watchdog import fail_stop
from streams.alerts.rules import rules_file
from streams.alerts.worker import ALERTS, ATTRIBUTED, SAMPLES, STATE, WORKLOADS, AlertWorker
from streams.app import ReaderApp
from streams.reader import Reads
from streams.settings import AlertSettings
from streams.stage import DEAD_LETTERS, run_worker

INSTRUMENTS = (
    Instrument(
        "gpustream_alerts_ticks_total",
        "counter",
        "Node ticks read: judged, new_log (judged; the first after gpu.samples was deleted and created again), replayed"
        " (judged before), resumed (the first of a node that another worker had judged already).",
        ("outcome",),
    ),
    Instrument(
        "gpustream_alerts_transitions_total",
        "counter",
        "Alerts that fired, or were resolved, and were acknowledged; after a crash some again.",
        ("alertname", "state"),
    ),
    Instrument(
        "gpustream_alerts_written_total",
        "counter",
        "Records acknowledged by the broker: alert, repeat (an open alert written again, daily), deletion, state.",
        ("record",),
    ),
    Instrument(
        "gpustream_alerts_unsendable_total",
        "counter",
        "Records that the broker does not take, too large: left out.",
        ("record",),
    ),
    Instrument("gpustream_alerts_firing", "gauge", "Alerts that fire, by severity.", ("severity",)),
    Instrument("gpustream_alerts_pending", "gauge", "Conditions that hold, but not for long enough yet."),
    Instrument("gpustream_alerts_silent_nodes", "gauge", "Nodes without a tick for half a minute or more."),
    Instrument(
        "gpustream_alerts_delay_seconds",
        "histogram",
        "From when a tick was logged until its alert was acknowledged.",
        buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
    ),
    Instrument(
        "gpustream_alerts_read_total", "counter", "Records read, replays after a rebalance included.", ("topic",)
    ),
    Instrument(
        "gpustream_alerts_dead_lettered_total",
        "counter",
        "Records that went to gpu.dead-letters, by why: undecodable, key, oversized or unsendable.",
        ("topic", "reason"),
    ),
    Instrument("gpustream_alerts_open_bytes", "gauge", "Bytes of records that were read and are not finished."),
    Instrument("gpustream_alerts_nodes", "gauge", "Nodes whose state is held."),
    Instrument("gpustream_alerts_lag_records", "gauge", "Records not yet finished, by topic.", ("topic",)),
    Instrument(
        "gpustream_alerts_misplaced_nodes_total",
        "counter",
        "Nodes whose key does not belong in their partition: another partitioner wrote them.",
    ),
    Instrument("gpustream_alerts_rebalances_total", "counter", "Times that partitions were taken away."),
    Instrument(
        "gpustream_alerts_holes_total",
        "counter",
        "Gaps in the offsets of a log: ends of transactions, records that were aborted, compacted or deleted.",
    ),
    Instrument(
        "gpustream_alerts_lost_offsets_total",
        "counter",
        "Offsets that retention, or somebody, deleted before they were read.",
    ),
    Instrument(
        "gpustream_alerts_loop_late_seconds",
        "gauge",
        "The most that the event loop was late in the last minute. Past a tenth of --session-timeout it delays"
        " heartbeats; past all of it, another member takes over.",
    ),
)
"""What the alert stream says of itself."""


class Alerts:
    name = "alerts"

    def __init__(self, settings: AlertSettings, *, fail: Callable[[str], None] = fail_stop) -> None:
        self._settings, self._fail = settings, fail
        self.instruments = Instruments(INSTRUMENTS)
        self.registry: CollectorRegistry = self.instruments.registry
        self._check = TopicCheck(settings.connection(), (ATTRIBUTED, SAMPLES, WORKLOADS, STATE, ALERTS, DEAD_LETTERS))
        self._app: ReaderApp | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Wait for the topics, then watch until ``stop`` is set."""
        s = self._settings
        in_force = await asyncio.to_thread(rules_file.load, s.rules)
        topics = await self._check.passed(stop)
        if topics is None:
            return
        reads = Reads(
            inputs=(ATTRIBUTED,),
            states=(STATE, WORKLOADS),
            compacted=(STATE,),
            watched=(SAMPLES,),
            partitions=topics.partitions,
        )
        worker = AlertWorker(self.instruments, in_force, partitions=topics.partitions[ATTRIBUTED])
        app = self._app = worker.app = ReaderApp(s, reads, worker, fail=self._fail)
        await run_worker(app, worker, stop, name=self.name, failed="looking at the nodes failed")

    def not_ready(self) -> list[str]:
        """What keeps it from judging; empty when it does."""
        return self._check.not_ready() if self._app is None else self._app.not_ready()
