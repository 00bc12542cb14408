"""What a tick writes beside its devices' metrics, called the same with all names: for both sinks.

In: a tick of gpu.attributed. Out: the pods' parts of devices that are split and what is nobody's, conflicts, XID errors
and what each device is, and ``gpu_pod_info``; each as what its labels and rows are made of, and its values. Equal ones
have equal labels and rows, so that a sink makes those only when something changes.
Only a part and a pod's XID errors name a pod, and as they would a sole holder, without a container: the rest is the
device's, whoever holds it. An XID error is of the pod that held the device when it came.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sinks import pod_info
from sinks.blocks import Row, Rows, Subject
from sinks.labels import MAX_LABELS, Held, LabelSet, Place, Seen, alone, held, known, labels, sole_holder
from sinks.pod_info import HoldingPod, holding_pods
from sinks.tenants import Labels, sanitised
from topics.attributed import AttributedDevice, AttributedSample, Holder, Parts
from topics.catalogue import (
    CONFLICT,
    DEVICE_INFO,
    POD_PARTS,
    POD_XID_ERRORS,
    SPLIT_SCALED,
    UNATTRIBUTED,
    XID_ERRORS,
)
from topics.metric import Info

_QUANTITIES = tuple(POD_PARTS)
"""What a device is split by: the fields of ``Parts``."""

_ONE = (1.0,)


class Part(NamedTuple):
    """A pod's part of a device that it shares: the device as if the pod alone held it, and the quantities known."""

    device: Seen
    quantities: tuple[str, ...]


class Rest(NamedTuple):
    """What is nobody's part of a device, by the quantities known, and what went wrong on it."""

    device: Seen
    quantities: tuple[str, ...]
    split: bool
    conflict: str | None
    xids: tuple[str, ...]


class Described(NamedTuple):
    """A device and what it is."""

    device: Seen
    info: dict[str, str]


class Errors(NamedTuple):
    """The XID errors of a pod on a device, by their codes: the device as if the pod alone held it."""

    device: Seen
    codes: tuple[str, ...]


MadeOf = Part | Rest | Described | Errors | HoldingPod


class Further(NamedTuple):
    """Series of one kind of a device or a pod. ``key`` is its own within the node; ``values`` has one for each row."""

    key: tuple[str, ...]
    of: MadeOf
    values: Sequence[float]


class Made(NamedTuple):
    """What a block is made of."""

    labels: Labels
    rows: Rows
    subject: Subject


def further(label_set: LabelSet, where: Place, sample: AttributedSample) -> Iterator[Further]:
    """All that a tick writes beside its devices' metrics."""
    for device in sample.devices:
        if device.info:
            yield Further(("info", device.uuid), Described(alone(where, device), device.info), _ONE)
        yield from _rest(where, device)
        yield from _parts(label_set, where, device)
        if device.events:
            yield from _errors(label_set, where, device)
    for holding in holding_pods(label_set, where, sample):
        pod = holding.pod
        yield Further(("pod", pod.namespace, pod.pod, pod.pod_uid or ""), holding, _ONE)


def made(label_set: LabelSet, of: MadeOf, most: int = MAX_LABELS) -> Made:
    """The labels, sorted by name, and the rows; a series has at most ``most`` labels, as far as tenants write them."""
    match of:
        case Part(device, quantities):
            return Made(labels(label_set, device, most), tuple(_row(POD_PARTS[one]) for one in quantities), "part")
        case Errors(device, codes):
            return Made(labels(label_set, device, most), tuple(_row(POD_XID_ERRORS, code) for code in codes), "errors")
        case Rest():
            return Made(labels(label_set, of.device, most), _rest_rows(of), "rest")
        case Described(device, info):
            about = known((name, info.get(name)) for name in DEVICE_INFO.labels)
            return Made(tuple(sorted([*labels(label_set, device, most), *about])), _INFO_ROWS, "info")
        case HoldingPod():
            return Made(pod_info.labels(of, most), pod_info.ROWS, "pod")


def _rest(where: Place, device: AttributedDevice) -> Iterator[Further]:
    split = device.unattributed is not None or any(holder.parts is not None for holder in device.holders)
    if not (split or device.conflict or device.xids):
        return
    rest = _known(device.unattributed)
    xids = {sanitised(code): float(count) for code, count in device.xids.items() if code}
    of = Rest(alone(where, device), tuple(rest), split, device.conflict or None, tuple(xids))
    flags = [float(device.split_scaled)] * split + [1.0] * (of.conflict is not None)
    if values := [*rest.values(), *flags, *xids.values()]:
        yield Further(("rest", device.uuid), of, values)


def _rest_rows(of: Rest) -> Rows:
    unattributed = [_row(UNATTRIBUTED[one]) for one in of.quantities]
    scaled = [_row(SPLIT_SCALED)] if of.split else []
    conflict = [_row(CONFLICT, sanitised(of.conflict))] if of.conflict is not None else []
    return (*unattributed, *scaled, *conflict, *(_row(XID_ERRORS, code) for code in of.xids))


def _parts(label_set: LabelSet, where: Place, device: AttributedDevice) -> Iterator[Further]:
    """The part of each pod: the sum of its containers'."""
    pods: dict[tuple[str, ...], list[Holder]] = {}
    for holder in device.holders:
        if holder.parts is not None:
            pods.setdefault(_pod(label_set, holder), []).append(holder)
    for pod, holders in pods.items():
        if values := _sums([_known(holder.parts) for holder in holders]):
            of = Part(alone(where, device, held(holders[0])), tuple(values))
            yield Further(("part", device.uuid, *pod), of, list(values.values()))


def _errors(label_set: LabelSet, where: Place, device: AttributedDevice) -> Iterator[Further]:
    """The XID errors of each pod that alone held the device when they came."""
    pods: dict[tuple[str, ...], tuple[Held, Counter[str]]] = {}
    for event in device.events or ():
        pod = sole_holder(device.holders if event.holders is None else event.holders)
        if pod is not None and event.kind == "xid" and event.code is not None:
            _, counts = pods.setdefault(_pod(label_set, pod), (pod._replace(container=None), Counter()))
            counts[str(event.code)] += 1
    for key, (pod, counts) in pods.items():
        of = Errors(alone(where, device, pod), tuple(sorted(counts)))
        yield Further(("errors", device.uuid, *key), of, [float(counts[code]) for code in of.codes])


def _pod(label_set: LabelSet, holder: Holder | Held) -> tuple[str, ...]:
    """What tells pods apart: a pod that was made anew is another one only where its uid is a label."""
    return holder.namespace, holder.pod, (holder.pod_uid or "") if label_set == "otel" else ""


def _sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {one: sum(part.get(one, 0.0) for part in parts) for one in _QUANTITIES if any(one in part for part in parts)}


def _known(parts: Parts | None) -> dict[str, float]:
    values = ((one, getattr(parts, one, None)) for one in _QUANTITIES)
    return {one: float(value) for one, value in values if value is not None}


def _row(info: Info, *values: str) -> Row:
    return Row(info.name, tuple(zip(info.labels, values, strict=True)), info.kind, info.help, primary=False)


_INFO_ROWS: Rows = (Row(DEVICE_INFO.name, (), "gauge", DEVICE_INFO.help, primary=False),)
"""What a device is is in the labels of its block: they are its own, not constant ones as a row's are."""
