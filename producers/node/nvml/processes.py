"""The processes on one device: what memory they hold, how busy they keep it, and which pod or job they are of.

In: NVML's lists of processes, their control groups. Out: processes as in gpu.samples.
State: which lists the device has; the newest utilization seen, and until when.
On failure: if a list can't be had that the device has, there are no processes at all this time (a part of them would
look like all). If the utilization can't, the processes come without. What the device does not support is asked again
later.
Source: nvml.h. A process that did nothing in the last sample period has no utilization sample: that is 0.
"""

import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from producers.node.cgroups import ProcessPlace
from producers.node.nvml import binding, values
from producers.node.nvml.binding import Handle, NvmlError
from producers.node.nvml.calls import IMPLAUSIBLE, Calls, LeftOut, Tried, is_unsupported
from producers.node.nvml.driver_samples import Newest
from producers.node.nvml.support import Support
from producers.node.nvml.table import LARGEST_MEMORY_BYTES
from producers.node.nvml.values import Absent, Limits, Scale

LISTS: tuple[tuple[str, ...], ...] = tuple(
    (f"nvmlDeviceGet{kind}RunningProcesses_v3", f"nvmlDeviceGet{kind}RunningProcesses_v2")
    for kind in ("Compute", "Graphics", "MPSCompute")
)
"""Every list of processes, by its newest and its older function."""

UTILIZATION = ("nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetProcessUtilization")

SAMPLE_PERIOD_S = 0.9
"""Until then nothing new may mean that no sample has been taken since; later, that nothing was done."""

_MEMORY = Limits(0, LARGEST_MEMORY_BYTES)
_RATIO = Limits(0, 1)
_PERCENT = Scale(per=100)


class Placing(Protocol):
    """What is needed of :class:`producers.node.cgroups.Places`."""

    def of(self, pid: int) -> ProcessPlace | None:
        """Where a process belongs; None: it can't be seen."""


class Found(NamedTuple):
    """The processes as in gpu.samples, None where they can't be had, and of which kind each pid is."""

    rows: list[dict[str, Any]] | None
    kinds: Mapping[int, str]


class _Failed(Exception):
    """What was asked can't be had this time; it is counted."""


class Processes:
    """Those of one handle. ``cut``: it is a part of a GPU."""

    def __init__(
        self,
        calls: Calls,
        handle: Handle,
        places: Placing,
        *,
        cut: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls, self.handle, self._places, self._cut, self._clock = calls, handle, places, cut, clock
        self._support = Support()
        self._newest = Newest()
        self._ratios: dict[int, float | None] = {}
        self._sampled_s = clock()
        self._errors: dict[str, str] = {}
        self._left_out: dict[str, Sequence[str]] = {}

    def read(self) -> Found:
        """Those of this moment, each once. Raises Lost."""
        self._left_out.clear()
        self._support.begin()
        try:
            memory = self._memory()
        except _Failed:
            memory = None
        if memory is None:
            self._left_out["processes"] = [name for names in LISTS for name in names]
            return Found(None, {})
        ratios = self._ratio_of(memory) if memory else None
        if memory and ratios is None:
            self._left_out["processes.sm_utilization_ratio"] = UTILIZATION
        placed = [(pid, held, self._places.of(pid)) for pid, held in memory.items()]
        rows = [_row(pid, held, ratios, place) for pid, held, place in placed]
        return Found(rows, {pid: _kind(place) for pid, _, place in placed})

    def left_out(self) -> LeftOut:
        """What the last reading could not have of them."""
        return {
            what: tuple(Tried(name, self._errors[name]) for name in names if name in self._errors)
            for what, names in self._left_out.items()
        }

    def _memory(self) -> dict[int, int | None] | None:
        """What each process holds, None where that is not known; None where the device lists no processes."""
        found: dict[int, int | None] = {}
        listed = False
        for names in LISTS:
            answer = self._first_supported(names)
            if answer is None and any(map(self._support.has_answered, names)):
                raise _Failed
            listed = listed or answer is not None
            for process in answer or ():
                held = self._held(process.usedGpuMemory)
                found[process.pid] = _larger(found.get(process.pid), held)
        return found if listed else None

    def _held(self, raw: int | None) -> int | None:
        if raw is None:
            return None
        held = values.measured(raw, 64, Scale(), _MEMORY)
        if isinstance(held, Absent):
            self._calls.count("usedGpuMemory", IMPLAUSIBLE)
            return None
        return raw

    def _ratio_of(self, pids: Container[int]) -> Mapping[int, float | None] | None:
        """How busy each process keeps the device; those that are not there did nothing. None: it can't be said."""
        since_us = self._newest.since_us() or 0
        try:
            samples = self._first_supported(UTILIZATION, since_us)
        except _Failed:
            return None
        if samples is None:
            return None
        now_s, new = self._clock(), [one for one in samples if self._newest.is_new(one.timeStamp)]
        if new or now_s - self._sampled_s > SAMPLE_PERIOD_S:
            self._ratios, self._sampled_s = self._of_newest(new, pids), now_s
        return self._ratios

    def _of_newest(self, new: Sequence[Any], pids: Container[int]) -> dict[int, float | None]:
        """The newest sample of each process; None where it can't be, which is counted. The driver also has samples of
        processes that have ended, and of none: those are of no use."""
        self._newest.read(sample.timeStamp for sample in new)
        ordered = sorted(new, key=lambda sample: int(sample.timeStamp))
        return {sample.pid: self._ratio(sample.smUtil) for sample in ordered if sample.pid in pids}

    def _ratio(self, raw: int) -> float | None:
        ratio = values.measured(raw, 32, _PERCENT, _RATIO)
        if not isinstance(ratio, Absent):
            return ratio
        self._calls.count("smUtil", IMPLAUSIBLE)
        return None

    def _first_supported(self, names: Sequence[str], *arguments: Any) -> Sequence[Any] | None:
        """What the first of these answers that the device supports; None if it supports none. Raises _Failed."""
        for name in filter(self._support.asks, names):
            try:
                found = self._listed(name, *arguments)
            except NvmlError as error:
                self._errors[name] = error.name
                if not (is_unsupported(error) or (self._cut and error.code == binding.INVALID_ARGUMENT)):
                    self._calls.count(name, error.name)
                    raise _Failed from None
                self._support.refuse(name, Tried(name, error.name))
            else:
                self._errors.pop(name, None)
                self._support.answer(name)
                return found
        return None

    def _listed(self, name: str, *arguments: Any) -> Sequence[Any]:
        """A list; one that grew while it was asked for is asked for once more. Raises NvmlError, Lost."""
        try:
            return self._found(name, *arguments)
        except NvmlError as error:
            if error.code != binding.INSUFFICIENT_SIZE:
                raise
            return self._found(name, *arguments)

    def _found(self, name: str, *arguments: Any) -> Sequence[Any]:
        try:
            found: Sequence[Any] = self._calls.ask(name, self.handle, *arguments)
        except NvmlError as error:
            if error.code != binding.NOT_FOUND:
                raise
            return ()
        return found


def _larger(one: int | None, other: int | None) -> int | None:
    """Of a process that is in two lists."""
    return other if one is None else one if other is None else max(one, other)


def _row(
    pid: int, held: int | None, ratios: Mapping[int, float | None] | None, place: ProcessPlace | None
) -> dict[str, Any]:
    """A process as in gpu.samples; what is not known is left out."""
    ratio = None if ratios is None else ratios.get(pid, 0.0)
    found = {"pid": pid, "memory_used_bytes": held, "sm_utilization_ratio": ratio}
    if place is not None:
        found.update(place._asdict())
    return {key: value for key, value in found.items() if value is not None}


def _kind(place: ProcessPlace | None) -> str:
    """As the instrument ``gpustream_node_processes`` has it."""
    if place is None:
        return "unseen"
    return "host" if place.pod_uid is None and place.job_id is None else "attributed"
