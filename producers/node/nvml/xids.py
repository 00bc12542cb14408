"""XID errors by device: those of this tick, and how many there were of each code since the start.

In: XID errors as they come, and the devices of their GPU. Out: ``events`` and
``xids`` of gpu.samples, and a line of log each.
State: the counts, and what no tick has told yet. Both are bounded: past its bounds an error is only counted.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.nvml.events import Xid

log = logging.getLogger(__name__)

MOST_EVENTS = 64
"""Of one device in one tick."""

UNKNOWN = 999
"""NVML's own code for an error that it can't tell; here also for codes that can't be, and those past the bound."""

_LARGEST_CODE = 0xFFFF
_MOST_CODES = 64
_MOST_DEVICES = 1024

Device = Mapping[str, Any]


class Xids:
    """All methods are for the event loop's thread."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._counts: dict[str, dict[str, int]] = {}
        self._untold: dict[str, list[dict[str, Any]]] = {}

    def note(self, xid: Xid, known: Sequence[Device]) -> None:
        """Take an error. ``known``: its GPU and that one's MIG devices; nothing where they are not known."""
        code = xid.code if 0 <= xid.code <= _LARGEST_CODE else UNKNOWN
        devices = of_instance(xid, known)
        for device in devices:
            self._note(device["uuid"], code, xid.ts_ms)
        self._instruments.counter(names.XIDS, "device" if devices else "unknown_device").inc()
        _say(xid, code, devices)

    def onto(self, devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The devices of a tick with their errors; each error is in one tick, the next that has its device."""
        if not self._counts:
            return list(devices)
        return [self._with(device, self._untold.pop(device["uuid"], None)) for device in devices]

    def _note(self, uuid: str, code: int, ts_ms: int) -> None:
        counts = self._counts.setdefault(uuid, {})
        key = str(code) if str(code) in counts or len(counts) < _MOST_CODES else str(UNKNOWN)
        counts[key] = counts.get(key, 0) + 1
        if len(self._counts) > _MOST_DEVICES:
            oldest = next(iter(self._counts))
            self._counts.pop(oldest)
            self._untold.pop(oldest, None)
        untold = self._untold.setdefault(uuid, [])
        if len(untold) < MOST_EVENTS:
            untold.append({"kind": "xid", "code": code, "ts_ms": ts_ms})

    def _with(self, device: dict[str, Any], events: list[dict[str, Any]] | None) -> dict[str, Any]:
        counts = self._counts.get(device["uuid"])
        if counts is None:
            return device
        found = {**device, "xids": dict(counts)}
        return {**found, "events": events} if events else found


def of_instance(xid: Xid, known: Sequence[Device]) -> Sequence[Device]:
    """The devices that an error is of: the MIG devices of its instance, else the GPU."""
    parts = [device for device in known if _is_of(device.get("mig"), xid)]
    return parts or known[:1]


def _is_of(mig: Mapping[str, Any] | None, xid: Xid) -> bool:
    if mig is None or xid.gpu_instance is None or mig.get("gpu_instance") != xid.gpu_instance:
        return False
    return xid.compute_instance is None or mig.get("compute_instance") in (None, xid.compute_instance)


def _say(xid: Xid, code: int, devices: Sequence[Device]) -> None:
    """A line for each code and device."""
    if not devices:
        what = f"{code} of a GPU that is not known"
        log.warning("XID %s", what, extra={"xid": code, "gpu_index": xid.gpu, "ts_ms": xid.ts_ms})
    for device in devices:
        what = f"{code} of {device['uuid']}"
        log.warning("XID %s", what, extra={**_identity(device), "xid": code, "ts_ms": xid.ts_ms})


def _identity(device: Device) -> dict[str, Any]:
    mig = device.get("mig")
    uuid = device["uuid"] if mig is None else mig["parent_uuid"]
    found = {"gpu_uuid": uuid, "gpu_index": device.get("index")}
    return found if mig is None else {**found, "gpu_mig_uuid": device["uuid"]}
