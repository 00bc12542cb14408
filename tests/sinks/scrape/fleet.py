"""Devices to expose, in any names and labels."""

import re
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sinks.scrape.exposition import exposition
from sinks.series.model import SampleGroup
from sinks.series.tick import SeriesTick, decode
from topics.catalogue import CATALOGUE

EVERY_KEY = {key: float(number) for number, key in enumerate(CATALOGUE, 1)}
"""A value for each key of the catalogue."""

BERT = {
    "namespace": "ml-team",
    "pod": "bert-0",
    "container": "pytorch",
    "job": "bert",
    "workload": {"kind": "Job", "name": "bert"},
    "labels": {"app.kubernetes.io/name": "bert", "team": "ml"},
    "namespace_labels": {"cost-center": "42"},
}


def node(*devices: Mapping[str, object], name: str = "gpu-node-1", attribution: str = "none") -> SeriesTick:
    """A node's tick with these devices. With attribution ``none`` it is not known how many pods hold them."""
    header = {"schema": 1, "cluster": "prod", "node": name, "run_id": 1, "seq": 1, "ts_ms": 1_795_219_152_000}
    content = {**header, "offset": 0, "attribution": attribution, "devices": devices}
    return decode(msgspec.json.encode(content))


SPLIT = {"utilization_ratio": 0.25, "memory_used_bytes": 1 << 30, "power_watts": 100.5}
INFO = {
    "serial": "1652822012345",
    "driver_version": "570.124.06",
    "cuda_version": "12.8",
    "vbios_version": "96.00.99.00.01",
    "mig_mode": "disabled",
    "processes_visible": "yes",
}
SHARED = {
    "holders": [{**BERT, "parts": SPLIT}, {"namespace": "x", "pod": "y", "parts": SPLIT, "observed": True}],
    "unattributed": SPLIT,
    "conflict": "unallocated_process",
    "info": INFO,
    "xids": {"79": 1},
    "events": [{"kind": "xid", "code": 79, "holders": [{"namespace": "ml", "pod": "p"}]}],
}
"""Of a device that two pods hold: all that a device may have beside its metrics."""

BESIDE = 2 * 3 + 3 + 5
"""How many series that is: the pods' parts and the rest, whether it was scaled, the conflict, the errors and a pod's,
the info."""


def full_node() -> SeriesTick:
    """A node with every key: a GPU that one pod holds, one that two share, one that none does, and a MIG device."""
    common = {"model": "NVIDIA H100 80GB HBM3", "pci_bus_id": "00000000:0A:00.0", "metrics": EVERY_KEY}
    mig = {"uuid": "MIG-c", "parent_uuid": "GPU-d", "gpu_instance": 7, "compute_instance": 0, "profile": "1g.10gb"}
    return node(
        {**common, "uuid": "GPU-a", "index": 0, "minor": 0, "holders": [BERT]},
        {**common, "uuid": "GPU-b", "index": 1, "minor": 1, **SHARED},
        {**common, "uuid": "GPU-d", "index": 2, "minor": 2},
        {**common, "uuid": "MIG-c", "index": 2, "minor": 2, "mig": mig, "holders": [BERT]},
    )


def exposed(groups: Iterable[SampleGroup]) -> str:
    """The text that a scraper gets."""
    return b"".join(exposition(groups)).decode()


def types(text: str) -> dict[str, str]:
    """The type of each family of an exposition."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def parsed(text: str) -> list[Metric]:
    """The families of an exposition, as the client library's own parser reads them, with the names that are there.

    The parser makes every counter end in ``_total``.
    """
    described = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    names = iter(re.findall(r"^([a-zA-Z_]\w*)[{ ]", text, re.MULTILINE))
    families = list(text_string_to_metric_families(text))
    for family in families:
        family.samples = [sample._replace(name=next(names)) for sample in family.samples]
        if family.type == "counter" and family.name not in described:
            family.name += "_total"
    return families


def samples(text: str) -> list[Sample]:
    """Its samples."""
    return [sample for family in parsed(text) for sample in family.samples]
