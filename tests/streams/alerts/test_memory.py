"""The memory of a node: it changes only if something happened, and is read back as it was written."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.conditions.evaluate import evaluate
from streams.alerts.memory import MOST_REMOVED, Memory, remember
from streams.alerts.tick import Device, Tick
from tests.streams.alerts.ticks import DEFAULTS, device, gpu, holder, mig, tick
from topics.attributed import AttributedEvent

WEEK_MS = 7 * 86_400_000


def memory_after(*ticks: Tick) -> Memory:
    memory = Memory()
    for node_tick in ticks:
        memory = remember(memory, node_tick, WEEK_MS)
    return memory


def test_nothing_is_written_while_nothing_happens() -> None:
    def node(i: int) -> Tick:
        pods = holder("a", container="x"), holder("a", container="y"), holder("b")
        return tick(i, device(0, *pods, busy=i / 100, nvlink_crc_errors_total=7, xids={"13": 2}), mig(1), device(1))

    memory = memory_after(node(0))
    for i in range(1, 20):
        assert remember(memory, node(i), WEEK_MS) is memory


def test_a_gpu_that_stays_missing_changes_nothing_more() -> None:
    memory = memory_after(tick(0, device(0), device(1)), tick(1, device(0)))
    assert memory.devices[gpu(1)].missing_ms == tick(1).ts_ms
    assert remember(memory, tick(2, device(0)), WEEK_MS) is memory


def test_a_counter_that_runs_changes_nothing_but_its_window() -> None:
    memory = memory_after(tick(0, device(0, nvlink_crc_errors_total=0)))
    for i in range(1, 600):
        new = remember(memory, tick(i, device(0, nvlink_crc_errors_total=i)), WEEK_MS)
        assert new.devices is memory.devices
        memory = new
    assert len(msgspec.json.encode(memory.windows)) < 400


def test_the_windows_of_a_device_that_is_forgotten_go_with_it() -> None:
    memory = memory_after(tick(0, device(0, nvlink_crc_errors_total=3)), tick(1), tick(8 * 86_400))
    assert (memory.devices, memory.windows) == ({}, {})


def test_the_state_of_a_counter_whose_readings_can_not_be_added_up_is_read_back() -> None:
    readings = (0, 1.7e308, 0, 1.7e308)
    memory = memory_after(*(tick(i / 10, device(0, nvlink_crc_errors_total=value)) for i, value in enumerate(readings)))
    assert msgspec.json.decode(msgspec.json.encode(memory), type=Memory) == memory


def test_a_pod_is_remembered_with_its_workload_from_its_first_tick_on() -> None:
    memory = memory_after(tick(0, device(0)), tick(5, device(0, holder())), tick(9, device(0, holder())))
    (pod,) = memory.devices[gpu(0)].pods
    assert (pod.pod, pod.workload_kind, pod.workload_name, pod.since_ms) == ("bert-0", "Job", "bert", tick(5).ts_ms)


def test_the_holder_of_a_device_stays_if_a_tick_does_not_know_it() -> None:
    memory = memory_after(tick(0, device(0, holder())))
    assert remember(memory, tick(1, device(0), attribution="none"), WEEK_MS) is memory
    observed_device = device(0, holder("b", observed=True))
    assert remember(memory, tick(1, observed_device, attribution="none"), WEEK_MS) is memory
    assert remember(memory, tick(1, device(0)), WEEK_MS).devices[gpu(0)].pods == ()


def test_a_gpu_that_is_missing_while_the_producer_starts_again_counts_its_xid_errors_from_none() -> None:
    memory = memory_after(tick(0, device(0, xids={"79": 3})), tick(1, run_id=2))
    restarted = tick(2, device(0, xids={"79": 1}), run_id=2)
    assert [f.value for f in evaluate(DEFAULTS, restarted, memory)[0] if f.rule.name == "GPUXid"] == [1]
    three = tick(2, device(0, xids={"79": 3}), run_id=2)
    assert [f.value for f in evaluate(DEFAULTS, three, memory)[0] if f.rule.name == "GPUXid"] == [3]


pods = st.lists(st.sampled_from([holder("a"), holder("b"), holder("b", container="side"), holder("c", pod_uid=None)]))
devices = st.builds(
    lambda number, pods, state, counter, xids, events: device(
        number, *pods, state=state, busy=0.0, xids=xids, events=events,
        nvlink_crc_errors_total=counter, nvlink_recovery_errors_total=counter, ecc_uncorrected_volatile_total=counter,
    ),
    st.integers(0, 2),
    pods,
    st.sampled_from(["ok", "lost", "timeout"]),
    st.none() | st.integers(0, 300) | st.sampled_from([1e20, 1.7e308, -1.7e308]),
    st.dictionaries(st.sampled_from(["13", "79", "x"]), st.integers(0, 3)),
    st.none() | st.just((AttributedEvent("xid", 79),)),
)  # fmt: skip
nodes = st.lists(devices, max_size=4)
stories = st.lists(
    st.tuples(nodes, st.integers(0, 90_000), st.integers(1, 2), st.sampled_from(["exact", "late", "none"])), max_size=12
)


def ticks_of(story: list[tuple[list[Device], int, int, Any]]) -> list[Tick]:
    second, ticks = 0.0, []
    for metrics, ms, run_id, attribution in story:
        second += ms / 1000
        ticks.append(tick(second, *metrics, run_id=run_id, attribution=attribution))
    return ticks


@given(stories)
def test_whatever_comes_a_restart_at_any_tick_finds_the_same(
    story: list[tuple[list[Device], int, int, Any]],
) -> None:
    through, restarted = Memory(), Memory()
    for node_tick in ticks_of(story):
        expected, through = evaluate(DEFAULTS, node_tick, through)
        restarted = msgspec.json.decode(msgspec.json.encode(restarted), type=Memory)
        findings, restarted = evaluate(DEFAULTS, node_tick, restarted)
        assert findings == expected
        assert restarted == through


@given(stories)
def test_whatever_comes_the_same_object_means_the_same_memory(story: list[tuple[list[Device], int, int, Any]]) -> None:
    memory = Memory()
    for node_tick in ticks_of(story):
        before = msgspec.json.encode(memory)
        new = remember(memory, node_tick, WEEK_MS)
        assert msgspec.json.encode(memory) == before
        assert (new is memory) == (new == memory)
        memory = new
        assert {device.uuid for device in node_tick.devices} <= set(memory.devices)


@given(stories)
def test_no_finding_is_reported_twice_in_a_tick(story: list[tuple[list[Device], int, int, Any]]) -> None:
    memory = Memory()
    for node_tick in ticks_of(story):
        uuids = [device.uuid for device in node_tick.devices]
        findings, memory = evaluate(DEFAULTS, node_tick, memory)
        ids = [(f.rule.name, f.device, f.pod_uid, f.key) for f in findings]
        if len(set(uuids)) == len(uuids):
            assert len(set(ids)) == len(ids)


def test_the_errors_of_only_so_many_mig_devices_that_are_gone_are_remembered() -> None:
    memory = memory_after(*(tick(i, device(0), mig(i, xids={"31": 1})) for i in range(MOST_REMOVED + 100)))
    assert len(memory.removed_counts) == MOST_REMOVED
    assert f"MIG-{MOST_REMOVED + 98}" in memory.removed_counts
