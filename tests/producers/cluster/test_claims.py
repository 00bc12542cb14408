"""A claim that was given a device only to look at it is known as such, for as long as a kubelet may tell of it."""

from typing import Any

import pytest

from producers.cluster.claims import Claims, Known, known
from producers.cluster.pods import KEPT_MS
from tests.producers.cluster.made import claim
from topics.allocations import Claim

POOL = ("gpu.nvidia.com", "n1")


def put(claims: Claims, name: str = "monitor", now_ms: int = 0, **how: Any) -> set[tuple[str, str]]:
    one = claim(name, **how)
    return claims.put(one.metadata.uid, known(one, lambda driver: driver == "gpu.nvidia.com"), now_ms)


def devices(claims: Claims, pool: tuple[str, str] = POOL) -> list[tuple[str, str]]:
    return [(one.claim, one.device) for one in claims.of_pools([pool])]


@pytest.mark.parametrize(
    ("results", "found"),
    [
        ([("gpu-0", True), ("gpu-1", True)], ["gpu-0", "gpu-1"]),
        ([("gpu-0", None), ("gpu-1", False)], []),
        ([("gpu-0", True), ("gpu-1", None)], ["gpu-0"]),
        ([("gpu-0", True), ("gpu-0", None)], []),
        ([], []),
        (None, []),
    ],
)
def test_a_device_is_looked_at_that_no_request_of_its_claim_has_otherwise(
    results: list[tuple[str, bool | None]] | None, found: list[str]
) -> None:
    claims = Claims()
    put(claims, results=results)

    assert [device for _, device in devices(claims)] == found


def test_a_claim_says_which_pools_it_is_about_and_others_do_not_have_it() -> None:
    claims = Claims()

    assert put(claims) == {POOL}
    assert put(claims) == set()
    assert put(claims, pool="n2") == {POOL, ("gpu.nvidia.com", "n2")}
    assert (devices(claims), devices(claims, ("gpu.nvidia.com", "n2"))) == ([], [("monitor", "gpu-0")])


def test_of_a_claim_of_two_pools_each_has_its_own_devices() -> None:
    claims, other = Claims(), ("gpu.nvidia.com", "n2")
    here, there = (Claim("monitor", "ml", *pool, "gpu-0") for pool in (POOL, other))

    assert claims.put("u", Known(("ml", "monitor"), (here, there)), 0) == {POOL, other}
    assert [claims.of_pools([pool]) for pool in (POOL, other)] == [[here], [there]]
    assert claims.of_pools([POOL, other]) == [here, there]


def test_a_claim_that_lost_its_devices_or_is_missing_in_a_list_is_kept_for_a_while() -> None:
    claims = Claims()
    put(claims, "deallocated")
    put(claims, "deallocated", results=None)
    put(claims, "missing")
    claims.begin()
    claims.complete(1_000)
    claims.complete(2_000)
    assert claims.expire(KEPT_MS - 1) == set()
    assert devices(claims) == [("deallocated", "gpu-0"), ("missing", "gpu-0")]

    assert claims.expire(KEPT_MS) == {POOL}
    assert devices(claims) == [("missing", "gpu-0")]
    assert claims.expire(KEPT_MS + 1_000) == {POOL}
    assert (devices(claims), len(claims)) == ([], 0)


def test_a_claim_that_is_given_devices_again_does_not_expire() -> None:
    claims = Claims()
    put(claims)
    put(claims, results=None)
    put(claims)

    assert (claims.expire(KEPT_MS), devices(claims)) == (set(), [("monitor", "gpu-0")])


def test_a_new_claim_takes_the_place_of_a_gone_one_of_its_name() -> None:
    claims = Claims()
    put(claims, uid="old")
    claims.remove("old", 0)

    assert put(claims, uid="new", results=[("gpu-0", None)]) == {POOL}
    assert (devices(claims), len(claims)) == ([], 0)
    claims.remove("never-there", 0)
    assert claims.expire(KEPT_MS) == set()
