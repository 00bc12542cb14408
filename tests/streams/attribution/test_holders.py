"""Who holds each device: every form of device id, every chain of owners."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.attribution.holders import holders_by_snapshot
from streams.attribution.workloads import DraKey
from tests.streams.attribution.records import container, gpu, pod, snapshot
from topics.allocations import Claim, Container
from topics.attributed import Holder, Workload, pods_of
from topics.samples import Device, Mig
from topics.workloads import Owner

A, B = gpu(0xA), gpu(0xB)
MIG_1 = "MIG-00000001-0000-4000-8000-000000000000"
MIG_2 = "MIG-00000002-0000-4000-8000-000000000000"
DEVICES = (
    Device(A, index=0, minor=1),
    Device(B, index=1, minor=0),
    Device(MIG_1, index=1, minor=0, mig=Mig(MIG_1, B, gpu_instance=7, compute_instance=0)),
    Device(MIG_2, index=1, minor=0, mig=Mig(MIG_2, B, gpu_instance=8, compute_instance=3)),
)


def pods_by_device(*containers: Container, devices: tuple[Device, ...] = DEVICES) -> dict[str, list[str]]:
    """The pods that hold each device."""
    result = holders_by_snapshot(snapshot(1, *containers), devices, {}, {})
    return {uuid: [holder.pod for holder in holders] for uuid, holders in result.by_uuid.items()}


def claiming(pod_name: str, *keys: DraKey) -> Container:
    """A container that got devices through resource claims."""
    claims = tuple(Claim("claim", "ns", *key) for key in keys)
    return Container("ns", pod_name, "main", claims=claims)


# -- uids that the kubelet says


def test_the_kubelets_uid_is_the_holders_whatever_pod_has_that_name_elsewhere() -> None:
    listed = msgspec.structs.replace(container("p", A), pod_uid="uid-2")
    name = (listed.namespace, "p")

    for pods in ({}, {name: None}, {name: pod("p", uid="uid-1")}, {name: pod("p", uid="uid-2")}):
        (holder,) = holders_by_snapshot(snapshot(1, listed), DEVICES, pods, {}).by_uuid[A]
        assert holder.pod_uid == "uid-2"
        assert (holder.workload is not None) == (pods.get(name) == pod("p", uid="uid-2"))


# -- device ids


@pytest.mark.parametrize(
    ("device_id", "uuid"),
    [
        (A, A),
        (f"GPU-{A[4:].upper()}", A),
        (f"{A}::0", A),
        (f"{A}::17", A),
        (f"{A}-3", A),
        (MIG_1, MIG_1),
        (f"{MIG_1}::2", MIG_1),
        (f"MIG-{B}/7/0", MIG_1),
        (f"MIG-{B}/8/3", MIG_2),
        ("nvidia0", B),
        ("nvidia1", A),
        ("nvidia1/vgpu4", A),
        ("nvidia0/gi7", MIG_1),
        ("nvidia0/gi7/vgpu1", MIG_1),
    ],
)
def test_every_form_of_id_finds_its_device(device_id: str, uuid: str) -> None:
    assert pods_by_device(container("p", device_id)) == {uuid: ["p"]}


@pytest.mark.parametrize(
    "device_id", [gpu(99), f"{gpu(99)}::1", "nvidia9", "nvidia1/gi7", f"MIG-{A}/7/0", f"MIG-{B}/7/1", "nvidia0/gi8"]
)
def test_a_device_that_the_tick_does_not_have_is_nobodys_and_no_error(device_id: str) -> None:
    result = holders_by_snapshot(snapshot(1, container("p", device_id)), DEVICES, {}, {})

    assert result.by_uuid == {}
    assert result.unknown_ids == ()


def test_a_number_means_the_index_if_the_tick_has_no_minor_number() -> None:
    assert pods_by_device(container("p", "nvidia1"), devices=(Device(A, index=0), Device(B, index=1))) == {B: ["p"]}


@pytest.mark.parametrize("device_id", ["", "tpu-3", "GPU-0", f"{A}::", f"{A}::x", "nvidia", "nvidia01", f"{A}\n", "é"])
def test_ids_in_no_grammar_are_reported_and_the_rest_kept(device_id: str) -> None:
    result = holders_by_snapshot(
        snapshot(1, container("p", A, device_id, B), container("q", device_id, A)), DEVICES, {}, {}
    )

    assert result.unknown_ids == (device_id, device_id)
    assert {uuid: [h.pod for h in holders] for uuid, holders in result.by_uuid.items()} == {A: ["p", "q"], B: ["p"]}


# -- one holder a container and device


@pytest.mark.parametrize("ids", [(A, A), (f"{A}::0", f"{A}::1"), (A, f"{A}::3"), (f"{A}-0", f"{A}-1"), ("nvidia1", A)])
def test_a_container_with_several_shares_of_a_device_holds_it_once(ids: tuple[str, ...]) -> None:
    assert pods_by_device(container("p", *ids)) == {A: ["p"]}


def test_a_container_that_the_kubelet_names_per_resource_holds_a_device_once() -> None:
    assert pods_by_device(container("p", f"{A}::0"), container("p", f"{A}::1", B)) == {A: ["p"], B: ["p"]}


def test_a_device_under_two_resources_is_held_under_the_first() -> None:
    shared = Container("ns", "p", "main", resource="nvidia.com/gpu.shared", device_ids=(f"{A}::1",))

    holders = holders_by_snapshot(snapshot(1, container("p", A), shared), DEVICES, {}, {}).by_uuid[A]

    assert [holder.resource for holder in holders] == ["nvidia.com/gpu"]


def test_two_containers_of_a_pod_are_two_holders() -> None:
    assert pods_by_device(container("p", A, name="x"), container("p", A, name="y")) == {A: ["p", "p"]}


def test_pods_of_one_name_in_two_namespaces_are_two_holders() -> None:
    assert pods_by_device(container("p", A), container("p", A, namespace="other")) == {A: ["p", "p"]}


def test_holders_stand_in_the_order_of_the_snapshot() -> None:
    assert pods_by_device(*(container(name, f"{A}::{i}") for i, name in enumerate("zax"))) == {A: ["z", "a", "x"]}


def test_a_mig_device_and_its_parent_are_different_devices() -> None:
    assert pods_by_device(container("p", MIG_1), container("q", B), container("r", MIG_2)) == {
        MIG_1: ["p"],
        B: ["q"],
        MIG_2: ["r"],
    }


# -- resource claims


def test_a_claimed_device_is_found_by_its_slice() -> None:
    key = ("gpu.nvidia.com", "n", "gpu-0")

    result = holders_by_snapshot(
        snapshot(1, claiming("p", key)), DEVICES, {}, {key: A, ("gpu.nvidia.com", "n", "gpu-1"): B}
    )

    assert {uuid: [h.pod for h in holders] for uuid, holders in result.by_uuid.items()} == {A: ["p"]}


@pytest.mark.parametrize("other", [("x", "n", "gpu-0"), ("gpu.nvidia.com", "m", "gpu-0"), ("gpu.nvidia.com", "n", "x")])
def test_a_claim_of_another_driver_pool_or_device_is_another_device(other: DraKey) -> None:
    result = holders_by_snapshot(snapshot(1, claiming("p", other)), DEVICES, {}, {("gpu.nvidia.com", "n", "gpu-0"): A})

    assert (result.by_uuid, result.unknown_ids) == ({}, ())


def test_a_claimed_mig_device_and_an_id_of_the_same_make_one_holder() -> None:
    key = ("gpu.nvidia.com", "n", "gpu-1-mig-1g.10gb-0")
    both = Container("ns", "p", "main", device_ids=(MIG_1,), claims=claiming("p", key).claims)

    result = holders_by_snapshot(snapshot(1, both), DEVICES, {}, {key: MIG_1})

    assert [(uuid, len(holders)) for uuid, holders in result.by_uuid.items()] == [(MIG_1, 1)]


def test_a_claim_may_be_to_a_device_that_was_made_for_it_if_its_driver_has_others_and_it_does_not_only_look() -> None:
    known, made = ("gpu.nvidia.com", "n", "gpu-0"), ("gpu.nvidia.com", "n", "gpu-1-mig-1g10gb-0")
    channel = ("compute-domain.nvidia.com", "n", "channel-0")
    listed = snapshot(1, claiming("p", known, made), claiming("q", known, channel), claiming("r", known))
    admin = frozenset(claiming("p", made).claims)

    assert [*holders_by_snapshot(listed, DEVICES, {}, {known: A}).by_claim] == [("ns", "p")]
    assert holders_by_snapshot(listed, DEVICES, {}, {known: A}, admin=admin).by_claim == {}


def test_a_slice_that_says_no_uuid_is_reported() -> None:
    key = ("gpu.nvidia.com", "n", "gpu-0")

    assert holders_by_snapshot(snapshot(1, claiming("p", key)), DEVICES, {}, {key: "?"}).unknown_ids == ("?",)


# -- owners

RS = Owner("apps/v1", "ReplicaSet", "web-5d9")
DEPLOYMENT = Owner("apps/v1", "Deployment", "web")
JOB = Owner("batch/v1", "Job", "train-1")
CRON_JOB = Owner("batch/v1", "CronJob", "train")
STATEFUL_SET = Owner("apps/v1", "StatefulSet", "db")
DAEMON_SET = Owner("apps/v1", "DaemonSet", "dcgm")
RAY = (Owner("ray.io/v1", "RayCluster", "rc-1"), Owner("ray.io/v1", "RayJob", "rj"))
JOB_SET = Owner("jobset.x-k8s.io/v1alpha2", "JobSet", "js")
VOLCANO = Owner("batch.volcano.sh/v1alpha1", "Job", "vj")
LWS = Owner("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "lws")
OTHER_STATEFUL_SET = Owner("apps.kruise.io/v1beta1", "StatefulSet", "kruise")


def holder_of(owners: tuple[Owner, ...]) -> Holder:
    pods = {("ns", "p"): pod("p", owners=owners)}
    return holders_by_snapshot(snapshot(1, container("p", A)), DEVICES, pods, {}).by_uuid[A][0]


@pytest.mark.parametrize(
    ("owners", "top", "names"),
    [
        ((), ("Pod", "p"), (None, None, None)),
        ((RS,), ("ReplicaSet", "web-5d9"), (None, None, None)),
        ((RS, DEPLOYMENT), ("Deployment", "web"), (None, None, "web")),
        ((JOB,), ("Job", "train-1"), ("train-1", None, None)),
        ((JOB, CRON_JOB), ("CronJob", "train"), ("train-1", None, None)),
        ((JOB, JOB_SET), ("JobSet", "js"), ("train-1", None, None)),
        ((STATEFUL_SET,), ("StatefulSet", "db"), (None, "db", None)),
        ((STATEFUL_SET, LWS), ("LeaderWorkerSet", "lws"), (None, "db", None)),
        ((STATEFUL_SET, DEPLOYMENT), ("Deployment", "web"), (None, "db", None)),
        ((DAEMON_SET,), ("DaemonSet", "dcgm"), (None, None, None)),
        (RAY, ("RayJob", "rj"), (None, None, None)),
        ((VOLCANO,), ("Job", "vj"), (None, None, None)),
        ((OTHER_STATEFUL_SET,), ("StatefulSet", "kruise"), (None, None, None)),
        ((Owner("v1", "ReplicationController", "rc"),), ("ReplicationController", "rc"), (None, None, None)),
    ],
    ids=lambda value: "-".join(o.kind for o in value) or None if value and isinstance(value[0], Owner) else None,
)
def test_the_workload_is_the_top_of_the_chain_and_the_nearest_controller_is_named(
    owners: tuple[Owner, ...], top: tuple[str, str], names: tuple[str | None, ...]
) -> None:
    holder = holder_of(owners)

    assert holder.workload == Workload(*top)
    assert (holder.job, holder.statefulset, holder.deployment) == names


def test_a_pod_whose_owner_is_of_a_kind_named_like_that_of_batch_jobs_is_no_batch_job() -> None:
    holder = holder_of(
        (Owner("wlm.sylabs.io/v1alpha1", "SlurmJob", "4242"),)
    )  # there is such a kind; anybody may forge it

    assert holder.workload == Workload("SlurmJob.wlm.sylabs.io", "4242")
    assert list(pods_of([holder])) == [("ns", "p", "uid-p")]
    assert holder_of((Owner("v1", "SlurmJob", "4242"), CRON_JOB)).workload == Workload("CronJob", "train")


def test_a_chain_that_is_not_complete_names_no_workload_and_no_controller() -> None:
    known_pod = msgspec.structs.replace(pod("p", owners=(RS, DEPLOYMENT)), owners_complete=False)
    holder = holders_by_snapshot(snapshot(1, container("p", A)), DEVICES, {("ns", "p"): known_pod}, {}).by_uuid[A][0]

    assert (holder.workload, holder.job, holder.statefulset, holder.deployment) == (None, None, None, None)
    assert holder.pod == "p"


_OWNERS = st.sampled_from([RS, DEPLOYMENT, JOB, CRON_JOB, STATEFUL_SET, DAEMON_SET, *RAY, JOB_SET, VOLCANO])


@given(st.lists(_OWNERS, max_size=6).map(tuple))
def test_at_most_one_controller_is_named_and_it_is_of_the_chain(owners: tuple[Owner, ...]) -> None:
    holder = holder_of(owners)
    named = [name for name in (holder.job, holder.statefulset, holder.deployment) if name is not None]

    assert len(named) <= 1
    assert set(named) <= {owner.name for owner in owners}


def test_a_holder_has_its_pods_uid_labels_and_annotations() -> None:
    known_pod = pod("p", uid="u", labels={"app": "x"})

    holder = holders_by_snapshot(snapshot(1, container("p", A)), DEVICES, {("ns", "p"): known_pod}, {}).by_uuid[A][0]

    assert (holder.pod_uid, holder.labels, holder.resource) == ("u", {"app": "x"}, "nvidia.com/gpu")


def test_a_holder_whose_pod_is_not_known_has_its_names_and_nothing_else() -> None:
    holder = holders_by_snapshot(snapshot(1, container("p", A)), DEVICES, {}, {}).by_uuid[A][0]

    assert holder == Holder(namespace="ns", pod="p", container="main", resource="nvidia.com/gpu")


def test_a_holder_that_is_missing_from_the_workloads_is_marked_as_unknown() -> None:
    holder = holders_by_snapshot(snapshot(1, container("p", A)), DEVICES, {("ns", "p"): None}, {}).by_uuid[A][0]

    assert holder == Holder(namespace="ns", pod="p", container="main", resource="nvidia.com/gpu", pod_unknown=True)
    assert msgspec.json.decode(msgspec.json.encode(holder))["pod_unknown"] is True
