"""The metric values of one device, a GPU or a part of one, as the table says.

In: NVML's answers. Out: values by the catalogue's keys.
State: which sources the device supports, and the last reading of each counter.
On failure: if the device does not support a source, the next source is asked. The first is tried again later, and this
is not counted as an error. Any other error is counted, and its values are left out of this tick. An implausible value
is treated the same way, and so is a counter that goes back to zero for a moment.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from producers.node.nvml import binding, table
from producers.node.nvml.binding import FieldValue, Handle, NvmlError
from producers.node.nvml.calls import (
    IMPLAUSIBLE,
    NO_VALUE,
    SHARED_INSTANCE,
    Calls,
    FailedCall,
    LeftOut,
    Lost,
    Support,
    error_of,
    is_refused,
    is_unsupported,
)
from producers.node.nvml.sources import Links, Profiling, Samples

FIELDS = table.Call("nvmlDeviceGetFieldValues")
GPM = table.Call("nvmlGpmMetricsGet")
ZERO_LASTS_S = 10.0  # if a counter stays at zero for this long, it was cleared; until then it has no value
_ROWS = {row.key: row for row in table.TABLE}
_MEMORY = "nvmlDeviceGetMemoryInfo"
_MEMORY_PARTS = ("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")
Question = table.Call | table.Sampled | table.LinkErrors  # what is asked at once


class Wanted(NamedTuple):
    """A key, and the source that is asked for it."""

    row: table.Row
    source: table.ValueSource


Plan = Mapping[Question, Sequence[Wanted]]  # every question of a reading, and what is wanted of its answer


class Turn(NamedTuple):
    """Keys that have no value any more, since no source of theirs is supported now, with the last one that was asked;
    and keys that have one again."""

    gone: Mapping[str, FailedCall]
    back: Sequence[str]


class Metrics:
    """What one handle is asked. ``cut``: it is a part of a GPU, or a GPU that is cut into parts. ``profiling``: what
    GPM says of it, if it can be asked."""

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
        self._sources: dict[table.Row, Sequence[table.ValueSource]] = {row: row.sources for row in table.TABLE}
        self._support = Support()
        self._plan = self._planned(table.TABLE)
        self._samples: dict[table.Sampled, Samples] = {}
        self._links = Links(calls)
        self._counts: dict[str, table.Count] = {}
        self._counted: dict[str, float] = {}
        self._zero_since_s: dict[str, float] = {}
        self._failures: dict[str, FailedCall] = {}
        self._found: Mapping[str, float] = {}
        self._had: set[str] = set()
        self._gone: set[str] = set()
        self.changed = False
        """Whether in the last reading it could not be asked what it had answered before: it may have been cut."""

    def values(self) -> dict[str, float]:
        """The values of this moment. Raises Lost: also if the only answer is that a reset is needed."""
        found: dict[str, float] = {}
        self._refused: Lost | None = None
        self._answers = 0
        self._failures.clear()
        self.changed = False
        if self._support.begin():
            self._plan = self._planned(table.TABLE)
            if self._profiling is not None:
                self._profiling.ask_again()
        pending = self._plan
        while pending:
            unsupported = [row for one in pending.items() for row in self._take(*one, found)]
            pending = self._planned(unsupported)
            if unsupported:
                self._plan = self._planned(table.TABLE)
        if self._refused is not None and not self._answers:
            raise self._refused
        total = found.get("memory_total_bytes", 0)
        for key in _MEMORY_PARTS:  # a part can't be larger than all of it
            if key in found and (found[key] > total or not total):
                del found[key]
                self._calls.count(_MEMORY, IMPLAUSIBLE)
                self._failures[key] = FailedCall(_MEMORY, IMPLAUSIBLE)
        self._found = found
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
        left_out = {}
        for row, sources in self._sources.items():
            if row.key not in self._found:
                tried = [why for one in sources if (why := self._support.why(one.question)) is not None]
                if (asked := self._source(row)) is not None:
                    tried.append(self._failures.get(row.key, FailedCall(asked.question.name, NO_VALUE)))
                left_out[row.key] = tuple(tried)
        return left_out

    def probe(self) -> None:
        """Ask the first question only. Raises Lost, also if the answer is that a reset is needed."""
        question = next((one for one in self._plan if one not in (FIELDS, GPM)), None)
        if not isinstance(question, table.Call):
            return
        try:
            self._calls.ask(question.name, self.handle, *question.arguments)
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

    def _planned(self, rows: Iterable[table.Row]) -> Plan:
        """The first source of each row that may be asked now, by question; rows without one are left out."""
        found: dict[Question, list[Wanted]] = {}
        for row in rows:
            if (source := self._source(row)) is not None:
                question = source.question
                if isinstance(question, table.Field):
                    question = FIELDS
                elif isinstance(question, table.GpmMetric):
                    question = GPM
                found.setdefault(question, []).append(Wanted(row, source))
        return found

    def _source(self, row: table.Row) -> table.ValueSource | None:
        """The first one that may be asked now."""
        return next((one for one in self._sources[row] if self._support.asks(one.question)), None)

    def _take(self, question: Question, wanted: Sequence[Wanted], found: dict[str, float]) -> Iterable[table.Row]:
        """Ask, and put what is wanted of the answer into ``found``; gives the rows that the device does not support."""
        if question == GPM and self._profiling is None:
            return self._refuse(wanted, FailedCall(GPM.name, SHARED_INSTANCE))
        try:
            answers = self._ask(question, wanted, found)
        except NvmlError as error:
            if question == FIELDS and error.code == binding.INVALID_ARGUMENT and len(wanted) > 1:
                return [row for one in wanted for row in self._take(question, [one], found)]  # this driver lacks one
            answered = self._support.has_answered(question)
            if isinstance(question, table.Call) and question not in (FIELDS, GPM) and is_refused(error):
                self.changed = self.changed or (answered and self._support.why(question) is None)
            # What a part can't be asked is often an invalid argument.
            may_lack = question == FIELDS or (self._cut and not answered)
            never = is_refused(error) if may_lack else is_unsupported(error)
            if never and isinstance(question, table.LinkErrors) and self._links.newer:
                row = wanted[0].row
                self._sources[row] = row.sources[:1]  # the field for all links says 0, whatever they count
            return self._without(self._calls.doing if question == GPM else question.name, wanted, error, never=never)
        pairs = zip(wanted, answers, strict=False)
        return [row for one, answer in pairs for row in self._take_one(one, answer, found)]

    def _ask(self, question: Question, wanted: Sequence[Wanted], found: dict[str, float]) -> Sequence[FieldValue]:
        """An answer for each that is wanted; none if there is nothing new, or if the values are in ``found`` already.
        Raises Lost, NvmlError."""
        if question in (FIELDS, GPM):
            asked = [one.source.question for one in wanted]
            if question == FIELDS:
                return self._calls.fields(self.handle, [one.asked for one in asked if isinstance(one, table.Field)])
            numbers = [one.number for one in asked if isinstance(one, table.GpmMetric)]
            answers = None if self._profiling is None else self._profiling.read(numbers)
            if answers is not None:
                self._support.answer(GPM)
            return answers or ()
        if isinstance(question, table.Sampled):
            samples = self._samples.setdefault(question, Samples(self._calls, question.name, question.number))
            row, source = wanted[0]
            spread = samples.read(self.handle, source.scale, row.limits)
            self._support.answer(question)
            found.update({one.row.key: _part(spread, one.source.part) for one in wanted} if spread is not None else {})
            return ()
        if isinstance(question, table.LinkErrors):
            return [FieldValue(0, self._links.errors(self.handle, question), 0)]
        answer = self._calls.ask(question.name, self.handle, *question.arguments)
        return [FieldValue(0, _part(answer, source.part), source.bits) for _, source in wanted]

    def _take_one(self, wanted: Wanted, answer: FieldValue, found: dict[str, float]) -> Iterable[table.Row]:
        """Put one answer into ``found``; gives the row if the device does not support it."""
        row, source = wanted
        error = error_of(answer, source.question.name)
        if error is not None:
            return self._without(source.question.name, [wanted], error, never=is_refused(error))
        self._answers += 1
        self._support.answer(source.question)
        raw, value = answer.value, None
        if raw == source.unknown and raw is not None:
            return ()
        if not source.rate:
            value = table.measured(raw, answer.bits, source.scale, row.limits)
            if value is not None and row.key.endswith("_total") and self._is_lapse(row.key, value):
                value = None
        elif isinstance(raw, int) and not table.is_blank(raw, answer.bits) and not self._is_lapse(row.key, raw):
            now = table.Count(raw, answer.bits, answer.at_us, self._clock())
            last = self._counts.get(row.key)
            if last is not None and table.is_same_reading(last, now):
                return ()
            self._counts[row.key] = now
            per_s = None if last is None else table.per_second(last, now)
            if per_s is None:
                return ()
            value = table.within(per_s * source.scale.times, row.limits)
        if value is not None:
            found[row.key] = value
        else:
            self._calls.count(source.question.name, IMPLAUSIBLE)
            self._failures[row.key] = FailedCall(source.question.name, IMPLAUSIBLE)
        return ()

    def _is_lapse(self, key: str, count: float) -> bool:
        """Whether a counter seems to be zero only for a moment, as when its answer was not filled in.
        One that was cleared stays at zero, or counts on from there. If the GPU was reset, another counter counts on."""
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

    def _without(self, name: str, wanted: Sequence[Wanted], error: NvmlError, *, never: bool) -> Iterable[table.Row]:
        """There are no values: the device does not support the source, or it failed this time, which is counted."""
        if never:
            return self._refuse(wanted, FailedCall(name, error.name))
        self._calls.count(name, error.name)
        self._failures.update({one.row.key: FailedCall(name, error.name) for one in wanted})
        if error.code == binding.RESET_REQUIRED:
            self._refused = Lost(name, error)
        return ()

    def _refuse(self, wanted: Sequence[Wanted], why: FailedCall) -> Iterable[table.Row]:
        """Leave these sources out for a while."""
        for question in {one.source.question for one in wanted}:
            self._support.refuse(question, why)
        return [one.row for one in wanted]


def _part(answer: Any, part: str | int | None) -> Any:
    """A part of an answer: an attribute, an item, or all of it."""
    if part is None:
        return answer
    return getattr(answer, part) if isinstance(part, str) else answer[part]
