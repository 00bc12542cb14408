"""The devices that HAMi gave each container. Pure.

HAMi gives each GPU several slots, ``GPU-<uuid>-<N>``. The kubelet picks some of them, but the container gets the GPU
that HAMi's scheduler chose, which the pod's annotation ``hami.io/vgpu-devices-allocated`` names. Source: HAMi's
EncodePodSingleDevice: ``UUID,type,MiB,percent`` with ``:`` after each device and ``;`` after each container. A part of
a GPU in HAMi's MIG mode is ``UUID[template-position]``, which names no MIG device: not read.

The annotation has a section for each container, init containers first, in the order of the pod's, empty for one without
devices. The kubelet does not list init containers, so the last sections that are not empty count: as many as the pod
has containers with slots. (That is wrong if a sidecar goes before an init container with GPUs.) No record has the order
of a pod's containers, but since 2.9 HAMi makes the kubelet pick slots of the GPUs that it chose. So:

- A container has the section with the GPUs of its slots. The rest of the sections belong to the rest of the containers:
  then the pod has the right GPUs, whichever container has them.
- If there are fewer sections than containers, each container has the devices of all.
- If the annotation can't be read, or names more devices than the pod has slots, the kubelet's ids stand.
"""

from collections.abc import Iterable, Mapping, Sequence

from streams.attribution.workloads import PodName
from topics.allocations import Container
from topics.device_ids import DeviceRef, UnknownDeviceId, parse
from topics.workloads import Pod

ANNOTATION = "hami.io/vgpu-devices-allocated"

ContainerName = tuple[str, str, str]  # namespace, pod, container

_FIELDS = 4


def hami_device_ids(
    containers: Sequence[Container], pods: Mapping[PodName, Pod | None]
) -> dict[ContainerName, tuple[str, ...]]:
    """The device ids that HAMi's annotations name, for each container with slots of a pod that has the annotation."""
    annotations = {name: pod.annotations.get(ANNOTATION) for name, pod in pods.items() if pod}
    sections_by_pod = {name: parse_hami_annotation(text) for name, text in annotations.items() if text is not None}
    slots_by_pod: dict[PodName, dict[str, list[str]]] = {}
    for container in containers:
        pod_name, slots = (container.namespace, container.pod), list(filter(is_slot, container.device_ids))
        if slots and sections_by_pod.get(pod_name):
            slots_by_pod.setdefault(pod_name, {}).setdefault(container.container, []).extend(slots)
    device_ids: dict[ContainerName, tuple[str, ...]] = {}
    for pod_name, slots_by_container in slots_by_pod.items():
        sections = list(sections_by_pod[pod_name] or ())[-len(slots_by_container) :]
        if sum(map(len, sections)) > sum(map(len, slots_by_container.values())):
            continue  # a tenant may write the annotation, but the kubelet says how many slots his pod has
        if len(sections) < len(slots_by_container):
            union = tuple(dict.fromkeys(device_id for section in sections for device_id in section))
            device_ids |= {(*pod_name, name): union for name in slots_by_container}
            continue
        names_left = []
        for name, slots in slots_by_container.items():
            picked = next((section for section in sections if _uuids(section) == _uuids(slots)), None)
            if picked is None:
                names_left.append(name)
            else:
                sections.remove(picked)
                device_ids[*pod_name, name] = picked
        device_ids |= {(*pod_name, name): section for name, section in zip(names_left, sections, strict=True)}
    return device_ids


def parse_hami_annotation(annotation: str) -> tuple[tuple[str, ...], ...] | None:
    """The device ids of each container that has any; None if the annotation can't be read."""
    sections = []
    for section in annotation.split(";"):
        entries = [entry.strip().split(",") for entry in section.split(":") if entry.strip()]
        for fields in entries:
            ref = _parse(fields[0])
            if len(fields) < _FIELDS or ref.uuid is None or ref.replica is not None or ref.slot is not None:
                return None
        sections.append(tuple([fields[0] for fields in entries]))
    return tuple([section for section in sections if section]) or None


def _uuids(device_ids: Iterable[str]) -> list[str]:
    return sorted(_parse(device_id).uuid or "" for device_id in device_ids)


def is_slot(device_id: str) -> bool:
    """Whether an id is a slot of HAMi's."""
    return _parse(device_id).slot is not None


def _parse(device_id: str) -> DeviceRef:
    try:
        return parse(device_id)
    except UnknownDeviceId:
        return DeviceRef()
