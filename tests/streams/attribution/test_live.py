"""The live join and a replay give the same bytes, also for pods that only their processes show.

Live, processes are seen at once, the kubelet reports a pod some seconds later, and the API server within 4 s; neither
ever reports a pod that requested no GPU. A StatefulSet's pod is created again under its name.
"""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from streams.attribution import join
from tests.streams.attribution.model import Logs
from tests.streams.attribution.reading import Reading
from tests.streams.attribution.records import container, gpu, pending, pod, process, snapshot, tick, workloads
from tests.streams.attribution.stories import Act, Story, schedules, stalls
from topics.allocations import Allocations
from topics.attributed import AttributedSample
from topics.samples import Sample
from topics.workloads import NodeWorkloads, Pod

STEP_MS = 500
END_MS = 30_000
FIRST = pod("first", started=-60_000)


class PodStory(NamedTuple):
    """A pod on one of two GPUs: when it starts, how much later the API server and the kubelet report it, when it ends,
    and how much longer the kubelet lists it."""

    start_ms: int
    api_delay_ms: int
    kubelet_delay_ms: int
    end_ms: int
    gpu: int
    listed_ms: int = 0


def steps(least: int, most: int) -> st.SearchStrategy[int]:
    """A time."""
    return st.integers(least, most).map(lambda number: number * STEP_MS)


pod_stories = st.lists(
    st.builds(PodStory, steps(1, 12), steps(0, 8), steps(0, 8), steps(14, 30), st.integers(0, 1), steps(0, 40)),
    max_size=4,
)


class Logged(NamedTuple):
    """A record, and when it was logged."""

    at_ms: int
    record: Sample | Allocations | NodeWorkloads


def log_of(pods: list[PodStory], rogue_ms: int = END_MS) -> list[Logged]:
    """The records about these pods, in order: workloads, snapshots and ticks, one every second. From ``rogue_ms`` on
    the second GPU has a process of a pod that is in no record of the workloads."""
    log = [Logged(-60_000, workloads(1, FIRST))]
    for at_ms in range(0, END_MS, STEP_MS):
        known_pods = tuple(_pod_at(n, p, at_ms) for n, p in enumerate(pods) if p.start_ms + p.api_delay_ms <= at_ms)
        if known_pods != _pods_reported(log):
            log.append(Logged(at_ms, workloads(len(log) + 1, FIRST, *known_pods, ts_ms=at_ms)))
        if at_ms % 1000 == 0:
            log += _ticked(pods, at_ms, rogue=at_ms >= rogue_ms)
    return log


def _pod_at(number: int, story: PodStory, at_ms: int) -> Pod:
    """A pod as the API server has it by then."""
    ended_ms = story.end_ms if story.end_ms + story.api_delay_ms <= at_ms else None
    return pod(f"p{number}", started=story.start_ms, ended=ended_ms)


def _pods_reported(log: Iterable[Logged]) -> tuple[Pod, ...]:
    """The pods in the last workloads record, except the first pod."""
    return [logged.record.pods[1:] for logged in log if isinstance(logged.record, NodeWorkloads)][-1]


def _ticked(pods: list[PodStory], at_ms: int, *, rogue: bool) -> list[Logged]:
    """A snapshot and the tick that names it."""
    seq = at_ms // 1000 + 1
    reported = [container(f"p{n}", gpu(p.gpu)) for n, p in enumerate(pods) if _listed(p, at_ms)]
    processes = [[process(f"uid-p{n}") for n, p in enumerate(pods) if p.gpu == i and _runs(p, at_ms)] for i in (0, 1)]
    processes[1] += [process("uid-rogue")] * rogue
    sample = tick(seq, seq, ts_ms=at_ms, processes=[tuple(on_gpu) for on_gpu in processes])
    return [Logged(at_ms, snapshot(seq, container("first", gpu(0)), *reported, ts_ms=at_ms)), Logged(at_ms, sample)]


def _runs(story: PodStory, at_ms: int) -> bool:
    return story.start_ms <= at_ms < story.end_ms


def _listed(story: PodStory, at_ms: int) -> bool:
    return (
        story.start_ms + story.kubelet_delay_ms <= at_ms < story.end_ms + max(story.kubelet_delay_ms, story.listed_ms)
    )


def live(log: list[Logged], step_ms: int = STEP_MS) -> list[bytes]:
    """The outputs of the live join, which reads each record at once."""
    records: list[join.Record] = []
    for at_ms in (-60_000, *range(0, END_MS + 3_000, step_ms)):
        records += [_record_of(logged, at_ms) for logged in log if logged.at_ms == at_ms]
        records.append(join.WatermarkRaised(at_ms))
    return outputs(records)


def replay(log: list[Logged]) -> list[bytes]:
    """The outputs of a replay: it reads the state first."""
    state = [logged for logged in log if not isinstance(logged.record, Sample)]
    samples = [logged for logged in log if isinstance(logged.record, Sample)]
    return outputs([_record_of(logged, END_MS + 3_000) for logged in (*state, *samples)])


def _record_of(logged: Logged, watermark_ms: int) -> join.Record:
    """A record that is read when the workloads have been read to a time."""
    if isinstance(logged.record, Sample):
        return pending(logged.record, logged.record.seq, logged_ms=logged.at_ms, watermark_ms=watermark_ms)
    if isinstance(logged.record, Allocations):
        return logged.record
    return join.LoggedWorkloads(logged.record, logged.at_ms)


def outputs(records: Iterable[join.Record]) -> list[bytes]:
    """The ticks that the join releases, encoded."""
    state, encoded = join.NEW, list[bytes]()
    for record in records:
        state, joined = join.step(state, record, 10.0)
        encoded += [msgspec.json.encode(output.sample) for output in joined]
    return encoded


@given(pod_stories, steps(0, END_MS // STEP_MS))
@example([PodStory(500, 1_500, 4_000, 9_000, 1)], 3_000)
@example([PodStory(500, 1_500, 1_000, 7_000, 1, 20_000)], END_MS)
def test_a_replay_gives_the_bytes_that_were_given_live(pods: list[PodStory], rogue_ms: int) -> None:
    log = log_of(pods, rogue_ms)

    assert live(log) == replay(log)
    assert len(live(log)) == END_MS // 1000


def story(log: list[Logged]) -> Story:
    """The same logs, to be read in another order."""
    samples = [(logged.at_ms, logged.record) for logged in log if isinstance(logged.record, Sample)]
    allocations = [(logged.at_ms, logged.record) for logged in log if isinstance(logged.record, Allocations)]
    workloads = [(logged.at_ms, logged.record) for logged in log if isinstance(logged.record, NodeWorkloads)]
    times = ([at_ms for at_ms, _ in log] for log in (samples, workloads))
    logs = Logs([r for _, r in samples], [r for _, r in allocations], [r for _, r in workloads], {"n": [1]}, *times)
    return Story(logs, *([at_ms / 1000 for at_ms, _ in log] for log in (samples, allocations, workloads)))


def read_by(log: list[Logged], schedule: list[Act]) -> dict[int, bytes]:
    """The outputs by offset, of a reader with this schedule."""
    reading = Reading(story(log))
    for act in schedule:
        reading.act(act)
    reading.drain()
    return reading.outputs


@given(pod_stories, schedules, stalls)
def test_any_order_of_reading_stalls_and_restarts_gives_the_same_bytes(
    pods: list[PodStory], schedule: list[Act], stall: list[Act]
) -> None:
    log = log_of(pods)

    assert read_by(log, schedule) == read_by(log, [*stall, *schedule]) == read_by(log, [])


def test_of_records_that_the_broker_stored_together_the_first_that_has_a_pod_counts_live_and_in_a_replay() -> None:
    news = [workloads(seq, FIRST, pod("p0", labels={"version": str(seq)}), ts_ms=900) for seq in (2, 3)]
    log = [
        Logged(-60_000, workloads(1, FIRST)),
        Logged(1_000, snapshot(1, container("p0", gpu(0)), ts_ms=1_000)),
        Logged(1_000, tick(1, 1, ts_ms=1_000)),
        *[Logged(1_500, record) for record in news],
        Logged(4_000, tick(2, 1, ts_ms=4_000)),
    ]
    samples = [msgspec.json.decode(value, type=AttributedSample) for value in live(log)]

    assert live(log) == replay(log)
    assert [sample.devices[0].holders[0].labels["version"] for sample in samples] == ["2", "3"]


def test_a_pod_that_its_processes_show_first_is_shown_live() -> None:
    processes = [b'"observed":true' in tick for tick in live(log_of([PodStory(500, 1_500, 4_000, 9_000, 1)]))]

    assert processes == [False, *[True] * 4, *[False] * 25]


def test_a_pod_that_asked_for_no_gpu_is_a_conflict_live_from_its_first_tick() -> None:
    contradicted = [b'"conflict":"unallocated_process"' in tick for tick in live(log_of([], rogue_ms=3_000))]

    assert contradicted == [at_ms >= 3_000 for at_ms in range(0, END_MS, 1_000)]


def test_a_pod_that_the_kubelet_lists_long_after_its_end_holds_its_gpu_for_ten_seconds_more() -> None:
    holds = [b'"pod":"p0"' in tick for tick in live(log_of([PodStory(500, 1_500, 0, 7_000, 1, 20_000)]))]

    assert holds == [False, *[True] * 17, *[False] * 12]


# -- a StatefulSet's pod that is deleted and made again

TICK_MS, WHOLE_MS = 100, 1_000


class Renewal(NamedTuple):
    """When the old pod ended, and when that was reported; when the new one started, was reported and was listed."""

    ended_ms: int
    end_reported_ms: int
    started_ms: int
    reported_ms: int
    listed_ms: int


@st.composite
def renewals(draw: st.DrawFn) -> Renewal:
    """The API server and the kubelet report in any possible order, within some seconds."""
    ended_ms = 4_000 + draw(st.integers(0, 20)) * TICK_MS
    started_ms = ended_ms + draw(st.integers(1, 20)) * TICK_MS
    end_reported_ms = ended_ms + draw(st.integers(0, 30)) * TICK_MS
    listed_ms = started_ms + draw(st.integers(0, 5)) * TICK_MS
    reported_ms = max(started_ms + draw(st.integers(0, 30)) * TICK_MS, end_reported_ms)
    return Renewal(ended_ms, end_reported_ms, started_ms, reported_ms, listed_ms)


def renewed(story: Renewal, *, processes: bool) -> list[Logged]:
    """A tick every 100 ms. The API server gives a pod's start in whole seconds."""
    old, new = pod("web-0", uid="old"), pod("web-0", uid="new", started=story.started_ms // WHOLE_MS * WHOLE_MS)
    over = pod("web-0", uid="old", ended=story.ended_ms)
    log, snapshots = [Logged(-60_000, workloads(1, old))], list[Allocations]()
    for at_ms in range(0, 15_000, TICK_MS):
        if at_ms == story.end_reported_ms:
            log.append(Logged(at_ms, workloads(2, over, ts_ms=at_ms)))
        if at_ms == story.reported_ms:
            log.append(Logged(at_ms, workloads(3, over, new, ts_ms=at_ms)))
        listed = at_ms < story.ended_ms or at_ms >= story.listed_ms
        if not snapshots or bool(snapshots[-1].containers) != listed:
            containers = [container("web-0", gpu(0))] if listed else []
            snapshots.append(snapshot(len(snapshots) + 1, *containers, ts_ms=at_ms))
            log.append(Logged(at_ms, snapshots[-1]))
        runs = [process("old")] * (at_ms < story.ended_ms) + [process("new")] * (at_ms >= story.started_ms)
        sample = tick(at_ms // TICK_MS, len(snapshots), ts_ms=at_ms, processes=[tuple(runs) if processes else ()])
        log.append(Logged(at_ms, sample))
    return log


@given(renewals(), st.booleans())
def test_a_statefulsets_pod_that_is_made_again_has_the_same_holder_at_every_tick_live_and_in_a_replay(
    story: Renewal, processes: bool
) -> None:
    log = renewed(story, processes=processes)
    encoded = live(log, TICK_MS)

    assert encoded == replay(log)
    samples = [msgspec.json.decode(value, type=AttributedSample) for value in encoded]
    assert len(samples) == 150
    given_to = {sample.ts_ms: [holder.pod_uid for holder in sample.devices[0].holders] for sample in samples}
    assert all(uids == ["old"] for ts_ms, uids in given_to.items() if ts_ms < story.ended_ms)
    known_ms = story.reported_ms + (story.reported_ms == story.end_reported_ms)  # the second record of one log time
    in_time_ms = max(story.listed_ms, known_ms - 2_000)
    assert all(uids == ["new"] for ts_ms, uids in given_to.items() if ts_ms >= in_time_ms)
