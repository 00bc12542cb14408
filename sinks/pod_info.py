"""``gpu_pod_info``: a series for each pod that holds a device, always 1, with what a device's series has no room for.

In: a tick of gpu.attributed. Out: the pods that hold devices in it, and the labels of each one's series.
"""

from typing import NamedTuple

from sinks.blocks import Row, Rows
from sinks.labels import MAX_LABELS, ROW_LABELS, Held, LabelSet, Place, held, known, otel_pod
from sinks.tenants import Labels, Pairs, tenant_labels
from topics.attributed import AttributedSample
from topics.catalogue import POD_INFO

ROWS: Rows = (Row(POD_INFO.name, (), "gauge", POD_INFO.help, primary=False),)

DEVICE_LABELS = 23
"""The most labels that a device's series has beside a tenant's: a MIG device, held by an owned pod, that runs a job."""


class HoldingPod(NamedTuple):
    """All of a pod that its series' labels are made of: equal ones have equal labels."""

    place: Place
    pod: Held


def holding_pods(label_set: LabelSet, where: Place, sample: AttributedSample) -> list[HoldingPod]:
    """The pods that hold a device of the tick, each once. Other label sets than otel's have no such series."""
    if label_set != "otel":
        return []
    holders = {(one.namespace, one.pod, one.pod_uid): one for device in sample.devices for one in device.holders}
    return [HoldingPod(where, held(holder)) for holder in holders.values()]


def labels(holding: HoldingPod, most: int = MAX_LABELS) -> Labels:
    """The labels of a pod's series, sorted by name, at most ``most`` with its name.

    Those of its tenant that no device's series may have room for come first.
    """
    pairs = known(_identity(holding))
    tenants = tenant_labels(holding.pod.labels, holding.pod.namespace_labels)
    everywhere = max(0, most - ROW_LABELS - DEVICE_LABELS)
    rest_first = [*tenants[everywhere:], *tenants[:everywhere]]
    return tuple(sorted([*pairs, *rest_first[: max(0, most - 1 - len(pairs))]]))


def _identity(holding: HoldingPod) -> Pairs:
    yield "k8s_cluster_name", holding.place.cluster
    yield "k8s_node_name", holding.place.node
    yield from otel_pod(holding.pod)
