"""The Alertmanager sink: gpu.alerts -> each of several Alertmanagers, which is told again and again what is open.

In: gpu.alerts. Out: requests to each ``--url``; gpu.dead-letters. State: none that a restart does not read back.
Each Alertmanager has a consumer group of its own, so that one that is away holds up only itself.
On failure: an outage of an Alertmanager or of Kafka is waited for; what is open is told on while Kafka is away. Where
this sink itself is gone, open alerts end in Alertmanager after four times ``--resend``.
"""

import asyncio
from typing import NamedTuple

from delivery.positions import WHOLE
from delivery.settings import MemberSettings
from sinks.alertmanager.config import AlertmanagerSettings
from sinks.alertmanager.instruments import COMPONENT, INSTRUMENTS
from sinks.alertmanager.partition import AlertmanagerPartition, Shared
from sinks.alertmanager.teller import Teller
from sinks.consumer import GroupReader, Source
from sinks.dead_letters import DeadLetters, connecting
from sinks.http import Http
from sinks.outcomes import Outcomes
from topics.alerts import TOPIC
from topics.instruments import Instruments
from topics.sender import Sender


class _Told(NamedTuple):
    """One Alertmanager, and what reads for it."""

    teller: Teller
    reader: GroupReader

    def not_ready(self) -> list[str]:
        failing = self.teller.receiver.failing
        reasons = [*self.reader.not_ready(), *([f"does not accept: {failing}"] if failing else [])]
        return [f"{self.teller.receiver.name}: {reason}" for reason in reasons]


class AlertmanagerSink:
    """A component: :meth:`run` it until it is told to stop. ``settings`` are to be without mistakes."""

    name = "alertmanager"

    def __init__(self, settings: AlertmanagerSettings) -> None:
        self.settings = settings
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._told: list[_Told] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until ``stop``; returns within 8 s of it. Raises what cannot be waited for."""
        http = Http(self.settings)
        sender = Sender(self.settings.kafka, client_id=self.settings.group)
        try:
            async with connecting(sender):
                self._told = self._assemble(http, sender)
                await self._run(stop)
        finally:
            await http.close()

    def not_ready(self) -> list[str]:
        """Why nothing is delivered; empty when all is well."""
        return [reason for one in self._told for reason in one.not_ready()] if self._told else ["not started"]

    def _assemble(self, http: Http, sender: Sender) -> list[_Told]:
        outcomes = Outcomes(COMPONENT, self._instruments)
        letters = DeadLetters(sender, "sink alertmanager")
        return [self._for(url, http, letters, outcomes) for url in self.settings.urls]

    def _for(self, url: str, http: Http, letters: DeadLetters, outcomes: Outcomes) -> _Told:
        settings = self.settings
        teller = Teller(url, settings, http.post, self._instruments)
        shared = Shared(teller, letters, outcomes, settings.max_alerts)
        member = MemberSettings(
            kafka=settings.kafka,
            group=settings.group_of(url),
            instance_id=settings.instance_id,
            session_timeout_s=settings.session_timeout_s,
        )
        source = Source(TOPIC.name, lambda _: AlertmanagerPartition(shared), settings.from_, WHOLE)
        return _Told(teller, GroupReader(member, [source], outcomes))

    async def _run(self, stop: asyncio.Event) -> None:
        """Run all until ``stop``, or until one fails, which ends the others."""
        ending = asyncio.Event()
        reading = [asyncio.ensure_future(one.reader.run(ending)) for one in self._told]
        telling = [asyncio.ensure_future(one.teller.resend()) for one in self._told]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((stopping, *reading, *telling), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.set()
            for task in (stopping, *(task for task in telling if not task.done())):
                task.cancel()
            ends = await asyncio.gather(*reading, *telling, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
