"""A device in several naming profiles at once."""

import math
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import astuple

from sinks.series.cache import Cache
from sinks.series.model import SampleGroup, primaries
from sinks.series.translation import Translator
from tests.sinks.scrape.fleet import full_node, node
from topics.catalogue import XID_ERRORS, XIDS
from topics.profiles import LABELS, PROFILES, ProfileName

ValuesBySeries = dict[tuple[str, frozenset[tuple[str, str]]], float]


def values_by_series(groups: list[SampleGroup]) -> ValuesBySeries:
    """Every series with all of its labels; asserts that none is repeated."""
    rows = [
        ((row.name, frozenset((*group.series.labels, *row.labels))), value)
        for group in groups
        for row, value in zip(group.series.rows, group.values, strict=True)
    ]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def translated(*names: ProfileName, tick: Any = None) -> list[SampleGroup]:
    return Translator([PROFILES[name] for name in names]).translate(tick or full_node(), Cache())[1]


@pytest.mark.parametrize("names", [("otel", "dcgm"), ("dcgm", "otel", "dcgm-legacy")])
def test_several_profiles_write_what_each_writes_alone(names: tuple[ProfileName, ...]) -> None:
    together: ValuesBySeries = {}
    for name in names:
        together |= values_by_series(translated(name))

    assert values_by_series(translated(*names)) == together


def test_what_two_profiles_call_alike_with_the_same_labels_is_written_once_as_the_first_says_it() -> None:
    legacy = replace(PROFILES["dcgm-legacy"], labels=LABELS["otel"])
    (power,) = legacy.series["power_watts"]
    other = replace(legacy, name="other", series={"power_watts": (power._replace(help="x"),)})
    groups = Translator([legacy, other]).translate(full_node(), Cache())[1]

    assert values_by_series(groups) == values_by_series(Translator([legacy]).translate(full_node(), Cache())[1])
    assert "x" not in {row.help for group in groups for row in group.series.rows}


def test_profiles_with_the_same_labels_share_a_set_of_series() -> None:
    legacy = replace(PROFILES["dcgm-legacy"], labels=LABELS["otel"])
    tick = node({"uuid": "GPU-a", "metrics": {"power_watts": 1.5, "fan_speed_ratio": 0.5}})
    (group,) = Translator([PROFILES["otel"], legacy]).translate(tick, Cache())[1]

    assert [row.name for row in group.series.rows] == [
        "gpu_power_draw",
        "gpu_fan_speed",
        "dcgm_power_usage",
    ]


def test_a_value_counts_once_however_many_profiles_write_it() -> None:
    tick = full_node()
    values = sum(value is not None for device in tick.devices for value in astuple(device.metrics))

    assert primaries(translated("otel")) == primaries(translated("dcgm", "otel", "dcgm-legacy")) == values


def test_series_of_which_nothing_has_changed_are_the_same_object_in_every_profile() -> None:
    translator, cache = Translator([PROFILES["otel"], PROFILES["dcgm"]]), Cache()
    first, second = (translator.translate(full_node(), cache)[1] for _ in range(2))

    assert [group.series for group in first] == [group.series for group in second]


def test_a_node_is_written_in_other_profiles_from_the_next_tick_on() -> None:
    translator, cache = Translator([PROFILES["otel"]]), Cache()
    translator.translate(full_node(), cache)
    translator.profiles = (PROFILES["dcgm"],)

    assert values_by_series(translator.translate(full_node(), cache)[1]) == values_by_series(translated("dcgm"))


def test_a_device_of_which_nothing_is_known_is_written_once() -> None:
    bare = node({"uuid": "GPU-a", "xids": {"79": 1}})
    both = [replace(PROFILES["dcgm"], labels=names) for names in (LABELS["dcgm-legacy"], LABELS["pod-devices"])]
    same = [replace(series, labels=replace(series.labels, device=(("uuid", "uuid"),))) for series in both]

    groups = Translator(same).translate(bare, Cache())[1]
    assert {name for name, _ in values_by_series(groups)} == {XIDS.name, XID_ERRORS.name, "DCGM_FI_DEV_XID_ERRORS"}


INFO = {"driver_version": "580.65.06"}


def xids(*ticks: dict[str, Any]) -> list[dict[str, float]]:
    """The XID series of each tick of a device, in the names of dcgm."""
    translator, cache = Translator([PROFILES["dcgm"]]), Cache()
    codes = []
    for tick in ticks:
        metrics = {"power_watts": 1.5}
        groups = translator.translate(node({"uuid": "GPU-a", "metrics": metrics, **tick}), cache)[1]
        named = {name: value for (name, _), value in values_by_series(groups).items()}
        codes.append({name: value for name, value in named.items() if name in {"DCGM_FI_DEV_XID_ERRORS", XIDS.name}})
    return codes


def test_the_last_xid_error_is_said_until_another_comes_or_the_producer_begins_again() -> None:
    events = [{"kind": "xid", "code": 31}, {"kind": "xid", "code": 79}]
    counts = {"31": 2, "79": 1}
    ticks = ({"info": INFO}, {"info": INFO, "xids": counts, "events": events}, {"info": INFO, "xids": counts})

    assert xids(*ticks, {"info": INFO}) == [
        {"DCGM_FI_DEV_XID_ERRORS": 0.0, "gpu_xid_errors": 0.0},
        {"DCGM_FI_DEV_XID_ERRORS": 79.0, "gpu_xid_errors": 3.0},
        {"DCGM_FI_DEV_XID_ERRORS": 79.0, "gpu_xid_errors": 3.0},
        {"DCGM_FI_DEV_XID_ERRORS": 0.0, "gpu_xid_errors": 0.0},
    ]


def test_the_xid_errors_of_a_gpu_that_is_lost_are_said_as_well() -> None:
    lost = {"info": INFO, "state": "lost", "metrics": {}, "xids": {"79": 1}, "events": [{"kind": "xid", "code": 79}]}

    assert xids({"info": INFO}, lost) == [
        {"DCGM_FI_DEV_XID_ERRORS": 0.0, "gpu_xid_errors": 0.0},
        {"DCGM_FI_DEV_XID_ERRORS": 79.0, "gpu_xid_errors": 1.0},
    ]


def test_of_several_codes_that_came_before_the_sink_none_is_said_to_be_the_last() -> None:
    assert xids({"xids": {"31": 2}}, {}) == [{"DCGM_FI_DEV_XID_ERRORS": 31.0, "gpu_xid_errors": 2.0}, {}]
    assert xids({"xids": {"31": 2, "79": 1}}) == [{"gpu_xid_errors": 3.0}]


def test_an_error_whose_tick_did_not_come_is_the_last_one_all_the_same() -> None:
    missed = {"info": INFO, "xids": {"79": 1}}, {"info": INFO, "xids": {"79": 1}}
    assert xids({"info": INFO}, *missed)[1:] == [{"DCGM_FI_DEV_XID_ERRORS": 79.0, "gpu_xid_errors": 1.0}] * 2
    assert xids({"info": INFO}, {"info": INFO, "xids": {"31": 1, "79": 1}})[1:] == [{"gpu_xid_errors": 2.0}]


def test_a_later_error_whose_tick_did_not_come_is_the_last_one_too_if_its_code_is_known() -> None:
    first = {"xids": {"79": 1}, "events": [{"kind": "xid", "code": 79}]}
    missed: list[dict[str, int]] = [{"79": 1}, {"79": 1, "31": 1}, {"79": 2, "31": 1}, {"79": 3, "31": 2}]

    codes = [tick.get("DCGM_FI_DEV_XID_ERRORS") for tick in xids(first, *[{"xids": counts} for counts in missed])]
    assert codes == [79.0, 79.0, 31.0, 79.0, None]


def test_a_code_of_more_digits_than_a_number_has_is_written_as_infinity() -> None:
    assert xids({"xids": {"9" * 5000: 1}}) == [{"DCGM_FI_DEV_XID_ERRORS": math.inf, "gpu_xid_errors": 1.0}]


@pytest.mark.parametrize(
    ("names", "label"),
    [("dcgm", "DCGM_FI_DRIVER_VERSION"), ("dcgm-4.9", "DCGM_FI_SYSTEM_DRIVER_VERSION"), ("otel", None)],
)
def test_the_drivers_version_is_a_label_where_the_exporter_has_it(names: ProfileName, label: str | None) -> None:
    groups = translated(names, tick=node({"uuid": "GPU-a", "info": INFO, "metrics": {"power_watts": 1.5}}))
    labels = dict(next(group.series.labels for group in groups if group.series.subject == "metrics"))

    assert {name for name, value in labels.items() if value == "580.65.06"} == {label} - {None}
