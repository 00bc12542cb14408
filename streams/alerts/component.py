"""The alert stream: judges every node's ticks by the rules, and writes what becomes of each alert.

In: gpu.attributed; gpu.alert-state, whole; of gpu.workloads, which nodes were removed.
Out: gpu.alerts by fingerprint, gpu.alert-state.
State: one :class:`~streams.alerts.node.Node` a node, whose state is written whenever it changes.
On failure: what can't be decoded goes to gpu.dead-letters; an output that is not acknowledged ends the process.
"""

import asyncio
from collections.abc import Mapping

from delivery.instruments import Instrument
from streams.alerts.rules import rules_file
from streams.alerts.worker import ALERTS, ATTRIBUTED, SAMPLES, STATE, WORKLOADS, AlertWorker
from streams.reader import Reads
from streams.settings import AlertSettings
from streams.stage import DEAD_LETTERS, Stream, instruments

INSTRUMENTS = (
    Instrument("gpustream_alerts_ticks_total", "counter", "Node ticks read: judged, new_log (judged; the first after"
               " gpu.samples was deleted and created again), replayed (judged before), resumed (the first of a node"
               " that another worker had judged already).", ("outcome",)),
    Instrument("gpustream_alerts_transitions_total", "counter", "Alerts that fired, or were resolved, and were"
               " acknowledged; after a crash some again.", ("alertname", "state")),
    Instrument("gpustream_alerts_written_total", "counter", "Records acknowledged by the broker: alert, repeat (an"
               " open alert written again, daily), deletion, state.", ("record",)),
    Instrument("gpustream_alerts_unsendable_total", "counter", "Records that the broker does not take, too large: left"
               " out.", ("record",)),
    Instrument("gpustream_alerts_firing", "gauge", "Alerts that fire, by severity.", ("severity",)),
    Instrument("gpustream_alerts_pending", "gauge", "Conditions that hold, but not for long enough yet."),
    Instrument("gpustream_alerts_silent_nodes", "gauge", "Nodes without a tick for half a minute or more."),
    Instrument("gpustream_alerts_delay_seconds", "histogram", "From when a tick was logged until its alert was"
               " acknowledged.", buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)),
    *instruments(
        "gpustream_alerts_records_read_total",
        "gpustream_alerts_records_delivered_total",
        "gpustream_alerts_records_duplicate_total",
        "gpustream_alerts_records_dead_lettered_total",
        "gpustream_alerts_records_released_total",
        "gpustream_alerts_records_held",
        "gpustream_alerts_open_bytes",
        "gpustream_alerts_nodes",
        "gpustream_alerts_lag_records",
        "gpustream_alerts_misplaced_nodes_total",
        "gpustream_alerts_rebalances_total",
        "gpustream_alerts_holes_total",
        "gpustream_alerts_lost_offsets_total",
        "gpustream_alerts_loop_late_seconds",
    ),
)  # fmt: skip
"""What the alert stream says of itself."""


class Alerts(Stream[AlertSettings]):
    """The component: ``run`` judges until stopped; rules that are not right are an error."""

    name = "alerts"
    topics = (ATTRIBUTED, SAMPLES, WORKLOADS, STATE, ALERTS, DEAD_LETTERS)
    table = INSTRUMENTS
    failed = "looking at the nodes failed"

    async def run(self, stop: asyncio.Event) -> None:
        self._rules = await asyncio.to_thread(rules_file.load, self.settings.rules)
        await super().run(stop)

    def work(self, partitions: Mapping[str, int]) -> tuple[AlertWorker, Reads]:
        states, inputs, compacted, watched = (STATE, WORKLOADS), (ATTRIBUTED,), (STATE,), (SAMPLES,)
        reads = Reads(inputs=inputs, states=states, compacted=compacted, watched=watched, partitions=partitions)
        return AlertWorker(self.instruments, self._rules, partitions=partitions[ATTRIBUTED]), reads
