"""Objects of a watch are stored; one that can't be read is counted, and removes nothing."""

from typing import Any

import pytest

from delivery.instruments import Instruments
from producers.cluster import instruments as names
from producers.cluster.component import listeners
from producers.cluster.reflector import Listener
from tests.producers.cluster.kubernetes_objects import (
    START_MS,
    claim_json,
    named,
    pod_json,
    raw,
    slice_json,
    state,
    taint_rule_json,
)
from tests.producers.fakes import value

RESOURCES = ("pods", "nodes", "namespaces", "resourceslices", "resourceclaims", "devicetaintrules")


class Bench:
    """All listeners of a cluster; ``woken`` is how often one of them reported a change."""

    def __init__(self) -> None:
        self.instruments = Instruments(names.INSTRUMENTS)
        self.state, self.woken = state(), 0
        self.now_ms = START_MS
        by_resource = listeners(self.state, self.instruments, self._wake, lambda: self.now_ms)
        self.pods, self.nodes, self.namespaces, self.slices, self.claims, self.taint_rules = (
            by_resource[name] for name in RESOURCES
        )

    def _wake(self) -> None:
        self.woken += 1

    def fill(self) -> "Bench":
        self.nodes.put(raw(named("n1", {"nvidia.com/gpu.product": "H100"})))
        self.namespaces.put(raw(named("ml", {"team": "research"})))
        self.slices.put(raw(slice_json()))
        self.claims.put(raw(claim_json()))
        self.taint_rules.put(raw(taint_rule_json()))
        self.pods.put(raw(pod_json()))
        return self

    def pods_of(self, node: str) -> list[dict[str, Any]]:
        content = self.state.pop_content(node)
        return [] if content is None else [*map(dict, content.pods)]

    def ends(self) -> dict[str, int | None]:
        return {pod.uid: pod.ended_ms for pod in self.state.pods}

    def object_counts(self) -> list[float]:
        resources = RESOURCES
        return [value(self.instruments, names.OBJECTS, resource=resource) for resource in resources]

    def all(self) -> list[tuple[Listener[Any], bytes]]:
        """Each listener, and the bytes of the object that :meth:`fill` gave it."""
        objects = (pod_json(), named("n1"), named("ml"), slice_json(), claim_json(), taint_rule_json())
        resource_listeners: tuple[Listener[Any], ...] = (
            self.pods,
            self.nodes,
            self.namespaces,
            self.slices,
            self.claims,
            self.taint_rules,
        )
        return list(zip(resource_listeners, map(raw, objects), strict=True))


def test_the_objects_of_a_watch_are_stored() -> None:
    bench = Bench().fill()
    content = bench.state.pop_content("n1")
    assert content is not None

    assert (bench.object_counts(), bench.woken) == ([1, 1, 1, 1, 1, 1], 6)
    assert content.node_labels == {"nvidia.com/gpu.product": "H100"}
    assert [(pod["name"], pod["namespace_labels"]) for pod in content.pods] == [("bert-0", {"team": "research"})]
    assert [device["uuid"] for device in content.dra_devices] == ["GPU-a", "GPU-b"]
    assert [(claim["claim"], claim["device"]) for claim in content.admin_claims] == [("monitor", "gpu-0")]


@pytest.mark.parametrize("restarts", [2**63, 2**64, 10**30])
def test_a_number_of_restarts_that_no_record_can_hold_costs_its_pod_only(restarts: int) -> None:
    bench = Bench().fill()
    waits = {"restartCount": restarts, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    bench.pods.put(raw(pod_json("crash-0", status={"containerStatuses": [waits]})))
    content = bench.state.pop_content("n1")
    assert content is not None

    assert [pod["name"] for pod in content.pods] == ["bert-0"]
    assert value(bench.instruments, names.UNDECODABLE, resource="pods") == 1


def test_a_deleted_object_is_removed_and_a_deleted_pod_has_ended() -> None:
    bench = Bench().fill()
    for listener, whole in reversed(bench.all()):
        listener.remove(whole)

    assert bench.object_counts() == [1, 0, 1, 0, 1, 0]
    assert [pod.ended_ms for pod in bench.state.pods.on_node("n1")] == [START_MS]


def test_a_list_keeps_the_objects_that_it_has() -> None:
    bench = Bench().fill()
    for listener, whole in bench.all():
        listener.begin()
        listener.put(whole)
        listener.complete()

    assert bench.object_counts() == [1, 1, 1, 1, 1, 1]
    assert [pod.ended_ms for pod in bench.state.pods.on_node("n1")] == [None]


def test_an_empty_list_leaves_nothing() -> None:
    bench = Bench().fill()
    for listener, _ in bench.all():
        listener.begin()
        listener.complete()

    assert bench.object_counts() == [1, 0, 1, 0, 1, 0]
    assert [pod.ended_ms for pod in bench.state.pods.on_node("n1")] == [START_MS]


def test_an_object_that_a_list_has_in_a_form_that_cannot_be_read_stays_as_it_was() -> None:
    bench = Bench().fill()
    for listener, whole in bench.all():
        listener.begin()
        listener.put(
            whole.replace(b'"metadata": {', b'"spec": 7, "metadata": {"labels": 7, "deletionTimestamp": null, ')
        )
        listener.put(b"{")
        listener.complete()

    assert bench.object_counts() == [1, 1, 1, 1, 1, 1]
    assert [pod.ended_ms for pod in bench.state.pods.on_node("n1")] == [None]
    assert [value(bench.instruments, names.UNDECODABLE, resource=resource) for resource in RESOURCES] == [2] * 6


def test_a_deletion_without_an_object_is_counted() -> None:
    bench = Bench().fill()
    bench.pods.remove(b"null")

    assert value(bench.instruments, names.UNDECODABLE, resource="pods") == 1
    assert bench.object_counts() == [1, 1, 1, 1, 1, 1]


def test_a_node_whose_name_no_record_can_have_is_counted() -> None:
    bench = Bench()
    bench.nodes.put(raw(named("a b")))

    assert value(bench.instruments, names.UNDECODABLE, resource="nodes") == 1
    assert bench.object_counts() == [0, 0, 0, 0, 0, 0]


def test_the_annotations_of_a_namespace_are_reported_with_its_pods() -> None:
    bench = Bench().fill()
    bench.namespaces.put(raw(named("ml", {"team": "research"}, {"gpustream.dev/idle-after": "2h"})))
    (pod,) = bench.pods_of("n1")
    assert pod["annotations"]["gpustream.dev/idle-after"] == "2h"


def test_pods_that_are_missing_from_a_full_list_ended_when_it_was_complete() -> None:
    bench = Bench()
    for name in "abc":
        bench.pods.put(raw(pod_json(name)))
    bench.pods.begin()
    bench.pods.put(raw(pod_json("a")))
    bench.pods.put(raw({**pod_json("b"), "spec": "none"}))
    bench.now_ms += 5
    bench.pods.complete()

    assert bench.ends() == {"uid-a": None, "uid-b": None, "uid-c": START_MS + 5}


def test_a_list_that_breaks_off_ends_nothing() -> None:
    bench = Bench()
    for name in "ab":
        bench.pods.put(raw(pod_json(name)))
    bench.pods.begin()
    bench.pods.put(raw(pod_json("a")))
    bench.pods.begin()
    bench.pods.put(raw(pod_json("b")))
    bench.pods.complete()

    assert bench.ends() == {"uid-a": START_MS, "uid-b": None}


def test_a_pod_that_a_list_did_not_have_is_back_with_the_next() -> None:
    bench = Bench()
    bench.pods.put(raw(pod_json("a")))
    bench.pods.begin()
    bench.pods.complete()
    bench.pods.put(raw(pod_json("a")))

    assert bench.ends() == {"uid-a": None}


def test_a_node_that_is_missing_from_a_full_list_is_removed_but_not_one_that_could_not_be_read() -> None:
    bench = Bench()
    for name in ("n1", "n2", "n3"):
        bench.nodes.put(raw(named(name)))
    bench.nodes.begin()
    bench.nodes.put(raw(named("n2")))
    bench.nodes.put(raw({"metadata": {"name": "n3", "uid": "u", "labels": 7}}))
    bench.nodes.complete()

    contents = [bench.state.pop_content(node) for node in ("n1", "n2", "n3")]
    assert [content and content.removed for content in contents] == [True, False, False]


def test_slices_that_are_missing_from_a_full_list_are_deleted() -> None:
    bench = Bench()
    for node in ("n1", "n2"):
        bench.nodes.put(raw(named(node)))
        bench.slices.put(raw(slice_json(f"s-{node}", node=node, uuids=[f"GPU-{node}"])))
    bench.slices.put(raw(slice_json("newer", node="n1", uuids=["GPU-newer"], generation=2)))
    bench.slices.begin()
    bench.slices.put(raw(slice_json("s-n2", node="n2", uuids=["GPU-n2"])))
    bench.slices.put(raw(slice_json("s-n1", node="n1", uuids=["GPU-n1"])))
    assert [*map(bench.state.pop_content, ("n1", "n2"))]
    bench.slices.complete()

    assert bench.state.changed_nodes() == ["n1"]
    devices = [bench.state.slices.of_node(node) for node in ("n1", "n2")]
    assert [[device.uuid for device in node_devices] for node_devices in devices] == [["GPU-n1"], ["GPU-n2"]]
