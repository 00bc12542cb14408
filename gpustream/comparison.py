"""What another exporter says of a GPU and a pod beside what gpustream says, and why they differ. Pure.

In:       the series of both sides, with their samples of a window.
Out:      a row for each of their series: ours of the same GPU and quantity, and a verdict.

A value is compared in the unit of the catalogue, whatever each side's name says. Theirs is of some moment before their
scrape, so that ours of a whole window is looked at: if it was theirs once, or below and above it, the two were only
read at different times.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from sinks.series import counters
from topics.profiles import PROFILES, Profile

Verdict = Literal["same", "timing", "unit", "value", "holder", "missing", "unknown"]
FINE: frozenset[Verdict] = frozenset({"same", "timing"})

_UUIDS, _INDEXES = ("UUID", "uuid", "gpu_uuid"), ("gpu", "gpu_index")
_NODES = ("Hostname", "hostname", "k8s_node_name", "host_name", "node", "instance")
_NAMESPACES = ("exported_namespace", "pod_namespace", "k8s_namespace_name", "namespace")
_PODS = ("exported_pod", "pod_name", "k8s_pod_name", "pod")
"""If a scrape's own labels win, those of the holder begin with ``exported_``, and ``pod`` is the exporter's own."""
_FACTORS = (100.0, 1e3, 1e6, 1e9, 1024.0, 1024.0**2, 1e6 / 1024**2)

Labels = Mapping[str, str]


# -- what Prometheus has


class Sample(NamedTuple):
    """A value, and when it is from, in seconds since the epoch."""

    at_s: float
    value: float


class Reading(NamedTuple):
    """A series of one side: all its labels, its samples of the window, oldest first, and whether it has ended since."""

    labels: Labels
    samples: tuple[Sample, ...]
    ended: bool = False

    @property
    def name(self) -> str:
        """What it is called."""
        return self.labels["__name__"]

    @property
    def pod(self) -> str | None:
        """``namespace/pod`` of the pod that its labels name."""
        pod, namespace = _first(self.labels, _PODS), _first(self.labels, _NAMESPACES)
        return f"{namespace or ''}/{pod}" if pod else None


class ComparedDevice(NamedTuple):
    """A GPU, or a GPU instance of one: its UUID or, if that is not known, its node and index."""

    uuid: str
    instance: str = ""

    def __str__(self) -> str:
        return f"{self.uuid}/{self.instance}" if self.instance else self.uuid


class _Quantity(NamedTuple):
    """What a series measures: a key of the catalogue, several of them, or its own name. ``scale`` takes that to the
    series' unit."""

    key: str
    scale: float = 1.0


def _first(labels: Labels, names: Iterable[str]) -> str | None:
    return next((labels[name] for name in names if labels.get(name)), None)


def device(labels: Labels, uuids: Mapping[tuple[str, str], str]) -> ComparedDevice | None:
    """What a series is of; ``uuids``: of GPUs, by node and index. None: of no GPU."""
    uuid, index = _first(labels, _UUIDS), _first(labels, _INDEXES)
    if uuid is None and index is not None:
        node = (_first(labels, _NODES) or "").partition(":")[0]
        uuid = uuids.get((node, index)) or f"{node}/{index}"
    if uuid is None:
        return None
    return ComparedDevice(labels.get("gpu_mig_uuid") or uuid, labels.get("GPU_I_ID", ""))


def _quantities(profile: Profile) -> Iterator[tuple[str, Labels, _Quantity]]:
    """What each name of a profile measures, with the labels that tell it from others of that name."""
    for key, many in profile.series.items():
        yield from [(one.name, dict(one.labels), _Quantity(key, one.scale)) for one in many if one.bits is None]
    for ratio in profile.ratios:
        key = "/".join("+".join(keys) for keys in (ratio.numerators, ratio.denominators) if keys)
        yield ratio.name, dict(ratio.labels), _Quantity(key, ratio.scale)


@cache
def _known() -> dict[str, list[tuple[Labels, _Quantity]]]:
    """What each name of any profile measures."""
    found: dict[str, list[tuple[Labels, _Quantity]]] = {}
    for name, own, of in [one for profile in PROFILES.values() for one in _quantities(profile)]:
        found.setdefault(name, []).append((own, of))
    return found


def quantity(labels: Labels) -> _Quantity:
    """What a series measures, by its name and labels."""
    for own, found in _known().get(labels["__name__"], ()):
        if own.items() <= labels.items():
            return found
    apart = sorted((name, labels[name]) for name in ("xid", "gpu_throttle_cause", "gpu_task_type") if name in labels)
    return _Quantity(labels["__name__"] + "".join(f" {name}={value}" for name, value in apart))


def is_ours(labels: Labels) -> bool:
    """Whether a series is gpustream's: by its service or its job. What remote write sends of it has no job at all."""
    return labels.get("service_name") == "gpustream" or "gpustream" in labels.get("job", "gpustream")


# -- what differs, and why


class Side(NamedTuple):
    """What one side says."""

    name: str
    value: float
    pod: str | None
    at_s: float


class Compared(NamedTuple):
    """A series of theirs beside ours of the same GPU and quantity."""

    device: ComparedDevice
    quantity: str
    theirs: Side | None
    ours: Side | None
    verdict: Verdict
    why: str


class Comparison(NamedTuple):
    """All rows; the names that only ours has."""

    rows: tuple[Compared, ...]
    only_ours: tuple[str, ...]

    @property
    def differing(self) -> int:
        """How many rows differ, other than by when they were read."""
        return sum(row.verdict not in FINE for row in self.rows)


def compared(theirs: Sequence[Reading], ours: Sequence[Reading], tolerance: float) -> Comparison:
    """Each of their series beside ours; GPUs that only one side has. ``tolerance`` is a share of the value."""
    uuids = {
        ((_first(one.labels, _NODES) or "").partition(":")[0], index): uuid
        for one in (*theirs, *ours)
        if (index := _first(one.labels, _INDEXES)) and (uuid := _first(one.labels, _UUIDS))
    }
    theirs, ours = _with_holders(theirs), _with_holders(ours)
    of_theirs = _grouped([one for one in theirs if not one.ended], uuids)
    of_ours = _grouped([one for one in ours if not one.ended], uuids)
    ended = _grouped([one for one in ours if one.ended], uuids)
    devices = {found for found, _ in of_ours}
    known = {key for _, key in of_ours}
    rows: list[Compared] = []
    for (found, key), readings in of_theirs.items():
        pods = {reading.pod for reading in readings}
        for reading in readings:
            if found not in devices:
                why = "gpustream has no such GPU"
                rows.append(Compared(found, key, _side(reading), None, "missing", why))
            elif (found, key) not in of_ours:
                verdict, why = _absent(reading.name, key, known)
                rows.append(Compared(found, key, _side(reading), None, verdict, why))
            else:
                there, before = of_ours[found, key], ended.get((found, key), ())
                rows.append(_beside(found, key, reading, (there, before), tolerance, shared=len(pods) > 1))
    for found in devices - {found for found, _ in of_theirs}:
        some = next(readings[0] for (of, _), readings in of_ours.items() if of == found)
        rows.append(Compared(found, "", None, _side(some), "missing", "they have no such GPU"))
    theirs_too = {key for _, key in of_theirs}
    only = {one.name for (_, key), readings in of_ours.items() if key not in theirs_too for one in readings}
    return Comparison(tuple(sorted(rows, key=lambda row: (row.device, row.quantity))), tuple(sorted(only)))


def _with_holders(readings: Sequence[Reading]) -> Sequence[Reading]:
    """The same without the exporter's own pod, if a side has its holders in other labels."""
    if not any("exported_pod" in one.labels for one in readings):
        return readings
    own = ("pod", "namespace", "container")
    return [one._replace(labels={k: v for k, v in one.labels.items() if k not in own}) for one in readings]


def _grouped(
    readings: Iterable[Reading], uuids: Mapping[tuple[str, str], str]
) -> dict[tuple[ComparedDevice, str], list[Reading]]:
    """The series of each GPU and quantity."""
    found: dict[tuple[ComparedDevice, str], list[Reading]] = {}
    for one in readings:
        if (of := device(one.labels, uuids)) is not None:
            found.setdefault((of, quantity(one.labels).key), []).append(one)
    return found


def _side(reading: Reading) -> Side:
    last = reading.samples[-1]
    return Side(reading.name, last.value, reading.pod, last.at_s)


def _absent(name: str, key: str, known: Iterable[str]) -> tuple[Verdict, str]:
    """Why ours lacks what they have of a GPU."""
    if name not in _known():
        return "unknown", f"gpustream has no {name}: {counters.why_not_served(name)}"
    if key in known:
        return "missing", "gpustream has it of other GPUs: NVML does not say it of this one"
    having = [name for name, profile in PROFILES.items() if any(of.key == key for _, _, of in _quantities(profile))]
    return "missing", f"gpustream has it with --names {' or '.join(having)}, if NVML says it"


def _beside(
    found: ComparedDevice,
    key: str,
    theirs: Reading,
    ours: tuple[Sequence[Reading], Sequence[Reading]],
    tolerance: float,
    *,
    shared: bool,
) -> Compared:
    """Their series beside that of ours, which are there and which have ended, that is most like it: of its name, else
    of its pod."""
    there, ended = ours
    our = max(there, key=lambda one: (one.name == theirs.name, one.pod == theirs.pod, one.samples[-1].at_s))
    before = [sample for one in ended if one.name == our.name for sample in one.samples]
    scales = quantity(theirs.labels).scale, quantity(our.labels).scale
    verdict, why = judged(theirs, scales[0], sorted([*before, *our.samples]), scales[1], tolerance)
    if verdict in FINE and theirs.pod != our.pod:
        verdict, why = "holder", _holder(theirs.pod, our.pod, shared=shared)
    elif verdict in FINE and theirs.name != our.name:
        why = "; ".join(filter(None, ["another name for the same", why]))
    return Compared(found, key, _side(theirs), _side(our), verdict, why)


def _holder(theirs: str | None, ours: str | None, *, shared: bool) -> str:
    if theirs is None:
        return "they name no pod: the kubelet told them of none when they were scraped"
    if ours is None and shared:
        return "several pods hold the GPU: they give each of them the whole, gpustream each its part (gpu_pod_...)"
    if ours is None:
        return "gpustream names no pod: several hold the GPU, or none held it when the value was read"
    return "another pod: theirs is who held the GPU at the scrape, ours who held it when the value was read"


def judged(
    theirs: Reading, their_scale: float, ours: Sequence[Sample], our_scale: float, tolerance: float
) -> tuple[Verdict, str]:
    """Whether two series of one quantity agree, and if not, why. ``ours``: the samples of the window, oldest first."""
    last = theirs.samples[-1]
    value = last.value / their_scale
    step = 1.0 / their_scale if last.value == int(last.value) and their_scale != 1.0 else 0.0
    history = [Sample(at_s, value / our_scale) for at_s, value in ours]

    def is_close(one: float, other: float) -> bool:
        return abs(one - other) <= step + tolerance * max(abs(one), abs(other)) + 1e-9

    nearest = min(history, key=lambda sample: abs(sample.at_s - last.at_s))
    if is_close(value, nearest.value):
        return "same", ""
    once = [sample for sample in history if is_close(value, sample.value)]
    if once:
        then = min(once, key=lambda sample: abs(sample.at_s - last.at_s))
        later = last.at_s - then.at_s
        return "timing", f"theirs is what gpustream said {abs(later):.0f} s {'before' if later >= 0 else 'after'}"
    low, high = min(sample.value for sample in history), max(sample.value for sample in history)
    if low <= value <= high:
        return "timing", "theirs is between the lowest and the highest of gpustream's in the window"
    for factor in (one for way in _FACTORS for one in (way, 1.0 / way)):
        if value and low and (is_close(value / factor, nearest.value) or low <= value / factor <= high):
            return "unit", f"theirs is {factor:g} times gpustream's: another unit than its name has in gpustream"
    return "value", f"theirs is {value - nearest.value:+.6g} from gpustream's {nearest.value:.6g}, in base units"
