"""The processes on one device: what memory they hold, how busy they keep it, and which pod or job they are of.

In: NVML's lists of processes, and their control groups. Out: processes as in gpu.samples.
State: which lists the device has; the last utilization of each process, and the time of the newest sample.
On failure: if one of the device's lists fails, this tick has no processes at all, because some of them would look like
all of them. If the utilization fails, the processes come without it. What the device does not support is asked again
later.
Source: nvml.h. A process that did nothing in the last sample period has no utilization sample: that counts as 0.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from producers.node.cgroups import ProcessOwners
from producers.node.nvml import binding
from producers.node.nvml.binding import Handle, NvmlError
from producers.node.nvml.calls import IMPLAUSIBLE, Calls, FailedCall, LeftOut, Support, is_refused, is_unsupported
from producers.node.nvml.sources import Newest
from producers.node.nvml.table import LARGEST_MEMORY_BYTES, Limits, Scale, measured

LISTS: tuple[tuple[str, ...], ...] = tuple(
    (f"nvmlDeviceGet{kind}RunningProcesses_v3", f"nvmlDeviceGet{kind}RunningProcesses_v2")
    for kind in ("Compute", "Graphics", "MPSCompute")
)
"""Every list of processes, by its newest and its older function."""

UTILIZATION = ("nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetProcessUtilization")
SAMPLE_PERIOD_S = 0.9  # within it, nothing new may mean that no sample was taken; after it, that nothing was done
_MEMORY = Limits(0, LARGEST_MEMORY_BYTES)
_RATIO = Limits(0, 1)
_PERCENT = Scale(per=100)


class DeviceProcesses(NamedTuple):
    """The processes as in gpu.samples, None if they are not known, and the kind of each pid, as the instrument
    ``gpustream_node_processes`` has it."""

    rows: list[dict[str, Any]] | None
    kinds: Mapping[int, str]


class _Failed(Exception):
    """There is no answer this time; that is counted."""


class Processes:
    """Those of one handle. ``cut``: it is a part of a GPU."""

    def __init__(
        self, calls: Calls, handle: Handle, owners: ProcessOwners, *, cut: bool, clock: Callable[[], float]
    ) -> None:
        self._calls, self.handle, self._owners, self._cut, self._clock = calls, handle, owners, cut, clock
        self._support = Support()
        self._newest = Newest()
        self._ratios: dict[int, float | None] = {}
        self._sampled_s = clock()
        self._errors: dict[str, str] = {}
        self._left_out: dict[str, Sequence[str]] = {}

    def read(self) -> DeviceProcesses:
        """Those of this moment, each once; what is not known of one is left out. Raises Lost."""
        self._left_out.clear()
        self._support.begin()
        try:
            memory = self._memory()
        except _Failed:
            memory = None
        if memory is None:
            self._left_out["processes"] = [name for names in LISTS for name in names]
            return DeviceProcesses(None, {})
        ratios = self._utilization(memory) if memory else None
        if memory and ratios is None:
            self._left_out["processes.sm_utilization_ratio"] = UTILIZATION
        rows, kinds = [], {}
        for pid, held in memory.items():
            owner = self._owners.of(pid)
            ratio = None if ratios is None else ratios.get(pid, 0.0)
            row = {"pid": pid, "memory_used_bytes": held, "sm_utilization_ratio": ratio}
            if owner is None:
                kinds[pid] = "unseen"
            else:
                row |= owner._asdict()
                kinds[pid] = "host" if owner.pod_uid is None and owner.job_id is None else "attributed"
            rows.append({key: value for key, value in row.items() if value is not None})
        return DeviceProcesses(rows, kinds)

    def left_out(self) -> LeftOut:
        """What the last reading could not have of them."""
        return {
            what: tuple(FailedCall(name, self._errors[name]) for name in names if name in self._errors)
            for what, names in self._left_out.items()
        }

    def _memory(self) -> dict[int, int | None] | None:
        """What each process holds, None if that is not known; None if the device lists no processes.
        Raises Lost, _Failed."""
        found: dict[int, int | None] = {}
        listed = False
        for names in LISTS:
            answer = self._first_supported(names)
            if answer is None and any(map(self._support.has_answered, names)):
                raise _Failed
            listed = listed or answer is not None
            for process in answer or ():
                held = process.usedGpuMemory
                if held is not None and measured(held, 64, Scale(), _MEMORY) is None:
                    self._calls.count("usedGpuMemory", IMPLAUSIBLE)
                    held = None
                known = [one for one in (found.get(process.pid), held) if one is not None]
                found[process.pid] = max(known, default=None)  # it may be in two lists
        return found if listed else None

    def _utilization(self, pids: Container[int]) -> Mapping[int, float | None] | None:
        """How busy each process keeps the device. A process that is not in it did nothing; None for an implausible
        value, which is counted. None in place of all: it is not known.

        The driver also has samples of processes that have ended, and samples of no process: those are left out.
        """
        since_us = self._newest.since_us() or 0
        try:
            samples = self._first_supported(UTILIZATION, since_us)
        except _Failed:
            return None
        if samples is None:
            return None
        now_s, new = self._clock(), self._newest.take(samples, lambda one: int(one.timeStamp))
        if new or now_s - self._sampled_s > SAMPLE_PERIOD_S:
            self._ratios, self._sampled_s = {}, now_s
            for sample in sorted(new, key=lambda sample: int(sample.timeStamp)):
                if sample.pid in pids:
                    self._ratios[sample.pid] = ratio = measured(sample.smUtil, 32, _PERCENT, _RATIO)
                    if ratio is None:
                        self._calls.count("smUtil", IMPLAUSIBLE)
        return self._ratios

    def _first_supported(self, names: Sequence[str], *arguments: Any) -> Sequence[Any] | None:
        """What the first of these answers that the device supports; None if it supports none. Raises Lost, _Failed."""
        for name in filter(self._support.asks, names):
            try:
                found = self._list(name, *arguments)
            except NvmlError as error:
                self._errors[name] = error.name
                if not (is_refused(error) if self._cut else is_unsupported(error)):
                    self._calls.count(name, error.name)
                    raise _Failed from None
                self._support.refuse(name, FailedCall(name, error.name))
            else:
                self._errors.pop(name, None)
                self._support.answer(name)
                return found
        return None

    def _list(self, name: str, *arguments: Any, again: bool = True) -> Sequence[Any]:
        """A list; one that grew while it was asked for is asked for once more. Raises NvmlError, Lost."""
        try:
            found: Sequence[Any] = self._calls.ask(name, self.handle, *arguments)
        except NvmlError as error:
            if error.code == binding.NOT_FOUND:
                return ()
            if error.code == binding.INSUFFICIENT_SIZE and again:
                return self._list(name, *arguments, again=False)
            raise
        return found
