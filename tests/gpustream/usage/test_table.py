"""Who used what: sums that close, costs that add up, and which of a key's records counts."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.prices import Price, Prices
from gpustream.usage.command import as_csv, table_notes
from gpustream.usage.read import LatestRecords, Range
from gpustream.usage.table import By, Table, divided
from tests.usage_records import START_MS, read, usage
from topics.usage import HOUR_MS, MINUTE_MS, MINUTES, Usage

DAY = Range(START_MS, START_MS + 24 * HOUR_MS)
PRICES = Prices("EUR", (Price("nvidia h100*", Decimal("2.95"), 0, 2**60, ()),))


def table(*records: Usage, by: By = "namespace", prices: Prices | None = None) -> Table:
    usage_table = Table(by, prices)
    for record in records:
        usage_table.add(record)
    usage_table.close()
    return usage_table


def held(usage_table: Table) -> dict[str, Fraction]:
    return {row.by: row.sums.gpu_hours for row in usage_table.rows() if row.category == "held"}


def counted(*records: Any, range: Range = DAY) -> list[Usage]:  # noqa: A002 - it is one
    counting = LatestRecords(range)
    counting.add(records)
    return list(counting.records())


@pytest.mark.parametrize(
    ("by", "name"),
    [
        ("namespace", "ml"),
        ("workload", "ml/Job/bert"),
        ("team", "vision"),
        ("pod", "ml/bert-0"),
        ("node", "n1"),
    ],
)
def test_a_row_is_whose_usage_was_asked_for(by: By, name: str) -> None:
    record = usage("ml", "bert-0", workload={"kind": "Job", "name": "bert"}, team="vision")
    assert held(table(record, by=by)) == {name: 1}


def test_a_pod_without_a_workload_is_its_own_and_one_without_a_team_is_said() -> None:
    assert held(table(usage("ml", "a"), by="workload")) == {"ml/Pod/a": 1}
    assert held(table(usage("ml", "a"), by="team")) == {"(no team)": 1}


def test_if_no_pod_has_a_team_a_note_says_where_teams_come_from() -> None:
    (note,) = table_notes(table(usage("ml", "a"), usage("ml", "b", gpu_uuid="GPU-2"), by="team"))
    assert note.startswith("no pod has a team: is --team-label of `gpustream stream usage` the name of a label")
    some_has = table(usage("ml", "a"), usage("ml", "b", team="vision", gpu_uuid="GPU-2"), by="team")
    for noteless in (some_has, table(usage("ml", "a")), table(usage(category="free"), by="team")):
        assert list(table_notes(noteless)) == []


def test_the_cluster_is_named_if_there_are_several() -> None:
    of_two_clusters = usage("ml"), usage("ml", cluster="c2")
    assert held(table(*of_two_clusters)) == {"c1/ml": 1, "c2/ml": 1}
    assert held(table(*of_two_clusters, by="team")) == {"(no team)": 2}


def test_a_mig_device_is_the_part_of_a_gpu_that_it_has() -> None:
    mig: dict[str, Any] = {"of": 7, "uuid": "MIG-1", "slice_ms": 2 * HOUR_MS, "used_us": 1000 * HOUR_MS // 2}
    usages = table(usage("ml", **mig), usage(of=7, slice_ms=5 * HOUR_MS))
    (row, *_) = usages.rows()
    assert (row.sums.gpu_hours, row.sums.used_hours, row.share) == (Fraction(2, 7), Fraction(1, 7), Fraction(2, 7))
    assert usages.gpu_hours == usages.whole.gpu_hours == 1
    assert usages.open_windows == 0


def test_a_final_window_whose_parts_are_not_the_whole_is_counted() -> None:
    assert table(usage("ml", device_ms=HOUR_MS // 2)).open_windows == 1
    assert table(usage("ml", device_ms=HOUR_MS // 2, final=False)).open_windows == 0


def test_what_has_no_price_is_said_and_costs_nothing() -> None:
    usages = table(usage("ml"), usage("ml", gpu_uuid="GPU-2", model="Tesla T4"), prices=PRICES)
    assert usages.rows()[0].cost == Decimal("2.95")
    assert usages.unpriced == {"Tesla T4": 1}


@given(st.lists(st.integers(1, HOUR_MS), min_size=1, max_size=20))
def test_rounded_costs_add_up_to_the_rounded_whole(times: list[int]) -> None:
    records = [usage(f"ns-{number}", gpu_uuid=f"GPU-{number}", device_ms=ms) for number, ms in enumerate(times)]
    usages = table(*records, prices=PRICES)
    whole = Decimal("2.95") * sum(times) / HOUR_MS
    assert abs(sum((row.cost or Decimal(0) for row in usages.rows()), -whole)) <= Decimal("0.005")


@pytest.mark.parametrize("by", ["namespace", "workload", "pod", "node"])
def test_what_nobody_held_costs_the_same_whoever_has_the_rows(by: By) -> None:
    records = [
        usage(f"ns-{number}", node=f"n{number}", gpu_uuid=f"GPU-{number}", device_ms=11_000) for number in range(9)
    ]
    records += [usage(gpu_uuid="GPU-9", device_ms=7_300), usage(gpu_uuid="GPU-9", device_ms=12_600, category="lost")]

    def costs(by: By) -> list[tuple[str, Decimal | None]]:
        return [(row.category, row.cost) for row in table(*records, by=by, prices=PRICES).rows() if not row.by]

    assert costs(by) == costs("team") == [
        ("free", Decimal("0.01")), ("unobserved", Decimal("0.00")), ("lost", Decimal("0.01")),
    ]  # fmt: skip


def test_a_minute_has_the_price_of_its_hour() -> None:
    half_past = START_MS + HOUR_MS // 2
    prices = Prices("EUR", (Price("*", Decimal(1), 0, half_past, ()), Price("*", Decimal(3), half_past, 2**60, ())))
    minutes = [
        usage("ml", start_ms=start_ms, end_ms=start_ms + MINUTE_MS, device_ms=MINUTE_MS)
        for start_ms in range(START_MS, START_MS + HOUR_MS, MINUTE_MS)
    ]
    assert table(*minutes, prices=prices).whole.cost == table(usage("ml"), prices=prices).whole.cost == 1


@given(
    st.decimals(-1000, 1000, allow_nan=False, places=4) | st.decimals(-1000, 1000, allow_nan=False, places=2),
    st.lists(st.integers(0, 10**9), min_size=1, max_size=30).filter(any),
)
def test_parts_add_up_to_the_amount_and_are_off_by_less_than_its_smallest_unit(
    amount: Decimal, weights: list[int]
) -> None:
    parts = divided(amount, weights)
    assert sum(map(Fraction, parts)) == Fraction(amount)
    unit = Fraction(1, 10 ** max(2, -int(amount.as_tuple().exponent)))
    for part, weight in zip(parts, weights, strict=True):
        assert abs(Fraction(part) - Fraction(amount) * weight / sum(weights)) < unit


def test_of_a_key_the_highest_generation_counts_and_in_it_the_highest_revision() -> None:
    orders = [(0, 1), (0, 9), (1, 2), (1, 3), (0, 10), (1, 1)]
    records = [usage("ml", generation=generation, revision=revision) for generation, revision in orders]
    assert [(record.generation, record.revision) for record in counted(*map(read, records))] == [(1, 3)]


def test_what_became_zero_in_a_later_revision_does_not_count() -> None:
    assert counted(read(usage("ml")), read(usage("ml", revision=2, device_ms=0))) == []


def test_what_a_pod_used_of_a_device_that_it_was_not_given_counts_though_it_has_no_time() -> None:
    guest = usage("ml", "guest", policy="equal", device_ms=0, used_us=6_000_000)
    records = counted(read(guest, 0), read(usage("ml", "host", policy="equal"), 1))
    held = table(*records).categories["held"]
    assert (held.used_us, held.used_hours) == (6_000_000, Fraction(6, 3600))


def test_energy_of_a_silence_counts_although_no_time_of_the_hour_is_unobserved() -> None:
    drawn = usage(category="unobserved", device_ms=0, energy_mj=4_235_441)
    records = counted(read(usage()), read(drawn))
    assert records == [usage(), drawn]
    assert table(*records).categories["unobserved"].energy_mj == 4_235_441
    assert table(*records).gpu_hours == 1


def test_whole_hours_count_by_hours_and_the_ends_by_minutes() -> None:
    requested = Range(START_MS + HOUR_MS - 2 * MINUTE_MS, START_MS + 2 * HOUR_MS + MINUTE_MS)
    minutes = [
        usage("ml", start_ms=start_ms, end_ms=start_ms + MINUTE_MS, device_ms=MINUTE_MS)
        for start_ms in range(START_MS, START_MS + 3 * HOUR_MS, MINUTE_MS)
    ]
    hours = [usage("ml", start_ms=START_MS + hour * HOUR_MS) for hour in range(3)]
    logs = [*map(read, hours), *(read(record, topic=MINUTES.name) for record in minutes)]
    records = counted(*logs, range=requested)
    assert sorted(record.start_ms - START_MS for record in records) == [
        HOUR_MS - 2 * MINUTE_MS,
        HOUR_MS - MINUTE_MS,
        HOUR_MS,
        2 * HOUR_MS,
    ]
    assert held(table(*records)) == {"ml": Fraction(requested.to_ms - requested.from_ms, HOUR_MS)}


def test_a_time_within_an_hour_is_minutes_only() -> None:
    requested = Range(START_MS + MINUTE_MS, START_MS + 3 * MINUTE_MS)
    assert not requested.hours.is_nonempty
    assert requested.partial_hours == [requested]


def test_what_is_no_record_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    other = read(usage("ml", "b"))
    no_slices = other._replace(value=(other.value or b"").replace(b'"of":1', b'"of":0'))
    records = read(b"{"), read(usage("ml", "a")), no_slices
    assert [record.pod for record in counted(*records)] == ["a"]
    assert "gpu.usage partition 0 offset 0: Input data was truncated" in caplog.text
    assert "Expected `int` >= 1 - at `$.of`" in caplog.text


def test_a_record_that_ends_before_it_begins_is_of_no_time() -> None:
    assert counted(read(usage("ml", start_ms=2**63 - 1, end_ms=START_MS + HOUR_MS))) == []


@pytest.mark.parametrize(
    ("name", "shown"), [("=HYPERLINK(1)", "'=HYPERLINK(1)"), ("@SUM(1)", "'@SUM(1)"), ("ml=1", "ml=1")]
)
def test_no_name_is_a_formula_in_a_spreadsheet(name: str, shown: str) -> None:
    """The partition of a batch job is what its processes' environment says, which its user writes."""
    assert next(iter(as_csv(table(usage(name)))))[0] == shown


def test_no_name_in_csv_is_a_command_to_a_terminal() -> None:
    lines = list(as_csv(table(usage("\t\x1b[31m=ml"), usage(category="asleep\x07"))))
    assert (lines[0][0], lines[-1][1]) == ("??[31m=ml", "asleep?")
