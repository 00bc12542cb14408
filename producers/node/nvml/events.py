"""XID errors, as the driver tells them: a thread of its own waits for them, whatever the ticks do.

In: NVML's events of every GPU. Out: each :class:`Xid`, to whoever is to be told, on the event loop's thread.
State: the set of events that is waited on, the GPUs in it, and those that could not be taken into it yet.
On failure: a GPU that can't be asked is asked again after 5 s; one that tells no XID errors after a minute, and then
ever less often, because a driver may say so in passing. A set that fails, as by the loss of a GPU, is made again, after
a rest that grows. A wait that does not return holds up nobody but whoever opens NVML again.
Source: nvml.h. What happened before the registration is not told; a wait may end early, with nothing.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from producers.node.nvml.binding import FUNCTION_NOT_FOUND, NOT_SUPPORTED, EventSet, Handle, Nvml, NvmlError, Told
from producers.node.nvml.calls import Tried, is_lost, is_unsupported
from producers.node.nvml.worker import Worker

log = logging.getLogger(__name__)

XID_EVENT = 8

WAIT_MS = 500
"""So long it takes at most to end the wait."""

AT_ONCE = 1024
"""Events that are taken before the loop is told."""

MISSING_EVERY_S = 5.0
UNSUPPORTED_EVERY_S = 60.0
"""How long a GPU that tells no XID errors is left alone at first; each further time twice as long."""

LONGEST_UNSUPPORTED_S = 3600.0
LONGEST_REST_S = 60.0


class Xid(NamedTuple):
    """An XID error, seen at ``ts_ms`` since the epoch, of the GPU of index ``gpu`` (None: of one that is not known),
    and of these of its instances where it is said."""

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
    """All methods are for the event loop's thread. ``tell`` gets each XID error, ``count`` each call that failed."""

    def __init__(
        self,
        nvml: Nvml,
        *,
        tell: Callable[[Xid], None],
        count: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml, self._tell, self._count, self._clock = nvml, tell, count, clock
        self._worker = Worker("nvml-events", clock)
        self._watch = _Watch(nvml, clock)
        self._added: set[int] = set()
        self.pause()

    @property
    def busy(self) -> bool:
        """Whether NVML may not be opened again."""
        return self._worker.busy

    def refusals(self) -> dict[int, Tried]:
        """The GPUs, by index, whose XID errors are not told, and why."""
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
        self._worker.ask(watch.run).add_done_callback(functools.partial(self._take, watch))

    def _take(self, watch: "_Watch", done: "asyncio.Future[_Seen]") -> None:
        if done.cancelled():
            return
        if (fault := done.exception()) is not None:
            log.error("XID errors can't be read any more", exc_info=fault)
            return
        for xid in done.result().xids:
            self._tell(xid)
        for call, error in done.result().errors:
            self._count(call, error)
        if not (watch.ended or self.busy):
            self._ask(watch)


class _Watch:
    """The set of events of NVML as it is open now. ``useless``: why no GPU is ever told of.

    All else but ``ending``, ``new`` and ``refusals`` is for the thread.
    """

    def __init__(self, nvml: Nvml, clock: Callable[[], float]) -> None:
        self.ending = threading.Event()
        self.new: queue.SimpleQueue[tuple[int, Handle]] = queue.SimpleQueue()
        self.refusals: dict[int, Tried] = {}
        self.useless: Tried | None = None
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
        """Whether nothing is to be waited for any more."""
        idle = not self._handles and self.new.empty()
        return self.useless is not None or idle or self.ending.is_set()

    def run(self) -> _Seen:
        """Wait until there is something to tell."""
        seen = _Seen([], [])
        while not (self.ended or seen.xids or seen.errors):
            try:
                self._step(seen)
            except NvmlError as error:
                self._failed(error, seen)
        if self.ended:
            self.close()
        return seen

    def close(self) -> None:
        """Let go of the set."""
        events, self._events = self._events, None
        if events is not None:
            with contextlib.suppress(NvmlError):  # it is void already
                self._nvml.free(events)

    def _failed(self, error: NvmlError, seen: _Seen) -> None:
        """The set is of no use any more. A driver that lacks the call is not asked for another one."""
        self.close()
        why = Tried(self._doing, error.name)
        self.refusals = dict.fromkeys(self._handles, why)
        if error.code == FUNCTION_NOT_FOUND:
            self.useless = why
        elif is_unsupported(error):
            self._rest_s = LONGEST_REST_S
        else:
            seen.errors.append((self._doing, error.name))
            self._rest_s = min(LONGEST_REST_S, max(1.0, 2 * self._rest_s))

    def _step(self, seen: _Seen) -> None:
        while not self.new.empty():
            gpu, self._handles[gpu] = self.new.get()
            self._ask_at_s[gpu] = self._clock()
        if self._events is None:
            self._begin()
        self._register(seen)
        if self._indexes:
            self._wait(seen)
        else:
            self.ending.wait(WAIT_MS / 1000)

    def _begin(self) -> None:
        """A new set, after a rest if the last one failed."""
        if self.ending.wait(self._rest_s):
            return
        self._doing = "nvmlEventSetCreate"
        self._events = self._nvml.events()
        self._indexes, self._ask_at_s = {}, dict.fromkeys(self._handles, self._clock())

    def _register(self, seen: _Seen) -> None:
        """Take the GPUs into the set that are not in it yet, and are due to be asked."""
        now_s = self._clock()
        for gpu in sorted(gpu for gpu, at_s in self._ask_at_s.items() if at_s <= now_s):
            try:
                self._register_one(gpu, self._handles[gpu])
            except NvmlError as error:
                self.refusals = {**self.refusals, gpu: Tried(self._doing, error.name)}
                self._ask_at_s[gpu] = now_s + self._wait_after(error, gpu)
                if not (is_unsupported(error) or is_lost(error)):  # of a lost one whoever reads its values says so
                    seen.errors.append((self._doing, error.name))

    def _wait_after(self, error: NvmlError, gpu: int) -> float:
        """After how many seconds a GPU is asked again that could not be taken into the set."""
        if not is_unsupported(error):
            return MISSING_EVERY_S
        last_s = self._unsupported_s.get(gpu, UNSUPPORTED_EVERY_S / 2)
        self._unsupported_s[gpu] = min(LONGEST_UNSUPPORTED_S, 2 * last_s)
        return self._unsupported_s[gpu]

    def _register_one(self, gpu: int, handle: Handle) -> None:
        if self._events is None or self.ending.is_set():
            return
        self._doing = "nvmlDeviceGetSupportedEventTypes"
        if not self._nvml.ask(self._doing, handle) & XID_EVENT:
            raise NvmlError(NOT_SUPPORTED)
        self._doing = "nvmlDeviceRegisterEvents"
        self._nvml.register(handle, XID_EVENT, self._events)
        self._indexes[self._nvml.address(handle)] = gpu
        del self._ask_at_s[gpu]
        self._unsupported_s.pop(gpu, None)
        self.refusals = {index: why for index, why in self.refusals.items() if index != gpu}

    def _wait(self, seen: _Seen) -> None:
        """Take what there is, waiting for the first."""
        if self._events is None:
            return
        self._doing = "nvmlEventSetWait"
        began_s = self._clock()
        try:
            told = self._nvml.wait(self._events, WAIT_MS)
        except NvmlError:
            with contextlib.suppress(NvmlError):  # what a GPU was lost by may stand behind the news that it is
                self._take(self._events, self._nvml.wait(self._events, 0), seen)
            raise
        self._rest_s = 0.0
        if told is None and self._clock() - began_s < WAIT_MS / 2000:
            self.ending.wait(WAIT_MS / 1000)  # it has not waited
        self._take(self._events, told, seen)

    def _take(self, events: EventSet, told: Told | None, seen: _Seen) -> None:
        """Take an event and those behind it."""
        while told is not None:
            if told.kind & XID_EVENT:
                seen.xids.append(self._xid(told))
            told = self._nvml.wait(events, 0) if len(seen.xids) < AT_ONCE else None

    def _xid(self, told: Told) -> Xid:
        now_ms = time.time_ns() // 1_000_000
        return Xid(self._indexes.get(told.address), told.data, now_ms, told.gpu_instance, told.compute_instance)
