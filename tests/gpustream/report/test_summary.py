"""The alerts of a report, beside a count of every hour."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustream.report.summary import DAY_MS, Firings
from gpustream.usage.read import Range
from gpustream.usage.table import NO_TEAM
from tests.sinks.alerts import alert, alert_record, deleted
from topics.usage import HOUR_MS

Firing = tuple[int, int | None, bool]
"""The hour in which it begins, for how many hours it fires if that is in the log, and whether a deletion says so."""

LATEST = 60
hours_of_two_days = st.integers(20, 28)
durations = st.integers(0, 8)

firings = st.tuples(hours_of_two_days, st.none() | durations, st.booleans())
stories = st.lists(firings, max_size=4, unique_by=lambda firing: firing[0]).map(sorted)
fleets = st.dictionaries(st.sampled_from(["GPUHeldIdle", "GPULost", "GPUXid"]), stories)


def read(fleet: dict[str, list[Firing]]) -> Firings:
    """What is known of one alert of each name."""
    known = Firings()
    for name, story in fleet.items():
        for begins, lasts, is_deleted in story:
            labels = {"team": "vision"} if name == "GPUXid" else {}
            begun = alert("a", begins * HOUR_MS, name=name, labels=labels)
            known.add([alert_record(begun)])
            ends_ms = None if lasts is None else (begins + lasts) * HOUR_MS
            if ends_ms is not None and not is_deleted:
                known.add([alert_record(alert("a", begins * HOUR_MS, ends_ms, name=name, labels=labels))])
            if ends_ms is not None and is_deleted:
                known.add([deleted(begun, at_ms=ends_ms)])
    return known


def ends_of(story: list[Firing]) -> dict[int, int | None]:
    """The end of each firing, by its begin; None if it still fires."""
    ends: dict[int, int | None] = {}
    for begins, lasts, is_deleted in story:
        end = None if lasts is None else begins + lasts
        ends[begins] = end
        if is_deleted and end is not None:  # a deletion ends all that the log has without an end
            ends |= {earlier: end for earlier, known in ends.items() if known is None}
    begins_again = dict(zip(sorted(ends), sorted(ends)[1:], strict=False))
    return {begins: begins_again.get(begins) if end is None else end for begins, end in ends.items()}


@given(fleets, hours_of_two_days, durations)
def test_the_alerts_of_a_time_are_those_that_a_look_at_each_hour_finds(
    fleet: dict[str, list[Firing]], first: int, hours: int
) -> None:
    last, expected, days = first + hours, {}, Counter[int]()
    for name, story in fleet.items():
        fired = still_firing = firing_hours = 0
        for begins, end in ends_of(story).items():
            fires_in = set(range(begins, LATEST if end is None else end)) & set(range(first, last))
            began = first <= begins < last
            fired += began
            days.update([begins * HOUR_MS // DAY_MS * DAY_MS] * began)
            still_firing += (began or bool(fires_in)) and (end is None or end > last)
            firing_hours += len(fires_in)
        if fired or firing_hours:
            expected[name] = fired, still_firing, firing_hours * HOUR_MS

    sums, days_of_sums = read(fleet).during(Range(first * HOUR_MS, last * HOUR_MS))

    assert {row.rule: row[2:] for row in sums} == expected
    assert days_of_sums == days
    assert all(row.team == ("vision" if row.rule == "GPUXid" else NO_TEAM) for row in sums)
    assert [(-row.fired, -row.firing_ms) for row in sums] == sorted((-row.fired, -row.firing_ms) for row in sums)


def test_a_record_that_is_no_alert_is_logged_and_the_next_one_counts(caplog: pytest.LogCaptureFixture) -> None:
    known = Firings()
    known.add([alert_record(b"{"), alert_record(alert("a", 0))])

    assert len(known.during(Range(0, HOUR_MS))[0]) == len(caplog.messages) == 1
