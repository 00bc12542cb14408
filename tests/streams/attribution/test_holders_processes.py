"""Processes that contradict the kubelet, and how ticks carry that and the parts."""

import msgspec
import pytest

from streams.attribution import join
from streams.attribution.holders import DeviceHolders, add_observed
from tests.streams.attribution.records import container, gpu, logged, pending, pod, snapshot, tick, workloads
from topics.attributed import AttributedDevice, Holder, Parts, Workload
from topics.samples import Device, Mig, Process
from topics.workloads import Owner, Pod

A = Holder("ns", "a", pod_uid="uid-a")
JOB = Owner("batch/v1", "Job", "train")
PODS = {f"uid-{name}": pod(name, labels={"app": name}, owners=(JOB,)) for name in "abc"}
METRICS: dict[str, int | float | None] = {"gpu_utilization_ratio": 0.5, "memory_used_bytes": 100, "power_watts": 200.0}


def process(pod_name: str | None, memory: int | None = 40, ratio: float | None = 0.25) -> Process:
    """A process of a pod, or of none."""
    uid = None if pod_name is None else f"uid-{pod_name}"
    return Process(1, pod_uid=uid, memory_used_bytes=memory, sm_utilization_ratio=ratio)


def holders_of(*processes: Process, holders: tuple[Holder, ...] = (A,), **info: str) -> DeviceHolders:
    """The holders of a GPU with these processes; the pods a, b and c are known."""
    return add_observed(Device(gpu(1), processes=processes, info=info), holders, PODS.get, {})


def names(evidence: DeviceHolders) -> list[tuple[str, bool]]:
    """The pods, and whether each was observed."""
    return [(holder.pod, holder.observed) for holder in evidence.holders]


def test_processes_of_the_holder_change_nothing() -> None:
    assert holders_of(process("a"), process("a")) == DeviceHolders((A,), None)


def test_a_pod_on_a_device_that_it_was_not_given_is_an_observed_holder_with_all_that_is_known() -> None:
    device = holders_of(process("a"), process("b"))

    assert device.conflict == "unallocated_process"
    assert device.holders == (
        A,
        Holder(
            "ns",
            "b",
            pod_uid="uid-b",
            workload=Workload("Job", "train"),
            job="train",
            labels={"app": "b"},
            observed=True,
        ),
    )


def test_a_pod_on_a_device_that_nobody_holds_is_shown() -> None:
    assert names(holders_of(process("b"), holders=())) == [("b", True)]
    assert holders_of(process("b"), holders=()).conflict == "unallocated_process"


def test_a_pod_was_given_the_mig_device_that_was_made_for_its_claim_and_its_processes_show_which_one() -> None:
    by_claim = {("ns", "b"): Holder("ns", "b", pod_uid="uid-b", container="main")}
    mig = Device("MIG-1", mig=Mig("MIG-1", gpu(1)), processes=(process("b"),))

    assert add_observed(mig, (), PODS.get, by_claim) == DeviceHolders((by_claim["ns", "b"],), None)
    with_another = msgspec.structs.replace(mig, processes=(process("b"), process("c")))
    assert names(add_observed(with_another, (), PODS.get, by_claim)) == [("b", False), ("c", True)]
    assert add_observed(with_another, (), PODS.get, by_claim).conflict == "unallocated_process"
    whole = Device(gpu(1), processes=(process("b"),))
    assert names(add_observed(whole, (), PODS.get, by_claim)) == [("b", True)]
    another_of_that_name = {("ns", "b"): Holder("ns", "b", pod_uid="uid-b-before", container="main")}
    assert names(add_observed(mig, (), PODS.get, another_of_that_name)) == [("b", True)]
    assert names(add_observed(mig, (A,), PODS.get, by_claim)) == [("a", False), ("b", True)]


def test_observed_holders_stand_in_one_order_each_once() -> None:
    assert names(holders_of(process("c"), process("b"), process("c"))) == [("a", False), ("b", True), ("c", True)]


def test_a_process_of_no_pod_on_a_device_that_pods_hold_is_a_conflict() -> None:
    assert holders_of(process(None), process("a")) == DeviceHolders((A,), "no_pod")


def test_a_process_of_a_pod_wins_over_one_without_a_pod() -> None:
    assert holders_of(process(None), process("b")).conflict == "unallocated_process"


def test_a_process_without_a_pod_on_a_device_that_nobody_holds_is_no_conflict() -> None:
    assert holders_of(process(None), holders=()) == DeviceHolders((), None)


@pytest.mark.parametrize("memory", [0, None])
@pytest.mark.parametrize("pod_name", ["b", None])
def test_a_process_without_memory_on_the_device_does_not_count(pod_name: str | None, memory: int | None) -> None:
    assert holders_of(process(pod_name, memory)) == DeviceHolders((A,), None)


@pytest.mark.parametrize("holders", [(A,), ()])
def test_a_pod_that_the_workloads_do_not_have_is_a_conflict_though_it_is_not_shown(holders: tuple[Holder, ...]) -> None:
    assert holders_of(process("z"), holders=holders) == DeviceHolders(holders, "unallocated_process")


def test_it_goes_before_a_process_of_no_pod() -> None:
    assert holders_of(process("z"), process(None)).conflict == "unallocated_process"


def test_it_may_be_a_holder_whose_uid_is_not_known() -> None:
    holders = (A, Holder("ns", "late"))

    assert holders_of(process("z"), holders=holders) == DeviceHolders(holders, None)
    assert holders_of(process("z"), process(None), holders=holders) == DeviceHolders(holders, "no_pod")


@pytest.mark.parametrize("pod_name", ["b", "z", None])
def test_an_mps_server_is_no_evidence_whoever_runs_it(pod_name: str | None) -> None:
    server = msgspec.structs.replace(process(pod_name), service="mps")

    assert holders_of(server) == DeviceHolders((A,), None)
    assert names(holders_of(server, process("b"))) == [("a", False), ("b", True)]


def test_a_static_pod_is_none_that_the_workloads_do_not_have() -> None:
    """Its control group names it otherwise than the API server does."""
    static = Process(1, pod_uid="0123456789abcdef" * 2, memory_used_bytes=40)

    assert holders_of(static) == DeviceHolders((A,), None)


def test_where_the_node_has_no_workloads_no_pod_is_one_that_they_do_not_have() -> None:
    device = Device(gpu(1), processes=(process("z"), process("b")))

    assert add_observed(device, (A,), None, {}) == DeviceHolders((A,), None)


def test_a_holder_whose_uid_is_not_known_is_known_by_its_name() -> None:
    nameless = Holder("ns", "b")

    assert holders_of(process("b"), holders=(nameless,)) == DeviceHolders((nameless,), None)


def test_where_processes_cannot_be_seen_there_is_no_evidence() -> None:
    assert holders_of(process("b"), process(None), processes_visible="false") == DeviceHolders((A,), None)
    assert add_observed(Device(gpu(1), processes=None), (A,), PODS.get, {}) == DeviceHolders((A,), None)


# -- in a tick


def joined(*processes: Process, named: int | None = 1, known_pods: tuple[Pod, ...] | None = None) -> AttributedDevice:
    """A GPU with these processes that the pods a and b hold by time-slicing, a twice."""
    shared = snapshot(1, container("a", f"{gpu(0)}::0", f"{gpu(0)}::2"), container("b", f"{gpu(0)}::1"))
    device = Device(
        gpu(0), index=0, metrics=METRICS, processes=processes, info={"serial": "7"}, xids={"79": 1}, read_ms=5
    )
    sample = msgspec.structs.replace(tick(1, named), devices=(device,))
    pods = tuple(PODS.values()) if known_pods is None else known_pods
    state = join.NEW
    records: list[join.Record] = [logged(workloads(1, *pods)), shared, pending(sample)]
    for record in records:
        state, joined_ticks = join.step(state, record, 10.0)
    return joined_ticks[0].sample.devices[0]


def test_two_pods_on_one_gpu_by_time_slicing_have_their_parts_and_one_twice_has_it_once() -> None:
    device = joined(process("a", 40, 0.25), process("b", 50, 0.125))

    assert [(h.pod, h.parts) for h in device.holders] == [("a", Parts(0.25, 40, 50.0)), ("b", Parts(0.125, 50, 25.0))]
    assert (device.unattributed, device.split_scaled, device.conflict) == (Parts(0.125, 10, 125.0), False, None)
    assert (device.info, device.xids, device.read_ms) == ({"serial": "7"}, {"79": 1}, 5)


def test_a_tick_says_what_was_scaled_and_who_was_observed() -> None:
    device = joined(process("a", 90), process("c", 90))

    assert [(h.pod, h.parts and h.parts.memory_used_bytes, h.observed) for h in device.holders] == [
        ("a", 50, False),
        ("b", 0, False),
        ("c", 50, True),
    ]
    assert (device.split_scaled, device.conflict) == (True, "unallocated_process")


def test_a_tick_without_a_kubelet_is_neither_divided_nor_contradicted() -> None:
    device = joined(process("a"), process("z"), named=None)

    assert (device.holders, device.unattributed, device.conflict) == ((), None, None)


def test_a_pod_that_had_ended_is_not_observed_but_a_conflict() -> None:
    ended_pods = (*[PODS[uid] for uid in ("uid-a", "uid-b")], pod("c", ended=-60_000))
    device = joined(process("c"), known_pods=ended_pods)

    assert ([h.pod for h in device.holders], device.conflict) == (["a", "b"], "unallocated_process")


def test_a_lost_gpu_has_the_holders_that_the_kubelet_still_says_and_is_not_divided() -> None:
    lost_gpu = Device(gpu(0), index=0, state="lost", info={"serial": "7"})
    sample = msgspec.structs.replace(tick(1, 1), devices=(lost_gpu,))
    state = join.NEW
    records: list[join.Record] = [logged(workloads(1, *PODS.values())), snapshot(1, container("a", gpu(0)))]
    for record in [*records, pending(sample)]:
        state, joined_ticks = join.step(state, record, 10.0)
    (device,) = joined_ticks[0].sample.devices

    assert [(h.pod, h.pod_uid, h.parts) for h in device.holders] == [("a", "uid-a", None)]
    assert (device.state, device.info, device.unattributed) == ("lost", {"serial": "7"}, None)
