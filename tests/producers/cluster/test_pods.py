"""A pod is reported from its binding to half an hour after its end, whatever the watch does meanwhile."""

from typing import Any

import pytest

from producers.cluster import pods as pods_module
from producers.cluster.pods import KEPT_MS, KnownPod, PodOwner, Pods
from tests.producers.cluster.kubernetes_objects import START_MS, chosen, over, pod
from topics.workloads import Owner

SELECTION = chosen(labels=["*"])
NOW_MS = START_MS + 3_600_000


def known_pod(
    name: str = "bert-0", uid: str = "", *, before: KnownPod | None = None, now_ms: int = NOW_MS, **changes: Any
) -> KnownPod:
    return pods_module.known_pod(pod(name, uid, **changes), SELECTION, before, now_ms)


class Bench:
    """Pods, and a short way to put one."""

    def __init__(self) -> None:
        self.pods = Pods()

    def put(self, name: str = "bert-0", uid: str = "", *, now_ms: int = NOW_MS, **changes: Any) -> list[Any]:
        before = self.pods.get(uid or f"uid-{name}")
        return list(self.pods.put(known_pod(name, uid, before=before, now_ms=now_ms, **changes), now_ms))

    def ends(self) -> dict[str, int | None]:
        return {pod.uid: pod.ended_ms for pod in self.pods.on_node("n1")}


def test_a_pod_began_when_the_kubelet_started_it_or_else_when_it_was_created() -> None:
    started = known_pod(status={"startTime": "2026-03-01T12:00:05Z"})
    waiting = known_pod(status={"startTime": None, "phase": "Pending"})

    assert (started.started_ms, waiting.started_ms) == (START_MS + 5_000, START_MS)
    assert started.ended_ms is None


def test_a_pod_ended_with_the_last_of_its_containers() -> None:
    status = over("Failed", "2026-03-01T12:10:00Z", "2026-03-01T12:20:00Z")
    status["conditions"] = [{"lastTransitionTime": "2026-03-01T12:30:00Z"}]

    assert known_pod(status=status).ended_ms == START_MS + 20 * 60_000


def test_a_container_without_an_end_time_leaves_the_end_to_the_conditions() -> None:
    status = over("Failed", "2026-03-01T12:10:00Z", None)
    status["initContainerStatuses"] = over("", "2026-03-01T12:00:01Z")["containerStatuses"]
    lost = {**status, "conditions": [{"lastTransitionTime": "2026-03-01T12:30:00Z"}]}
    evicted = {**lost, "containerStatuses": None, "initContainerStatuses": None}
    never_began = {**status, "containerStatuses": over("", None)["containerStatuses"]}

    assert known_pod(status=status).ended_ms == START_MS + 10 * 60_000
    assert known_pod(status=never_began).ended_ms == START_MS + 1_000
    assert known_pod(status=lost).ended_ms == known_pod(status=evicted).ended_ms == START_MS + 30 * 60_000


def test_why_a_pods_restarted_container_waits_is_reported_while_the_pod_runs() -> None:
    def container(restarts: int, reason: str | None) -> dict[str, Any]:
        state = {"running": {}} if reason is None else {"waiting": {"reason": reason}}
        return {"restartCount": restarts, "state": state}

    containers = [container(1, "CrashLoopBackOff"), container(9, None), container(0, "ContainerCreating")]
    crashing = {"phase": "Running", "containerStatuses": containers}
    also = {**crashing, "initContainerStatuses": [container(5, "ImagePullBackOff")]}
    expected = [("CrashLoopBackOff", 1), ("ImagePullBackOff", 5), (None, None), (None, None)]
    statuses = [crashing, also, {**also, "phase": "Failed"}, {**crashing, "containerStatuses": containers[1:]}]
    found = [known_pod(status=status) for status in statuses]
    assert [(pod.waiting, pod.restarts) for pod in found] == expected


def test_no_pod_ends_before_it_begins() -> None:
    assert known_pod(status=over("Succeeded", "2026-03-01T11:00:00Z")).ended_ms == START_MS


def test_an_end_without_a_time_is_when_it_was_first_seen_and_stays_so() -> None:
    running = known_pod()
    first = known_pod(status=over("Failed"), before=running, now_ms=NOW_MS)
    again = known_pod(status=over("Failed"), before=first, now_ms=NOW_MS + 99_000)

    assert (first.ended_ms, again.ended_ms) == (NOW_MS, NOW_MS)


def test_a_pod_that_was_over_when_first_seen_without_a_time_never_ran() -> None:
    assert known_pod(status=over("Failed")).ended_ms == START_MS


def test_a_pod_that_is_being_deleted_holds_its_gpu_until_it_is_gone() -> None:
    bench = Bench()
    bench.put()
    bench.put(deleting=True)
    assert bench.ends() == {"uid-bert-0": None}

    bench.pods.end("uid-bert-0", NOW_MS + 7)
    assert bench.ends() == {"uid-bert-0": NOW_MS + 7}


def test_deleting_a_pod_that_has_ended_does_not_move_its_end() -> None:
    bench = Bench()
    bench.put()
    bench.put(status=over("Succeeded", "2026-03-01T12:10:00Z"))
    assert not bench.pods.end("uid-bert-0", NOW_MS + 7)

    assert bench.ends() == {"uid-bert-0": START_MS + 600_000}


def test_an_update_without_news_is_no_change() -> None:
    bench = Bench()
    assert len(bench.put()) == 1
    assert bench.put() == []
    assert len(bench.put(labels={"app": "other"})) == 1


def test_a_pod_that_comes_back_under_its_name_is_another() -> None:
    bench = Bench()
    bench.put(uid="first")
    bench.pods.end("first", NOW_MS + 1_000)
    bench.put(uid="second", now_ms=NOW_MS + 1_100)

    assert bench.ends() == {"first": NOW_MS + 1_000, "second": None}


def test_an_ended_pod_stays_for_half_an_hour_after_its_end_was_noticed() -> None:
    bench = Bench()
    bench.put()
    bench.put(status=over("Succeeded", "2026-03-01T12:10:00Z"), now_ms=NOW_MS)

    assert bench.pods.expire(NOW_MS + KEPT_MS - 1) == []
    assert [change.before.uid for change in bench.pods.expire(NOW_MS + KEPT_MS) if change.before] == ["uid-bert-0"]
    assert (len(bench.pods), bench.pods.on_node("n1")) == (0, [])


def test_a_pod_that_ended_long_before_it_was_first_seen_is_not_reported() -> None:
    bench = Bench()
    assert bench.put(status=over("Succeeded", "2026-03-01T12:10:00Z"), now_ms=START_MS + 600_000 + KEPT_MS) == []
    assert bench.put("other", status=over("Succeeded", "2026-03-01T12:10:00Z"), now_ms=START_MS + 700_000)

    assert list(bench.ends()) == ["uid-other"]


def test_an_expired_pod_does_not_come_back_with_a_list() -> None:
    bench = Bench()
    bench.put()
    ended = over("Failed", "2026-03-01T12:59:00Z")
    bench.put(status=ended)
    bench.pods.expire(NOW_MS + KEPT_MS)

    assert bench.put(status=ended, now_ms=NOW_MS + KEPT_MS) == []


def test_a_pod_that_an_old_list_did_not_have_is_back_with_the_next() -> None:
    bench = Bench()
    bench.put("a")
    bench.pods.end("uid-a", NOW_MS)
    bench.put("a")

    assert bench.ends() == {"uid-a": None}
    assert bench.pods.expire(NOW_MS + KEPT_MS) == []


def test_the_texts_of_an_owner_are_bounded() -> None:
    owner = known_pod(owner=Owner("v1", "K" * 9_999, "x" * 999_999, "u")).owner

    assert owner is not None
    assert (len(owner.kind), len(owner.name)) == (317, 317)


@pytest.mark.parametrize("by", ["node", "owner"])
def test_pods_are_found_by_node_and_by_owner(by: str) -> None:
    bench = Bench()
    owner = Owner("apps/v1", "ReplicaSet", "rs", "rs-1")
    bench.put("a", owner=owner)
    bench.put("b", owner=owner)
    bench.put("c", node="n2")

    pods = bench.pods.on_node("n1") if by == "node" else bench.pods.of_owner(PodOwner("ml", owner))
    assert {pod.name for pod in pods} == {"a", "b"}
