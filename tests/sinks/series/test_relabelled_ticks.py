"""Ticks under relabelling rules and by pod, as remote write sends them: every series once, and its end."""

import gc
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from sinks.remote_write.nodes import NodeTick, OpenSeries
from sinks.series.cache import RelabelledSet
from sinks.series.labels import META
from sinks.series.model import STALE, SampleGroup
from sinks.series.relabel import Relabelling
from sinks.series.relabel_file import load
from sinks.series.tick import SeriesTick
from sinks.series.translation import Translator
from tests.docs.page import ROOT
from tests.sinks.conftest import SERIES, device, sample
from topics.profiles import PROFILES, ProfileName

ValuesByLabels = dict[tuple[tuple[str, str], ...], float]
END = struct.pack("<d", STALE)


def writer(rules: str = "[]", *, names: ProfileName = "dcgm", by_pod: bool = False) -> Translator:
    relabelling = Relabelling([load(rules, "rules.yml")])
    return Translator([PROFILES[names]], relabelling=relabelling, by_pod=by_pod)


def play(state: OpenSeries, *samples: SeriesTick) -> list[NodeTick]:
    ticks = []
    for device_tick in samples:
        ticks.append(state.tick(device_tick))
        state.settle(ticks[-1], 0.0, accepted=True)
    return ticks


def values_by_labels(groups: Sequence[SampleGroup]) -> ValuesByLabels:
    """The value of each series; asserts that no series is repeated."""
    pairs = [(name, value) for g in groups for name, value in zip(g.series.series(), g.values, strict=True)]
    assert Counter(name for name, _ in pairs).most_common(1)[0][1] == 1
    return dict(pairs)


def ends(values: ValuesByLabels) -> set[tuple[tuple[str, str], ...]]:
    return {name for name, value in values.items() if struct.pack("<d", value) == END}


LESS = "- {regex: UUID|gpu|device|pci_bus_id, action: labeldrop}"


def test_of_devices_that_rules_make_the_same_the_first_is_written_and_the_others_counted() -> None:
    first, second = play(OpenSeries(writer(LESS)), *(sample(n, device("GPU-a"), device("GPU-b")) for n in (1, 2)))
    assert len(values_by_labels(first.groups)) == len(values_by_labels(second.groups)) == first.withheld["collision"]
    assert (first.withheld, second.markers) == (second.withheld, 0)
    assert all(earlier is later for earlier, later in zip(first.open, second.open, strict=True))


@pytest.mark.parametrize(("rules", "names"), [(LESS, "dcgm"), ("[]", "otel")])
def test_pods_that_are_gone_take_no_memory(rules: str, names: ProfileName) -> None:
    state = OpenSeries(writer(rules, names=names))
    for n in range(300):
        play(state, sample(n, device("GPU-a", pod=f"p{n}"), device("GPU-b", pod=f"p{n}")))
    assert sum(isinstance(found, RelabelledSet) for found in gc.get_objects()) < 150


def test_of_series_of_a_device_that_rules_make_the_same_the_first_is_written() -> None:
    rules = "- {source_labels: [__name__], regex: DCGM_.*, target_label: __name__, replacement: one}"
    (tick,) = play(OpenSeries(writer(rules)), sample(1, device()))
    assert [dict(name)["__name__"] for name in values_by_labels(tick.groups)].count("one") == 1
    assert tick.withheld["collision"] >= 1


def test_a_device_takes_the_place_of_one_that_was_the_same_without_an_end() -> None:
    samples = sample(1, device("GPU-a"), device("GPU-b")), sample(2, device("GPU-b"))
    first, second = play(OpenSeries(writer(LESS)), *samples)
    assert values_by_labels(first.groups).keys() == values_by_labels(second.groups).keys()
    assert (second.markers, second.withheld) == (0, {})


def test_a_rule_sees_a_pods_container_on_its_devices_and_none_on_the_pod() -> None:
    rules = "- {source_labels: [__meta_gpustream_container], target_label: c}"
    (tick,) = play(OpenSeries(writer(rules, names="otel")), sample(1, device(pod="a")))
    container_by_name = {labels["__name__"]: labels.get("c") for labels in map(dict, values_by_labels(tick.groups))}
    assert (container_by_name["gpu_utilization"], container_by_name["gpu_pod_info"]) == ("main", None)


def test_a_rule_sees_the_labels_of_the_pod_and_its_namespace_on_series_that_do_not_have_them() -> None:
    rules = f"- {{source_labels: [{META}pod_label_team, {META}namespace_label_tier], target_label: who}}"
    holder = {"namespace": "ml", "pod": "a", "labels": {"team": "vision"}, "namespace_labels": {"tier": "gold"}}
    (tick,) = play(OpenSeries(writer(rules)), sample(1, device(holders=[holder])))
    assert {dict(name).get("who") for name in values_by_labels(tick.groups)} == {"vision;gold"}


def test_a_marker_ends_the_series_that_was_sent() -> None:
    rules = "- {source_labels: [pod], regex: (.+), target_label: exported_pod}\n- {regex: pod, action: labeldrop}"
    first, second = play(OpenSeries(writer(rules)), sample(1, device(pod="a")), sample(2, device(pod="b")))
    of_a = {name for name in values_by_labels(first.groups) if dict(name).get("exported_pod") == "a"}
    assert of_a
    assert ends(values_by_labels(second.groups)) == of_a
    assert not [name for name in values_by_labels(second.groups) if "pod" in dict(name)]


def test_a_series_goes_on_when_a_label_that_only_it_has_becomes_one_of_the_whole_device() -> None:
    rules = f"- {{source_labels: [__name__], regex: {UTIL}, target_label: kind, replacement: busy}}"
    alone = device(metrics={"gpu_utilization_ratio": 1.0}, attribution="none")
    _, second = play(OpenSeries(writer(rules)), sample(1), sample(2, alone))
    values = values_by_labels(second.groups)
    assert [dict(name)["__name__"] for name in values.keys() - ends(values)] == [UTIL]
    assert len(ends(values)) == second.markers == len(SERIES) - 1


def test_a_series_that_a_rule_drops_costs_nothing_and_has_no_end() -> None:
    rules = "- {source_labels: [__name__], regex: DCGM_FI_DEV_GPU_UTIL, action: keep}"
    first, second = play(OpenSeries(writer(rules)), sample(1, device(pod="a")), sample(2, device(pod="b")))
    assert [dict(name)["__name__"] for name in values_by_labels(first.groups)] == ["DCGM_FI_DEV_GPU_UTIL"]
    assert len(ends(values_by_labels(second.groups))) == second.markers == 1
    assert set(first.withheld) == {"rule"}
    (tick,) = play(OpenSeries(writer("- {source_labels: [pod], regex: none, action: keep}")), sample(1, device()))
    assert tick.groups == []


def test_a_series_of_two_nodes_is_the_first_ones_until_its_end_is_written() -> None:
    rules = f"{LESS}\n- {{regex: hostname|instance, action: labeldrop}}"
    state = OpenSeries(writer(rules))
    (first,) = play(state, sample(1, device(pod="a"), node="n1"))
    (other,) = play(state, sample(1, device(pod="a"), node="n2"))
    assert (len(values_by_labels(first.groups)), other.groups) == (other.withheld["collision"], [])
    ending = state.tick(sample(2, device(pod="b"), node="n1"))
    assert play(state, sample(2, device(pod="a"), node="n2"))[0].groups == [], "its end is not written yet"
    state.settle(ending, 0.0, accepted=True)
    assert play(state, sample(3, device(pod="a"), node="n2", ts_ms=1000))[0].groups == [], "its end is later than that"
    (other,) = play(state, sample(4, device(pod="a"), node="n2"))
    assert values_by_labels(other.groups).keys() == values_by_labels(first.groups).keys()
    assert other.withheld == {}


def test_a_series_of_a_node_that_went_silent_is_another_nodes() -> None:
    state = OpenSeries(writer(f"{LESS}\n- {{regex: hostname|instance, action: labeldrop}}"))
    (first,) = play(state, sample(1, device(), node="n1"))
    assert play(state, sample(1, device(), node="n2"))[0].groups == []
    (silence,) = [candidate for candidate in state.silences(100.0, 60.0) if candidate.groups]
    state.ended(silence)
    (other,) = play(state, sample(2, device(), node="n2"))
    assert values_by_labels(other.groups).keys() == values_by_labels(first.groups).keys()


UTIL, USED, POWER = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE"
MIB = 1 << 20


def shared(*pods: tuple[str, dict[str, Any] | None], **fields: Any) -> dict[str, Any]:
    """A device with 90 % utilization, 1000 MiB and 300 W that these pods share."""
    metrics = {
        "gpu_utilization_ratio": 0.9,
        "memory_used_bytes": 1000 * MIB,
        "power_watts": 300.0,
        "temperature_celsius": 60,
    }
    holders = [
        {"namespace": "ml", "pod": pod, "container": "main"} | ({"parts": parts} if parts else {})
        for pod, parts in pods
    ]
    return device(holders=holders, metrics=metrics, **fields)


def by_name(tick: NodeTick) -> dict[str, dict[str | None, float]]:
    values: dict[str, dict[str | None, float]] = defaultdict(dict)
    for name, value in values_by_labels(tick.groups).items():
        labels = dict(name)
        values[labels["__name__"]][labels.get("pod")] = value
    return values


def parts(utilization: float, memory_mib: int, power: float) -> dict[str, Any]:
    return {"utilization_ratio": utilization, "memory_used_bytes": memory_mib * MIB, "power_watts": power}


def test_a_shared_device_is_written_for_each_pod_and_its_rest_and_they_come_to_the_device() -> None:
    unattributed = {"utilization_ratio": 0.25, "memory_used_bytes": 100 * MIB, "power_watts": 75.0}
    shared_device = shared(("a", parts(0.5, 600, 150.0)), ("b", parts(0.15, 300, 75.0)), unattributed=unattributed)
    first, second = play(OpenSeries(writer(by_pod=True)), sample(1, shared_device), sample(2, shared_device))
    values = by_name(first)
    assert values[UTIL] == {"a": 50, "b": pytest.approx(15), None: 25}
    assert values[USED] == {"a": 600, "b": 300, None: 100}
    assert values[POWER] == {"a": 150, "b": 75, None: 75}
    assert values["DCGM_FI_DEV_GPU_TEMP"] == {None: 60}
    used = [labels for labels in map(dict, values_by_labels(first.groups)) if labels["__name__"] == USED]
    containers = {(labels.get("pod"), labels.get("container")) for labels in used}
    assert containers == {(None, None), ("a", "main"), ("b", "main")}
    assert all(earlier is later for earlier, later in zip(first.open, second.open, strict=True))
    assert sum(group.series.primaries for group in first.groups) == 4, "parts are no further values of metrics"


def test_a_quantity_without_known_parts_stays_the_devices() -> None:
    shared_device = shared(("a", {"utilization_ratio": 0.5}), ("b", None))
    (tick,) = play(OpenSeries(writer(by_pod=True)), sample(1, shared_device))
    values = by_name(tick)
    assert values[UTIL] == {"a": 50, None: pytest.approx(40)}
    assert (values[USED], values[POWER]) == ({None: 1000}, {None: 300})


def test_no_rest_is_less_than_nothing() -> None:
    shared_device = shared(("a", {"utilization_ratio": 0.5}), ("b", {"utilization_ratio": 0.5}))
    (tick,) = play(OpenSeries(writer(by_pod=True)), sample(1, shared_device))
    assert by_name(tick)[UTIL] == {"a": 50, "b": 50, None: 0}


def test_a_shared_device_that_a_tick_lacks_is_written_by_pod_again_when_it_is_back() -> None:
    shared_device = shared(("a", parts(0.5, 600, 150.0)), ("b", parts(0.15, 300, 75.0)))
    ticks = sample(1, shared_device), sample(2, device("GPU-b")), sample(3, shared_device)
    first, _, third = play(OpenSeries(writer(by_pod=True)), *ticks)
    assert values_by_labels(third.groups[: len(first.groups)]) == values_by_labels(first.groups)


def test_a_share_of_the_memory_is_the_devices() -> None:
    shared_device = shared(("a", parts(0.5, 600, 150.0)), ("b", parts(0.15, 300, 75.0)))
    shared_device["metrics"]["memory_total_bytes"] = 4000 * MIB
    (tick,) = play(OpenSeries(writer(names="otel", by_pod=True)), sample(1, shared_device))
    (percent,) = [
        v for name, v in values_by_labels(tick.groups).items() if dict(name)["__name__"] == "gpu_memory_used_percent"
    ]
    assert percent == 25


def test_a_device_of_one_pod_is_not_divided() -> None:
    shared_device = shared(("a", parts(0.5, 600, 150.0)))
    (tick,), (as_it_was,) = (
        play(OpenSeries(writer(by_pod=by_pod)), sample(1, shared_device)) for by_pod in (True, False)
    )
    assert values_by_labels(tick.groups) == values_by_labels(as_it_was.groups)


def test_a_mig_device_works_as_much_as_its_engines_do() -> None:
    mig = {"uuid": "MIG-1", "parent_uuid": "GPU-a", "gpu_instance": 2, "compute_instance": 0, "profile": "3g.40gb"}
    mig_device = device(
        "MIG-1", pod="a", mig=mig, metrics={"graphics_engine_active_ratio": 0.7, "memory_used_bytes": MIB}
    )
    (tick,) = play(OpenSeries(writer(by_pod=True)), sample(1, mig_device))
    assert by_name(tick)[UTIL] == {"a": pytest.approx(70)}
    (tick,) = play(OpenSeries(writer()), sample(1, mig_device))
    assert UTIL not in by_name(tick)


def test_by_the_labels_that_the_page_names_the_parts_of_each_mig_device_add_up_to_it_and_not_to_their_gpu() -> None:
    page = (ROOT / "docs" / "how-to" / "labels.md").read_text()
    (names,) = re.findall(r"`sum by \(([^)]+)\) \(DCGM_FI_DEV_GPU_UTIL\)` is the device", page)
    migs = [
        device(
            f"MIG-{instance}",
            pod=f"of-{instance}",
            mig={"uuid": f"MIG-{instance}", "parent_uuid": "GPU-a", "gpu_instance": instance, "profile": "3g.40gb"},
            metrics={"graphics_engine_active_ratio": 0.7},
        )
        for instance in (1, 2)
    ]
    (tick,) = play(
        OpenSeries(writer(by_pod=True)), sample(1, *migs, shared(("a", parts(0.5, 600, 150.0)), ("b", None)))
    )

    sums: dict[tuple[str | None, ...], float] = defaultdict(float)
    for labels, value in values_by_labels(tick.groups).items():
        if dict(labels)["__name__"] == UTIL:
            sums[tuple(dict(labels).get(name) for name in names.split(", "))] += value

    assert sorted(sums.values()) == [pytest.approx(70), pytest.approx(70), pytest.approx(90)]
