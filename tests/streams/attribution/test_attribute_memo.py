"""The memo of the last answer only saves work: without it every tick is joined the same."""

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from streams.attribution import join
from tests.streams.attribution.records import container, gpu, pending, pod, process, snapshot, tick, workloads
from topics.samples import Process
from topics.workloads import Pod

NAMES = ("p0", "p1")
END_S = 40

names = st.sampled_from(NAMES)
times_s = st.integers(0, END_S)


def pod_of(name: str, generation: int, life_s: int | None, label: int) -> Pod:
    """A pod that may come back under its name, end, and have another label."""
    started_s = generation * 8
    ended_ms = None if life_s is None else (started_s + life_s) * 1000
    return pod(name, uid=f"{name}-{generation}", started=started_s * 1000, ended=ended_ms, labels={"label": str(label)})


pods = st.builds(pod_of, names, st.integers(0, 2), st.none() | st.integers(1, 20), st.integers(0, 1))
changes = st.lists(
    st.tuples(times_s, st.integers(-2, 5), st.lists(pods, min_size=1, max_size=3, unique_by=lambda pod: pod.uid)),
    min_size=1,
    max_size=6,
)
listed = st.lists(st.tuples(times_s, st.sets(names)), max_size=4)
uids = st.sampled_from(["p0-0", "p1-1", "p1-2", "stranger", None])
memory = st.sampled_from([None, 0, 40, 50])
device_processes = st.lists(st.builds(process, uids, memory, st.sampled_from([None, "mps"])), max_size=3).map(tuple)
processes_by_time = st.dictionaries(times_s, device_processes, max_size=20)

Changes = list[tuple[int, int, list[Pod]]]
"""When a record was logged, how far ahead of that its clock is, in s, and its pods."""


ProcessesByTime = dict[int, tuple[Process, ...]]
"""The processes from a time on."""


def log_of(changes: Changes, listed: list[tuple[int, set[str]]], processes_at: ProcessesByTime) -> list[join.Record]:
    """A tick each second, with the changes of the pods, the snapshots and the processes of that second."""
    records: list[join.Record] = [
        join.LoggedWorkloads(workloads(1, pod_of("p0", 0, None, 0), labels={"at": "0"}), -5_000)
    ]
    snapshots, processes = 0, tuple[Process, ...]()
    for now_s in range(END_S):
        now_ms = now_s * 1000
        for at_s, ahead_s, pods_then in changes:
            if at_s == now_s:
                record = workloads(
                    len(records) + 1, *pods_then, ts_ms=now_ms + ahead_s * 1000, labels={"at": str(now_s // 10)}
                )
                records.append(join.LoggedWorkloads(record, now_ms))
        for at_s, names in [(0, {"p0"}), *listed]:
            if at_s == now_s:
                snapshots += 1
                records.append(snapshot(snapshots, *(container(name, gpu(0)) for name in sorted(names)), ts_ms=now_ms))
        processes = processes_at.get(now_s, processes)
        sample = tick(now_s + 1, snapshots, ts_ms=now_ms, processes=[processes])
        records.append(pending(sample, now_s, logged_ms=now_ms, watermark_ms=now_ms + 2_000))
    return records


def outputs(records: list[join.Record], *, remembering: bool) -> tuple[list[bytes], int]:
    """All outputs of the join, and how many of them reuse the previous answer."""
    state, encoded, reused = join.NEW, list[bytes](), 0
    for record in records:
        before = state if remembering else msgspec.structs.replace(state, memo=None)
        state, joined = join.step(before, record, 10.0)
        encoded += [msgspec.json.encode(output.sample) for output in joined]
        reused += state.memo is not None and state.memo is before.memo and bool(joined)
    return encoded, reused


@example([(1, 0, [pod_of("p0", 0, 15, 0)])], [], {})
@example([], [], {9: (process("other"),), 10: (process("other", None),), 11: (process("other"),)})
@example([], [], {9: (process("other"),), 10: (process("other", service="mps"),)})
@given(changes, listed, processes_by_time)
def test_every_tick_is_joined_as_if_nothing_were_remembered(
    changes: Changes, listed: list[tuple[int, set[str]]], processes_by_time: ProcessesByTime
) -> None:
    live = log_of(changes, listed, processes_by_time)
    replayed = sorted(live, key=lambda record: isinstance(record, join.PendingTick))

    for log in (live, replayed):
        assert outputs(log, remembering=True)[0] == outputs(log, remembering=False)[0]


def test_nothing_is_computed_again_while_nothing_changes() -> None:
    busy: ProcessesByTime = {now_s: (process("p0-0", now_s + 1), process(None, 0)) for now_s in range(END_S)}

    for processes in ({}, busy):
        encoded, reused = outputs(log_of([], [], processes), remembering=True)
        assert (len(encoded), reused) == (END_S, END_S - 1)
