"""The published traces as ticks: nothing is lost, nothing is invented, and what can't be used is reported."""

import itertools
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.replay.alibaba import genai, gpu_2023
from producers.replay.trace import NoTrace, Rows, Trace, TraceTick
from tests.producers.replay import trace_files
from topics.times import MAX_TIME_MS

T0 = 1_662_858_720_000
A, B = "23b8eba99c14e73d454503a55ae96989", "81202f3feffc31e32dbfcb7c74b72b61"


def held_ms(trace: Trace) -> Counter[tuple[str, str]]:
    """Device-milliseconds of each device id and pod, counted independently: a tick stands for the time before it."""
    held: Counter[tuple[str, str]] = Counter()
    before: dict[str, int] = {}
    for tick in trace.ticks:
        assert tick.ts_ms > before.get(tick.node, -1)
        for row in tick.containers:
            for device in row["device_ids"]:
                held[device.partition("::")[0], row["pod"]] += tick.ts_ms - before[tick.node]
        before[tick.node] = tick.ts_ms
    return held


def test_each_reading_is_a_tick_at_its_own_time(tmp_path: Path) -> None:
    rows = Rows()
    duty = [f"33.333333333333336,1662858720.0,{A}", f"0.0,1662858777.0,{A}", f"100.0,1662858720.0,{B}"]
    memory = [f"1662858720.0,33879490560.0,{A}", f"1662858834.0,7.0,{B}"]
    trace = genai(trace_files.genai(tmp_path, duty, memory), rows)
    ticks = list(trace.ticks)

    assert [(tick.ts_ms - T0, tick.node, tick.devices[0]["metrics"]) for tick in ticks] == [
        (0, f"node-{A}", {"gpu_utilization_ratio": 33.333333333333336 / 100, "memory_used_bytes": 33879490560}),
        (0, f"node-{B}", {"gpu_utilization_ratio": 1.0}),
        (57_000, f"node-{A}", {"gpu_utilization_ratio": 0.0}),
        (114_000, f"node-{B}", {"memory_used_bytes": 7}),
    ]
    assert all(tick.containers[0]["device_ids"] == [tick.devices[0]["uuid"]] for tick in ticks)
    assert (trace.first_ms, trace.last_ms, trace.interval_ms) == (T0, T0 + 114_000, 57_000)
    assert rows.read == {trace_files.DUTY: 3, trace_files.MEMORY: 2}
    assert not rows.left_out


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (f"1.0,1662858777.0,{A},5", "fields"),
        (f"1.0,{A}", "fields"),
        ("", "fields"),
        (f"-1,1662858777.0,{A}", "value"),
        (f"100.1,1662858777.0,{A}", "value"),
        (f"nan,1662858777.0,{A}", "value"),
        (f",1662858777.0,{A}", "value"),
        (f"1.0,yesterday,{A}", "timestamp_anon"),
        (f"1.0,-5,{A}", "timestamp_anon"),
        (f"1.0,1e300,{A}", "timestamp_anon"),
        ("1.0,1662858777.0,NULL", "container_ip"),
        ("1.0,1662858777.0,", "container_ip"),
        ("1.0,1662858777.0,a/b", "container_ip"),
        (f"1.0,1662858720.0,{A}", "repeated"),
    ],
)
def test_a_reading_that_cannot_be_used_is_left_out_counted_and_named(tmp_path: Path, row: str, reason: str) -> None:
    rows = Rows()
    trace = genai(trace_files.genai(tmp_path, [f"5.0,1662858720.0,{A}", row, f"6.0,1662858834.0,{A}"], []), rows)

    assert [tick.ts_ms - T0 for tick in trace.ticks] == [0, 114_000]
    assert rows.read[trace_files.DUTY] == 2
    assert rows.left_out == {(trace_files.DUTY, reason): 1}
    assert rows.first[trace_files.DUTY, reason].startswith(f"{trace_files.DUTY}, line 3: ")


def test_the_archives_are_read_as_they_are_published(tmp_path: Path) -> None:
    trace_files.genai(tmp_path, [f"5.0,1662858720.0,{A}"], [f"1662858720.0,9.0,{A}"])
    for name in (trace_files.DUTY, trace_files.MEMORY):
        with tarfile.open(tmp_path / name.replace(".csv", ".tar.gz"), "w:gz") as archive:
            archive.add(tmp_path / name, name)
        (tmp_path / name).unlink()
    (tick,) = genai(tmp_path, Rows()).ticks

    assert tick.devices[0]["metrics"] == {"gpu_utilization_ratio": 0.05, "memory_used_bytes": 9}


def test_a_trace_whose_archive_was_cut_off_is_refused(tmp_path: Path) -> None:
    rows = [f"{second},{second % 97},{A}" for second in range(9_000)]
    trace_files.genai(tmp_path, [], rows)
    path = tmp_path / trace_files.MEMORY.replace(".csv", ".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tmp_path / trace_files.MEMORY, trace_files.MEMORY)
    (tmp_path / trace_files.MEMORY).unlink()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(NoTrace, match=f"{trace_files.MEMORY}: .* ended before"):
        genai(tmp_path, Rows())


def test_a_file_whose_first_line_is_too_long_for_a_table_is_refused(tmp_path: Path) -> None:
    trace_files.genai(tmp_path, [], [])
    (tmp_path / trace_files.DUTY).write_text("x" * 200_000)
    with pytest.raises(NoTrace, match=f"{trace_files.DUTY}: field larger than"):
        genai(tmp_path, Rows())


def test_a_table_without_a_column_is_refused_with_what_it_has(tmp_path: Path) -> None:
    trace_files.genai(tmp_path, [], [])
    (tmp_path / trace_files.DUTY).write_text("duty,when,container_ip\n")
    with pytest.raises(NoTrace, match="no column timestamp_anon, value; it has duty, when, container_ip"):
        genai(tmp_path, Rows())


def test_a_trace_of_which_nothing_can_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoTrace, match="no reading"):
        genai(trace_files.genai(tmp_path, ["x,y,z"], []), Rows())
    with pytest.raises(NoTrace, match="no pod"):
        gpu_2023(trace_files.gpu_2023(tmp_path, ["n-0,1,1,2,T4"], []), Rows(), None)


def test_a_pod_gets_the_first_node_with_room_of_a_model_that_it_may_have(tmp_path: Path) -> None:
    nodes = ["n-0,64000,262144,2,T4", "n-1,64000,262144,2,V100M16"]
    pods = [
        trace_files.pod("whole", 1, 1000, 0, 100),
        trace_files.pod("third", 1, 333, 10, 90),
        trace_files.pod("two", 2, 1000, 20, 80),
        trace_files.pod("half", 1, 500, 30, 70),
        trace_files.pod("picky", 1, 1000, 85, 95, "V100M16|V100M32"),
        "cpu,4000,15258,0,0,,BE,Running,5,9,5",
        "waits,4000,15258,1,1000,,BE,Pending,5,9,",
    ]
    rows = Rows()
    trace = gpu_2023(trace_files.gpu_2023(tmp_path, nodes, pods), rows, 60_000)

    assert {node: {pod["name"] for pod in pods} for node, pods in trace.pods.items()} == {
        "n-0": {"whole", "third", "half"},
        "n-1": {"two", "picky"},
    }
    assert not rows.left_out
    ticks = {tick.ts_ms: tick for tick in trace.ticks if tick.node == "n-0"}
    assert [device["metrics"]["gpu_utilization_ratio"] for device in ticks[70_000].devices] == [1.0, 0.833]
    assert [len(device["processes"]) for device in ticks[70_000].devices] == [1, 2]
    assert [device["metrics"]["gpu_utilization_ratio"] for device in ticks[100_000].devices] == [1.0, 0.0]


RUNS = st.lists(
    st.tuples(
        st.integers(0, 4000),
        st.integers(1, 4000),
        st.sampled_from([(1, 250), (1, 500), (1, 999), (1, 1000), (2, 1000), (4, 1000)]),
    ),
    min_size=1,
    max_size=12,
)


@given(runs=RUNS, interval_s=st.sampled_from([7, 60, 1000]))
def test_what_a_pod_holds_is_its_gpus_for_as_long_as_it_ran(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, int, tuple[int, int]]], interval_s: int
) -> None:
    pods = [
        trace_files.pod(f"p-{number}", gpus, milli, start_s, start_s + length_s)
        for number, (start_s, length_s, (gpus, milli)) in enumerate(runs)
    ]
    nodes = [f"n-{number},1,1,4,T4" for number in range(12)]
    folder = trace_files.gpu_2023(tmp_path_factory.mktemp("trace"), nodes, pods)
    held = held_ms(gpu_2023(folder, Rows(), interval_s * 1000))

    for number, (_, length_s, (gpus, _)) in enumerate(runs):
        assert [ms for (_, pod), ms in held.items() if pod == f"p-{number}"] == [length_s * 1000] * gpus


def test_a_pod_that_ran_for_thousands_of_years_needs_no_memory_for_all_its_ticks(tmp_path: Path) -> None:
    pods = [trace_files.pod("for-ever", 1, 1000, 7, MAX_TIME_MS // 1000)]
    trace = gpu_2023(trace_files.gpu_2023(tmp_path, ["n-0,1,1,1,T4"], pods), Rows(), 1_000)

    assert [tick.ts_ms for tick in itertools.islice(trace.ticks, 4)] == [7_000, 8_000, 9_000, 10_000]


def test_no_two_ticks_of_a_node_are_further_apart_than_the_interval(tmp_path: Path) -> None:
    pods = [trace_files.pod("early", 1, 1000, 7, 11), trace_files.pod("late", 1, 1000, 5000, 5003)]
    trace = gpu_2023(trace_files.gpu_2023(tmp_path, ["n-0,1,1,1,T4"], pods), Rows(), 60_000)
    times = [tick.ts_ms for tick in trace.ticks]

    assert times[:4] == [7_000, 11_000, 60_000, 120_000]
    assert max(after - before for before, after in itertools.pairwise(times)) == 60_000
    assert times[-1] == trace.last_ms == 5_003_000


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("p,1,1,1,1000", "fields"),
        ("p,1,1,one,1000,,LS,Running,0,9,0", "num_gpu"),
        ("p,1,1,1.5,1000,,LS,Running,0,9,0", "num_gpu"),
        ("p,1,1,99,1000,,LS,Running,0,9,0", "num_gpu"),
        ("p,1,1,1,1001,,LS,Running,0,9,0", "gpu_milli"),
        ("p,1,1,1,0,,LS,Running,0,9,0", "gpu_milli"),
        ("p,1,1,2,500,,LS,Running,0,9,0", "gpu_milli"),
        ("p,1,1,1,1000,,LS,Running,0,9,soon", "scheduled_time"),
        ("p,1,1,1,1000,,LS,Running,0,,0", "deletion_time"),
        ("p,1,1,1,1000,,LS,Running,0,5,5", "deletion_time"),
        (",1,1,1,1000,,LS,Running,0,9,0", "name"),
        ("good,1,1,1,1000,,LS,Running,0,9,0", "repeated"),
        ("p,1,1,8,1000,,LS,Running,0,9,0", "no_room"),
        ("p,1,1,1,1000,H100,LS,Running,0,9,0", "no_room"),
    ],
)
def test_a_pod_that_cannot_be_used_is_left_out_counted_and_named(tmp_path: Path, row: str, reason: str) -> None:
    rows = Rows()
    folder = trace_files.gpu_2023(tmp_path, ["n-0,1,1,2,T4"], [trace_files.pod("good", 1, 1000, 0, 9), row])
    trace = gpu_2023(folder, rows, None)

    assert set(_pods(trace.ticks)) == {"good"}
    assert rows.read[trace_files.PODS] == 1
    assert rows.left_out == {(trace_files.PODS, reason): 1}
    assert rows.first[trace_files.PODS, reason].startswith(f"{trace_files.PODS}, line 3: ")


def _pods(ticks: object) -> list[str]:
    trace_ticks: list[TraceTick] = list(ticks)  # type: ignore[call-overload]
    return [row["pod"] for tick in trace_ticks for row in tick.containers]
