"""One node as the exporters that ours replaces expose it, and every way in which ours differs from them.

golden/README.md says where the texts are from. ``instance`` and ``cluster`` are not compared: a scraper adds them to
what an exporter says.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import Metric

from tests.sinks.records import ConsumedRecord
from tests.sinks.scrape.fleet import exposed, full_node, parsed
from tests.sinks.scrape.handler import Bench, groups_of
from topics.profiles import PROFILES, LabelSet, ProfileName

GOLDEN = Path(__file__).parent / "golden"
NODE = (GOLDEN / "node.json").read_bytes()
NOT_COMPARED = {"instance", "cluster"}

SHARED = "GPU-e92a5d74-6b1f-43c8-a057-c84be1d6039f"
MIG = "MIG-0b6d9a52-3c74-5e18-8f29-d7a1406be3c5"

Labels = dict[str, str]
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Difference(NamedTuple):
    """Labels that only the exporter has, on series to which it ``applies``."""

    reason: str
    labels: set[str]
    applies: Callable[[Labels], bool] = lambda _: True


class Extra(NamedTuple):
    """Series that only our sink has."""

    reason: str
    which: Callable[[str, Labels], bool]


class Exporter(NamedTuple):
    """An exporter's text, the options that replace it, and all differences. ``gauges``: what it calls counters."""

    text: str
    names: ProfileName
    label_set: LabelSet
    labels_of_theirs: tuple[Difference, ...]
    series_of_ours: tuple[Extra, ...]
    gauges: frozenset[str] = frozenset()


OUR_FAMILIES = (
    Extra("how many pods hold a device", lambda name, _: name == "gpu_holders"),
    Extra("what a device is, in one series", lambda name, _: name == "gpu_info"),
    Extra("how many XID errors it has had", lambda name, _: name == "gpu_xid_errors"),
)
DCGM = Exporter(
    "dcgm-exporter.txt",
    "dcgm",
    "dcgm",
    labels_of_theirs=(
        Difference(
            "a device that several pods hold carries no holder: theirs names the last one that it found",
            {"namespace", "pod", "container"},
            lambda labels: labels["UUID"] == SHARED,
        ),
    ),
    series_of_ours=(
        *OUR_FAMILIES,
        Extra(
            "what this file of counters does not collect, or only with more labels",
            lambda name, _: (
                name
                in {
                    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT",
                    "DCGM_FI_DEV_FB_TOTAL",
                    "DCGM_FI_DEV_FB_USED_PERCENT",
                    "DCGM_FI_DEV_PCIE_RX_THROUGHPUT",
                    "DCGM_FI_DEV_PCIE_TX_THROUGHPUT",
                    "DCGM_FI_DEV_POWER_MGMT_LIMIT",
                    "DCGM_FI_DEV_XID_ERRORS",
                }
            ),
        ),
    ),
)

POD_DEVICES = Exporter(
    "pod-devices-exporter.txt",
    "dcgm-legacy",
    "pod-devices",
    labels_of_theirs=(
        Difference(
            "a device that several pods hold carries no holder: theirs names the last one that it found",
            {"pod_namespace", "pod_name", "container_name"},
            lambda labels: labels["uuid"] == SHARED,
        ),
    ),
    series_of_ours=(
        *OUR_FAMILIES,
        Extra("the script reads no XID errors", lambda name, _: name == "dcgm_xid_errors"),
        Extra("the 1.x script lists no MIG devices", lambda _, labels: labels["uuid"] == MIG),
        Extra(
            "the 2.x exporter's 1.x names, which are in the profile too, have these; the script has not",
            lambda name, _: name in {"dcgm_fi_prof_pcie_tx_bytes", "dcgm_fi_prof_pcie_rx_bytes"},
        ),
    ),
    gauges=frozenset({"dcgm_pcie_tx_throughput", "dcgm_pcie_rx_throughput"}),  # the script's counters that are rates
)

every_exporter = pytest.mark.parametrize("exporter", [DCGM, POD_DEVICES], ids=lambda exporter: exporter.names)


async def our_families(exporter: Exporter) -> list[Metric]:
    """The sink's exposition of the node."""
    bench = Bench(names=(exporter.names,), label_set=exporter.label_set)
    await bench.deliver(ConsumedRecord(0, NODE))
    return parsed(bench.exposition())


def exporter_families(exporter: Exporter) -> list[Metric]:
    """The exporter's exposition of the node."""
    return parsed((GOLDEN / exporter.text).read_text())


def series(families: Iterable[Metric], differences: Iterable[Difference] = ()) -> Series:
    """Every series and its value, without the labels that are not compared; each must be there once."""
    result: Series = {}
    for sample in (sample for family in families for sample in family.samples):
        left_out = NOT_COMPARED.union(
            *(difference.labels for difference in differences if difference.applies(sample.labels))
        )
        key = (sample.name, frozenset(pair for pair in sample.labels.items() if pair[0] not in left_out))
        assert key not in result
        result[key] = sample.value
    return result


@every_exporter
async def test_every_series_of_the_exporter_is_there_with_its_labels_and_value(exporter: Exporter) -> None:
    our_series, expected = (
        series(await our_families(exporter)),
        series(exporter_families(exporter), exporter.labels_of_theirs),
    )
    extra = {
        key
        for key in our_series
        if any(extra_series.which(key[0], dict(key[1])) for extra_series in exporter.series_of_ours)
    }

    assert {key: value for key, value in our_series.items() if key not in extra} == expected
    assert len(expected) > 60


@every_exporter
async def test_every_difference_that_is_listed_is_one(exporter: Exporter) -> None:
    of_theirs = [sample.labels for family in exporter_families(exporter) for sample in family.samples]
    of_ours = [sample for family in await our_families(exporter) for sample in family.samples]

    for difference in exporter.labels_of_theirs:
        assert any(difference.labels <= labels.keys() for labels in of_theirs if difference.applies(labels))
        assert not any(
            difference.labels & our_sample.labels.keys()
            for our_sample in of_ours
            if difference.applies(our_sample.labels)
        )
    for extra in exporter.series_of_ours:
        assert any(extra.which(our_sample.name, our_sample.labels) for our_sample in of_ours)
        assert not any(
            extra.which(sample.name, sample.labels)
            for family in exporter_families(exporter)
            for sample in family.samples
        )


@every_exporter
async def test_types_are_the_exporters_but_for_those_listed(exporter: Exporter) -> None:
    our_types = {family.name: family.type for family in await our_families(exporter)}
    expected = {family.name: family.type for family in exporter_families(exporter)}
    differs = {
        name: (expected_type, our_types[name])
        for name, expected_type in expected.items()
        if our_types[name] != expected_type
    }

    assert differs == dict.fromkeys(exporter.gauges, ("counter", "gauge"))


def test_every_label_of_pod_devices_is_one_of_five() -> None:
    labels = {name for family in exporter_families(POD_DEVICES) for sample in family.samples for name in sample.labels}

    assert labels == {"container_name", "gpu", "pod_name", "pod_namespace", "uuid"}


def golden(profile: ProfileName) -> tuple[Path, str]:
    """The file of a profile, and what is shown in it of a node of whole, shared and MIG GPUs that has every key."""
    return GOLDEN / f"{profile}.txt", exposed(groups_of(full_node(), profile))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_says_of_a_node_what_its_file_says(profile: ProfileName) -> None:
    path, text = golden(profile)

    assert text == path.read_text(), "if that is meant: python -m tests.sinks.scrape.test_golden"


if __name__ == "__main__":  # writes the files, for whoever reads what has changed in them
    for path, text in map(golden, PROFILES):
        path.write_text(text)
