"""The metric values of one device, a GPU or a part of one, as the table says.

In: NVML's answers. Out: values by the catalogue's keys.
State: the source of each key that the device supports, why it is not one before, and the last reading of each counter
that makes a rate.
On failure: a source that the device does not support gives way to the next one, for good, and is not counted; any other
error leaves out its values this time, and is counted; so is a value that can't be.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from producers.node.nvml import binding, values
from producers.node.nvml.asking import (
    IMPLAUSIBLE,
    NO_VALUE,
    SHARED_INSTANCE,
    Asking,
    LeftOut,
    Lost,
    Tried,
    is_lost,
    is_unsupported,
)
from producers.node.nvml.binding import FieldValue, Handle, NvmlError
from producers.node.nvml.links import Links
from producers.node.nvml.profiling import Profiling
from producers.node.nvml.spread import Samples
from producers.node.nvml.table import TABLE, Call, Field, Linked, Metric, Row, Sampled, Source
from producers.node.nvml.values import Absent, Count

FIELDS = Call("nvmlDeviceGetFieldValues")
METRICS = Call("nvmlGpmMetricsGet")

_MEMORY = "nvmlDeviceGetMemoryInfo"
_TOTAL = "memory_total_bytes"
_PARTS = ("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")


class Wanted(NamedTuple):
    """A key, and the source that it is to be had from."""

    row: Row
    source: Source


Question = Call | Sampled | Linked
"""What is asked at once."""


class Missed(NamedTuple):
    """A key whose source the device does not support."""

    row: Row
    why: Tried


Plan = Mapping[Question, Sequence[Wanted]]
"""Every question of a tick, and what is wanted of its answer."""


def plan(sources: Iterable[tuple[Row, Sequence[Source]]]) -> Plan:
    """The first source of each row, those of one question together; rows without a source are left out."""
    found: dict[Question, list[Wanted]] = {}
    for row, left in sources:
        if left:
            found.setdefault(_asked_with(left[0].question), []).append(Wanted(row, left[0]))
    return found


def _asked_with(question: Call | Field | Metric | Sampled | Linked) -> Question:
    """The call that gives it."""
    if isinstance(question, Field):
        return FIELDS
    return METRICS if isinstance(question, Metric) else question


class Device:
    """What one handle is asked. ``cut``: it is a part of a GPU, or a GPU that is cut into parts. ``profiling``: what
    GPM says of it, where it can be asked."""

    def __init__(
        self,
        asking: Asking,
        handle: Handle,
        *,
        cut: bool = False,
        profiling: Profiling | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asking, self.handle, self._cut, self._profiling, self._clock = asking, handle, cut, profiling, clock
        self._sources: dict[Row, Sequence[Source]] = {row: row.sources for row in TABLE}
        self._plan = plan(self._sources.items())
        self._answered: set[Question] = set()
        self._samples: dict[Sampled, Samples] = {}
        self._links = Links(asking)
        self._counts: dict[str, Count] = {}
        self._unsupported: LeftOut = {}
        self._failures: dict[str, Tried] = {}
        self._found: Mapping[str, float] = {}
        self.changed = False
        """Whether in the last reading it could not be asked what it had answered before: it may have been cut."""

    def values(self) -> dict[str, float]:
        """The values of this moment. Raises Lost: also where all that answers is that a reset is needed."""
        found: dict[str, float] = {}
        self._refused: Lost | None = None
        self._answers = 0
        self._failures.clear()
        self.changed = False
        pending = self._plan
        while pending:
            pending = self._fall_back([missed for one in pending.items() for missed in self._take(*one, found)])
        if self._refused is not None and not self._answers:
            raise self._refused
        self._found = self._consistent(found)
        return found

    def left_out(self) -> LeftOut:
        """Every key without a value in the last reading: the sources that it does not support, then what the one that
        it does support gave instead of a value."""
        return {row.key: self._tried(row, left) for row, left in self._sources.items() if row.key not in self._found}

    def _tried(self, row: Row, left: Sequence[Source]) -> tuple[Tried, ...]:
        last = (self._failures.get(row.key, Tried(left[0].question.name, NO_VALUE)),) if left else ()
        return (*self._unsupported.get(row.key, ()), *last)

    def probe(self) -> None:
        """Ask the first question only. Raises Lost where that is all that the device says."""
        calls = (question for question in self._plan if question not in (FIELDS, METRICS))
        question = next(calls, None)
        if not isinstance(question, Call):
            return
        try:
            self._asking.ask(question.function, self.handle, *question.arguments)
        except NvmlError as error:
            self._asking.count(question.name, error.name)
            if error.code == binding.RESET_REQUIRED:
                raise Lost(question.name, error) from None

    def forget_counts(self) -> None:
        """The counters may begin anew; what was sampled is of another time."""
        self._counts.clear()
        self._links.forget()
        for samples in self._samples.values():
            samples.forget()
        if self._profiling is not None:
            self._profiling.forget()

    def _fall_back(self, missed: Sequence[Missed]) -> Plan:
        """Forget the sources of these rows; the plan for their next ones."""
        if not missed:
            return {}
        for row, why in missed:
            self._sources[row] = self._sources[row][1:]
            self._unsupported[row.key] = (*self._unsupported.get(row.key, ()), why)
        self._plan = plan(self._sources.items())
        return plan((row, self._sources[row]) for row, _ in missed)

    def _take(self, question: Question, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[Missed]:
        """Ask, and put what is wanted of the answer into ``found``; gives the rows that the device does not support."""
        if question is FIELDS:
            return self._take_fields(wanted, found)
        if question is METRICS:
            return self._take_metrics(wanted, found)
        if isinstance(question, Sampled):
            return self._take_samples(question, wanted, found)
        if isinstance(question, Linked):
            return self._take_linked(question, wanted, found)
        try:
            answer = self._asking.ask(question.function, self.handle, *question.arguments)
        except NvmlError as error:
            unasked = is_unsupported(error) or error.code == binding.INVALID_ARGUMENT
            self.changed = self.changed or (unasked and question in self._answered)
            return self._without(question.name, wanted, error, never=self._never(question, error))
        self._answers += 1
        self._answered.add(question)
        for row, source in wanted:
            self._put(row, source, _part(answer, source.part), source.bits, found)
        return ()

    def _take_fields(self, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[Missed]:
        fields = [one.source.question for one in wanted]
        try:
            answers = self._asking.fields(self.handle, [field.number for field in fields if isinstance(field, Field)])
        except NvmlError as error:
            if error.code == binding.INVALID_ARGUMENT and len(wanted) > 1:  # one of them, unknown to this driver
                return [missed for one in wanted for missed in self._take_fields([one], found)]
            never = is_unsupported(error) or error.code == binding.INVALID_ARGUMENT
            return self._without(FIELDS.name, wanted, error, never=never)
        return self._take_each(wanted, answers, found)

    def _take_metrics(self, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[Missed]:
        metrics = [one.source.question for one in wanted]
        if self._profiling is None:
            return _missed(wanted, Tried(METRICS.name, SHARED_INSTANCE))
        try:
            answers = self._profiling.read([metric.number for metric in metrics if isinstance(metric, Metric)])
        except NvmlError as error:
            return self._without(self._asking.doing, wanted, error, never=self._never(METRICS, error))
        if answers is None:
            return ()
        self._answered.add(METRICS)
        return self._take_each(wanted, answers, found)

    def _take_samples(self, sampled: Sampled, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[Missed]:
        samples = self._samples.setdefault(sampled, Samples(self._asking, sampled.name, sampled.number))
        row, source = wanted[0]
        try:
            spread = samples.read(self.handle, source.scale, row.limits)
        except NvmlError as error:
            return self._without(sampled.name, wanted, error, never=self._never(sampled, error))
        self._answered.add(sampled)
        if spread is not None:
            found.update({row.key: _part(spread, source.part) for row, source in wanted})
        return ()

    def _take_linked(self, linked: Linked, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[Missed]:
        row, source = wanted[0]
        try:
            counted = self._links.errors(self.handle, linked)
        except NvmlError as error:
            never = self._never(linked, error)
            if never and self._links.newer:  # the field for all links says 0, whatever they count
                self._sources[row] = row.sources[:1]
            return self._without(linked.name, wanted, error, never=never)
        self._answers += 1
        self._answered.add(linked)
        value = counted if isinstance(counted, Absent) else values.within(counted, row.limits)
        self._keep(row, source, value, found)
        return ()

    def _take_each(
        self, wanted: Sequence[Wanted], answers: Sequence[FieldValue], found: dict[str, float]
    ) -> Iterable[Missed]:
        """Answers with a return code each."""
        pairs = zip(wanted, answers, strict=True)
        return [
            Missed(one.row, Tried(one.source.question.name, NvmlError(answer.code).name))
            for one, answer in pairs
            if not self._put_field(one, answer, found)
        ]

    def _put_field(self, wanted: Wanted, answer: FieldValue, found: dict[str, float]) -> bool:
        """Whether the device supports the field or metric."""
        row, source = wanted
        if not answer.code:
            self._answers += 1
            self._put(row, source, answer.value, answer.bits, found, answer.at_us)
            return True
        error = NvmlError(answer.code)
        if is_lost(error):
            raise Lost(source.question.name, error)
        if is_unsupported(error) or error.code == binding.INVALID_ARGUMENT:
            return False
        self._failed(source.question.name, [wanted], error)
        return True

    def _put(self, row: Row, source: Source, raw: Any, bits: int, found: dict[str, float], at_us: int = 0) -> None:
        if raw == source.unknown and raw is not None:
            return
        if source.rate:
            value = self._rate(row, Count(raw, bits, at_us, self._clock()))
        else:
            value = values.measured(raw, bits, source.scale, row.limits)
        self._keep(row, source, value, found)

    def _keep(self, row: Row, source: Source, value: float | Absent, found: dict[str, float]) -> None:
        if value is Absent.IMPLAUSIBLE:
            self._asking.count(source.question.name, IMPLAUSIBLE)
            self._failures[row.key] = Tried(source.question.name, IMPLAUSIBLE)
        elif not isinstance(value, Absent):
            found[row.key] = value

    def _rate(self, row: Row, now: Count) -> float | Absent:
        if not isinstance(now.raw, int) or values.is_blank(now.raw, now.bits):
            return Absent.IMPLAUSIBLE
        last = self._counts.get(row.key)
        if last is not None and values.is_same_reading(last, now):
            return Absent.UNKNOWN
        self._counts[row.key] = now
        value = None if last is None else values.per_second(last, now)
        return Absent.UNKNOWN if value is None else values.within(value, row.limits)

    def _never(self, question: Question, error: NvmlError) -> bool:
        """Whether there is no use in asking again; what a part can't be asked is often an invalid argument."""
        first = self._cut and question not in self._answered
        return is_unsupported(error) or (first and error.code == binding.INVALID_ARGUMENT)

    def _without(self, name: str, wanted: Sequence[Wanted], error: NvmlError, *, never: bool) -> Iterable[Missed]:
        """What is wanted can't be had: not this time, or ``never``."""
        return _missed(wanted, Tried(name, error.name)) if never else self._failed(name, wanted, error)

    def _failed(self, name: str, wanted: Iterable[Wanted], error: NvmlError) -> tuple[Missed, ...]:
        self._asking.count(name, error.name)
        self._failures.update({one.row.key: Tried(name, error.name) for one in wanted})
        if error.code == binding.RESET_REQUIRED:
            self._refused = Lost(name, error)
        return ()

    def _consistent(self, found: dict[str, float]) -> dict[str, float]:
        """Leave out parts of the memory that are larger than all of it."""
        total = found.get(_TOTAL)
        for key in _PARTS:
            if total is not None and found.get(key, 0) > total:
                del found[key]
                self._asking.count(_MEMORY, IMPLAUSIBLE)
                self._failures[key] = Tried(_MEMORY, IMPLAUSIBLE)
        return found


def _missed(wanted: Iterable[Wanted], why: Tried) -> list[Missed]:
    return [Missed(one.row, why) for one in wanted]


def _part(answer: Any, part: str | int | None) -> Any:
    """A part of an answer: an attribute, an item, or all of it."""
    if part is None:
        return answer
    return getattr(answer, part) if isinstance(part, str) else answer[part]
