"""A tick of gpu.attributed -> series and their values: for every sink that writes series.

In: a tick, and the profiles to write it in, as values. Out: the metrics of each device in all of them; beside them,
called the same with all names, the pods' parts of devices that are split and what is nobody's, conflicts, XID errors
and what each device is, and ``gpu_pod_info``.
State: what was last labelled, in a cache of each node, and the rows of each set of known metrics. Series of which all
that they are made of is the same are the same object, so that a sink works out its encoding only when something
changes. Every set is made in one place, ``Translator._set``, once; what is to be done to labels is done there.

Profiles with which a device has the same labels share one set; of two series of one name and the same labels of their
own, that of the profile that is named first is in it. What profiles with other label names call the same is told
apart by these labels; what is the same with two label sets (of a device of which little is known, say) is written once.

Only a part and a pod's XID errors name a pod, and as they would a sole holder, without a container: the rest is the
device's, whoever holds it. An XID error is of the pod that held the device when it came.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from sinks.series.labels import (
    MAX_LABELS,
    DeviceIdentity,
    Held,
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
from sinks.series.model import Row, Rows, SampleGroup, SeriesSet, Subject, Value
from topics.attributed import AttributedDevice, AttributedSample, Holder, HoldingPod, Parts, by_pod
from topics.catalogue import (
    CATALOGUE,
    CONFLICT,
    DEVICE_INFO,
    HOLDERS,
    POD_INFO,
    POD_PARTS,
    POD_XID_ERRORS,
    SPLIT_SCALED,
    UNATTRIBUTED,
    XID_ERRORS,
)
from topics.metric import Info, Labels, Ratio, Series
from topics.profiles import INFO, LabelNames, Profile, saying_unit

_MEMO_SIZE = 4096
_LAYOUTS = 1024
_SPARE = 64
_ONE = (1.0,)

# -- a device's metrics: rows and values in some profiles

Metrics = Mapping[str, Value | None]


class Measured(NamedTuple):
    """A device's metrics in some profiles: rows and a value for each."""

    rows: Rows
    values: list[float]


class MetricNames:
    """How a device becomes rows and values in profiles that share its labels, remembered by what is known of it.

    ``counted``: the keys of each profile whose values another one counts.
    """

    def __init__(self, profiles: Sequence[Profile], counted: Mapping[Profile, Collection[str]]) -> None:
        self._series: list[tuple[str, Series, bool]] = []
        self._ratios: list[Ratio] = []
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._rows: dict[Rows, Rows] = {}
        self._further = any(profile.further for profile in profiles)
        named: set[tuple[str, Labels]] = set()
        for profile in profiles:
            for key in [key for key in CATALOGUE if key in profile.series]:
                for number, one in enumerate(profile.series[key]):
                    if (one.name, one.labels) not in named:
                        named.add((one.name, one.labels))
                        self._series.append((key, one, not number and key not in counted[profile]))
            for ratio in profile.ratios:
                if (ratio.name, ratio.labels) not in named:
                    named.add((ratio.name, ratio.labels))
                    self._ratios.append(ratio)

    def measure(self, metrics: Metrics, holders: int | None = None) -> Measured:
        """The rows of what is known; equal rows are the same object. ``holders`` None: that is not known."""
        keys = tuple(metrics)
        if None in metrics.values():
            keys = tuple(key for key in keys if metrics[key] is not None)
        if holders is not None and keys and self._further:
            keys, metrics = (*keys, HOLDERS.name), {**metrics, HOLDERS.name: holders}
        layout = self._layouts.get(keys)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
                self._rows.clear()
            layout = self._layouts[keys] = _Layout(self._series, self._ratios, keys, self._same)
        values = layout.values(metrics)
        if None in values[layout.plain :]:
            there = [(row, value) for row, value in zip(layout.rows, values, strict=True) if value is not None]
            return Measured(self._same(row for row, _ in there), [value for _, value in there])
        return Measured(layout.rows, values)  # type: ignore[arg-type] # None was looked for

    def _same(self, rows: Iterable[Row]) -> Rows:
        found = tuple(rows)
        return self._rows.setdefault(found, found)


class _Layout:
    """The rows of a device of which just these keys are known; those past ``plain`` are made of several keys."""

    def __init__(
        self,
        series: Iterable[tuple[str, Series, bool]],
        ratios: Iterable[Ratio],
        keys: tuple[str, ...],
        same: Callable[[Iterable[Row]], Rows],
    ) -> None:
        self._ratios = [ratio for ratio in ratios if all(key in keys for key in ratio.keys)]
        self._converters: list[tuple[str, Callable[[Any], float]]] = []
        rows: list[Row] = []
        for key, one, primary in series:
            if key in keys:
                as_it_is = one.scale == 1.0 and one.bits is None
                self._converters.append((key, float if as_it_is else _Scaled(one.of).__getitem__))
                rows.append(Row(one.name, one.labels, one.kind, one.help, one.unit, primary))
        if rows and HOLDERS.name in keys:
            self._converters.append((HOLDERS.name, float))
            rows.append(_row(HOLDERS))
        self.plain = len(rows)
        made = [Row(one.name, one.labels, one.kind, one.help, one.unit, primary=False) for one in self._ratios]
        self.rows = same([*rows, *made])

    def values(self, metrics: Metrics) -> list[float | None]:
        """The value of each row; None for a ratio of which the denominator is zero."""
        values: list[float | None] = [convert(metrics[key]) for key, convert in self._converters]
        for ratio in self._ratios:
            numerator, *denominators = [metrics[key] for key in ratio.keys]
            values.append(ratio.of(numerator, sum(denominators)))  # type: ignore[arg-type] # all of them are known
        return values


class _Scaled(dict[Any, float]):
    """The values of a series by those of its key, remembered: a GPU's clocks, temperatures and percentages are few."""

    def __init__(self, of: Callable[[Value], float]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, value: Value) -> float:
        if len(self) >= _MEMO_SIZE:
            self.clear()
        made = self[value] = self._of(value)
        return made


@lru_cache(maxsize=_MEMO_SIZE)
def _row(info: Info, *values: str) -> Row:
    own = tuple(zip(info.labels, values, strict=True))
    return Row(info.name, own, info.kind, saying_unit(info.help, info.unit), info.unit, primary=False)


# -- what is beside them


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
    """A pod that holds a device of the node, and all that is written on it."""

    place: Place
    pod: Held


class Beside(NamedTuple):
    """Series of one kind that are beside a device's metrics. ``values`` has one for each row."""

    key: tuple[str, ...]
    of: OfDevice | Described | PodInfo
    values: Sequence[float]


Pods = Mapping[HoldingPod, list[Holder]]
"""Who holds a device, by pod."""


def made_of(
    names: LabelNames, of: OfDevice | Described | PodInfo, most: int = MAX_LABELS
) -> tuple[Labels, Rows, Subject]:
    """What a set beside metrics is made of; tenants' labels never make one have more than ``most``."""
    match of:
        case OfDevice(subject, device, rows):
            return labels(names, device, most), rows, subject
        case Described(device, info):
            about = known((name, info.get(name)) for name in DEVICE_INFO.labels)
            row = Row(DEVICE_INFO.name, (), "gauge", DEVICE_INFO.help, primary=False)
            return tuple(sorted([*labels(names, device, most), *about])), (row,), "info"
        case PodInfo(where, pod):
            return pod_info_labels(where, pod, most), (_row(POD_INFO),), "pod"


def beside(
    names: LabelNames, where: Place, devices: Iterable[tuple[AttributedDevice, Pods, DeviceIdentity]]
) -> Iterator[Beside]:
    """All that a tick writes beside its devices' metrics; each device is given with the pods that hold it, and bare."""
    holding: dict[HoldingPod, Holder] = {}
    for device, pods, bare in devices:
        for pod, holders in pods.items():
            holding[pod] = holders[-1]
        if device.info:
            yield Beside(("info", device.uuid), Described(bare, device.info), _ONE)
        has_parts = bool([holder for holder in device.holders if holder.parts is not None])
        is_split = has_parts or device.unattributed is not None
        if (is_split or device.conflict or device.xids) and (rest := _rest(bare, device, is_split=is_split)):
            yield Beside(("rest", device.uuid), OfDevice("rest", bare, tuple(rest)), list(rest.values()))
        if has_parts:
            yield from _parts(names, where, device, pods)
        if device.events:
            yield from _errors(names, where, device)
    if names.tenants:
        for pod, holder in holding.items():
            yield Beside(("pod", pod.namespace, pod.pod, pod.pod_uid or ""), PodInfo(where, held(holder)), _ONE)


def _rest(bare: DeviceIdentity, device: AttributedDevice, *, is_split: bool) -> dict[Row, float]:
    """What is nobody's of a device, and what went wrong on it."""
    rows = {_row(UNATTRIBUTED[one]): value for one, value in _quantities(device.unattributed).items()}
    if is_split:
        rows[_row(SPLIT_SCALED)] = float(device.split_scaled)
    if device.conflict:
        rows[_row(CONFLICT, sanitised(device.conflict))] = 1.0
    return rows | {_row(XID_ERRORS, sanitised(code)): float(count) for code, count in device.xids.items() if code}


def _parts(names: LabelNames, where: Place, device: AttributedDevice, pods: Pods) -> Iterator[Beside]:
    """The part of each pod: the sum of its containers'."""
    split: dict[tuple[str, ...], list[Holder]] = {}
    for pod, of_pod in pods.items():
        for holder in of_pod:
            if holder.parts is not None:
                split.setdefault(_pod_key(names, pod), []).append(holder)
    for key, holders in split.items():
        parts = [_quantities(holder.parts) for holder in holders]
        sums = {one: sum(part.get(one, 0.0) for part in parts) for one in POD_PARTS if any(one in p for p in parts)}
        if sums:
            rows = tuple([_row(POD_PARTS[one]) for one in sums])
            of = OfDevice("part", identity(where, device, held(holders[0])), rows)
            yield Beside(("part", device.uuid, *key), of, list(sums.values()))


def _errors(names: LabelNames, where: Place, device: AttributedDevice) -> Iterator[Beside]:
    """The XID errors of each pod that alone held the device when they came."""
    pods: dict[tuple[str, ...], tuple[Held, Counter[str]]] = {}
    for event in device.events or ():
        if event.kind == "xid" and event.code is not None:
            then = by_pod(event.held_by(device.holders))
            for pod, holders in then.items() if len(then) == 1 else ():
                _, counts = pods.setdefault(_pod_key(names, pod), (held(holders[0]), Counter()))
                counts[str(event.code)] += 1
    for key, (alone, counts) in pods.items():
        codes = sorted(counts)
        rows = tuple([_row(POD_XID_ERRORS, code) for code in codes])
        of = OfDevice("errors", identity(where, device, alone), rows)
        yield Beside(("errors", device.uuid, *key), of, [float(counts[code]) for code in codes])


def _pod_key(names: LabelNames, pod: HoldingPod) -> tuple[str, ...]:
    """A pod that was created again is another one only where its uid is a label."""
    return pod.namespace, pod.pod, (pod.pod_uid or "") if names.pod_uid else ""


def _quantities(parts: Parts | None) -> Mapping[str, float]:
    values = ((one, getattr(parts, one, None)) for one in POD_PARTS)
    return {one: float(value) for one, value in values if value is not None}


# -- a tick

Key = str | tuple[str, ...]
"""Of a set within its node: a device's uuid for its metrics, else a kind and what it is about."""


@dataclass(slots=True)
class _Written:
    """A device's metrics in the profiles with which it has these labels, and the set of them that was written last."""

    labels: Labels
    names: MetricNames
    series: SeriesSet | None = None


class _Labelled(NamedTuple):
    """A device as it was labelled last: ``face`` is all of the record that this was made of."""

    face: tuple[object, ...]
    pods: Pods
    bare: DeviceIdentity
    of: DeviceIdentity
    written: list[_Written]


@dataclass(slots=True)
class Cache:
    """Of one node: the sets of each device's metrics, and those beside them, each with all that it was made of.

    ``profiles``: those in which it was written.
    """

    profiles: tuple[Profile, ...] = ()
    devices: dict[str, _Labelled] = field(default_factory=dict)
    beside: dict[tuple[str, ...], tuple[OfDevice | Described | PodInfo, SeriesSet]] = field(default_factory=dict)

    def prune(self, keys: Sequence[Key]) -> None:
        """Forget what is not there any more, when that is more than what is."""
        if len(self.devices) + len(self.beside) > 2 * len(keys) + _SPARE:
            there = set(keys)
            self.devices = {key: was for key, was in self.devices.items() if key in there}
            self.beside = {key: was for key, was in self.beside.items() if key in there}


class Translator:
    """Translates ticks, in the given profiles; no tenant makes a series have more than ``max_labels``.

    ``profiles`` may be replaced by others: from the next tick of a node on, it is written in these.
    """

    def __init__(self, profiles: Sequence[Profile], max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self.profiles = tuple(profiles)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """What a device is written in, the first of them first."""
        return self._profiles

    @profiles.setter
    def profiles(self, profiles: tuple[Profile, ...]) -> None:
        self._profiles = profiles
        self._label_names = tuple({one.labels.name: one.labels for one in profiles if one.further}.values())
        self._info = any(profile.labels.info for profile in profiles)
        self._metric_names: dict[tuple[Profile, ...], MetricNames] = {}
        self._counted: dict[Profile, set[str]] = {}
        counted: set[str] = set()
        for profile in profiles:
            self._counted[profile] = set(counted)
            counted |= profile.series.keys()

    def translate(self, sample: AttributedSample, cache: Cache) -> tuple[list[Key], list[SampleGroup]]:
        """All series of a tick that have a value, and the key of each set. ``cache`` is its node's."""
        if cache.profiles is not self._profiles:
            cache.profiles, cache.devices, cache.beside = self._profiles, {}, {}
        where = place(sample)
        keys: list[Key] = []
        groups: list[SampleGroup] = []
        devices: list[tuple[AttributedDevice, Pods, DeviceIdentity]] = []
        for device in sample.devices:
            was = self._labelled(where, device, cache)
            devices.append((device, was.pods, was.bare))
            holders = None if sample.attribution == "none" else len(was.pods)
            for number, written in enumerate(was.written):
                rows, values = written.names.measure(device.metrics, holders)
                if not rows:
                    continue
                found = written.series
                if found is None or found.rows is not rows:
                    found = written.series = self._set(written.labels, rows, "metrics")
                keys.append(("metrics", device.uuid, str(number)) if number else device.uuid)
                groups.append(SampleGroup(found, sample.ts_ms, values))
        there: set[tuple[Subject, Labels]] = set()
        for names in self._label_names:
            made = self._beside(names, beside(names, where, devices), cache)
            told = [(key, series, values) for key, series, values in made if not there or series.identity not in there]
            keys += [key for key, _, _ in told]
            groups += [SampleGroup(series, sample.ts_ms, values) for _, series, values in told]
            if len(self._label_names) > 1:
                there.update([series.identity for _, series, _ in told])
        cache.prune(keys)
        return keys, groups

    def _beside(
        self, names: LabelNames, found: Iterable[Beside], cache: Cache
    ) -> Iterator[tuple[tuple[str, ...], SeriesSet, Sequence[float]]]:
        """The sets beside a device's metrics, with their keys and values."""
        for one in found:
            key = one.key if names is self._label_names[0] else (*one.key, names.name)
            of, series = cache.beside.get(key, (None, None))
            if series is None or of != one.of:
                series = self._set(*made_of(names, one.of, self._max_labels))
                cache.beside[key] = one.of, series
            yield key, series, one.values

    def _set(self, names: Labels, rows: Rows, subject: Subject) -> SeriesSet:
        """Makes a set: every one there is, when something of it has changed."""
        return SeriesSet(names, rows, subject)

    def _labelled(self, where: Place, device: AttributedDevice, cache: Cache) -> _Labelled:
        """What labels are made of in a device: what was found before, while the record says the same of it."""
        hardware = (device.index, device.minor, device.vendor, device.model, device.pci_bus_id, device.mig)
        face = (where, *hardware, device.holders, device.jobs, device.info if self._info else None)
        was = cache.devices.get(device.uuid)
        if was is None or was.face != face:
            pods = device.pods()
            job = device.jobs[0] if device.jobs and len(device.jobs) == 1 else None
            info = tuple([device.info.get(name) for name in INFO]) if self._info else ()
            of = identity(where, device, sole_holder(pods), job, info)
            written = was.written if was is not None and was.of == of else self._written(of)
            bare = identity(where, device, info=info)
            was = cache.devices[device.uuid] = _Labelled(face, pods, bare, of, written)
        return was

    def _written(self, of: DeviceIdentity) -> list[_Written]:
        """A device's labels, each with the profiles in which it has them."""
        sharing: dict[Labels, list[Profile]] = {}
        for profile in self._profiles:
            sharing.setdefault(labels(profile.labels, of, self._max_labels), []).append(profile)
        written: list[_Written] = []
        for names, some in sharing.items():
            profiles = tuple(some)
            if profiles not in self._metric_names:
                self._metric_names[profiles] = MetricNames(profiles, self._counted)
            written.append(_Written(names, self._metric_names[profiles]))
        return written
