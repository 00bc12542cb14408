"""The remote-write sink: gpu.attributed and gpu.alerts -> a receiver of Prometheus remote write, once, in order.

In: gpu.attributed; gpu.alerts, read back whole. Out: requests to ``--url``; gpu.dead-letters.
State: none that a restart does not read back.
On failure: an outage of the receiver or of Kafka is waited for; what the receiver refuses is found out and left out.
"""

import asyncio

from delivery.positions import WHOLE
from sinks.consumer import GroupReader, Source
from sinks.dead_letters import DeadLetters, connecting
from sinks.labels import default_labels
from sinks.outcomes import Outcomes
from sinks.remote_write.alert_partition import AlertPartition
from sinks.remote_write.alert_series import AlertSeries
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.deliver import Deliverer
from sinks.remote_write.instruments import COMPONENT, INSTRUMENTS
from sinks.remote_write.partition import OnOutcome, RemoteWritePartition, Shared
from sinks.remote_write.series import Series
from sinks.remote_write.transmit import Client, Transmitter
from topics.alerts import TOPIC as ALERTS
from topics.attributed import TOPIC
from topics.instruments import Instruments
from topics.sender import Sender


class RemoteWriteSink:
    """A component: :meth:`run` it until it is told to stop. ``settings`` are to be without mistakes."""

    name = "remote-write"

    def __init__(self, settings: RemoteWriteSettings, on_outcome: OnOutcome | None = None) -> None:
        self.settings = settings
        self._on_outcome = on_outcome
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._reader: GroupReader | None = None
        self._transmitter: Transmitter | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until ``stop``; returns within 8 s of it. Raises what cannot be waited for."""
        client = Client(self.settings)
        sender = Sender(self.settings.kafka, client_id=self.settings.group)
        try:
            async with connecting(sender):
                self._reader = self._assemble(client, sender)
                await self._reader.run(stop)
        finally:
            await client.close()

    def not_ready(self) -> list[str]:
        """Why nothing is delivered; empty when all is well."""
        if self._reader is None or self._transmitter is None:
            return ["not started"]
        failing = self._transmitter.failing
        return [*self._reader.not_ready(), *([f"the receiver does not accept: {failing}"] if failing else [])]

    def _assemble(self, client: Client, sender: Sender) -> GroupReader:
        settings = self.settings
        outcomes = Outcomes(COMPONENT, self._instruments)
        self._transmitter = Transmitter(client.post, settings.protocol, self._instruments)
        shared = Shared(
            deliverer=Deliverer(self._transmitter, self._instruments),
            letters=DeadLetters(sender, "sink remote-write"),
            outcomes=outcomes,
            instruments=self._instruments,
            slots=asyncio.Semaphore(settings.max_in_flight),
            max_samples=settings.max_request_samples,
            stale_after_s=settings.stale_after_s,
            on_outcome=self._on_outcome,
        )
        return GroupReader(settings, self._sources(shared), outcomes)

    def _sources(self, shared: Shared) -> list[Source]:
        settings = self.settings
        label_set = settings.labels or default_labels(settings.names)

        def samples(_: int) -> RemoteWritePartition:
            return RemoteWritePartition(Series(settings.names, label_set, settings.max_labels), shared)

        def alerts(_: int) -> AlertPartition:
            return AlertPartition(AlertSeries(settings.max_labels), shared)

        return [
            Source(TOPIC.name, samples, settings.from_, settings.stale_after_s),
            Source(ALERTS.name, alerts, settings.from_, WHOLE),
        ]
