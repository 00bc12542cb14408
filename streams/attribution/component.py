"""The attribution stream: ticks join the snapshot that they name and the workload that owns each GPU.

In: gpu.samples, gpu.allocations, gpu.workloads. Out: gpu.attributed, in the partition that the sample came from.
State: one :class:`~streams.attribution.join.NodeState` a node, read from the allocations and workloads themselves.
On failure: what can't be decoded or sent goes to gpu.dead-letters; an output that is not acknowledged ends the process.
"""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from delivery.instruments import Instrument, Instruments
from delivery.topic_admin import TopicCheck
from delivery.watchdog import fail_stop
from streams.app import ReaderApp
from streams.attribution.joiner import ALLOCATIONS, OUTPUT, SAMPLES, WORKLOADS, Joiner
from streams.reader import Reads
from streams.settings import AttributionSettings
from streams.stage import DEAD_LETTERS, run_worker

INSTRUMENTS = (
    Instrument(
        "gpustream_attribution_ticks_total",
        "counter",
        "Node ticks attributed: exact by the snapshot they name, late by the last one known, none without one.",
        ("attribution",),
    ),
    Instrument("gpustream_attribution_held_ticks", "gauge", "Node ticks that wait for a snapshot or a pod."),
    Instrument(
        "gpustream_attribution_unknown_device_ids_total", "counter", "Device ids of a snapshot in no known grammar."
    ),
    Instrument(
        "gpustream_attribution_misordered_workloads_total",
        "counter",
        "Records of gpu.workloads that were logged before a time to which they were taken as read: the clocks of two "
        "brokers are more than half a second apart, and a replay may name other pods.",
    ),
    Instrument(
        "gpustream_attribution_read_total", "counter", "Records read, replays after a rebalance included.", ("topic",)
    ),
    Instrument(
        "gpustream_attribution_dead_lettered_total",
        "counter",
        "Records that went to gpu.dead-letters, by why: undecodable, key, oversized or unsendable.",
        ("topic", "reason"),
    ),
    Instrument("gpustream_attribution_open_bytes", "gauge", "Bytes of records that were read and are not finished."),
    Instrument("gpustream_attribution_nodes", "gauge", "Nodes whose state is held."),
    Instrument("gpustream_attribution_lag_records", "gauge", "Records not yet finished, by topic.", ("topic",)),
    Instrument(
        "gpustream_attribution_misplaced_nodes_total",
        "counter",
        "Nodes whose key does not belong in their partition: another partitioner wrote them.",
    ),
    Instrument("gpustream_attribution_rebalances_total", "counter", "Times that partitions were taken away."),
    Instrument(
        "gpustream_attribution_holes_total",
        "counter",
        "Gaps in the offsets of a log: ends of transactions, records that were aborted, compacted or deleted.",
    ),
    Instrument(
        "gpustream_attribution_lost_offsets_total",
        "counter",
        "Offsets that retention, or somebody, deleted before they were read.",
    ),
    Instrument(
        "gpustream_attribution_loop_late_seconds",
        "gauge",
        "The most that the event loop was late in the last minute. Past a tenth of --session-timeout it delays"
        " heartbeats; past all of it, another member takes over.",
    ),
)
"""What the attribution stream says of itself."""


class Attribution:
    """The component: ``run`` reads until stopped."""

    name = "attribution"

    def __init__(self, settings: AttributionSettings, *, fail: Callable[[str], None] = fail_stop) -> None:
        self._settings, self._fail = settings, fail
        self.instruments = Instruments(INSTRUMENTS)
        self.registry: CollectorRegistry = self.instruments.registry
        self._check = TopicCheck(settings.kafka, (SAMPLES, ALLOCATIONS, WORKLOADS, OUTPUT, DEAD_LETTERS))
        self._app: ReaderApp | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Wait for the topics, then attribute until ``stop`` is set."""
        s = self._settings
        topics = await self._check.passed(stop)
        if topics is None:
            return
        reads = Reads(
            inputs=(SAMPLES,),
            states=(ALLOCATIONS, WORKLOADS),
            partitions=topics.partitions,
        )
        joiner = Joiner(self.instruments, grace_s=s.grace_s, partitions=topics.partitions[SAMPLES])
        app = self._app = joiner.app = ReaderApp(s, reads, joiner, fail=self._fail)
        await run_worker(app, joiner, stop, name=self.name, failed="the join failed")

    def not_ready(self) -> list[str]:
        """What keeps it from attributing; empty when it does."""
        return self._check.not_ready() if self._app is None else self._app.not_ready()
