"""The scrape sink: gpu.attributed -> /metrics on ``--scrape-listen``.

In:       gpu.attributed. Out: the latest value of every series, on request; gpu.dead-letters.
State:    the latest tick of every node; what a restart needs of it is read back from the log.
On failure: an outage of Kafka is waited for, and what is older than ``--stale-after`` is not shown meanwhile.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator

from delivery.dead_letters import DeadLetters, connecting
from delivery.instruments import Instrument, Instruments
from delivery.sender import Sender
from sinks import outcomes
from sinks.consumer import GroupReader, Source
from sinks.outcomes import OnOutcome, Outcomes
from sinks.scrape.config import ScrapeSettings
from sinks.scrape.partition import VALUES, ScrapePartition, ScrapeShared
from sinks.scrape.rendering import Renderings
from sinks.scrape.server import serving
from sinks.series.model import SampleGroup
from sinks.series.translation import Translator
from topics.attributed import TOPIC

COMPONENT = "scrape"

INSTRUMENTS: tuple[Instrument, ...] = (
    *outcomes.instruments(COMPONENT),
    Instrument(VALUES, "counter", "Values of metrics that were shown, without derived series."),
    Instrument("gpustream_scrape_requests_total", "counter", "Requests for /metrics."),
)


class ScrapeSink:
    """A component: :meth:`run` it until it is to stop."""

    name = "scrape"

    def __init__(self, settings: ScrapeSettings, on_outcome: OnOutcome | None = None) -> None:
        self.settings = settings
        self.address: tuple[str, int] | None = None
        self._on_outcome = on_outcome
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._partitions: weakref.WeakSet[ScrapePartition] = weakref.WeakSet()
        self._reader: GroupReader | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Read and serve until ``stop``; returns within 8 s of it. Raises ListenError, and what can't be waited for."""
        sender = Sender(self.settings.kafka, client_id=self.settings.group)
        async with self._serving(), connecting(sender):
            self._reader = self._assemble(sender)
            await self._reader.run(stop)

    def not_ready(self) -> list[str]:
        """Why not everything is shown; empty when it is."""
        return self._reader.not_ready() if self._reader is not None else ["not started"]

    def series(self) -> list[SampleGroup]:
        """What a scrape shows now."""
        partitions = sorted(self._partitions, key=lambda one: one.partition)
        return [group for partition in partitions for group in partition.series()]

    def _assemble(self, sender: Sender) -> GroupReader:
        settings = self.settings
        shared = ScrapeShared(
            translator=Translator(settings.names, settings.label_set, settings.max_labels),
            stale_after_s=settings.stale_after_s,
            outcomes=Outcomes(COMPONENT, self._instruments),
            instruments=self._instruments,
            letters=DeadLetters(sender, "sink scrape"),
            on_outcome=self._on_outcome,
        )

        def handler(number: int) -> ScrapePartition:
            """It is known here for as long as the reader has a use for it."""
            made = ScrapePartition(number, shared)
            self._partitions.add(made)
            return made

        source = Source(TOPIC.name, handler, settings.from_, settings.stale_after_s)
        return GroupReader(settings, [source], shared.outcomes)

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        if self.settings.scrape_listen is None:
            yield
            return
        renderings = Renderings(self.settings.names, self.series)
        scrapes = self._instruments.counter("gpustream_scrape_requests_total")
        async with serving(renderings, self.settings.scrape_listen, scrapes.inc) as self.address:
            yield
