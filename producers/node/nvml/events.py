"""XID errors, as the driver reports them: a thread of its own waits for them, whatever the ticks do.

In: NVML's events of every GPU, and the devices of each. Out: each :class:`Xid`, on the event loop's thread; ``events``
and ``xids`` of gpu.samples; a line in the log for each error.
State: the set of events that NVML is asked for, the GPUs in it, and those that are not in it yet; for each device how
many errors of each code there were since the start, and the errors that no tick has had yet. Both are bounded: an error
past the bound is only counted.
On failure: a GPU that gives an error is asked again after 5 s. A GPU that reports no XID errors is asked again after a
minute, and then less and less often, because a driver may refuse for a moment. If the set fails, for instance because a
GPU was lost, a new one is made after a pause that grows. A wait that hangs delays only the next opening of NVML.
Source: nvml.h. Errors from before the registration are not reported. A wait may end early, without an event.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from delivery.instruments import Instruments
from producers.node import instruments as names
from producers.node.nvml.binding import FUNCTION_NOT_FOUND, NOT_SUPPORTED, EventSet, Handle, Nvml, NvmlError, NvmlEvent
from producers.node.nvml.calls import FailedCall, is_lost, is_unsupported
from producers.node.worker import Worker

log = logging.getLogger(__name__)

XID_EVENT = 8
WAIT_MS = 500  # the longest time until a wait ends
AT_ONCE = 1024  # events that are taken before the loop gets them
MISSING_EVERY_S = 5.0
UNSUPPORTED_EVERY_S = 60.0  # when a GPU without XID errors is asked again; then after twice as long each time
LONGEST_UNSUPPORTED_S = 3600.0
LONGEST_REST_S = 60.0
MOST_EVENTS = 64  # of one device in one tick
UNKNOWN_XID = 999  # NVML's own code for an unknown error; here also for codes that can't be, and those past the bound
_LARGEST_CODE = 0xFFFF
_MOST_CODES = 64
_MOST_DEVICES = 1024


class Xid(NamedTuple):
    """An XID error, seen at ``ts_ms`` since the epoch, of the GPU of index ``gpu`` (None: of one that is not known).
    Of a part of it if NVML says of which instances."""

    gpu: int | None
    code: int
    ts_ms: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


class _Seen(NamedTuple):
    """What a wait has brought: XID errors, and calls that failed with their errors."""

    xids: list[Xid]
    errors: list[tuple[str, str]]


class Events:
    """All methods are for the event loop's thread. ``take`` gets each XID error."""

    def __init__(
        self, nvml: Nvml, instruments: Instruments, *, take: Callable[[Xid], None], clock: Callable[[], float]
    ) -> None:
        self._nvml, self._instruments, self._take, self._clock = nvml, instruments, take, clock
        self._worker = Worker("nvml-events", clock)
        self._watch = _Watch(nvml, clock)
        self._added: set[int] = set()
        self.pause()

    @property
    def busy(self) -> bool:
        """Whether NVML may not be opened again."""
        return self._worker.busy

    def refusals(self) -> dict[int, FailedCall]:
        useless = self._watch.useless
        return dict(self._watch.refusals) if useless is None else dict.fromkeys(self._added, useless)

    def watch(self) -> None:
        """From now on GPUs may be added: NVML is open."""
        self._paused = False

    def add(self, gpu: int, handle: Handle) -> None:
        """Wait for the events of the GPU of that index, too. May be called again for the same."""
        if self._watch.ending.is_set() and not (self._paused or self.busy):
            self._watch, self._added = _Watch(self._nvml, self._clock), set()
        if self._watch.ending.is_set() or gpu in self._added:
            return
        self._added.add(gpu)
        self._watch.new.put((gpu, handle))
        if not self.busy:
            self._ask(self._watch)

    def pause(self) -> None:
        """Let the wait end, and the GPUs be void, until NVML is open again."""
        self._paused = True
        self._watch.ending.set()

    def close(self) -> threading.Event:
        """Let the thread end; gives what is set when it asks NVML nothing any more."""
        ended = threading.Event()
        self.pause()
        self._worker.leave(self._watch.close)
        self._worker.leave(ended.set)
        self._worker.stop()
        return ended

    def _ask(self, watch: "_Watch") -> None:
        self._worker.ask(watch.run).add_done_callback(functools.partial(self._settle, watch))

    def _settle(self, watch: "_Watch", done: "asyncio.Future[_Seen]") -> None:
        if done.cancelled():
            return
        if (fault := done.exception()) is not None:
            log.error("XID errors can't be read any more", exc_info=fault)
            return
        for xid in done.result().xids:
            self._take(xid)
        for call, error in done.result().errors:
            self._instruments.counter(names.NVML_ERRORS, call, error).inc()
        if not (watch.ended or self.busy):
            self._ask(watch)


class _Watch:
    """The set of events of NVML as it is open now. ``useless``: why no GPU ever reports anything.
    All else but ``ending``, ``new`` and ``refusals`` is for the thread."""

    def __init__(self, nvml: Nvml, clock: Callable[[], float]) -> None:
        self.ending = threading.Event()
        self.new: queue.SimpleQueue[tuple[int, Handle]] = queue.SimpleQueue()
        self.refusals: dict[int, FailedCall] = {}
        self.useless: FailedCall | None = None
        self._nvml, self._clock = nvml, clock
        self._handles: dict[int, Handle] = {}
        self._events: EventSet | None = None
        self._indexes: dict[int, int] = {}
        self._ask_at_s: dict[int, float] = {}
        self._unsupported_s: dict[int, float] = {}
        self._rest_s = 0.0
        self._doing = ""

    @property
    def ended(self) -> bool:
        """Whether there is nothing to wait for any more."""
        idle = not self._handles and self.new.empty()
        return self.useless is not None or idle or self.ending.is_set()

    def run(self) -> _Seen:
        """Wait until something happens. A set that failed is dropped; a driver without the call is not asked again."""
        seen = _Seen([], [])
        while not (self.ended or seen.xids or seen.errors):
            try:
                self._step(seen)
            except NvmlError as error:
                self.close()
                why = FailedCall(self._doing, error.name)
                self.refusals = dict.fromkeys(self._handles, why)
                if error.code == FUNCTION_NOT_FOUND:
                    self.useless = why
                elif is_unsupported(error):
                    self._rest_s = LONGEST_REST_S
                else:
                    seen.errors.append((self._doing, error.name))
                    self._rest_s = min(LONGEST_REST_S, max(1.0, 2 * self._rest_s))
        if self.ended:
            self.close()
        return seen

    def close(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            with contextlib.suppress(NvmlError):  # it is void already
                self._nvml.call("nvmlEventSetFree", events)

    def _step(self, seen: _Seen) -> None:
        """Make a set if there is none, take the GPUs into it that are due, and wait once. Raises NvmlError."""
        while not self.new.empty():
            gpu, self._handles[gpu] = self.new.get()
            self._ask_at_s[gpu] = self._clock()
        if self._events is None:
            if self.ending.wait(self._rest_s):
                return
            self._doing = "nvmlEventSetCreate"
            self._events = EventSet(self._nvml.call(self._doing))
            self._indexes, self._ask_at_s = {}, dict.fromkeys(self._handles, self._clock())
        now_s = self._clock()
        for gpu in sorted(gpu for gpu, at_s in self._ask_at_s.items() if at_s <= now_s):
            try:
                self._register(gpu, self._events)
            except NvmlError as error:
                self.refusals = {**self.refusals, gpu: FailedCall(self._doing, error.name)}
                wait_s = MISSING_EVERY_S
                if is_unsupported(error):
                    last_s = self._unsupported_s.get(gpu, UNSUPPORTED_EVERY_S / 2)
                    wait_s = self._unsupported_s[gpu] = min(LONGEST_UNSUPPORTED_S, 2 * last_s)
                elif not is_lost(error):  # the reading of the GPU reports that it is lost
                    seen.errors.append((self._doing, error.name))
                self._ask_at_s[gpu] = now_s + wait_s
        if self._indexes:
            self._wait(self._events, seen)
        else:
            self.ending.wait(WAIT_MS / 1000)

    def _register(self, gpu: int, events: EventSet) -> None:
        """Take a GPU into the set. Raises NvmlError."""
        if self.ending.is_set():
            return
        handle = self._handles[gpu]
        self._doing = "nvmlDeviceGetSupportedEventTypes"
        if not self._nvml.ask(self._doing, handle) & XID_EVENT:
            raise NvmlError(NOT_SUPPORTED)
        self._doing = "nvmlDeviceRegisterEvents"
        self._nvml.call(self._doing, handle, XID_EVENT, events)
        self._indexes[self._nvml.address(handle)] = gpu
        del self._ask_at_s[gpu]
        self._unsupported_s.pop(gpu, None)
        self.refusals = {index: why for index, why in self.refusals.items() if index != gpu}

    def _wait(self, events: EventSet, seen: _Seen) -> None:
        """Take what there is, waiting for the first. Raises NvmlError."""
        self._doing = "nvmlEventSetWait"
        began_s = self._clock()
        try:
            event = self._nvml.wait(events, WAIT_MS)
        except NvmlError:
            with contextlib.suppress(NvmlError):  # the error that a GPU was lost by may stand behind its loss
                self._take(events, self._nvml.wait(events, 0), seen)
            raise
        self._rest_s = 0.0
        if event is None and self._clock() - began_s < WAIT_MS / 2000:
            self.ending.wait(WAIT_MS / 1000)  # it has not waited
        self._take(events, event, seen)

    def _take(self, events: EventSet, event: NvmlEvent | None, seen: _Seen) -> None:
        """Take an event and those behind it. Raises NvmlError."""
        while event is not None:
            if event.kind & XID_EVENT:
                now_ms, gpu = time.time_ns() // 1_000_000, self._indexes.get(event.address)
                seen.xids.append(Xid(gpu, event.data, now_ms, event.gpu_instance, event.compute_instance))
            event = self._nvml.wait(events, 0) if len(seen.xids) < AT_ONCE else None


class Xids:
    """XID errors by device: those of this tick, and how many there were of each code since the start. All methods are
    for the event loop's thread."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._counts: dict[str, dict[str, int]] = {}
        self._unsent: dict[str, list[dict[str, Any]]] = {}

    def note(self, xid: Xid, known: Sequence[Mapping[str, Any]]) -> None:
        """Take an error. ``known``: its GPU and that one's MIG devices; nothing if they are not known.
        A line of log for each code and device; an error of an instance is of its MIG devices, else of the GPU."""
        code = xid.code if 0 <= xid.code <= _LARGEST_CODE else UNKNOWN_XID
        devices = [device for device in known if _is_of(device.get("mig"), xid)] or known[:1]
        self._instruments.counter(names.XIDS, "device" if devices else "unknown_device").inc()
        if not devices:
            what = f"{code} of a GPU that is not known"
            log.warning("XID %s", what, extra={"xid": code, "gpu_index": xid.gpu, "ts_ms": xid.ts_ms})
        for device in devices:
            uuid, mig = device["uuid"], device.get("mig")
            counts = self._counts.setdefault(uuid, {})
            key = str(code) if str(code) in counts or len(counts) < _MOST_CODES else str(UNKNOWN_XID)
            counts[key] = counts.get(key, 0) + 1
            if len(self._counts) > _MOST_DEVICES:
                oldest = next(iter(self._counts))
                self._counts.pop(oldest)
                self._unsent.pop(oldest, None)
            unsent = self._unsent.setdefault(uuid, [])
            if len(unsent) < MOST_EVENTS:
                unsent.append({"kind": "xid", "code": code, "ts_ms": xid.ts_ms})
            who = {"gpu_uuid": uuid if mig is None else mig["parent_uuid"], "gpu_index": device.get("index")}
            extra = {**who, **({} if mig is None else {"gpu_mig_uuid": uuid}), "xid": code, "ts_ms": xid.ts_ms}
            log.warning("XID %s", f"{code} of {uuid}", extra=extra)

    def onto(self, devices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The devices of a tick with their errors; each error is in one tick, the next that has its device."""
        found = []
        for device in devices:
            if (counts := self._counts.get(device["uuid"])) is not None:
                events = self._unsent.pop(device["uuid"], None)
                device = {**device, "xids": dict(counts), **({"events": events} if events else {})}
            found.append(device)
        return found


def _is_of(mig: Mapping[str, Any] | None, xid: Xid) -> bool:
    if mig is None or xid.gpu_instance is None or mig.get("gpu_instance") != xid.gpu_instance:
        return False
    return xid.compute_instance is None or mig.get("compute_instance") in (None, xid.compute_instance)
