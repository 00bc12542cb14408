"""What is written of a tick: its series, and the ends of series that are gone."""

import struct
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sinks.remote_write.nodes import NodeTick, OpenSeries
from sinks.series.model import STALE, SampleGroup
from sinks.series.tick import SeriesTick
from sinks.series.translation import Translator
from tests.sinks.conftest import KEYS, SERIES, device, sample
from topics.profiles import PROFILES

PER_DEVICE = len(SERIES)
NO_HOLDERS = 0.0
"""The value of gpu_holders of a device that nobody holds."""


def series() -> OpenSeries:
    return OpenSeries(Translator([PROFILES["otel"]]))


def play(state: OpenSeries, *samples: SeriesTick, now_s: float = 0.0) -> list[NodeTick]:
    ticks = []
    for device_tick in samples:
        ticks.append(state.tick(device_tick))
        state.settle(ticks[-1], now_s, accepted=True)
    return ticks


def ended_series(groups: Sequence[SampleGroup]) -> list[tuple[int, str, str | None]]:
    """Time, name and pod of the series that end."""
    return sorted(
        (group.ts_ms, row.name, dict(group.series.labels).get("k8s_pod_name"))
        for group in groups
        for row, value in zip(group.series.rows, group.values, strict=True)
        if struct.pack("<d", value) == struct.pack("<d", STALE)
    )


def test_a_marker_has_the_bits_that_prometheus_ends_a_series_by() -> None:
    assert struct.pack("<d", STALE) == struct.pack("<Q", 0x7FF0000000000002)


def test_a_steady_tick_writes_its_values_and_ends_nothing() -> None:
    first, second = play(series(), sample(1), sample(2))
    assert [len(group.values) for group in first.groups] == [PER_DEVICE]
    assert second.open == first.open
    assert (second.markers, ended_series(second.groups)) == (0, [])


def test_a_pod_that_ends_gets_staleness_markers_at_the_tick_in_which_it_is_missing() -> None:
    _, second = play(series(), sample(1, device(pod="a")), sample(2, device(pod="b")))
    ts_ms = second.sample.ts_ms
    names = ["gpu_holders", "gpu_memory_used", "gpu_pod_info", "gpu_temperature", "gpu_utilization"]
    assert ended_series(second.groups) == [(ts_ms, name, "a") for name in names]
    assert second.markers == PER_DEVICE + 1


def test_a_pod_has_one_info_series_however_many_devices_it_holds() -> None:
    _, second = play(series(), *(sample(n, device("GPU-a", pod="a"), device("GPU-b", pod="a")) for n in (1, 2)))
    rows = [
        (row.name, value) for group in second.groups for row, value in zip(group.series.rows, group.values, strict=True)
    ]
    assert [value for name, value in rows if name == "gpu_pod_info"] == [1.0]
    assert second.markers == 0


def test_how_many_pods_hold_a_device_is_a_series_where_it_is_known() -> None:
    def holders(*devices: dict[str, Any], attribution: str = "exact") -> list[float]:
        (tick,) = play(series(), sample(1, *devices, attribution=attribution))
        rows = [pair for g in tick.groups for pair in zip(g.series.rows, g.values, strict=True)]
        return [value for row, value in rows if row.name == "gpu_holders"]

    two = [{"namespace": "ml", "pod": pod, "container": c} for pod in "ab" for c in ("main", "sidecar")]
    assert holders(device(), device("GPU-b", pod="a"), device("GPU-c", holders=two)) == [0.0, 1.0, 2.0]
    one_observed = [{"namespace": "ml", "pod": pod, "observed": pod == "b"} for pod in "ab"]
    assert holders(device(holders=one_observed), device("GPU-b", holders=one_observed[1:])) == [2.0, 1.0]
    assert holders(device(), attribution="late") == [0.0]
    assert holders(device(), attribution="none") == []
    assert holders(device(attribution="none")) == [], "the holders of this device are not known"


def shared(*pods: str, **fields: Any) -> dict[str, Any]:
    """A device that these pods share."""
    holders = [{"namespace": "ml", "pod": pod, "parts": {"memory_used_bytes": 1}} for pod in pods]
    return device(holders=holders, unattributed={"memory_used_bytes": 2}, **fields)


def test_a_steady_shared_device_writes_the_same_blocks_again() -> None:
    full = {"info": {"serial": "7"}, "xids": {"79": 1}, "conflict": "no_pod"}
    first, second = play(series(), sample(1, shared("a", "b", **full)), sample(2, shared("a", "b", **full)))
    assert all(earlier is later for earlier, later in zip(first.open, second.open, strict=True))
    assert (first.withheld, second.withheld, second.markers) == ({}, {}, 0)
    assert sum(block.primaries for block in second.open) == len(KEYS)


def test_a_part_ends_with_its_pod_and_the_rest_with_the_split() -> None:
    _, second, third = play(
        series(), sample(1, shared("a", "b", "c")), sample(2, shared("b", "c")), sample(3, device(pod="c"))
    )
    part, info = "gpu_pod_memory_used_bytes", "gpu_pod_info"
    assert {(name, pod) for _, name, pod in ended_series(second.groups)} == {(part, "a"), (info, "a")}
    assert {(name, pod) for _, name, pod in ended_series(third.groups)} == {
        *{(name, "b") for name in (part, info)},
        (part, "c"),
        *{(name, None) for name in ("gpu_unattributed_memory_used_bytes", "gpu_split_scaled")},
        *{(name, None) for name in ("gpu_holders", "gpu_memory_used", "gpu_temperature", "gpu_utilization")},
    }


def test_a_conflict_that_is_over_ends_alone() -> None:
    _, second, third = play(
        series(), sample(1, shared("a", conflict="no_pod")), sample(2, shared("a")), sample(3, shared("a"))
    )
    assert [name for _, name, _ in ended_series(second.groups)] == ["gpu_attribution_conflict"]
    assert (second.markers, third.markers) == (1, 0)


def test_a_part_of_a_pod_without_containers_is_written_beside_the_devices_own_series_of_it() -> None:
    (tick,) = play(series(), sample(1, shared("a")))
    (part,) = [group for group in tick.groups if group.series.subject == "part"]
    assert part.series.labels == tick.groups[0].series.labels
    assert tick.withheld == {}


def test_an_xid_error_of_another_code_begins_a_series_and_ends_none() -> None:
    counts: list[dict[str, int]] = [{"79": 1}, {"79": 2, "48": 1}]
    ticks = play(series(), *(sample(n, device(xids=xids)) for n, xids in enumerate(counts, 1)))
    codes = [
        {
            dict(row.labels)["xid"]: value
            for g in tick.groups
            for row, value in rows_of(g)
            if row.name == "gpu_xid_errors_total"
        }
        for tick in ticks
    ]
    assert codes == counts
    assert ticks[1].markers == 0


def test_a_pods_xid_errors_are_in_the_tick_that_has_them_and_end_with_the_next() -> None:
    events = [{"kind": "xid", "code": 31, "holders": [{"namespace": "ml", "pod": "before"}]}]
    first, second = play(series(), sample(1, device(events=events)), sample(2, device()))
    (group,) = [group for group in first.groups if group.series.subject == "errors"]
    (end,) = [group for group in second.groups if group.series.subject == "errors"]

    assert [(row.name, dict(row.labels), value) for row, value in rows_of(group)] == [
        ("gpu_pod_xid_errors", {"xid": "31"}, 1.0)
    ]
    assert dict(group.series.labels)["k8s_pod_name"] == "before"
    assert (end.series, end.ts_ms, second.markers) == (group.series, second.sample.ts_ms, 1)


def test_a_label_that_changes_is_another_series() -> None:
    before, after = ({"app": "bert", "version": version} for version in "12")
    first, second = play(series(), sample(1, labelled(before)), sample(2, labelled(after)))
    versions = [dict(group.series.labels).get("k8s_pod_label_version") for group in second.groups]
    assert versions == ["2", "2", "1", "1"]
    assert second.markers == PER_DEVICE + 1
    assert [dict(group.series.labels)["k8s_pod_label_app"] for group in first.groups] == ["bert", "bert"]


def labelled(labels: dict[str, str]) -> dict[str, Any]:
    """A device whose pod carries these labels."""
    holder = {"namespace": "ns", "pod": "a", "pod_uid": "u", "container": "main", "labels": labels}
    return {**device(), "holders": [holder]}


def test_a_metric_that_is_missing_ends_alone() -> None:
    less = device(metrics={"gpu_utilization_ratio": 1, "temperature_celsius": None})
    _, second, third = play(series(), sample(1), sample(2, less), sample(3, less))
    assert [name for _, name, _ in ended_series(second.groups)] == ["gpu_memory_used", "gpu_temperature"]
    assert ended_series(third.groups) == []


def test_a_device_that_is_lost_or_not_there_ends() -> None:
    lost_device = device(metrics={}, state="lost")
    _, second = play(series(), sample(1), sample(2, lost_device))
    assert len(ended_series(second.groups)) == PER_DEVICE
    _, second = play(series(), sample(1, device("GPU-a"), device("GPU-b")), sample(2, device("GPU-b")))
    assert len(ended_series(second.groups)) == PER_DEVICE


def test_the_order_of_metrics_and_devices_ends_nothing() -> None:
    metrics = {"gpu_utilization_ratio": 1.0, "memory_used_bytes": 2.0}
    turned = dict(reversed(metrics.items()))
    reordered = sample(1, device("GPU-a", metrics=metrics), device("GPU-b"))
    other = sample(2, device("GPU-b"), device("GPU-a", metrics=turned))
    _, second = play(series(), reordered, other)
    assert ended_series(second.groups) == []


def test_zero_is_zero_and_what_is_null_or_absent_is_not_written() -> None:
    metrics = {"gpu_utilization_ratio": 0, "memory_used_bytes": 0.0, "temperature_celsius": None}
    (tick,) = play(series(), sample(1, device(metrics=metrics)))
    assert [list(group.values) for group in tick.groups] == [[0.0, 0.0, NO_HOLDERS]]


def test_a_ratio_without_a_denominator_is_not_written() -> None:
    rows = []
    for total in (8, 0):
        metrics = {"memory_used_bytes": 4, "memory_total_bytes": total}
        (tick,) = play(series(), sample(1, device(metrics=metrics)))
        rows.append({row.name for group in tick.groups for row in group.series.rows})
    assert rows[0] - rows[1] == {"gpu_memory_used_percent"}


def test_of_two_devices_with_the_same_labels_the_first_is_written() -> None:
    second = device(metrics={"gpu_utilization_ratio": 9})
    tick, repeated = play(series(), sample(1, device(), second), sample(2, device(), second))
    assert [list(group.values) for group in tick.groups] == [[1.0, 2.0, 3.0, NO_HOLDERS]]
    assert (tick.withheld, repeated.withheld, repeated.markers) == ({"collision": 2}, {"collision": 2}, 0)


def test_a_replay_is_a_record_at_or_below_the_last_offset_of_its_node() -> None:
    state = series()
    play(state, sample(5), sample(3, node="n2"))
    assert state.verdict(sample(5)) == "replay"
    assert state.verdict(sample(4)) == "replay"
    assert state.verdict(sample(6)) == "next"
    assert state.verdict(sample(4, node="n2")) == "next"
    assert state.verdict(sample(1, node="n3")) == "next"


def test_the_first_tick_of_a_new_log_is_written_and_goes_on_from_what_was_open() -> None:
    state = series()
    play(state, sample(5, device(pod="a"), offset=1000))
    first = sample(6, device(pod="b"), offset=0)
    assert state.verdict(first) == "new_log"
    (tick,) = play(state, first)
    assert {pod for _, _, pod in ended_series(tick.groups)} == {"a"}
    assert state.verdict(first) == "replay"
    assert state.verdict(sample(7, offset=1)) == "next"
    assert state.verdict(sample(4, offset=999)) == "replay"


def test_a_new_run_is_no_replay_whatever_its_clock_says() -> None:
    state = series()
    play(state, sample(5, run_id=9))
    assert state.verdict(sample(6, run_id=1, ts_ms=5)) == "next"


def test_a_refused_tick_leaves_the_open_series_as_they_were() -> None:
    state = series()
    play(state, sample(1, device(pod="a")))
    refused = state.tick(sample(2, device(pod="b")))
    state.settle(refused, 0.0, accepted=False)
    assert state.verdict(sample(2)) == "replay"
    third = state.tick(sample(3, device(pod="c")))
    assert {pod for _, _, pod in ended_series(third.groups)} == {"a"}


def test_a_silent_node_ends_one_millisecond_after_its_last_tick_and_only_once() -> None:
    state = series()
    play(state, sample(1), sample(2), now_s=100.0)
    play(state, sample(1, node="n2"), now_s=150.0)
    assert state.silences(159.9, 60) == []
    (silence,) = state.silences(160.0, 60)
    assert silence.node == ("c1", "n1")
    assert {ts_ms for ts_ms, _, _ in ended_series(silence.groups)} == {sample(2).ts_ms + 1}
    assert len(ended_series(silence.groups)) == PER_DEVICE
    state.ended(silence)
    assert state.silences(161.0, 60) == []


def test_a_node_that_is_seldom_read_ends_after_three_of_its_intervals() -> None:
    state = series()
    play(state, sample(1, interval_ms=60_000), now_s=100.0)
    assert state.silences(279.9, 60) == []
    assert len(state.silences(280.0, 60)) == 1


def test_a_node_that_comes_back_after_silence_ends_nothing_and_opens_again() -> None:
    state = series()
    play(state, sample(1, device(pod="a")))
    state.ended(state.silences(60.0, 60)[0])
    (tick,) = play(state, sample(2, device(pod="b")), now_s=61.0)
    assert ended_series(tick.groups) == []
    assert len(state.silences(200.0, 60)) == 1


def test_the_last_millisecond_there_is_has_an_end_too() -> None:
    state = series()
    play(state, sample(1, ts_ms=2**63 - 1))
    assert {ts_ms for ts_ms, _, _ in ended_series(state.silences(60.0, 60)[0].groups)} == {2**63 - 1}


def test_what_was_recalled_is_open_and_a_replay() -> None:
    state = series()
    state.recall(sample(1, device(pod="a")), 0.0)
    state.recall(sample(1, device(pod="b")), 0.0)
    assert state.verdict(sample(1)) == "replay"
    assert {pod for _, _, pod in ended_series(state.tick(sample(2, device(pod="b"))).groups)} == {"a"}


def test_a_node_not_heard_of_for_a_day_is_forgotten() -> None:
    state = series()
    play(state, sample(1))
    for silence in state.silences(24 * 3600 + 1.0, 60):
        state.ended(silence)
    assert state.verdict(sample(1)) == "replay"
    assert state.silences(24 * 3600 + 1.0, 60) == []
    assert state.verdict(sample(1)) == "next"


def test_series_that_may_be_silent_for_longer_than_a_day_end_all_the_same() -> None:
    state = series()
    play(state, sample(1))
    assert state.silences(24 * 3600 + 1.0, 48 * 3600) == []
    assert len(state.silences(48 * 3600 + 1.0, 48 * 3600)) == 1


DEVICES = st.lists(
    st.builds(
        device,
        st.sampled_from(["GPU-a", "GPU-b"]),
        st.sampled_from([None, "p", "q"]),
        metrics=st.dictionaries(
            st.sampled_from(["gpu_utilization_ratio", "memory_used_bytes", "memory_total_bytes"]),
            st.none() | st.integers(0, 3),
        ),
        unattributed=st.none() | st.fixed_dictionaries({}, optional={"power_watts": st.integers(0, 3)}),
        conflict=st.sampled_from([None, "no_pod", "unallocated_process"]),
        xids=st.dictionaries(st.sampled_from(["48", "79"]), st.integers(0, 3)),
        info=st.dictionaries(st.just("serial"), st.sampled_from("78")),
    ),
    max_size=3,
)


@given(st.lists(DEVICES, min_size=1, max_size=6), st.data())
def test_after_any_ticks_just_the_series_of_the_last_accepted_one_are_open(
    ticks: list[Any], data: st.DataObject
) -> None:
    state = series()
    alive: set[Any] = set()
    for number, devices in enumerate(ticks, 1):
        tick_sample = sample(number)
        tick = state.tick(sample(number, *devices) if devices else SeriesTick(**_header(tick_sample)))
        written_series = [(series_of(group, row), value) for group in tick.groups for row, value in rows_of(group)]
        assert len({key for key, _ in written_series}) == len(written_series)
        accepted = data.draw(st.booleans())
        state.settle(tick, 0.0, accepted=accepted)
        if accepted:
            now = {key for key, value in written_series if value == value}
            assert {key for key, value in written_series if value != value} == alive - now
            alive = now


def _header(tick: SeriesTick) -> dict[str, Any]:
    return {name: getattr(tick, name) for name in tick.__struct_fields__ if name != "devices"}


def rows_of(group: SampleGroup) -> list[tuple[Any, float]]:
    return list(zip(group.series.rows, group.values, strict=True))


def series_of(group: SampleGroup, row: Any) -> Any:
    return row.name, row.labels, group.series.labels
