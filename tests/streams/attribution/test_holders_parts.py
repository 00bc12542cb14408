"""The split of shared devices: the parts and the rest are the device."""

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from streams.attribution.attribute import ResolvedSnapshot, attribute, facts_of
from streams.attribution.holders import Split, divide, owners_of
from streams.attribution.log_time import ResolvedPods
from tests.streams.attribution.records import gpu, tick
from topics.attributed import Holder, Parts, Workload
from topics.samples import Device, Job, Process

GIB = 1 << 30
QUANTITIES = {
    "utilization_ratio": "gpu_utilization_ratio",
    "memory_used_bytes": "memory_used_bytes",
    "power_watts": "power_watts",
}


def holder(pod: str, *, container: str = "main", uid: str | None = "") -> Holder:
    """A holder whose pod's uid is known, unless it is None."""
    return Holder("ns", pod, pod_uid=f"uid-{pod}" if uid == "" else uid, container=container)


def process(
    pod: str | None, ratio: float | None = None, memory: int | None = None, service: str | None = None
) -> Process:
    """A process of a pod, or of none."""
    uid = None if pod is None else f"uid-{pod}"
    return Process(1, pod_uid=uid, memory_used_bytes=memory, sm_utilization_ratio=ratio, service=service)


def device(*processes: Process, **metrics: float) -> Device:
    """A GPU with processes."""
    return Device(gpu(1), metrics=dict(metrics), processes=processes)


def busy(*processes: Process) -> Device:
    """A GPU with 80 % utilization, 10 GiB used, at 400 W."""
    return device(*processes, gpu_utilization_ratio=0.8, memory_used_bytes=10 * GIB, power_watts=400.0)


def split(device: Device, holders: tuple[Holder, ...]) -> Split:
    """The parts of a device's holders."""
    return divide(device, holders, owners_of(device, holders))


def parts_of(result: tuple[Holder, ...]) -> list[tuple[Any, ...] | None]:
    """Each holder's parts: utilization, memory, power."""
    return [None if h.parts is None else msgspec.structs.astuple(h.parts) for h in result]


def rest_of(result: Split) -> tuple[Any, ...]:
    """The unattributed rest: utilization, memory, power."""
    assert result.unattributed is not None
    return msgspec.structs.astuple(result.unattributed)


# -- what each one has


def test_two_pods_have_what_their_processes_use_and_the_rest_is_unattributed() -> None:
    result = split(
        busy(process("a", 0.5, 4 * GIB), process("b", 0.25, 3 * GIB), process("a", 0.0, GIB)),
        (holder("a"), holder("b")),
    )

    assert parts_of(result.holders) == [(0.5, 5 * GIB, 200.0), (0.25, 3 * GIB, 100.0)]
    assert rest_of(result) == (pytest.approx(0.05), 2 * GIB, 100.0)
    assert not result.scaled


def test_processes_that_sum_to_more_than_the_device_are_scaled_down_and_leave_no_rest() -> None:
    result = split(busy(process("a", 0.9, 15 * GIB), process("b", 0.3, 5 * GIB)), (holder("a"), holder("b")))

    assert parts_of(result.holders) == [
        (pytest.approx(0.6), pytest.approx(7.5 * GIB), pytest.approx(240)),
        (pytest.approx(0.2), pytest.approx(2.5 * GIB), pytest.approx(80)),
    ]
    assert rest_of(result) == (0, 0, pytest.approx(80))
    assert result.scaled


def test_a_sum_that_only_rounding_makes_more_than_the_device_is_not_scaled() -> None:
    result = split(device(process("a", 0.1), process("b", 0.2), gpu_utilization_ratio=0.3), (holder("a"), holder("b")))

    assert 0.1 + 0.2 > 0.3
    assert not result.scaled
    assert result.unattributed == Parts(0)


def test_an_idle_device_is_unattributed_but_for_its_memory() -> None:
    idle = device(process("a", 0.0, GIB), gpu_utilization_ratio=0, memory_used_bytes=2 * GIB, power_watts=60)

    result = split(idle, (holder("a"),))

    assert parts_of(result.holders) == [(0, GIB, 0)]
    assert result.unattributed == Parts(0, GIB, 60)


def test_a_sole_holder_has_parts_too() -> None:
    result = split(busy(process("a", 0.8, 10 * GIB)), (holder("a"),))

    assert parts_of(result.holders) == [(0.8, 10 * GIB, pytest.approx(320))]
    assert rest_of(result) == (0, 0, pytest.approx(80))


def test_a_device_without_processes_is_all_rest() -> None:
    result = split(busy(), (holder("a"), holder("b")))

    assert parts_of(result.holders) == [(0, 0, 0), (0, 0, 0)]
    assert result.unattributed == Parts(0.8, 10 * GIB, 400.0)


def test_processes_without_a_pod_and_of_unknown_pods_are_part_of_the_rest() -> None:
    result = split(busy(process(None, 0.7, 8 * GIB), process("x", 0.7, GIB), process("a", 0.1, GIB)), (holder("a"),))

    assert parts_of(result.holders) == [(0.1, GIB, pytest.approx(40))]
    assert not result.scaled


def test_a_missing_value_of_a_process_is_no_zero_of_its_pod_and_not_part_of_the_rest() -> None:
    processes = process("a", None, GIB), process("b", 0.5, None), process("c", 0, 0)
    result = split(busy(*processes), (holder("a"), holder("b"), holder("c")))

    assert parts_of(result.holders) == [(None, GIB, None), (0.5, None, 200.0), (0, 0, 0)]
    assert result.unattributed is None


def test_a_missing_value_of_a_process_without_a_pod_is_part_of_the_rest() -> None:
    result = split(busy(process("a", 0.5, GIB), process(None, None, None)), (holder("a"),))

    assert parts_of(result.holders) == [(0.5, GIB, 200.0)]
    assert rest_of(result) == (pytest.approx(0.3), 9 * GIB, 200.0)


# -- what is not divided


@pytest.mark.parametrize(
    ("given_device", "holders"),
    [
        (Device(gpu(1), metrics={"gpu_utilization_ratio": 0.5}, processes=None), (holder("a"),)),
        (busy(process("a", 0.5, GIB)), ()),
        (msgspec.structs.replace(busy(process(None, 0.5, GIB)), info={"processes_visible": "false"}), (holder("a"),)),
        (device(process("a", 0.5, GIB)), (holder("a"),)),
        (device(process("a", None, None), gpu_utilization_ratio=0.5, memory_used_bytes=1), (holder("a"), holder("b"))),
        (device(process("a", 0.5, 1), gpu_utilization_ratio=-0.5, memory_used_bytes=1e300), (holder("a"),)),
    ],
    ids=["no list", "no holder", "not visible", "no metrics", "processes say nothing", "impossible values"],
)
def test_what_cannot_be_divided_has_neither_parts_nor_a_rest(given_device: Device, holders: tuple[Holder, ...]) -> None:
    assert split(given_device, holders) == Split(holders)


def test_a_mig_device_has_memory_only() -> None:
    result = split(
        device(process("a", None, GIB), process("b", None, GIB), memory_used_bytes=3 * GIB),
        (holder("a"), holder("b")),
    )

    assert parts_of(result.holders) == [(None, GIB, None), (None, GIB, None)]
    assert result.unattributed == Parts(None, GIB, None)


def test_without_utilization_there_is_no_part_of_the_power() -> None:
    result = split(device(process("a", None, 1), power_watts=300.0, memory_used_bytes=1), (holder("a"),))

    assert parts_of(result.holders) == [(None, 1, None)]


def test_a_utilization_above_one_gives_no_more_power_than_there_is() -> None:
    result = split(device(process("a", 1.0), gpu_utilization_ratio=4.0, power_watts=400.0), (holder("a"),))

    assert parts_of(result.holders) == [(1.0, None, 100.0)]
    assert result.unattributed == Parts(3.0, None, 300.0)


# -- whose a process is


def test_two_containers_of_a_pod_have_its_part_once() -> None:
    result = split(busy(process("a", 0.4, GIB)), (holder("a", container="y"), holder("a", container="x")))

    assert parts_of(result.holders) == [None, (0.4, GIB, 160.0)]
    assert rest_of(result) == (pytest.approx(0.4), 9 * GIB, 240.0)


@pytest.mark.parametrize("pod", ["plugin", None])
@pytest.mark.parametrize("uid", ["uid-a", None])
def test_what_an_mps_server_uses_is_part_of_the_rest(pod: str | None, uid: str | None) -> None:
    server = process(pod, 0.3, GIB, service="mps")

    assert rest_of(split(busy(server), (holder("a", uid=uid),)))[:2] == (0.8, 10 * GIB)
    result = split(busy(process("a", 0.4, 2 * GIB), server), (holder("a", uid=uid),))
    assert parts_of(result.holders) == [(0.4, 2 * GIB, 160.0)]


def test_the_server_that_a_holder_runs_for_its_own_processes_is_in_its_part() -> None:
    result = split(busy(process("a", 0.4, GIB), process("a", 0.1, GIB, service="mps")), (holder("a"),))

    assert parts_of(result.holders) == [(0.5, 2 * GIB, 200.0)]


def test_the_only_pod_has_the_processes_of_one_pod_when_its_uid_is_not_known() -> None:
    result = split(busy(process("?", 0.4, GIB), process(None, 0.4, GIB)), (holder("a", uid=None),))

    assert parts_of(result.holders) == [(0.4, GIB, 160.0)]


@pytest.mark.parametrize(
    ("processes", "holders", "parts"),
    [
        ((process("1", 0.4), process("2", 0.4)), (holder("a", uid=None),), [None]),
        ((process("1", 0.4),), (holder("a", uid=None), holder("b", uid=None)), [None, None]),
        ((process("1", 0.4),), (holder("a", uid=None), holder("b")), [None, (0, None, None)]),
        (
            (process("1", 0.2), process("b", 0.4)),
            (holder("a", uid=None), holder("b"), holder("c", uid=None)),
            [None, (0.4, None, None), None],
        ),
    ],
    ids=["processes of two pods", "two pods", "one pod known", "one of three known"],
)
def test_what_may_belong_to_a_pod_whose_uid_is_not_known_is_no_zero_and_not_part_of_the_rest(
    processes: tuple[Process, ...], holders: tuple[Holder, ...], parts: list[tuple[Any, ...] | None]
) -> None:
    result = split(device(*processes, gpu_utilization_ratio=0.8), holders)

    assert parts_of(result.holders) == parts
    assert result.unattributed is None


@pytest.mark.parametrize("processes", [(), (process(None, 0.4),), (process("plugin", 0.4, service="mps"),)])
def test_pods_whose_uids_are_not_known_have_nothing_if_no_process_of_a_pod_runs(processes: tuple[Process, ...]) -> None:
    result = split(device(*processes, gpu_utilization_ratio=0.8), (holder("a", uid=None), holder("b", uid=None)))

    assert parts_of(result.holders) == [(0, None, None), (0, None, None)]
    assert result.unattributed == Parts(0.8)


# -- properties

_amounts = st.floats(0, 1e12, allow_subnormal=False) | st.integers(0, 1 << 50)
_ratios = st.floats(-0.5, 1.5, allow_subnormal=False)
_pods = st.sampled_from("abcx")
_processes = st.lists(
    st.builds(process, st.none() | _pods, st.none() | _ratios, st.none() | st.integers(0, 1 << 45)), max_size=8
)
_holders = st.lists(
    st.builds(holder, st.sampled_from("abc"), container=st.sampled_from("xyz"), uid=st.just("") | st.none()),
    min_size=1,
    max_size=5,
    unique_by=lambda h: (h.pod, h.container),
)
_metrics = st.fixed_dictionaries(
    {},
    optional={
        "gpu_utilization_ratio": st.floats(0, 1, allow_subnormal=False) | st.sampled_from((0, 1)),
        "memory_used_bytes": st.integers(0, 1 << 46),
        "power_watts": _amounts,
    },
)


@given(_metrics, _processes, _holders)
def test_the_parts_and_the_rest_are_the_device(
    metrics: dict[str, float], processes: list[Process], holders: list[Holder]
) -> None:
    result = split(device(*processes, **metrics), tuple(holders))
    assume(any(h.parts for h in result.holders))

    for part, metric in QUANTITIES.items():
        rest = getattr(result.unattributed, part, None)
        shares = [share for h in result.holders if (share := getattr(h.parts, part, None)) is not None]
        assert all(0 <= share <= metrics[metric] * (1 + 1e-9) for share in shares)
        if rest is not None:
            assert rest >= 0
            assert math.isclose(math.fsum([rest, *shares]), metrics[metric], rel_tol=1e-9, abs_tol=0)


@given(_metrics, _processes, _holders, st.randoms(use_true_random=False))
def test_neither_the_order_of_processes_nor_of_holders_matters(
    metrics: dict[str, float], processes: list[Process], holders: list[Holder], dice: random.Random
) -> None:
    result = split(device(*processes, **metrics), tuple(holders))
    dice.shuffle(processes)
    dice.shuffle(holders)
    reordered = split(device(*processes, **metrics), tuple(holders))

    assert {(h.pod, h.container): h.parts for h in result.holders} == {
        (h.pod, h.container): h.parts for h in reordered.holders
    }
    assert (result.unattributed, result.scaled) == (reordered.unattributed, reordered.scaled)


@given(_metrics, _processes, _holders)
def test_only_the_parts_of_holders_change(
    metrics: dict[str, float], processes: list[Process], holders: list[Holder]
) -> None:
    result = split(device(*processes, **metrics), tuple(holders))

    assert [msgspec.structs.replace(h, parts=None) for h in result.holders] == holders


_own_processes = st.lists(
    st.builds(process, st.just("a"), st.none() | _ratios | st.sampled_from((0, 0.0, 1)), st.none() | st.integers(0, 9)),
    max_size=4,
)


@example({"gpu_utilization_ratio": 1}, [process("a", ratio) for ratio in (0.3, 0.2, 0.1)])  # 0.6 only in this order
@given(_metrics, _own_processes)
def test_a_sole_holder_has_what_it_has_beside_one_that_does_nothing(
    metrics: dict[str, float], processes: list[Process]
) -> None:
    alone = split(device(*processes, **metrics), (holder("a"),))
    beside = split(device(*processes, **metrics), (holder("a"), holder("idle")))

    assert msgspec.json.encode((alone.holders[0], alone.unattributed, alone.scaled)) == msgspec.json.encode(
        (beside.holders[0], beside.unattributed, beside.scaled)
    )


_any_number = st.sampled_from([0, -0.0, 5e-324, 0.5, 1, 2**63 - 1, 2.0**63, 1e30, 1.7e308, -(2**63), -1.7e308])


@example(
    {"memory_used_bytes": 1e30}, [process("a", None, 2**63 - 1), process("a", None, 2**63 - 1)], [holder("a")]
)  # what both use together is no integer of a record
@given(
    st.dictionaries(st.sampled_from(sorted(QUANTITIES.values())), _any_number),
    st.lists(
        st.builds(process, st.none() | _pods, st.none() | _any_number, st.none() | st.integers(0, 2**63 - 1)),
        max_size=5,
    ),
    _holders,
)
def test_whatever_numbers_a_producer_writes_the_parts_can_be_read(
    metrics: dict[str, float], processes: list[Process], holders: list[Holder]
) -> None:
    result = split(device(*processes, **metrics), tuple(holders))

    assert msgspec.json.decode(msgspec.json.encode(result), type=Split) == result


# -- jobs of a batch system, on a node without a kubelet


def test_the_jobs_of_a_device_hold_it_by_their_parts_where_there_is_no_kubelet() -> None:
    jobs = (Job("41", "ana", "gpu", "vision"), Job("42"))
    processes = (
        Process(pid=1, job_id="41", memory_used_bytes=30, sm_utilization_ratio=0.6),
        Process(pid=2, job_id="42", memory_used_bytes=10, sm_utilization_ratio=0.2),
    )
    metrics: dict[str, float | int | None] = {"gpu_utilization_ratio": 0.9, "memory_used_bytes": 50}
    shared = Device("GPU-a", jobs=jobs, processes=processes, metrics=metrics)
    sample = msgspec.structs.replace(tick(1, None), devices=(shared, Device("GPU-b")))
    no_pods = ResolvedPods({}, frozenset(), None, {}, {}, frozenset())
    joined, _ = attribute(
        sample, facts_of(sample.devices, None), 1, 1, ResolvedSnapshot(None, "none", no_pods), {}, None
    )

    assert joined.sample.attribution == "exact"
    device, free = joined.sample.devices
    assert (free.holders, device.conflict) == ((), None)
    assert [(h.namespace, h.pod, h.pod_uid, h.workload) for h in device.holders] == [
        ("gpu", "41", "41", Workload("SlurmJob", "41")),
        ("slurm", "42", "42", Workload("SlurmJob", "42")),
    ]
    assert device.holders[0].labels == {"team": "vision", "user": "ana", "partition": "gpu"}
    parts = [*(holder.parts for holder in device.holders), device.unattributed]
    assert [part and (round(part.utilization_ratio or 0, 6), part.memory_used_bytes) for part in parts] == [
        (0.6, 30), (0.2, 10), (0.1, 10),
    ]  # fmt: skip
    assert device.processes == processes


def test_a_gpu_whose_jobs_are_not_known_is_not_said_to_be_free_because_another_has_one() -> None:
    devices = (Device("GPU-a", jobs=(Job("41"),)), Device("GPU-b", jobs=()), Device("GPU-c"))
    sample = msgspec.structs.replace(tick(1, None), devices=devices)
    no_pods = ResolvedPods({}, frozenset(), None, {}, {}, frozenset())
    joined, _ = attribute(
        sample, facts_of(sample.devices, None), 1, 1, ResolvedSnapshot(None, "none", no_pods), {}, None
    )
    assert joined.sample.attribution == "exact"
    assert [d.attribution for d in joined.sample.devices] == [None, None, "none"]


def test_a_node_without_jobs_and_a_kubelet_reports_no_holders() -> None:
    sample = msgspec.structs.replace(tick(1, None), devices=(Device("GPU-a"),))
    no_pods = ResolvedPods({}, frozenset(), None, {}, {}, frozenset())
    joined, _ = attribute(
        sample, facts_of(sample.devices, None), 1, 1, ResolvedSnapshot(None, "none", no_pods), {}, None
    )
    assert joined.sample.attribution == "none"
    free = msgspec.structs.replace(sample, devices=(Device("GPU-a", jobs=()),))
    joined, _ = attribute(free, facts_of(free.devices, None), 1, 1, ResolvedSnapshot(None, "none", no_pods), {}, None)
    assert joined.sample.attribution == "exact", "it is known that nobody has it"
