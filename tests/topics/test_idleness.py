"""A device's activity. The rule itself is tested with the alerts, in tests/streams/alerts/conditions."""

from typing import Any

import msgspec
import pytest

from topics.attributed import AttributedDevice
from topics.idleness import Activity, device_activity


def device(*pods: float | None, used: float | None = None, **fields: Any) -> AttributedDevice:
    """A device whose pods each use this part of it."""
    holders = [
        {"namespace": "ml", "pod": f"p-{number}"} | ({} if part is None else {"parts": {"utilization_ratio": part}})
        for number, part in enumerate(pods)
    ]
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
        (device(None, used=0.0, processes=[{"pid": 1, "sm_utilization_ratio": 0.5}]), "busy"),
        (device(None, used=0.9, state="a word of a later version"), "busy"),
    ],
)
def test_a_device_has_one_activity(device: AttributedDevice, activity: Activity) -> None:
    assert device_activity(device) == activity
