"""What labels a device's series carry."""

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.series.labels import (
    DEVICE_LABELS,
    MAX_LABELS,
    MAX_VALUE_BYTES,
    ROW_LABELS,
    DeviceIdentity,
    HolderIdentity,
    NodeIdentity,
    device_identity,
    labels,
    labels_without_room,
    node_of,
    pod_info_labels,
    sanitised,
    sole_holder,
    tenant_labels,
)
from sinks.series.tick import SeriesDevice, SeriesTick
from tests.topics.records import own_labels
from topics.attributed import Holder, Workload, by_pod, holder_of_job, pods_of
from topics.profiles import LABELS, PROFILES, ProfileName
from topics.samples import Job

NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")

NODE = NodeIdentity("prod", "n1")
FULL = DeviceIdentity(
    NodeIdentity("prod", "n1", "us-east-1a", "us-east-1", "p5.48xlarge"),
    "MIG-1",
    "GPU-a",
    0,
    0,
    "nvidia",
    "H100",
    "00000000:0A:00.0",
    "1g.10gb",
    7,
    HolderIdentity(
        "ml",
        "bert-0",
        "u1",
        "main",
        "job",
        None,
        None,
        Workload("Job", "job"),
        tuple(tenant_labels({"app": "bert"}, {"team": "ml"})),
    ),
    Job("12345", "ada", "gpu", "ml"),
)
"""A device of which everything is known."""

MIG = {"uuid": "MIG-1", "parent_uuid": "GPU-a", "gpu_instance": 7, "compute_instance": 0, "profile": "1g.10gb"}
BERT = {
    "namespace": "ml-team",
    "pod": "bert-0",
    "pod_uid": "u1",
    "container": "pytorch",
    "job": "bert",
    "workload": {"kind": "CronJob", "name": "nightly"},
}


def labels_of(label_set: Any, *holders: dict[str, Any], **fields: Any) -> dict[str, str]:
    content = {
        "uuid": "GPU-a",
        "index": 3,
        "minor": 4,
        "model": "H100",
        "pci_bus_id": "00000000:0A:00.0",
        **fields,
    }
    series_device = msgspec.convert(content, SeriesDevice)
    job = series_device.jobs[0] if series_device.jobs and len(series_device.jobs) == 1 else None
    pods = pods_of(msgspec.convert(holders, tuple[Holder, ...]))
    return dict(labels(LABELS[label_set], device_identity(NODE, series_device, sole_holder(pods))._replace(job=job)))


def test_otel_names_the_device_its_holder_and_the_owner_of_the_pod() -> None:
    assert labels_of("otel", BERT) == {
        "k8s_cluster_name": "prod",
        "k8s_node_name": "n1",
        "host_name": "n1",
        "service_name": "gpustream",
        "gpu_vendor": "nvidia",
        "gpu_index": "3",
        "gpu_uuid": "GPU-a",
        "gpu_model": "H100",
        "k8s_namespace_name": "ml-team",
        "k8s_pod_name": "bert-0",
        "k8s_pod_uid": "u1",
        "k8s_container_name": "pytorch",
        "k8s_job_name": "bert",
        "k8s_workload_kind": "CronJob",
        "k8s_workload_name": "nightly",
    }


def test_dcgm_has_what_dashboards_of_a_scraped_exporter_filter_by() -> None:
    assert labels_of("dcgm", BERT) == {
        "gpu": "3",
        "UUID": "GPU-a",
        "pci_bus_id": "00000000:0A:00.0",
        "device": "nvidia4",
        "modelName": "H100",
        "hostname": "n1",
        "instance": "n1:9400",
        "cluster": "prod",
        "namespace": "ml-team",
        "pod": "bert-0",
        "container": "pytorch",
    }


def test_pod_devices_has_its_five_labels_and_nothing_else() -> None:
    five = {"gpu": "3", "uuid": "GPU-a", "pod_namespace": "ml-team", "pod_name": "bert-0", "container_name": "pytorch"}
    assert labels_of("pod-devices", BERT) == five
    assert labels_of("dcgm-legacy", BERT) == {**five, "node": "n1", "cluster": "prod"}


@pytest.mark.parametrize(
    ("label_set", "expected"),
    [
        ("otel", {"gpu_uuid": "GPU-a", "gpu_mig_uuid": "MIG-1", "gpu_mig_profile": "1g.10gb"}),
        ("dcgm", {"UUID": "GPU-a", "GPU_I_PROFILE": "1g.10gb", "GPU_I_ID": "7"}),
        ("dcgm-legacy", {"uuid": "MIG-1"}),
        ("pod-devices", {"uuid": "MIG-1"}),
    ],
)
def test_a_mig_device_is_distinguished_from_its_gpu(label_set: Any, expected: dict[str, str]) -> None:
    mig_labels = labels_of(label_set, uuid="MIG-1", mig=MIG)
    assert {name: mig_labels.get(name) for name in expected} == expected


@pytest.mark.parametrize("label_set", LABELS)
def test_a_device_that_several_pods_hold_carries_no_holder_labels(label_set: Any) -> None:
    assert labels_of(label_set, BERT, {**BERT, "pod": "bert-1", "pod_uid": "u2"}) == labels_of(label_set)
    assert labels_of(label_set, BERT, {**BERT, "pod_uid": "u2"}) == labels_of(label_set)


@pytest.mark.parametrize("label_set", LABELS)
def test_a_pod_that_only_its_processes_show_is_a_holder_as_any_other(label_set: Any) -> None:
    other = {**BERT, "pod": "bert-1", "pod_uid": "u2", "observed": True}
    pod = {"otel": "k8s_pod_name", "dcgm": "pod", "dcgm-4.9": "pod"}.get(label_set, "pod_name")

    assert labels_of(label_set, BERT, other) == labels_of(label_set)
    assert labels_of(label_set, other)[pod] == "bert-1"


def test_two_containers_of_one_pod_are_one_holder_without_a_container() -> None:
    both = labels_of("otel", BERT, {**BERT, "container": "sidecar"})
    assert both == {name: value for name, value in labels_of("otel", BERT).items() if name != "k8s_container_name"}


def test_one_container_that_holds_a_device_twice_keeps_its_name() -> None:
    assert labels_of("otel", BERT, {**BERT, "resource": "nvidia.com/gpu.shared"}) == labels_of("otel", BERT)


def test_at_most_one_owner_label_is_set() -> None:
    pod_labels = labels_of("otel", {**BERT, "statefulset": "s", "deployment": "d"})
    assert [name for name in pod_labels if name in {"k8s_job_name", "k8s_statefulset_name", "k8s_deployment_name"}] == [
        "k8s_job_name"
    ]


def test_a_device_without_holders_has_no_sole_holder() -> None:
    assert sole_holder({}) is None
    assert "k8s_pod_name" not in labels_of("otel")


def test_a_value_is_cut_at_a_character_and_lone_surrogates_are_replaced() -> None:
    assert sanitised("a" * 5000) == "a" * MAX_VALUE_BYTES
    assert sanitised("é" * 5000) == "é" * (MAX_VALUE_BYTES // 2)
    assert sanitised("x" + "é" * 5000) == "x" + "é" * ((MAX_VALUE_BYTES - 1) // 2)
    assert sanitised("a\ud800b") == "a?b"
    assert sanitised('a\n\t"\\\0b') == 'a\n\t"\\\0b'


TEXT = st.text(st.characters(), max_size=40) | st.just("x" * 2000)
TEXT_OR_NONE = st.none() | TEXT
TENANT = st.dictionaries(TEXT, TEXT, max_size=40)
WORKLOAD = st.none() | st.builds(Workload, kind=TEXT, name=TEXT)
TENANTS = st.tuples(TENANT, TENANT).map(lambda labels: tuple(tenant_labels(*labels)))
HOLDERS = st.builds(
    HolderIdentity, TEXT, TEXT, TEXT_OR_NONE, TEXT_OR_NONE, TEXT_OR_NONE, TEXT_OR_NONE, TEXT_OR_NONE, WORKLOAD, TENANTS
)
JOB = st.none() | st.builds(Job, id=TEXT, user=TEXT_OR_NONE, partition=TEXT_OR_NONE)
NUMBER = st.none() | st.integers(0, 200)
NODES = st.builds(NodeIdentity, TEXT, TEXT, TEXT_OR_NONE, TEXT_OR_NONE, TEXT_OR_NONE)
DEVICE = st.builds(
    DeviceIdentity,
    NODES,
    TEXT,
    TEXT_OR_NONE,
    NUMBER,
    NUMBER,
    TEXT,
    TEXT_OR_NONE,
    TEXT_OR_NONE,
    TEXT_OR_NONE,
    NUMBER,
    st.none() | HOLDERS,
    JOB,
)


@given(DEVICE, st.sampled_from(list(LABELS)))
def test_labels_are_sorted_and_none_is_repeated_or_empty_whatever_the_device_says(
    device: DeviceIdentity, label_set: Any
) -> None:
    label_pairs = labels(LABELS[label_set], device)
    names = [name for name, _ in label_pairs]
    assert names == sorted(set(names))
    assert all(NAME.match(name) for name in names)
    assert all(0 < len(value.encode()) <= MAX_VALUE_BYTES for _, value in label_pairs)
    assert len(label_pairs) + ROW_LABELS <= MAX_LABELS


@given(
    st.lists(
        st.builds(Holder, namespace=st.sampled_from("ab"), pod=st.sampled_from("pq"), container=st.sampled_from("cd")),
        max_size=4,
    )
)
def test_the_sole_holder_is_of_the_only_pod_there_is(holders: list[Holder]) -> None:
    pods = {(holder.namespace, holder.pod) for holder in holders}
    holder = sole_holder(by_pod(holders))
    assert (holder is not None) == (len(pods) == 1)
    if holder is not None:
        containers = {holder.container for holder in holders}
        assert holder.container == (containers.pop() if len(containers) == 1 else None)


@pytest.mark.parametrize("profile", PROFILES)
def test_no_label_of_a_device_is_one_that_distinguishes_series_of_a_name(profile: ProfileName) -> None:
    for names in LABELS.values():
        assert not {name for name, _ in labels(names, FULL)} & (own_labels(profile) | {"__name__"})


def test_a_node_has_labels_of_its_location() -> None:
    record = SeriesTick(
        schema=1,
        cluster="prod",
        node="n1",
        run_id=1,
        seq=1,
        ts_ms=1,
        offset=0,
        attribution="exact",
        node_labels={
            "topology.kubernetes.io/zone": "us-east-1a",
            "topology.kubernetes.io/region": "us-east-1",
            "node.kubernetes.io/instance-type": "p5.48xlarge",
        },
    )
    location = {"cloud_availability_zone": "us-east-1a", "cloud_region": "us-east-1", "host_type": "p5.48xlarge"}

    assert node_of(record) == FULL.node
    assert location.items() <= dict(labels(LABELS["otel"], FULL)).items()


def test_the_job_of_a_device_is_named_if_there_is_one() -> None:
    job, other = {"id": "12345", "user": "ada", "partition": "gpu", "account": "ml"}, {"id": "2"}
    jobs = {"job_id": "12345", "job_user": "ada", "job_partition": "gpu", "job_account": "ml"}

    assert jobs.items() <= labels_of("otel", jobs=[job]).items()
    assert labels_of("otel", jobs=[job, other]) == labels_of("otel")
    assert labels_of("dcgm", jobs=[job]) == labels_of("dcgm")


@pytest.mark.parametrize("label_set", LABELS)
def test_a_batch_job_that_holds_a_device_has_no_labels_of_a_pod(label_set: Any) -> None:
    job = Job("12345", "ada", "gpu", "ml")
    holder = msgspec.to_builtins(holder_of_job(job))
    assert labels_of(label_set, holder, jobs=[msgspec.to_builtins(job)]) == labels_of(
        label_set, jobs=[msgspec.to_builtins(job)]
    )


def test_what_tenants_wrote_is_on_the_series() -> None:
    pod_labels = labels_of(
        "otel", {**BERT, "labels": {"app.kubernetes.io/name": "bert"}, "namespace_labels": {"team": "ml"}}
    )

    assert pod_labels["k8s_pod_label_app_kubernetes_io_name"] == "bert"
    assert pod_labels["k8s_namespace_label_team"] == "ml"


def test_a_series_has_at_most_so_many_labels_and_its_pods_info_has_the_rest() -> None:
    tenant = {f"key-{n:02}": f"value {n}" for n in range(24)}
    holder = FULL._replace(
        holder=FULL.holder._replace(tenant_labels=tuple(tenant_labels(tenant, {}))) if FULL.holder else None
    )
    assert holder.holder is not None
    series, info = dict(labels(LABELS["otel"], holder)), dict(pod_info_labels(holder.node, holder.holder))
    written_names = {f"k8s_pod_label_key_{n:02}" for n in range(24)}

    assert len(series) + ROW_LABELS == MAX_LABELS
    assert len(info) + 1 <= MAX_LABELS
    assert written_names - set(series) <= set(info)
    assert len(labels(LABELS["otel"], holder, 100)) == DEVICE_LABELS + 24


@pytest.mark.parametrize(("number", "lost_labels"), [(0, 0), (10, 0), (24, 0), (40, 16)])
def test_what_is_on_no_series_is_counted(number: int, lost_labels: int) -> None:
    tenants = tenant_labels({f"key-{n:02}": "v" for n in range(number)}, {})
    pod = FULL.holder._replace(tenant_labels=tuple(tenants)) if FULL.holder else None
    assert pod is not None
    info, series = pod_info_labels(FULL.node, pod), labels(LABELS["otel"], FULL._replace(holder=pod))
    written_names = {name for name, _ in (*info, *series) if name.startswith("k8s_pod_label_")}

    assert number - len(written_names) == labels_without_room(pod, info, MAX_LABELS) == lost_labels


def test_no_device_has_more_labels_of_its_own_than_is_reckoned_with() -> None:
    bare = FULL._replace(holder=FULL.holder._replace(tenant_labels=()) if FULL.holder else None)

    assert len(labels(LABELS["otel"], bare)) == DEVICE_LABELS


def test_keys_that_become_one_name_are_distinguished() -> None:
    names = tenant_labels({"a-b": "1", "a.b": "2", "a/b": "", "c": "3"}, {"a-b": "4"})

    assert names == [
        ("k8s_pod_label_c", "3"),
        ("k8s_pod_label_a_b_conflict1", "1"),
        ("k8s_pod_label_a_b_conflict2", "2"),
        ("k8s_namespace_label_a_b", "4"),
    ]
