"""A worker that starts in the middle of the logs, with ten minutes of state, writes the same as one that ran on."""

from typing import NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from streams.attribution import join
from tests.streams.attribution.records import container, gpu, logged, pending, pod, process, snapshot, tick, workloads
from topics.allocations import Allocations
from topics.samples import Sample
from topics.workloads import NodeWorkloads

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
RESEND_MS, TOLD_MS, READ_BACK_MS = 5 * MINUTE_MS, 30 * MINUTE_MS, 10 * MINUTE_MS
START_MS = 10 * HOUR_MS


class Run(NamedTuple):
    """One of a StatefulSet's pods: how long after the last one it begins, how long it runs, how long the API server and
    the kubelet take to tell, and how much longer the kubelet lists it."""

    gap_ms: int
    runs_ms: int
    report_ms: int
    listed_ms: int
    listed_longer_ms: int
    labels: int


runs = st.builds(
    Run,
    st.sampled_from([500, 3_000, 40_000, 20 * MINUTE_MS]),
    st.sampled_from([4_000, 2 * MINUTE_MS, 17 * MINUTE_MS, HOUR_MS]),
    st.integers(0, 4_000),
    st.integers(0, 3_000),
    st.sampled_from([0, 1_500, 12_000, 25 * MINUTE_MS]),
    st.integers(0, 1),
)


class Logged(NamedTuple):
    """A record and its log time."""

    at_ms: int
    record: Sample | Allocations | NodeWorkloads


def logs(pods: list[Run], *, is_shown: bool) -> list[Logged]:
    """The records of two hours: each change when it is known, and everything again every five minutes."""
    lifetimes, at_ms = list[tuple[int, int, Run]](), START_MS
    for run in pods:
        lifetimes.append((at_ms + run.gap_ms, at_ms + run.gap_ms + run.runs_ms, run))
        at_ms = lifetimes[-1][1]
    log = _workloads(lifetimes) + _samples(lifetimes, is_shown=is_shown)
    return sorted(log, key=lambda entry: (entry.at_ms, isinstance(entry.record, Sample)))


def _workloads(lifetimes: list[tuple[int, int, Run]]) -> list[Logged]:
    changes = {at_ms + run.report_ms for start_ms, end_ms, run in lifetimes for at_ms in (start_ms, end_ms)}
    resends_ms = set(range(START_MS - RESEND_MS, START_MS + 2 * HOUR_MS, RESEND_MS))
    log = list[Logged]()
    for at_ms in sorted(changes | resends_ms):
        pods = []
        for number, (start_ms, end_ms, run) in enumerate(lifetimes):
            has_ended = end_ms + run.report_ms <= at_ms
            just_ended = end_ms + run.report_ms == at_ms
            if start_ms + run.report_ms <= at_ms < end_ms + TOLD_MS and (
                not has_ended or just_ended or at_ms in resends_ms
            ):
                whole_second_ms = start_ms // 1000 * 1000
                labels = {"v": str(run.labels)}
                end = end_ms if has_ended else None
                pods.append(pod("web-0", uid=f"uid-{number}", started=whole_second_ms, ended=end, labels=labels))
        log.append(Logged(at_ms, workloads(len(log) + 1, *pods, ts_ms=at_ms)))
    return log


def _samples(lifetimes: list[tuple[int, int, Run]], *, is_shown: bool) -> list[Logged]:
    edges = {
        at_ms + ms for start, end, run in lifetimes for at_ms in (start, end) for ms in (0, 400, 2_100, 5_000, 11_000)
    }
    log, snapshots, sent_ms = list[Logged](), list[Allocations](), 0
    for seq, at_ms in enumerate(sorted(edges | set(range(START_MS, START_MS + 2 * HOUR_MS, 2 * MINUTE_MS)))):
        listed = any(start + run.listed_ms <= at_ms < end + run.listed_longer_ms for start, end, run in lifetimes)
        if not snapshots or bool(snapshots[-1].containers) != listed:
            containers = [container("web-0", gpu(0))] if listed else []
            snapshots.append(snapshot(len(snapshots) + 1, *containers, ts_ms=at_ms))
            sent_ms = 0
        if at_ms - sent_ms >= RESEND_MS - 2 * MINUTE_MS:
            log.append(Logged(at_ms, snapshots[-1]))
            sent_ms = at_ms
        running = [process(f"uid-{n}") for n, (start, end, _) in enumerate(lifetimes) if start <= at_ms < end]
        sample = tick(seq, len(snapshots), ts_ms=at_ms, processes=[tuple(running) if is_shown else ()])
        log.append(Logged(at_ms, sample))
    return log


def replay(log: list[Logged], from_ms: int, *, live: bool = False) -> dict[int, bytes]:
    """What comes out of the samples from a time on, with the state of ten minutes before.

    Live, all is read in the order in which it was logged, and what goes out is committed at once.
    """
    state, encoded = join.NEW, dict[int, bytes]()
    since_ms = from_ms - READ_BACK_MS
    for entry in log if live else sorted(log, key=lambda entry: isinstance(entry.record, Sample)):
        if entry.at_ms < (from_ms if isinstance(entry.record, Sample) else since_ms):
            continue
        record: join.Record
        if isinstance(entry.record, Sample):
            watermark_ms = entry.at_ms - 1_000 if live else float("inf")
            record = pending(entry.record, entry.record.seq, logged_ms=entry.at_ms, watermark_ms=watermark_ms)
        else:
            record = logged(entry.record, entry.at_ms) if isinstance(entry.record, NodeWorkloads) else entry.record
        state, joined = join.step(state, record, 10.0)
        for joined_tick in joined:
            encoded[joined_tick.sample.seq] = msgspec.json.encode(joined_tick.sample)
        if live and isinstance(entry.record, Sample) and not state.pending:
            state, _ = join.step(state, join.Committed(entry.record.seq + 1), 10.0)
    for joined_tick in join.step(state, join.WatermarkRaised(float("inf")), 10.0)[1]:
        encoded[joined_tick.sample.seq] = msgspec.json.encode(joined_tick.sample)
    return encoded


@given(st.lists(runs, min_size=1, max_size=6), st.booleans(), st.integers(0, 2 * HOUR_MS))
def test_a_start_in_the_middle_gives_the_bytes_of_a_run_from_the_beginning(
    pods: list[Run], is_shown: bool, after_ms: int
) -> None:
    log = logs(pods, is_shown=is_shown)
    whole_log, ran_on = replay(log, 0), replay(log, 0, live=True)
    part = replay(log, START_MS + after_ms)

    assert ran_on == whole_log
    assert len(whole_log) == sum(isinstance(entry.record, Sample) for entry in log)
    assert part == {seq: value for seq, value in whole_log.items() if seq >= min(part, default=seq + 1)}
