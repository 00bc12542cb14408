"""The holders of a device, by pod."""

from topics.attributed import (
    AttributedDevice,
    AttributedEvent,
    Holder,
    HoldingPod,
    Workload,
    by_pod,
    holder_of_job,
    pods_of,
)
from topics.samples import Job


def holder(pod: str, uid: str | None = None, container: str = "main") -> Holder:
    return Holder("ml-team", pod, pod_uid=uid, container=container)


def test_the_containers_of_a_pod_are_grouped_together() -> None:
    a, b, c = holder("a", "1"), holder("b", "2"), holder("a", "1", "sidecar")
    device = AttributedDevice(uuid="GPU-1", vendor="nvidia", state="ok", metrics={}, holders=(a, b, c))
    assert pods_of(device.holders) == {HoldingPod("ml-team", "a", "1"): [a, c], HoldingPod("ml-team", "b", "2"): [b]}


def test_a_pod_that_was_created_again_under_its_name_is_another_one() -> None:
    assert list(by_pod([holder("a", "1"), holder("a", "2")])) == [("ml-team", "a", "1"), ("ml-team", "a", "2")]


def test_a_holder_without_a_uid_is_of_the_pod_of_that_name() -> None:
    unknown, with_uid, other_pod = holder("a"), holder("a", "1", "sidecar"), holder("b")
    assert by_pod([unknown, with_uid, other_pod]) == {
        ("ml-team", "a", "1"): [with_uid, unknown],
        ("ml-team", "b", None): [other_pod],
    }


def test_nobody_holds_a_free_device() -> None:
    assert pods_of(()) == {}


def test_a_batch_job_is_a_holder_but_no_pod_and_has_no_label_for_what_is_not_known() -> None:
    holder = holder_of_job(Job("7"))
    assert holder == Holder("slurm", "7", pod_uid="7", workload=Workload("SlurmJob", "7"))
    assert pods_of((holder,)) == {}


def test_an_event_without_holders_of_its_own_has_the_devices() -> None:
    current, at_event = (holder("a"),), (holder("b"),)
    assert AttributedEvent("xid", 79).held_by(current) == current
    assert AttributedEvent("xid", 79, holders=at_event).held_by(current) == at_event
    assert AttributedEvent("xid", 79, holders=()).held_by(current) == ()
