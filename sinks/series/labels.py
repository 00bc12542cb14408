"""What labels a series carries: those of a profile, the one holder that they may name, and what tenants wrote. Pure.

In: a device of gpu.attributed, its node. Out: (name, value) pairs sorted by name, each name once, no value empty.
A device that several pods hold carries no holder labels, so that a sum over pods never counts it twice; two containers
of one pod count as one holder without a container. What tenants wrote on a pod and its namespace comes last: as much of
it as a series has room for, the rest is on ``gpu_pod_info``. No tenant can break a series with it.
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

Pairs = Iterable[tuple[str, str | int | None]]

META = "__meta_gpustream_"
"""So begin the labels that only rules of relabelling see."""

MAX_LABELS = 30
"""Of one series, its name included: what receivers commonly allow."""

ROW_LABELS = 3
"""What a series has beside its device's labels: its name, and at most two that tell it from others of that name."""

SERVICE_NAME = "gpustream"
SCRAPE_PORT = 9400
"""The port in ``instance``, which dashboards made for a scraped exporter filter by."""

MAX_VALUE_BYTES = 1024
"""Longer values are cut, at a character: receivers commonly refuse a series for a value beyond 2 KiB."""

MAX_NAME = 200
"""Longer names of labels are cut: receivers commonly refuse names beyond 1024."""

DEVICE_LABELS = 24
"""The most labels that a device's series has beside a tenant's: a MIG device, held by an owned pod, that runs a job."""

_OF_PLACE = ("topology.kubernetes.io/zone", "topology.kubernetes.io/region", "node.kubernetes.io/instance-type")
"""The labels of a node that say where it stands, and what kind of host it is."""

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class Place(NamedTuple):
    """A node, and where it stands: the same for all devices of a tick."""

    cluster: str
    node: str
    zone: str | None = None
    region: str | None = None
    host_type: str | None = None


class Held(NamedTuple):
    """The one pod that holds a device, its container if it is one, what owns the pod, and its :func:`tenant_labels`."""

    namespace: str
    pod: str
    pod_uid: str | None
    container: str | None
    job: str | None
    statefulset: str | None
    deployment: str | None
    workload: Workload | None
    tenants: tuple[tuple[str, str], ...] = ()


class DeviceIdentity(NamedTuple):
    """All of a device that its labels are made of: equal ones have equal labels."""

    place: Place
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
    job: Job | None
    info: tuple[str | None, ...] = ()
    """What the record's ``info`` says, in the order of ``INFO``; empty if no label says it."""


def place(sample: SeriesTick) -> Place:
    """Where a tick was read."""
    return place_of(sample.cluster, sample.node, sample.node_labels)


def place_of(cluster: str, node: str, node_labels: Mapping[str, str]) -> Place:
    """A node, and what its labels say of where it stands."""
    return Place(cluster, node, *(node_labels.get(name) for name in _OF_PLACE))


def held(of: Holder, container: str | None = None) -> Held:
    """What labels are made of in a holder."""
    owners = (of.job, of.statefulset, of.deployment, of.workload)
    return Held(
        of.namespace, of.pod, of.pod_uid, container, *owners, tuple(tenant_labels(of.labels, of.namespace_labels))
    )


def sole_holder(pods: Mapping[HoldingPod, list[Holder]]) -> Held | None:
    """The pod that alone holds a device, or None where no pod or more than one does."""
    if len(pods) != 1:
        return None
    ((first, *others),) = pods.values()
    several = others and any(other.container != first.container for other in others)
    return held(first, None if several else first.container)


def identity(
    where: Place,
    device: SeriesDevice,
    pod: Held | None = None,
    job: Job | None = None,
    info: tuple[str | None, ...] = (),
) -> DeviceIdentity:
    """What of a device its labels are made of, with this pod and this job."""
    mig = device.mig
    parent, profile, instance = (mig.parent_uuid, mig.profile, mig.gpu_instance) if mig else (None, None, None)
    hardware = (device.index, device.minor, device.vendor, device.model, device.pci_bus_id)
    return DeviceIdentity(where, device.uuid, parent, *hardware, profile, instance, pod, job, info)


def device_pairs(names: LabelNames, device: DeviceIdentity) -> list[tuple[str, str]]:
    """Those labels of a device's series that are the same whoever holds it."""
    says = _of_device(device)
    return known([(name, says.get(attribute)) for name, attribute in names.device])


def labels(
    names: LabelNames,
    device: DeviceIdentity,
    most: int = MAX_LABELS,
    of_device: Sequence[tuple[str, str]] | None = None,
) -> Labels:
    """The labels of a device's series, sorted by name; what is not known or empty is left out.

    Tenants' labels never make a series have more than ``most``, with its name and the labels of its own.
    ``of_device``: its :func:`device_pairs`, if they are known.
    """
    pairs = [*(device_pairs(names, device) if of_device is None else of_device)]
    if device.held is not None:
        says = _of_holder(device.held)
        pairs += known([(name, says[attribute]) for name, attribute in names.holder])
        if names.tenants:
            pairs += device.held.tenants[: max(0, most - ROW_LABELS - len(pairs))]
    return tuple(sorted(pairs))


def meta_labels(of: DeviceIdentity | Place, pod: Held | None) -> dict[str, str]:
    """Whatever is known of a device, or of a node, and of a pod there, as labels that only rules of relabelling see."""
    says = _of_device(of) if isinstance(of, DeviceIdentity) else _of_place(of)
    if pod is not None:
        says |= _of_holder(pod)
    written = [(name.removeprefix("k8s_"), value) for name, value in (pod.tenants if pod is not None else ())]
    return {META + name: value for name, value in known([*says.items(), *written])}


def pod_info_labels(where: Place, pod: Held, most: int = MAX_LABELS) -> Labels:
    """The labels of a pod's ``gpu_pod_info``, sorted by name, at most ``most`` with its name.

    Those of its tenant that no device's series may have room for come first.
    """
    says = _of_holder(pod)
    of_pod = [(name, says[attribute]) for name, attribute in LABELS["otel"].holder if attribute != "container"]
    pairs = known([("k8s_cluster_name", where.cluster), ("k8s_node_name", where.node), *of_pod])
    everywhere = max(0, most - ROW_LABELS - DEVICE_LABELS)
    rest_first = (*pod.tenants[everywhere:], *pod.tenants[:everywhere])
    return tuple(sorted([*pairs, *rest_first[: max(0, most - 1 - len(pairs))]]))


def labels_without_room(pod: Held, info: Labels, most: int) -> int:
    """How many labels of a pod's tenant neither its ``gpu_pod_info`` nor its devices' series have room for."""
    if len(info) + 1 < most:
        return 0
    shown = sum(name.startswith(("k8s_pod_label_", "k8s_namespace_label_")) for name, _ in info)
    return max(0, len(pod.tenants) - max(0, most - ROW_LABELS - DEVICE_LABELS) - shown)


def known(pairs: Pairs) -> list[tuple[str, str]]:
    """Those pairs that have a value, with values that any receiver takes."""
    return [(name, text) for name, value in pairs if value is not None and (text := sanitised(str(value)))]


def sanitised(value: str) -> str:
    """A value that any receiver takes: valid UTF-8 (lone surrogates become ``?``), at most 1024 bytes of it.

    Control characters and newlines stay: a label value may hold them.
    """
    if value.isascii() and len(value) <= MAX_VALUE_BYTES:
        return value
    return value.encode("utf-8", "replace")[:MAX_VALUE_BYTES].decode("utf-8", "ignore")


@lru_cache(maxsize=4096)
def sanitised_name(text: str) -> str:
    """A label's name that any receiver takes, made of any text that begins as a name does."""
    return _NOT_IN_A_NAME.sub("_", text)[:MAX_NAME]


def tenant_labels(pod: Mapping[str, str], namespace: Mapping[str, str]) -> list[tuple[str, str]]:
    """The labels of a pod, then those of its namespace, each in the order of their keys; empty values are left out.

    Keys that become one name are told apart as kube-state-metrics does: ``_conflict1``, ``_conflict2``, ...
    """
    found: list[tuple[str, str]] = []
    for prefix, labels in (("k8s_pod_label_", pod), ("k8s_namespace_label_", namespace)):
        if not labels:
            continue
        names: dict[str, list[str]] = {}
        for key in sorted(labels):
            if labels[key]:
                names.setdefault(sanitised_name(prefix + key), []).append(sanitised(labels[key]))
        found += [(name, values[0]) for name, values in names.items() if len(values) == 1]
        clashes = [(name, values) for name, values in names.items() if len(values) > 1]
        numbered = [(f"{name}_conflict{n}", value) for name, values in clashes for n, value in enumerate(values, 1)]
        found += [(name, value) for name, value in numbered if len(names.get(name, ())) != 1]
    return found


def _of_place(where: Place) -> dict[Attribute, str | int | None]:
    """What labels may say of a node."""
    return {
        "cluster": where.cluster,
        "node": where.node,
        "instance": f"{where.node}:{SCRAPE_PORT}",
        "zone": where.zone,
        "region": where.region,
        "host_type": where.host_type,
        "service": SERVICE_NAME,
    }


def _of_device(device: DeviceIdentity) -> dict[Attribute, str | int | None]:
    """What labels may say of a device."""
    is_mig, job = device.parent is not None, device.job
    says = _of_place(device.place) | {
        "vendor": device.vendor,
        "index": device.number,
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
        says |= {
            "job_id": job.id,
            "job_user": job.user,
            "job_partition": job.partition,
            "job_account": job.account,
        }
    return says | dict(zip(INFO, device.info, strict=False))


def _of_holder(pod: Held) -> dict[Attribute, str | int | None]:
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
