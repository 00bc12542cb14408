"""HAMi: the devices that its scheduler chose, which a pod's annotation names and the kubelet does not.

In: the annotation ``hami.io/vgpu-devices-allocated`` of a pod, and the containers of a snapshot. Out: device ids.
Pure. An annotation that can't be read says nothing: the kubelet's ids stand.

HAMi gives each GPU several slots, ``GPU-<uuid>-<N>``, of which the kubelet picks some; the scheduler may have chosen
another GPU, and that is the one that the container gets. The annotation has a section for each container, in the order
of the pod's, empty for one without devices. Neither record has the order of all containers of a pod, so the sections
that are not empty belong, in order, to the pod's containers with slots; where these are not as many, each container has
the devices of all of them: the pod has the right ones, whichever container it was.

Source: HAMi's EncodePodSingleDevice: ``UUID,type,MiB,percent`` with ``:`` after each device and ``;`` after each
container. A part of a GPU in HAMi's MIG mode is ``UUID[template-position]``, which names no MIG device: not read.
"""

from collections.abc import Mapping, Sequence

from streams.attribution.workloads import PodName
from topics.allocations import Container
from topics.device_ids import DeviceRef, UnknownDeviceId, parse
from topics.workloads import Pod

ANNOTATION = "hami.io/vgpu-devices-allocated"

Chosen = Mapping[tuple[PodName, str], tuple[str, ...]]
"""The ids of the devices of each pod's container, where an annotation names them."""

_FIELDS = 4


def devices(annotation: str) -> tuple[tuple[str, ...], ...] | None:
    """The ids of each container's devices, without those that have none; None where it can't be read."""
    sections = []
    for section in annotation.split(";"):
        ids = [_device(entry) for entry in section.split(":") if entry.strip()]
        if None in ids:
            return None
        sections.append(tuple([device_id for device_id in ids if device_id is not None]))
    return tuple([section for section in sections if section]) or None


def chosen(containers: Sequence[Container], pods: Mapping[PodName, Pod | None]) -> Chosen:
    """What the annotations say of the containers that were given slots."""
    annotations = {name: pod.annotations.get(ANNOTATION) for name, pod in pods.items() if pod}
    sections = {name: devices(text) for name, text in annotations.items() if text is not None}
    slotted: dict[PodName, list[str]] = {}
    for container in containers:
        pod_name = (container.namespace, container.pod)
        if sections.get(pod_name) and any(map(is_slot, container.device_ids)):
            slotted.setdefault(pod_name, []).append(container.container)
    return {
        (pod_name, name): ids
        for pod_name, names in slotted.items()
        for name, ids in _by_container(list(dict.fromkeys(names)), sections[pod_name] or ())
    }


def is_slot(device_id: str) -> bool:
    """Whether an id is a slot of HAMi's."""
    return _ref(device_id).slot is not None


def _by_container(names: Sequence[str], sections: Sequence[tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
    if len(names) == len(sections):
        return list(zip(names, sections, strict=True))
    union = tuple(dict.fromkeys(device_id for section in sections for device_id in section))
    return [(name, union) for name in names]


def _device(entry: str) -> str | None:
    """The id of a device; None where the entry names none by its UUID alone."""
    fields = entry.strip().split(",")
    ref = _ref(fields[0])
    whole = ref.uuid is not None and ref.replica is None and ref.slot is None
    return fields[0] if len(fields) >= _FIELDS and whole else None


def _ref(device_id: str) -> DeviceRef:
    try:
        return parse(device_id)
    except UnknownDeviceId:
        return DeviceRef()
