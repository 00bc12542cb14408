"""The sources of values that remember what they gave last: the driver's own samples, GPM, and the errors of NVLinks.

In: NVML's answers for one device. Out: the mean, least and greatest of the samples of a tick; GPM's metrics of the time
between two ticks; and the errors of all links together.
State: see the classes.
On failure: NvmlError, or Lost. An implausible sample is left out, and counted.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

from producers.node.nvml import binding
from producers.node.nvml.binding import FieldValue, GpmSample, Handle, NvmlError
from producers.node.nvml.calls import IMPLAUSIBLE, Calls, error_of, is_refused, is_unsupported
from producers.node.nvml.table import Limits, LinkErrors, Scale, is_blank, measured

T = TypeVar("T")

_FUTURE_US = 60_000_000
SHORTEST_S = 0.1  # samples of GPM must be further apart
HOPPER = 9  # the first architecture whose links count for themselves
LINK_COUNT = 91
MOST_LINKS = 64


class Newest:
    """The time of the newest sample that was read, of the samples of one kind, of one device.
    Times are in microseconds: of the day on most machines, on some since the machine was started."""

    def __init__(self) -> None:
        self._at_us: int | None = None
        self._looked_us = 0

    def since_us(self) -> int | None:
        """Since when there may be new ones; None if that is not known: at first, and after the clock was set back,
        when new samples look older than those that were read."""
        now_us = time.time_ns() // 1000
        if now_us < self._looked_us:
            self.forget()
        self._looked_us = now_us
        return self._at_us

    def take(self, samples: Iterable[T], time_us: Callable[[T], int]) -> list[T]:
        """Those that were not read before: a driver may give older ones than asked for, and ones of the far future."""
        last_us, latest_us = self._at_us or 0, self._looked_us + _FUTURE_US
        new = [one for one in samples if last_us < time_us(one) <= latest_us]
        self._at_us = max(map(time_us, new), default=last_us)
        return new

    def forget(self) -> None:
        """What was read is of another time."""
        self._at_us = None


class Spread(NamedTuple):
    """Of the samples of one tick."""

    mean: float
    minimum: float
    maximum: float


class Samples:
    """What the driver samples of its own accord, of one kind and one device, so that a spike between two ticks counts.

    The first reading only takes note of the newest sample: the driver's buffer reaches back further than a tick.
    Source: nvml.h: NOT_FOUND says that there is no new one.
    """

    def __init__(self, calls: Calls, name: str, kind: int) -> None:
        self._calls, self._name, self._kind = calls, name, kind
        self._newest = Newest()

    def read(self, handle: Handle, scale: Scale, limits: Limits) -> Spread | None:
        """Of the samples since the last time; None the first time, and if there are none. Raises Lost, NvmlError."""
        since_us = self._newest.since_us()
        found: Sequence[FieldValue] = ()
        try:
            found = self._calls.make(
                "nvmlDeviceGetSamples", lambda nvml: nvml.samples(handle, self._kind, since_us or 0)
            )
        except NvmlError as error:
            if error.code != binding.NOT_FOUND:
                raise
        new = self._newest.take(found, lambda one: one.at_us)
        if since_us is None:
            return None
        good = [value for one in new if (value := measured(one.value, one.bits, scale, limits)) is not None]
        for _ in range(len(new) - len(good)):
            self._calls.count(self._name, IMPLAUSIBLE)
        if not good:
            return None
        low, high = min(good), max(good)
        return Spread(min(max(fmean(good), low), high), low, high)  # rounding may take the mean of equals past them

    def forget(self) -> None:
        """What was sampled until now is of another time."""
        self._newest.forget()


class Profiling:
    """What GPM (Hopper and later) says of the GPU, or of its GPU instance ``instance``: how busy its parts were between
    two samples, taken a tick apart. For the thread of that GPU.

    It has two buffers for as long as the handle is good; the one with the older sample is filled next. If a reading
    fails, the sample that was taken last stays, and the next values are those of a longer time.
    Source: nvml.h. Samples have to be more than 100 ms apart; of a GPU instance they are taken through its GPU.
    """

    def __init__(
        self, calls: Calls, gpu: Handle, instance: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._calls, self._gpu, self._instance, self._clock = calls, gpu, instance, clock
        self._asked = False
        self._unsupported: NvmlError | None = None
        self._buffers: list[GpmSample] = []
        self._taken_s: float | None = None

    def read(self, metrics: Sequence[int]) -> Sequence[FieldValue] | None:
        """The metrics since the last time, in that order, each with its own return code; None the first time, and if
        that was too short a time ago. Raises Lost, NvmlError: one that says "unsupported" if the GPU has no GPM."""
        if not self._asked:
            self._unsupported = None
            try:
                if not self._calls.ask("nvmlGpmQueryDeviceSupport", self._gpu).isSupportedDevice:
                    self._unsupported = NvmlError(binding.NOT_SUPPORTED)
            except NvmlError as error:
                if not is_unsupported(error):
                    raise
                self._unsupported = error
            self._asked = True
        if self._unsupported is not None:
            raise self._unsupported
        now_s, since_s = self._clock(), self._taken_s
        if since_s is not None and now_s - since_s <= SHORTEST_S:
            return None
        while len(self._buffers) < 2:
            self._buffers.append(
                self._calls.make("nvmlGpmSampleAlloc", lambda nvml: GpmSample(nvml.call("nvmlGpmSampleAlloc")))
            )
        if self._instance is None:
            self._calls.ask("nvmlGpmSampleGet", self._gpu, self._buffers[0])
        else:
            self._calls.ask("nvmlGpmMigSampleGet", self._gpu, self._instance, self._buffers[0])
        self._buffers.reverse()
        self._taken_s = now_s
        older, newer = self._buffers
        if since_s is None:
            return None
        return self._calls.make("nvmlGpmMetricsGet", lambda nvml: nvml.gpm_metrics(older, newer, metrics))

    def ask_again(self) -> None:
        """Ask again whether the GPU has GPM, if it had none."""
        if self._unsupported is not None:
            self._asked = False

    def forget(self) -> None:
        """What was sampled is of another time: the GPU was lost since."""
        self._taken_s = None

    def free(self) -> None:
        """Give the buffers back; reading takes new ones."""
        self.forget()
        while self._buffers:
            self._calls.gpm_free(self._buffers.pop())


class Links:
    """The errors that all of a GPU's NVLinks counted: from Hopper on each link counts for itself.

    It keeps what each link counted last, because a link that is down does not answer, and its errors still happened. If
    one link gives an implausible count, there is no sum.
    Source: nvml.h. The fields for all links together are of older GPUs, with up to 12 links; later ones still answer
    them, with 0. Blackwell counts neither CRC errors nor replays, and recoveries by another field.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._links: range | None = None
        self._fields: dict[LinkErrors, Sequence[int]] = {}
        self._counted: dict[tuple[int, int], float] = {}
        self.newer = False

    def errors(self, handle: Handle, linked: LinkErrors) -> float:
        """How many there were since the GPU was reset; NaN if what a link says can't be. Raises Lost, NvmlError:
        NOT_SUPPORTED if no link counts them; ``newer`` says then whether the fields for all links are not to be
        believed."""
        if self._links is None:
            self._links = range(self._count(handle))
        both = (linked.number,) if linked.later is None else (linked.number, linked.later)
        left = self._fields.setdefault(linked, both)
        while left:
            asked = [(left[0], link) for link in self._links]
            try:
                answers = self._calls.fields(handle, asked, linked.name)
            except NvmlError as unknown:
                if unknown.code != binding.INVALID_ARGUMENT:  # else the driver does not know the field
                    raise
                answers = [FieldValue(unknown.code)] * len(asked)
            good = {}
            for field, answer in zip(asked, answers, strict=True):
                error = error_of(answer, linked.name)
                if error is None:
                    good[field] = math.nan if is_blank(answer.value, answer.bits) else answer.value
                elif not is_refused(error):  # else the link is down
                    raise error
            if any(map(math.isnan, good.values())):
                return math.nan
            self._counted |= good
            counted = [self._counted[field] for field in asked if field in self._counted]
            if counted:
                return sum(counted)
            left = self._fields[linked] = left[1:]
        del self._fields[linked]  # the next time all of them are tried
        raise NvmlError(binding.NOT_SUPPORTED)

    def forget(self) -> None:
        """The counters may begin again."""
        self._counted.clear()

    def _count(self, handle: Handle) -> int:
        """How many links there are. Raises Lost, NvmlError: NOT_SUPPORTED of an older GPU, or without links."""
        architecture = self._calls.ask("nvmlDeviceGetArchitecture", handle)
        if not architecture:  # all bits, which nothing filled in would leave, is one that has no name yet
            raise NvmlError(binding.NOTHING_FILLED_IN)
        self.newer = architecture >= HOPPER
        answer = self._calls.fields(handle, [LINK_COUNT])[0] if self.newer else FieldValue(binding.NOT_SUPPORTED)
        if answer.code or not answer.value:
            raise NvmlError(answer.code or binding.NOT_SUPPORTED)
        return int(min(answer.value, MOST_LINKS))
