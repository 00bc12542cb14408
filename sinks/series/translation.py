"""A tick of gpu.attributed -> series and their values, for every sink that writes series.

In: a tick, and the profiles to write it in, as values.
Out: the metrics of each device in all profiles; beside them, with the same names in all profiles, the pods' parts and
the rest of shared devices, conflicts, XID errors, what each device is, and ``gpu_pod_info``.
State: a cache for each node, and the rows for each set of known metrics.

As long as the inputs of labels stay the same, and the same values are known, a tick is only new values for the sets of
the last one. Sets with the same inputs are the same object, so a sink computes an encoding only when something has
changed. Every set is made once, in ``Translator._relabel``.

Profiles in which a device has the same labels share one set. If two of them have a series of the same name and row
labels, the set has that of the first profile. Two profiles with different label names may use the same metric names,
because the labels distinguish their series. Series that come out equal (of a device with few known labels, for example)
are written once.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from weakref import WeakValueDictionary

from msgspec.structs import astuple

from sinks.series.cache import Cache, ExtraSet, LabelledDevice, MeasuredTick, MetricSet, RelabelledSet
from sinks.series.extras import (
    ExtraSeries,
    HeldDevice,
    PodInfo,
    SplitValues,
    device_extras,
    divide,
    pod_infos,
    resolve,
    series_set,
    split_values,
)
from sinks.series.labels import (
    MAX_LABELS,
    DeviceIdentity,
    NodeIdentity,
    device_identity,
    device_pairs,
    holder_identity,
    labels,
    meta_labels,
    node_of,
    sole_holder,
)
from sinks.series.metrics import NO_COUNTS, NO_REST, Counts, MetricNames
from sinks.series.model import Key, SampleGroup, SeriesSet, Value
from sinks.series.relabel import NO_RELABELLING, Relabelling
from sinks.series.tick import DeviceReading, Metrics, SeriesDevice, SeriesTick
from topics.attributed import by_pod, pods_of
from topics.catalogue import CATALOGUE, LAST_XID
from topics.metric import Labels
from topics.profiles import INFO, LabelNames, Profile

_MOST_ENDS = 65_536
_NOT_MADE: tuple[None, None] = None, None
_group = partial(tuple.__new__, SampleGroup)


class Translator:
    """Translates ticks in the given profiles; no tenant's labels make a series have more than ``max_labels``.

    ``profiles`` may be replaced: a node is written in the new ones from its next tick on. ``by_pod``: a shared device's
    metrics are written for each pod, and the rest for the device. ``on_cut`` is called when a pod's labels are made,
    with the number of those that have room on no series.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        max_labels: int = MAX_LABELS,
        *,
        relabelling: Relabelling = NO_RELABELLING,
        by_pod: bool = False,
        on_cut: Callable[[int], object] = int,
    ) -> None:
        self._on_cut = on_cut
        self._max_labels = max_labels - relabelling.more_labels
        self._relabelling, self._by_pod = relabelling, by_pod
        self._claims: WeakValueDictionary[int, Cache] = WeakValueDictionary()
        self._ends: dict[int, int] = {}
        self.profiles = tuple(profiles)

    @property
    def may_collide(self) -> bool:
        """Whether sets with different labels may have equal series: relabelling rules can do that."""
        return self._relabelling.may_collide

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles to write in; of equal series, that of the first profile is written."""
        return self._profiles

    @profiles.setter
    def profiles(self, profiles: tuple[Profile, ...]) -> None:
        self._profiles = profiles
        self._label_names = tuple({one.labels.name: one.labels for one in profiles if one.further}.values())
        self._has_last_xid = any(LAST_XID.name in profile.series for profile in profiles)
        self._has_info = self._relabelling.with_meta or any(profile.labels.info for profile in profiles)
        self._has_pod_uids = all(profile.labels.pod_uid for profile in profiles)
        self._metric_names: dict[tuple[Profile, ...], MetricNames] = {}
        self._part_names: dict[tuple[Profile, ...], MetricNames] = {}
        self._counted: dict[Profile, set[str]] = {}
        counted: set[str] = set()
        for profile in profiles:
            self._counted[profile] = set(counted)
            counted |= profile.series.keys()

    def identities(self, series: SeriesSet) -> Sequence[Hashable]:
        """A key for each series of a set that no other written series has."""
        return series.series() if self.may_collide else series.keys()

    def translate(self, sample: SeriesTick, cache: Cache) -> tuple[list[Key], list[SampleGroup]]:
        """All series of a tick that have a value, each once, and the key of each set. ``cache`` is its node's.

        Series that are not written because of their labels are counted in ``cache.withheld``.
        """
        if cache.profiles is not self._profiles:
            cache.profiles, cache.devices, cache.extras, cache.label_inputs = self._profiles, {}, {}, ()
        node, attribution, readings = node_of(sample), sample.attribution, sample.devices
        devices, holders = [reading.device for reading in readings], [reading.holders for reading in readings]
        label_inputs = (node, attribution, sample.run_id, devices, holders)
        if label_inputs != cache.label_inputs:
            cache.labelled = [self._labelled(node, reading, attribution, cache) for reading in readings]
            cache.label_inputs, cache.pod_infos, cache.shape = label_inputs, {}, ()
            cache.producer = (sample.run_id, (node.cluster, node.name))
        tick = MeasuredTick()
        for reading, labelled in zip(readings, cache.labelled, strict=True):
            split = split_values(reading)
            tick.split_values.append(split)
            tick.known.append(tuple([value is not None for value in split]) if split else ())
            rest = self._measure_parts(reading, labelled, split, tick) if self._by_pod else NO_REST
            tick.measure(labelled.metrics, astuple(reading.metrics) + labelled.counts, rest)
        if tick.shape != cache.shape:
            self._update_sets(tick, cache)
            self._select(cache, sample)
        elif cache.contested:
            self._select(cache, sample)
        values = tick.values + cache.extra_values
        for number, device, sources in cache.changing:
            values[number] = resolve(sources, tick.split_values[device])
        if cache.selection is not None:
            selected = [(values[number], rows) for number, rows in cache.selection]
            values = [of_set if rows is None else [of_set[row] for row in rows] for of_set, rows in selected]
        keys, series = cache.written
        return keys, list(map(_group, zip(series, repeat(sample.ts_ms), values, strict=False)))

    def release(self, cache: Cache, kept: Iterable[SeriesSet] = (), upto: float = math.inf) -> None:
        """Let other nodes write the series that a node has ended, with samples that are later than the end.

        ``kept``: the series that are open. ``upto``: the offset of the tick up to which ends are written or refused.
        A series whose end was refused ends with the node's next tick.
        """
        if not cache.ending:
            return
        open_ = {hash(series) for of_set in kept for series in of_set.series()}
        for digest, end in [item for item in cache.ending.items() if item[1].offset <= upto]:
            del cache.ending[digest]
            if digest in open_:
                cache.claimed.add(digest)
                cache.shape = ()
            else:
                del self._claims[digest]
                self._ends[digest] = end.ts_ms
        if len(self._ends) > _MOST_ENDS:
            self._ends.clear()

    def _measure_parts(
        self, reading: DeviceReading, labelled: LabelledDevice, split: SplitValues, tick: MeasuredTick
    ) -> Mapping[str, Value]:
        """Measure the pods' parts of a device. Returns the values to write for the device itself."""
        divided = divide(labelled.held, reading.metrics, split, uids=self._has_pod_uids)
        for name, part in divided.parts.items():
            key = ("by_pod", reading.device.uuid, *name)
            identity = labelled.identity if part.holder is None else labelled.identity._replace(holder=part.holder)
            last_identity, sets = labelled.parts.get(key, (None, []))
            if last_identity != identity:
                all_keys = dict.fromkeys(self._profiles, CATALOGUE.keys())
                sets = self._metric_sets(key, identity, labelled.own_pairs, self._part_names, all_keys)
                labelled.parts[key] = identity, sets
            tick.measure(sets, astuple(Metrics(**part.metrics)) + NO_COUNTS)
        return divided.rest

    def _update_sets(self, tick: MeasuredTick, cache: Cache) -> None:
        """Determine the sets of a tick: those of the devices' metrics, then, by label names, those beside them."""
        cache.shape, cache.keys, cache.sets, cache.extra_values, cache.changing = tick.shape, [], [], [], []
        for metrics, rows in zip(tick.metrics, tick.rows, strict=True):
            if metrics.relabelled is None or metrics.relabelled.rows is not rows:
                metrics.relabelled = self._relabel(SeriesSet(metrics.labels, rows, metrics.subject), metrics.device)
            cache.keys.append(metrics.key)
            cache.sets.append(metrics.relabelled)
        for names in self._label_names:
            sets: list[tuple[int, ExtraSet]] = []
            for number, (labelled, known) in enumerate(zip(cache.labelled, tick.known, strict=True)):
                if known != labelled.known:
                    labelled.known, labelled.extras = known, {}
                if names.name not in labelled.extras:
                    extras = device_extras(names, labelled.held, known)
                    labelled.extras[names.name] = [self._extra_set(names, extra, cache) for extra in extras]
                sets += [(number, extra) for extra in labelled.extras[names.name]]
            if names.tenants and names.name not in cache.pod_infos:
                infos = pod_infos([labelled.held for labelled in cache.labelled])
                cache.pod_infos[names.name] = [self._extra_set(names, info, cache) for info in infos]
            sets += [(-1, info) for info in cache.pod_infos.get(names.name, ())]
            for number, (key, relabelled, sources, values) in sets:
                if values is None:
                    cache.changing.append((len(cache.sets), number, sources))
                cache.keys.append(key)
                cache.sets.append(relabelled)
                cache.extra_values.append(values or ())
        cache.prune()

    def _extra_set(self, names: LabelNames, extra: ExtraSeries, cache: Cache) -> ExtraSet:
        """A set beside the metrics: that of the last tick, if it was made of the same source."""
        key = extra.key if names is self._label_names[0] else (*extra.key, names.name)
        source, relabelled = cache.extras.get(key, _NOT_MADE)
        if relabelled is None or source != extra.source:
            series = series_set(names, extra.source, self._max_labels, self._on_cut)
            subject = extra.source if isinstance(extra.source, PodInfo) else extra.source.device
            relabelled = self._relabel(series, subject, extra.key)
            cache.extras[key] = extra.source, relabelled
        constant = all(isinstance(source, float) for source in extra.values)
        return ExtraSet(key, relabelled, extra.values, resolve(extra.values, ()) if constant else None)

    def _relabel(
        self, series: SeriesSet, subject: DeviceIdentity | PodInfo, about: tuple[str, ...] | None = None
    ) -> RelabelledSet:
        """Apply relabelling to a new set, with all that is known of the device or pod as meta labels."""
        if not self._relabelling.with_meta:
            relabelled = self._relabelling.relabel(series)
        elif isinstance(subject, PodInfo):
            relabelled = self._relabelling.relabel(series, meta_labels(subject.node, holder_identity(subject.holder)))
        else:
            relabelled = self._relabelling.relabel(series, meta_labels(subject, subject.holder))
        hashes = tuple(map(hash, relabelled.series.series())) if self.may_collide else None
        return RelabelledSet(series.rows, *relabelled, about, hashes)

    def _select(self, cache: Cache, sample: SeriesTick) -> None:
        """Select the series of a tick to write: of equal ones the first, and none that another node writes.

        Without rules, two series are equal only if their whole sets are, because profiles have no row twice.
        """
        claimed, cache.claimed = cache.claimed, set()
        last_subsets, cache.subsets = cache.subsets, {}
        cache.withheld, cache.contested = Counter(), False
        keys: list[Key] = []
        written: list[SeriesSet] = []
        selection: list[tuple[int, tuple[int, ...] | None]] = []
        seen: dict[object, tuple[str, ...] | None] = {}
        for number, (key, relabelled) in enumerate(zip(cache.keys, cache.sets, strict=True)):
            series, kept, rows = relabelled.series, relabelled.kept, None
            if relabelled.withheld:
                cache.withheld.update(relabelled.withheld)
            if relabelled.hashes is not None:
                hashes = enumerate(relabelled.hashes)
                rows = [row for row, digest in hashes if self._is_first(digest, relabelled, seen, cache, sample.ts_ms)]
            elif (identity := series.identity) not in seen:
                seen[identity] = relabelled.about
            else:
                collides = relabelled.about is None or seen[identity] != relabelled.about
                cache.withheld["collision"] += len(series.rows) if collides else 0
                rows = []
            if rows is not None and len(rows) < len(series.rows):
                kept = tuple([row if kept is None else kept[row] for row in rows])
                subset = relabelled, tuple(rows)
                series = cache.subsets[subset] = last_subsets.get(subset) or series.part(rows)
            if series.rows:
                series.set_producer(*cache.producer)
                keys.append(key)
                written.append(series)
                selection.append((number, kept))
        cache.end(claimed - cache.claimed, sample.offset, sample.ts_ms)
        cache.withheld = +cache.withheld
        cache.written = keys, written
        is_whole = len(selection) == len(cache.sets) and all(kept is None for _, kept in selection)
        cache.selection = None if is_whole else selection

    def _is_first(
        self,
        digest: int,
        relabelled: RelabelledSet,
        seen: dict[object, tuple[str, ...] | None],
        cache: Cache,
        ts_ms: int,
    ) -> bool:
        """Whether no series with this hash came before in the tick, and no other node writes one, or has at a later
        time."""
        owner = self._claims.get(digest)
        if owner is None and self._ends.get(digest, -1) < ts_ms:
            owner = self._claims[digest] = cache
        if digest not in seen and owner is cache:
            seen[digest] = relabelled.about
            cache.claimed.add(digest)
            return True
        cache.contested |= digest not in seen
        cache.withheld["collision"] += relabelled.about is None or seen.get(digest) != relabelled.about
        return False

    def _labelled(self, node: NodeIdentity, reading: DeviceReading, attribution: str, cache: Cache) -> LabelledDevice:
        """A device with its labels; those of the last tick, as far as their inputs are the same."""
        device, holders = reading.device, reading.holders
        last = cache.devices.get(device.uuid)
        same_device = last is not None and (last.held.node, last.held.device) == (node, device)
        if last is not None and same_device and (last.held.holders, last.attribution) == (holders, attribution):
            return last
        if last is not None and same_device:
            bare, own_pairs = last.held.bare, last.own_pairs
        else:
            info = tuple([device.info.get(name) for name in INFO]) if self._has_info else ()
            bare, own_pairs = device_identity(node, device, info=info), {}
        pods = pods_of(holders)
        job = device.jobs[0] if device.jobs and len(device.jobs) == 1 else None
        identity = bare._replace(holder=sole_holder(pods), job=job)
        if last is not None and last.identity == identity:
            metrics, parts = last.metrics, last.parts if len(last.parts) <= 2 * len(pods) + 1 else {}
        else:
            metrics, parts = self._metric_sets(device.uuid, identity, own_pairs, self._metric_names, self._counted), {}
            for new, old in zip(metrics, last.metrics if last is not None else (), strict=False):
                new.layout = old.layout if new.names is old.names else None
        count = None if (device.attribution or attribution) == "none" else len(pods or by_pod(holders))
        counts = self._counts(device, count, cache, before=last.held.device if last is not None else device)
        held = HeldDevice(node, device, holders, pods, bare, identity.holder)
        labelled = LabelledDevice(held, attribution, counts, identity, own_pairs, metrics, parts)
        cache.devices[device.uuid] = labelled
        return labelled

    def _counts(self, device: SeriesDevice, holders: int | None, cache: Cache, *, before: SeriesDevice) -> Counts:
        """A device's holders and XID errors, beside its metrics. ``before``: the device in the last tick.

        The code of the last error is 0 if the producer has seen none. It is None if there were errors of several codes
        before this sink's first tick, or in ticks that did not come: which came last is unknown then.
        """
        of_holders = None if holders is None else float(holders)
        if not (device.xids or (device.info and device.mig is None)):  # else the producer watches XID errors
            return of_holders, None, None
        xids = float(sum(device.xids.values()))
        if not self._has_last_xid:
            return of_holders, xids, None
        event_codes = [event.code for event in device.events or () if event.kind == "xid" and event.code is not None]
        counts = {code: count for code, count in device.xids.items() if code.isdecimal()}
        counts_before = before.xids if cache.last_xids.get(device.uuid) else {}
        new_codes = [float(code) for code, count in counts.items() if count != counts_before.get(code)]
        if event_codes:
            cache.last_xids[device.uuid] = event_codes[-1]
        elif not counts:
            cache.last_xids[device.uuid] = 0
        elif new_codes:
            cache.last_xids.pop(device.uuid, None)
            if len(new_codes) == 1:
                cache.last_xids[device.uuid] = new_codes[0]
        return of_holders, xids, cache.last_xids.get(device.uuid)

    def _metric_sets(
        self,
        key: Key,
        device: DeviceIdentity,
        own_pairs: dict[str, list[tuple[str, str]]],
        names_by_profiles: dict[tuple[Profile, ...], MetricNames],
        counted: Mapping[Profile, Collection[str]],
    ) -> list[MetricSet]:
        """A metric set for each label set of a device, with the profiles that share it.

        ``own_pairs`` and ``names_by_profiles`` are memos, and get what is missing in them.
        """
        profiles_by_labels: dict[Labels, list[Profile]] = {}
        for profile in self._profiles:
            names = profile.labels
            if names.name not in own_pairs:
                own_pairs[names.name] = device_pairs(names, device)
            label_set = labels(names, device, self._max_labels, own_pairs[names.name])
            profiles_by_labels.setdefault(label_set, []).append(profile)
        sets: list[MetricSet] = []
        for number, (label_set, sharing) in enumerate(profiles_by_labels.items()):
            profiles = tuple(sharing)
            if profiles not in names_by_profiles:
                names_by_profiles[profiles] = MetricNames(profiles, counted)
            if isinstance(key, tuple):
                part_key = (*key, str(number))
                sets.append(MetricSet(part_key, device, "by_pod", label_set, names_by_profiles[profiles]))
            else:
                device_key = ("metrics", key, str(number)) if number else key
                sets.append(MetricSet(device_key, device, "metrics", label_set, names_by_profiles[profiles]))
        return sets
