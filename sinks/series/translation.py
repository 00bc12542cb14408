"""A tick of gpu.attributed -> series and their values: for every sink that writes series.

In: a tick, and the profiles to write it in, as values. Out: the metrics of each device in all of them; beside them,
called the same with all names, the pods' parts of devices that are split and what is nobody's, conflicts, XID errors
and what each device is, and ``gpu_pod_info``.
State: what was last labelled, in a cache of each node, and the rows of each set of known metrics. While all that labels
are made of stays the same, and which values are known, a tick is only values for the sets that there are. Series of
which all that they are made of is the same are the same object, so that a sink works out its encoding only when
something changes. Every set is made in one place, ``Translator._make``, once; what is to be done to labels is done
there.

Profiles with which a device has the same labels share one set; of two series of one name and the same labels of their
own, that of the profile that is named first is in it. What profiles with other label names call the same is told
apart by these labels; what is the same with two label sets (of a device of which little is known, say) is written once.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from itertools import repeat
from weakref import WeakValueDictionary

from msgspec.structs import astuple

from sinks.series.beside import (
    Beside,
    HeldDevice,
    Numbers,
    PodInfo,
    beside,
    divide,
    made_of,
    numbers,
    picked,
    pod_infos,
)
from sinks.series.cache import BesideSet, Cache, LabelledDevice, MeasuredTick, RelabelledSet, WrittenMetrics
from sinks.series.labels import (
    MAX_LABELS,
    DeviceIdentity,
    Place,
    device_pairs,
    held,
    identity,
    labels,
    meta_labels,
    place,
    sole_holder,
)
from sinks.series.metrics import NO_COUNTS, NOTHING, Counts, MetricNames
from sinks.series.model import Key, SampleGroup, SeriesSet, Value
from sinks.series.relabel import Relabelling
from sinks.series.tick import DeviceReading, Metrics, SeriesDevice, SeriesTick
from topics.attributed import pods_of
from topics.catalogue import CATALOGUE, LAST_XID
from topics.metric import Labels
from topics.profiles import INFO, LabelNames, Profile

_AS_THEY_ARE = Relabelling()


_NEVER: tuple[None, None] = None, None
_group = partial(tuple.__new__, SampleGroup)


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
    device does is written for each pod that shares it, and the rest of it for the device. ``on_cut`` is called when a
    pod's labels are made, with how many of them there is no room for anywhere.
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
        self._label(sample, cache)
        tick = MeasuredTick()
        for reading, was in zip(sample.devices, cache.labelled, strict=True):
            of = numbers(reading)
            tick.numbers.append(of)
            tick.known.append(tuple([one is not None for one in of]) if of else ())
            rest = self._parts(reading, was, of, tick) if self._by_pod else NOTHING
            tick.measure(was.written, astuple(reading.metrics) + was.counts, rest)
        if tick.shape != cache.shape:
            self._find(tick, cache)
            self._choose(cache)
        elif cache.contested:
            self._choose(cache)
        values = tick.values + cache.besides
        for number, device, picks in cache.changing:
            values[number] = picked(picks, tick.numbers[device])
        if cache.cut is not None:
            some = [(values[number], rows) for number, rows in cache.cut]
            values = [of_set if rows is None else [of_set[row] for row in rows] for of_set, rows in some]
        keys, series = cache.written
        return keys, list(map(_group, zip(series, repeat(sample.ts_ms), values, strict=False)))

    def _label(self, sample: SeriesTick, cache: Cache) -> None:
        """Label the devices of a tick, if something was said of them that was not said in the tick before."""
        if cache.profiles is not self._profiles:
            cache.profiles, cache.devices, cache.beside, cache.said = self._profiles, {}, {}, ()
        where, attribution, devices = place(sample), sample.attribution, sample.devices
        said = (where, attribution, sample.run_id, [one.device for one in devices], [one.holders for one in devices])
        if said != cache.said:
            cache.labelled = [self._labelled(where, reading, attribution, cache) for reading in devices]
            cache.said, cache.pods, cache.shape, cache.run = said, {}, (), (sample.run_id, (where.cluster, where.node))

    def _parts(
        self, reading: DeviceReading, was: LabelledDevice, of: Numbers, tick: MeasuredTick
    ) -> Mapping[str, Value]:
        """Measure the pods' parts of a device; the rest is what is written of the device itself."""
        divided = divide(was.held, reading.metrics, of, uids=self._pod_uids)
        for name, part in divided.parts.items():
            key = ("by_pod", reading.device.uuid, *name)
            identity = was.of if part.held is None else was.of._replace(held=part.held)
            before, written = was.parts.get(key, (None, []))
            if before != identity:
                all_keys = dict.fromkeys(self._profiles, CATALOGUE.keys())
                written = self._written(key, identity, was.pairs, self._part_names, all_keys)
                was.parts[key] = identity, written
            tick.measure(written, astuple(Metrics(**part.metrics)) + NO_COUNTS)
        return divided.rest

    def _find(self, tick: MeasuredTick, cache: Cache) -> None:
        """Find the sets of a tick: those of the devices' metrics, then those beside them, by label names."""
        cache.shape, cache.keys, cache.sets, cache.besides, cache.changing = tick.shape, [], [], [], []
        for one, rows in zip(tick.written, tick.rows, strict=True):
            if one.made is None or one.made.rows is not rows:
                one.made = self._make(SeriesSet(one.labels, rows, one.subject), one.of)
            cache.keys.append(one.key)
            cache.sets.append(one.made)
        for names in self._label_names:
            sets = [
                (number, one)
                for number, (was, known) in enumerate(zip(cache.labelled, tick.known, strict=True))
                for one in self._beside(names, was, known, cache)
            ]
            if names.tenants and names.name not in cache.pods:
                infos = pod_infos([was.held for was in cache.labelled])
                cache.pods[names.name] = [self._made(names, one, cache) for one in infos]
            sets += [(-1, one) for one in cache.pods.get(names.name, ())]
            for number, (key, made, picks, values) in sets:
                if values is None:
                    cache.changing.append((len(cache.sets), number, picks))
                cache.keys.append(key)
                cache.sets.append(made)
                cache.besides.append(values or ())
        cache.prune()

    def _beside(
        self, names: LabelNames, was: LabelledDevice, known: tuple[bool, ...], cache: Cache
    ) -> Sequence[BesideSet]:
        """The sets beside a device's metrics."""
        if known != was.known:
            was.known, was.beside = known, {}
        if names.name not in was.beside:
            was.beside[names.name] = [self._made(names, one, cache) for one in beside(names, was.held, known)]
        return was.beside[names.name]

    def _made(self, names: LabelNames, one: Beside, cache: Cache) -> BesideSet:
        """A set beside the devices' metrics: the one that was made of the same before, if there is one."""
        key = one.key if names is self._label_names[0] else (*one.key, names.name)
        was_of, made = cache.beside.get(key, _NEVER)
        if made is None or was_of != one.of:
            series = made_of(names, one.of, self._max_labels, self._on_cut)
            made = self._make(series, one.of if isinstance(one.of, PodInfo) else one.of.device, one.key)
            cache.beside[key] = one.of, made
        alone = all(isinstance(pick, float) for pick in one.picks)
        return BesideSet(key, made, one.picks, picked(one.picks, ()) if alone else None)

    def _make(
        self, series: SeriesSet, of: DeviceIdentity | PodInfo, about: tuple[str, ...] | None = None
    ) -> RelabelledSet:
        """A set as it is written: of every one there is, when something of it has changed."""
        meta: Mapping[str, str] = {}
        if self._relabelling.with_meta:
            meta = meta_labels(of.place, held(of.holder)) if isinstance(of, PodInfo) else meta_labels(of, of.held)
        relabelled = self._relabelling.relabel(series, meta)
        hashes = tuple(map(hash, relabelled.series.series())) if self._relabelling.may_collide else None
        return RelabelledSet(series.rows, *relabelled, about, hashes)

    def _choose(self, cache: Cache) -> None:
        """Of series that are the same, the first is written; and none that another node writes.

        Without rules, series are the same only if all of their sets are: rows are told apart by the profiles.
        """
        claimed, cache.claimed = cache.claimed, set()
        cache.withheld, cache.contested = Counter(), False
        keys: list[Key] = []
        written: list[SeriesSet] = []
        cut: list[tuple[int, tuple[int, ...] | None]] = []
        seen: dict[object, tuple[str, ...] | None] = {}
        for number, (key, one) in enumerate(zip(cache.keys, cache.sets, strict=True)):
            series, kept, rows = one.series, one.kept, None
            if one.withheld:
                cache.withheld.update(one.withheld)
            if one.hashes is not None:
                rows = [row for row, its in enumerate(one.hashes) if self._is_first(its, one, seen, cache)]
            elif (identity := series.identity) not in seen:
                seen[identity] = one.about
            else:
                again = one.about is None or seen[identity] != one.about
                cache.withheld["collision"] += len(series.rows) if again else 0
                rows = []
            if rows is not None and len(rows) < len(series.rows):
                kept = tuple([row if kept is None else kept[row] for row in rows])
                series = cache.reduced(one, tuple(rows))
            if series.rows:
                series.begin(*cache.run)
                keys.append(key)
                written.append(series)
                cut.append((number, kept))
        for number in claimed - cache.claimed:
            self._claims.pop(number, None)
        cache.withheld = +cache.withheld
        cache.written = keys, written
        cache.cut = None if len(cut) == len(cache.sets) and all(kept is None for _, kept in cut) else cut

    def _is_first(
        self, number: int, of: RelabelledSet, seen: dict[object, tuple[str, ...] | None], cache: Cache
    ) -> bool:
        """Whether a series comes for the first time in this tick, and no other node writes it."""
        if number not in seen and self._claims.setdefault(number, cache) is cache:
            seen[number] = of.about
            cache.claimed.add(number)
            return True
        cache.contested |= number not in seen
        cache.withheld["collision"] += of.about is None or seen.get(number) != of.about
        return False

    def _labelled(self, where: Place, reading: DeviceReading, attribution: str, cache: Cache) -> LabelledDevice:
        """What labels are made of in a device: what was found before, as far as the record says the same of it."""
        device, holders = reading.device, reading.holders
        was = cache.devices.get(device.uuid)
        same_device = was is not None and (was.held.place, was.held.device) == (where, device)
        if was is not None and same_device and (was.held.holders, was.attribution) == (holders, attribution):
            return was
        info = tuple([device.info.get(name) for name in INFO]) if self._info else ()
        bare, pairs = (was.held.bare, was.pairs) if was and same_device else (identity(where, device, info=info), {})
        pods = pods_of(holders)
        job = device.jobs[0] if device.jobs and len(device.jobs) == 1 else None
        of = bare._replace(held=sole_holder(pods), job=job)
        if was is not None and was.of == of:
            written, parts = was.written, was.parts if len(was.parts) <= 2 * len(pods) + 1 else {}
        else:
            written, parts = self._written(device.uuid, of, pairs, self._metric_names, self._counted), {}
            for one, before in zip(written, was.written if was is not None else (), strict=False):
                one.layout = before.layout if one.names is before.names else None
        counts = self._counts(device, None if attribution == "none" else len(pods), cache)
        held_by = HeldDevice(where, device, holders, pods, bare, of.held)
        cache.devices[device.uuid] = made = LabelledDevice(held_by, attribution, counts, of, pairs, written, parts)
        return made

    def _counts(self, device: SeriesDevice, holders: int | None, cache: Cache) -> Counts:
        """What a device says beside its metrics."""
        xids = last_xid = None
        if device.xids or (device.info and device.mig is None):  # who says what a GPU is watches its XIDs
            xids = float(sum(device.xids.values())) if device.xids else 0.0
            last_xid = _last_xid(device, cache) if self._has_last_xid else None
        return None if holders is None else float(holders), xids, last_xid

    def _written(
        self,
        key: Key,
        of: DeviceIdentity,
        pairs: dict[str, list[tuple[str, str]]],
        known: dict[tuple[Profile, ...], MetricNames],
        counted: Mapping[Profile, Collection[str]],
    ) -> list[WrittenMetrics]:
        """A device's labels, each with the profiles in which it has them. ``known`` are the names of some profiles."""
        sharing: dict[Labels, list[Profile]] = {}
        for profile in self._profiles:
            names = profile.labels
            if names.name not in pairs:
                pairs[names.name] = device_pairs(names, of)
            sharing.setdefault(labels(names, of, self._max_labels, pairs[names.name]), []).append(profile)
        written: list[WrittenMetrics] = []
        for number, (its, some) in enumerate(sharing.items()):
            profiles = tuple(some)
            if profiles not in known:
                known[profiles] = MetricNames(profiles, counted)
            if isinstance(key, tuple):
                written.append(WrittenMetrics((*key, str(number)), of, "by_pod", its, known[profiles]))
            else:
                of_device = ("metrics", key, str(number)) if number else key
                written.append(WrittenMetrics(of_device, of, "metrics", its, known[profiles]))
        return written
