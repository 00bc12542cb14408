"""The UUIDs of DRA devices are those of the newest generation of each pool. A claim with admin access to a device is
remembered for as long as a kubelet may report it."""

from typing import Any

import msgspec
import pytest

from producers.cluster import objects
from producers.cluster.devices import AdminClaim, Claims, Slices, known_claim, known_slice
from producers.cluster.pods import KEPT_MS
from tests.producers.cluster.kubernetes_objects import claim, slice_, slice_json
from topics.allocations import Claim

POOL = ("gpu.nvidia.com", "n1")


def put_slice(slices: Slices, name: str = "s", **changes: Any) -> set[str]:
    part = slice_(name, **changes)
    return slices.put(part.metadata.uid, known_slice(part))


def slice_devices(slices: Slices, node: str = "n1") -> list[tuple[str, str]]:
    return [(device.device, device.uuid) for device in slices.of_node(node)]


def test_each_device_has_the_uuid_of_its_slice() -> None:
    slices = Slices()
    assert put_slice(slices, uuids=["GPU-a", "MIG-b"]) == {"n1"}

    assert slice_devices(slices) == [("gpu-0", "GPU-a"), ("gpu-1", "MIG-b")]
    assert [(device.driver, device.pool) for device in slices.of_node("n1")] == [("gpu.nvidia.com", "n1")] * 2


def test_a_device_without_a_uuid_is_left_out() -> None:
    slices = Slices()
    put_slice(slices, uuids=[None, "GPU-b", ""])

    assert slice_devices(slices) == [("gpu-1", "GPU-b")]


def test_what_v1beta1_has_under_basic_is_the_devices() -> None:
    taint = {"key": "example.com/xid", "value": "79", "effect": "NoSchedule"}
    written = slice_json(node=None, pool="shared", uuids=["GPU-a"], taints=[taint])
    (device,) = written["spec"]["devices"]
    basic = {"attributes": device.pop("attributes"), "taints": device.pop("taints"), "nodeName": "n1"}
    written["spec"]["devices"] = [device | {"basic": basic}]
    slices = Slices()
    slices.put("u", known_slice(msgspec.convert(written, objects.ResourceSlice)))

    ((found, taints),) = slices.of_node("n1").items()
    assert (found.uuid, taints) == ("GPU-a", ["example.com/xid=79:NoSchedule"])


def test_only_the_highest_generation_of_a_pool_counts() -> None:
    slices = Slices()
    put_slice(slices, "old", uuids=["GPU-old"], generation=1)
    put_slice(slices, "new", uuids=["GPU-new"], generation=2)
    assert slice_devices(slices) == [("gpu-0", "GPU-new")]

    slices.remove("uid-new")
    assert slice_devices(slices) == [("gpu-0", "GPU-old")]


def test_while_slices_are_replaced_one_by_one_no_device_is_missing() -> None:
    slices = Slices()
    put_slice(slices, "a", uuids=["GPU-a"], count=2)
    put_slice(slices, "b", uuids=[None, "GPU-b"], count=2)
    put_slice(slices, "a", uuids=["GPU-c"], generation=2, count=2)
    assert slice_devices(slices) == [("gpu-1", "GPU-b"), ("gpu-0", "GPU-c")]

    put_slice(slices, "new", uuids=[None, None, "GPU-d"], generation=2, count=2)
    assert slice_devices(slices) == [("gpu-0", "GPU-c"), ("gpu-2", "GPU-d")]

    put_slice(slices, "new", uuids=[None, None, "GPU-e"], generation=3, count=1)
    assert slice_devices(slices) == [("gpu-2", "GPU-e")]


def test_a_pool_may_have_several_slices_and_a_node_several_pools() -> None:
    slices = Slices()
    put_slice(slices, "a", uuids=["GPU-a"])
    put_slice(slices, "b", uuids=[None, "GPU-b"])
    put_slice(slices, "c", uuids=["GPU-c"], pool="other")

    assert {uuid for _, uuid in slice_devices(slices)} == {"GPU-a", "GPU-b", "GPU-c"}


def test_the_devices_of_one_slice_may_be_of_several_nodes() -> None:
    part = slice_(node=None, pool="shared")
    spread = part.spec.devices or []
    spread[:] = [msgspec.structs.replace(device, node_name=f"n{number}") for number, device in enumerate(spread)]
    slices = Slices()
    slices.put("u", known_slice(part))

    assert [slice_devices(slices, node) for node in ("n0", "n1")] == [[("gpu-0", "GPU-a")], [("gpu-1", "GPU-b")]]


def test_deleted_slices_count_until_the_driver_has_published_all_of_its_pool_again() -> None:
    """The kubelet deletes those of a driver that is away for 30 s, while pods go on with their devices."""
    slices = Slices()
    put_slice(slices, "a", uuids=["GPU-a"], generation=3, count=2)
    put_slice(slices, "b", uuids=[None, "GPU-b"], generation=3, count=2)
    for uid in ("uid-a", "uid-b"):
        assert slices.remove(uid) == set()
        assert set(slice_devices(slices)) == {("gpu-0", "GPU-a"), ("gpu-1", "GPU-b")}
    assert list(slices.keys()) == []

    put_slice(slices, "c", uuids=["GPU-c"], count=2)
    assert set(slice_devices(slices)) == {("gpu-0", "GPU-c"), ("gpu-1", "GPU-b")}
    put_slice(slices, "d", uuids=[None, None, "GPU-d"], count=2)
    assert slice_devices(slices) == [("gpu-0", "GPU-c"), ("gpu-2", "GPU-d")]


def test_a_slice_that_its_pool_is_complete_without_is_forgotten_when_it_is_deleted() -> None:
    slices = Slices()
    put_slice(slices, "a", uuids=["GPU-a"], count=2)
    put_slice(slices, "b", uuids=[None, "GPU-b"], count=2)
    put_slice(slices, "a", uuids=["GPU-a"], generation=2, count=1)

    assert slices.remove("uid-b") == {"n1"}
    assert slice_devices(slices) == [("gpu-0", "GPU-a")]


def test_a_slice_that_moves_changes_both_nodes() -> None:
    slices = Slices()
    put_slice(slices, node="n1")

    assert put_slice(slices, node="n2") == {"n1", "n2"}
    assert (slice_devices(slices, "n1"), len(slice_devices(slices, "n2"))) == ([], 2)
    assert put_slice(slices, node="n2") == set()


def put(claims: Claims, name: str = "monitor", now_ms: int = 0, **changes: Any) -> set[tuple[str, str]]:
    resource_claim = claim(name, **changes)
    admin_claim = known_claim(resource_claim, lambda driver: driver == "gpu.nvidia.com")
    return claims.put(resource_claim.metadata.uid, admin_claim, now_ms)


def devices(claims: Claims, pool: tuple[str, str] = POOL) -> list[tuple[str, str]]:
    return [(device.claim, device.device) for device in claims.of_pools([pool])]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([("gpu-0", True), ("gpu-1", True)], ["gpu-0", "gpu-1"]),
        ([("gpu-0", None), ("gpu-1", False)], []),
        ([("gpu-0", True), ("gpu-1", None)], ["gpu-0"]),
        ([("gpu-0", True), ("gpu-0", None)], []),
        ([], []),
        (None, []),
    ],
)
def test_admin_access_is_that_of_devices_that_no_request_of_the_claim_has_otherwise(
    results: list[tuple[str, bool | None]] | None, expected: list[str]
) -> None:
    claims = Claims()
    put(claims, results=results)

    assert [device for _, device in devices(claims)] == expected


def test_putting_a_claim_returns_the_pools_that_change_and_only_those_have_it() -> None:
    claims = Claims()

    assert put(claims) == {POOL}
    assert put(claims) == set()
    assert put(claims, pool="n2") == {POOL, ("gpu.nvidia.com", "n2")}
    assert (devices(claims), devices(claims, ("gpu.nvidia.com", "n2"))) == ([], [("monitor", "gpu-0")])


def test_each_pool_of_a_claim_of_two_pools_has_its_own_devices() -> None:
    claims, other_pool = Claims(), ("gpu.nvidia.com", "n2")
    first, second = (Claim("monitor", "ml", *pool, "gpu-0") for pool in (POOL, other_pool))

    assert claims.put("u", AdminClaim(("ml", "monitor"), (first, second)), 0) == {POOL, other_pool}
    assert [claims.of_pools([pool]) for pool in (POOL, other_pool)] == [[first], [second]]
    assert claims.of_pools([POOL, other_pool]) == [first, second]


def test_a_claim_that_lost_its_devices_or_is_missing_from_a_list_is_kept_for_a_while() -> None:
    claims = Claims()
    put(claims, "deallocated")
    put(claims, "deallocated", results=None)
    put(claims, "missing")
    claims.remove("uid-missing", 1_000)
    for uid in list(claims.keys()):
        claims.remove(uid, 2_000)
    assert claims.expire(KEPT_MS - 1) == set()
    assert devices(claims) == [("deallocated", "gpu-0"), ("missing", "gpu-0")]

    assert claims.expire(KEPT_MS) == {POOL}
    assert devices(claims) == [("missing", "gpu-0")]
    assert claims.expire(KEPT_MS + 1_000) == {POOL}
    assert (devices(claims), len(claims.keys())) == ([], 0)


def test_a_claim_that_is_given_devices_again_does_not_expire() -> None:
    claims = Claims()
    put(claims)
    put(claims, results=None)
    put(claims)

    assert (claims.expire(KEPT_MS), devices(claims)) == (set(), [("monitor", "gpu-0")])


def test_a_new_claim_replaces_a_removed_one_of_its_name() -> None:
    claims = Claims()
    put(claims, uid="old")
    claims.remove("old", 0)

    assert put(claims, uid="new", results=[("gpu-0", None)]) == {POOL}
    assert (devices(claims), len(claims.keys())) == ([], 0)
    claims.remove("unknown", 0)
    assert claims.expire(KEPT_MS) == set()
