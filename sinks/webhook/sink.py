"""The webhook sink: gpu.alerts -> one JSON POST for each transition, signed, in order for each alert.

In: gpu.alerts. Out: requests to ``--url``; gpu.dead-letters. State: none that a restart does not read back.
On failure: an outage of the receiver or of Kafka is waited for. A transition that was accepted and not yet committed
when the process ended is sent again, with the same bytes under the same ``Idempotency-Key``.
"""

import asyncio

from delivery.dead_letters import DeadLetters, connecting
from delivery.instruments import Instrument, Instruments
from delivery.positions import WHOLE
from delivery.sender import Sender
from sinks import outcomes, receiver
from sinks.consumer import GroupReader, Source
from sinks.http import Http
from sinks.outcomes import Outcomes
from sinks.receiver import Receiver
from sinks.webhook.config import WebhookSettings
from sinks.webhook.encode import Secret
from sinks.webhook.partition import WebhookPartition, WebhookShared
from topics.alerts import TOPIC

COMPONENT = "webhook"

INSTRUMENTS: tuple[Instrument, ...] = (*outcomes.instruments(COMPONENT), *receiver.instruments(COMPONENT))

MOST_REFUSED = 3
"""After so many refusals in a row the receiver refuses everything, and transitions are kept."""


class WebhookSink:
    """A component: :meth:`run` it until it is to stop. ``settings`` are to be without mistakes."""

    name = "webhook"

    def __init__(self, settings: WebhookSettings) -> None:
        self.settings = settings
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._reader: GroupReader | None = None
        self._receiver: Receiver | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until ``stop``; returns within 8 s of it. Raises what cannot be waited for."""
        http = Http(self.settings)
        sender = Sender(self.settings.kafka, client_id=self.settings.group)
        try:
            async with connecting(sender):
                self._reader = self._assemble(http, sender)
                await self._reader.run(stop)
        finally:
            await http.close()

    def not_ready(self) -> list[str]:
        """Why nothing is delivered; empty when all is well."""
        if self._reader is None or self._receiver is None:
            return ["not started"]
        failing = self._receiver.failing
        return [*self._reader.not_ready(), *([f"the receiver does not accept: {failing}"] if failing else [])]

    def _assemble(self, http: Http, sender: Sender) -> GroupReader:
        settings = self.settings
        self._receiver = Receiver(
            settings.url,
            http.post,
            COMPONENT,
            self._instruments,
            at_once=settings.max_in_flight,
            most_refused=MOST_REFUSED,
        )
        shared = WebhookShared(
            self._receiver,
            Secret(settings.secret_file),
            DeadLetters(sender, "sink webhook"),
            Outcomes(COMPONENT, self._instruments),
        )
        source = Source(TOPIC.name, lambda _: WebhookPartition(shared), settings.from_, WHOLE)
        return GroupReader(settings, [source], shared.outcomes)
