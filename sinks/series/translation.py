"""A tick of gpu.attributed -> series and their values: for every sink that writes series.

In: a tick. Out: the metrics of each device; beside them, called the same with all names, the pods' parts of devices
that are split and what is nobody's, conflicts, XID errors and what each device is, and ``gpu_pod_info``.
State: what was last labelled, in a cache of each node. Series of which all that they are made of is the same are the
same object, so that a sink works out its encoding only when something changes.
Only a part and a pod's XID errors name a pod, and as they would a sole holder, without a container: the rest is the
device's, whoever holds it. An XID error is of the pod that held the device when it came.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sinks.series.labels import (
    MAX_LABELS,
    DeviceIdentity,
    Held,
    LabelSet,
    Place,
    held,
    identity,
    known,
    labels,
    place,
    pod_info_labels,
    sanitised,
    sole_holder,
)
from sinks.series.metrics import Measured, MetricNames
from sinks.series.model import Row, Rows, SampleGroup, SeriesSet
from topics.attributed import AttributedDevice, AttributedSample, Holder, HoldingPod, Parts, by_pod
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
from topics.metric import Info, Profile

_QUANTITIES = tuple(POD_PARTS)
"""What a device is split by: the fields of ``Parts``."""

_ONE = (1.0,)
_INFO_ROWS: Rows = (Row(DEVICE_INFO.name, (), "gauge", DEVICE_INFO.help, primary=False),)
"""What a device is is in the labels of its set: they are its own, not constant ones as a row's are."""

_POD_ROWS: Rows = (Row(POD_INFO.name, (), "gauge", POD_INFO.help, primary=False),)
_SPARE = 64


class Part(NamedTuple):
    """A pod's part of a device that it shares: the device as if the pod alone held it, and the quantities known."""

    device: DeviceIdentity
    quantities: tuple[str, ...]


class Rest(NamedTuple):
    """What is nobody's part of a device, by the quantities known, and what went wrong on it."""

    device: DeviceIdentity
    quantities: tuple[str, ...]
    split: bool
    conflict: str | None
    xids: tuple[str, ...]


class Described(NamedTuple):
    """A device and what it is."""

    device: DeviceIdentity
    info: dict[str, str]


class Errors(NamedTuple):
    """The XID errors of a pod on a device, by their codes: the device as if the pod alone held it."""

    device: DeviceIdentity
    codes: tuple[str, ...]


class PodInfo(NamedTuple):
    """A pod that holds a device of the node, and all that is written on it."""

    place: Place
    pod: Held


MadeOf = Part | Rest | Described | Errors | PodInfo

Key = str | tuple[str, ...]
"""Of a set within its node: a device's uuid for its metrics, else a kind and what it is about."""


class Beside(NamedTuple):
    """Series of one kind that are beside a device's metrics. ``values`` has one for each row."""

    key: tuple[str, ...]
    of: MadeOf
    values: Sequence[float]


class Labelled(NamedTuple):
    """A set of series, and all that its labels were made of."""

    of: DeviceIdentity | MadeOf
    series: SeriesSet


Pods = Mapping[HoldingPod, list[Holder]]
"""Who holds a device, by pod."""

Cache = dict[Key, Labelled]
"""Of one node."""


class Translator:
    """Translates ticks, in a naming profile and a label set; no tenant makes a series have more than ``max_labels``."""

    def __init__(self, names: Profile, label_set: LabelSet, max_labels: int = MAX_LABELS) -> None:
        self._metrics = MetricNames(names)
        self._label_set, self._max_labels = label_set, max_labels

    def translate(self, sample: AttributedSample, cache: Cache) -> tuple[list[Key], list[SampleGroup]]:
        """All series of a tick that have a value, and the key of each set. ``cache`` is its node's."""
        where = place(sample)
        keys: list[Key] = []
        groups: list[SampleGroup] = []
        devices = [(device, device.pods()) for device in sample.devices]
        for device, pods in devices:
            measured = self._metrics.measure(device.metrics, None if sample.attribution == "none" else len(pods))
            if measured.rows:
                job = device.jobs[0] if device.jobs and len(device.jobs) == 1 else None
                series = self._of_metrics(identity(where, device, sole_holder(pods), job), measured, cache)
                keys.append(device.uuid)
                groups.append(SampleGroup(series, sample.ts_ms, measured.values))
        for one in beside(self._label_set, where, devices):
            before = cache.get(one.key)
            if before is None or before.of != one.of:
                before = cache[one.key] = Labelled(one.of, made(self._label_set, one.of, self._max_labels))
            keys.append(one.key)
            groups.append(SampleGroup(before.series, sample.ts_ms, one.values))
        if len(cache) > 2 * len(keys) + _SPARE:
            for key in cache.keys() - set(keys):
                del cache[key]
        return keys, groups

    def _of_metrics(self, device: DeviceIdentity, measured: Measured, cache: Cache) -> SeriesSet:
        """The set of a device's metrics: the one that was made before, while nothing of it changes."""
        before = cache.get(device.uuid)
        if before is None or before.of != device:
            series = SeriesSet(labels(self._label_set, device, self._max_labels), measured.rows)
        elif before.series.rows is not measured.rows:
            series = SeriesSet(before.series.labels, measured.rows)
        else:
            return before.series
        cache[device.uuid] = Labelled(device, series)
        return series


def made(label_set: LabelSet, of: MadeOf, most: int = MAX_LABELS) -> SeriesSet:
    """The series beside metrics; one has at most ``most`` labels, as far as tenants write them."""
    match of:
        case Part(device, quantities):
            rows = tuple(_row(POD_PARTS[one]) for one in quantities)
            return SeriesSet(labels(label_set, device, most), rows, "part")
        case Errors(device, codes):
            return SeriesSet(
                labels(label_set, device, most), tuple(_row(POD_XID_ERRORS, one) for one in codes), "errors"
            )
        case Rest(device, quantities, split, conflict, xids):
            unattributed = [_row(UNATTRIBUTED[one]) for one in quantities]
            scaled = [_row(SPLIT_SCALED)] if split else []
            reason = [_row(CONFLICT, sanitised(conflict))] if conflict is not None else []
            errors = [_row(XID_ERRORS, code) for code in xids]
            return SeriesSet(labels(label_set, device, most), (*unattributed, *scaled, *reason, *errors), "rest")
        case Described(device, info):
            about = known((name, info.get(name)) for name in DEVICE_INFO.labels)
            return SeriesSet(tuple(sorted([*labels(label_set, device, most), *about])), _INFO_ROWS, "info")
        case PodInfo(where, pod):
            return SeriesSet(pod_info_labels(where, pod, most), _POD_ROWS, "pod")


def beside(label_set: LabelSet, where: Place, devices: Sequence[tuple[AttributedDevice, Pods]]) -> Iterator[Beside]:
    """All that a tick writes beside its devices' metrics; each device is given with the pods that hold it."""
    holding: dict[HoldingPod, Holder] = {}
    for device, pods in devices:
        for pod, holders in pods.items():
            holding[pod] = holders[-1]
        if device.info:
            yield Beside(("info", device.uuid), Described(identity(where, device), device.info), _ONE)
        yield from _rest(where, device)
        yield from _parts(label_set, where, device, pods)
        if device.events:
            yield from _errors(label_set, where, device)
    if label_set == "otel":
        for pod, holder in holding.items():
            yield Beside(("pod", pod.namespace, pod.pod, pod.pod_uid or ""), PodInfo(where, held(holder)), _ONE)


def _rest(where: Place, device: AttributedDevice) -> Iterator[Beside]:
    """What is nobody's of a device, and what went wrong on it."""
    split = device.unattributed is not None or any(holder.parts is not None for holder in device.holders)
    if not (split or device.conflict or device.xids):
        return
    rest = _quantities(device.unattributed)
    xids = {sanitised(code): float(count) for code, count in device.xids.items() if code}
    of = Rest(identity(where, device), tuple(rest), split, device.conflict or None, tuple(xids))
    flags = [float(device.split_scaled)] * split + [1.0] * (of.conflict is not None)
    if values := [*rest.values(), *flags, *xids.values()]:
        yield Beside(("rest", device.uuid), of, values)


def _parts(label_set: LabelSet, where: Place, device: AttributedDevice, pods: Pods) -> Iterator[Beside]:
    """The part of each pod: the sum of its containers'."""
    split: dict[tuple[str, ...], list[Holder]] = {}
    for pod, of_pod in pods.items():
        for holder in of_pod:
            if holder.parts is not None:
                split.setdefault(_pod_key(label_set, pod), []).append(holder)
    for key, holders in split.items():
        parts = [_quantities(holder.parts) for holder in holders]
        sums = {one: sum(part.get(one, 0.0) for part in parts) for one in _QUANTITIES if any(one in p for p in parts)}
        if sums:
            of = Part(identity(where, device, held(holders[0])), tuple(sums))
            yield Beside(("part", device.uuid, *key), of, list(sums.values()))


def _errors(label_set: LabelSet, where: Place, device: AttributedDevice) -> Iterator[Beside]:
    """The XID errors of each pod that alone held the device when they came."""
    pods: dict[tuple[str, ...], tuple[Held, Counter[str]]] = {}
    for event in device.events or ():
        if event.kind == "xid" and event.code is not None:
            then = by_pod(event.held_by(device.holders))
            for pod, holders in then.items() if len(then) == 1 else ():
                _, counts = pods.setdefault(_pod_key(label_set, pod), (held(holders[0]), Counter()))
                counts[str(event.code)] += 1
    for key, (alone, counts) in pods.items():
        of = Errors(identity(where, device, alone), tuple(sorted(counts)))
        yield Beside(("errors", device.uuid, *key), of, [float(counts[code]) for code in of.codes])


def _pod_key(label_set: LabelSet, pod: HoldingPod) -> tuple[str, ...]:
    """A pod that was created again is another one only where its uid is a label."""
    return pod.namespace, pod.pod, (pod.pod_uid or "") if label_set == "otel" else ""


def _quantities(parts: Parts | None) -> Mapping[str, float]:
    values = ((one, getattr(parts, one, None)) for one in _QUANTITIES)
    return {one: float(value) for one, value in values if value is not None}


def _row(info: Info, *values: str) -> Row:
    return Row(info.name, tuple(zip(info.labels, values, strict=True)), info.kind, info.help, primary=False)
