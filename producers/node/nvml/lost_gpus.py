"""GPUs that were there before NVML was opened again, and that the driver does not open any more: lost, not forgotten.

In: who was there before, who answers since. Out: their devices as in gpu.samples, ``lost`` or ``timeout``; a line of
log for each that is missing, unless it was said already that it is lost, and one when it is back.
State: who they were, for as long as the process; which have been told. Pure but for the log.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)

_KEPT = ("uuid", "index", "vendor", "model", "pci_bus_id", "minor", "mig", "info")
_NUMBERS = ("index", "minor")

Known = Sequence[Mapping[str, Any]]
"""A GPU as it was last, then its MIG devices."""


def bare(devices: Iterable[Mapping[str, Any]], state: str) -> list[dict[str, Any]]:
    """Devices that did not answer: who they are, and nothing else."""
    return [{**{key: one[key] for key in _KEPT if key in one}, "state": state, "metrics": {}} for one in devices]


def identity(device: Mapping[str, Any]) -> dict[str, Any]:
    """Who a GPU is, as fields of a line of log; whoever looks for the board needs its place and serial number."""
    serial = device.get("info", {}).get("serial")
    found = {"gpu_uuid": device["uuid"], "pci_bus_id": device.get("pci_bus_id"), "serial": serial}
    return {key: value for key, value in found.items() if value is not None}


class LostGpus:
    """All methods are for the event loop's thread."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._told: set[str] = set()

    @property
    def indexes(self) -> set[int]:
        """Those that they had."""
        return {known[0]["index"] for known in self._known.values()}

    def expect(self, uuid: str, known: Known, *, told: bool) -> None:
        """NVML is opened again: until this GPU answers, it is missing. ``told``: it was said to be lost before."""
        self._known[uuid] = known
        if told:
            self._told.add(uuid)

    def answered(self, uuid: str) -> None:
        """This GPU is not missing."""
        known = self._known.pop(uuid, None)
        if known is not None and uuid in self._told:
            self._told.discard(uuid)
            _say(logging.INFO, f"{_title(known)} is back", known)

    def report(self) -> None:
        """Say of each, once, that it is missing: every GPU that the driver has was asked who it is."""
        for uuid in self._known.keys() - self._told:
            self._told.add(uuid)
            _say(logging.WARNING, _trouble(self._known[uuid]), self._known[uuid])

    def devices(self, state: str, here: Iterable[Mapping[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
        """Those of each, with the index that it had; ``here`` are the devices that are not missing.

        A driver gives the numbers of a missing GPU to others: one that another has by now is not this one's any more.
        """
        if not self._known:
            return []
        taken = {(key, one[key]) for one in here for key in _NUMBERS if key in one}
        return [(known[0]["index"], _without(bare(known, state), taken)) for known in self._known.values()]

    def not_ready(self) -> list[str]:
        """What is wrong, for people."""
        return [_trouble(known) for known in self._known.values()]


def _without(devices: Iterable[Mapping[str, Any]], taken: set[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in one.items() if not (key in _NUMBERS and (key, value) in taken)} for one in devices
    ]


def _trouble(known: Known) -> str:
    return f"{_title(known)} is lost: the driver does not open it any more"


def _title(known: Known) -> str:
    return f"GPU {known[0].get('index')} ({known[0]['uuid']})"


def _say(level: int, message: str, known: Known) -> None:
    """The GPU is in the message, so that one does not hold back another."""
    log.log(level, message, extra=identity(known[0]))
