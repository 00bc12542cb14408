"""What GPM (Hopper and later) says of one GPU or GPU instance: how busy its parts were between two samples.

In: two samples of the driver, taken a tick apart. Out: the answer for each metric, with a return code of its own.
State: two buffers for as long as the handle is good, of which the one with the older sample is filled next.
On failure: NvmlError; the sample that was taken last stays, and the next values are those of a longer time.
Source: nvml.h. Samples have to be more than 100 ms apart; of a GPU instance they are taken through its GPU.
"""

import time
from collections.abc import Callable, Sequence

from producers.node.nvml import binding
from producers.node.nvml.binding import FieldValue, GpmSample, Handle, NvmlError
from producers.node.nvml.calls import Calls, is_unsupported

SHORTEST_S = 0.1
"""Samples must be further apart."""


class Profiling:
    """Of the GPU, or of its GPU instance ``instance``. For the thread of that GPU."""

    def __init__(
        self,
        calls: Calls,
        gpu: Handle,
        instance: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls, self._gpu, self._instance, self._clock = calls, gpu, instance, clock
        self._asked = False
        self._unsupported: NvmlError | None = None
        self._buffers: list[GpmSample] = []
        self._taken_s: float | None = None

    def read(self, metrics: Sequence[int]) -> Sequence[FieldValue] | None:
        """The metrics since the last time, in that order; None the first time, and where that was too short a time ago.

        Raises Lost, NvmlError: one of those that no repetition mends where the GPU has no GPM.
        """
        self._must_be_supported()
        now_s = self._clock()
        since_s = self._taken_s
        if since_s is not None and now_s - since_s <= SHORTEST_S:
            return None
        self._take()
        self._taken_s = now_s
        older, newer = self._buffers
        return None if since_s is None else self._calls.gpm_metrics(older, newer, metrics)

    def ask_again(self) -> None:
        """A GPU that had no GPM may have it by now."""
        if self._unsupported is not None:
            self._asked = False

    def forget(self) -> None:
        """What was sampled is of another time: the GPU was lost since."""
        self._taken_s = None

    def free(self) -> None:
        """Give the buffers back; they are had anew where it is read again."""
        self.forget()
        while self._buffers:
            self._calls.gpm_free(self._buffers.pop())

    def _must_be_supported(self) -> None:
        if not self._asked:
            self._unsupported, self._asked = self._refusal(), True
        if self._unsupported is not None:
            raise self._unsupported

    def _refusal(self) -> NvmlError | None:
        """Why the GPU has no GPM; None where it has. Raises Lost, NvmlError."""
        try:
            supported = self._calls.ask("nvmlGpmQueryDeviceSupport", self._gpu).isSupportedDevice
        except NvmlError as error:
            if not is_unsupported(error):
                raise
            return error
        return None if supported else NvmlError(binding.NOT_SUPPORTED)

    def _take(self) -> None:
        """Fill the older buffer, and make it the newer one."""
        while len(self._buffers) < 2:
            self._buffers.append(self._calls.gpm_sample())
        if self._instance is None:
            self._calls.ask("nvmlGpmSampleGet", self._gpu, self._buffers[0])
        else:
            self._calls.ask("nvmlGpmMigSampleGet", self._gpu, self._instance, self._buffers[0])
        self._buffers.reverse()
