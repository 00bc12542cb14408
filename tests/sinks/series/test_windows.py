"""Windows of a node's ticks, compared with the expected points of each series."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.remote_write.nodes import OpenSeries
from sinks.series.model import SampleGroup
from sinks.series.relabel import Relabelling
from sinks.series.relabel_file import load
from sinks.series.tick import SeriesTick
from sinks.series.translation import Translator
from sinks.series.windows import Aggregate, NodeWindow, Resolution, aggregates
from tests.sinks.conftest import device, sample
from topics.profiles import PROFILES, ProfileName, insert_suffix, profile_names

ALL: tuple[Aggregate, ...] = ("min", "mean", "max")
EPOCH_MS = 1_795_219_200_000
END = "ends"

Series = tuple[tuple[str, str], ...]
PointsBySeries = dict[Series, list[tuple[int, float | str]]]


def translator(name: ProfileName = "otel") -> Translator:
    return Translator([PROFILES[name]])


def tick(seq: int, second: float, *devices: dict[str, Any], **fields: Any) -> SeriesTick:
    return sample(seq, ts_ms=EPOCH_MS + round(second * 1000), **{"devices": list(devices), **fields})


def points(groups: Sequence[SampleGroup]) -> list[tuple[Series, int, float | str]]:
    return [
        (tuple(labels), group.ts_ms, END if value != value else value)
        for group in groups
        for labels, value in zip(group.series.series(), group.values, strict=True)
    ]


def write(
    ticks: Sequence[SeriesTick], resolution: Resolution, used_translator: Translator | None = None
) -> PointsBySeries:
    """The points of these ticks, written as soon as each window is over, which the last one is not."""
    state, points_by_series = OpenSeries(used_translator or translator(), resolution), PointsBySeries()
    window: NodeWindow | None = None
    for previous, current in itertools.pairwise([None, *ticks]):
        if previous is not None and window is not None and not window.includes(current.ts_ms):  # type: ignore[union-attr]
            over = state.tick(previous, window)
            for series, ts_ms, value in points(over.groups):
                points_by_series.setdefault(series, []).append((ts_ms, value))
            state.settle(over, 0.0, accepted=True)
            window = None
        window = state.fold(current, window)  # type: ignore[arg-type]
    return points_by_series


OF_THE_DRIVER: dict[str, Aggregate] = {"gpu_power_draw_min": "min", "gpu_power_draw_max": "max"}
"""Series that are aggregates of the driver's own within each tick."""


def seen_tick(
    series_tick: SeriesTick, used_translator: Translator, kinds: Sequence[Aggregate]
) -> dict[Series, tuple[float, str]]:
    """What is written of a tick without any other, aggregates included: the value of each series, and which of the
    values of a window counts."""
    seen: dict[Series, tuple[float, str]] = {}
    for group in OpenSeries(used_translator).tick(series_tick).groups:
        names = {row.name for row in group.series.rows}
        for labels, row, value in zip(group.series.series(), group.series.rows, group.values, strict=True):
            own = OF_THE_DRIVER.get(row.name)
            every_tick = row.name == "gpu_pod_xid_errors"
            seen[labels] = value, "each" if every_tick else own if own is not None and own in kinds else "last"
            if own is None and row.kind == "gauge" and row.unit not in {"", "bitmask", "code"} and not every_tick:
                for kind in kinds:
                    if (name := insert_suffix(row.name, f"_{kind}", row.unit)) not in names:
                        seen[tuple(sorted({**dict(labels), "__name__": name}.items()))] = value, kind
    return seen


def truth(ticks: Sequence[SeriesTick], seen: Sequence[dict[Series, tuple[float, str]]]) -> PointsBySeries:
    """The expected points of each series in windows of 15 s, without the window that is not over."""
    points_by_series = PointsBySeries()
    ends = [  # the numbers of those ticks that are the last of their window
        number
        for number, (tick_alone, after) in enumerate(itertools.pairwise(ticks))
        if not tick_alone.ts_ms < after.ts_ms or tick_alone.ts_ms // 15_000 != after.ts_ms // 15_000
    ]
    over = max(ends, default=-1) + 1
    for series in {series for of_tick in seen[:over] for series in of_tick}:
        run: list[float] = []
        for number, ts_ms in enumerate([tick_alone.ts_ms for tick_alone in ticks[:over]]):
            if series in seen[number]:
                value, kind = seen[number][series]
                run.append(value)
                if kind == "each" or number in ends or series not in seen[number + 1]:
                    aggregates = {"min": min(run), "mean": sum(run) / len(run), "max": max(run)}
                    points_by_series.setdefault(series, []).append((ts_ms, aggregates.get(kind, value)))
                    run = []
            elif number and series in seen[number - 1]:
                points_by_series.setdefault(series, []).append((ts_ms, END))
    return points_by_series


numbers = st.sampled_from([0.0, 1.0, 2.5, 3.0])


@st.composite
def readings(draw: st.DrawFn) -> dict[str, float]:
    """The metrics of a device; what the driver says of a tick agrees with the value in it, if that is known."""
    keys = ["gpu_utilization_ratio", "temperature_celsius", "energy_joules_total", "row_remap_failure"]
    metrics = draw(st.dictionaries(st.sampled_from([*keys, "clock_event_reasons"]), numbers, max_size=3))
    power = 5.0 + draw(numbers)
    of_power = {
        "power_watts": power,
        "power_min_watts": power - draw(numbers),
        "power_max_watts": power + draw(numbers),
    }
    return metrics | {key: of_power[key] for key in draw(st.sets(st.sampled_from(sorted(of_power))))}


ratios = st.sampled_from([0.0, 0.25, 0.5])
parts = st.fixed_dictionaries({}, optional={"utilization_ratio": ratios, "power_watts": ratios})
holders = st.lists(
    st.builds(lambda pod, of_pod: {"namespace": "ml", "pod": pod, "parts": of_pod}, st.sampled_from("pq"), parts),
    unique_by=lambda holder: str(holder["pod"]),
    max_size=2,
)
devices = st.lists(
    st.builds(
        device,
        st.sampled_from(["GPU-a", "GPU-b", "GPU-c"]),
        metrics=readings(),
        holders=holders,
        unattributed=st.none() | parts,
        events=st.lists(st.sampled_from([{"kind": "xid", "code": 79}, {"kind": "xid", "code": 13}]), max_size=1),
    ),
    unique_by=lambda one: str(one["uuid"]),
    max_size=3,
)
RULES = {
    "none": "[]",
    "equal devices": "- {regex: gpu_uuid, action: labeldrop}",
    "some dropped": "- {source_labels: [__name__, k8s_pod_name], regex: gpu_power_draw;p|.*temp.*, action: drop}",
}


WRITTEN = (
    ("otel", False, "none"),
    ("otel", False, "equal devices"),
    ("otel", True, "some dropped"),
    ("otel,dcgm", True, "none"),
    ("dcgm-4.9", False, "none"),
)
"""In which names, whether by pod, and under which rules."""


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1, 3, 9, 40, 0, -1]), devices), max_size=10),
    st.sampled_from([(), ALL, ("max",), ("mean",)]),
    st.sampled_from(WRITTEN),
)
def test_of_each_series_the_last_value_of_each_window_is_written_and_its_end(
    steps: list[tuple[float, list[dict[str, Any]]]], kinds: tuple[Aggregate, ...], written: tuple[str, bool, str]
) -> None:
    names, by_pod, rules = written
    relabelling = Relabelling([load(RULES[rules], "rules.yml")] if rules != "none" else [])

    def new_translator() -> Translator:
        return Translator([PROFILES[name] for name in profile_names(names)], by_pod=by_pod, relabelling=relabelling)

    if rules != "none":  # what may collide is not written at a time at which it has ended, or before
        steps = [(abs(after) or 1, of_step) for after, of_step in steps]
    for _, of_step in steps if rules == "equal devices" else ():  # the driver's value of one is no aggregate of another
        for listed in of_step:
            listed["metrics"] = {
                key: value for key, value in listed["metrics"].items() if not key.startswith("power_m")
            }
    seconds = itertools.accumulate(after for after, _ in steps)
    ticks = [
        sample(number, *of_step, ts_ms=EPOCH_MS + round(1000 * (20 + second)), devices=of_step)
        for number, (second, (_, of_step)) in enumerate(zip(seconds, steps, strict=True), 1)
    ]
    seen = [seen_tick(series_tick, new_translator(), kinds) for series_tick in ticks]

    assert write(ticks, Resolution(15_000, kinds), new_translator()) == truth(ticks, seen)


@given(st.lists(st.tuples(st.sampled_from([1, 3, 9, 40]), devices), max_size=10), st.sampled_from([ALL, ("max",)]))
def test_a_series_that_is_an_aggregate_of_one_device_and_the_drivers_of_an_equal_one_is_written_once_at_a_time(
    steps: list[tuple[int, list[dict[str, Any]]]], kinds: tuple[Aggregate, ...]
) -> None:
    relabelling = Relabelling([load(RULES["equal devices"], "rules.yml")])
    seconds = itertools.accumulate(after for after, _ in steps)
    ticks = [tick(n, second, *of_step) for n, (second, (_, of_step)) in enumerate(zip(seconds, steps, strict=True), 1)]
    translator_of_all = Translator([PROFILES["otel"]], relabelling=relabelling)
    points_by_series = write(ticks, Resolution(15_000, kinds), translator_of_all)

    for points_of_one in points_by_series.values():
        times = [ts_ms for ts_ms, _ in points_of_one]
        assert times == sorted(set(times))


def test_the_drivers_maximum_of_one_device_is_written_and_not_the_equal_aggregate_of_another() -> None:
    relabelling = Relabelling([load(RULES["equal devices"], "rules.yml")])
    equal = [device("GPU-a", metrics={"power_watts": 5.0}), device("GPU-b", metrics={"power_max_watts": 9.0})]
    ticks = [tick(1, 1, *equal), tick(2, 14, *equal), tick(3, 16, *equal), tick(4, 17), tick(5, 31)]
    points_by_series = write(
        ticks, Resolution(15_000, ("max",)), Translator([PROFILES["otel"]], relabelling=relabelling)
    )
    (maximum,) = [points for series, points in points_by_series.items() if ("__name__", "gpu_power_draw_max") in series]

    assert maximum == [(EPOCH_MS + 14_000, 9.0), (EPOCH_MS + 16_000, 9.0), (EPOCH_MS + 17_000, END)]


def test_a_spike_of_one_tick_is_in_the_maximum_and_nowhere_else() -> None:
    values = [0.1] * 7 + [0.9] + [0.1] * 7 + [0.2]
    ticks = [tick(n, n, device(metrics={"gpu_utilization_ratio": value})) for n, value in enumerate(values)]
    points_by_name = {
        dict(series)["__name__"]: points for series, points in write(ticks, Resolution(15_000, ALL)).items()
    }
    at_ms, [(mean_at_ms, mean)] = EPOCH_MS + 14_000, points_by_name["gpu_utilization_mean"]

    assert points_by_name["gpu_utilization"] == points_by_name["gpu_utilization_min"] == [(at_ms, 0.1)]
    assert points_by_name["gpu_utilization_max"] == [(at_ms, 0.9)]
    assert mean_at_ms == at_ms
    assert mean == pytest.approx((14 * 0.1 + 0.9) / 15)


def test_the_drivers_maximum_of_each_tick_is_the_highest_of_the_window_and_the_only_one_of_its_name() -> None:
    highest = [3.0, 9.0, *[2.0] * 14]
    ticks = [
        tick(n, n, device(metrics={"power_watts": 1.0, "power_max_watts": highest_watts}))
        for n, highest_watts in enumerate(highest)
    ]
    maxima = [
        (dict(series)["__name__"], points) for series, points in write(ticks, Resolution(15_000, ("max",))).items()
    ]

    assert [points for name, points in maxima if name == "gpu_power_draw_max"] == [[(EPOCH_MS + 14_000, 9.0)]]
    assert not [name for name, _ in maxima if name.startswith("gpu_power_draw_max_")]


def test_the_drivers_maximum_is_the_highest_of_the_window_also_in_ticks_that_lack_the_value_itself() -> None:
    ticks = [
        tick(
            n, n, device(metrics={"power_max_watts": 9.0 if n == 3 else 6.0} | ({"power_watts": 5.0} if n < 9 else {}))
        )
        for n in range(16)
    ]
    points_by_series = write(ticks, Resolution(15_000, ALL))
    points_by_name = {dict(series)["__name__"]: points for series, points in points_by_series.items()}

    assert points_by_name["gpu_power_draw_max"] == [(EPOCH_MS + 14_000, 9.0)]
    assert not [name for name in points_by_name if name.startswith("gpu_power_draw_max_")]


@pytest.mark.parametrize("without", [0, 1, 7, 13, 14, 15])
def test_a_tick_without_the_drivers_maximum_ends_no_maximum_and_loses_none(without: int) -> None:
    def metrics(second: int) -> dict[str, float]:
        used = {"power_watts": 5.0, "gpu_utilization_ratio": 0.5}
        of_driver = {"power_max_watts": 9.0 if second in {2, 20} else 6.0, "gpu_utilization_max_ratio": 0.6}
        return used if second == without else used | of_driver

    ticks = [tick(n, n, device(metrics=metrics(n))) for n in range(46)]
    points_by_series = write(ticks, Resolution(15_000, ALL))

    (power,) = [points for series, points in points_by_series.items() if ("__name__", "gpu_power_draw_max") in series]
    assert power == [(EPOCH_MS + 14_000, 9.0), (EPOCH_MS + 29_000, 9.0), (EPOCH_MS + 44_000, 6.0)]
    last = {series for series, points in points_by_series.items() if points[-1][1] != END}
    assert {series for series, points in points_by_series.items() if points[-1][0] == EPOCH_MS + 44_000} == last
    for points in points_by_series.values():
        times = [ts_ms for ts_ms, _ in points]
        assert times == sorted(set(times))


def test_a_pods_xid_errors_are_those_of_every_tick_and_add_up() -> None:
    codes = {1: [79], 2: [79, 79, 13], 3: [79], 7: [13], 14: [79], 15: [79], 16: [79]}
    events = {n: [{"kind": "xid", "code": code, "ts_ms": 1} for code in codes.get(n, ())] for n in range(31)}
    ticks = [
        tick(n, n, device(pod="a", metrics={"power_watts" if n == 2 else "fan_speed_ratio": 1.0}, events=events[n]))
        for n in events
    ]
    points_by_code = {
        dict(series)["xid"]: [((ts_ms - EPOCH_MS) // 1000, value) for ts_ms, value in points]
        for series, points in write(ticks, Resolution(15_000, ALL)).items()
        if ("__name__", "gpu_pod_xid_errors") in series
    }

    assert points_by_code == {
        "13": [(2, 1.0), (3, END), (7, 1.0), (8, END)],
        "79": [(1, 1.0), (2, 2.0), (3, 1.0), (4, END), (14, 1.0), (15, 1.0), (16, 1.0), (17, END)],
    }


def test_a_counter_keeps_its_last_value_and_has_no_mean() -> None:
    ticks = [tick(n, n, device(metrics={"energy_joules_total": 100.0 + n})) for n in range(16)]
    names = {dict(series)["__name__"]: points for series, points in write(ticks, Resolution(15_000, ALL)).items()}

    assert names["gpu_energy_consumption"] == [(EPOCH_MS + 14_000, 114_000.0)]
    assert not [name for name in names if name.startswith("gpu_energy_consumption_")]


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("otel", "gpu_memory_used_max"),
        ("otel-suffixed", "gpu_memory_used_max_bytes"),
        ("otel-suffixed", "gpu_clock_frequency_max_MHz"),
        ("dcgm", "DCGM_FI_DEV_FB_USED_max"),
    ],
)
def test_the_aggregate_stands_before_the_unit_of_the_name(profile: ProfileName, name: str) -> None:
    known_values = {"memory_used_bytes": 1 << 20, "sm_clock_hz": 1e9}
    ticks = [tick(n, n, device(metrics=known_values)) for n in range(16)]
    points_by_series = write(ticks, Resolution(15_000, ("max",)), translator(profile))

    assert name in {dict(series)["__name__"] for series in points_by_series}


@pytest.mark.parametrize("profile", PROFILES)
def test_no_aggregate_has_the_name_of_another_series(profile: ProfileName) -> None:
    names = {series.name for series_of_key in PROFILES[profile].series.values() for series in series_of_key}
    names |= {ratio.name for ratio in PROFILES[profile].ratios}
    ticks = [tick(n, n, device(metrics=dict.fromkeys(PROFILES[profile].series, 1))) for n in range(16)]
    points_by_series = write(ticks, Resolution(15_000, ALL), translator(profile))

    assert {dict(series)["__name__"] for series in points_by_series} - names
    assert {len(points) for points in points_by_series.values()} == {1}  # two series of one name would be written twice


def test_names_after_commas_are_put_in_order_and_others_refused() -> None:
    assert aggregates("") == ()
    assert aggregates("max, min") == ("min", "max")
    assert aggregates("") == ()
    with pytest.raises(ValueError, match="'median' is none of min, mean, max"):
        aggregates("min,median")
    with pytest.raises(ValueError, match="has a name twice"):
        aggregates("min,min")
