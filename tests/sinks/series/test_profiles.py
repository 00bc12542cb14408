"""A device in several naming profiles at once."""

from dataclasses import replace
from typing import Any

import pytest

from sinks.series.model import SampleGroup, primaries
from sinks.series.translation import Cache, Translator
from tests.sinks.scrape.fleet import full_node, node
from topics.profiles import LABELS, PROFILES, ProfileName

Written = dict[tuple[str, frozenset[tuple[str, str]]], float]


def written(groups: list[SampleGroup]) -> Written:
    """Every series with all of its labels; none is there twice."""
    found = [
        ((row.name, frozenset((*group.series.labels, *row.labels))), value)
        for group in groups
        for row, value in zip(group.series.rows, group.values, strict=True)
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def translated(*names: ProfileName, tick: Any = None) -> list[SampleGroup]:
    return Translator([PROFILES[name] for name in names]).translate(tick or full_node(), Cache())[1]


@pytest.mark.parametrize("names", [("otel", "dcgm"), ("dcgm", "otel", "dcgm-legacy")])
def test_several_profiles_write_what_each_writes_alone(names: tuple[ProfileName, ...]) -> None:
    together: Written = {}
    for name in names:
        together |= written(translated(name))

    assert written(translated(*names)) == together


def test_what_two_profiles_call_alike_with_the_same_labels_is_written_once_as_the_first_says_it() -> None:
    legacy = replace(PROFILES["dcgm-legacy"], labels=LABELS["otel"])
    other = replace(legacy, name="other", series={"power_watts": (legacy.series["power_watts"][0]._replace(help="x"),)})
    groups = Translator([legacy, other]).translate(full_node(), Cache())[1]

    assert written(groups) == written(Translator([legacy]).translate(full_node(), Cache())[1])
    assert "x" not in {row.help for group in groups for row in group.series.rows}


def test_profiles_with_the_same_labels_share_a_set_of_series() -> None:
    legacy = replace(PROFILES["dcgm-legacy"], labels=LABELS["otel"])
    tick = node({"uuid": "GPU-a", "metrics": {"power_watts": 1.5, "fan_speed_ratio": 0.5}})
    (group,) = Translator([PROFILES["otel"], legacy]).translate(tick, Cache())[1]

    assert [row.name for row in group.series.rows] == ["gpu_power_draw", "gpu_fan_speed", "dcgm_power_usage"]


def test_a_value_counts_once_however_many_profiles_write_it() -> None:
    tick = full_node()
    values = sum(len(device.metrics) for device in tick.devices)

    assert primaries(translated("otel")) == primaries(translated("dcgm", "otel", "dcgm-legacy")) == values


def test_series_of_which_nothing_has_changed_are_the_same_object_in_every_profile() -> None:
    translator, cache = Translator([PROFILES["otel"], PROFILES["dcgm"]]), Cache()
    first, second = (translator.translate(full_node(), cache)[1] for _ in range(2))

    assert [group.series for group in first] == [group.series for group in second]


def test_a_node_is_written_in_other_profiles_from_the_next_tick_on() -> None:
    translator, cache = Translator([PROFILES["otel"]]), Cache()
    translator.translate(full_node(), cache)
    translator.profiles = (PROFILES["dcgm"],)

    assert written(translator.translate(full_node(), cache)[1]) == written(translated("dcgm"))


def test_a_device_of_which_nothing_is_known_is_written_once() -> None:
    bare = node({"uuid": "GPU-a", "xids": {"79": 1}})
    both = [replace(PROFILES["dcgm"], labels=names) for names in (LABELS["dcgm-legacy"], LABELS["pod-devices"])]
    same = [replace(one, labels=replace(one.labels, device=(("uuid", "uuid"),))) for one in both]

    assert list(written(Translator(same).translate(bare, Cache())[1]).values()) == [1.0]
