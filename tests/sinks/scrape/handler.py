"""The handler of a partition: records in, the text of a scrape out, and the outcome of each record."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from delivery.dead_letters import DeadLetters, Record
from delivery.instruments import Instruments
from delivery.tasks import Turns
from sinks.outcomes import Outcome, Outcomes
from sinks.scrape.sink import COMPONENT, INSTRUMENTS, ScrapePartition, ScrapeShared
from sinks.series.model import SampleGroup
from sinks.series.tick import SeriesTick
from sinks.series.translation import Translator
from sinks.series.windows import Resolution
from sinks.series_settings import NamingSettings
from tests.sinks.records import ConsumedRecord, encoded
from tests.sinks.scrape.fleet import exposed
from topics.profiles import LabelSet, ProfileName


class FakeLetters(DeadLetters):
    """Keeps the errors."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    async def write(self, record: Record, error: str, abandon: asyncio.Event) -> None:
        """Keeps the error."""
        self.errors.append(error)


@dataclass
class Bench:
    """A handler, and the outcomes of its records in ``outcomes``."""

    names: tuple[ProfileName, ...] = ("otel",)
    label_set: LabelSet | None = None
    now_s: float = 0.0
    wall_s: float = 0.0
    resolution: Resolution | None = None
    letters: FakeLetters = field(default_factory=FakeLetters)
    turns: Turns = field(default_factory=Turns)
    outcomes: list[tuple[str, int, Outcome]] = field(default_factory=list)
    abandon: asyncio.Event = field(default_factory=asyncio.Event)
    instruments: Instruments = field(default_factory=lambda: Instruments(INSTRUMENTS))

    def __post_init__(self) -> None:
        """Makes the handler."""
        shared = ScrapeShared(
            translator=Translator(NamingSettings(names=self.names, labels=self.label_set).profiles()),
            stale_after_s=60.0,
            outcomes=Outcomes(COMPONENT, self.instruments, self._record_outcome),
            instruments=self.instruments,
            letters=self.letters,
            turns=self.turns,
            resolution=self.resolution,
            now_s=lambda: self.now_s,
            wall_s=lambda: self.wall_s,
        )
        self.handler = ScrapePartition(0, shared)

    def _record_outcome(self, _cluster: str, node: str, _run: int, seq: int, outcome: Outcome) -> None:
        self.outcomes.append((node, seq, outcome))

    async def deliver(self, *records: ConsumedRecord) -> list[int]:
        """Delivers the records; gives the offsets to commit."""
        delivered: Sequence[Any] = records
        return [upto async for upto in self.handler.deliver(delivered, self.abandon)]

    def exposition(self) -> str:
        """The text that a scrape gets."""
        return exposed(self.handler.series())

    def counted(self, name: str) -> float:
        """A counter's value."""
        value = self.instruments.registry.get_sample_value(name)
        assert value is not None
        return value


def groups_of(tick: SeriesTick, *names: ProfileName, label_set: LabelSet | None = None) -> list[SampleGroup]:
    """The sample groups of a tick in these names, with their labels or others."""
    bench = Bench(names=names or ("otel",), label_set=label_set)
    bench.handler.recall(ConsumedRecord(0, encoded(tick)))
    return list(bench.handler.series())
