"""What was computed for a node's last tick: its devices' labels, the sets of series, and which of them are written.

It is valid for as long as its inputs stay the same; :mod:`sinks.series.translation` fills it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sinks.series.extras import HeldDevice, Source, SplitValues, ValueSource
from sinks.series.labels import DeviceIdentity
from sinks.series.metrics import NO_REST, Counts, DeviceValues, Layout, MetricNames
from sinks.series.model import Key, Rows, SeriesSet, Subject, Value
from sinks.series.relabel import Withheld
from topics.metric import Labels
from topics.profiles import Profile

_SPARE = 8


@dataclass(slots=True, eq=False)
class RelabelledSet:
    """A set after relabelling, and the ``rows`` that it was made of.

    ``kept``: the numbers of the rows that are still in it, None for all; ``withheld`` counts the others by reason.
    ``about``: what the set is about. Two label sets about the same thing may have equal series.
    ``hashes``: of the labels of each series, None if relabelling cannot make series equal.
    """

    rows: Rows
    series: SeriesSet
    kept: tuple[int, ...] | None
    withheld: Mapping[Withheld, int]
    about: tuple[str, ...] | None
    hashes: tuple[int, ...] | None


@dataclass(slots=True, eq=False)
class MetricSet:
    """The metrics of a device, or of a pod's part of it, in the profiles that share its labels.

    ``layout`` and ``relabelled``: those of the last tick.
    """

    key: Key
    device: DeviceIdentity
    subject: Subject
    labels: Labels
    names: MetricNames
    layout: Layout | None = None
    relabelled: RelabelledSet | None = None


class ExtraSet(NamedTuple):
    """A set beside the metrics. ``values``: its values if all of them are constants, otherwise None."""

    key: Key
    relabelled: RelabelledSet
    sources: tuple[ValueSource, ...]
    values: list[float] | None


@dataclass(slots=True, eq=False)
class LabelledDevice:
    """A device with its labels, and the part of its record that they were made of.

    ``own_pairs``: by label names, the labels that do not depend on the holder. ``parts``: the metric sets of each pod's
    part, with the identity that they were made of. ``extras``: by label names, the sets beside its metrics, for split
    values of which just these are ``known``.
    """

    held: HeldDevice
    attribution: str
    counts: Counts
    identity: DeviceIdentity
    own_pairs: dict[str, list[tuple[str, str]]]
    metrics: list[MetricSet]
    parts: dict[Key, tuple[DeviceIdentity, list[MetricSet]]]
    known: tuple[bool, ...] = ()
    extras: dict[str, list[ExtraSet]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class MeasuredTick:
    """The values of a tick: for each metric set that has rows, the rows and their values; for each device, its split
    values and which of them are known."""

    metrics: list[MetricSet] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    values: list[Sequence[Value]] = field(default_factory=list)
    known: list[tuple[bool, ...]] = field(default_factory=list)
    split_values: list[SplitValues] = field(default_factory=list)

    @property
    def shape(self) -> tuple[object, ...]:
        """All of it except values: ticks with the same labels and equal shapes have the same sets."""
        return self.metrics, self.rows, self.known

    def measure(self, sets: Iterable[MetricSet], values: DeviceValues, rest: Mapping[str, Value] = NO_REST) -> None:
        """Add the values of a device, or of a pod's part of it. ``rest`` replaces the device's own values."""
        for metrics in sets:
            rows, row_values, metrics.layout = metrics.names.measure(values, rest, metrics.layout)
            if rows:
                self.metrics.append(metrics)
                self.rows.append(rows)
                self.values.append(row_values)


class End(NamedTuple):
    """The end of a series: the offset and the time of the tick that lacks it."""

    offset: int
    ts_ms: int


@dataclass(slots=True, weakref_slot=True, eq=False)
class Cache:
    """The sets of one node, each with its inputs.

    Inputs: ``profiles``; ``label_inputs``, all that labels are made of; ``producer``, when its producer was started,
    and the node; ``shape``, that of the last tick.

    By what they are about: ``devices``, ``extras`` and, by label names, ``pod_infos``.

    Of the last tick: ``labelled``, its devices; ``keys`` and ``sets``, all its sets; ``extra_values``, the values of
    those beside the metrics; ``changing``, for each set with values that change, its number, that of its device and
    where the values come from; ``written``, the sets that are written and their keys. ``selection`` says of which set
    each of those is, and of which of its rows; None if everything is written. ``withheld`` counts what is not written,
    by reason. ``contested``: another node writes some of its series. ``claimed``: the hashes of series that this node
    writes. ``ending``: the hashes of those that it wrote, and that no other node writes before their ends are written.
    ``subsets``: its sets that have some rows of another set only.
    """

    profiles: tuple[Profile, ...] = ()
    devices: dict[str, LabelledDevice] = field(default_factory=dict)
    extras: dict[tuple[str, ...], tuple[Source, RelabelledSet]] = field(default_factory=dict)
    label_inputs: tuple[object, ...] = ()
    labelled: list[LabelledDevice] = field(default_factory=list)
    pod_infos: dict[str, list[ExtraSet]] = field(default_factory=dict)
    shape: tuple[object, ...] = ()
    keys: list[Key] = field(default_factory=list)
    sets: list[RelabelledSet] = field(default_factory=list)
    extra_values: list[Sequence[Value]] = field(default_factory=list)
    changing: list[tuple[int, int, tuple[ValueSource, ...]]] = field(default_factory=list)
    written: tuple[list[Key], list[SeriesSet]] = field(default_factory=lambda: ([], []))
    selection: list[tuple[int, tuple[int, ...] | None]] | None = None
    withheld: Counter[Withheld] = field(default_factory=Counter)
    contested: bool = False
    claimed: set[int] = field(default_factory=set)
    ending: dict[int, End] = field(default_factory=dict)
    producer: tuple[int, tuple[str, str]] = 0, ("", "")
    last_xids: dict[str, float] = field(default_factory=dict)
    subsets: dict[tuple[RelabelledSet, tuple[int, ...]], SeriesSet] = field(default_factory=dict)

    def end(self, hashes: Iterable[int], offset: int, ts_ms: int) -> None:
        """Some series end with the tick of this offset and time; those that it has go on."""
        self.ending |= dict.fromkeys(hashes, End(offset, ts_ms))
        for digest in self.ending.keys() & self.claimed:
            del self.ending[digest]

    def prune(self) -> None:
        """Forget devices and sets that the last tick does not have, once they outnumber those that it has."""
        if len(self.devices) + len(self.extras) > 2 * len(self.keys) + _SPARE:
            present = set(self.keys)
            self.devices = {key: device for key, device in self.devices.items() if key in present}
            self.extras = {key: extra for key, extra in self.extras.items() if key in present}
            listed = {labelled.held.device.uuid for labelled in self.labelled}
            self.last_xids = {uuid: code for uuid, code in self.last_xids.items() if uuid in listed}
