"""The exposition in each format, read back by the official parser."""

import re
from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sinks.scrape.exposition import GivenUp, exposition
from sinks.series.labels import NodeIdentity, device_identity, labels, sole_holder
from sinks.series.model import Row, SampleGroup, SeriesSet
from sinks.series.tick import SeriesDevice
from tests.sinks.scrape.fleet import BESIDE, exposed, full_node, node, samples, types
from tests.sinks.scrape.handler import groups_of
from topics.attributed import Holder, pods_of
from topics.catalogue import LAST_XID
from topics.profiles import LABELS, PROFILES, LabelSet, ProfileName

GPU: dict[str, Any] = {"uuid": "GPU-a", "metrics": {"gpu_utilization_ratio": 0.5}}
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")

every_naming = pytest.mark.parametrize(("names", "label_set"), list(product(PROFILES, LABELS)))


def used(text: str) -> list[Sample]:
    """The samples of ``gpu_utilization``."""
    return [sample for sample in samples(text) if sample.name == "gpu_utilization"]


def test_devices_become_families_in_the_order_of_their_names_without_timestamps() -> None:
    metrics = {"temperature_celsius": 33, "fan_speed_ratio": 0.5}
    tick = node({"uuid": "GPU-b", "metrics": metrics}, {"uuid": "GPU-a", "metrics": {"temperature_celsius": 0}})

    assert exposed(groups_of(tick, "dcgm", label_set="pod-devices")) == (
        "# HELP DCGM_FI_DEV_FAN_SPEED Speed that the fan is set to, of its maximum; may exceed 1. Unit: percent.\n"
        "# TYPE DCGM_FI_DEV_FAN_SPEED gauge\n"
        'DCGM_FI_DEV_FAN_SPEED{uuid="GPU-b"} 50.0\n'
        "# HELP DCGM_FI_DEV_GPU_TEMP Temperature of the GPU. Unit: celsius.\n"
        "# TYPE DCGM_FI_DEV_GPU_TEMP gauge\n"
        'DCGM_FI_DEV_GPU_TEMP{uuid="GPU-b"} 33.0\n'
        'DCGM_FI_DEV_GPU_TEMP{uuid="GPU-a"} 0.0\n'
    )


BESIDE_METRICS = {
    "gpu_info": "gauge",
    "gpu_attribution_conflict": "gauge",
    "gpu_pod_memory_used_bytes": "gauge",
    "gpu_pod_power_watts": "gauge",
    "gpu_pod_utilization_ratio": "gauge",
    "gpu_pod_xid_errors": "gauge",
    "gpu_split_scaled": "gauge",
    "gpu_unattributed_memory_used_bytes": "gauge",
    "gpu_unattributed_power_watts": "gauge",
    "gpu_unattributed_utilization_ratio": "gauge",
    "gpu_xid_errors": "counter",
    "gpu_xid_errors_total": "counter",
}


@pytest.mark.parametrize("names", PROFILES)
def test_a_counter_is_one_whatever_a_profile_calls_it(names: ProfileName) -> None:
    counters = {
        key: series[0].name for key, series in PROFILES[names].series.items() if series and series[0].kind == "counter"
    }
    metrics = dict.fromkeys(counters, 12)
    text = exposed(groups_of(node({"uuid": "GPU-a", "metrics": metrics}), names, label_set="pod-devices"))

    assert counters
    assert [name for name in counters.values() if f"# TYPE {name} counter\n" not in text] == []
    assert set(counters.values()) <= {sample.name for sample in samples(text)}


@every_naming
def test_every_series_is_there_once_with_each_label_once_and_none_empty(
    names: ProfileName, label_set: LabelSet
) -> None:
    tick = full_node()
    text = exposed(groups_of(tick, names, label_set=label_set))
    exposed_samples = samples(text)
    profile = PROFILES[names]
    last_xid = profile.series.get(LAST_XID.name, ())
    rows = sum(map(len, profile.series.values())) - len(last_xid) + len(profile.ratios)
    xids = 1 + len(last_xid)
    pods = 2 if label_set == "otel" else 0

    assert len(exposed_samples) == rows * len(tick.devices) + xids + BESIDE + pods
    assert len(
        {(exposed_sample.name, *sorted(exposed_sample.labels.items())) for exposed_sample in exposed_samples}
    ) == len(exposed_samples)
    assert all(exposed_sample.labels and all(exposed_sample.labels.values()) for exposed_sample in exposed_samples)
    assert all(exposed_sample.timestamp is None for exposed_sample in exposed_samples)
    pairs = [re.findall(r'([^{,"]+)="[^"]*"', line) for line in text.splitlines() if not line.startswith("#")]
    assert all(len(set(line)) == len(line) > 1 for line in pairs)


@every_naming
def test_every_name_is_valid_and_every_family_is_reported_once(names: ProfileName, label_set: LabelSet) -> None:
    text = exposed(groups_of(full_node(), names, label_set=label_set))
    about = Counter(tuple(line.split(" ", 3)[1:3]) for line in text.splitlines() if line.startswith("# "))

    assert set(about.values()) == {1}
    assert all(NAME.match(name) for sample in samples(text) for name in (sample.name, *sample.labels))


def test_a_device_that_several_pods_hold_carries_no_holder_labels() -> None:
    holders = [
        sample
        for sample in samples(exposed(groups_of(full_node(), "dcgm")))
        if "GPU_I_ID" not in sample.labels and not sample.name.startswith("gpu_pod_")
    ]

    assert {(exposed_sample.labels["UUID"], exposed_sample.labels.get("pod")) for exposed_sample in holders} == {
        ("GPU-a", "bert-0"),
        ("GPU-b", None),
        ("GPU-d", None),
    }


@every_naming
def test_what_is_beside_the_metrics_has_the_same_names_and_types_everywhere(
    names: ProfileName, label_set: LabelSet
) -> None:
    text = exposed(groups_of(full_node(), names, label_set=label_set))
    kinds = {name: kind for name, kind in types(text).items() if name in BESIDE_METRICS}

    assert kinds == BESIDE_METRICS


def test_of_two_devices_with_the_same_labels_the_first_is_shown() -> None:
    mig = {"parent_uuid": "GPU-a", "gpu_instance": 1, "profile": "1g.10gb"}
    first, second = [
        {
            "uuid": f"MIG-{n}",
            "mig": {**mig, "uuid": f"MIG-{n}", "compute_instance": n},
            "metrics": {"fan_speed_ratio": n},
        }
        for n in range(2)
    ]
    devices = groups_of(node(first, {**second, "metrics": {**GPU["metrics"], "fan_speed_ratio": 1}}), label_set="dcgm")

    assert len(devices) == 1
    assert [sample.value for sample in samples(exposed(devices)) if sample.name == "gpu_fan_speed"] == [0.0]


def test_names_that_rules_have_made_are_shown_as_the_scraper_takes_them() -> None:
    rows = (Row('k8s.gpu"util', (("9", "x"),), help="busy"), Row("up"))
    group = SampleGroup(SeriesSet((("k8s.pod", "a"),), rows), 0, [1, 2])
    assert b"".join(exposition([group], utf8=True)).decode() == (
        '# HELP "k8s.gpu\\"util" busy\n# TYPE "k8s.gpu\\"util" gauge\n{"k8s.gpu\\"util","9"="x","k8s.pod"="a"} 1.0\n'
        '# HELP up \n# TYPE up gauge\nup{"k8s.pod"="a"} 2.0\n'
    )
    assert b"".join(exposition([group])).decode() == (
        '# HELP k8s_gpu_util busy\n# TYPE k8s_gpu_util gauge\nk8s_gpu_util{_9="x",k8s_pod="a"} 1.0\n'
        '# HELP up \n# TYPE up gauge\nup{k8s_pod="a"} 2.0\n'
    )
    colons = [SampleGroup(SeriesSet((("team:name", "a"),), (Row("gpu:util"),)), 0, [1])]
    assert b"".join(exposition(colons, utf8=True)).splitlines()[-1] == b'gpu:util{"team:name"="a"} 1.0'
    assert b"".join(exposition(colons)).splitlines()[-1] == b'gpu:util{team_name="a"} 1.0'
    (family, _) = text_string_to_metric_families(b"".join(exposition([group], utf8=True)).decode())
    assert [(sample.name, sample.labels) for sample in family.samples] == [('k8s.gpu"util', {"9": "x", "k8s.pod": "a"})]


def test_two_devices_of_which_rules_left_the_same_in_common_are_both_shown() -> None:
    sets = [SeriesSet((), (Row("util", (("UUID", uuid),)), Row("temp", (("UUID", uuid),)))) for uuid in "ab"]
    assert len(samples(exposed([SampleGroup(series_set, 0, [1, 2]) for series_set in sets]))) == 4


def test_nothing_is_a_valid_exposition() -> None:
    assert exposed([]) == ""


ODD = ['"', "\\", "\n", '\\"', "\\n", "\\\\n", "a\nb", "\r", "\r\n", "\t", "{}", '"} 1\nup 1', "# EOF", "ü", "😀", " "]


@pytest.mark.parametrize("odd", [*ODD, "\u2028", "\x85", "\x0b", "\x00", "\x7f"])
def test_what_a_tenant_calls_a_pod_is_read_back_as_it_was(odd: str) -> None:
    tick = node({**GPU, "model": odd, "holders": [{"namespace": odd, "pod": odd}]}, {**GPU, "uuid": "GPU-b"})
    first_sample, other = used(exposed(groups_of(tick, label_set="dcgm")))

    assert (first_sample.labels["modelName"], first_sample.labels["namespace"], first_sample.labels["pod"]) == (
        odd,
        odd,
        odd,
    )
    assert other.labels["UUID"] == "GPU-b"


@pytest.mark.parametrize("broken", ["\ud800", "a\udfffb", "b\udce4"])
def test_half_a_character_costs_only_itself(broken: str) -> None:
    pod = device_identity(
        NodeIdentity("c", "n"), SeriesDevice("GPU-a"), sole_holder(pods_of([Holder("n", f"p{broken}")]))
    )
    (device,) = groups_of(node(GPU))
    group = SampleGroup(SeriesSet(labels(LABELS["otel"], pod), device.series.rows), 0, device.values)
    (exposed_sample,) = used(exposed([group]))

    assert exposed_sample.labels["k8s_pod_name"].startswith("p")
    assert "?" in exposed_sample.labels["k8s_pod_name"]


@given(st.text(), st.text(min_size=1), st.floats(allow_nan=False, allow_infinity=False))
def test_any_label_and_any_value_are_read_back_as_they_were(model: str, pod: str, value: float) -> None:
    (device,) = groups_of(node(GPU))
    known_labels = (("gpu_model", model), ("k8s_pod_name", pod))
    (exposed_sample,) = used(exposed([SampleGroup(SeriesSet(known_labels, device.series.rows[:1]), 0, [value])]))

    assert exposed_sample.labels == {**dict(known_labels), "gpu_task_type": "compute"}
    assert exposed_sample.value == value


def test_a_rendering_that_nobody_waits_for_is_given_up() -> None:
    checks: list[bool] = []

    def given_up() -> bool:
        checks.append(True)
        return len(checks) > 2

    with pytest.raises(GivenUp):
        list(exposition(groups_of(full_node()), given_up))
    assert len(checks) == 3
