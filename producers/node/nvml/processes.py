"""The processes on one device: how much memory they use, how busy they keep it, and their pod or job.

In: NVML's lists of processes, and their control groups. Out: processes as in gpu.samples.
State: which lists the device has; the last utilization of each process, and the time of the newest sample.
On failure: if one of the device's lists fails, this tick has no processes at all, because an incomplete list would look
like a complete one. Every device that has any list has that of compute processes, so without it the processes are not
known, even if the device says that it does not support it. If the utilization fails, the processes are reported without
it. A list that the device does not support is asked for again later.
Source: nvml.h. A process that did nothing in the last sample period has no utilization sample: that counts as 0.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from producers.node.cgroups import ProcessOwners
from producers.node.nvml import binding
from producers.node.nvml.binding import PROCESS_LISTS, Handle, NvmlError
from producers.node.nvml.calls import IMPLAUSIBLE, Calls, FailedCall, LeftOut, Support, is_refused, is_unsupported
from producers.node.nvml.sources import SampleCursor
from producers.node.nvml.table import AS_IS, BYTES, PERCENT, RATIO, measured

UTILIZATION = ("nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetProcessUtilization")
SAMPLE_PERIOD_S = 0.9  # without a new sample for longer than this, the processes did nothing


class DeviceProcesses(NamedTuple):
    """The processes as in gpu.samples, None if they are not known, and the kind of each pid: a label value of
    ``gpustream_node_processes``."""

    rows: list[dict[str, Any]] | None
    kinds: Mapping[int, str]


class _ListFailed(Exception):
    """The list could not be read this time. An error is counted already."""


class Processes:
    """The processes of one handle. ``mig_enabled``: it is a MIG device, or its GPU is in MIG mode."""

    def __init__(
        self, calls: Calls, handle: Handle, owners: ProcessOwners, *, mig_enabled: bool, clock: Callable[[], float]
    ) -> None:
        self._calls, self.handle, self._owners = calls, handle, owners
        self._mig_enabled, self._clock = mig_enabled, clock
        self._support = Support()
        self._cursor = SampleCursor()
        self._sm_utilization: dict[int, float | None] = {}
        self._sampled_s = clock()
        self._errors: dict[str, str] = {}
        self._missing: dict[str, Sequence[str]] = {}

    def read(self) -> DeviceProcesses:
        """The processes of this moment, each once, without the values that are not known. Raises GpuLost."""
        self._missing.clear()
        self._support.begin_reading()
        try:
            memory_by_pid = self._memory()
        except _ListFailed:
            self._missing["processes"] = [name for names in PROCESS_LISTS for name in names]
            return DeviceProcesses(None, {})
        utilization = self._utilization(memory_by_pid) if memory_by_pid else None
        if memory_by_pid and utilization is None:
            self._missing["processes.sm_utilization_ratio"] = UTILIZATION
        rows, kinds = [], {}
        for pid, memory_bytes in memory_by_pid.items():
            owner = self._owners.of(pid)
            sm_utilization = None if utilization is None else utilization.get(pid, 0.0)
            row = {"pid": pid, "memory_used_bytes": memory_bytes, "sm_utilization_ratio": sm_utilization}
            if owner is None:
                kinds[pid] = "unseen"
            else:
                row |= owner._asdict()
                kinds[pid] = "host" if owner.pod_uid is None and owner.job_id is None else "attributed"
            rows.append({key: value for key, value in row.items() if value is not None})
        return DeviceProcesses(rows, kinds)

    def left_out(self) -> LeftOut:
        """The values of processes that the last reading lacks, with the calls that failed."""
        return {
            value_name: tuple(FailedCall(name, self._errors[name]) for name in names if name in self._errors)
            for value_name, names in self._missing.items()
        }

    def _memory(self) -> dict[int, int | None]:
        """The memory of each process in bytes, None if it is not known. Raises GpuLost, _ListFailed."""
        memory_by_pid: dict[int, int | None] = {}
        for names in PROCESS_LISTS:
            answer = self._first_supported(names)
            if answer is None and (names == PROCESS_LISTS[0] or any(map(self._support.has_answered, names))):
                raise _ListFailed
            for process in answer or ():
                memory_bytes = process.usedGpuMemory
                if memory_bytes is not None and measured(memory_bytes, 64, AS_IS, BYTES) is None:
                    self._calls.count("usedGpuMemory", IMPLAUSIBLE)
                    memory_bytes = None
                amounts = [amount for amount in (memory_by_pid.get(process.pid), memory_bytes) if amount is not None]
                memory_by_pid[process.pid] = max(amounts, default=None)  # it may be in two lists
        return memory_by_pid

    def _utilization(self, pids: Container[int]) -> Mapping[int, float | None] | None:
        """How busy each process keeps the device; a missing process did nothing. None for an implausible value, which
        is counted. None in place of the dict if it is not known.

        The driver also has samples of ended processes, and samples of no process: those are ignored.
        """
        since_us = self._cursor.since_us() or 0
        try:
            samples = self._first_supported(UTILIZATION, since_us)
        except _ListFailed:
            return None
        if samples is None:
            return None
        now_s, new = self._clock(), self._cursor.new_samples(samples, lambda sample: int(sample.timeStamp))
        if new or now_s - self._sampled_s > SAMPLE_PERIOD_S:
            self._sm_utilization, self._sampled_s = {}, now_s
            for sample in sorted(new, key=lambda sample: int(sample.timeStamp)):
                if sample.pid in pids:
                    self._sm_utilization[sample.pid] = ratio = measured(sample.smUtil, 32, PERCENT, RATIO)
                    if ratio is None:
                        self._calls.count("smUtil", IMPLAUSIBLE)
        return self._sm_utilization

    def _first_supported(self, names: Sequence[str], *arguments: Any) -> Sequence[Any] | None:
        """The answer of the first of these functions that the device supports; None if it supports none.
        Raises GpuLost, _ListFailed."""
        for name in filter(self._support.may_ask, names):
            try:
                answer = self._list(name, *arguments)
            except NvmlError as error:
                self._errors[name] = error.name
                if not (is_refused(error) if self._mig_enabled else is_unsupported(error)):
                    self._calls.count(name, error.name)
                    raise _ListFailed from None
                self._support.mark_refused(name, FailedCall(name, error.name))
            else:
                self._errors.pop(name, None)
                self._support.mark_answered(name)
                return answer
        return None

    def _list(self, name: str, *arguments: Any, retry: bool = True) -> Sequence[Any]:
        """One list; if it grew during the call, it is asked for once more. Raises NvmlError, GpuLost."""
        try:
            processes: Sequence[Any] = self._calls.ask(name, self.handle, *arguments)
        except NvmlError as error:
            if error.code == binding.NOT_FOUND and name in UTILIZATION:  # there is no new sample
                return ()
            if error.code == binding.INSUFFICIENT_SIZE and retry:
                return self._list(name, *arguments, retry=False)
            raise
        return processes
