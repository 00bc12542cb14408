"""What the topics hold of the time that is looked at, folded into a few numbers for each node. Pure.

In:       the records of gpu.dead-letters, gpu.allocations, gpu.workloads, gpu.attributed and gpu.samples, one topic
          after the other in this order; and up to where attribution has finished gpu.samples.
Out:      of each run of a node which ticks were sent, and what became of each.
State:    ranges of ``seq``: ten minutes of 10,000 nodes are 10,000 ranges, and not 6,000,000 numbers.

What was finished when the offsets were asked has its record in gpu.attributed or in gpu.dead-letters by then, for
an offset is committed when the broker has acknowledged that record. So a tick that has neither, and is before the
committed offset, is lost; one after it waits. If gpu.attributed begins only after it was logged, nobody can know.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from delivery.ledger import Partition
from gpustream.tally import Ranges
from topics import allocations, attributed, dead_letters, samples, workloads
from topics.dead_letters import Cause
from topics.topic import Name, UInt, decoder

MAX_JUMPS = 64
"""Of at most this many jumps in a run's seq, the delay of the tick after them is kept."""

MAX_REASONS = 200
"""At most this many kinds of dead letters are counted by themselves; the others are one kind."""


class SampledTick(msgspec.Struct, frozen=True):
    """What of a record of gpu.samples is looked at."""

    cluster: Name
    node: Name
    run_id: UInt
    seq: UInt
    ts_ms: UInt
    allocations_seq: UInt | None = None


class AttributedTick(msgspec.Struct, frozen=True):
    """What of a record of gpu.attributed is looked at."""

    cluster: Name
    node: Name
    run_id: UInt
    seq: UInt
    ts_ms: UInt
    attribution: str


class Snapshot(msgspec.Struct, frozen=True):
    """What of a record of gpu.allocations is looked at."""

    cluster: Name
    node: Name
    run_id: UInt
    seq: UInt
    containers: tuple[msgspec.Raw, ...] = ()


class Workloads(msgspec.Struct, frozen=True):
    """What of a record of gpu.workloads is looked at."""

    cluster: Name
    node: Name
    epoch: UInt = 0
    removed: bool = False


class NodeName(NamedTuple):
    """A node of a cluster."""

    cluster: str
    node: str

    def __str__(self) -> str:
        return f"{self.cluster}/{self.node}"


Fate = Literal["exact", "late", "none", "no_kubelet", "dead_lettered", "waiting", "deleted", "lost"]
"""What became of a tick. ``no_kubelet`` is attributed ``none`` and names no snapshot: its node has no kubelet.
``deleted`` is finished, and gpu.attributed begins after it: that topic was emptied, or made again."""


@dataclass(slots=True)
class SampledRun:
    """One run of a node, as far as it was logged in the time that is looked at.

    ``jumps`` has, by the first seq that was jumped over, how old the next tick was when Kafka got it;
    ``least_delay_ms`` and ``most_delay_ms`` are of all ticks, ``last_delay_ms`` of the newest, which names the snapshot
    ``last_named``. ``unsent`` are late ticks whose snapshot is not in gpu.allocations. ``cut``: the ticks before its
    first one were in gpu.samples, and were deleted.
    """

    seqs: Ranges = field(default_factory=Ranges)
    fates: Counter[Fate] = field(default_factory=Counter)
    twice: int = 0
    unsent: int = 0
    cut: bool = False
    lost: Ranges = field(default_factory=Ranges)
    last_seq: int = 0
    first_ts_ms: int = 0
    last_ts_ms: int = 0
    last_logged_ms: int = 0
    least_delay_ms: int = 1 << 62
    most_delay_ms: int = -(1 << 62)
    last_delay_ms: int = 0
    last_named: int | None = None
    jumps: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class NodeEvidence:
    """One node: its runs by their ids, in the order in which they came.

    ``returns`` counts how often a run went on after another one had begun: two producers of one name. It ``holds``
    if its newest snapshot has a container. ``epoch`` is the highest of its records in gpu.workloads, None if there are
    none; ``outdated`` of them came after one of a higher epoch.
    """

    runs: dict[int, SampledRun] = field(default_factory=dict)
    current: int | None = None
    returns: int = 0
    snapshots: dict[int, Ranges] = field(default_factory=dict)
    attributed: dict[int, dict[str, Ranges]] = field(default_factory=dict)
    replayed: int = 0
    newest_attributed_ms: int = 0
    holds: bool = False
    epoch: int | None = None
    outdated: int = 0
    removed: bool = False

    @property
    def last_logged_ms(self) -> int:
        """When its newest tick was logged; 0 if there is none."""
        return max((run.last_logged_ms for run in self.runs.values()), default=0)

    @property
    def last_run(self) -> tuple[int, SampledRun]:
        """The run that sent its newest tick, with its id."""
        return max(self.runs.items(), key=lambda row: row[1].last_logged_ms)


class LetterKind(NamedTuple):
    """What makes one kind of dead letters differ from another."""

    stage: str
    topic: str
    reason: str


@dataclass(slots=True)
class Letters:
    """The dead letters of one kind, by partition; and the last of them."""

    offsets: dict[int, Ranges] = field(default_factory=dict)
    last: Cause | None = None
    last_id: str = ""


OTHERS = LetterKind("several", "several", "other reasons")


class Fold:
    """Takes the records in. ``finished``: up to where attribution has finished each partition of gpu.samples.

    ``begins`` has the partitions that are read from where their log begins, with that offset. ``unprefixed`` gives the
    contract's name of a topic. ``listed_ms`` is, by cluster, when a record of gpu.workloads was logged last.
    """

    def __init__(
        self,
        finished: Mapping[int, int],
        unprefixed: Callable[[str], str] = str,
        begins: Mapping[Partition, int] = MappingProxyType({}),
    ) -> None:
        self.nodes: dict[NodeName, NodeEvidence] = defaultdict(NodeEvidence)
        self.letters: dict[LetterKind, Letters] = {}
        self.resubmitted: dict[int, Ranges] = defaultdict(Ranges)
        self.listed_ms: dict[str, int] = {}
        self.unreadable: Counter[Fate] = Counter()
        self.oldest_waiting_ms: int | None = None
        self.begins, self._oldest_ms = begins, dict.fromkeys(begins, math.inf)
        self._finished, self._unprefixed = finished, unprefixed
        self._dead: dict[int, Ranges] = defaultdict(Ranges)
        self._tick, self._attributed = decoder(SampledTick), decoder(AttributedTick)
        self._snapshot, self._workloads = decoder(Snapshot), decoder(Workloads)

    def take(self, record: Any) -> None:
        """Takes in a record of any of the topics."""
        topic = self._unprefixed(record.topic)
        if self._oldest_ms.get(log := Partition(topic, record.partition)) == math.inf:
            self._oldest_ms[log] = record.timestamp
        if topic == dead_letters.TOPIC.name:
            self._take_letter(record)
            return
        try:
            if topic == samples.TOPIC.name:
                self._take_sample(record)
            elif topic == attributed.TOPIC.name:
                tick = self._attributed(record.value or b"")
                node = self.nodes[NodeName(tick.cluster, tick.node)]
                kinds = node.attributed.setdefault(tick.run_id, {})
                if any(tick.seq in seqs for seqs in kinds.values()):
                    node.replayed += 1
                    return
                kinds.setdefault(tick.attribution, Ranges()).add(tick.seq)
                node.newest_attributed_ms = max(node.newest_attributed_ms, tick.ts_ms)
            elif topic == allocations.TOPIC.name:
                snapshot = self._snapshot(record.value or b"")
                node = self.nodes[NodeName(snapshot.cluster, snapshot.node)]
                node.snapshots.setdefault(snapshot.run_id, Ranges()).add(snapshot.seq)
                node.holds = bool(snapshot.containers)
            elif topic == workloads.TOPIC.name:
                known = self._workloads(record.value or b"")
                self.listed_ms[known.cluster] = max(self.listed_ms.get(known.cluster, 0), record.timestamp)
                node = self.nodes[NodeName(known.cluster, known.node)]
                node.outdated += known.epoch < (node.epoch or 0)
                node.removed, node.epoch = known.removed, max(node.epoch or 0, known.epoch)
        except msgspec.DecodeError:
            if topic == samples.TOPIC.name:
                self.unreadable[self._unattributed(record)] += 1

    def _take_letter(self, record: Any) -> None:
        if (offset := dead_letters.resubmitted(record.headers)) is not None:
            self.resubmitted[record.partition].add(offset)
        if (cause := dead_letters.cause(record.headers)) is None:
            return
        topic = self._unprefixed(cause.origin.topic)
        kind = LetterKind(cause.stage, topic, cause.reason)
        if kind not in self.letters and len(self.letters) >= MAX_REASONS:
            kind = OTHERS
        letters = self.letters.setdefault(kind, Letters())
        letters.offsets.setdefault(record.partition, Ranges()).add(record.offset)
        letters.last, letters.last_id = cause, f"{record.partition}:{record.offset}"
        if topic == samples.TOPIC.name:
            self._dead[cause.origin.partition].add(cause.origin.offset)

    def _take_sample(self, record: Any) -> None:
        tick = self._tick(record.value or b"")
        node = self.nodes[NodeName(tick.cluster, tick.node)]
        run = node.runs.get(tick.run_id)
        if run is None:
            log = Partition(samples.TOPIC.name, record.partition)
            emptied = self.begins.get(log, 0) > 0 and tick.run_id < self._oldest_ms[log]
            before = any(next(iter(seqs))[0] < tick.seq for seqs in node.attributed.get(tick.run_id, {}).values())
            run = node.runs[tick.run_id] = SampledRun(first_ts_ms=tick.ts_ms, cut=emptied or before)
        delay_ms = record.timestamp - tick.ts_ms
        if tick.seq > run.last_seq:
            node.returns += node.current is not None and bool(run.last_seq) and node.current != tick.run_id
            node.current = tick.run_id
            if tick.seq > run.last_seq + 1 and len(run.jumps) < MAX_JUMPS:
                run.jumps[run.last_seq + 1] = delay_ms
            run.last_seq, run.last_ts_ms, run.last_delay_ms = tick.seq, tick.ts_ms, delay_ms
            run.last_named = tick.allocations_seq
        run.last_logged_ms = max(run.last_logged_ms, record.timestamp)
        run.least_delay_ms, run.most_delay_ms = min(run.least_delay_ms, delay_ms), max(run.most_delay_ms, delay_ms)
        if not run.seqs.add(tick.seq):
            run.twice += 1
            return
        kinds = node.attributed.get(tick.run_id, {})
        kind = next((kind for kind, seqs in kinds.items() if tick.seq in seqs), None)
        if kind is None:
            fate = self._unattributed(record)
        elif kind == "none":
            fate = "no_kubelet" if tick.allocations_seq is None else "none"
        else:
            fate = "late" if kind == "late" else "exact"
        run.fates[fate] += 1
        if fate == "lost":
            run.lost.add(tick.seq)
        elif fate in ("late", "none") and tick.allocations_seq not in node.snapshots.get(tick.run_id, ()):
            run.unsent += 1

    def _unattributed(self, record: Any) -> Fate:
        """What became of a sample that has no record in gpu.attributed."""
        if record.offset in self._dead[record.partition]:
            return "dead_lettered"
        if record.offset < self._finished.get(record.partition, 0):
            log = Partition(attributed.TOPIC.name, record.partition)
            return "deleted" if record.timestamp < self._oldest_ms.get(log, 0) else "lost"
        self.oldest_waiting_ms = min(self.oldest_waiting_ms or record.timestamp, record.timestamp)
        return "waiting"

    def open_letters(self) -> dict[LetterKind, int]:
        """How many letters of each kind there are that were not resubmitted."""
        counts = {}
        for kind, letters in self.letters.items():
            done = 0
            for partition, receipts in self.resubmitted.items():
                mine = letters.offsets.get(partition, Ranges())
                done += sum(offset in mine for first, last in receipts for offset in range(first, last + 1))
            counts[kind] = sum(map(len, letters.offsets.values())) - done
        return counts
