"""The UUIDs of DRA devices are those of the newest generation of each pool."""

from typing import Any

from producers.cluster.slices import Slices, known
from tests.producers.cluster.made import slice_


def put(slices: Slices, name: str = "s", **how: Any) -> set[str]:
    part = slice_(name, **how)
    return slices.put(part.metadata.uid, known(part))


def devices(slices: Slices, node: str = "n1") -> list[tuple[str, str]]:
    return [(device.device, device.uuid) for device in slices.of_node(node)]


def test_each_device_has_the_uuid_that_its_slice_says() -> None:
    slices = Slices()
    assert put(slices, uuids=["GPU-a", "MIG-b"]) == {"n1"}

    assert devices(slices) == [("gpu-0", "GPU-a"), ("gpu-1", "MIG-b")]
    assert [(device.driver, device.pool) for device in slices.of_node("n1")] == [("gpu.nvidia.com", "n1")] * 2


def test_a_device_without_a_uuid_is_left_out() -> None:
    slices = Slices()
    put(slices, uuids=[None, "GPU-b", ""])

    assert devices(slices) == [("gpu-1", "GPU-b")]


def test_only_the_highest_generation_of_a_pool_counts() -> None:
    slices = Slices()
    put(slices, "old", uuids=["GPU-old"], generation=1)
    put(slices, "new", uuids=["GPU-new"], generation=2)
    assert devices(slices) == [("gpu-0", "GPU-new")]

    slices.remove("uid-new")
    assert devices(slices) == [("gpu-0", "GPU-old")]


def test_a_pool_may_have_several_slices_and_a_node_several_pools() -> None:
    slices = Slices()
    put(slices, "a", uuids=["GPU-a"])
    put(slices, "b", uuids=[None, "GPU-b"])
    put(slices, "c", uuids=["GPU-c"], pool="other")

    assert {uuid for _, uuid in devices(slices)} == {"GPU-a", "GPU-b", "GPU-c"}


def test_the_devices_of_one_slice_may_be_of_several_nodes() -> None:
    part = slice_(node=None, pool="shared")
    spread = part.spec.devices or []
    by_node = [type(device)(device.name, device.attributes, f"n{number}") for number, device in enumerate(spread)]
    spread[:] = by_node
    slices = Slices()
    slices.put("u", known(part))

    assert [devices(slices, node) for node in ("n0", "n1")] == [[("gpu-0", "GPU-a")], [("gpu-1", "GPU-b")]]


def test_a_slice_that_moves_changes_both_nodes() -> None:
    slices = Slices()
    put(slices, node="n1")

    assert put(slices, node="n2") == {"n1", "n2"}
    assert (devices(slices, "n1"), len(devices(slices, "n2"))) == ([], 2)
    assert put(slices, node="n2") == set()


def test_slices_that_a_full_list_does_not_have_are_gone() -> None:
    slices = Slices()
    put(slices, "a", uuids=["GPU-a"], node="n1")
    put(slices, "b", uuids=["GPU-b"], node="n2")
    slices.begin()
    put(slices, "b", uuids=["GPU-b"], node="n2")

    assert slices.complete() == {"n1"}
    assert (devices(slices, "n1"), len(slices)) == ([], 1)
    assert slices.remove("never-there") == set()
