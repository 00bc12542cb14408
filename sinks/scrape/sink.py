"""The scrape sink: gpu.attributed -> /metrics on ``--scrape-listen``, the latest value of every series.

In: records of gpu.attributed, in the order of their partition. Out: the latest value of every series, on request;
gpu.dead-letters; the outcome of each record.
State: for each node, the identity and the series of its last tick, and when it came. After a restart it is read back
from the log. Not shown are series that are missing from a node's last tick, nodes that have been silent for
``--stale-after``, ticks that are read so late, and revoked partitions.
On failure: the sink waits for Kafka to come back. Meanwhile nothing older than ``--stale-after`` is shown.
"""

import asyncio
import contextlib
import math
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from delivery import replays
from delivery.dead_letters import DeadLetters, Record, connecting
from delivery.instruments import Instrument, Instruments, named
from delivery.positions import Back
from delivery.replays import LastTick
from delivery.sender import Sender
from delivery.tasks import Turns
from sinks import counters_reload, outcomes
from sinks.consumer import GroupReader, Source
from sinks.counters_reload import following
from sinks.outcomes import OnOutcome, Outcome, Outcomes, Undecodable, decoded
from sinks.scrape.config import ScrapeSettings
from sinks.scrape.exposition import Renderings
from sinks.scrape.server import serving
from sinks.series.cache import Cache
from sinks.series.model import Key, SampleGroup, primaries
from sinks.series.relabel import WITHHELD, Withheld
from sinks.series.tick import SeriesTick, decode
from sinks.series.translation import Translator
from sinks.series.windows import NodeWindow, Resolution
from topics.attributed import TOPIC
from topics.samples import silent_after_s

COMPONENT = "scrape"
VALUES = "gpustream_scrape_values_delivered_total"
SAMPLES_WITHHELD = "gpustream_scrape_samples_withheld_total"

INSTRUMENTS: tuple[Instrument, ...] = (
    *named(
        outcomes.COMMON,
        "gpustream_scrape_records_read_total",
        "gpustream_scrape_records_delivered_total",
        "gpustream_scrape_records_duplicate_total",
        "gpustream_scrape_records_dropped_total",
        "gpustream_scrape_records_dead_lettered_total",
        "gpustream_scrape_records_released_total",
        "gpustream_scrape_records_held",
        "gpustream_scrape_records_expired_total",
        "gpustream_scrape_new_logs_total",
        "gpustream_scrape_commits_total",
        "gpustream_scrape_partitions",
        "gpustream_scrape_lag_records",
        "gpustream_scrape_loop_late_seconds",
    ),
    *counters_reload.INSTRUMENTS,
    outcomes.delay_instrument("gpustream_scrape_delay_seconds", "a scrape shows it"),
    Instrument(VALUES, "counter", "Values of metrics that were shown, without derived series."),
    Instrument(
        "gpustream_scrape_labels_cut_total",
        "counter",
        "Labels of pods and namespaces that --max-labels has no room for, neither on gpu_pod_info nor on the devices'"
        " series; counted when a pod's labels are made.",
    ),
    Instrument(
        SAMPLES_WITHHELD,
        "counter",
        f"Samples of ticks that are not shown because of their labels. {WITHHELD}",
        ("reason",),
    ),
    Instrument("gpustream_scrape_requests_total", "counter", "Requests for /metrics."),
)

_STEP = 50
_RECALLED = 100
"""So many records of a partition are read back at least: the last tick of a node that is read seldom is old."""


@dataclass(slots=True)
class _RenderedNode:
    """A node and its series.

    ``last`` identifies its last tick, which came at ``came_s``. ``shown``: the tick whose series are shown, or the last
    tick of the window whose series are. ``newest``: the last tick of the open ``window``.
    """

    last: LastTick
    came_s: float
    cache: Cache
    newest: SeriesTick
    window: NodeWindow | None = None
    shown: SeriesTick | None = None
    groups: dict[Key, SampleGroup] = field(default_factory=dict)
    withheld: Mapping[Withheld, int] = field(default_factory=dict)

    def show(
        self, tick: SeriesTick, keys: Iterable[Key], groups: Iterable[SampleGroup], withheld: Mapping[Withheld, int]
    ) -> None:
        """Show these groups from now on; of groups with the same key, the first."""
        self.shown, self.groups, self.withheld = tick, {}, withheld
        for key, group in zip(keys, groups, strict=True):
            self.groups.setdefault(key, group)


class ScrapeShared(NamedTuple):
    """What all partitions of a sink share. ``now_s`` never steps back, ``wall_s`` is the time of day."""

    translator: Translator
    stale_after_s: float
    outcomes: Outcomes
    instruments: Instruments
    letters: DeadLetters
    turns: Turns
    resolution: Resolution | None = None
    now_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time


class ScrapePartition:
    """The handler of a partition."""

    def __init__(self, partition: int, shared: ScrapeShared) -> None:
        self.partition = partition
        self._shared = shared
        self._nodes: dict[tuple[str, str], _RenderedNode] = {}
        self._abandon = asyncio.Event()
        self._at_end_s = -math.inf  # when the partition was last read to its end

    def series(self) -> Iterator[SampleGroup]:
        """The series to show now."""
        if self._abandon.is_set():
            return
        self._forget_silent_nodes()
        for node in self._nodes.values():
            yield from node.groups.values()

    def recall(self, record: Record) -> None:
        """Restore the series of a record that was finished before."""
        with contextlib.suppress(Undecodable):  # its dead letter has been written before
            self._apply(decoded(record, decode, TOPIC.name), record.timestamp)

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Show the records, some at a time.

        Dead letters are written before anything is counted: a step may be repeated.
        """
        self._abandon = abandon
        outcomes, values = self._shared.outcomes, self._shared.instruments.counter(VALUES)
        for start in range(0, len(records), _STEP):
            await self._shared.turns.next()
            step = records[start : start + _STEP]
            samples: list[SeriesTick | None] = []
            for record in step:
                try:
                    samples.append(decoded(record, decode, TOPIC.name))
                except Undecodable as error:
                    await self._shared.letters.write(record, str(error), abandon)
                    samples.append(None)
            for record, sample in zip(step, samples, strict=True):
                if sample is None:
                    outcomes.finish("dead_lettered")
                    continue
                known = self._nodes.get((sample.cluster, sample.node))
                shown = known.shown if known else None
                outcome = self._apply(sample, record.timestamp)
                node = self._nodes[sample.cluster, sample.node]
                if node.shown is not None and node.shown is not shown:
                    outcomes.delay(node.shown)
                    values.inc(primaries(node.groups.values()))
                    for reason, number in node.withheld.items():
                        self._shared.instruments.counter(SAMPLES_WITHHELD, reason).inc(number)
                outcomes.finish(outcome, tick=sample)
            yield step[-1].offset + 1

    async def quiet(self, abandon: asyncio.Event) -> None:
        """Remember the event that says whether the partition has been revoked, and that it is read to its end."""
        self._abandon, self._at_end_s = abandon, self._shared.now_s()
        self._forget_silent_nodes()  # nobody may scrape

    def reset(self) -> None:
        self._nodes.clear()

    def _forget_silent_nodes(self) -> None:
        now_s, after_s = self._shared.now_s(), self._shared.stale_after_s
        self._nodes = {
            key: node
            for key, node in self._nodes.items()
            if now_s - node.came_s < silent_after_s(node.newest.interval_ms, after_s)
        }

    def _apply(self, sample: SeriesTick, logged_ms: int) -> Outcome:
        """Show a tick in place of the node's last one, or put it into the node's window and show what that closes.

        ``logged_ms``: its log time. The tick came at that time or at the time of its node's clock, whichever is later,
        but not before the partition was last read to its end: so nothing that comes now is hidden if the clock of this
        host is ahead.
        """
        node = self._nodes.get((sample.cluster, sample.node))
        age_s = self._shared.wall_s() - max(sample.ts_ms, logged_ms) / 1000
        came_s = max(self._shared.now_s() - max(0.0, age_s), self._at_end_s)
        verdict = replays.verdict(node.last if node else None, sample)
        if verdict == "replay":
            return "duplicate"
        if verdict == "new_log":
            self._shared.outcomes.new_log(self.partition)
        bare, last = msgspec.structs.replace(sample, devices=()), replays.after(node.last if node else None, sample)
        if node is None:
            node = self._nodes[sample.cluster, sample.node] = _RenderedNode(last, came_s, Cache(), bare)
        resolution, translator = self._shared.resolution, self._shared.translator
        keys, groups = translator.translate(sample, node.cache)
        translator.release(node.cache)
        if resolution is None:
            node.show(bare, keys, groups, node.cache.withheld)
        elif node.window is not None and verdict == "next" and node.window.includes(sample.ts_ms):
            node.window.add(sample.ts_ms, keys, groups, node.cache.withheld)
        else:
            if closed := node.window:
                node.show(node.newest, *closed.written(), closed.withheld)
            identities = translator.identities
            node.window = NodeWindow(resolution, identities, sample.ts_ms, keys, groups, node.cache.withheld)
        node.last, node.came_s, node.newest = last, came_s, bare
        return "delivered"


class ScrapeSink:
    """A component: :meth:`run` it until it is to stop."""

    name = "scrape"

    def __init__(self, settings: ScrapeSettings, on_outcome: OnOutcome | None = None) -> None:
        self.settings = settings
        self.address: tuple[str, int] | None = None
        self._instruments = Instruments(INSTRUMENTS)
        self.registry = self._instruments.registry
        self._outcomes = Outcomes(COMPONENT, self._instruments, on_outcome)
        self._partitions: weakref.WeakSet[ScrapePartition] = weakref.WeakSet()
        self._reader: GroupReader | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Read and serve until ``stop``; returns within 8 s of it. Raises ListenError, and what can't be waited for."""
        settings, sender = self.settings, Sender(self.settings.connection(), client_id=self.settings.group)
        translator = Translator(
            settings.profiles(),
            settings.max_labels,
            relabelling=settings.relabelling(),
            by_pod=settings.parts_by_pod,
            on_cut=self._instruments.counter("gpustream_scrape_labels_cut_total").inc,
        )
        shared = ScrapeShared(
            translator=translator,
            stale_after_s=settings.stale_after_s,
            outcomes=self._outcomes,
            instruments=self._instruments,
            letters=DeadLetters(sender, "sink scrape"),
            turns=Turns(),
            resolution=settings.resolution(),
        )

        def handler(number: int) -> ScrapePartition:
            """A new handler, which is shown for as long as the reader refers to it."""
            partition = ScrapePartition(number, shared)
            self._partitions.add(partition)
            return partition

        recall_s = settings.stale_after_s + 2 * (settings.resolution_s or 0.0)  # the shown window and the open one
        source = Source(TOPIC.name, handler, settings.from_, Back(recall_s, _RECALLED))
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(following(settings, translator, self._instruments, COMPONENT))
            if settings.scrape_listen is not None:
                renderings = Renderings(self.series)
                scrapes = self._instruments.counter("gpustream_scrape_requests_total")
                served = serving(renderings, settings.scrape_listen, scrapes.inc)
                self.address = await stack.enter_async_context(served)
            await stack.enter_async_context(connecting(sender))
            self._reader = GroupReader(settings, [source], self._outcomes, shared.letters, shared.turns)
            await self._reader.run(stop)

    def not_ready(self) -> list[str]:
        """Why not all series are shown; empty when they are."""
        return self._reader.not_ready() if self._reader is not None else ["not started"]

    def series(self) -> list[SampleGroup]:
        """The series that a scrape shows now."""
        partitions = sorted(self._partitions, key=lambda handler: handler.partition)
        return [group for partition in partitions for group in partition.series()]
