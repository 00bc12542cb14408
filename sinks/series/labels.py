"""The labels of a series: those of a profile, of the one pod that holds the device, and of its tenant. Pure.

In: a device of gpu.attributed and its node. Out: (name, value) pairs sorted by name, each name once, no value empty.
A device that several pods hold carries no holder labels, so that a sum over pods never counts it twice. Two containers
of one pod count as one holder without a container. The tenant's labels, those of the pod and its namespace, come last:
as many as the series has room for. ``gpu_pod_info`` has the others. No tenant can break a series with them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from sinks.series.tick import SeriesDevice, SeriesTick
from topics.attributed import Holder, HoldingPod, Workload
from topics.metric import Labels
from topics.profiles import INFO, LABELS, Attribute, LabelNames
from topics.samples import Job
from topics.usage import Usage

META = "__meta_gpustream_"
"""The prefix of labels that only relabelling rules see."""

MAX_LABELS = 30
"""The most labels of a series, its name included, that receivers commonly allow."""

ROW_LABELS = 3
"""The most labels of a series beside its device's: its name, and two that distinguish it from others of that name."""

SERVICE_NAME = "gpustream"
SCRAPE_PORT = 9400
"""The port in ``instance``, which dashboards made for a scraped exporter filter by."""

MAX_VALUE_BYTES = 1024
"""Longer values are cut, at a character: receivers commonly refuse a series for a value beyond 2 KiB."""

MAX_NAME = 200
"""Longer names of labels are cut: receivers commonly refuse names beyond 1024."""

DEVICE_LABELS = 24
"""The most labels of a device's series without its tenant's: a MIG device that runs a job, held by an owned pod."""

_LOCATION_LABELS = ("topology.kubernetes.io/zone", "topology.kubernetes.io/region", "node.kubernetes.io/instance-type")
"""The node labels for its zone, its region and its kind of host, in the order of :class:`NodeIdentity`."""

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class NodeIdentity(NamedTuple):
    """A node and its location: what labels say of it. The same for all devices of a tick."""

    cluster: str
    name: str
    zone: str | None = None
    region: str | None = None
    host_type: str | None = None


class HolderIdentity(NamedTuple):
    """The one pod that holds a device: what labels say of it. ``container`` is None if several of its containers do.

    ``tenant_labels``: see :func:`tenant_labels`.
    """

    namespace: str
    pod: str
    pod_uid: str | None
    container: str | None
    job: str | None
    statefulset: str | None
    deployment: str | None
    workload: Workload | None
    tenant_labels: tuple[tuple[str, str], ...] = ()


class DeviceIdentity(NamedTuple):
    """Everything that a device's labels are made of: equal identities have equal labels."""

    node: NodeIdentity
    uuid: str
    parent: str | None = None
    gpu_index: int | None = None
    minor: int | None = None
    vendor: str = ""
    model: str | None = None
    pci_bus_id: str | None = None
    profile: str | None = None
    gpu_instance: int | None = None
    holder: HolderIdentity | None = None
    job: Job | None = None
    info: tuple[str | None, ...] = ()
    """The values of the record's ``info``, in the order of ``INFO``; empty if no label shows them."""


def node_of(record: SeriesTick | Usage) -> NodeIdentity:
    """The node of a tick or of an hour of usage, with its location from its labels."""
    return NodeIdentity(record.cluster, record.node, *(record.node_labels.get(name) for name in _LOCATION_LABELS))


def holder_identity(holder: Holder, container: str | None = None) -> HolderIdentity:
    """What labels say of a holder."""
    owners = (holder.job, holder.statefulset, holder.deployment, holder.workload)
    tenant = tuple(tenant_labels(holder.labels, holder.namespace_labels))
    return HolderIdentity(holder.namespace, holder.pod, holder.pod_uid, container, *owners, tenant)


def sole_holder(pods: Mapping[HoldingPod, list[Holder]]) -> HolderIdentity | None:
    """The pod that holds a device alone, or None if no pod or more than one holds it."""
    if len(pods) != 1:
        return None
    ((first, *others),) = pods.values()
    several = any(other.container != first.container for other in others)
    return holder_identity(first, None if several else first.container)


def device_identity(
    node: NodeIdentity,
    device: SeriesDevice,
    holder: HolderIdentity | None = None,
    info: tuple[str | None, ...] = (),
) -> DeviceIdentity:
    """The identity of a device that this pod holds."""
    mig = device.mig
    parent, profile, instance = (mig.parent_uuid, mig.profile, mig.gpu_instance) if mig else (None, None, None)
    hardware = (device.index, device.minor, device.vendor, device.model, device.pci_bus_id)
    return DeviceIdentity(node, device.uuid, parent, *hardware, profile, instance, holder, info=info)


def device_pairs(names: LabelNames, device: DeviceIdentity) -> list[tuple[str, str]]:
    """The labels of a device's series that do not depend on who holds it."""
    attributes = _device_attributes(device)
    return nonempty([(name, attributes.get(attribute)) for name, attribute in names.device])


def labels(
    names: LabelNames,
    device: DeviceIdentity,
    max_labels: int = MAX_LABELS,
    own_pairs: Sequence[tuple[str, str]] | None = None,
) -> Labels:
    """The labels of a device's series, sorted by name, without those whose value is unknown or empty.

    A tenant's labels are cut so that a series, with its name and its row's labels, has at most ``max_labels``.
    ``own_pairs``: the device's :func:`device_pairs`, if they have been computed before.
    """
    pairs = [*(device_pairs(names, device) if own_pairs is None else own_pairs)]
    if device.holder is not None:
        attributes = _holder_attributes(device.holder)
        pairs += nonempty([(name, attributes[attribute]) for name, attribute in names.holder])
        if names.tenants:
            pairs += device.holder.tenant_labels[: max(0, max_labels - ROW_LABELS - len(pairs))]
    return tuple(sorted(pairs))


def meta_labels(subject: DeviceIdentity | NodeIdentity, holder: HolderIdentity | None) -> dict[str, str]:
    """All that is known of a device, or of a node, and of its holder, as labels that only relabelling rules see."""
    attributes = _device_attributes(subject) if isinstance(subject, DeviceIdentity) else _node_attributes(subject)
    tenant: list[tuple[str, str]] = []
    if holder is not None:
        attributes |= _holder_attributes(holder)
        tenant = [(name.removeprefix("k8s_"), value) for name, value in holder.tenant_labels]
    return {META + name: value for name, value in nonempty([*attributes.items(), *tenant])}


def pod_info_labels(node: NodeIdentity, pod: HolderIdentity, max_labels: int = MAX_LABELS) -> Labels:
    """The labels of a pod's ``gpu_pod_info``, sorted by name, at most ``max_labels`` with its name.

    The tenant's labels that a device's series may have no room for take precedence over the others.
    """
    attributes = _holder_attributes(pod)
    of_pod = [(name, attributes[attribute]) for name, attribute in LABELS["otel"].holder if attribute != "container"]
    pairs = nonempty([("k8s_cluster_name", node.cluster), ("k8s_node_name", node.name), *of_pod])
    on_devices = max(0, max_labels - ROW_LABELS - DEVICE_LABELS)
    tenant = (*pod.tenant_labels[on_devices:], *pod.tenant_labels[:on_devices])
    return tuple(sorted([*pairs, *tenant[: max(0, max_labels - 1 - len(pairs))]]))


def labels_without_room(pod: HolderIdentity, info: Labels, max_labels: int) -> int:
    """How many labels of a pod's tenant have room neither on its ``gpu_pod_info`` nor on its devices' series."""
    if len(info) + 1 < max_labels:
        return 0
    on_info = sum(name.startswith(("k8s_pod_label_", "k8s_namespace_label_")) for name, _ in info)
    on_devices = max(0, max_labels - ROW_LABELS - DEVICE_LABELS)
    return max(0, len(pod.tenant_labels) - on_devices - on_info)


def nonempty(pairs: Iterable[tuple[str, str | int | None]]) -> list[tuple[str, str]]:
    """The pairs that have a value, with values that any receiver accepts."""
    return [(name, text) for name, value in pairs if value is not None and (text := sanitised(str(value)))]


def sanitised(value: str) -> str:
    """A value that any receiver accepts: valid UTF-8 (lone surrogates become ``?``), at most 1024 bytes of it.

    Control characters and newlines stay: a label value may have them.
    """
    if value.isascii() and len(value) <= MAX_VALUE_BYTES:
        return value
    return value.encode("utf-8", "replace")[:MAX_VALUE_BYTES].decode("utf-8", "ignore")


@lru_cache(maxsize=4096)
def sanitised_name(text: str) -> str:
    """A label name that any receiver accepts, from a text that begins like one."""
    return _NOT_IN_A_NAME.sub("_", text)[:MAX_NAME]


def tenant_labels(pod: Mapping[str, str], namespace: Mapping[str, str]) -> list[tuple[str, str]]:
    """The labels of a pod, then those of its namespace, each in the order of their keys, without empty values.

    Keys that become the same name are numbered, as in kube-state-metrics: ``_conflict1``, ``_conflict2``, ...
    """
    pairs: list[tuple[str, str]] = []
    for prefix, labels in (("k8s_pod_label_", pod), ("k8s_namespace_label_", namespace)):
        if not labels:
            continue
        names: dict[str, list[str]] = {}
        for key in sorted(labels):
            if labels[key]:
                names.setdefault(sanitised_name(prefix + key), []).append(sanitised(labels[key]))
        pairs += [(name, values[0]) for name, values in names.items() if len(values) == 1]
        clashes = [(name, values) for name, values in names.items() if len(values) > 1]
        numbered = [(f"{name}_conflict{n}", value) for name, values in clashes for n, value in enumerate(values, 1)]
        pairs += [(name, value) for name, value in numbered if len(names.get(name, ())) != 1]
    return pairs


def _node_attributes(node: NodeIdentity) -> dict[Attribute, str | int | None]:
    """What labels may say of a node."""
    return {
        "cluster": node.cluster,
        "node": node.name,
        "instance": f"{node.name}:{SCRAPE_PORT}",
        "zone": node.zone,
        "region": node.region,
        "host_type": node.host_type,
        "service": SERVICE_NAME,
    }


def _device_attributes(device: DeviceIdentity) -> dict[Attribute, str | int | None]:
    """What labels may say of a device."""
    is_mig, job = device.parent is not None, device.job
    attributes = _node_attributes(device.node) | {
        "vendor": device.vendor,
        "index": device.gpu_index,
        "gpu_uuid": device.parent or device.uuid,
        "uuid": device.uuid,
        "mig_uuid": device.uuid if is_mig else None,
        "mig_profile": device.profile if is_mig else None,
        "gpu_instance": device.gpu_instance,
        "model": device.model,
        "pci_bus_id": device.pci_bus_id,
        "device": None if device.minor is None else f"nvidia{device.minor}",
    }
    if job is not None:
        attributes |= {
            "job_id": job.id,
            "job_user": job.user,
            "job_partition": job.partition,
            "job_account": job.account,
        }
    return attributes | dict(zip(INFO, device.info, strict=False))


def _holder_attributes(pod: HolderIdentity) -> dict[Attribute, str | int | None]:
    """What labels may say of the pod that holds a device, and of what owns it."""
    owned, workload = pod.job or pod.statefulset, pod.workload
    return {
        "namespace": pod.namespace,
        "pod": pod.pod,
        "pod_uid": pod.pod_uid,
        "container": pod.container,
        "job": pod.job,
        "statefulset": None if pod.job else pod.statefulset,
        "deployment": None if owned else pod.deployment,
        "workload_kind": workload.kind if workload else None,
        "workload_name": workload.name if workload else None,
    }
