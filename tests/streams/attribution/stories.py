"""Logs as legal producers write them, drawn by hypothesis, and what may be done with them in which order."""

from typing import NamedTuple

from hypothesis import strategies as st

from tests.streams.attribution.model import Logs
from tests.streams.attribution.records import container, event, gpu, pod, process, snapshot, tick, workloads
from topics.allocations import Allocations, Container
from topics.samples import Event, Process, Sample
from topics.workloads import NodeWorkloads, Pod

NodeRecord = Sample | Allocations

PODS = ("p0", "p1", "p2")
_ABSENT = 99
_START_MS = 1_000_000


class Story(NamedTuple):
    """The complete logs, and when each record was written. The broker of the workloads may have a clock that is behind:
    their log time is up to half a second less."""

    logs: Logs
    samples_written_s: list[float]
    allocations_written_s: list[float]
    workloads_written_s: list[float]


containers = st.lists(
    st.builds(
        container,
        st.sampled_from(PODS),
        st.sampled_from([gpu(0), gpu(1), gpu(7), f"{gpu(0)}::1"]),
        st.sampled_from([gpu(0), gpu(1), f"{gpu(0)}::0", "not an id"]),
        name=st.sampled_from(["main", "side"]),
    ),
    max_size=3,
)


def processes(generation: int) -> st.SearchStrategy[list[tuple[Process, ...] | None]]:
    """The processes on the first GPUs of a tick, most of them of pods of this generation."""
    uids = st.sampled_from([*[f"{name}-{generation}" for name in PODS] * 2, "p0-0", "p1-1", "stranger", None])
    services = st.sampled_from([None, None, None, "mps"])
    on_gpu = st.lists(st.builds(process, uids, st.sampled_from([40, 40, 0]), services), max_size=4)
    return st.lists(st.none() | on_gpu.map(tuple), max_size=2)


class _Node:
    """Writes one node's records one after the other."""

    def __init__(self, draw: st.DrawFn, name: str) -> None:
        self.draw, self.name = draw, name
        self.steady = draw(st.booleans())
        self.ts_ms = self.ticks = self.named = 0
        self.written: list[NodeRecord] = []

    def run(self, run_id: int) -> None:
        """One run of the producer. A clock that steps back begins a run, whose first snapshot is then not lost."""
        self.ticks, self.named, present = 0, 0, list[Allocations]()
        self.ts_ms = self.ts_ms + 500 if self.steady else self.draw(st.integers(0, 40)) * 1000
        kubelet = self.draw(st.integers(0, 4)) > 0
        for seq in range(1, 1 + (self.draw(st.integers(1, 3)) if kubelet else 1)):
            drawn: list[Container] = self.draw(containers)
            if kubelet and (self.draw(st.integers(0, 2)) or not (self.steady or seq > 1)):
                present.append(snapshot(seq, *drawn, run_id=run_id, ts_ms=self.ts_ms, node=self.name))
                self.written.append(present[-1])
            if present and self.draw(st.integers(0, 3)) == 0:
                self.written.append(self.draw(st.sampled_from(present)))
            for _ in range(self.draw(st.integers(0, 2))):
                self.sample(run_id, seq if kubelet else None)
        if not self.ticks:
            self.sample(run_id, seq if kubelet else None)

    def sample(self, run_id: int, named: int | None) -> None:
        """One tick; now and then the kubelet is away."""
        self.ticks += 1
        self.ts_ms += self.draw(st.sampled_from([1_000, 1_000, 11_000]))
        named = named if self.draw(st.integers(0, 7)) else None
        on_gpus = self.draw(processes(self._generation(self.ts_ms)))
        events = [] if named is None else self._events(named)
        self.named = max(self.named, named or 0)
        self.written.append(
            tick(self.ticks, named, run_id=run_id, ts_ms=self.ts_ms, node=self.name, processes=on_gpus, events=events)
        )

    def _events(self, named: int) -> list[Event]:
        """What happened since the tick before, under its snapshot or a later one, if one may have been in force."""
        seqs = st.integers(self.named, named) if self.named else st.just(named)
        ages = st.sampled_from([0, 500, 9_000, 70_000])
        drawn: list[Event] = self.draw(
            st.lists(st.builds(lambda seq, age: event(seq, max(0, self.ts_ms - age)), seqs, ages), max_size=2)
        )
        return drawn

    def workloads(self) -> list[NodeWorkloads]:
        """The records of the API server; in a story whose clock steps back they never change."""
        records, ts_ms, epoch = list[NodeWorkloads](), 0, 1
        for seq in range(1, 1 + self.draw(st.integers(0, 4 if self.steady else 1))):
            ts_ms += self.draw(st.integers(0, 12)) * 1000
            epoch += self.draw(st.integers(0, 4)) == 0
            pods = [p for name in PODS if (p := self._pod(name, ts_ms)) is not None]
            labels = {"version": str(self.draw(st.integers(0, 1)))}
            records.append(workloads(seq, *pods, ts_ms=ts_ms, epoch=epoch, labels=labels, node=self.name))
            if self.draw(st.integers(0, 4)) == 0:
                records.append(self.draw(st.sampled_from(records)))
        return records

    def _generation(self, ts_ms: int) -> int:
        """Which generation of the pods of a name runs at a time."""
        return ts_ms // 15_000 if self.steady else 0

    def _pod(self, name: str, ts_ms: int) -> Pod | None:
        age = self.draw(st.sampled_from([_ABSENT, 0, 0, 0, 3, 9]))
        if age == _ABSENT:
            return None
        generation = self._generation(ts_ms)
        ended_ms = ts_ms - 1_000 if age == 9 and self.steady else None
        started = generation * 15_000 if self.steady else 0
        return pod(name, uid=f"{name}-{generation}", started=started, ended=ended_ms, labels={"age": str(age)})


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """One to three nodes that share a partition."""
    timed: list[tuple[float, int, NodeRecord]] = []
    timed_workloads: list[tuple[float, int, NodeWorkloads]] = []
    runs: dict[str, list[int]] = {}
    for name in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        node = _Node(draw, name)
        runs[name] = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True))
        for run_id in runs[name]:
            node.run(run_id)
        at_s = 0.0
        for record in node.written:
            at_s += draw(st.integers(0, 2)) / 2
            timed.append((at_s, len(timed), record))
        at_s = draw(st.sampled_from([-4.0, -4.0, -2.0, 0.0, 2.0]))
        for news in node.workloads():
            timed_workloads.append((at_s, len(timed_workloads), news))
            at_s += draw(st.integers(0, 6)) / 2
    timed.sort(key=lambda t: t[:2])
    samples = [(at_s, r) for at_s, _, r in timed if isinstance(r, Sample)]
    allocations = [(at_s, r) for at_s, _, r in timed if isinstance(r, Allocations)]
    timed_workloads.sort(key=lambda t: t[:2])
    behind_ms = draw(st.sampled_from([0, 0, 499]))
    logs = Logs(
        [r for _, r in samples],
        [r for _, r in allocations],
        [r for _, _, r in timed_workloads],
        runs,
        [_START_MS + round(at_s * 1000) for at_s, _ in samples],
        [_START_MS + round(at_s * 1000) - behind_ms for at_s, _, _ in timed_workloads],
    )
    times_s = ([at_s for at_s, *_ in records] for records in (samples, allocations, timed_workloads))
    return Story(logs, *times_s)


class Act(NamedTuple):
    """One thing that happens to a reader of these logs, ``amount`` times or to that extent."""

    kind: str
    amount: int


ACTS = ("wait", "allocations", "allocations", "samples", "samples", "workloads", "ask", "read", "commit")
"""What goes on while nothing goes wrong."""

FAULTS = ("forget", "restart")

_act = st.builds(Act, st.sampled_from(ACTS * 3 + FAULTS), st.integers(1, 6))
schedules = st.sampled_from([0, 20, 60]).flatmap(lambda size: st.lists(_act, min_size=size // 2, max_size=size))

stalls = st.lists(_act.filter(lambda act: act.kind != "workloads"), min_size=20, max_size=60)
"""What may be done while the workloads do not arrive."""
