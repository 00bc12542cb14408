"""The metric values of one device, a GPU or a MIG device, read as the table says.

In: NVML's answers. Out: values by the catalogue's keys.
State: which sources the device supports, and the last reading of each counter.
On failure: if the device does not support a source, the next source is asked. The first is tried again later, and this
is not counted as an error. Any other error is counted, and its values are left out of this tick. An implausible value
is treated the same way, and so is a counter that goes back to zero for a moment.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from producers.node.nvml import binding, table
from producers.node.nvml.binding import FieldValue, Handle, NvmlError
from producers.node.nvml.calls import (
    IMPLAUSIBLE,
    NO_VALUE,
    SHARED_INSTANCE,
    Calls,
    FailedCall,
    GpuLost,
    LeftOut,
    NotReturned,
    Support,
    error_of,
    is_refused,
    is_unsupported,
)
from producers.node.nvml.sources import Links, Profiling, Samples

FIELDS = table.Call("nvmlDeviceGetFieldValues")
GPM = table.Call("nvmlGpmMetricsGet")
ZERO_LASTS_S = 10.0  # a counter that stays at zero for this long was cleared; until then it has no value
_ROWS = {row.key: row for row in table.TABLE}
_MEMORY = "nvmlDeviceGetMemoryInfo"
_MEMORY_PARTS = ("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")
Question = table.Call | table.Sampled | table.LinkErrors  # one call, which may give several values


class RowSource(NamedTuple):
    """A row of the table, and the source that is asked for its value."""

    row: table.Row
    source: table.ValueSource


Plan = Mapping[Question, Sequence[RowSource]]  # every question of a reading, and the values that come from it


@dataclass(slots=True)
class MetricsReading:
    """The result of reading a device once: its ``values`` by key, and for keys without one the call that failed.

    ``mig_mode_may_have_changed``: a call that had succeeded before was refused: MIG may have been switched on.
    """

    values: dict[str, float] = field(default_factory=dict)
    failed_calls: dict[str, FailedCall] = field(default_factory=dict)
    mig_mode_may_have_changed: bool = False
    any_answer: bool = False
    first_failure: GpuLost | None = None

    @property
    def failure(self) -> GpuLost | None:
        """A call that failed, if no other has answered."""
        return None if self.any_answer else self.first_failure


class AvailabilityChange(NamedTuple):
    """The keys that have lost or regained their value. ``lost``: none of their sources is supported now; each has the
    last call that was tried."""

    lost: Mapping[str, FailedCall]
    regained: Sequence[str]


class Metrics:
    """Reads the values of one handle. ``mig_enabled``: it is a MIG device, or a GPU in MIG mode. ``profiling`` reads
    GPM for it; None if GPM can't be read for this device alone."""

    def __init__(
        self,
        calls: Calls,
        handle: Handle,
        *,
        mig_enabled: bool = False,
        profiling: Profiling | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls, self.handle, self._mig_enabled = calls, handle, mig_enabled
        self._profiling, self._clock = profiling, clock
        self._sources: dict[table.Row, Sequence[table.ValueSource]] = {row: row.sources for row in table.TABLE}
        self._support = Support()
        self._plan = self._make_plan(table.TABLE)
        self._samples: dict[table.Sampled, Samples] = {}
        self._links = Links(calls)
        self._counts: dict[str, table.Count] = {}
        self._last_values: dict[str, float] = {}
        self._zero_since_s: dict[str, float] = {}
        self._reading = MetricsReading()  # the last one, or the one that runs
        self._ever_had: set[str] = set()
        self._unavailable: set[str] = set()

    def read(self) -> MetricsReading:
        """The values of this moment. Raises GpuLost."""
        self._reading = MetricsReading()
        if self._support.begin_reading():
            self._plan = self._make_plan(table.TABLE)
            if self._profiling is not None:
                self._profiling.ask_again()
        pending = self._plan
        while pending:
            unsupported = [row for planned in pending.items() for row in self._read_question(*planned)]
            pending = self._make_plan(unsupported)
            if unsupported:
                self._plan = self._make_plan(table.TABLE)
        values = self._reading.values
        total = values.get("memory_total_bytes", 0)
        for key in _MEMORY_PARTS:  # none can be larger than the total
            if key in values and (values[key] > total or not total):
                del values[key]
                self._mark_implausible(key, _MEMORY)
        return self._reading

    def availability_change(self) -> AvailabilityChange | None:
        """The keys that have lost or regained a value in the last reading; None if nothing has changed.
        Each change is returned once."""
        keys = self._reading.values.keys()
        lost = {key for key in self._ever_had - keys if self._source(_ROWS[key]) is None}
        newly_lost, regained = lost - self._unavailable, self._unavailable & keys
        self._ever_had |= keys
        self._unavailable = (self._unavailable | newly_lost) - regained
        if not (newly_lost or regained):
            return None
        left_out = self.left_out()
        return AvailabilityChange({key: left_out[key][-1] for key in sorted(newly_lost)}, sorted(regained))

    def left_out(self) -> LeftOut:
        """The failed calls for every key without a value in the last reading: first those of the sources that the
        device does not support, then the call of the source that it supports."""
        left_out = {}
        for row, sources in self._sources.items():
            if row.key not in self._reading.values:
                failed_calls = [
                    failed_call
                    for candidate in sources
                    if (failed_call := self._support.failed_call(candidate.question)) is not None
                ]
                if (source := self._source(row)) is not None:
                    no_value = FailedCall(source.question.name, NO_VALUE)
                    failed_calls.append(self._reading.failed_calls.get(row.key, no_value))
                left_out[row.key] = tuple(failed_calls)
        return left_out

    def probe(self) -> None:
        """Ask only the first question. Raises GpuLost, also if the answer is that a reset is needed."""
        calls = (call for call in self._plan if isinstance(call, table.Call) and call not in (FIELDS, GPM))
        question = next(calls, None)
        if question is None:
            return
        try:
            self._calls.ask(question.name, self.handle, *question.arguments)
        except NvmlError as error:
            self._calls.count(question.name, error.name)
            if error.code == binding.RESET_REQUIRED:
                raise GpuLost(question.name, error) from None

    def forget_counts(self) -> None:
        """Forget the counts and samples: the counters may start again from 0."""
        self._counts.clear()
        self._last_values.clear()
        self._zero_since_s.clear()
        self._links.forget()
        for samples in self._samples.values():
            samples.forget()
        if self._profiling is not None:
            self._profiling.forget()

    def _make_plan(self, rows: Iterable[table.Row]) -> Plan:
        """The first source of each row that may be asked now, grouped by question; rows without one are left out."""
        plan: dict[Question, list[RowSource]] = {}
        for row in rows:
            if (source := self._source(row)) is not None:
                question = source.question
                if isinstance(question, table.Field):
                    question = FIELDS
                elif isinstance(question, table.GpmMetric):
                    question = GPM
                plan.setdefault(question, []).append(RowSource(row, source))
        return plan

    def _source(self, row: table.Row) -> table.ValueSource | None:
        """The row's first source that may be asked now."""
        return next((source for source in self._sources[row] if self._support.may_ask(source.question)), None)

    def _read_question(self, question: Question, row_sources: Sequence[RowSource]) -> Iterable[table.Row]:
        """Ask one question, and store its values; returns the rows that the device does not support."""
        if question == GPM and self._profiling is None:
            return self._mark_refused(row_sources, FailedCall(GPM.name, SHARED_INSTANCE))
        try:
            answers = self._ask(question, row_sources)
        except NvmlError as error:
            if question == FIELDS and error.code == binding.INVALID_ARGUMENT and len(row_sources) > 1:
                # This driver does not know one of the fields: ask for each by itself.
                return [row for row_source in row_sources for row in self._read_question(question, [row_source])]
            answered = self._support.has_answered(question)
            if isinstance(question, table.Call) and question not in (FIELDS, GPM) and is_refused(error):
                newly_refused = answered and self._support.failed_call(question) is None
                self._reading.mig_mode_may_have_changed |= newly_refused
            # A call that a MIG device does not support often answers INVALID_ARGUMENT.
            may_lack = question == FIELDS or (self._mig_enabled and not answered)
            unsupported = is_refused(error) if may_lack else is_unsupported(error)
            if unsupported and isinstance(question, table.LinkErrors) and self._links.newer:
                row = row_sources[0].row
                self._sources[row] = row.sources[:1]  # the field for all links is always 0 here
            name = self._calls.current_call if question == GPM else question.name
            return self._fail(name, row_sources, error, unsupported=unsupported)
        pairs = zip(row_sources, answers, strict=False)
        return [row for row_source, answer in pairs for row in self._store_answer(row_source, answer)]

    def _ask(self, question: Question, row_sources: Sequence[RowSource]) -> Sequence[FieldValue]:
        """An answer for each selected source. Empty if there is nothing new, or if the values were stored already.
        Raises GpuLost, NvmlError."""
        if question in (FIELDS, GPM):
            parts = [row_source.source.question for row_source in row_sources]
            if question == FIELDS:
                field_ids = [part.field_id for part in parts if isinstance(part, table.Field)]
                return self._calls.fields(self.handle, field_ids)
            metric_numbers = [part.number for part in parts if isinstance(part, table.GpmMetric)]
            answers = None if self._profiling is None else self._profiling.read(metric_numbers)
            if answers is not None:
                self._support.mark_answered(GPM)
            return answers or ()
        if isinstance(question, table.Sampled):
            samples = self._samples.setdefault(question, Samples(self._calls, question.name, question.number))
            row, source = row_sources[0]
            spread = samples.read(self.handle, source.scale, row.limits)
            self._support.mark_answered(question)
            if spread is not None:
                self._reading.values.update({row.key: _part(spread, source.part) for row, source in row_sources})
            return ()
        if isinstance(question, table.LinkErrors):
            return [FieldValue(0, self._links.errors(self.handle, question), 0)]
        answer = self._calls.ask(question.name, self.handle, *question.arguments)
        return [FieldValue(0, _part(answer, source.part), source.bits) for _, source in row_sources]

    def _store_answer(self, row_source: RowSource, answer: FieldValue) -> Iterable[table.Row]:
        """Store the value of one answer; returns the row if the device does not support its source."""
        row, source = row_source
        error = error_of(answer, source.question.name)
        if error is not None:
            return self._fail(source.question.name, [row_source], error, unsupported=is_refused(error))
        self._reading.any_answer = True
        self._support.mark_answered(source.question)
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
            self._reading.values[row.key] = value
        else:
            self._mark_implausible(row.key, source.question.name)
        return ()

    def _is_lapse(self, key: str, count: float) -> bool:
        """Whether a counter is probably zero only for a moment, for instance because its answer was not filled in.
        A counter that was cleared stays at zero or counts up from there. If another counter went back, the GPU was
        reset, and zero is believed."""
        last = self._last_values.get(key, 0)
        if count == 0 and last > 0:
            since_s = self._zero_since_s.setdefault(key, self._clock())
            if self._clock() - since_s < ZERO_LASTS_S:
                return True
        elif count < last and key.endswith("_total"):  # a byte counter may wrap
            self._last_values.clear()
        self._zero_since_s.pop(key, None)
        self._last_values[key] = count
        return False

    def _fail(
        self, name: str, row_sources: Sequence[RowSource], error: NvmlError, *, unsupported: bool
    ) -> Iterable[table.Row]:
        """Note that the selected sources have no value: they are unsupported, or failed this time, which is counted.
        Returns the rows that are unsupported."""
        if unsupported:
            return self._mark_refused(row_sources, FailedCall(name, error.name))
        self._calls.count(name, error.name)
        self._reading.failed_calls |= {row.key: FailedCall(name, error.name) for row, _ in row_sources}
        if error.code != binding.NOTHING_FILLED_IN and not isinstance(error, NotReturned):
            self._reading.first_failure = self._reading.first_failure or GpuLost(name, error)
        return ()

    def _mark_implausible(self, key: str, name: str) -> None:
        self._calls.count(name, IMPLAUSIBLE)
        self._reading.failed_calls[key] = FailedCall(name, IMPLAUSIBLE)

    def _mark_refused(self, row_sources: Sequence[RowSource], failed_call: FailedCall) -> Iterable[table.Row]:
        """Do not ask these sources for a while; returns their rows."""
        for question in {row_source.source.question for row_source in row_sources}:
            self._support.mark_refused(question, failed_call)
        return [row_source.row for row_source in row_sources]


def _part(answer: Any, part: str | int | None) -> Any:
    """A part of an answer: an attribute if ``part`` is a name, an item if it is a number, else all of it."""
    if part is None:
        return answer
    return getattr(answer, part) if isinstance(part, str) else answer[part]
