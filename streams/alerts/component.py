"""The alert stream: rules, judged in every node's tick, and what became of each alert.

In: gpu.attributed; gpu.alert-state, whole; of gpu.workloads, which nodes were removed.
Out: gpu.alerts by fingerprint, gpu.alert-state.
State: one :class:`~streams.alerts.node.Node` a node, whose state is written whenever it changes.
On failure: what can't be decoded goes to gpu.dead-letters; an output that is not acknowledged ends the process.
"""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from delivery.watchdog import fail_stop
from streams.alerts import rules
from streams.alerts.instruments import INSTRUMENTS
from streams.alerts.watch import ALERTS, ATTRIBUTED, SAMPLES, STATE, WORKLOADS, Watch
from streams.bookkeeping import DEAD_LETTERS
from streams.reader.app import ReaderApp, ReaderSettings
from streams.settings import AlertSettings
from streams.working import work
from topics.check import TopicCheck
from topics.instruments import Instruments


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
        in_force = await asyncio.to_thread(rules.load, s.rules)
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
        watch = Watch(self.instruments, in_force, partitions=topics.partitions[ATTRIBUTED])
        app = self._app = watch.app = ReaderApp(reads, watch, fail=self._fail)
        await work(app, watch, stop, name=self.name, failed="looking at the nodes failed")

    def not_ready(self) -> list[str]:
        """What keeps it from judging; empty when it does."""
        return self._check.not_ready() if self._app is None else self._app.not_ready()
