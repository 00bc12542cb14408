"""The series of a tick beside its devices' metrics: pods' parts, the rest, errors, and what devices and pods are. Pure.

Only a part and a pod's XID errors name a pod; they carry the labels of a sole holder, without a container. The rest is
the device's, whoever holds it. An XID error belongs to the pod that held the device when the error came.

Sets and values are separate: which series exist changes only with the record's text about a device and with which parts
are known, while the values change in every tick.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec.structs import astuple

from sinks.series.labels import (
    MAX_LABELS,
    DeviceIdentity,
    HolderIdentity,
    NodeIdentity,
    device_identity,
    holder_identity,
    labels,
    labels_without_room,
    nonempty,
    pod_info_labels,
    sanitised,
)
from sinks.series.metrics import NO_REST, row_of
from sinks.series.model import Row, Rows, SeriesSet, Subject, Value
from sinks.series.tick import DeviceReading, Metrics, SeriesDevice
from topics.attributed import DIVIDED, Holder, HoldingPod, pods_of
from topics.catalogue import (
    CONFLICT,
    DEVICE_INFO,
    POD_INFO,
    POD_PARTS,
    POD_XID_ERRORS,
    SPLIT_SCALED,
    UNATTRIBUTED,
    XID_ERRORS,
)
from topics.profiles import LabelNames


class DeviceRows(NamedTuple):
    """Series of a device: a pod's part, a pod's XID errors, or the rest. ``device`` names the pod, if there is one."""

    subject: Subject
    device: DeviceIdentity
    rows: Rows


class DeviceInfo(NamedTuple):
    """A device and its ``info``, which becomes labels of the whole set, not of a row."""

    device: DeviceIdentity
    info: dict[str, str]


class PodInfo(NamedTuple):
    """A pod that holds a device of the node. ``holder`` is one of its containers, ``identity`` what labels say of the
    pod, if that is known already."""

    node: NodeIdentity
    holder: Holder
    identity: HolderIdentity | None


Source = DeviceRows | DeviceInfo | PodInfo
"""What a set is made of."""

ValueSource = float | int | tuple[int, ...]
"""A constant value, or an index into :data:`SplitValues`, or the indices of values that are added up."""


class ExtraSeries(NamedTuple):
    """A set beside a device's metrics: its key in the node, its source, and where the value of each row comes from."""

    key: tuple[str, ...]
    source: Source
    values: tuple[ValueSource, ...]


Pods = Mapping[HoldingPod, list[Holder]]
"""The holders of a device, by pod."""


class HeldDevice(NamedTuple):
    """A device of a node, and its holders. ``bare`` is its identity without a holder."""

    node: NodeIdentity
    device: SeriesDevice
    holders: tuple[Holder, ...]
    pods: Pods
    bare: DeviceIdentity
    sole_holder: HolderIdentity | None


def series_set(
    names: LabelNames,
    source: Source,
    max_labels: int = MAX_LABELS,
    on_cut: Callable[[int], object] = int,
) -> SeriesSet:
    """The set of a source; no tenant's labels make a series have more than ``max_labels``.

    ``on_cut`` is called with the number of a pod's labels that have room on no series, if there are any.
    """
    match source:
        case DeviceRows(subject, device, rows):
            return SeriesSet(labels(names, device, max_labels), rows, subject)
        case DeviceInfo(device, info):
            info_labels = nonempty((name, info.get(name)) for name in DEVICE_INFO.labels)
            row = Row(DEVICE_INFO.name, (), "gauge", DEVICE_INFO.help, primary=False)
            return SeriesSet(tuple(sorted([*labels(names, device, max_labels), *info_labels])), (row,), "info")
        case PodInfo(node, holder, identity):
            pod = identity or holder_identity(holder)
            series = SeriesSet(pod_info_labels(node, pod, max_labels), (row_of(POD_INFO),), "pod")
            if cut := labels_without_room(pod, series.labels, max_labels):
                on_cut(cut)
            return series


SplitValues = tuple[float | None, ...]
"""Of a shared device: whether its parts were scaled down, the rest, and each holder's part; empty for other devices."""

_QUANTITIES = tuple(POD_PARTS)
_ALL_UNKNOWN = (None,) * len(_QUANTITIES)
_SCALED, _UNATTRIBUTED = 0, 1
_FIRST_PART = _UNATTRIBUTED + len(_QUANTITIES)


def split_values(reading: DeviceReading) -> SplitValues:
    """The values of a device that change in every tick, beside its metrics."""
    if not reading.parts and reading.unattributed is None:
        return ()
    parts = [astuple(part) if part is not None else _ALL_UNKNOWN for part in (reading.unattributed, *reading.parts)]
    return (float(reading.split_scaled), *chain.from_iterable(parts))


def resolve(sources: Sequence[ValueSource], values: SplitValues) -> list[float]:
    """The value of each row in a tick with these values, of which the same are known."""
    return [
        source
        if isinstance(source, float)
        else (values[source] or 0.0)
        if isinstance(source, int)
        else sum([values[index] or 0.0 for index in source])
        for source in sources
    ]


def device_extras(names: LabelNames, held: HeldDevice, known: Sequence[bool]) -> Iterator[ExtraSeries]:
    """All series of a device beside its metrics; ``known`` says which of its split values are known."""
    device = held.device
    if device.info:
        yield ExtraSeries(("info", device.uuid), DeviceInfo(held.bare, device.info), (1.0,))
    rest: dict[Row, ValueSource] = {}
    if known:
        quantities = enumerate(_QUANTITIES, _UNATTRIBUTED)
        rest = {row_of(UNATTRIBUTED[quantity]): index for index, quantity in quantities if known[index]}
        rest[row_of(SPLIT_SCALED)] = _SCALED
    if device.conflict:
        rest[row_of(CONFLICT, sanitised(device.conflict))] = 1.0
    rest |= {row_of(XID_ERRORS, sanitised(code)): float(count) for code, count in device.xids.items() if code}
    if rest:
        yield ExtraSeries(("rest", device.uuid), DeviceRows("rest", held.bare, tuple(rest)), tuple(rest.values()))
    if len(known) > _FIRST_PART:
        yield from _parts(names, held, known)
    if device.events:
        yield from _pod_errors(names, held)


def pod_infos(devices: Iterable[HeldDevice]) -> Iterator[ExtraSeries]:
    """The info series of each pod that holds a device of a node."""
    infos = {
        pod: PodInfo(held.node, holders[-1], held.sole_holder) for held in devices for pod, holders in held.pods.items()
    }
    for pod, info in infos.items():
        yield ExtraSeries(("pod", pod.namespace, pod.pod, pod.pod_uid or ""), info, (1.0,))


def _parts(names: LabelNames, held: HeldDevice, known: Sequence[bool]) -> Iterator[ExtraSeries]:
    """The part of each pod: the sum of its containers' parts."""
    part_starts = _part_starts(held.holders)
    for key, holders in _holders_by_pod(held.pods, uids=names.pod_uid).items():
        rows: dict[Row, ValueSource] = {}
        for offset, quantity in enumerate(_QUANTITIES):
            indices = [part_starts[id(holder)] + offset for holder in holders]
            if known_indices := tuple([index for index in indices if known[index]]):
                rows[row_of(POD_PARTS[quantity])] = known_indices if len(known_indices) > 1 else known_indices[0]
        if rows:
            identity = device_identity(held.node, held.device, holder_identity(holders[0]))
            part = DeviceRows("part", identity, tuple(rows))
            yield ExtraSeries(("part", held.device.uuid, *key), part, tuple(rows.values()))


def _part_starts(holders: Iterable[Holder]) -> dict[int, int]:
    """The index in :data:`SplitValues` at which each holder's part begins, by the ``id`` of the holder."""
    return {id(holder): _FIRST_PART + number * len(_QUANTITIES) for number, holder in enumerate(holders)}


def _pod_errors(names: LabelNames, held: HeldDevice) -> Iterator[ExtraSeries]:
    """The XID errors of each pod that alone held the device when they came."""
    device, pods = held.device, dict[PodName, tuple[HolderIdentity, Counter[str]]]()
    for event in device.events or ():
        if event.kind == "xid" and event.code is not None:
            holding = pods_of(event.held_by(held.holders))
            for pod, holders in holding.items() if len(holding) == 1 else ():
                key = _pod_name(pod, uids=names.pod_uid)
                _, counts = pods.setdefault(key, (holder_identity(holders[0]), Counter()))
                counts[str(event.code)] += 1
    for key, (holder, counts) in pods.items():
        codes = sorted(counts)
        rows = tuple([row_of(POD_XID_ERRORS, code) for code in codes])
        errors = DeviceRows("errors", device_identity(held.node, device, holder), rows)
        yield ExtraSeries(("errors", device.uuid, *key), errors, tuple([float(counts[code]) for code in codes]))


PodName = tuple[str, ...]
"""Namespace, name and uid of a pod; empty for the device's own part."""


def _pod_name(pod: HoldingPod, *, uids: bool) -> PodName:
    """What distinguishes a pod. Without ``uids``, because they are no label, a recreated pod is the same one."""
    return pod.namespace, pod.pod, (pod.pod_uid or "") if uids else ""


def _holders_by_pod(pods: Pods, *, uids: bool) -> dict[PodName, list[Holder]]:
    """The holders of a device by what distinguishes their pods."""
    by_name: dict[PodName, list[Holder]] = {}
    for pod, holders in pods.items():
        by_name.setdefault(_pod_name(pod, uids=uids), []).extend(holders)
    return by_name


# -- a shared device's metrics, by pod


class PodPart(NamedTuple):
    """The metrics of a pod on a device; ``holder`` None: of whoever holds the device."""

    holder: HolderIdentity | None
    metrics: dict[str, float]


class Divided(NamedTuple):
    """A device's metrics by pod: the parts, and the values that replace the device's own."""

    parts: Mapping[PodName, PodPart]
    rest: Mapping[str, Value]


def divide(held: HeldDevice, metrics: Metrics, values: SplitValues, *, uids: bool) -> Divided:
    """Divide a device's metrics by pod: the parts and the rest add up to the device. A metric without parts
    stays whole.

    NVML has no utilization of a MIG device: the share of time in which its engines were busy stands for it.
    ``uids``: pods with the same name and different uids are different pods.
    """
    parts: dict[PodName, PodPart] = {}
    engine_active = metrics.graphics_engine_active_ratio
    if held.device.mig is not None and engine_active is not None and metrics.gpu_utilization_ratio is None:
        parts[()] = PodPart(None, {"gpu_utilization_ratio": engine_active})
    if len(held.pods) < 2:
        return Divided(parts, NO_REST)
    part_starts, rest = _part_starts(held.holders), dict[str, Value]()
    for name, holders in _holders_by_pod(held.pods, uids=uids).items():
        for key, value in [part for holder in holders for part in _part(values, part_starts[id(holder)])]:
            whole = getattr(metrics, key)
            if whole is not None:
                sole_container = len({holder.container for holder in holders}) == 1
                identity = holder_identity(holders[0], holders[0].container if sole_container else None)
                pod_part = parts.setdefault(name, PodPart(identity, {}))
                pod_part.metrics[key] = pod_part.metrics.get(key, 0) + value
                rest[key] = max(0.0, rest.get(key, whole) - value)
    return Divided(parts, rest | {key: value for key, value in _part(values, _UNATTRIBUTED) if key in rest})


def _part(values: SplitValues, start: int) -> list[tuple[str, float]]:
    """The part that begins at an index, as metrics; unknown values are left out."""
    part = values[start : start + len(_QUANTITIES)]
    return [(DIVIDED[name], value) for name, value in zip(_QUANTITIES, part, strict=False) if value is not None]
