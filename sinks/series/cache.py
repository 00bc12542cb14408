"""What was worked out for a node's last tick: its devices' labels, the sets of series, and what of them is written.

It lasts for as long as what it was made of stays the same; :mod:`sinks.series.translation` fills it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sinks.series.beside import Described, HeldDevice, Numbers, OfDevice, Pick, PodInfo
from sinks.series.labels import DeviceIdentity
from sinks.series.metrics import NOTHING, Counts, Layout, MetricNames, Said
from sinks.series.model import Key, Rows, SeriesSet, Subject, Value
from sinks.series.relabel import Withheld
from topics.metric import Labels
from topics.profiles import Profile

_SPARE = 64


@dataclass(slots=True, eq=False)
class RelabelledSet:
    """A set that was made of rows, with the labels that relabelling has left it. ``kept``: the numbers of those rows
    that are in it, None for all; ``withheld`` counts the others. What two label sets say ``about`` one thing may be
    the same. ``hashes``: of the labels of each series, if different ones may have become the same."""

    rows: Rows
    series: SeriesSet
    kept: tuple[int, ...] | None
    withheld: Mapping[Withheld, int]
    about: tuple[str, ...] | None
    hashes: tuple[int, ...] | None


@dataclass(slots=True, eq=False)
class WrittenMetrics:
    """A device's metrics, or a pod's part of them, in the profiles with which it has these labels; and the set of them
    that was written last."""

    key: Key
    of: DeviceIdentity
    subject: Subject
    labels: Labels
    names: MetricNames
    layout: Layout | None = None
    made: RelabelledSet | None = None


class BesideSet(NamedTuple):
    """A set beside metrics. ``values`` are its own if no number is among them."""

    key: Key
    made: RelabelledSet
    picks: tuple[Pick, ...]
    values: list[float] | None


@dataclass(slots=True, eq=False)
class LabelledDevice:
    """A device as it was labelled last, and all of its record that this was made of.

    ``pairs``, by label names: the labels that are its own, whoever holds it. ``beside``, by label names: the sets
    beside its metrics, for numbers of which just these are ``known``.
    """

    held: HeldDevice
    attribution: str
    counts: Counts
    of: DeviceIdentity
    pairs: dict[str, list[tuple[str, str]]]
    written: list[WrittenMetrics]
    parts: dict[Key, tuple[DeviceIdentity, list[WrittenMetrics]]]
    known: tuple[bool, ...] = ()
    beside: dict[str, list[BesideSet]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class MeasuredTick:
    """The metrics of a tick's devices that have a row, with the rows and their values; and the :data:`Numbers` of each
    device, with which of them are ``known``."""

    written: list[WrittenMetrics] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    values: list[Sequence[Value]] = field(default_factory=list)
    known: list[tuple[bool, ...]] = field(default_factory=list)
    numbers: list[Numbers] = field(default_factory=list)

    @property
    def shape(self) -> tuple[object, ...]:
        """All of it but values: ticks with the same labels and an equal shape have the same sets."""
        return self.written, self.rows, self.known

    def measure(self, written: Iterable[WrittenMetrics], said: Said, rest: Mapping[str, Value] = NOTHING) -> None:
        """Add what is known of a device, or of a pod's part of it. ``rest`` is written in place of its own values."""
        for one in written:
            rows, values, one.layout = one.names.measure(said, rest, one.layout)
            if rows:
                self.written.append(one)
                self.rows.append(rows)
                self.values.append(values)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Cache:
    """Of one node: the sets of each device's metrics, and those beside them, each with all that it was made of.

    ``profiles``: those in which it was written. ``said`` is what labels were made of in its last tick, ``labelled`` its
    devices, and ``pods``, by label names, the sets of the pods that held them. ``run`` is when its producer was
    started, and the node. ``shape`` is that of its last tick, ``sets`` are the sets, with their ``keys``, and
    ``besides`` the values of those beside metrics; ``changing``: which of them are made of which device's numbers.
    ``written`` is what is written, with its keys; ``cut`` says of which set it is, and of which of its rows, and is
    None if that is all. ``withheld`` counts what is not written, by reason. ``contested``: some of its series are
    another node's, and have the hashes that are ``claimed`` there.
    """

    profiles: tuple[Profile, ...] = ()
    devices: dict[str, LabelledDevice] = field(default_factory=dict)
    beside: dict[tuple[str, ...], tuple[OfDevice | Described | PodInfo, RelabelledSet]] = field(default_factory=dict)
    said: tuple[object, ...] = ()
    labelled: list[LabelledDevice] = field(default_factory=list)
    pods: dict[str, list[BesideSet]] = field(default_factory=dict)
    shape: tuple[object, ...] = ()
    keys: list[Key] = field(default_factory=list)
    sets: list[RelabelledSet] = field(default_factory=list)
    besides: list[Sequence[Value]] = field(default_factory=list)
    changing: list[tuple[int, int, tuple[Pick, ...]]] = field(default_factory=list)
    written: tuple[list[Key], list[SeriesSet]] = field(default_factory=lambda: ([], []))
    cut: list[tuple[int, tuple[int, ...] | None]] | None = None
    withheld: Counter[Withheld] = field(default_factory=Counter)
    contested: bool = False
    claimed: set[int] = field(default_factory=set)
    run: tuple[int, tuple[str, str]] = 0, ("", "")
    last_xids: dict[str, int] = field(default_factory=dict)
    reductions: dict[tuple[RelabelledSet, tuple[int, ...]], SeriesSet] = field(default_factory=dict)

    def reduced(self, made: RelabelledSet, rows: tuple[int, ...]) -> SeriesSet:
        """Some of the rows of a set: the same set for the same rows."""
        if (made, rows) not in self.reductions:
            of = made.series
            self.reductions[made, rows] = SeriesSet(of.labels, tuple([of.rows[row] for row in rows]), of.subject)
        return self.reductions[made, rows]

    def prune(self) -> None:
        """Forget what is not there any more, when that is more than what is."""
        if len(self.devices) + len(self.beside) > 2 * len(self.keys) + _SPARE:
            there, self.reductions = set(self.keys), {}
            self.devices = {key: was for key, was in self.devices.items() if key in there}
            self.beside = {key: was for key, was in self.beside.items() if key in there}
