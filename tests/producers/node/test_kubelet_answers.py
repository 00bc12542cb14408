"""The holders of devices are read from a kubelet's answer, and a malformed answer is an error."""

import contextlib
import tomllib
from pathlib import Path

import msgspec
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from producers.node import podresources_pb2, pods_pb2
from producers.node.kubelet import UndecodableAnswer, containers
from producers.node.podresources_pb2 import ContainerDevices, ContainerResources, PodResources
from producers.records import containers_content
from tests.producers.node.pod_resources import (
    GPU_A,
    GPU_B,
    INVALID_UTF8,
    answer,
    claiming,
    container,
    many,
    pod,
    pods_on,
)
from topics.allocations import Container

ROOT = Path(__file__).parents[3]
PROTOS = {"podresources": podresources_pb2, "pods": pods_pb2}
NVIDIA = ("nvidia.com/",)


def test_each_container_and_resource_is_a_row() -> None:
    payload = answer(
        pod("bert-0", container("pytorch", gpus=[GPU_A, GPU_B]), container("sidecar")),
        pod("bert-1", container("pytorch", **{"nvidia.com/gpu.shared": [f"{GPU_A}::3"], "nvidia.com/gpu": [GPU_B]})),
    )
    assert containers(payload, NVIDIA) == [
        {"namespace": "ml-team", "pod": "bert-0", "container": "pytorch", "resource": "nvidia.com/gpu"}
        | {"device_ids": [GPU_A, GPU_B]},
        {"namespace": "ml-team", "pod": "bert-1", "container": "pytorch", "resource": "nvidia.com/gpu.shared"}
        | {"device_ids": [f"{GPU_A}::3"]},
        {"namespace": "ml-team", "pod": "bert-1", "container": "pytorch", "resource": "nvidia.com/gpu"}
        | {"device_ids": [GPU_B]},
    ]


def test_devices_that_are_listed_by_numa_node_are_one_row_with_each_device_once() -> None:
    by_node = [ContainerDevices(resource_name="nvidia.com/gpu", device_ids=ids) for ids in ([GPU_B], [GPU_A, GPU_B])]
    payload = answer(pod("bert-0", ContainerResources(name="main", devices=by_node)))
    assert [row["device_ids"] for row in containers(payload, NVIDIA)] == [[GPU_B, GPU_A]]


def test_claims_are_a_row_of_their_own_without_a_resource() -> None:
    payload = answer(
        pod("bert-0", claiming("main", "gpus", ("gpu.nvidia.com", "n", "gpu-1"), ("gpu.nvidia.com", "n", "gpu-0")))
    )
    claim = {"claim": "gpus", "namespace": "ml-team", "driver": "gpu.nvidia.com", "pool": "n"}
    assert containers(payload, NVIDIA) == [
        {"namespace": "ml-team", "pod": "bert-0", "container": "main"}
        | {"claims": [{**claim, "device": "gpu-0"}, {**claim, "device": "gpu-1"}]}
    ]


@pytest.mark.parametrize(
    ("driver", "prefix", "counts"),
    [
        ("gpu.nvidia.com", "nvidia.com/", True),
        ("nvidia.com", "nvidia.com/", True),
        ("gpu.nvidia.com", "nvidia.com/gpu", True),
        ("gpu.notnvidia.com", "nvidia.com/", False),
        ("notnvidia.com", "nvidia.com/", False),
        ("nvidia.com.example.org", "nvidia.com/", False),
        ("gpu.amd.com", "nvidia.com/", False),
        ("", "nvidia.com/", False),
    ],
)
def test_a_claim_counts_if_its_driver_is_of_the_domain_of_a_prefix(driver: str, prefix: str, counts: bool) -> None:
    payload = answer(pod("bert-0", claiming("main", "gpus", (driver, "n", "gpu-0"))))
    assert bool(containers(payload, (prefix,))) is counts


def test_only_resources_of_the_prefixes_count() -> None:
    payload = answer(pod("p", container("c", **{"amd.com/gpu": ["a"], "nvidia.com/gpu": [GPU_A], "rdma/hca": ["m"]})))
    assert [row["resource"] for row in containers(payload, NVIDIA)] == ["nvidia.com/gpu"]
    assert [row["resource"] for row in containers(payload, ("amd.com/gpu", "rdma/"))] == ["amd.com/gpu", "rdma/hca"]


def test_containers_without_devices_are_left_out() -> None:
    assert containers(answer(pod("p", container("c"), container("d", gpus=[])), pod("q")), NVIDIA) == []
    assert containers(b"", NVIDIA) == []


def test_unknown_fields_of_a_newer_kubelet_are_skipped() -> None:
    cpus_and_memory = b"\x1a\x02\x01\x02" + b"\x22\x02\x0a\x00"
    extra = ContainerResources.FromString(container(gpus=[GPU_A]).SerializeToString() + cpus_and_memory)
    assert containers(answer(pod("p", extra)) + b"\x9a\x06\x01x", NVIDIA) == containers(pods_on({GPU_A: "p"}), NVIDIA)


@pytest.mark.parametrize(
    "payload",
    [
        answer(PodResources(name="", namespace="n", containers=[container(gpus=[GPU_A])])),
        answer(PodResources(name="p", namespace="", containers=[container(gpus=[GPU_A])])),
        answer(pod("p", container("", gpus=[GPU_A]))),
        answer(pod("p", claiming("", "gpus", ("gpu.nvidia.com", "n", "gpu-0")))),
    ],
)
def test_an_answer_with_devices_of_nobody_is_malformed(payload: bytes) -> None:
    with pytest.raises(UndecodableAnswer, match="has no name"):
        containers(payload, NVIDIA)


def test_names_are_required_only_with_devices() -> None:
    assert containers(answer(pod("", container(""))), NVIDIA) == []


@pytest.mark.parametrize("payload", [b"\xff", b"hello", INVALID_UTF8, pods_on({GPU_A: "bert-0"})[:-1]])
def test_a_malformed_answer_is_undecodable(payload: bytes) -> None:
    with pytest.raises(UndecodableAnswer):
        containers(payload, NVIDIA)


@given(st.binary() | st.builds(lambda cut: many(3)[cut:], st.integers(0, 100)))
def test_any_bytes_are_containers_or_undecodable(payload: bytes) -> None:
    with contextlib.suppress(UndecodableAnswer):
        msgspec.convert(containers(payload, NVIDIA), list[Container])


IDS = st.lists(st.sampled_from([GPU_A, GPU_B, "nvidia0", "x"]), max_size=3)
RESOURCES = st.sampled_from(["nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "rdma/hca"])
NAMES = st.sampled_from(["a", "b"])


@given(st.lists(st.tuples(NAMES, NAMES, NAMES, RESOURCES, IDS)))
def test_every_device_is_in_the_row_of_its_holder_and_no_other(
    payload: list[tuple[str, str, str, str, list[str]]],
) -> None:
    pods = [pod(p, container(c, **{r: ids}), namespace=n) for n, p, c, r, ids in payload]
    rows = containers(answer(*pods), NVIDIA)

    expected = {(n, p, c, r, i) for n, p, c, r, ids in payload if r.startswith("nvidia.com/") for i in ids}
    actual = [(r["namespace"], r["pod"], r["container"], r["resource"], i) for r in rows for i in r["device_ids"]]
    assert set(actual) == expected
    assert len(actual) == len(expected)
    assert len({row[:4] for row in actual}) == len(rows)
    assert containers_content(rows) == containers_content(containers(answer(*reversed(pods)), NVIDIA))


# -- the generated module


@pytest.mark.parametrize("name", PROTOS)
def test_the_generated_module_is_that_of_its_proto(name: str, tmp_path: Path) -> None:
    proto = str(ROOT / "producers" / "node" / f"{name}.proto")
    assert protoc.main(["protoc", f"-I{ROOT}", f"--descriptor_set_out={tmp_path / 'set'}", proto]) == 0
    compiled = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes())
    for field in (field for message in compiled.file[0].message_type for field in message.field):
        field.ClearField("json_name")  # generated modules have no json_name
    assert list(compiled.file) == [descriptor_pb2.FileDescriptorProto.FromString(PROTOS[name].DESCRIPTOR.serialized_pb)]


@pytest.mark.parametrize("name", PROTOS)
def test_the_oldest_protobuf_that_is_allowed_can_run_the_generated_module(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = map(Requirement, project["dependencies"])
    allowed = next(requirement for requirement in requirements if requirement.name == "protobuf")
    module = (ROOT / "producers" / "node" / f"{name}_pb2.py").read_text()
    made_for = module.partition("Protobuf Python Version: ")[2].split()[0]
    assert made_for in allowed.specifier
    assert {specifier.version for specifier in allowed.specifier if specifier.operator == ">="} == {made_for}
