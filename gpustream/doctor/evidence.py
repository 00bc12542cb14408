"""What the topics hold for the time that is looked at, counted for each node and each of its runs. Pure.

In:       the records of gpu.dead-letters, gpu.allocations, gpu.workloads, gpu.attributed and gpu.samples, one topic
          after the other in this order; and the offsets of gpu.samples that attribution has committed.
Out:      for each run of a node which ticks were sent, and what became of them.
State:    ranges of ``seq``: ten minutes of 10,000 nodes are 10,000 ranges, and not 6,000,000 numbers.

An offset is committed only after the broker has acknowledged the record in gpu.attributed or gpu.dead-letters. So a
tick before the committed offset that has neither is lost, and a tick after it waits. If the log of gpu.attributed
begins only after the tick was logged, the record may have been deleted: nobody can know.
"""

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from delivery.ledger import Partition
from gpustream.tally import Ranges
from topics import allocations, attributed, dead_letters, samples, workloads
from topics.dead_letters import Cause
from topics.device_ids import UnknownDeviceId, parse
from topics.topic import Name, UInt, decoder

MAX_JUMPS = 64
"""For at most this many gaps of a run, the delay of the tick after the gap is kept."""

_DEVICE_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
_DEVICE_DRIVER = "gpu.nvidia.com"
"""How names of NVIDIA's resources for GPUs begin, and its driver of claims for them. Others of it are network cards."""

MAX_REASONS = 200
"""At most this many kinds of dead letters are counted separately; all others count as :data:`OTHERS`."""


class _RunRecord(msgspec.Struct, frozen=True):
    """The fields that identify a record of a node's run."""

    cluster: Name
    node: Name
    run_id: UInt
    seq: UInt


class SampledDevice(msgspec.Struct, frozen=True):
    """The fields of a device of gpu.samples that are read."""

    uuid: str = ""
    state: str = ""


class SampledTick(_RunRecord, frozen=True):
    """The fields of a record of gpu.samples that are read; the devices of few records are decoded."""

    ts_ms: UInt
    devices: msgspec.Raw = msgspec.Raw(b"[]")
    allocations_seq: UInt | None = None
    interval_ms: UInt | None = None


class AttributedTick(_RunRecord, frozen=True):
    """The fields of a record of gpu.attributed that are read."""

    ts_ms: UInt
    attribution: str


class ListedContainer(msgspec.Struct, frozen=True):
    """The fields of a container of gpu.allocations that are read."""

    namespace: str = ""
    pod: str = ""
    resource: str | None = None
    device_ids: tuple[str, ...] = ()
    claims: tuple[allocations.Claim, ...] = ()


_decode_devices = msgspec.json.Decoder(tuple[SampledDevice, ...]).decode


class Snapshot(_RunRecord, frozen=True):
    """The fields of a record of gpu.allocations that are read."""

    containers: tuple[ListedContainer, ...] = ()


class Workloads(msgspec.Struct, frozen=True):
    """The fields of a record of gpu.workloads that are read."""

    cluster: Name
    node: Name
    epoch: UInt = 0
    removed: bool = False
    dra_devices: tuple[workloads.DraDevice, ...] = ()


class NodeName(NamedTuple):
    """A node of a cluster."""

    cluster: str
    node: str

    def __str__(self) -> str:
        return f"{self.cluster}/{self.node}"


Fate = Literal["exact", "late", "none", "no_kubelet", "other", "dead_lettered", "waiting", "deleted", "hidden", "lost"]
"""What became of a tick. ``no_kubelet``: attributed as ``none``, and it names no snapshot: its node has no kubelet.
``other``: attributed by a word that only a later version knows. ``deleted``: finished before the oldest record of
gpu.attributed: that topic was emptied, or made again. ``hidden``: its record may be there, behind an open transaction.
"""


@dataclass(slots=True)
class SampledRun:
    """One run of a node, as far as it was logged in the time that is looked at.

    A delay is how old a tick was when Kafka got it. ``min_delay_ms`` and ``max_delay_ms`` are over all ticks, and
    ``last_delay_ms`` is of the newest one. ``delays_after_gaps`` has the delay of the tick after each gap, by the first
    missing seq of the gap. ``last_snapshot_seq`` is the snapshot that the newest tick names. ``duplicates`` counts
    ticks that are in the log twice. ``without_snapshot`` counts inexact ticks whose snapshot is not in gpu.allocations.
    ``truncated``: earlier ticks of the run were in gpu.samples, and were deleted. ``answering`` are the UUIDs of the
    devices that answered in the first tick that is looked at.
    """

    seqs: Ranges = field(default_factory=Ranges)
    fates: Counter[Fate] = field(default_factory=Counter)
    duplicates: int = 0
    without_snapshot: int = 0
    truncated: bool = False
    lost: Ranges = field(default_factory=Ranges)
    last_seq: int = 0
    interval_ms: int | None = None
    last_logged_ms: int = 0
    min_delay_ms: int = 1 << 62
    max_delay_ms: int = -(1 << 62)
    last_delay_ms: int = 0
    last_snapshot_seq: int | None = None
    answering: tuple[str, ...] = ()
    delays_after_gaps: dict[int, int] = field(default_factory=dict)

    @property
    def inexact(self) -> int:
        """How many ticks were not attributed by the snapshot that they name."""
        return self.fates["late"] + self.fates["none"]


@dataclass(slots=True)
class NodeEvidence:
    """One node: its runs by their ids, in the order in which they came.

    ``partition`` is the one of gpu.samples that its newest tick is in. ``interleavings`` counts how often a run went on
    after another one had begun: two producers of one name. ``snapshots`` has the seqs of its snapshots by run,
    ``attributed`` those of its attributed ticks by run and by kind of attribution. ``replayed`` counts ticks that were
    attributed again. ``containers`` are those of its newest snapshot. ``epoch`` is the highest of its records in
    gpu.workloads, None if there are none. ``outdated_epochs`` counts the records that came after one of a higher epoch.
    ``removed_ms`` is when it was first said to be ``removed``. ``dra_drivers`` are those of which its newest record
    there has a device.
    """

    runs: dict[int, SampledRun] = field(default_factory=dict)
    partition: int = 0
    current_run_id: int | None = None
    interleavings: int = 0
    snapshots: dict[int, Ranges] = field(default_factory=dict)
    attributed: dict[int, dict[str, Ranges]] = field(default_factory=dict)
    replayed: int = 0
    newest_attributed_ms: int = 0
    containers: tuple[ListedContainer, ...] = ()
    dra_drivers: frozenset[str] = frozenset()
    epoch: int | None = None
    outdated_epochs: int = 0
    removed: bool = False
    removed_ms: int = 0

    @property
    def has_two_producers(self) -> bool:
        """Whether its runs took turns: a producer that ended does not go on."""
        return self.interleavings > 1

    @property
    def last_logged_ms(self) -> int:
        """When its newest tick was logged; 0 if there is none."""
        return max((run.last_logged_ms for run in self.runs.values()), default=0)

    @property
    def last_run(self) -> tuple[int, SampledRun]:
        """The run that sent its newest tick, with its id."""
        return max(self.runs.items(), key=lambda row: row[1].last_logged_ms)

    @property
    def unknown_ids(self) -> list[str]:
        """The device ids of its GPUs in no known form, each with who has it: their GPUs seem free."""
        unknown_ids = []
        for container in self.containers:
            for device_id in container.device_ids if (container.resource or "").startswith(_DEVICE_RESOURCES) else ():
                try:
                    parse(device_id)
                except UnknownDeviceId as error:
                    unknown_ids.append(f"{error}; {container.namespace}/{container.pod} has it as {container.resource}")
        return unknown_ids

    @property
    def unknown_claims(self) -> list[str]:
        """The claimed devices of which nothing says which GPUs they are: these seem free."""
        if not self.runs or self.epoch is None or _DEVICE_DRIVER in self.dra_drivers:
            return []
        claims = [claim for container in self.containers for claim in container.claims]
        return sorted({claim.device for claim in claims if claim.driver == _DEVICE_DRIVER})


class LetterKind(NamedTuple):
    """The dead letters that are counted together: of one stage and topic, for one reason."""

    stage: str
    topic: str
    reason: str


@dataclass(slots=True)
class DeadLetters:
    """The dead letters of one kind: their offsets by partition, and the last one."""

    offsets: dict[int, Ranges] = field(default_factory=dict)
    last: Cause | None = None
    last_id: str = ""


OTHERS = LetterKind("several", "several", "other reasons")


class Evidence:
    """Collects the evidence from the records. ``finished``: attribution's committed offset by partition of gpu.samples.

    ``log_starts`` has the log start offset of each partition that is read from there. ``unprefixed`` gives the
    contract's name of a topic. ``hiding`` are the partitions with an open transaction. ``listed_ms`` is,
    by cluster, when a record of gpu.workloads was logged last, and ``epochs_ms`` when the first and the last of each
    epoch were.
    """

    def __init__(
        self,
        finished: Mapping[int, int],
        unprefixed: Callable[[str], str] = str,
        log_starts: Mapping[Partition, int] = MappingProxyType({}),
        hiding: Iterable[Partition] = (),
    ) -> None:
        self.nodes: dict[NodeName, NodeEvidence] = defaultdict(NodeEvidence)
        self.dead_letters: dict[LetterKind, DeadLetters] = {}
        self.resubmitted: dict[int, Ranges] = defaultdict(Ranges)
        self.listed_ms: dict[str, int] = {}
        self.epochs_ms: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        self.unreadable: Counter[Fate] = Counter()
        self.oldest_waiting_ms: int | None = None
        self.log_starts, self._oldest_ms = log_starts, dict.fromkeys(log_starts, math.inf)
        self._finished, self._unprefixed, self._hiding = finished, unprefixed, frozenset(hiding)
        self._dead_lettered: dict[int, Ranges] = defaultdict(Ranges)
        self._decode_tick, self._decode_attributed = decoder(SampledTick), decoder(AttributedTick)
        self._decode_snapshot, self._decode_workloads = decoder(Snapshot), decoder(Workloads)

    def add(self, record: Any) -> None:
        """Adds a record of any of the topics."""
        topic = self._unprefixed(record.topic)
        if self._oldest_ms.get(tp := Partition(topic, record.partition)) == math.inf:
            self._oldest_ms[tp] = record.timestamp
        with contextlib.suppress(msgspec.DecodeError):
            if topic == dead_letters.TOPIC.name:
                self._add_dead_letter(record)
            elif topic == samples.TOPIC.name:
                self._add_sample(record)
            elif topic == attributed.TOPIC.name:
                tick = self._decode_attributed(record.value or b"")
                node = self.nodes[NodeName(tick.cluster, tick.node)]
                seqs_by_attribution = node.attributed.setdefault(tick.run_id, {})
                if any(tick.seq in seqs for seqs in seqs_by_attribution.values()):
                    node.replayed += 1
                    return
                seqs_by_attribution.setdefault(tick.attribution, Ranges()).add(tick.seq)
                node.newest_attributed_ms = max(node.newest_attributed_ms, tick.ts_ms)
            elif topic == allocations.TOPIC.name:
                snapshot = self._decode_snapshot(record.value or b"")
                node = self.nodes[NodeName(snapshot.cluster, snapshot.node)]
                node.snapshots.setdefault(snapshot.run_id, Ranges()).add(snapshot.seq)
                node.containers = snapshot.containers
            elif topic == workloads.TOPIC.name:
                listed = self._decode_workloads(record.value or b"")
                self.listed_ms[listed.cluster] = max(self.listed_ms.get(listed.cluster, 0), record.timestamp)
                epochs_ms, at_ms = self.epochs_ms[listed.cluster], record.timestamp
                first_ms, last_ms = epochs_ms.get(listed.epoch, (at_ms, at_ms))
                epochs_ms[listed.epoch] = min(first_ms, at_ms), max(last_ms, at_ms)
                node = self.nodes[NodeName(listed.cluster, listed.node)]
                if listed.epoch < (node.epoch or 0):
                    node.outdated_epochs += 1
                else:
                    node.removed_ms = node.removed_ms if node.removed else record.timestamp
                    node.removed, node.epoch = listed.removed, listed.epoch
                    node.dra_drivers = frozenset(device.driver for device in listed.dra_devices)

    def _add_dead_letter(self, record: Any) -> None:
        if (offset := dead_letters.resubmitted(record.headers)) is not None:
            self.resubmitted[record.partition].add(offset)
        if (cause := dead_letters.cause(record.headers)) is None:
            return
        topic = self._unprefixed(cause.origin.topic)
        kind = LetterKind(cause.stage, topic, cause.reason)
        if kind not in self.dead_letters and len(self.dead_letters) >= MAX_REASONS:
            kind = OTHERS
        same_kind = self.dead_letters.setdefault(kind, DeadLetters())
        same_kind.offsets.setdefault(record.partition, Ranges()).add(record.offset)
        same_kind.last, same_kind.last_id = cause, f"{record.partition}:{record.offset}"
        if topic == samples.TOPIC.name:
            self._dead_lettered[cause.origin.partition].add(cause.origin.offset)

    def _add_sample(self, record: Any) -> None:
        try:
            tick = self._decode_tick(record.value or b"")
        except msgspec.DecodeError:
            self.unreadable[self._fate_without_output(record)] += 1
            return
        node = self.nodes[NodeName(tick.cluster, tick.node)]
        run, node.partition = node.runs.get(tick.run_id), record.partition
        if run is None:
            tp = Partition(samples.TOPIC.name, record.partition)
            log_truncated = self.log_starts.get(tp, 0) > 0 and tick.run_id < self._oldest_ms[tp]
            has_earlier_output = any(
                next(iter(seqs))[0] < tick.seq for seqs in node.attributed.get(tick.run_id, {}).values()
            )
            run = node.runs[tick.run_id] = SampledRun(truncated=log_truncated or has_earlier_output)
            with contextlib.suppress(msgspec.DecodeError):
                run.answering = tuple([device.uuid for device in _decode_devices(tick.devices) if device.state == "ok"])
        delay_ms = record.timestamp - tick.ts_ms
        if tick.seq > run.last_seq:
            node.interleavings += (
                node.current_run_id is not None and bool(run.last_seq) and node.current_run_id != tick.run_id
            )
            node.current_run_id = tick.run_id
            if tick.seq > run.last_seq + 1 and len(run.delays_after_gaps) < MAX_JUMPS:
                run.delays_after_gaps[run.last_seq + 1] = delay_ms
            run.last_seq, run.interval_ms, run.last_delay_ms = tick.seq, tick.interval_ms, delay_ms
            run.last_snapshot_seq = tick.allocations_seq
        run.last_logged_ms = max(run.last_logged_ms, record.timestamp)
        run.min_delay_ms, run.max_delay_ms = min(run.min_delay_ms, delay_ms), max(run.max_delay_ms, delay_ms)
        if not run.seqs.add(tick.seq):
            run.duplicates += 1
            return
        seqs_by_attribution = node.attributed.get(tick.run_id, {})
        attribution = next((attribution for attribution, seqs in seqs_by_attribution.items() if tick.seq in seqs), None)
        if attribution is None:
            fate = self._fate_without_output(record)
        elif attribution == "none":
            fate = "no_kubelet" if tick.allocations_seq is None else "none"
        else:
            fate = "exact" if attribution == "exact" else "late" if attribution == "late" else "other"
        run.fates[fate] += 1
        if fate == "lost":
            run.lost.add(tick.seq)
        elif fate in ("late", "none"):
            named, snapshots = tick.allocations_seq, node.snapshots.get(tick.run_id, ())
            run.without_snapshot += named is None or named not in snapshots  # two producers of one name

    def _fate_without_output(self, record: Any) -> Fate:
        """What became of a sample that has no record in gpu.attributed."""
        if record.offset in self._dead_lettered[record.partition]:
            return "dead_lettered"
        if record.offset < self._finished.get(record.partition, 0):
            tp = Partition(attributed.TOPIC.name, record.partition)
            if tp in self._hiding or any(hiding.topic == dead_letters.TOPIC.name for hiding in self._hiding):
                return "hidden"
            return "deleted" if record.timestamp < self._oldest_ms.get(tp, 0) else "lost"
        self.oldest_waiting_ms = min(self.oldest_waiting_ms or record.timestamp, record.timestamp)
        return "waiting"

    def open_dead_letters(self) -> dict[LetterKind, int]:
        """How many dead letters of each kind were not resubmitted."""
        resubmitted = [
            (partition, offset)
            for partition, offsets in self.resubmitted.items()
            for first, last in offsets
            for offset in range(first, last + 1)
        ]
        return {
            kind: sum(map(len, letters.offsets.values()))
            - sum(offset in letters.offsets.get(partition, ()) for partition, offset in resubmitted)
            for kind, letters in self.dead_letters.items()
        }
