"""The sources of values that keep state between ticks: the driver's own samples, GPM, and the errors of NVLinks.

In: NVML's answers for one device. Out: the mean, minimum and maximum of the samples of a tick; GPM's metrics of the
time between two ticks; and the sum of the errors of all links.
State: see the classes.
On failure: NvmlError, or GpuLost. An implausible sample is left out, and counted.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

from producers.node.nvml import binding
from producers.node.nvml.binding import FieldValue, GpmSample, Handle, NvmlError
from producers.node.nvml.calls import IMPLAUSIBLE, Calls, error_of, is_refused, is_unsupported
from producers.node.nvml.table import Limits, LinkErrors, Scale, is_blank, measured

T = TypeVar("T")

_FUTURE_US = 60_000_000
GPM_SUPPORT = "nvmlGpmQueryDeviceSupport"
SHORTEST_S = 0.1  # GPM's samples must be further apart
HOPPER = 9  # the first architecture whose links have counters of their own
LINK_COUNT = 91
MAX_LINKS = 64


class SampleCursor:
    """The time of the newest sample that was read: for the samples of one kind, of one device.
    Times are in microseconds: since the epoch on most machines, since the boot on some."""

    def __init__(self) -> None:
        self._newest_us: int | None = None
        self._last_read_us = 0
        self._outdated_us: set[int] = set()

    def since_us(self) -> int | None:
        """The time after which samples are new. None if it is not known: at first, and after the clock was set back,
        because new samples then look older than those that were read."""
        now_us = time.time_ns() // 1000
        if now_us < self._last_read_us:
            self.forget()
        self._last_read_us = now_us
        return self._newest_us

    def new_samples(self, samples: Sequence[T], time_us: Callable[[T], int]) -> list[T]:
        """The samples that were not read before. A driver may give older samples than asked for, and some of the far
        future. In the first reading, those that are later than now are from before the clock was set back."""
        if self._newest_us is None:
            self._outdated_us = {at_us for at_us in map(time_us, samples) if at_us > self._last_read_us}
        elif self._outdated_us:  # some may have been dropped by the driver
            self._outdated_us.intersection_update(map(time_us, samples))
        last_us, latest_us = self._newest_us or 0, self._last_read_us + _FUTURE_US
        new = [sample for sample in samples if last_us < time_us(sample) <= latest_us]
        if self._outdated_us:
            new = [sample for sample in new if time_us(sample) not in self._outdated_us]
        self._newest_us = max(map(time_us, new), default=last_us)
        return new

    def forget(self) -> None:
        """Begin again: the samples that were read are from before a break."""
        self._newest_us = None


class Spread(NamedTuple):
    """Statistics of the samples of one tick."""

    mean: float
    minimum: float
    maximum: float


class Samples:
    """The samples of one kind that the driver takes of a device by itself, so that a spike between two ticks counts.

    The first reading only notes the newest sample, because the driver's buffer reaches back further than a tick.
    Source: nvml.h: NOT_FOUND means that there is no new sample.
    """

    def __init__(self, calls: Calls, name: str, kind: int) -> None:
        self._calls, self._name, self._kind = calls, name, kind
        self._cursor = SampleCursor()

    def read(self, handle: Handle, scale: Scale, limits: Limits) -> Spread | None:
        """Statistics of the samples since the last reading; None in the first one, and if there are none.
        Raises GpuLost, NvmlError."""
        since_us = self._cursor.since_us()
        samples: Sequence[FieldValue] = ()
        try:
            samples = self._calls.make(
                "nvmlDeviceGetSamples", lambda nvml: nvml.samples(handle, self._kind, since_us or 0)
            )
        except NvmlError as error:
            if error.code != binding.NOT_FOUND:
                raise
        new = self._cursor.new_samples(samples, lambda sample: sample.at_us)
        if since_us is None:
            return None
        values = [value for sample in new if (value := measured(sample.value, sample.bits, scale, limits)) is not None]
        for _ in range(len(new) - len(values)):
            self._calls.count(self._name, IMPLAUSIBLE)
        if not values:
            return None
        low, high = min(values), max(values)
        return Spread(min(max(fmean(values), low), high), low, high)  # the rounded mean of equal values may be another

    def forget(self) -> None:
        """Begin again: the samples until now are from before a break."""
        self._cursor.forget()


class Profiling:
    """GPM (Hopper and later) of a GPU, or of its GPU instance ``instance``: how busy its units were between two
    samples, taken a tick apart. For the thread of that GPU.

    It keeps two buffers while the handle is valid; the one with the older sample is filled next. If a reading fails,
    the last sample stays, and the next values cover a longer time.
    Source: nvml.h. Samples have to be more than 100 ms apart. Those of a GPU instance are taken through its GPU.
    """

    def __init__(
        self, calls: Calls, gpu: Handle, instance: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._calls, self._gpu, self._instance, self._clock = calls, gpu, instance, clock
        self._support_known = False
        self._unsupported: NvmlError | None = None
        self._buffers: list[GpmSample] = []
        self._taken_s: float | None = None

    def read(self, metrics: Sequence[int]) -> Sequence[FieldValue] | None:
        """The metrics since the last reading, in that order, each with its own return code. None in the first reading,
        and if the last one was too short a time ago. Raises GpuLost, NvmlError: an unsupported one if the GPU has no
        GPM."""
        if not self._support_known:
            self._unsupported = None
            try:
                if not self._calls.ask(GPM_SUPPORT, self._gpu).isSupportedDevice:
                    self._unsupported = NvmlError(binding.NOT_SUPPORTED)
            except NvmlError as error:
                if not is_unsupported(error):
                    raise
                self._unsupported = error
            self._support_known = True
        if self._unsupported is not None:
            self._calls.current_call = GPM_SUPPORT
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
        self._taken_s = self._clock()  # not ``now_s``: the thread may have waited for a processor before it was taken
        older, newer = self._buffers
        if since_s is None:
            return None
        return self._calls.make("nvmlGpmMetricsGet", lambda nvml: nvml.gpm_metrics(older, newer, metrics))

    def ask_again(self) -> None:
        """If the GPU had no GPM, ask again in the next reading."""
        if self._unsupported is not None:
            self._support_known = False

    def forget(self) -> None:
        """Begin again: the GPU was lost after the last sample."""
        self._taken_s = None

    def free(self) -> None:
        """Free the buffers; the next reading allocates new ones."""
        self.forget()
        while self._buffers:
            self._calls.gpm_free(self._buffers.pop())


class Links:
    """The errors of all of a GPU's NVLinks. From Hopper on, each link has its own counters.

    It keeps the last count of each link, because a link that is down does not answer, and its errors still happened. If
    one link gives an implausible count, there is no sum.
    Source: nvml.h. The fields for all links together are for older GPUs, with up to 12 links; newer GPUs still answer
    them, with 0. Blackwell counts neither CRC errors nor replays, and it counts recoveries in another field.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._link_range: range | None = None
        self._fields: dict[LinkErrors, Sequence[int]] = {}
        self._last_counts: dict[tuple[int, int], float] = {}
        self.newer = False

    def errors(self, handle: Handle, kind: LinkErrors) -> float:
        """How many errors there were since the GPU was reset; NaN if a link's count is implausible.

        Raises GpuLost, NvmlError: NOT_SUPPORTED if no link counts them. If ``newer`` is then true, do not trust the
        fields for all links either.
        """
        if self._link_range is None:
            self._link_range = range(self._count(handle))
        field_numbers = (kind.number,) if kind.newer_number is None else (kind.number, kind.newer_number)
        candidates = self._fields.setdefault(kind, field_numbers)
        while candidates:
            queried = [(candidates[0], link) for link in self._link_range]
            try:
                answers = self._calls.fields(handle, queried, kind.name)
            except NvmlError as unknown:
                if unknown.code != binding.INVALID_ARGUMENT:  # else the driver does not know the field
                    raise
                answers = [FieldValue(unknown.code)] * len(queried)
            counts = {}
            for field, answer in zip(queried, answers, strict=True):
                error = error_of(answer, kind.name)
                if error is None:
                    counts[field] = math.nan if is_blank(answer.value, answer.bits) else answer.value
                elif not is_refused(error):  # else the link is down
                    raise error
            if any(map(math.isnan, counts.values())):
                return math.nan
            self._last_counts |= counts
            known_counts = [self._last_counts[field] for field in queried if field in self._last_counts]
            if known_counts:
                return sum(known_counts)
            candidates = self._fields[kind] = candidates[1:]
        del self._fields[kind]  # the next time all of them are tried
        raise NvmlError(binding.NOT_SUPPORTED)

    def forget(self) -> None:
        """Forget the counts: the counters may start again from 0."""
        self._last_counts.clear()

    def _count(self, handle: Handle) -> int:
        """How many links there are. Raises GpuLost, NvmlError: NOT_SUPPORTED if the GPU is older or has no links."""
        architecture = self._calls.ask("nvmlDeviceGetArchitecture", handle)
        if not architecture:  # not filled in would be all bits; NVML defines that as an architecture without a name
            raise NvmlError(binding.NOTHING_FILLED_IN)
        self.newer = architecture >= HOPPER
        answer = self._calls.fields(handle, [LINK_COUNT])[0] if self.newer else FieldValue(binding.NOT_SUPPORTED)
        if answer.code or not answer.value:
            raise NvmlError(answer.code or binding.NOT_SUPPORTED)
        if not answer.value > 0:  # below zero, or NaN
            raise NvmlError(binding.NOTHING_FILLED_IN)
        return int(min(answer.value, MAX_LINKS))
