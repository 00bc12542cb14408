"""The MIG devices of one GPU, as NVML lists them.

In: NVML's answers. Out: each MIG device with its handle, its instances and its profile.
State: the slots without one in the last listing, so that one that is made is noticed without listing all.
On failure: a slot that can't be asked is left out, and counted. If a call is too slow to be made, or answers nothing,
there is no listing.
Source: nvml.h: a GPU has so many slots, of which any may be empty; the profile is only in the name.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from producers.node.nvml import binding
from producers.node.nvml.binding import Handle, NvmlError
from producers.node.nvml.calls import Calls, NotReturned

_BY_SLOT = "nvmlDeviceGetMigDeviceHandleByIndex"
_PROFILE = re.compile(r" MIG (\S+)$")


class Instance(NamedTuple):
    """A MIG device as it is listed."""

    handle: Handle
    uuid: str
    gpu_instance: int | None
    compute_instance: int | None
    profile: str | None


class Instances:
    """Those of the GPU with that handle. For the thread of that GPU."""

    def __init__(self, calls: Calls, gpu: Handle) -> None:
        self._calls, self._gpu = calls, gpu
        self._empty: list[int] = []

    def listed(self) -> Sequence[Instance]:
        """All of them. Raises NvmlError, Lost."""
        self._empty.clear()
        return list(self._found(self._calls.ask("nvmlDeviceGetMaxMigDeviceCount", self._gpu)))

    def forget(self) -> None:
        """The GPU is whole: no slot is looked at."""
        self._empty.clear()

    def is_new(self) -> bool:
        """Whether there is one where none was when they were listed. Raises Lost."""
        return any(map(self._is_filled, self._empty))

    def _is_filled(self, slot: int) -> bool:
        try:
            self._calls.ask(_BY_SLOT, self._gpu, slot)
        except NvmlError:
            return False
        return True

    def _found(self, slots: int) -> Iterable[Instance]:
        for slot in range(slots):
            self._empty.append(slot)
            try:
                handle = self._calls.ask(_BY_SLOT, self._gpu, slot)
                self._empty.remove(slot)
                uuid = self._calls.ask("nvmlDeviceGetUUID", handle)
            except NvmlError as error:
                if isinstance(error, NotReturned) or error.code == binding.NOTHING_FILLED_IN:
                    raise
                if error.code not in (binding.NOT_FOUND, binding.INVALID_ARGUMENT):
                    self._calls.count(self._calls.doing, error.name)
                continue
            yield self._instance(handle, uuid)

    def _instance(self, handle: Handle, uuid: str) -> Instance:
        profile = _PROFILE.search(self._calls.optional("nvmlDeviceGetName", handle) or "")
        return Instance(
            handle,
            uuid,
            self._calls.optional("nvmlDeviceGetGpuInstanceId", handle),
            self._calls.optional("nvmlDeviceGetComputeInstanceId", handle),
            profile[1] if profile else None,
        )
