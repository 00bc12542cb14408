"""The metric values of one device, a GPU or a part of one, as the table says.

In: NVML's answers. Out: values by the catalogue's keys.
State: which sources the device supports, and the last reading of each counter.
On failure: a source that the device does not support gives way to the next one, and is asked again later; that is not
counted. Any other error leaves out its values this time, and is counted. So does a value that can't be, and a counter
that went back to zero for a moment.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from producers.node.nvml import binding, values
from producers.node.nvml.binding import FieldValue, Handle, NvmlError
from producers.node.nvml.calls import (
    IMPLAUSIBLE,
    NO_VALUE,
    SHARED_INSTANCE,
    Calls,
    LeftOut,
    Lost,
    Tried,
    is_lost,
    is_unsupported,
)
from producers.node.nvml.driver_samples import Samples
from producers.node.nvml.links import Links
from producers.node.nvml.profiling import Profiling
from producers.node.nvml.support import Support
from producers.node.nvml.table import TABLE, Call, Field, Linked, Metric, Row, Sampled, Source
from producers.node.nvml.values import Absent, Count

FIELDS = Call("nvmlDeviceGetFieldValues")
METRICS = Call("nvmlGpmMetricsGet")

_ROWS = {row.key: row for row in TABLE}
_MEMORY = "nvmlDeviceGetMemoryInfo"
_TOTAL = "memory_total_bytes"
_PARTS = ("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")


ZERO_LASTS_S = 10.0
"""A counter that goes back to zero, and stays there for so long, was cleared. Until then it has no value."""


class Wanted(NamedTuple):
    """A key, and the source that it is to be had from."""

    row: Row
    source: Source


Question = Call | Sampled | Linked
"""What is asked at once."""


class Turn(NamedTuple):
    """Keys that have no value any more, since no source of theirs is supported now, with the last one that was asked;
    and keys that have one again."""

    gone: Mapping[str, Tried]
    back: Sequence[str]


Plan = Mapping[Question, Sequence[Wanted]]
"""Every question of a reading, and what is wanted of its answer."""


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
        calls: Calls,
        handle: Handle,
        *,
        cut: bool = False,
        profiling: Profiling | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls, self.handle, self._cut, self._profiling, self._clock = calls, handle, cut, profiling, clock
        self._sources: dict[Row, Sequence[Source]] = {row: row.sources for row in TABLE}
        self._support = Support()
        self._plan = self._planned(TABLE)
        self._samples: dict[Sampled, Samples] = {}
        self._links = Links(calls)
        self._counts: dict[str, Count] = {}
        self._counted: dict[str, float] = {}
        self._zero_since_s: dict[str, float] = {}
        self._failures: dict[str, Tried] = {}
        self._found: Mapping[str, float] = {}
        self._had: set[str] = set()
        self._gone: set[str] = set()
        self.changed = False
        """Whether in the last reading it could not be asked what it had answered before: it may have been cut."""

    def values(self) -> dict[str, float]:
        """The values of this moment. Raises Lost: also where all that answers is that a reset is needed."""
        found: dict[str, float] = {}
        self._refused: Lost | None = None
        self._answers = 0
        self._failures.clear()
        self.changed = False
        if self._support.begin():
            self._plan = self._planned(TABLE)
            if self._profiling is not None:
                self._profiling.ask_again()
        pending = self._plan
        while pending:
            unsupported = [row for one in pending.items() for row in self._take(*one, found)]
            pending = self._planned(unsupported)
            if unsupported:
                self._plan = self._planned(TABLE)
        if self._refused is not None and not self._answers:
            raise self._refused
        self._found = self._consistent(found)
        return found

    def turn(self) -> Turn | None:
        """What the last reading no longer has, or has again; None if nothing has changed. Only once for each."""
        gone = {key for key in self._had - self._found.keys() if self._source(_ROWS[key]) is None}
        new, back = gone - self._gone, self._gone & self._found.keys()
        self._had |= self._found.keys()
        self._gone = (self._gone | new) - back
        if not (new or back):
            return None
        left_out = self.left_out()
        return Turn({key: left_out[key][-1] for key in sorted(new)}, sorted(back))

    def left_out(self) -> LeftOut:
        """Every key without a value in the last reading: the sources that it does not support, then what the one that
        it does support gave instead of a value."""
        return {row.key: self._tried(row, left) for row, left in self._sources.items() if row.key not in self._found}

    def _planned(self, rows: Iterable[Row]) -> Plan:
        """The first source of each row that is to be asked now, those of one question together; rows without one are
        left out."""
        found: dict[Question, list[Wanted]] = {}
        for row in rows:
            source = self._source(row)
            if source is not None:
                found.setdefault(_asked_with(source.question), []).append(Wanted(row, source))
        return found

    def _source(self, row: Row) -> Source | None:
        """The first one that is to be asked now."""
        return next((one for one in self._sources[row] if self._support.asks(one.question)), None)

    def _tried(self, row: Row, sources: Sequence[Source]) -> tuple[Tried, ...]:
        refused = [why for one in sources if (why := self._support.why(one.question)) is not None]
        asked = self._source(row)
        if asked is not None:
            refused.append(self._failures.get(row.key, Tried(asked.question.name, NO_VALUE)))
        return tuple(refused)

    def probe(self) -> None:
        """Ask the first question only. Raises Lost where that is all that the device says."""
        calls = (question for question in self._plan if question not in (FIELDS, METRICS))
        question = next(calls, None)
        if not isinstance(question, Call):
            return
        try:
            self._calls.ask(question.function, self.handle, *question.arguments)
        except NvmlError as error:
            self._calls.count(question.name, error.name)
            if error.code == binding.RESET_REQUIRED:
                raise Lost(question.name, error) from None

    def forget_counts(self) -> None:
        """The counters may begin again; what was sampled is of another time."""
        self._counts.clear()
        self._counted.clear()
        self._zero_since_s.clear()
        self._links.forget()
        for samples in self._samples.values():
            samples.forget()
        if self._profiling is not None:
            self._profiling.forget()

    def _take(self, question: Question, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[Row]:
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
            answer = self._calls.ask(question.function, self.handle, *question.arguments)
        except NvmlError as error:
            unasked = is_unsupported(error) or error.code == binding.INVALID_ARGUMENT
            answered = self._support.has_answered(question) and self._support.why(question) is None
            self.changed = self.changed or (unasked and answered)
            return self._without(question.name, wanted, error, never=self._never(question, error))
        self._answers += 1
        self._support.answer(question)
        for row, source in wanted:
            self._put(row, source, _part(answer, source.part), source.bits, found)
        return ()

    def _take_fields(self, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[Row]:
        fields = [one.source.question for one in wanted]
        try:
            answers = self._calls.fields(self.handle, [field.number for field in fields if isinstance(field, Field)])
        except NvmlError as error:
            if error.code == binding.INVALID_ARGUMENT and len(wanted) > 1:  # one of them, unknown to this driver
                return [row for one in wanted for row in self._take_fields([one], found)]
            never = is_unsupported(error) or error.code == binding.INVALID_ARGUMENT
            return self._without(FIELDS.name, wanted, error, never=never)
        return self._take_each(wanted, answers, found)

    def _take_metrics(self, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[Row]:
        metrics = [one.source.question for one in wanted]
        if self._profiling is None:
            return self._refuse(wanted, Tried(METRICS.name, SHARED_INSTANCE))
        try:
            answers = self._profiling.read([metric.number for metric in metrics if isinstance(metric, Metric)])
        except NvmlError as error:
            return self._without(self._calls.doing, wanted, error, never=self._never(METRICS, error))
        if answers is None:
            return ()
        self._support.answer(METRICS)
        return self._take_each(wanted, answers, found)

    def _take_samples(self, sampled: Sampled, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[Row]:
        samples = self._samples.setdefault(sampled, Samples(self._calls, sampled.name, sampled.number))
        row, source = wanted[0]
        try:
            spread = samples.read(self.handle, source.scale, row.limits)
        except NvmlError as error:
            return self._without(sampled.name, wanted, error, never=self._never(sampled, error))
        self._support.answer(sampled)
        if spread is not None:
            found.update({row.key: _part(spread, source.part) for row, source in wanted})
        return ()

    def _take_linked(self, linked: Linked, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[Row]:
        row, source = wanted[0]
        try:
            counted = self._links.errors(self.handle, linked)
        except NvmlError as error:
            never = self._never(linked, error)
            if never and self._links.newer:  # the field for all links says 0, whatever they count
                self._sources[row] = row.sources[:1]
            return self._without(linked.name, wanted, error, never=never)
        self._answers += 1
        self._support.answer(linked)
        value = counted if isinstance(counted, Absent) else values.within(counted, row.limits)
        self._keep(row, source, value, found)
        return ()

    def _take_each(
        self, wanted: Sequence[Wanted], answers: Sequence[FieldValue], found: dict[str, float]
    ) -> Iterable[Row]:
        """Answers with a return code each."""
        pairs = zip(wanted, answers, strict=True)
        return [row for one, answer in pairs for row in self._take_one(one, answer, found)]

    def _take_one(self, wanted: Wanted, answer: FieldValue, found: dict[str, float]) -> Iterable[Row]:
        """The answer of a field or a metric."""
        row, source = wanted
        if not answer.code:
            self._answers += 1
            self._support.answer(source.question)
            self._put(row, source, answer.value, answer.bits, found, answer.at_us)
            return ()
        error = NvmlError(answer.code)
        if is_lost(error):
            raise Lost(source.question.name, error)
        never = is_unsupported(error) or error.code == binding.INVALID_ARGUMENT
        return self._without(source.question.name, [wanted], error, never=never)

    def _put(self, row: Row, source: Source, raw: Any, bits: int, found: dict[str, float], at_us: int = 0) -> None:
        if raw == source.unknown and raw is not None:
            return
        if source.rate:
            value = self._rate(row, Count(raw, bits, at_us, self._clock()))
        else:
            value = values.measured(raw, bits, source.scale, row.limits)
        self._keep(row, source, value, found)

    def _keep(self, row: Row, source: Source, value: float | Absent, found: dict[str, float]) -> None:
        if not isinstance(value, Absent) and row.key.endswith("_total") and self._is_lapse(row.key, value):
            value = Absent.IMPLAUSIBLE
        if value is Absent.IMPLAUSIBLE:
            self._calls.count(source.question.name, IMPLAUSIBLE)
            self._failures[row.key] = Tried(source.question.name, IMPLAUSIBLE)
        elif not isinstance(value, Absent):
            found[row.key] = value

    def _is_lapse(self, key: str, count: float) -> bool:
        """Whether a counter seems to be zero only for a moment, as when its answer was not filled in.

        One that was cleared stays at zero, or counts on from there. If the GPU was reset, another counter counts on.
        """
        last = self._counted.get(key, 0)
        if count == 0 and last > 0:
            since_s = self._zero_since_s.setdefault(key, self._clock())
            if self._clock() - since_s < ZERO_LASTS_S:
                return True
        elif count < last and key.endswith("_total"):  # a byte counter may wrap
            self._counted.clear()
        self._zero_since_s.pop(key, None)
        self._counted[key] = count
        return False

    def _rate(self, row: Row, now: Count) -> float | Absent:
        if not isinstance(now.raw, int) or values.is_blank(now.raw, now.bits) or self._is_lapse(row.key, now.raw):
            return Absent.IMPLAUSIBLE
        last = self._counts.get(row.key)
        if last is not None and values.is_same_reading(last, now):
            return Absent.UNKNOWN
        self._counts[row.key] = now
        value = None if last is None else values.per_second(last, now)
        return Absent.UNKNOWN if value is None else values.within(value, row.limits)

    def _never(self, question: Question, error: NvmlError) -> bool:
        """Whether there is no use in asking again; what a part can't be asked is often an invalid argument."""
        first = self._cut and not self._support.has_answered(question)
        return is_unsupported(error) or (first and error.code == binding.INVALID_ARGUMENT)

    def _without(self, name: str, wanted: Sequence[Wanted], error: NvmlError, *, never: bool) -> Iterable[Row]:
        """What is wanted can't be had: the device does not support it, or it fails this time, which is counted."""
        if never:
            return self._refuse(wanted, Tried(name, error.name))
        self._calls.count(name, error.name)
        self._failures.update({one.row.key: Tried(name, error.name) for one in wanted})
        if error.code == binding.RESET_REQUIRED:
            self._refused = Lost(name, error)
        return ()

    def _refuse(self, wanted: Sequence[Wanted], why: Tried) -> Iterable[Row]:
        """Leave these sources out for a while."""
        for question in {one.source.question for one in wanted}:
            self._support.refuse(question, why)
        return [one.row for one in wanted]

    def _consistent(self, found: dict[str, float]) -> dict[str, float]:
        """Leave out parts of the memory that are larger than all of it, or of none."""
        total = found.get(_TOTAL, 0)
        for key in _PARTS:
            if key in found and (found[key] > total or not total):
                del found[key]
                self._calls.count(_MEMORY, IMPLAUSIBLE)
                self._failures[key] = Tried(_MEMORY, IMPLAUSIBLE)
        return found


def _part(answer: Any, part: str | int | None) -> Any:
    """A part of an answer: an attribute, an item, or all of it."""
    if part is None:
        return answer
    return getattr(answer, part) if isinstance(part, str) else answer[part]
