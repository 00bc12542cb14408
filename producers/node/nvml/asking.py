"""Asking one GPU, on its thread: what is being asked just now, what went wrong, and when that means that it is gone.

In: questions to NVML. Out: answers. State: the question that has not returned, and the errors of this tick.
On failure: :class:`Lost` where the answer is that nothing can be asked of the GPU at all, NvmlError else.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from producers.node.nvml import binding
from producers.node.nvml.binding import FieldId, FieldValue, GpmSample, Handle, Nvml, NvmlError

T = TypeVar("T")

IMPLAUSIBLE = "IMPLAUSIBLE"
"""What a value that can't be is counted as."""

NO_VALUE = "NO_VALUE"
"""The error of what was answered without a value: it is not known, or there is nothing new."""

SHARED_INSTANCE = "SHARED_INSTANCE"
"""The error of what is only known of a whole GPU instance, which several MIG devices share."""

_LOST = frozenset(
    {
        binding.GPU_IS_LOST,
        binding.GPU_NOT_FOUND,
        binding.UNINITIALIZED,
        binding.DRIVER_NOT_LOADED,
        binding.LIB_RM_VERSION_MISMATCH,
    }
)
"""A GPU that fell off the bus, or a driver that did."""

_UNSUPPORTED = frozenset(
    {
        binding.NOT_SUPPORTED,
        binding.FUNCTION_NOT_FOUND,
        binding.ARGUMENT_VERSION_MISMATCH,
        binding.DEPRECATED,
    }
)
"""What the device or its driver can't be asked, now and later."""


class Tried(NamedTuple):
    """What was asked for in vain, and the error that NVML gave, without NVML_ERROR_, or one of those above."""

    call: str
    error: str


LeftOut = dict[str, tuple[Tried, ...]]
"""By what there is not (a key of the catalogue, "processes", "info.serial", ...), what was tried, in that order."""


class Lost(Exception):
    """Nothing can be asked of the GPU: ``call`` answered ``error``."""

    def __init__(self, call: str, error: NvmlError) -> None:
        self.call, self.error = call, error
        super().__init__(f"{error.name} ({call})")


def is_lost(error: NvmlError) -> bool:
    """Whether nothing can be asked of the GPU."""
    return error.code in _LOST


def is_unsupported(error: NvmlError) -> bool:
    """Whether there is no use in asking again."""
    return error.code in _UNSUPPORTED


class Asking:
    """NVML as one GPU's thread asks it. ``doing`` may be read from any thread; ``refusals`` is what was noted."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._errors: list[tuple[str, str]] = []
        self.doing = ""
        self.refusals: dict[str, Tried] = {}

    def open(self, index: int) -> Handle:
        """The GPU of that index. Raises NvmlError."""
        self.doing = "nvmlDeviceGetHandleByIndex"
        return self._nvml.handle(index)

    def ask(self, function: str, handle: Handle, *arguments: Any) -> Any:
        """What pynvml's ``function`` gives. Raises Lost, NvmlError."""
        return self._do(function, lambda: self._nvml.ask(function, handle, *arguments))

    def fields(self, handle: Handle, numbers: Sequence[FieldId]) -> list[FieldValue]:
        """What nvmlDeviceGetFieldValues gives. Raises Lost, NvmlError."""
        return self._do("nvmlDeviceGetFieldValues", lambda: self._nvml.fields(handle, numbers))

    def samples(self, handle: Handle, kind: int, since_us: int) -> list[FieldValue]:
        """What nvmlDeviceGetSamples gives. Raises Lost, NvmlError."""
        return self._do("nvmlDeviceGetSamples", lambda: self._nvml.samples(handle, kind, since_us))

    def gpm_sample(self) -> GpmSample:
        """A buffer. Raises Lost, NvmlError."""
        return self._do("nvmlGpmSampleAlloc", self._nvml.gpm_sample)

    def gpm_free(self, sample: GpmSample) -> None:
        """Give a buffer back; where that fails it is counted, and the buffer gone."""
        self.doing = "nvmlGpmSampleFree"
        try:
            self._nvml.gpm_free(sample)
        except NvmlError as error:
            self.count(self.doing, error.name)

    def gpm_metrics(self, older: GpmSample, newer: GpmSample, metrics: Sequence[int]) -> list[FieldValue]:
        """What nvmlGpmMetricsGet gives. Raises Lost, NvmlError."""
        return self._do("nvmlGpmMetricsGet", lambda: self._nvml.gpm_metrics(older, newer, metrics))

    def optional(self, function: str, handle: Handle, what: str = "") -> Any:
        """What pynvml's ``function`` gives; None where it fails, which is counted, and noted as ``what``.

        Raises Lost.
        """
        try:
            return self.ask(function, handle)
        except NvmlError as error:
            return self._refused(what, error)

    def system(self, function: str, what: str = "") -> Any:
        """What pynvml's ``function`` of no GPU gives; None where it fails, which is counted, and noted as ``what``."""
        self.doing = function
        try:
            return self._nvml.system(function)
        except NvmlError as error:
            return self._refused(what, error)

    def count(self, call: str, error: str) -> None:
        """A value is left out."""
        self._errors.append((call, error))

    def errors(self) -> list[tuple[str, str]]:
        """What was counted since the last time: call and error."""
        found, self._errors = self._errors, []
        return found

    def _refused(self, what: str, error: NvmlError) -> None:
        if what:
            self.refusals[what] = Tried(self.doing, error.name)
        if not is_unsupported(error):
            self.count(self.doing, error.name)

    def _do(self, call: str, work: Callable[[], T]) -> T:
        self.doing = call
        try:
            return work()
        except NvmlError as error:
            raise self._judged(call, error) from None

    def _judged(self, call: str, error: NvmlError) -> Exception:
        if not is_lost(error):
            return error
        self.count(call, error.name)
        return Lost(call, error)
