"""A device's activity. The rule itself is tested with the alerts, in tests/streams/alerts/conditions."""

from typing import Any

import msgspec
import pytest

from topics.attributed import AttributedDevice
from topics.idleness import IDLE_BELOW, Activity, Ratios, beside_parts, device_activity, is_idle, work_of


def device(*pods: float | None, used: float | None = None, **fields: Any) -> AttributedDevice:
    """A device whose pods each use this part of it. ``works``: the UID of the pod of each process, and its work."""
    holders = [
        {"namespace": "ml", "pod": f"p-{number}", "pod_uid": f"u-{number}"}
        | ({} if part is None else {"parts": {"utilization_ratio": part}})
        for number, part in enumerate(pods)
    ]
    works = fields.pop("works", ())
    fields |= {"processes": [{"pid": 1, "pod_uid": uid, "sm_utilization_ratio": work} for uid, work in works]}
    metrics = {} if used is None else {"gpu_utilization_ratio": used}
    return msgspec.convert({"uuid": "GPU-a", "holders": holders, "metrics": metrics, **fields}, AttributedDevice)


@pytest.mark.parametrize(
    ("device", "activity"),
    [
        (device(used=0.9), "free"),
        (device(None, used=0.9), "busy"),
        (device(None, used=0.0), "idle"),
        (device(None), "held"),
        (device(None, used=0.9, state="lost"), "failing"),
        (device(None, used=0.9, state="timeout"), "failing"),
        (device(0.5, 0.0, used=0.5), "busy"),
        (device(0.0, 0.0, used=0.0), "idle"),
        (device(None, None, used=0.5), "busy"),
        (device(0.0, 0.0, used=0.9, unattributed={"utilization_ratio": 0.9}), "busy"),
        (device(None, used=0.0, works=[("u-0", 0.5)]), "busy"),
        (device(0.009, used=0.009, works=[("u-0", 0.006), ("u-0", 0.006)]), "busy"),
        (device(None, None, used=0.009, works=[("u-0", 0.006), ("u-1", 0.006)]), "idle"),
        (device(None, used=0.0, works=[(None, 0.5)]), "idle"),
        (device(None, used=0.9, state="a word of a later version"), "busy"),
    ],
)
def test_a_device_has_one_activity(device: AttributedDevice, activity: Activity) -> None:
    assert device_activity(device) == activity


@pytest.mark.parametrize("works", [[("u-0", 0.006), ("u-0", 0.006)], [("u-0", 0.006), (None, 0.5)], [(None, 0.5)], []])
def test_a_device_that_one_pod_holds_is_idle_if_that_pod_is(works: list[tuple[str | None, float]]) -> None:
    held = device(None, used=0.009, works=works)
    work = work_of(Ratios(gpu_utilization_ratio=0.009))
    (work_of_processes,), rest = beside_parts(work, None, held.processes, [("u-0", None)])

    assert (device_activity(held) == "idle") == is_idle(IDLE_BELOW, work, None, work_of_processes, rest)
