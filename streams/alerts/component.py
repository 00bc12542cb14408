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
from streams.app import ReaderApp, ReaderSettings
from streams.settings import AlertSettings
from streams.stage import DEAD_LETTERS, run_worker
from streams.stage import instruments as stream_instruments

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
    *stream_instruments("alerts"),
)
"""What the alert stream says of itself."""


class Alerts:
    """The component: ``run`` watches until stopped; rules that are not right are an error."""

    name = "alerts"

    def __init__(self, settings: AlertSettings, *, fail: Callable[[str], None] = fail_stop) -> None:
        self._settings, self._fail = settings, fail
        self.instruments = Instruments(INSTRUMENTS)
        self.registry: CollectorRegistry = self.instruments.registry
        self._check = TopicCheck(settings.kafka, (ATTRIBUTED, SAMPLES, WORKLOADS, STATE, ALERTS, DEAD_LETTERS))
        self._app: ReaderApp | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Wait for the topics, then watch until ``stop`` is set."""
        s = self._settings
        in_force = await asyncio.to_thread(rules_file.load, s.rules)
        topics = await self._check.passed(stop)
        if topics is None:
            return
        reads = ReaderSettings(
            group=s.group,
            kafka=s.kafka,
            inputs=(ATTRIBUTED,),
            states=(STATE, WORKLOADS),
            compacted=(STATE,),
            watched=(SAMPLES,),
            partitions=topics.partitions,
            instance_id=s.instance_id,
            session_timeout_s=s.session_timeout_s,
        )
        worker = AlertWorker(self.instruments, in_force, partitions=topics.partitions[ATTRIBUTED])
        app = self._app = worker.app = ReaderApp(reads, worker, fail=self._fail)
        await run_worker(app, worker, stop, name=self.name, failed="looking at the nodes failed")

    def not_ready(self) -> list[str]:
        """What keeps it from judging; empty when it does."""
        return self._check.not_ready() if self._app is None else self._app.not_ready()
