"""A tick of gpu.attributed -> series and their values: for every sink that writes series.

In: a tick, and the profiles to write it in, as values. Out: the metrics of each device in all of them; beside them,
called the same with all names, the pods' parts of devices that are split and what is nobody's, conflicts, XID errors
and what each device is, and ``gpu_pod_info``.
State: what was last labelled, in a cache of each node, and the rows of each set of known metrics. Series of which all
that they are made of is the same are the same object, so that a sink works out its encoding only when something
changes. Every set is made in one place, ``Translator._make``, once; what is to be done to labels is done there.

Profiles with which a device has the same labels share one set; of two series of one name and the same labels of their
own, that of the profile that is named first is in it. What profiles with other label names call the same is told
apart by these labels; what is the same with two label sets (of a device of which little is known, say) is written once.

Only a part and a pod's XID errors name a pod, and as they would a sole holder, without a container: the rest is the
device's, whoever holds it. An XID error is of the pod that held the device when it came.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import msgspec

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
    meta_labels,
    place,
    pod_info_labels,
    sanitised,
    sole_holder,
)
from sinks.series.model import Key, Row, Rows, SampleGroup, SeriesSet, Subject, Value
from sinks.series.relabel import Relabelling, Withheld
from sinks.series.tick import KEYS, Metrics, SeriesDevice, SeriesTick
from topics.attributed import Holder, HoldingPod, Parts, pods_of
from topics.catalogue import (
    CATALOGUE,
    CONFLICT,
    DEVICE_INFO,
    HOLDERS,
    LAST_XID,
    POD_INFO,
    POD_PARTS,
    POD_XID_ERRORS,
    SPLIT_SCALED,
    UNATTRIBUTED,
    XID_ERRORS,
    XIDS,
)
from topics.metric import Info, Labels, Ratio, Series
from topics.profiles import INFO, LabelNames, Profile, saying_unit

_MEMO_SIZE = 4096
_LAYOUTS = 1024
_SPARE = 64
_ONE = (1.0,)
_NO_COUNTS: Mapping[str, float] = {}

# -- a device's metrics: rows and values in some profiles

_NOTHING: Mapping[str, Value] = {}
_AS_THEY_ARE = Relabelling()


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
        further = any(profile.further for profile in profiles)
        self._counts = [(one.name, _row(one)) for one in (HOLDERS, XIDS) if further]
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        self._last: _Layout | None = None
        self._rows: dict[Rows, Rows] = {}
        named: set[tuple[str, Labels]] = set()
        for profile in profiles:
            for key in [key for key in CATALOGUE if key in profile.series]:
                for number, series in enumerate(profile.series[key]):
                    if (series.name, series.labels) not in named:
                        named.add((series.name, series.labels))
                        self._series.append((key, series, not number and key not in counted[profile]))
            for series in profile.series.get(LAST_XID.name, ()):
                if (series.name, series.labels) not in named:
                    named.add((series.name, series.labels))
                    row = Row(series.name, (), series.kind, series.help, series.unit, primary=False)
                    self._counts.append((LAST_XID.name, row))
            for one in profile.ratios:
                if (one.name, one.labels) not in named:
                    named.add((one.name, one.labels))
                    self._ratios.append(one)

    def measure(
        self, metrics: Metrics, counts: Mapping[str, float] = _NO_COUNTS, rest: Mapping[str, Value] = _NOTHING
    ) -> Measured:
        """The rows of what is known of a device that has metrics, and of the ``counts`` that are known then; equal rows
        are the same object.

        ``rest`` is written in place of the device's own values; what is made of several keys is made of those.
        """
        said = msgspec.structs.astuple(metrics)
        layout = self._last
        if layout is None or not layout.fits(said, counts):
            keys = [key for key, value in zip(KEYS, said, strict=True) if value is not None]
            if not keys:
                return Measured((), [])
            known = (*keys, *counts)
            layout = self._layouts.get(known)
            if layout is None:
                if len(self._layouts) >= _LAYOUTS:
                    self._layouts.clear()
                    self._rows.clear()
                layout = self._layouts[known] = _Layout(self._series, self._ratios, self._counts, known, self._same)
            self._last = layout
        values = layout.values(said, counts)
        if rest:
            values = layout.with_rest(values, rest)
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
        counts: Iterable[tuple[str, Row]],
        keys: tuple[str, ...],
        same: Callable[[Iterable[Row]], Rows],
    ) -> None:
        places = [place for place, key in enumerate(KEYS) if key in keys]
        self._known = itemgetter(places[0], *places)
        self._unknown = len(KEYS) - len(places)
        self._counted = keys[len(places) :]
        self._ratios = [one for one in ratios if all(key in keys for key in one.keys)]
        self._of_ratios = [(key, KEYS.index(key)) for one in self._ratios for key in one.keys]
        self._keys: list[str] = []
        self._converters: list[tuple[int, Callable[[Any], float]]] = []
        rows: list[Row] = []
        for key, one, primary in series:
            if key in keys:
                if one.scale != 1.0 or one.bits is not None:
                    self._converters.append((len(rows), _Scaled(one.of).__getitem__))
                self._keys.append(key)
                rows.append(Row(one.name, one.labels, one.kind, one.help, one.unit, primary))
        self._places = [KEYS.index(key) for key in self._keys]
        self._counts = [key for key, _ in counts if key in keys and rows]
        rows += [row for key, row in counts if key in self._counts]
        self.plain = len(rows)
        made = [Row(one.name, one.labels, one.kind, one.help, one.unit, primary=False) for one in self._ratios]
        self.rows = same([*rows, *made])

    def fits(self, said: tuple[float | None, ...], counts: Mapping[str, float]) -> bool:
        """Whether just its keys are known."""
        return said.count(None) == self._unknown and None not in self._known(said) and tuple(counts) == self._counted

    def values(self, said: tuple[Any, ...], counts: Mapping[str, float]) -> list[float | None]:
        """The value of each row; None for a ratio of which the denominator is zero. ``said``: one for each key."""
        values: list[float | None] = [said[place] for place in self._places]
        for at, convert in self._converters:
            values[at] = convert(values[at])
        values += [counts[key] for key in self._counts]
        if self._ratios:
            of = {key: said[place] for key, place in self._of_ratios}
            values += [one.of(of) for one in self._ratios]
        return values

    def with_rest(self, values: list[float | None], rest: Mapping[str, Value]) -> list[float | None]:
        """The values, but for the keys of which the rest is written."""
        converters = dict(self._converters)
        for at, key in enumerate(self._keys):
            if (value := rest.get(key)) is not None:
                values[at] = converters.get(at, float)(value)
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
    of = (info.name, own, info.kind, saying_unit(info.help, info.unit), info.unit)
    return Row(*of, primary=False, since_start=info.since_start)


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


def made_of(names: LabelNames, of: OfDevice | Described | PodInfo, most: int = MAX_LABELS) -> SeriesSet:
    """A set beside metrics; tenants' labels never make one have more than ``most``."""
    match of:
        case OfDevice(subject, device, rows):
            return SeriesSet(labels(names, device, most), rows, subject)
        case Described(device, info):
            about = known((name, info.get(name)) for name in DEVICE_INFO.labels)
            row = Row(DEVICE_INFO.name, (), "gauge", DEVICE_INFO.help, primary=False)
            return SeriesSet(tuple(sorted([*labels(names, device, most), *about])), (row,), "info")
        case PodInfo(where, pod):
            return SeriesSet(pod_info_labels(where, pod, most), (_row(POD_INFO),), "pod")


def beside(
    names: LabelNames, where: Place, devices: Iterable[tuple[SeriesDevice, Pods, DeviceIdentity]]
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
        if is_split or device.conflict or device.xids:
            rows, values = _rest(device, is_split=is_split)
            if rows:
                yield Beside(("rest", device.uuid), OfDevice("rest", bare, rows), values)
        if has_parts:
            yield from _parts(names, where, device, pods)
        if device.events:
            yield from _errors(names, where, device)
    if names.tenants:
        for pod, holder in holding.items():
            yield Beside(("pod", pod.namespace, pod.pod, pod.pod_uid or ""), PodInfo(where, held(holder)), _ONE)


def _rest(device: SeriesDevice, *, is_split: bool) -> Measured:
    """What is nobody's of a device, and what went wrong on it."""
    rest = _quantities(device.unattributed)
    rows, values = _rows("rest", tuple(rest)), list(rest.values())
    if is_split:
        rows, values = (*rows, _row(SPLIT_SCALED)), [*values, float(device.split_scaled)]
    if device.conflict:
        rows, values = (*rows, _row(CONFLICT, sanitised(device.conflict))), [*values, 1.0]
    for code, count in {sanitised(code): count for code, count in device.xids.items() if code}.items():
        rows, values = (*rows, _row(XID_ERRORS, code)), [*values, float(count)]
    return Measured(rows, values)


def _parts(names: LabelNames, where: Place, device: SeriesDevice, pods: Pods) -> Iterator[Beside]:
    """The part of each pod: the sum of its containers'."""
    split: dict[tuple[str, ...], list[Holder]] = {}
    for pod, of_pod in pods.items():
        for holder in of_pod:
            if holder.parts is not None:
                split.setdefault(_pod_key(names, pod), []).append(holder)
    for key, holders in split.items():
        sums, *more = [_quantities(holder.parts) for holder in holders]
        for part in more:
            sums = {one: sums.get(one, 0.0) + part.get(one, 0.0) for one in POD_PARTS if one in sums or one in part}
        if sums:
            of = OfDevice("part", identity(where, device, held(holders[0])), _rows("part", tuple(sums)))
            yield Beside(("part", device.uuid, *key), of, list(sums.values()))


def _errors(names: LabelNames, where: Place, device: SeriesDevice) -> Iterator[Beside]:
    """The XID errors of each pod that alone held the device when they came."""
    pods: dict[tuple[str, ...], tuple[Held, Counter[str]]] = {}
    for event in device.events or ():
        if event.kind == "xid" and event.code is not None:
            then = pods_of(event.held_by(device.holders))
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


def _quantities(parts: Parts | None) -> dict[str, float]:
    values = msgspec.structs.astuple(parts) if parts is not None else ()
    return {one: float(value) for one, value in zip(POD_PARTS, values, strict=False) if value is not None}


@lru_cache(maxsize=_MEMO_SIZE)
def _rows(of: Literal["part", "rest"], quantities: tuple[str, ...]) -> Rows:
    return tuple([_row((POD_PARTS if of == "part" else UNATTRIBUTED)[one]) for one in quantities])


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


def divide(device: SeriesDevice, pods: Pods, *, uids: bool) -> Divided:
    """A device by pod. Parts and rest come to the device; what no part is known of stays the device's.

    NVML has no utilization of a MIG device: it is the share of the time in which its engines were busy.
    ``uids``: a pod that was created again under its name is another one.
    """
    metrics, parts = device.metrics, dict[PodName, PodPart]()
    busy = metrics.graphics_engine_active_ratio
    if device.mig is not None and busy is not None and metrics.gpu_utilization_ratio is None:
        parts[()] = PodPart(None, {"gpu_utilization_ratio": busy})
    if len(pods) < 2:
        return Divided(parts, _NOTHING)
    by_name: dict[PodName, list[Holder]] = {}
    for pod, holders in pods.items():
        by_name.setdefault((pod.namespace, pod.pod, (pod.pod_uid or "") if uids else ""), []).extend(holders)
    unattributed, rest = _quantities(device.unattributed), dict[str, Value]()
    for name, holders in by_name.items():
        for quantity, value in [found for holder in holders for found in _quantities(holder.parts).items()]:
            key = _DIVIDED[quantity]
            whole = getattr(metrics, key)
            if whole is not None:
                one = len({holder.container for holder in holders}) == 1
                part = parts.setdefault(name, PodPart(held(holders[0], holders[0].container if one else None), {}))
                part.metrics[key] = part.metrics.get(key, 0) + value
                rest[key] = max(0.0, rest.get(key, whole) - value)
    return Divided(parts, rest | {_DIVIDED[one]: value for one, value in unattributed.items() if _DIVIDED[one] in rest})


# -- a tick

Cut = tuple[SeriesSet, tuple[int, ...] | None]
"""What is left of a set, and the numbers of its rows among those that it was made of; None: all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A set that was made of rows, with the labels that relabelling has left it. ``kept``: the numbers of those rows
    that are in it, None for all; ``withheld`` counts the others. What two label sets say ``about`` one thing may be
    the same. ``hashes``: of the labels of each series, if different ones may have become the same."""

    rows: Rows
    series: SeriesSet
    kept: tuple[int, ...] | None
    withheld: Mapping[Withheld, int]
    about: tuple[str, ...] | None
    hashes: tuple[int, ...] | None


@dataclass(slots=True)
class _Written:
    """A device's metrics in the profiles with which it has these labels, and the set of them that was written last."""

    labels: Labels
    names: MetricNames
    made: Made | None = None


class _Labelled(NamedTuple):
    """A device as it was labelled last: ``face`` is all of the record that this was made of."""

    face: tuple[object, ...]
    bare: DeviceIdentity
    of: DeviceIdentity
    written: list[_Written]
    parts: dict[Key, tuple[DeviceIdentity, list[_Written]]]


@dataclass(slots=True, weakref_slot=True, eq=False)
class Cache:
    """Of one node: the sets of each device's metrics, and those beside them, each with all that it was made of.

    ``profiles``: those in which it was written. ``sets`` are those of its last tick, ``cut`` what of each is written,
    None if that is all, and ``withheld`` counts what is not, by reason. ``contested``: some of its series are another
    node's, and have the hashes that are ``claimed`` there.
    """

    profiles: tuple[Profile, ...] = ()
    devices: dict[str, _Labelled] = field(default_factory=dict)
    beside: dict[tuple[str, ...], tuple[OfDevice | Described | PodInfo, Made]] = field(default_factory=dict)
    sets: list[Made] = field(default_factory=list)
    cut: list[Cut] | None = None
    withheld: Counter[Withheld] = field(default_factory=Counter)
    contested: bool = False
    claimed: set[int] = field(default_factory=set)
    last_xids: dict[str, int] = field(default_factory=dict)
    reductions: dict[tuple[Made, tuple[int, ...]], SeriesSet] = field(default_factory=dict)

    def reduced(self, made: Made, rows: tuple[int, ...]) -> SeriesSet:
        """Some of the rows of a set: the same set for the same rows."""
        if (made, rows) not in self.reductions:
            of = made.series
            self.reductions[made, rows] = SeriesSet(of.labels, tuple([of.rows[row] for row in rows]), of.subject)
        return self.reductions[made, rows]

    def prune(self, keys: Sequence[Key]) -> None:
        """Forget what is not there any more, when that is more than what is."""
        if len(self.devices) + len(self.beside) > 2 * len(keys) + _SPARE:
            there, self.reductions = set(keys), {}
            self.devices = {key: was for key, was in self.devices.items() if key in there}
            self.beside = {key: was for key, was in self.beside.items() if key in there}


_NEVER: tuple[None, None] = None, None


class _Found:
    """The sets of a tick, with their keys and values."""

    __slots__ = ("_ts_ms", "groups", "keys", "sets")

    def __init__(self, ts_ms: int) -> None:
        self._ts_ms = ts_ms
        self.keys: list[Key] = []
        self.sets: list[Made] = []
        self.groups: list[SampleGroup] = []

    def add(self, key: Key, made: Made, values: Sequence[Value]) -> None:
        """The next set."""
        self.keys.append(key)
        self.sets.append(made)
        self.groups.append(SampleGroup(made.series, self._ts_ms, values))

    def left(self, cut: Iterable[Cut]) -> tuple[list[Key], list[SampleGroup]]:
        """The sets of which something is left, with those rows of them."""
        keys: list[Key] = []
        groups: list[SampleGroup] = []
        for key, (_, ts_ms, values), (series, rows) in zip(self.keys, self.groups, cut, strict=True):
            if series.rows:
                keys.append(key)
                groups.append(SampleGroup(series, ts_ms, values if rows is None else [values[row] for row in rows]))
        return keys, groups


def _last_xid(device: SeriesDevice, cache: Cache) -> float | None:
    """The code of a device's last XID error, 0 if the producer has seen none. None: of several codes that came before
    this sink's first tick, none is known to be the last.
    """
    seen = [event.code for event in device.events or () if event.kind == "xid" and event.code is not None]
    codes = [int(code) for code in device.xids if code.isdecimal()]
    if seen:
        cache.last_xids[device.uuid] = seen[-1]
    elif not codes:
        cache.last_xids[device.uuid] = 0
    elif device.uuid not in cache.last_xids and len(codes) == 1:
        cache.last_xids[device.uuid] = codes[0]
    return cache.last_xids.get(device.uuid)


class Translator:
    """Translates ticks, in the given profiles; no tenant makes a series have more than ``max_labels``.

    ``profiles`` may be replaced by others: from the next tick of a node on, it is written in these. ``by_pod``: what a
    device does is written for each pod that shares it, and the rest of it for the device. ``on_cut`` hears of how many
    labels of a pod there was no room anywhere, when its labels are made.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        max_labels: int = MAX_LABELS,
        *,
        relabelling: Relabelling = _AS_THEY_ARE,
        by_pod: bool = False,
        on_cut: Callable[[int], object] = int,
    ) -> None:
        self._on_cut = on_cut
        self._max_labels = max_labels - relabelling.more_labels
        self._relabelling, self._by_pod = relabelling, by_pod
        self._claims: WeakValueDictionary[int, Cache] = WeakValueDictionary()
        self.profiles = tuple(profiles)

    @property
    def may_collide(self) -> bool:
        """Whether series of sets with other labels may be the same: rules can make them so."""
        return self._relabelling.may_collide

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """What a device is written in, the first of them first."""
        return self._profiles

    @profiles.setter
    def profiles(self, profiles: tuple[Profile, ...]) -> None:
        self._profiles = profiles
        self._label_names = tuple({one.labels.name: one.labels for one in profiles if one.further}.values())
        self._has_last_xid = any(LAST_XID.name in profile.series for profile in profiles)
        self._info = self._relabelling.with_meta or any(profile.labels.info for profile in profiles)
        self._pod_uids = all(profile.labels.pod_uid for profile in profiles)
        self._metric_names: dict[tuple[Profile, ...], MetricNames] = {}
        self._part_names: dict[tuple[Profile, ...], MetricNames] = {}
        self._counted: dict[Profile, set[str]] = {}
        counted: set[str] = set()
        for profile in profiles:
            self._counted[profile] = set(counted)
            counted |= profile.series.keys()

    def identities(self, series: SeriesSet) -> Sequence[Hashable]:
        """What tells a set's series from all others that are written."""
        if self.may_collide:
            return series.series()
        return [(series.labels, row.name, row.labels) for row in series.rows]

    def translate(self, sample: SeriesTick, cache: Cache) -> tuple[list[Key], list[SampleGroup]]:
        """All series of a tick that have a value, each once, and the key of each set. ``cache`` is its node's.

        What is not written, because of its labels, is counted in ``cache.withheld``.
        """
        if cache.profiles is not self._profiles:
            cache.profiles, cache.devices, cache.beside = self._profiles, {}, {}
        where, found = place(sample), _Found(sample.ts_ms)
        devices = [self._device(where, device, sample, cache, found) for device in sample.devices]
        for names in self._label_names:
            self._beside(names, beside(names, where, devices), cache, found)
        cache.prune(found.keys)
        if found.sets != cache.sets or cache.contested:
            self._choose(found.sets, cache)
        keys, groups = (found.keys, found.groups) if cache.cut is None else found.left(cache.cut)
        for series, _, _ in groups:
            if series.start_ms != sample.run_id:
                series.begin(sample.run_id, (sample.cluster, sample.node))
        return keys, groups

    def _device(
        self, where: Place, device: SeriesDevice, sample: SeriesTick, cache: Cache, found: _Found
    ) -> tuple[SeriesDevice, Pods, DeviceIdentity]:
        """Find the sets of a device's metrics; gives what those beside them are made of."""
        pods = pods_of(device.holders)
        was = self._labelled(where, device, pods, cache)
        counts = {} if sample.attribution == "none" else {HOLDERS.name: float(len(pods))}
        if device.xids or (device.info and device.mig is None):  # who says what a GPU is watches its XIDs
            counts[XIDS.name] = float(sum(device.xids.values())) if device.xids else 0.0
            if self._has_last_xid and (last_xid := _last_xid(device, cache)) is not None:
                counts[LAST_XID.name] = last_xid
        rest = self._parts(device, pods, was, found) if self._by_pod else _NOTHING
        for number, one in enumerate(was.written):
            rows, values = one.names.measure(device.metrics, counts, rest)
            if rows:
                if one.made is None or one.made.rows is not rows:
                    one.made = self._make(SeriesSet(one.labels, rows), was.of, was.of.held)
                found.add(("metrics", device.uuid, str(number)) if number else device.uuid, one.made, values)
        return device, pods, was.bare

    def _parts(self, device: SeriesDevice, pods: Pods, was: _Labelled, found: "_Found") -> Mapping[str, Value]:
        """Find the sets of the pods' parts of a device; the rest is what is written of the device itself."""
        divided = divide(device, pods, uids=self._pod_uids)
        for name, part in divided.parts.items():
            key = ("by_pod", device.uuid, *name)
            of = was.of if part.held is None else was.of._replace(held=part.held)
            before, written = was.parts.get(key, (None, []))
            if before != of:
                written = self._written(of, self._part_names, dict.fromkeys(self._profiles, CATALOGUE.keys()))
                was.parts[key] = of, written
            for number, one in enumerate(written):
                rows, values = one.names.measure(Metrics(**part.metrics))
                if rows:
                    if one.made is None or one.made.rows is not rows:
                        one.made = self._make(SeriesSet(one.labels, rows, "by_pod"), of, of.held)
                    found.add((*key, str(number)), one.made, values)
        return divided.rest

    def _beside(self, names: LabelNames, sets: Iterable[Beside], cache: Cache, found: "_Found") -> None:
        """Find the sets beside the devices' metrics."""
        add, further = found.add, () if names is self._label_names[0] else (names.name,)
        for one in sets:
            key = (*one.key, *further) if further else one.key
            was_of, made = cache.beside.get(key, _NEVER)
            if made is None or was_of != one.of:
                of, pod = one.of if isinstance(one.of, PodInfo) else (one.of.device, one.of.device.held)
                series = made_of(names, one.of, self._max_labels)
                if isinstance(one.of, PodInfo) and (
                    cut := labels_without_room(one.of.pod, series.labels, self._max_labels)
                ):
                    self._on_cut(cut)
                made = self._make(series, of, pod, one.key)
                cache.beside[key] = one.of, made
            add(key, made, one.values)

    def _make(
        self, series: SeriesSet, of: DeviceIdentity | Place, pod: Held | None, about: tuple[str, ...] | None = None
    ) -> Made:
        """A set as it is written: of every one there is, when something of it has changed."""
        meta = meta_labels(of, pod) if self._relabelling.with_meta else {}
        relabelled = self._relabelling.relabel(series, meta)
        hashes = tuple(map(hash, relabelled.series.series())) if self._relabelling.may_collide else None
        return Made(series.rows, *relabelled, about, hashes)

    def _choose(self, sets: list[Made], cache: Cache) -> None:
        """Of series that are the same, the first is written; and none that another node writes.

        Without rules, series are the same only if all of their sets are: rows are told apart by the profiles.
        """
        claimed, cache.claimed = cache.claimed, set()
        cache.sets, cache.withheld, cache.contested = sets, Counter(), False
        cut: list[Cut] = []
        seen: dict[object, tuple[str, ...] | None] = {}
        for one in sets:
            cache.withheld.update(one.withheld)
            series, kept = one.series, one.kept
            if one.hashes is not None:
                rows = [row for row, number in enumerate(one.hashes) if self._is_first(number, one, seen, cache)]
            elif series.identity not in seen:
                seen[series.identity], rows = one.about, list(range(len(series.rows)))
            else:
                again = one.about is None or seen[series.identity] != one.about
                cache.withheld["collision"] += len(series.rows) if again else 0
                rows = []
            if len(rows) < len(series.rows):
                kept = tuple([row if kept is None else kept[row] for row in rows])
                series = cache.reduced(one, tuple(rows))
            cut.append((series, kept))
        for number in claimed - cache.claimed:
            self._claims.pop(number, None)
        cache.withheld = +cache.withheld
        cache.cut = None if all(series.rows and kept is None for series, kept in cut) else cut

    def _is_first(self, number: int, of: Made, seen: dict[object, tuple[str, ...] | None], cache: Cache) -> bool:
        """Whether a series comes for the first time in this tick, and no other node writes it."""
        if number not in seen and self._claims.setdefault(number, cache) is cache:
            seen[number] = of.about
            cache.claimed.add(number)
            return True
        cache.contested |= number not in seen
        cache.withheld["collision"] += of.about is None or seen.get(number) != of.about
        return False

    def _labelled(self, where: Place, device: SeriesDevice, pods: Pods, cache: Cache) -> _Labelled:
        """What labels are made of in a device: what was found before, while the record says the same of it."""
        hardware = (device.index, device.minor, device.vendor, device.model, device.pci_bus_id, device.mig)
        holders = [held(one, one.container) for one in device.holders]  # without their parts, which change all the time
        face = (where, *hardware, holders, device.jobs, device.info if self._info else None)
        was = cache.devices.get(device.uuid)
        if was is None or was.face != face:
            job = device.jobs[0] if device.jobs and len(device.jobs) == 1 else None
            info = tuple([device.info.get(name) for name in INFO]) if self._info else ()
            of = identity(where, device, sole_holder(pods), job, info)
            same = was is not None and was.of == of
            written = was.written if was and same else self._written(of, self._metric_names, self._counted)
            parts = was.parts if was and same and len(was.parts) <= 2 * len(pods) + 1 else {}
            bare = identity(where, device, info=info)
            was = cache.devices[device.uuid] = _Labelled(face, bare, of, written, parts)
        return was

    def _written(
        self,
        of: DeviceIdentity,
        known: dict[tuple[Profile, ...], MetricNames],
        counted: Mapping[Profile, Collection[str]],
    ) -> list[_Written]:
        """A device's labels, each with the profiles in which it has them. ``known`` are the names of some profiles."""
        sharing: dict[Labels, list[Profile]] = {}
        for profile in self._profiles:
            sharing.setdefault(labels(profile.labels, of, self._max_labels), []).append(profile)
        written: list[_Written] = []
        for names, some in sharing.items():
            profiles = tuple(some)
            if profiles not in known:
                known[profiles] = MetricNames(profiles, counted)
            written.append(_Written(names, known[profiles]))
        return written
