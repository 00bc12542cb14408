"""A node's record is the API server's last state, in whatever order it came. No tenant can spoil another's record."""

from collections.abc import Iterable, Sequence
from typing import Any

import hypothesis.strategies as st
import msgspec
import orjson
import pytest
from hypothesis import given

from delivery.instruments import Instruments
from producers import records
from producers.cluster import objects
from producers.cluster.component import listeners
from producers.cluster.instruments import INSTRUMENTS
from producers.cluster.owners import Chain
from producers.cluster.pods import KEPT_MS, PodOwner
from producers.cluster.reflector import Listener
from producers.cluster.store import Store, fit
from producers.cluster.takeover import PublishedNode
from producers.publisher import LARGEST_VALUE_BYTES
from producers.records import WorkloadsContent
from tests.growth import kept, steps
from tests.producers.cluster.kubernetes_objects import (
    START,
    START_MS,
    Follower,
    claim,
    named,
    over,
    pod,
    raw,
    slice_,
    state,
    taint_rule,
)
from topics.allocations import Claim
from topics.times import MAX_TIME_MS
from topics.topic import decoder
from topics.workloads import NodeWorkloads, Owner, Pod

NOW_MS = START_MS + 3_600_000
RS = Owner("apps/v1", "ReplicaSet", "llm-5d", "rs-1")
DEPLOYMENT = Owner("apps/v1", "Deployment", "llm", "dep-1")
CHAIN = Chain((RS, DEPLOYMENT), complete=True)
OF_RS = PodOwner("ml", RS)


def reported(store: Store, node: str = "n1") -> WorkloadsContent:
    content = store.pop_content(node)
    assert content is not None
    return content


def row(of: Store, node: str = "n1", number: int = 0) -> dict[str, Any]:
    return dict(reported(of, node).pods[number])


def encoded(content: WorkloadsContent, node: str = "n1") -> bytes:
    return records.workloads(cluster="prod", node=node, epoch=1, seq=1, ts_ms=NOW_MS, content=content.encoded())


def test_a_gpu_pod_is_reported_with_its_labels_times_and_owners() -> None:
    cluster = state("n1")
    cluster.put_namespace("ml", {"team": "research", "secret": "x"})
    cluster.put_pod(pod(labels={"app": "bert", "secret": "x"}, annotations={"gpustream.dev/a": "1", "b": "2"}), NOW_MS)

    assert row(cluster) == {
        "namespace": "ml",
        "name": "bert-0",
        "uid": "uid-bert-0",
        "phase": "Running",
        "started_ms": START_MS,
        "ended_ms": None,
        "labels": {"app": "bert"},
        "annotations": {"gpustream.dev/a": "1"},
        "namespace_labels": {"team": "research"},
        "owners": [],
        "owners_complete": None,
    }


def test_the_content_of_a_node_makes_a_valid_record() -> None:
    cluster = state("n1")
    cluster.put_pod(pod(owner=RS), NOW_MS)
    cluster.put_slice(slice_())
    read = decoder(NodeWorkloads)(encoded(reported(cluster)))

    assert read.pods[0].owners == (RS,)
    assert [device.uuid for device in read.dra_devices] == ["GPU-a", "GPU-b"]


def test_the_devices_of_deleted_slices_are_reported_as_long_as_the_node_is_there() -> None:
    cluster = state("n1", "n2")
    for node in ("n1", "n2"):
        cluster.put_slice(slice_(node, node=node))
        cluster.remove_slice(f"uid-{node}")
        assert len(reported(cluster, node).dra_devices) == 2

    cluster.remove_node("n1", NOW_MS)
    cluster.expire(NOW_MS)
    assert list(cluster.slices.nodes()) == ["n2"]


@pytest.mark.parametrize("changes", [{"limits": {"cpu": "1"}}, {"node": None}, {"node": ""}])
def test_a_pod_without_a_gpu_or_a_node_is_not_reported(changes: dict[str, Any]) -> None:
    cluster = state("n1")
    cluster.pop_content("n1")
    cluster.put_pod(pod(**changes), NOW_MS)

    assert (len(cluster.pods), "n1" in cluster.changed_nodes()) == (0, False)


def test_a_pod_is_reported_once_it_is_bound() -> None:
    cluster = state("n1")
    cluster.put_pod(pod(node=None), NOW_MS)
    cluster.put_pod(pod(), NOW_MS)

    assert [pod["name"] for pod in reported(cluster).pods] == ["bert-0"]


def test_only_what_changes_a_record_makes_it_due() -> None:
    cluster = state("n1", "n2")
    cluster.put_pod(pod(), NOW_MS)
    for node in ("n1", "n2"):
        cluster.pop_content(node)
    cluster.put_pod(pod(), NOW_MS)
    cluster.put_node("n1", {"beta.kubernetes.io/os": "linux"})
    cluster.put_namespace("other", {"team": "x"})
    assert cluster.changed_nodes() == []

    cluster.put_pod(pod(labels={"app": "other"}), NOW_MS)
    assert cluster.changed_nodes() == ["n1"]


def test_a_namespaces_labels_change_the_nodes_of_its_pods() -> None:
    cluster = state("n1", "n2")
    cluster.put_pod(pod(), NOW_MS)
    for node in ("n1", "n2"):
        cluster.pop_content(node)
    cluster.put_namespace("ml", {"team": "new"})

    assert cluster.changed_nodes() == ["n1"]
    assert row(cluster)["namespace_labels"] == {"team": "new"}


def test_pods_inherit_the_policies_of_their_namespace_and_their_own_go_over_them() -> None:
    cluster = state("n1", "n2")
    policies = {"gpustream.dev/a": "2", "gpustream.dev/idle-after": "2h", "other": "x"}
    cluster.put_pod(pod(annotations={"gpustream.dev/a": "1"}), NOW_MS)
    cluster.put_namespace("ml", {}, policies)
    assert row(cluster)["annotations"] == {"gpustream.dev/a": "1", "gpustream.dev/idle-after": "2h"}

    for node in ("n1", "n2"):
        cluster.pop_content(node)
    cluster.put_namespace("ml", {}, {**policies, "other": "y"})
    assert cluster.changed_nodes() == []
    cluster.put_namespace("ml", {}, None)
    assert cluster.changed_nodes() == ["n1"]
    assert row(cluster)["annotations"] == {"gpustream.dev/a": "1"}


def test_a_namespace_keeps_its_labels_until_its_last_pod_has_left() -> None:
    cluster = state("n1")
    cluster.put_namespace("ml", {"team": "research"})
    cluster.put_pod(pod(), NOW_MS)
    cluster.remove_pod("uid-bert-0", NOW_MS)
    cluster.remove_namespace("ml")
    assert row(cluster)["namespace_labels"] == {"team": "research"}

    cluster.expire(NOW_MS + KEPT_MS)
    assert len(cluster.namespaces) == 0


def test_deleted_namespaces_take_no_more_time_if_other_namespaces_have_more_pods() -> None:
    taken = []
    for others in (10, 200):
        cluster = state("n1")
        for number in range(others):
            cluster.put_pod(pod(f"other-{number}"), NOW_MS)
        for number in range(10):
            cluster.put_pod(pod(f"short-{number}", namespace=f"ci-{number}"), NOW_MS)
            cluster.remove_pod(f"uid-short-{number}", NOW_MS)
            cluster.remove_namespace(f"ci-{number}")
        taken.append(steps(lambda: cluster.expire(NOW_MS + 1000)))  # noqa: B023 - called here
    assert taken[0] == taken[1]


def test_nothing_is_kept_of_namespaces_that_are_gone() -> None:
    cluster, sizes = state("n1"), list[int]()
    for number in range(60):
        now_ms = NOW_MS + number * KEPT_MS // 10
        cluster.put_namespace(f"ci-{number}", {"team": "a"})
        cluster.put_pod(pod("short", f"uid-{number}", namespace=f"ci-{number}"), now_ms)
        cluster.remove_pod(f"uid-{number}", now_ms)
        cluster.remove_namespace(f"ci-{number}")
        cluster.expire(now_ms)
        sizes.append(kept(cluster))
    assert max(sizes[20:]) <= max(sizes[:20])


def test_node_labels_are_those_of_the_allow_list() -> None:
    cluster = state()
    kept = {"topology.kubernetes.io/zone": "a", "nvidia.com/gpu.product": "H100"}
    cluster.put_node("n1", {**kept, "kubernetes.io/hostname": "n1"})

    assert reported(cluster).node_labels == kept


def test_a_node_that_has_no_pods_is_reported_too() -> None:
    assert reported(state("n1")) == WorkloadsContent({}, [], [], [], unwell=[])


def test_a_pod_on_an_unknown_node_is_reported_when_the_node_appears() -> None:
    cluster = state()
    cluster.put_pod(pod(node="n9"), NOW_MS)
    assert (cluster.changed_nodes(), cluster.pop_content("n9")) == ([], None)

    cluster.put_node("n9", {})
    assert (cluster.changed_nodes(), row(cluster, "n9")["name"]) == (["n9"], "bert-0")


def test_the_last_record_of_a_node_ends_its_pods() -> None:
    cluster = state("n1")
    cluster.put_pod(pod(), NOW_MS)
    cluster.remove_node("n1", NOW_MS + 5)
    last = reported(cluster)

    assert (last.removed, last.pods[0]["ended_ms"]) == (True, NOW_MS + 5)
    assert (cluster.pop_content("n1"), cluster.changed_nodes()) == (None, [])


def test_the_last_record_of_a_node_has_its_devices_which_its_pods_hold_a_little_longer() -> None:
    cluster = state("n1")
    cluster.put_slice(slice_(taints=[{"key": "example.com/xid", "effect": "NoExecute"}]))
    cluster.put_claim(claim(), NOW_MS)
    before = reported(cluster)
    cluster.remove_node("n1", NOW_MS + 5)
    last = reported(cluster)

    assert (last.removed, last.dra_devices, last.admin_claims) == (True, before.dra_devices, before.admin_claims)
    assert (len(last.dra_devices), len(last.admin_claims), len(before.unwell), last.unwell) == (2, 1, 1, [])


def test_a_node_that_comes_back_has_the_pods_that_it_still_has() -> None:
    cluster = state("n1")
    cluster.put_pod(pod(), NOW_MS)
    cluster.remove_node("n1", NOW_MS + 5)
    cluster.pop_content("n1")
    cluster.put_node("n1", {})

    assert row(cluster)["ended_ms"] is None


def test_a_node_that_was_away_for_a_moment_never_left() -> None:
    cluster = state("n1")
    cluster.put_pod(pod(), NOW_MS)
    cluster.remove_node("n1", NOW_MS + 5)
    cluster.put_node("n1", {})
    content = reported(cluster)

    assert (content.removed, content.pods[0]["ended_ms"]) == (False, None)


def test_a_node_whose_name_no_record_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="node 'a/b'"):
        state().put_node("a/b", {})


def test_a_removed_node_is_forgotten_if_nobody_reports_it() -> None:
    cluster = state("n1")
    cluster.remove_node("n1", NOW_MS)
    cluster.expire(NOW_MS + KEPT_MS)

    assert cluster.pop_content("n1") is None


def test_a_pod_waits_for_its_chain_and_is_then_reported_without_and_again_with_it() -> None:
    cluster = state("n1")
    cluster.put_pod(pod("old"), NOW_MS)
    cluster.pop_content("n1")
    cluster.put_pod(pod(owner=RS), NOW_MS)
    assert cluster.pods_awaiting_owners("n1") == ["uid-bert-0"]
    first_content = cluster.pop_content("n1", cluster.pods_awaiting_owners("n1"))
    assert first_content is not None
    assert ([row["uid"] for row in first_content.pods], cluster.changed_nodes()) == (["uid-old"], ["n1"])

    waited = row(cluster, number=1)
    assert ([owner["kind"] for owner in waited["owners"]], waited["owners_complete"]) == (["ReplicaSet"], False)
    assert cluster.pods_awaiting_owners("n1") == []

    cluster.set_chain(OF_RS, CHAIN)
    assert cluster.changed_nodes() == ["n1"]
    with_chain = row(cluster, number=1)
    assert [owner["kind"] for owner in with_chain["owners"]] == ["ReplicaSet", "Deployment"]
    assert with_chain["owners_complete"] is None


def test_a_pod_that_gets_another_owner_stays_in_the_records() -> None:
    """A StatefulSet was deleted without its pods, and created again: it adopts them."""
    cluster = state("n1")
    cluster.put_pod(pod(owner=RS), NOW_MS)
    cluster.set_chain(OF_RS, CHAIN)
    cluster.pop_content("n1")
    cluster.put_pod(pod(), NOW_MS)
    cluster.pop_content("n1")
    cluster.put_pod(pod(owner=Owner("apps/v1", "StatefulSet", "bert", "sts-2")), NOW_MS)

    content = cluster.pop_content("n1", cluster.pods_awaiting_owners("n1"))
    assert content is not None
    assert [row["uid"] for row in content.pods] == ["uid-bert-0"]


def test_a_pod_that_names_the_uid_of_anothers_owner_has_no_part_in_the_others_chain() -> None:
    claimed = Owner("apps/v1", "ReplicaSet", "mine", RS.uid)
    cluster = state("n1")
    cluster.put_pod(pod("evil", namespace="evil", owner=claimed), NOW_MS)
    cluster.put_pod(pod("evil-2", owner=claimed), NOW_MS)
    cluster.put_pod(pod(owner=RS), NOW_MS)
    for owner in (PodOwner("evil", claimed), PodOwner("ml", claimed)):
        cluster.set_chain(owner, Chain((claimed,), complete=True))
    cluster.set_chain(OF_RS, CHAIN)

    owners = {row["name"]: [owner["name"] for owner in row["owners"]] for row in reported(cluster).pods}
    assert owners == {"evil": ["mine"], "evil-2": ["mine"], "bert-0": ["llm-5d", "llm"]}


def test_a_chain_that_ends_too_early_is_incomplete() -> None:
    cluster = state("n1")
    cluster.put_pod(pod(owner=RS), NOW_MS)
    cluster.set_chain(OF_RS, Chain((RS,), complete=False))

    assert cluster.pods_awaiting_owners("n1") == ["uid-bert-0"]
    assert row(cluster)["owners_complete"] is False


def test_a_new_leader_holds_no_pod_that_the_last_one_may_have_reported() -> None:
    cluster = state("n1")
    cluster.put_pod(pod(owner=RS), NOW_MS)
    cluster.mark_all_changed()

    assert cluster.pods_awaiting_owners("n1") == []


def test_each_owner_is_followed_once_and_until_its_last_pod_has_left() -> None:
    follower = Follower()
    cluster = state("n1", follower=follower)
    cluster.put_pod(pod("a", owner=RS), NOW_MS)
    cluster.put_pod(pod("b", owner=RS), NOW_MS)
    cluster.remove_pod("uid-a", NOW_MS)
    cluster.remove_pod("uid-b", NOW_MS + 1)
    cluster.expire(NOW_MS + KEPT_MS)
    assert follower.followed == {OF_RS}

    cluster.expire(NOW_MS + KEPT_MS + 1)
    assert follower.followed == set()
    cluster.set_chain(OF_RS, CHAIN)
    assert not cluster.pods_awaiting_owners("n1")

    cluster.put_pod(pod("c", owner=RS), NOW_MS)
    cluster.set_chain(OF_RS, CHAIN)
    cluster.remove_pod("uid-c", NOW_MS)
    cluster.expire(NOW_MS + KEPT_MS)
    cluster.put_pod(pod("d", owner=RS), NOW_MS)
    assert cluster.pods_awaiting_owners("n1")


def test_an_owner_without_a_uid_is_reported_and_not_waited_for() -> None:
    cluster = state("n1")
    cluster.put_pod(pod(owner=Owner("v1", "Thing", "x", "")), NOW_MS)

    assert (cluster.pods_awaiting_owners("n1"), row(cluster)["owners"][0]["name"]) == ([], "x")


def test_a_claim_that_only_looks_at_a_device_is_reported_on_the_nodes_of_its_pool_until_long_after_it_is_gone() -> None:
    cluster = state("n1", "n2")
    for node in ("n1", "n2"):
        cluster.put_slice(slice_(node, node=node))
        cluster.pop_content(node)
    cluster.put_claim(claim(pool="n2"), NOW_MS)
    assert cluster.changed_nodes() == ["n2"]
    assert (reported(cluster, "n1").admin_claims, len(reported(cluster, "n2").admin_claims)) == ([], 1)
    record = decoder(NodeWorkloads)(encoded(reported(cluster, "n2"), "n2"))
    assert record.admin_claims == (Claim("monitor", "ml", "gpu.nvidia.com", "n2", "gpu-0"),)

    cluster.claims.remove("uid-monitor", NOW_MS)
    cluster.expire(NOW_MS + KEPT_MS - 1)
    assert (cluster.changed_nodes(), len(reported(cluster, "n2").admin_claims)) == ([], 1)
    cluster.expire(NOW_MS + KEPT_MS)
    assert (cluster.changed_nodes(), reported(cluster, "n2").admin_claims) == (["n2"], [])


def test_claims_of_other_drivers_do_not_matter() -> None:
    cluster = state("n1")
    cluster.put_slice(slice_())
    cluster.put_claim(claim(driver="net.example.com"), NOW_MS)

    assert (reported(cluster).admin_claims, len(cluster.claims.keys())) == ([], 0)


def unwell(store: Store, node: str = "n1") -> list[dict[str, Any]]:
    content = store.pop_content(node)
    assert content is not None
    record = records.workloads(cluster="c", node=node, epoch=1, seq=1, ts_ms=1, content=content.encoded())
    return [msgspec.to_builtins(device) for device in decoder(NodeWorkloads)(record).unwell]


def sick(device: str, health: str = "Unhealthy", resource: str = "nvidia.com/gpu", **fields: str) -> dict[str, Any]:
    """The status of a pod with the health of one of its devices."""
    resources = [{"name": resource, "resources": [{"resourceID": device, "health": health, **fields}]}]
    return {"containerStatuses": [{"name": "main", "allocatedResourcesStatus": resources}]}


def test_a_device_that_its_pods_status_calls_unhealthy_is_unwell_while_the_pod_runs() -> None:
    cluster = state("n1")
    cluster.put_pod(pod(status=sick("GPU-a", message="XID 79")), NOW_MS)
    assert unwell(cluster) == [{"device_id": "GPU-a", "health": "Unhealthy", "message": "XID 79"}]
    cluster.put_pod(pod(status=sick("GPU-a", "Unknown")), NOW_MS)
    assert cluster.changed_nodes() == ["n1"]
    assert unwell(cluster) == []
    cluster.put_pod(pod(status=sick("GPU-a") | {"phase": "Failed"}), NOW_MS)
    assert unwell(cluster) == []


def test_a_device_of_a_claim_is_unwell_by_its_uuid() -> None:
    cluster = state("n1")
    cluster.put_slice(slice_())
    cluster.put_pod(pod(status=sick("gpu.nvidia.com/n1/gpu-1", resource="claim:gpu/one")), NOW_MS)
    assert unwell(cluster) == [{"device_id": "GPU-b", "health": "Unhealthy"}]


def test_the_taints_of_a_slice_and_of_rules_make_their_devices_unwell() -> None:
    cluster = state("n1", "n2")
    cluster.put_slice(slice_(taints=[{"key": "gpu.nvidia.com/lost", "effect": "NoSchedule", "timeAdded": START}]))
    cluster.put_slice(slice_("t", node="n2", uuids=["GPU-c"]))
    assert unwell(cluster) == [{"device_id": "GPU-a", "taint": "gpu.nvidia.com/lost:NoSchedule"}]
    assert unwell(cluster, "n2") == []
    cluster.put_taint_rule(taint_rule(deviceSelector={"driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-1"}))
    assert cluster.changed_nodes() == ["n1", "n2"]
    by_rule = {"device_id": "GPU-b", "taint": "example.com/xid=79:NoExecute"}
    assert by_rule in unwell(cluster)
    assert unwell(cluster, "n2") == []
    cluster.put_taint_rule(taint_rule(deviceSelector={}))
    assert len(unwell(cluster)) == 3
    assert len(unwell(cluster, "n2")) == 1
    cluster.remove_taint_rule("uid-rule")
    assert len(unwell(cluster)) == 1
    assert unwell(cluster, "n2") == []


def test_a_rule_without_a_selector_taints_nothing() -> None:
    cluster = state("n1")
    cluster.put_slice(slice_())
    cluster.put_taint_rule(taint_rule())
    assert unwell(cluster) == []


def test_a_rule_that_selects_by_something_unknown_taints_nothing() -> None:
    for selector in ({"deviceClassName": "gpu"}, {"selectors": [{"cel": {"expression": "false"}}]}):
        with pytest.raises(objects.UndecodableObject):
            taint_rule(deviceSelector=selector)


def test_slices_of_other_drivers_do_not_matter() -> None:
    cluster = state("n1")
    cluster.put_slice(slice_(driver="net.example.com"))

    assert reported(cluster).dra_devices == []


def test_all_nodes_can_be_made_due() -> None:
    cluster = state("n1", "n2", "n3")
    cluster.remove_node("n3", NOW_MS)
    for node in ("n1", "n2"):
        cluster.pop_content(node)
    cluster.mark_all_changed()

    assert set(cluster.changed_nodes()) == {"n1", "n2", "n3"}


def test_too_many_labels_of_a_tenant_are_cut_and_counted_once() -> None:
    cluster = state("n1")
    greedy = pod(labels={f"app.kubernetes.io/{number}": "x" for number in range(100)})

    assert [cluster.put_pod(greedy, NOW_MS), cluster.put_pod(greedy, NOW_MS)] == [36, 0]


def test_no_node_of_greedy_tenants_has_a_record_that_is_too_large() -> None:
    cluster = state("n1")
    cluster.put_pod(pod("modest"), NOW_MS)
    annotations = {f"gpustream.dev/{number}": "\x01" * 300 for number in range(70)}
    for number in range(500):
        cluster.put_pod(pod(f"evil-{number}", annotations=annotations, labels={"app": "a" * 253}), NOW_MS)
    cluster.put_slice(slice_())
    for number in range(20):
        looks_at = [(f"gpu-{device}", True) for device in range(100)]
        cluster.put_claim(claim(f"monitor-{number}", results=looks_at), NOW_MS)
    content = reported(cluster)

    assert (len(encoded(content)) <= LARGEST_VALUE_BYTES, len(content.admin_claims)) == (True, 2000)
    assert content.shed > 0
    assert next(pod for pod in content.pods if pod["name"] == "modest")["labels"] == {"app": "bert"}


def published_by_another(*pods: Pod, node: str = "n1", removed: bool = False) -> dict[str, PublishedNode]:
    """The last record of a node, as the leader before this one published it."""
    return {node: PublishedNode((1, 1), removed, {pod.uid: pod for pod in pods})}


def test_a_new_leader_reports_the_last_ones_ended_pods_for_as_long_as_that_would_have() -> None:
    cluster = state("n1")
    cluster.put_pod(pod("here"), NOW_MS)
    ended = Pod("ml", "gone", "uid-gone", "Succeeded", 1, NOW_MS - 10, {"app": "x"}, owners=(RS, DEPLOYMENT))
    unseen = Pod("ml", "unseen", "uid-unseen", "Running", 1)
    known_better = Pod("ml", "here", "uid-here", "Running", 1, NOW_MS - 5)
    old = Pod("ml", "old", "uid-old", ended_ms=NOW_MS - KEPT_MS)
    cluster.take_over(published_by_another(ended, unseen, known_better, old), NOW_MS)

    rows = {row["uid"]: row for row in reported(cluster).pods}
    assert {uid: row["ended_ms"] for uid, row in rows.items()} == {
        "uid-here": None,
        "uid-gone": NOW_MS - 10,
        "uid-unseen": NOW_MS,
    }
    assert [owner["kind"] for owner in rows["uid-gone"]["owners"]] == ["ReplicaSet", "Deployment"]
    assert decoder(NodeWorkloads)(encoded(reported(cluster))).pods

    cluster.expire(NOW_MS - 10 + KEPT_MS)
    assert {row["uid"] for row in reported(cluster).pods} == {"uid-here", "uid-unseen"}


def test_an_end_that_is_years_ahead_is_taken_over_for_no_longer_than_another_one() -> None:
    cluster = state("n1")
    cluster.take_over(published_by_another(Pod("ml", "gone", "uid-gone", ended_ms=MAX_TIME_MS)), NOW_MS)
    assert [row["ended_ms"] for row in reported(cluster).pods] == [MAX_TIME_MS]

    cluster.expire(NOW_MS + KEPT_MS)
    assert cluster.changed_nodes() == ["n1"]
    assert reported(cluster).pods == []


def test_a_new_leader_takes_over_the_chains_of_owners_that_it_does_not_know_yet() -> None:
    cluster = state("n1")
    cluster.put_pod(pod(owner=RS), NOW_MS)
    cluster.take_over(published_by_another(Pod("ml", "bert-0", "uid-bert-0", owners=(RS, DEPLOYMENT))), NOW_MS)
    assert row(cluster)["owners_complete"] is None
    assert [owner["kind"] for owner in row(cluster)["owners"]] == ["ReplicaSet", "Deployment"]

    cluster.set_chain(OF_RS, Chain((RS,), complete=False))
    assert [owner["kind"] for owner in row(cluster)["owners"]] == ["ReplicaSet", "Deployment"]


def test_a_node_that_was_removed_while_nobody_led_is_reported_as_removed_with_its_pods() -> None:
    cluster = state("n1")
    cluster.take_over(published_by_another(Pod("ml", "a", "uid-a"), node="n2"), NOW_MS)
    cluster.take_over(published_by_another(Pod("ml", "b", "uid-b"), node="n3", removed=True), NOW_MS)
    cluster.mark_all_changed()

    assert set(cluster.changed_nodes()) == {"n1", "n2"}
    last = reported(cluster, "n2")
    assert (last.removed, [row["ended_ms"] for row in last.pods]) == (True, [NOW_MS])


Event = tuple[str, Any]

_NAMES = st.sampled_from(["a", "b", "c"])
_NODES = st.sampled_from(["n1", "n2", None])
_LABELS = st.dictionaries(st.sampled_from(["app", "team", "junk"]), st.text(max_size=4), max_size=3)
_STATUSES = st.sampled_from([{}, {"phase": "Pending"}, {"phase": "Unknown"}])
_LIMITS = st.sampled_from([{"nvidia.com/gpu": "1"}, {"cpu": "1"}])
_PODS = st.builds(
    lambda name, **changes: pod(name, **changes),
    _NAMES,
    node=_NODES,
    labels=_LABELS,
    status=_STATUSES,
    limits=_LIMITS,
    owner=st.sampled_from([None, RS, DEPLOYMENT]),
)
_RESULTS = st.lists(st.tuples(st.sampled_from(["gpu-0", "gpu-1"]), st.sampled_from([None, False, True])), max_size=3)
_EVENTS = st.one_of(
    st.tuples(st.just("pod"), _PODS),
    st.tuples(st.just("pod gone"), _NAMES),
    st.tuples(st.just("node"), st.tuples(st.sampled_from(["n1", "n2"]), _LABELS)),
    st.tuples(st.just("node gone"), st.sampled_from(["n1", "n2"])),
    st.tuples(st.just("namespace"), _LABELS),
    st.tuples(st.just("slice"), st.builds(slice_, _NAMES, node=st.sampled_from(["n1", "n2"]), pool=st.just("p"))),
    st.tuples(st.just("slice gone"), _NAMES),
    st.tuples(st.just("claim"), st.builds(claim, _NAMES, pool=st.just("p"), results=_RESULTS)),
)


def _apply(cluster: Store, events: Iterable[Event]) -> dict[tuple[str, Any], Event]:
    """Apply the events to the store; returns the event that made each object that exists at the end.
    The last slice of a pool is not deleted: it would count as if it existed."""
    last: dict[tuple[str, Any], Event] = {}
    for number, (kind, argument) in enumerate(events):
        now_ms = NOW_MS + number
        if kind == "pod":
            cluster.put_pod(argument, now_ms)
            last["pod", argument.metadata.uid] = kind, argument
        elif kind == "pod gone":
            cluster.remove_pod(f"uid-{argument}", now_ms)
            last.pop(("pod", f"uid-{argument}"), None)
        elif kind == "node":
            cluster.put_node(*argument)
            last["node", argument[0]] = kind, argument
        elif kind == "node gone":
            cluster.remove_node(argument, now_ms)
            last.pop(("node", argument), None)
        elif kind == "namespace":
            cluster.put_namespace("ml", argument)
            last["namespace", "ml"] = kind, argument
        elif kind == "slice":
            cluster.put_slice(argument)
            last["slice", argument.metadata.uid] = kind, argument
        elif kind == "claim":
            cluster.put_claim(argument, now_ms)
            last["claim", argument.metadata.uid] = kind, argument
        elif set(cluster.slices.keys()) != {f"uid-{argument}"}:
            cluster.remove_slice(f"uid-{argument}")
            last.pop(("slice", f"uid-{argument}"), None)
    return last


def _listener_and_bytes(by_resource: dict[str, Listener[Any]], kind: str, argument: Any) -> tuple[Listener[Any], bytes]:
    """The listener of the object that an event made, and the object's bytes."""
    if kind == "node":
        return by_resource["nodes"], raw(named(*argument))
    if kind == "namespace":
        return by_resource["namespaces"], raw(named("ml", argument))
    resource = {"pod": "pods", "slice": "resourceslices", "claim": "resourceclaims"}[kind]
    return by_resource[resource], msgspec.json.encode(argument)


def _current_contents(cluster: Store) -> dict[str, Any]:
    """The content of each node, without the pods that have ended."""
    reported = {node: cluster.pop_content(node) for node in ("n1", "n2")}
    return {
        node: (
            content.node_labels,
            sorted((row for row in content.pods if row["ended_ms"] is None), key=lambda row: row["uid"]),
            sorted(content.dra_devices, key=lambda row: (row["pool"], row["device"], row["uuid"])),
            sorted(content.admin_claims, key=lambda row: (row["claim"], row["device"])),
        )
        for node, content in reported.items()
        if content and not content.removed
    }


@given(st.lists(_EVENTS, max_size=30), st.randoms())
def test_any_history_leaves_the_same_state_as_a_fresh_list_of_the_last_objects(
    events: list[Event], chance: Any
) -> None:
    changed, fresh = state(), state()
    objects = list(_apply(changed, events).values())
    chance.shuffle(objects)
    _apply(fresh, objects)

    assert _current_contents(changed) == _current_contents(fresh)


@given(st.lists(_EVENTS, max_size=30))
def test_a_full_list_of_the_same_objects_changes_nothing(events: list[Event]) -> None:
    cluster = state()
    objects = list(_apply(cluster, events).values())
    before = _current_contents(cluster)
    by_resource = listeners(cluster, Instruments(INSTRUMENTS), lambda: None, lambda: NOW_MS)
    for listener in by_resource.values():
        listener.begin()
    for kind, argument in objects:
        listener, content = _listener_and_bytes(by_resource, kind, argument)
        listener.put(content)
    for listener in by_resource.values():
        listener.complete()
    cluster.expire(NOW_MS + KEPT_MS - 1)

    assert cluster.changed_nodes() == []
    assert _current_contents(cluster) == before


@given(st.lists(_EVENTS, max_size=20))
def test_a_node_that_is_reported_differently_was_made_due(events: list[Event]) -> None:
    cluster = state("n1", "n2")
    before = _current_contents(cluster)
    for event in events:
        _apply(cluster, [event])
        changed = set(cluster.changed_nodes())
        after = _current_contents(cluster)
        assert {node for node in ("n1", "n2") if after.get(node) != before.get(node)} <= changed
        before = after


@given(
    st.dictionaries(st.text(max_size=20), st.text(max_size=60), max_size=70),
    st.dictionaries(st.text(max_size=20).map("gpustream.dev/".__add__), st.text(max_size=60), max_size=70),
)
def test_no_label_of_a_tenant_changes_another_pod(labels: dict[str, str], annotations: dict[str, str]) -> None:
    without_tenant, together = state("n1"), state("n1")
    for cluster in (without_tenant, together):
        cluster.put_pod(pod("mine", labels={"app": "mine"}), NOW_MS)
    together.put_pod(pod("theirs", labels={**labels, "app": "x"}, annotations=annotations), NOW_MS)
    content = reported(together)

    assert next(row for row in content.pods if row["name"] == "mine") == row(without_tenant)
    assert decoder(NodeWorkloads)(encoded(content)).pods[0].labels == {"app": "mine"}


def test_ended_pods_are_reported_with_their_ends() -> None:
    cluster = state("n1")
    cluster.put_pod(pod("a"), NOW_MS)
    cluster.put_pod(pod("b", status=over("Succeeded", "2026-03-01T12:40:00Z")), NOW_MS)
    cluster.remove_pod("uid-a", NOW_MS + 1)
    ends: Sequence[Any] = [(row["name"], row["ended_ms"], row["phase"]) for row in reported(cluster).pods]

    assert ends == [("b", START_MS + 40 * 60_000, "Succeeded"), ("a", NOW_MS + 1, "Running")]


def sized(name: str, *, ended: int | None = None, began: int = 0, size: int = 0) -> dict[str, Any]:
    return {"name": name, "ended_ms": ended, "started_ms": began, "labels": {"x": "a" * size}, "annotations": {}}


def names_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [row["name"] + ("" if row["labels"] else "-") for row in rows]


def test_rows_that_do_not_fit_are_left_out_in_order() -> None:
    rows = [sized("a"), sized("old", ended=1), sized("older", ended=0), sized("big", size=500), sized("new", began=9)]
    sizes = {row["name"]: len(orjson.dumps(row)) + 1 for row in rows}
    whole = sum(sizes.values())

    def fitted(max_bytes: int) -> tuple[list[str], int]:
        fitting, shed = fit(rows, max_bytes)
        return names_of(fitting), shed

    assert fitted(whole) == (["a", "old", "older", "big", "new"], 0)
    assert fitted(whole - 1) == (["a", "old", "big", "new"], 1)
    assert fitted(whole - sizes["older"] - 1) == (["a", "big", "new"], 2)
    assert fitted(whole - sizes["older"] - sizes["old"] - 1) == (["a", "big-", "new"], 3)
    assert fitted(150)[0] == ["a-", "big-"]
    assert fitted(0) == ([], 5)
    assert all(row["labels"] for row in rows)


@pytest.mark.parametrize(
    ("fields", "maintenance"),
    [
        ({}, None),
        ({"metadata": {"annotations": {"gpustream.dev/maintenance": "new disks"}}}, "new disks"),
        ({"metadata": {"annotations": {"gpustream.dev/maintenance": "false"}}}, None),
        ({"spec": {"taints": [{"key": "gpustream.dev/maintenance", "effect": "NoSchedule"}]}}, "by a taint"),
        ({"spec": {"taints": [{"key": "dedicated", "value": "ml", "effect": "NoSchedule"}]}}, None),
    ],
)
def test_a_node_is_in_maintenance_by_its_annotation_or_a_taint(fields: dict[str, Any], maintenance: str | None) -> None:
    metadata = {"name": "n1", "uid": "u", **fields.get("metadata", {})}
    node = msgspec.convert({**fields, "metadata": metadata}, objects.Node)
    assert node.maintenance == maintenance
    cluster = state()
    cluster.put_node("n1", {}, node.maintenance)
    assert cluster.nodes["n1"] == ({} if maintenance is None else {"gpustream.dev/maintenance": maintenance})


def test_labels_and_owners_that_change_each_second_change_once_a_minute_and_the_last_ones_count() -> None:
    cluster, published = state("n1"), dict[str, None]()
    for second in range(3600):
        now_ms = NOW_MS + second * 1000
        owner = Owner("apps/v1", "ReplicaSet", f"rs-{second}", f"uid-{second}")
        cluster.put_pod(pod(labels={"app": f"{second}"}, owner=owner), now_ms)
        cluster.expire(now_ms)
        content = cluster.pop_content("n1")
        for listed in content.pods if content else ():
            published[listed["labels"]["app"] + listed["owners"][0]["name"]] = None
    assert 60 < len(published) <= 70
    cluster.expire(NOW_MS + 3660 * 1000)
    assert row(cluster)["labels"] == {"app": "3599"}
    cluster.put_pod(pod(labels={"app": "set-back"}), NOW_MS)
    assert row(cluster)["labels"] == {"app": "set-back"}
    cluster.remove_pod("uid-bert-0", NOW_MS)
    cluster.expire(NOW_MS + 2 * KEPT_MS)
    assert kept(cluster) <= kept(state("n1"))
