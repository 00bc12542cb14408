"""What a tick writes beside its devices' metrics: pods' parts, what is nobody's, errors, and what devices are. Pure.

Only a part and a pod's XID errors name a pod, and as they would a sole holder, without a container: the rest is the
device's, whoever holds it. An XID error is of the pod that held the device when it came.

Sets and values are apart: which series there are changes only with what a record says of a device, and with which
parts are known; the values change in every tick.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec.structs import astuple

from sinks.series.labels import (
    MAX_LABELS,
    DeviceIdentity,
    Held,
    Place,
    held,
    identity,
    known,
    labels,
    labels_without_room,
    pod_info_labels,
    sanitised,
)
from sinks.series.metrics import NOTHING, row_of
from sinks.series.model import Row, Rows, SeriesSet, Subject, Value
from sinks.series.tick import DeviceReading, Metrics, SeriesDevice
from topics.attributed import Holder, HoldingPod, pods_of
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


class OfDevice(NamedTuple):
    """Series of a device: a pod's part, a pod's XID errors, or what is nobody's. ``device`` names the pod, if any."""

    subject: Subject
    device: DeviceIdentity
    rows: Rows


class Described(NamedTuple):
    """A device and what it is. That is in the labels of its set: they are its own, not constant ones as a row's are."""

    device: DeviceIdentity
    info: dict[str, str]


class PodInfo(NamedTuple):
    """A pod that holds a device of the node, by one of its holders. ``held``: what labels are made of in it, if that is
    known."""

    place: Place
    holder: Holder
    held: Held | None


Pick = float | int | tuple[int, ...]
"""A value, or the place of one of :func:`numbers`, or the places of those that it is the sum of."""


class Beside(NamedTuple):
    """Series of one kind that are beside a device's metrics: where the value of each row comes from."""

    key: tuple[str, ...]
    of: OfDevice | Described | PodInfo
    picks: tuple[Pick, ...]


Pods = Mapping[HoldingPod, list[Holder]]
"""Who holds a device, by pod."""


class HeldDevice(NamedTuple):
    """A device of a node, and who holds it. ``bare`` names no holder, ``sole`` is the only one."""

    place: Place
    device: SeriesDevice
    holders: tuple[Holder, ...]
    pods: Pods
    bare: DeviceIdentity
    sole: Held | None


def made_of(
    names: LabelNames,
    of: OfDevice | Described | PodInfo,
    most: int = MAX_LABELS,
    on_cut: Callable[[int], object] = int,
) -> SeriesSet:
    """A set beside metrics; tenants' labels never make one have more than ``most``.

    ``on_cut`` is called with how many of a pod's labels there is no room for anywhere, if there are such.
    """
    match of:
        case OfDevice(subject, device, rows):
            return SeriesSet(labels(names, device, most), rows, subject)
        case Described(device, info):
            about = known((name, info.get(name)) for name in DEVICE_INFO.labels)
            row = Row(DEVICE_INFO.name, (), "gauge", DEVICE_INFO.help, primary=False)
            return SeriesSet(tuple(sorted([*labels(names, device, most), *about])), (row,), "info")
        case PodInfo(where, holder, sole):
            pod = sole or held(holder)
            series = SeriesSet(pod_info_labels(where, pod, most), (row_of(POD_INFO),), "pod")
            if cut := labels_without_room(pod, series.labels, most):
                on_cut(cut)
            return series


Numbers = tuple[float | None, ...]
"""Of a device that is split: whether it was scaled, what is nobody's, and the part of each holder; else nothing."""

_QUANTITIES = tuple(POD_PARTS)
_NONE_KNOWN = (None,) * len(_QUANTITIES)
_SCALED, _UNATTRIBUTED = 0, 1
_FIRST_PART = _UNATTRIBUTED + len(_QUANTITIES)


def numbers(reading: DeviceReading) -> Numbers:
    """What of a device changes in every tick, beside its metrics."""
    if not reading.parts and reading.unattributed is None:
        return ()
    parts = [astuple(one) if one is not None else _NONE_KNOWN for one in (reading.unattributed, *reading.parts)]
    return (float(reading.split_scaled), *chain.from_iterable(parts))


def picked(picks: Sequence[Pick], of: Numbers) -> list[float]:
    """The value of each row, for the numbers of a tick in which the same are known."""
    return [
        pick
        if isinstance(pick, float)
        else (of[pick] or 0.0)
        if isinstance(pick, int)
        else sum([of[place] or 0.0 for place in pick])
        for pick in picks
    ]


def beside(names: LabelNames, of: HeldDevice, known: Sequence[bool]) -> Iterator[Beside]:
    """All that is beside a device's metrics, if just these of its numbers are known."""
    device = of.device
    if device.info:
        yield Beside(("info", device.uuid), Described(of.bare, device.info), (1.0,))
    if known or device.conflict or device.xids:
        rest = _rest(device, known)
        if rest:
            yield Beside(("rest", device.uuid), OfDevice("rest", of.bare, tuple(rest)), tuple(rest.values()))
    if len(known) > _FIRST_PART:
        yield from _parts(names, of, known)
    if device.events:
        yield from _errors(names, of)


def pod_infos(devices: Iterable[HeldDevice]) -> Iterator[Beside]:
    """What is written on each pod that holds a device of a node."""
    holding = {pod: PodInfo(of.place, holders[-1], of.sole) for of in devices for pod, holders in of.pods.items()}
    for pod, info in holding.items():
        yield Beside(("pod", pod.namespace, pod.pod, pod.pod_uid or ""), info, (1.0,))


def _rest(device: SeriesDevice, known: Sequence[bool]) -> dict[Row, Pick]:
    """What is nobody's of a device, and what went wrong on it."""
    rows: dict[Row, Pick] = {}
    if known:
        places = enumerate(_QUANTITIES, _UNATTRIBUTED)
        rows = {row_of(UNATTRIBUTED[one]): place for place, one in places if known[place]}
        rows[row_of(SPLIT_SCALED)] = _SCALED
    if device.conflict:
        rows[row_of(CONFLICT, sanitised(device.conflict))] = 1.0
    return rows | {row_of(XID_ERRORS, sanitised(code)): float(count) for code, count in device.xids.items() if code}


def _parts(names: LabelNames, of: HeldDevice, known: Sequence[bool]) -> Iterator[Beside]:
    """The part of each pod: the sum of its containers'."""
    places = _places(of.holders)
    split: dict[tuple[str, ...], list[Holder]] = {}
    for pod, of_pod in of.pods.items():
        split.setdefault(_pod_key(names, pod), []).extend(of_pod)
    for key, holders in split.items():
        picks: dict[Row, Pick] = {}
        for at, one in enumerate(_QUANTITIES):
            there = [places[id(holder)] + at for holder in holders]
            if known_there := tuple([number for number in there if known[number]]):
                picks[row_of(POD_PARTS[one])] = known_there if len(known_there) > 1 else known_there[0]
        if picks:
            part = OfDevice("part", identity(of.place, of.device, held(holders[0])), tuple(picks))
            yield Beside(("part", of.device.uuid, *key), part, tuple(picks.values()))


def _places(holders: Iterable[Holder]) -> dict[int, int]:
    """Where among its numbers a device's holders' parts begin, by the holder's identity."""
    return {id(holder): _FIRST_PART + at * len(_QUANTITIES) for at, holder in enumerate(holders)}


def _errors(names: LabelNames, of: HeldDevice) -> Iterator[Beside]:
    """The XID errors of each pod that alone held the device when they came."""
    device, pods = of.device, dict[tuple[str, ...], tuple[Held, Counter[str]]]()
    for event in device.events or ():
        if event.kind == "xid" and event.code is not None:
            then = pods_of(event.held_by(of.holders))
            for pod, holders in then.items() if len(then) == 1 else ():
                _, counts = pods.setdefault(_pod_key(names, pod), (held(holders[0]), Counter()))
                counts[str(event.code)] += 1
    for key, (alone, counts) in pods.items():
        codes = sorted(counts)
        errors = OfDevice(
            "errors", identity(of.place, device, alone), tuple([row_of(POD_XID_ERRORS, code) for code in codes])
        )
        yield Beside(("errors", device.uuid, *key), errors, tuple([float(counts[code]) for code in codes]))


def _pod_key(names: LabelNames, pod: HoldingPod) -> tuple[str, ...]:
    """A pod that was created again is another one only where its uid is a label."""
    return pod.namespace, pod.pod, (pod.pod_uid or "") if names.pod_uid else ""


# -- what a device does, by pod

_DIVIDED = {
    "utilization_ratio": "gpu_utilization_ratio",
    "memory_used_bytes": "memory_used_bytes",
    "power_watts": "power_watts",
}
"""The keys of which pods have parts."""

PodName = tuple[str, ...]
"""Namespace, pod and uid; empty for what is the device's own."""


class PodPart(NamedTuple):
    """What a pod does on a device; ``held`` None: whoever holds the device."""

    held: Held | None
    metrics: dict[str, float]


class Divided(NamedTuple):
    """A device by pod: the parts, and what is written for the device in place of its own values."""

    parts: Mapping[PodName, PodPart]
    rest: Mapping[str, Value]


def divide(held_by: HeldDevice, metrics: Metrics, of: Numbers, *, uids: bool) -> Divided:
    """A device by pod. Parts and rest come to the device; what no part is known of stays the device's.

    NVML has no utilization of a MIG device: it is the share of the time in which its engines were busy.
    ``uids``: a pod that was created again under its name is another one.
    """
    parts: dict[PodName, PodPart] = {}
    busy = metrics.graphics_engine_active_ratio
    if held_by.device.mig is not None and busy is not None and metrics.gpu_utilization_ratio is None:
        parts[()] = PodPart(None, {"gpu_utilization_ratio": busy})
    if len(held_by.pods) < 2:
        return Divided(parts, NOTHING)
    by_name: dict[PodName, list[Holder]] = {}
    for pod, holders in held_by.pods.items():
        by_name.setdefault((pod.namespace, pod.pod, (pod.pod_uid or "") if uids else ""), []).extend(holders)
    places, rest = _places(held_by.holders), dict[str, Value]()
    for name, holders in by_name.items():
        for key, value in [found for holder in holders for found in _divided(of, places[id(holder)])]:
            whole = getattr(metrics, key)
            if whole is not None:
                one = len({holder.container for holder in holders}) == 1
                part = parts.setdefault(name, PodPart(held(holders[0], holders[0].container if one else None), {}))
                part.metrics[key] = part.metrics.get(key, 0) + value
                rest[key] = max(0.0, rest.get(key, whole) - value)
    return Divided(parts, rest | {key: value for key, value in _divided(of, _UNATTRIBUTED) if key in rest})


def _divided(of: Numbers, place: int) -> list[tuple[str, float]]:
    """The parts that begin at a place, by the keys of which they are."""
    some = of[place : place + len(_QUANTITIES)]
    return [(_DIVIDED[one], value) for one, value in zip(_QUANTITIES, some, strict=False) if value is not None]
