"""What labels a device's series carry: the label sets, and the one holder that they may name.

In: a device of gpu.attributed, its node. Out: (name, value) pairs sorted by name, each name once, no value empty.
A device that several pods hold carries no holder labels, so that a sum over pods never counts it twice; two containers
of one pod count as one holder without a container.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from topics.attributed import AttributedDevice, Holder, Workload
from topics.metric import Profile

LabelSet = Literal["otel", "dcgm", "dcgm-legacy", "pod-devices"]
LABEL_SETS: tuple[LabelSet, ...] = get_args(LabelSet)

Labels = tuple[tuple[str, str], ...]

MAX_VALUE_BYTES = 1024
"""Longer values are cut, at a character: receivers commonly refuse a series for a value beyond 2 KiB."""

SERVICE_NAME = "gpustream"
SCRAPE_PORT = 9400
"""The port in ``instance``, which dashboards made for a scraped exporter filter by."""


class Held(NamedTuple):
    """The one pod that holds a device, its container where it is one, and what owns the pod."""

    namespace: str
    pod: str
    container: str | None
    job: str | None
    statefulset: str | None
    deployment: str | None
    workload: Workload | None


class Seen(NamedTuple):
    """All of a device that its labels are made of: equal ones have equal labels."""

    cluster: str
    node: str
    uuid: str
    parent: str | None
    number: int | None
    minor: int | None
    vendor: str
    model: str | None
    pci_bus_id: str | None
    profile: str | None
    gpu_instance: int | None
    held: Held | None


def default_labels(names: Profile) -> LabelSet:
    """The label set that goes with a naming profile when none is asked for."""
    return names


def sole_holder(holders: Sequence[Holder]) -> Held | None:
    """The pod that alone holds the device, or None where no pod or more than one does."""
    if not holders:
        return None
    first = holders[0]
    container = first.container
    for other in holders[1:]:
        if not _same_pod(first, other):
            return None
        if other.container != container:
            container = None
    return Held(first.namespace, first.pod, container, first.job, first.statefulset, first.deployment, first.workload)


def _same_pod(one: Holder, other: Holder) -> bool:
    if (one.namespace, one.pod) != (other.namespace, other.pod):
        return False
    return one.pod_uid is None or other.pod_uid is None or one.pod_uid == other.pod_uid


def seen(cluster: str, node: str, device: AttributedDevice) -> Seen:
    """What of a device its labels are made of."""
    mig = device.mig
    parent, profile, instance = (mig.parent_uuid, mig.profile, mig.gpu_instance) if mig else (None, None, None)
    return Seen(
        cluster,
        node,
        device.uuid,
        parent,
        device.index,
        device.minor,
        device.vendor,
        device.model,
        device.pci_bus_id,
        profile,
        instance,
        sole_holder(device.holders) if device.holders else None,
    )


def labels(label_set: LabelSet, device: Seen) -> Labels:
    """The labels of a device's series, sorted by name; what is not known or empty is left out."""
    pairs = ((name, sanitised(str(value))) for name, value in _PAIRS[label_set](device) if value is not None)
    return tuple(sorted((name, value) for name, value in pairs if value))


def sanitised(value: str) -> str:
    """A value that any receiver takes: valid UTF-8 (lone surrogates become ``?``), at most 1024 bytes of it.

    Control characters and newlines stay: a label value may hold them.
    """
    if value.isascii() and len(value) <= MAX_VALUE_BYTES:
        return value
    return value.encode("utf-8", "replace")[:MAX_VALUE_BYTES].decode("utf-8", "ignore")


Pairs = Iterable[tuple[str, str | int | None]]


def _otel(device: Seen) -> Pairs:
    yield "k8s_cluster_name", device.cluster
    yield "k8s_node_name", device.node
    yield "host_name", device.node
    yield "service_name", SERVICE_NAME
    yield "gpu_vendor", device.vendor
    yield "gpu_index", device.number
    yield "gpu_uuid", device.parent or device.uuid
    yield "gpu_model", device.model
    if device.parent is not None:
        yield "gpu_mig_uuid", device.uuid
        yield "gpu_mig_profile", device.profile
    if device.held is not None:
        yield from _otel_holder(device.held)


def _otel_holder(held: Held) -> Pairs:
    yield "k8s_namespace_name", held.namespace
    yield "k8s_pod_name", held.pod
    yield "k8s_container_name", held.container
    owners = (("job", held.job), ("statefulset", held.statefulset), ("deployment", held.deployment))
    yield from [(f"k8s_{kind}_name", name) for kind, name in owners if name][:1]
    if held.workload is not None:
        yield "k8s_workload_kind", held.workload.kind
        yield "k8s_workload_name", held.workload.name


def _dcgm(device: Seen) -> Pairs:
    yield "gpu", device.number
    yield "UUID", device.parent or device.uuid
    yield "pci_bus_id", device.pci_bus_id
    yield "device", None if device.minor is None else f"nvidia{device.minor}"
    yield "modelName", device.model
    yield "GPU_I_PROFILE", device.profile
    yield "GPU_I_ID", device.gpu_instance
    yield "hostname", device.node
    yield "instance", f"{device.node}:{SCRAPE_PORT}"
    yield "cluster", device.cluster
    if device.held is not None:
        yield "namespace", device.held.namespace
        yield "pod", device.held.pod
        yield "container", device.held.container


def _pod_devices(device: Seen) -> Pairs:
    yield "gpu", device.number
    yield "uuid", device.uuid
    if device.held is not None:
        yield "pod_namespace", device.held.namespace
        yield "pod_name", device.held.pod
        yield "container_name", device.held.container


def _dcgm_legacy(device: Seen) -> Pairs:
    yield from _pod_devices(device)
    yield "node", device.node
    yield "cluster", device.cluster


_PAIRS: dict[LabelSet, Callable[[Seen], Pairs]] = {
    "otel": _otel,
    "dcgm": _dcgm,
    "dcgm-legacy": _dcgm_legacy,
    "pod-devices": _pod_devices,
}
