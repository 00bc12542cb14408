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
from streams.app import ReaderApp, ReaderSettings
from streams.attribution.joiner import ALLOCATIONS, OUTPUT, SAMPLES, WORKLOADS, Joiner
from streams.settings import AttributionSettings
from streams.stage import DEAD_LETTERS, run_worker
from streams.stage import instruments as stream_instruments

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
    *stream_instruments("attribution"),
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
        reads = ReaderSettings(
            group=s.group,
            kafka=s.kafka,
            inputs=(SAMPLES,),
            states=(ALLOCATIONS, WORKLOADS),
            partitions=topics.partitions,
            instance_id=s.instance_id,
            session_timeout_s=s.session_timeout_s,
        )
        joiner = Joiner(self.instruments, grace_s=s.grace_s, partitions=topics.partitions[SAMPLES])
        app = self._app = joiner.app = ReaderApp(reads, joiner, fail=self._fail)
        await run_worker(app, joiner, stop, name=self.name, failed="the join failed")

    def not_ready(self) -> list[str]:
        """What keeps it from attributing; empty when it does."""
        return self._check.not_ready() if self._app is None else self._app.not_ready()
