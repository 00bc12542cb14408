"""The Alertmanager sink: gpu.alerts -> each of several Alertmanagers, which is sent again and again what is open.

In: gpu.alerts. Out: requests to each ``--url``; gpu.dead-letters. State: none that a restart does not read back.
Each Alertmanager has a consumer group of its own, so that one that is away holds up only itself.
On failure: an outage of an Alertmanager or of Kafka is waited for; what is open is sent on while Kafka is away. Where
this sink itself is gone, open alerts end in Alertmanager after four times ``--resend``.
"""

import asyncio
from typing import NamedTuple

from delivery.dead_letters import DeadLetters, connecting
from delivery.instruments import Instruments
from delivery.positions import WHOLE
from delivery.sender import Sender
from delivery.settings import MemberSettings
from sinks.alertmanager.config import AlertmanagerSettings
from sinks.alertmanager.notifier import COMPONENT, INSTRUMENTS, Notifier
from sinks.alertmanager.partition import AlertmanagerPartition, AlertmanagerShared
from sinks.consumer import GroupReader, Source
from sinks.http import Http
from sinks.outcomes import Outcomes
from topics.alerts import TOPIC


class _Alertmanager(NamedTuple):
    """One Alertmanager, and what reads for it."""

    notifier: Notifier
    reader: GroupReader

    def not_ready(self) -> list[str]:
        failing = self.notifier.receiver.failing
        reasons = [*self.reader.not_ready(), *([f"does not accept: {failing}"] if failing else [])]
        return [f"{self.notifier.receiver.name}: {reason}" for reason in reasons]


class AlertmanagerSink:
    """A component: :meth:`run` it until it is to stop. ``settings`` are to be without mistakes."""

    name = "alertmanager"

    def __init__(self, settings: AlertmanagerSettings) -> None:
        self.settings = settings
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._alertmanagers: list[_Alertmanager] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until ``stop``; returns within 8 s of it. Raises what cannot be waited for."""
        http = Http(self.settings)
        sender = Sender(self.settings.kafka, client_id=self.settings.group)
        try:
            async with connecting(sender):
                self._alertmanagers = self._assemble(http, sender)
                await self._run(stop)
        finally:
            await http.close()

    def not_ready(self) -> list[str]:
        """Why nothing is delivered; empty when all is well."""
        if not self._alertmanagers:
            return ["not started"]
        return [reason for one in self._alertmanagers for reason in one.not_ready()]

    def _assemble(self, http: Http, sender: Sender) -> list[_Alertmanager]:
        settings = self.settings
        outcomes = Outcomes(COMPONENT, self._instruments)
        letters = DeadLetters(sender, "sink alertmanager")
        return [self._alertmanager(url, http, letters, outcomes) for url in settings.urls]

    def _alertmanager(self, url: str, http: Http, letters: DeadLetters, outcomes: Outcomes) -> _Alertmanager:
        """One of them, with a consumer group of its own."""
        settings = self.settings
        notifier = Notifier(url, settings, http.post, self._instruments)
        shared = AlertmanagerShared(notifier, letters, outcomes, settings.max_alerts)
        member = MemberSettings(
            kafka=settings.kafka,
            group=settings.group_of(url),
            instance_id=settings.instance_id,
            session_timeout_s=settings.session_timeout_s,
        )
        source = Source(TOPIC.name, lambda _: AlertmanagerPartition(shared), settings.from_, WHOLE)
        return _Alertmanager(notifier, GroupReader(member, [source], outcomes))

    async def _run(self, stop: asyncio.Event) -> None:
        """Run all until ``stop``, or until one fails, which ends the others."""
        ending = asyncio.Event()
        reading = [asyncio.ensure_future(one.reader.run(ending)) for one in self._alertmanagers]
        resending = [asyncio.ensure_future(one.notifier.resend()) for one in self._alertmanagers]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((stopping, *reading, *resending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.set()
            for task in (stopping, *(task for task in resending if not task.done())):
                task.cancel()
            ends = await asyncio.gather(*reading, *resending, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
