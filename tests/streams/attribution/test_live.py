"""What is said live and what a replay says later: the same bytes, for pods that only their processes show, too.

Live, processes are seen at once, the kubelet tells of a pod some seconds later, and the API server within 4 s, but for
one that asked for no GPU: of that neither ever tells. A StatefulSet's pod is made again under its name.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from streams.attribution import join
from tests.streams.attribution.model import Logs
from tests.streams.attribution.reading import Reading
from tests.streams.attribution.records import container, gpu, known, pod, process, read, snapshot, tick
from tests.streams.attribution.stories import Act, Story, schedules, stalls
from topics.allocations import Allocations
from topics.attributed import AttributedSample
from topics.samples import Sample
from topics.workloads import NodeWorkloads, Pod

STEP_MS = 500
END_MS = 30_000
FIRST = pod("first", started=-60_000)


class Life(NamedTuple):
    """A pod on one of two GPUs: when it starts, how much later the API server and the kubelet tell, when it ends, and
    how much longer the kubelet lists it."""

    start_ms: int
    told_ms: int
    reported_ms: int
    end_ms: int
    gpu: int
    listed_ms: int = 0


def steps(least: int, most: int) -> st.SearchStrategy[int]:
    """A time."""
    return st.integers(least, most).map(lambda number: number * STEP_MS)


lives = st.lists(
    st.builds(Life, steps(1, 12), steps(0, 8), steps(0, 8), steps(14, 30), st.integers(0, 1), steps(0, 40)), max_size=4
)


class Logged(NamedTuple):
    """A record, and when it was logged."""

    at_ms: int
    record: Sample | Allocations | NodeWorkloads


def log_of(pods: list[Life], rogue_ms: int = END_MS) -> list[Logged]:
    """What is written of these pods, in order: workloads, snapshots and ticks, one every second. From ``rogue_ms`` on
    a process of a pod is on the second GPU that no workloads ever have."""
    found = [Logged(-60_000, known(1, FIRST))]
    for at_ms in range(0, END_MS, STEP_MS):
        told = tuple(_known(n, p, at_ms) for n, p in enumerate(pods) if p.start_ms + p.told_ms <= at_ms)
        if told != _told(found):
            found.append(Logged(at_ms, known(len(found) + 1, FIRST, *told, ts_ms=at_ms)))
        if at_ms % 1000 == 0:
            found += _ticked(pods, at_ms, rogue=at_ms >= rogue_ms)
    return found


def _known(number: int, one: Life, at_ms: int) -> Pod:
    """A pod as the API server has it by then."""
    ended_ms = one.end_ms if one.end_ms + one.told_ms <= at_ms else None
    return pod(f"p{number}", started=one.start_ms, ended=ended_ms)


def _told(found: Iterable[Logged]) -> tuple[Pod, ...]:
    """The pods that the last workloads have, the first apart."""
    return [one.record.pods[1:] for one in found if isinstance(one.record, NodeWorkloads)][-1]


def _ticked(pods: list[Life], at_ms: int, *, rogue: bool) -> list[Logged]:
    """A snapshot and the tick that names it."""
    seq = at_ms // 1000 + 1
    reported = [container(f"p{n}", gpu(p.gpu)) for n, p in enumerate(pods) if _listed(p, at_ms)]
    shown = [[process(f"uid-p{n}") for n, p in enumerate(pods) if p.gpu == i and _runs(p, at_ms)] for i in (0, 1)]
    shown[1] += [process("uid-rogue")] * rogue
    sample = tick(seq, seq, ts_ms=at_ms, processes=[tuple(of) for of in shown])
    return [Logged(at_ms, snapshot(seq, container("first", gpu(0)), *reported, ts_ms=at_ms)), Logged(at_ms, sample)]


def _runs(one: Life, at_ms: int) -> bool:
    return one.start_ms <= at_ms < one.end_ms


def _listed(one: Life, at_ms: int) -> bool:
    return one.start_ms + one.reported_ms <= at_ms < one.end_ms + max(one.reported_ms, one.listed_ms)


def live(log: list[Logged], step_ms: int = STEP_MS) -> list[bytes]:
    """What comes out while it is written, each record read at once."""
    records: list[join.Record] = []
    for at_ms in (-60_000, *range(0, END_MS + 3_000, step_ms)):
        records += [_read(one, at_ms) for one in log if one.at_ms == at_ms]
        records.append(join.WatermarkRaised(at_ms))
    return outputs(records)


def replay(log: list[Logged]) -> list[bytes]:
    """What comes out long after: the state is read first."""
    state = [one for one in log if not isinstance(one.record, Sample)]
    samples = [one for one in log if isinstance(one.record, Sample)]
    return outputs([_read(one, END_MS + 3_000) for one in (*state, *samples)])


def _read(one: Logged, far_ms: int) -> join.Record:
    """A record that is read when the workloads have been read to a time."""
    if isinstance(one.record, Sample):
        return read(one.record, one.record.seq, logged_ms=one.at_ms, far_ms=far_ms)
    return one.record if isinstance(one.record, Allocations) else join.LoggedWorkloads(one.record, one.at_ms)


def outputs(records: Iterable[join.Record]) -> list[bytes]:
    """All that the join lets go, encoded."""
    state, out = join.NEW, list[bytes]()
    for record in records:
        state, joined = join.step(state, record, 10.0)
        out += [msgspec.json.encode(one.sample) for one in joined]
    return out


@given(lives, steps(0, END_MS // STEP_MS))
@example([Life(500, 1_500, 4_000, 9_000, 1)], 3_000)
@example([Life(500, 1_500, 1_000, 7_000, 1, 20_000)], END_MS)
def test_a_replay_gives_the_bytes_that_were_given_live(pods: list[Life], rogue_ms: int) -> None:
    log = log_of(pods, rogue_ms)

    assert live(log) == replay(log)
    assert len(live(log)) == END_MS // 1000


def story(log: list[Logged]) -> Story:
    """The same logs, to be read in another order."""
    samples = [(one.at_ms, one.record) for one in log if isinstance(one.record, Sample)]
    allocations = [(one.at_ms, one.record) for one in log if isinstance(one.record, Allocations)]
    workloads = [(one.at_ms, one.record) for one in log if isinstance(one.record, NodeWorkloads)]
    times = ([at_ms for at_ms, _ in those] for those in (samples, workloads))
    logs = Logs([r for _, r in samples], [r for _, r in allocations], [r for _, r in workloads], {"n": [1]}, *times)
    return Story(logs, *([at_ms / 1000 for at_ms, _ in those] for those in (samples, allocations, workloads)))


def read_by(log: list[Logged], schedule: list[Act]) -> dict[int, bytes]:
    """What comes out, by offset, of a reader with this schedule."""
    reading = Reading(story(log))
    for act in schedule:
        reading.act(act)
    reading.drain()
    return reading.out


@given(lives, schedules, stalls)
def test_any_order_of_reading_stalls_and_restarts_gives_the_same_bytes(
    pods: list[Life], schedule: list[Act], stall: list[Act]
) -> None:
    log = log_of(pods)

    assert read_by(log, schedule) == read_by(log, [*stall, *schedule]) == read_by(log, [])


def test_a_pod_that_its_processes_show_first_is_shown_live() -> None:
    shown = [b'"observed":true' in tick for tick in live(log_of([Life(500, 1_500, 4_000, 9_000, 1)]))]

    assert shown == [False, *[True] * 4, *[False] * 25]


def test_a_pod_that_asked_for_no_gpu_is_a_conflict_live_from_its_first_tick() -> None:
    contradicted = [b'"conflict":"unallocated_process"' in tick for tick in live(log_of([], rogue_ms=3_000))]

    assert contradicted == [at_ms >= 3_000 for at_ms in range(0, END_MS, 1_000)]


def test_a_pod_that_the_kubelet_lists_long_after_its_end_holds_its_gpu_for_ten_seconds_more() -> None:
    held = [b'"pod":"p0"' in tick for tick in live(log_of([Life(500, 1_500, 0, 7_000, 1, 20_000)]))]

    assert held == [False, *[True] * 17, *[False] * 12]


# -- a StatefulSet's pod that is deleted and made again

TICK_MS, WHOLE = 100, 1_000


class Renewal(NamedTuple):
    """When the old pod ended, and when that was told; when the new one began, was told and was listed."""

    ended_ms: int
    end_told_ms: int
    begun_ms: int
    told_ms: int
    listed_ms: int


@st.composite
def renewals(draw: st.DrawFn) -> Renewal:
    """As the API server and the kubelet go about it: in any order that may be, within some seconds."""
    ended_ms = 4_000 + draw(st.integers(0, 20)) * TICK_MS
    begun_ms = ended_ms + draw(st.integers(1, 20)) * TICK_MS
    end_told_ms = ended_ms + draw(st.integers(0, 30)) * TICK_MS
    listed_ms = begun_ms + draw(st.integers(0, 5)) * TICK_MS
    told_ms = max(begun_ms + draw(st.integers(0, 30)) * TICK_MS, end_told_ms)
    return Renewal(ended_ms, end_told_ms, begun_ms, told_ms, listed_ms)


def renewed(story: Renewal, *, shown: bool) -> list[Logged]:
    """A tick every 100 ms. The API server gives a pod's start in whole seconds."""
    old, new = pod("web-0", uid="old"), pod("web-0", uid="new", started=story.begun_ms // WHOLE * WHOLE)
    over = pod("web-0", uid="old", ended=story.ended_ms)
    found, snapshots = [Logged(-60_000, known(1, old))], list[Allocations]()
    for at_ms in range(0, 15_000, TICK_MS):
        if at_ms == story.end_told_ms:
            found.append(Logged(at_ms, known(2, over, ts_ms=at_ms)))
        if at_ms == story.told_ms:
            found.append(Logged(at_ms, known(3, over, new, ts_ms=at_ms)))
        listed = at_ms < story.ended_ms or at_ms >= story.listed_ms
        if not snapshots or bool(snapshots[-1].containers) != listed:
            containers = [container("web-0", gpu(0))] if listed else []
            snapshots.append(snapshot(len(snapshots) + 1, *containers, ts_ms=at_ms))
            found.append(Logged(at_ms, snapshots[-1]))
        runs = [process("old")] * (at_ms < story.ended_ms) + [process("new")] * (at_ms >= story.begun_ms)
        sample = tick(at_ms // TICK_MS, len(snapshots), ts_ms=at_ms, processes=[tuple(runs) if shown else ()])
        found.append(Logged(at_ms, sample))
    return found


@given(renewals(), st.booleans())
def test_a_statefulsets_pod_that_is_made_again_has_the_same_holder_at_every_tick_live_and_in_a_replay(
    story: Renewal, shown: bool
) -> None:
    log = renewed(story, shown=shown)
    written = live(log, TICK_MS)

    assert written == replay(log)
    out = [msgspec.json.decode(value, type=AttributedSample) for value in written]
    assert len(out) == 150
    given_to = {one.ts_ms: [holder.pod_uid for holder in one.devices[0].holders] for one in out}
    assert all(uids == ["old"] for ts_ms, uids in given_to.items() if ts_ms < story.ended_ms)
    in_time_ms = max(story.listed_ms, story.told_ms - 2_000)
    assert all(uids == ["new"] for ts_ms, uids in given_to.items() if ts_ms >= in_time_ms)
