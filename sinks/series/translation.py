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
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple
from weakref import WeakValueDictionary

from sinks.series.beside import (
    Beside,
    Described,
    Numbers,
    OfDevice,
    Pick,
    PodInfo,
    Pods,
    beside,
    divide,
    made_of,
    numbers,
    pod_infos,
    values,
)
from sinks.series.labels import (
    MAX_LABELS,
    DeviceIdentity,
    Held,
    Place,
    identity,
    labels,
    labels_without_room,
    meta_labels,
    place,
    sole_holder,
)
from sinks.series.metrics import NOTHING, Counts, Layout, MetricNames
from sinks.series.model import Key, Rows, SampleGroup, SeriesSet, Value
from sinks.series.relabel import Relabelling, Withheld
from sinks.series.tick import DeviceReading, Metrics, SeriesDevice, SeriesTick
from topics.attributed import pods_of
from topics.catalogue import CATALOGUE, LAST_XID
from topics.metric import Labels
from topics.profiles import INFO, LabelNames, Profile

_SPARE = 64
_AS_THEY_ARE = Relabelling()

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
    layout: Layout | None = None


@dataclass(slots=True, eq=False)
class _Labelled:
    """A device as it was labelled last, and all of its record that this was made of.

    ``beside``, by label names: the sets beside its metrics, with their keys and where their values come from; they are
    those for numbers of which just these are ``known``.
    """

    device: SeriesDevice
    where: Place
    attribution: str
    pods: Pods
    counts: Counts
    bare: DeviceIdentity
    of: DeviceIdentity
    written: list[_Written]
    parts: dict[Key, tuple[DeviceIdentity, list[_Written]]]
    known: tuple[bool, ...] = ()
    beside: dict[str, list["_MadeBeside"]] = field(default_factory=dict)


class _MadeBeside(NamedTuple):
    """A set beside metrics. ``values`` are its own if no number is among them."""

    key: Key
    made: Made
    picks: tuple[Pick, ...]
    values: list[float] | None


@dataclass(slots=True, weakref_slot=True, eq=False)
class Cache:
    """Of one node: the sets of each device's metrics, and those beside them, each with all that it was made of.

    ``profiles``: those in which it was written. ``labelled`` are the devices of its last tick, and ``pods``, by label
    names, the sets of the pods that held them. ``sets`` are those of its last tick, ``cut`` what of each is written,
    None if that is all, and ``withheld`` counts what is not, by reason. ``contested``: some of its series are another
    node's, and have the hashes that are ``claimed`` there.
    """

    profiles: tuple[Profile, ...] = ()
    devices: dict[str, _Labelled] = field(default_factory=dict)
    beside: dict[tuple[str, ...], tuple[OfDevice | Described | PodInfo, Made]] = field(default_factory=dict)
    labelled: list[_Labelled] = field(default_factory=list)
    pods: dict[str, list[_MadeBeside]] = field(default_factory=dict)
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

    __slots__ = ("keys", "sets", "values")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.sets: list[Made] = []
        self.values: list[Sequence[Value]] = []

    def add(self, key: Key, made: Made, values: Sequence[Value]) -> None:
        """The next set."""
        self.keys.append(key)
        self.sets.append(made)
        self.values.append(values)

    def groups(self, ts_ms: int) -> list[SampleGroup]:
        """All of it."""
        return list(map(SampleGroup, [made.series for made in self.sets], repeat(ts_ms), self.values))

    def left(self, ts_ms: int, cut: Iterable[Cut]) -> tuple[list[Key], list[SampleGroup]]:
        """The sets of which something is left, with those rows of them."""
        keys: list[Key] = []
        groups: list[SampleGroup] = []
        for key, of, (series, rows) in zip(self.keys, self.values, cut, strict=True):
            if series.rows:
                keys.append(key)
                groups.append(SampleGroup(series, ts_ms, of if rows is None else [of[row] for row in rows]))
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
            cache.profiles, cache.devices, cache.beside, cache.labelled = self._profiles, {}, {}, []
        found = _Found()
        self._find(sample, cache, found)
        cache.prune(found.keys)
        if found.sets != cache.sets or cache.contested:
            self._choose(found.sets, cache)
        ts_ms = sample.ts_ms
        keys, groups = (found.keys, found.groups(ts_ms)) if cache.cut is None else found.left(ts_ms, cache.cut)
        for series, _, _ in groups:
            if series.start_ms != sample.run_id:
                series.begin(sample.run_id, (sample.cluster, sample.node))
        return keys, groups

    def _find(self, sample: SeriesTick, cache: Cache, found: _Found) -> None:
        """Find the sets of a tick: those of the devices' metrics, then those beside them, by label names."""
        where, of = place(sample), [numbers(reading) for reading in sample.devices]
        labelled = [self._labelled(where, reading.device, sample.attribution, cache) for reading in sample.devices]
        for reading, was, its in zip(sample.devices, labelled, of, strict=True):
            self._metrics(reading, was, its, found)
        if labelled != cache.labelled:
            cache.labelled, cache.pods = labelled, {}
        for names in self._label_names:
            for was, its in zip(labelled, of, strict=True):
                self._beside(names, was, its, cache, found)
            if names.tenants and names.name not in cache.pods:
                infos = pod_infos(where, [was.pods for was in labelled])
                cache.pods[names.name] = [self._made(names, one, cache) for one in infos]
            for key, made, picks, known in cache.pods.get(names.name, ()):
                found.add(key, made, known or values(picks, ()))

    def _metrics(self, reading: DeviceReading, was: _Labelled, of: Numbers, found: _Found) -> None:
        """Find the sets of a device's metrics."""
        rest = self._parts(reading, was, of, found) if self._by_pod else NOTHING
        uuid = reading.device.uuid
        for number, one in enumerate(was.written):
            rows, known, one.layout = one.names.measure(reading.metrics, was.counts, rest, layout=one.layout)
            if rows:
                if one.made is None or one.made.rows is not rows:
                    one.made = self._make(SeriesSet(one.labels, rows), was.of, was.of.held)
                found.add(("metrics", uuid, str(number)) if number else uuid, one.made, known)

    def _parts(self, reading: DeviceReading, was: _Labelled, numbers: Numbers, found: _Found) -> Mapping[str, Value]:
        """Find the sets of the pods' parts of a device; the rest is what is written of the device itself."""
        divided = divide(reading, was.pods, numbers, uids=self._pod_uids)
        for name, part in divided.parts.items():
            key = ("by_pod", reading.device.uuid, *name)
            of = was.of if part.held is None else was.of._replace(held=part.held)
            before, written = was.parts.get(key, (None, []))
            if before != of:
                written = self._written(of, self._part_names, dict.fromkeys(self._profiles, CATALOGUE.keys()))
                was.parts[key] = of, written
            for number, one in enumerate(written):
                rows, known, one.layout = one.names.measure(Metrics(**part.metrics), layout=one.layout)
                if rows:
                    if one.made is None or one.made.rows is not rows:
                        one.made = self._make(SeriesSet(one.labels, rows, "by_pod"), of, of.held)
                    found.add((*key, str(number)), one.made, known)
        return divided.rest

    def _beside(self, names: LabelNames, was: _Labelled, of: Numbers, cache: Cache, found: _Found) -> None:
        """Find the sets beside a device's metrics."""
        known = tuple([one is not None for one in of]) if of else ()
        if known != was.known:
            was.known, was.beside = known, {}
        if names.name not in was.beside:
            sets = beside(names, was.where, was.device, was.pods, was.bare, of)
            was.beside[names.name] = [self._made(names, one, cache) for one in sets]
        for key, made, picks, its in was.beside[names.name]:
            found.add(key, made, its or values(picks, of))

    def _made(self, names: LabelNames, one: Beside, cache: Cache) -> _MadeBeside:
        """A set beside the devices' metrics: the one that was made of the same before, if there is one."""
        key = one.key if names is self._label_names[0] else (*one.key, names.name)
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
        alone = all(isinstance(pick, float) for pick in one.picks)
        return _MadeBeside(key, made, one.picks, values(one.picks, ()) if alone else None)

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

    def _labelled(self, where: Place, device: SeriesDevice, attribution: str, cache: Cache) -> _Labelled:
        """What labels are made of in a device: what was found before, while the record says the same of it."""
        was = cache.devices.get(device.uuid)
        if was is None or (was.device, was.where, was.attribution) != (device, where, attribution):
            pods = pods_of(device.holders)
            job = device.jobs[0] if device.jobs and len(device.jobs) == 1 else None
            info = tuple([device.info.get(name) for name in INFO]) if self._info else ()
            of = identity(where, device, sole_holder(pods), job, info)
            same = was is not None and was.of == of
            written = was.written if was and same else self._written(of, self._metric_names, self._counted)
            parts = was.parts if was and same and len(was.parts) <= 2 * len(pods) + 1 else {}
            counts = self._counts(device, None if attribution == "none" else len(pods), cache)
            bare = identity(where, device, info=info)
            was = cache.devices[device.uuid] = _Labelled(
                device, where, attribution, pods, counts, bare, of, written, parts
            )
        return was

    def _counts(self, device: SeriesDevice, holders: int | None, cache: Cache) -> Counts:
        """What a device says beside its metrics."""
        xids = last_xid = None
        if device.xids or (device.info and device.mig is None):  # who says what a GPU is watches its XIDs
            xids = float(sum(device.xids.values())) if device.xids else 0.0
            last_xid = _last_xid(device, cache) if self._has_last_xid else None
        return None if holders is None else float(holders), xids, last_xid

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
