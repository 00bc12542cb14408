"""XID errors, as the driver reports them: a thread of its own waits for them, independent of the ticks.

In: NVML's events of every GPU, and the devices of each. Out: each :class:`Xid`, on the event loop's thread; ``events``
and ``xids`` of gpu.samples; a line in the log for each error.
State: NVML's event set, the GPUs in it, and those that are not in it yet; for each device the number of errors of each
code since the start, and the errors that no tick has had yet. Both are bounded: an error above the bound is only
counted.
On failure: a GPU whose registration fails is registered again after 5 s. A GPU that does not support XID errors is
tried again after a minute, and then less and less often, because a driver may refuse for a moment. If the event set
fails, for instance because a GPU was lost, a new one is created after a pause that grows. A call that hangs delays only
the next opening of NVML; it is reported, because no error is seen meanwhile.
Source: nvml.h. Errors from before the registration are not reported. A wait may end early, without an event.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from delivery import clock
from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.nvml.binding import (
    FUNCTION_NOT_FOUND,
    NOT_SUPPORTED,
    UNKNOWN,
    EventSet,
    Handle,
    Nvml,
    NvmlError,
    NvmlEvent,
)
from producers.node.nvml.calls import FailedCall, is_lost, is_unsupported
from producers.node.worker import Worker

log = logging.getLogger(__name__)

XID_EVENT = 8
WAIT_S = 0.5  # the longest time until a wait ends
HANGS_AFTER_S = 5.0  # a call that has not returned for longer is reported
MAX_BATCH = 1024  # events that are collected before the event loop gets them
RETRY_EVERY_S = 5.0
UNSUPPORTED_EVERY_S = 60.0  # after this a GPU without XID errors is tried again; then after twice as long each time
LONGEST_UNSUPPORTED_S = 3600.0
LONGEST_RETRY_DELAY_S = 60.0
MAX_EVENTS = 64  # of one device in one tick
UNKNOWN_XID = 999  # NVML's code for an unknown error; here also for impossible codes, and those above the bound
UNKNOWN_ERROR = NvmlError(UNKNOWN).name  # of a call that fails in another way than NVML's calls do
_LARGEST_CODE = 0xFFFF
_MAX_CODES = 64
_MAX_DEVICES = 1024


class Xid(NamedTuple):
    """An XID error, reported at ``ts_ms`` since the epoch. ``gpu`` is the index of its GPU, None if it is unknown.
    The instances are set if NVML reports the error for a part of the GPU."""

    gpu: int | None
    code: int
    ts_ms: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


class _WaitResult(NamedTuple):
    """The result of a wait: XID errors, and the calls that failed, each with its error."""

    xids: list[Xid]
    errors: list[tuple[str, str]]


class Events:
    """Waits for the XID errors of all GPUs, ``wait_s`` at a time, and calls ``on_xid`` for each. All methods are for
    the event loop's thread."""

    def __init__(
        self,
        nvml: Nvml,
        instruments: Instruments,
        *,
        on_xid: Callable[[Xid], None],
        clock: Callable[[], float],
        wait_s: float = WAIT_S,
    ) -> None:
        self._instruments, self._on_xid = instruments, on_xid
        self._worker = Worker("nvml-events", clock)
        self._new_watch = functools.partial(_XidWatch, nvml, clock, wait_s)
        self._watch = self._new_watch()
        self._added: set[int] = set()
        self._settled = True
        self._hang_logged = False
        self.pause()

    @property
    def busy(self) -> bool:
        """Whether a wait has not returned, or its set is not freed yet, so that NVML must not be opened again."""
        return self._worker.busy or not self._settled

    def refusals(self) -> dict[int, FailedCall]:
        unsupported = self._watch.unsupported
        return dict(self._watch.refusals) if unsupported is None else dict.fromkeys(self._added, unsupported)

    def not_ready(self) -> list[str]:
        """Why no errors are seen: a call that has not returned."""
        if (hung_s := self._watch.calling_s()) <= HANGS_AFTER_S:
            return []
        hangs = f"{self._watch.current_call} has not returned for {hung_s:.0f} s"
        return [f"the NVIDIA driver does not answer: {hangs}; XID errors are not seen"]

    def log_hang(self) -> None:
        """Log that a call does not return, once for each hang."""
        reasons = self.not_ready()
        if bool(reasons) is self._hang_logged:
            return
        self._hang_logged = not self._hang_logged
        if reasons:
            log.warning("%s", reasons[0])
        else:
            log.info("%s has returned: XID errors are seen again", self._watch.current_call)

    def resume(self) -> None:
        """NVML is open: from now on GPUs may be added."""
        self._paused = False

    def add(self, gpu: int, handle: Handle) -> None:
        """Wait for the events of the GPU of that index, too. Adding a GPU again has no effect."""
        if self._watch.ending.is_set() and not (self._paused or self.busy):
            self._watch, self._added = self._new_watch(), set()
        if self._watch.ending.is_set() or gpu in self._added:
            return
        self._added.add(gpu)
        self._watch.new.put((gpu, handle))
        if not self.busy:
            self._wait_for_events(self._watch)

    def pause(self) -> None:
        """End the wait, and forget the GPUs, until NVML is open again."""
        self._paused = True
        self._watch.ending.set()

    def close(self) -> threading.Event:
        """Let the thread end; returns an event that is set when the thread makes no calls of NVML any more."""
        ended = threading.Event()
        self.pause()
        self._worker.submit_last(self._watch.close)
        self._worker.submit_last(ended.set)
        self._worker.stop()
        return ended

    def _wait_for_events(self, watch: "_XidWatch") -> None:
        self._settled = False
        self._worker.submit(watch.run).add_done_callback(functools.partial(self._settle, watch))

    def _settle(self, watch: "_XidWatch", wait: "asyncio.Future[_WaitResult]") -> None:
        if wait.cancelled():
            return
        for xid in wait.result().xids:
            self._on_xid(xid)
        for call, error in wait.result().errors:
            self._instruments.counter(names.NVML_ERRORS, call, error).inc()
        self._settled = True
        if not self.busy and (watch.has_set or not watch.is_done):  # one that is done only frees its set
            self._wait_for_events(watch)


class _XidWatch:
    """Owns NVML's event set, from one opening of NVML to the next. ``new`` has the GPUs to add. ``refusals`` are the
    failed calls of the GPUs that are not in the set; ``unsupported`` is set if the driver has no event sets.
    Only ``ending``, ``new``, ``refusals``, ``current_call`` and :meth:`calling_s` are for other threads, too."""

    def __init__(self, nvml: Nvml, clock: Callable[[], float], wait_s: float) -> None:
        self.ending = threading.Event()
        self.new: queue.SimpleQueue[tuple[int, Handle]] = queue.SimpleQueue()
        self.refusals: dict[int, FailedCall] = {}
        self.unsupported: FailedCall | None = None
        self._nvml, self._clock, self._wait_s = nvml, clock, wait_s
        self._handles: dict[int, Handle] = {}
        self._event_set: EventSet | None = None
        self._indexes: dict[int, int] = {}
        self._register_at_s: dict[int, float] = {}
        self._unsupported_delay_s: dict[int, float] = {}
        self._retry_delay_s = 0.0
        self.current_call = ""
        self._call_began_s: float | None = None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to wait for."""
        idle = not self._handles and self.new.empty()
        return self.unsupported is not None or idle or self.ending.is_set()

    @property
    def has_set(self) -> bool:
        return self._event_set is not None

    def calling_s(self) -> float:
        """How long the current call has run, in seconds; 0 if there is none."""
        began_s = self._call_began_s
        return 0.0 if began_s is None else self._clock() - began_s

    def run(self) -> _WaitResult:
        """Wait until something happens. A set that fails is freed; a driver without event sets is not asked again."""
        result = _WaitResult([], [])
        while not (self.is_done or result.xids or result.errors):
            try:
                self._step(result)
            except NvmlError as error:
                self._give_up(error.name)
                if error.code == FUNCTION_NOT_FOUND:
                    self.unsupported = FailedCall(self.current_call, error.name)
                elif is_unsupported(error):
                    self._retry_delay_s = LONGEST_RETRY_DELAY_S
                else:
                    result.errors.append((self.current_call, error.name))
            except Exception as error:  # not NVML's, as of an event that can't be decoded: it may not end the wait
                log.error("%s", f"{self.current_call} failed; it is tried again", exc_info=error)
                self._give_up(UNKNOWN_ERROR)
                result.errors.append((self.current_call, UNKNOWN_ERROR))
        if self.is_done:
            self.close()
        self._call_began_s = None
        return result

    def _give_up(self, error: str) -> None:
        """Free the set, because the current call failed with ``error``. The next one is created after a pause."""
        self.close()
        self.refusals = dict.fromkeys(self._handles, FailedCall(self.current_call, error))
        self._retry_delay_s = min(LONGEST_RETRY_DELAY_S, max(1.0, 2 * self._retry_delay_s))

    def close(self) -> None:
        event_set, self._event_set = self._event_set, None
        if event_set is not None:
            with contextlib.suppress(Exception):  # it is invalid already
                self._nvml.call("nvmlEventSetFree", event_set)

    def _step(self, result: _WaitResult) -> None:
        """Create a set if there is none, register the GPUs that are due, and wait once. Raises NvmlError."""
        while not self.new.empty():
            gpu, self._handles[gpu] = self.new.get()
            self._register_at_s[gpu] = self._clock()
        if self._event_set is None:
            if self._rest(self._retry_delay_s):
                return
            self._begin_call("nvmlEventSetCreate")
            self._event_set = EventSet(self._nvml.call(self.current_call))
            self._indexes, self._register_at_s = {}, dict.fromkeys(self._handles, self._clock())
        now_s = self._clock()
        for gpu in sorted(gpu for gpu, register_at_s in self._register_at_s.items() if register_at_s <= now_s):
            try:
                self._register(gpu, self._event_set)
            except NvmlError as error:
                self.refusals = {**self.refusals, gpu: FailedCall(self.current_call, error.name)}
                delay_s = RETRY_EVERY_S
                if is_unsupported(error):
                    previous_delay_s = self._unsupported_delay_s.get(gpu, UNSUPPORTED_EVERY_S / 2)
                    delay_s = self._unsupported_delay_s[gpu] = min(LONGEST_UNSUPPORTED_S, 2 * previous_delay_s)
                elif not is_lost(error):  # the reading of the GPU reports that it is lost
                    result.errors.append((self.current_call, error.name))
                self._register_at_s[gpu] = now_s + delay_s
        if self._indexes:
            self._wait(self._event_set, result)
        else:
            self._rest(self._wait_s)

    def _begin_call(self, call: str) -> None:
        self.current_call, self._call_began_s = call, self._clock()

    def _rest(self, seconds: float) -> bool:
        """Wait without a call; returns whether the watch is ending."""
        self._call_began_s = None
        return self.ending.wait(seconds)

    def _register(self, gpu: int, events: EventSet) -> None:
        """Register a GPU's events with the set. Raises NvmlError."""
        if self.ending.is_set():
            return
        handle = self._handles[gpu]
        self._begin_call("nvmlDeviceGetSupportedEventTypes")
        if not self._nvml.ask(self.current_call, handle) & XID_EVENT:
            raise NvmlError(NOT_SUPPORTED)
        self._begin_call("nvmlDeviceRegisterEvents")
        self._nvml.call(self.current_call, handle, XID_EVENT, events)
        self._indexes[self._nvml.address(handle)] = gpu
        del self._register_at_s[gpu]
        self._unsupported_delay_s.pop(gpu, None)
        self.refusals = {index: failed_call for index, failed_call in self.refusals.items() if index != gpu}

    def _wait(self, events: EventSet, result: _WaitResult) -> None:
        """Wait for an event, and collect it with those behind it. Raises NvmlError."""
        self._begin_call("nvmlEventSetWait")
        began_s = self._clock()
        try:
            event = self._nvml.wait(events, round(self._wait_s * 1000))
        except NvmlError:
            with contextlib.suppress(NvmlError):  # the XID error that caused the loss of a GPU may be queued behind it
                self._drain(events, self._nvml.wait(events, 0), result)
            raise
        self._retry_delay_s = 0.0
        if event is None and self._clock() - began_s < self._wait_s / 2:
            self._rest(self._wait_s)  # NVML has not waited
        self._drain(events, event, result)

    def _drain(self, events: EventSet, event: NvmlEvent | None, result: _WaitResult) -> None:
        """Collect an event and those behind it. Raises NvmlError."""
        while event is not None:
            if event.kind & XID_EVENT:
                now_ms, gpu = clock.now_ms(), self._indexes.get(event.address)
                result.xids.append(Xid(gpu, event.data, now_ms, event.gpu_instance, event.compute_instance))
            event = self._nvml.wait(events, 0) if len(result.xids) < MAX_BATCH else None


class Xids:
    """XID errors by device: those that no tick has had, and the number of each code since the start. All methods are
    for the event loop's thread."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._counts: dict[str, dict[str, int]] = {}
        self._pending: dict[str, list[dict[str, Any]]] = {}

    def record(self, xid: Xid, gpu_devices: Sequence[Mapping[str, Any]]) -> None:
        """Count, log and keep an error. ``gpu_devices``: its GPU and that GPU's MIG devices; empty if unknown.
        An error of a GPU instance belongs to its MIG devices, any other to the GPU."""
        code = xid.code if 0 <= xid.code <= _LARGEST_CODE else UNKNOWN_XID
        devices = [device for device in gpu_devices if _is_in_instance(device.get("mig"), xid)] or gpu_devices[:1]
        self._instruments.counter(names.XIDS, "device" if devices else "unknown_device").inc()
        if not devices:
            error_text = f"{code} of a GPU that is not known"
            log.warning("XID %s", error_text, extra={"xid": code, "gpu_index": xid.gpu, "ts_ms": xid.ts_ms})
        for device in devices:
            uuid, mig = device["uuid"], device.get("mig")
            counts = self._counts.setdefault(uuid, {})
            key = str(code) if str(code) in counts or len(counts) < _MAX_CODES else str(UNKNOWN_XID)
            counts[key] = counts.get(key, 0) + 1
            if len(self._counts) > _MAX_DEVICES:
                oldest = next(iter(self._counts))
                self._counts.pop(oldest)
                self._pending.pop(oldest, None)
            pending = self._pending.setdefault(uuid, [])
            if len(pending) < MAX_EVENTS:
                pending.append({"kind": "xid", "code": code, "ts_ms": xid.ts_ms})
            gpu_fields = {"gpu_uuid": uuid if mig is None else mig["parent_uuid"], "gpu_index": device.get("index")}
            extra = {**gpu_fields, **({} if mig is None else {"gpu_mig_uuid": uuid}), "xid": code, "ts_ms": xid.ts_ms}
            log.warning("XID %s", f"{code} of {uuid}", extra=extra)

    def with_errors(self, devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The devices of a tick with their errors. Each error is in one tick: the next one that has its device."""
        devices_with_errors = []
        for device in devices:
            if (counts := self._counts.get(device["uuid"])) is not None:
                events = self._pending.pop(device["uuid"], None)
                device = {**device, "xids": dict(counts), **({"events": events} if events else {})}
            devices_with_errors.append(device)
        return devices_with_errors


def _is_in_instance(mig: Mapping[str, Any] | None, xid: Xid) -> bool:
    if mig is None or xid.gpu_instance is None or mig.get("gpu_instance") != xid.gpu_instance:
        return False
    return xid.compute_instance is None or mig.get("compute_instance") in (None, xid.compute_instance)
