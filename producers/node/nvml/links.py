"""The errors that a GPU's NVLinks counted, over all of its links: from Hopper on each link counts for itself.

In: fields of nvmlDeviceGetFieldValues, link by link. Out: their sum.
State: how many links there are, which field counts each kind of error, and what each link counted last: one that is
down, and does not answer, does not take back what it has counted.
On failure: NvmlError; what can't be said of one link can't be said of all.
Source: nvml.h. The fields for all links together are of older GPUs, with up to 12 links; later ones still answer them,
with 0. Blackwell counts neither CRC errors nor replays, and recoveries by another field.
"""

from collections.abc import Sequence

from producers.node.nvml import binding, values
from producers.node.nvml.binding import FieldId, FieldValue, Handle, NvmlError
from producers.node.nvml.calls import Calls, Lost, is_lost, is_unsupported
from producers.node.nvml.table import Linked
from producers.node.nvml.values import Absent

HOPPER = 9
"""The first architecture whose links count for themselves."""

LINK_COUNT = 91
MOST_LINKS = 64


class Links:
    """Those of one handle."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._links: range | None = None
        self._fields: dict[Linked, Sequence[int]] = {}
        self._counted: dict[tuple[int, int], float] = {}
        self.newer = False

    def errors(self, handle: Handle, linked: Linked) -> float | Absent:
        """How many there were since the GPU was reset. Raises Lost, NvmlError: NOT_SUPPORTED where no link counts them;
        ``newer`` says then whether the fields for all links are not to be believed."""
        if self._links is None:
            self._links = range(self._count(handle))
        left = self._fields.setdefault(
            linked, (linked.number,) if linked.later is None else (linked.number, linked.later)
        )
        while left:
            counted = self._counted_by(left[0], self._links, linked, handle)
            if isinstance(counted, Absent):
                return counted
            if counted:
                return sum(counted)
            left = self._fields[linked] = left[1:]
        del self._fields[linked]  # whoever asks again means all of them
        raise NvmlError(binding.NOT_SUPPORTED)

    def forget(self) -> None:
        """The counters may begin anew."""
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

    def _counted_by(
        self, number: int, links: Sequence[int], linked: Linked, handle: Handle
    ) -> Sequence[float] | Absent:
        """What each link counted last by that field; nothing where none does. Raises Lost, NvmlError."""
        asked = [(number, link) for link in links]
        answers = zip(asked, self._answers(asked, handle, linked.name), strict=True)
        good = {field: answer for field, answer in answers if _counts(linked, answer)}
        if any(values.is_blank(answer.value, answer.bits) for answer in good.values()):
            return Absent.IMPLAUSIBLE
        self._counted.update({field: answer.value for field, answer in good.items()})
        return [self._counted[field] for field in asked if field in self._counted]

    def _answers(self, asked: Sequence[FieldId], handle: Handle, name: str) -> Sequence[FieldValue]:
        """A field that the driver does not know may fail the whole call."""
        try:
            return self._calls.fields(handle, asked, name)
        except NvmlError as error:
            if error.code != binding.INVALID_ARGUMENT:
                raise
            return [FieldValue(error.code)] * len(asked)


def _counts(linked: Linked, answer: FieldValue) -> bool:
    """Whether a link counts by a field; one that is down does not. Raises Lost, NvmlError."""
    if not answer.code:
        return True
    error = NvmlError(answer.code)
    if is_lost(error):
        raise Lost(linked.name, error)
    if is_unsupported(error) or error.code == binding.INVALID_ARGUMENT:
        return False
    raise error
