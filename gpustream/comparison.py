"""Compares the series of another exporter with gpustream's, GPU by GPU, and says why they differ. Pure.

In:       the series of both sides, with their samples of a window.
Out:      a row for each of their series: ours of the same GPU and quantity, and a verdict.

Values are compared in the unit of the catalogue, whatever unit each side's name has. The other exporter read its value
at some moment before its scrape. So all of gpustream's samples in a window are looked at: if one of them equals that
value, or some are below and some above it, the two were only read at different times.
"""

import math
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
_NO_INSTANCE = "gpustream has no such MIG device, or has it by its UUID only: --names dcgm has the GPU instance, too"
_FACTORS = (100.0, 1e3, 1e6, 1e9, 1024.0, 1024.0**2, 1e6 / 1024**2)

Labels = Mapping[str, str]


# -- what Prometheus has


class Sample(NamedTuple):
    """A value, and when it is from, in seconds since the epoch."""

    at_s: float
    value: float


class Reading(NamedTuple):
    """A series of one side: its labels, its samples in the window, oldest first, and whether it has ended since."""

    labels: Labels
    samples: tuple[Sample, ...]
    ended: bool = False

    @property
    def name(self) -> str:
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

    @property
    def mig_name(self) -> Literal["instance", "uuid"] | None:
        """What tells a MIG device from others; None for a whole GPU."""
        return "instance" if self.instance else "uuid" if self.uuid.startswith("MIG-") else None


class _Quantity(NamedTuple):
    """What a series measures: a key of the catalogue, several of them, or its own name.

    A value in the catalogue's unit times ``scale`` is in the series' unit.
    """

    key: str
    scale: float = 1.0


def _first(labels: Labels, names: Iterable[str]) -> str | None:
    return next((labels[name] for name in names if labels.get(name)), None)


def _node(labels: Labels) -> str:
    """The node of a series, or the host of its ``instance``, without a port: ``[fd00::7]:9400`` has an IPv6 address."""
    name = _first(labels, _NODES) or ""
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def device(labels: Labels, uuids: Mapping[tuple[str, str], str]) -> ComparedDevice | None:
    """The GPU of a series; None if it has none. ``uuids`` are the UUIDs of GPUs by node and index, and those of MIG
    devices by the UUID of the GPU and the GPU instance."""
    uuid, index = _first(labels, _UUIDS), _first(labels, _INDEXES)
    if uuid is None and index is not None:
        node = _node(labels)
        uuid = uuids.get((node, index)) or f"{node}/{index}"
    if uuid is None:
        return None
    instance = labels.get("GPU_I_ID", "")
    mig_uuid = labels.get("gpu_mig_uuid") or uuids.get((uuid, instance))
    return ComparedDevice(mig_uuid) if mig_uuid else ComparedDevice(uuid, instance)


def _quantities(profile: Profile) -> Iterator[tuple[str, Labels, _Quantity]]:
    """The names of a profile: each with the labels that tell it from others of that name, and what it measures."""
    for key, series in profile.series.items():
        yield from [
            (entry.name, dict(entry.labels), _Quantity(key, entry.scale)) for entry in series if entry.bits is None
        ]
    for ratio in profile.ratios:
        key = "/".join("+".join(keys) for keys in (ratio.numerators, ratio.denominators) if keys)
        yield ratio.name, dict(ratio.labels), _Quantity(key, ratio.scale)


@cache
def _quantities_by_name() -> dict[str, list[tuple[Labels, _Quantity]]]:
    """What each name of any profile measures, by its labels."""
    quantities: dict[str, list[tuple[Labels, _Quantity]]] = {}
    for name, labels, quantity in [row for profile in PROFILES.values() for row in _quantities(profile)]:
        quantities.setdefault(name, []).append((labels, quantity))
    return quantities


def quantity(labels: Labels) -> _Quantity:
    """What a series measures, by its name and labels."""
    for profile_labels, quantity_found in _quantities_by_name().get(labels["__name__"], ()):
        if profile_labels.items() <= labels.items():
            return quantity_found
    distinguishing = sorted(
        (name, labels[name]) for name in ("xid", "gpu_throttle_cause", "gpu_task_type") if name in labels
    )
    return _Quantity(labels["__name__"] + "".join(f" {name}={value}" for name, value in distinguishing))


def is_ours(labels: Labels) -> bool:
    """Whether a series is gpustream's, by its service or its job. Series from its remote write have no job."""
    return labels.get("service_name") == "gpustream" or "gpustream" in labels.get("job", "gpustream")


# -- what differs, and why


class Side(NamedTuple):
    """The last value of one side's series."""

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
    reason: str


class Comparison(NamedTuple):
    """All rows, and the names of metrics that only gpustream has."""

    rows: tuple[Compared, ...]
    only_ours: tuple[str, ...]

    @property
    def differing(self) -> int:
        """How many rows differ in more than the time of reading."""
        return sum(row.verdict not in FINE for row in self.rows)


def compared(theirs: Sequence[Reading], ours: Sequence[Reading], tolerance: float) -> Comparison:
    """A row for each of their series, and for each GPU that only we have. ``tolerance`` is a share of the value."""
    uuids = {
        (_node(reading.labels), index): uuid
        for reading in (*theirs, *ours)
        if (index := _first(reading.labels, _INDEXES)) and (uuid := _first(reading.labels, _UUIDS))
    }
    uuids |= {  # dcgm-exporter says it of the MIG devices of resource claims
        (labels["UUID"], labels["GPU_I_ID"]): labels["dra_mig_device_uuid"]
        for labels in (reading.labels for reading in theirs)
        if labels.keys() >= {"UUID", "GPU_I_ID", "dra_mig_device_uuid"}
    }
    theirs, ours = _with_holders(theirs), _with_holders(ours)
    their_groups = _by_device_and_quantity([reading for reading in theirs if not reading.ended], uuids)
    our_groups = _by_device_and_quantity([reading for reading in ours if not reading.ended], uuids)
    ended = _by_device_and_quantity([reading for reading in ours if reading.ended], uuids)
    devices = {device_found for device_found, _ in our_groups}
    our_quantities = {key for _, key in our_groups}
    rows: list[Compared] = []
    for (device_found, key), readings in their_groups.items():
        pods = {reading.pod for reading in readings}
        for reading in readings:
            if device_found not in devices:
                reason = "gpustream has no such GPU" if not device_found.instance else _NO_INSTANCE
                rows.append(Compared(device_found, key, _side(reading), None, "missing", reason))
            elif (device_found, key) not in our_groups:
                verdict, reason = _verdict_if_absent(reading.name, key, our_quantities)
                rows.append(Compared(device_found, key, _side(reading), None, verdict, reason))
            else:
                current, ended_readings = our_groups[device_found, key], ended.get((device_found, key), ())
                rows.append(
                    _compare_one(device_found, key, reading, (current, ended_readings), tolerance, shared=len(pods) > 1)
                )
    their_devices = {device_found for device_found, _ in their_groups}
    their_mig_names = {device_found.mig_name for device_found in their_devices} - {None}
    for device_found in devices - their_devices:
        if device_found.mig_name and their_mig_names and device_found.mig_name not in their_mig_names:
            continue  # it may be any of theirs; if gpustream has it by their kind of name, too, that one is compared
        example = next(readings[0] for (other, _), readings in our_groups.items() if other == device_found)
        rows.append(Compared(device_found, "", None, _side(example), "missing", "they have no such GPU"))
    their_quantities = {key for _, key in their_groups}
    only_ours = {
        reading.name for (_, key), readings in our_groups.items() if key not in their_quantities for reading in readings
    }
    return Comparison(tuple(sorted(rows, key=lambda row: (row.device, row.quantity))), tuple(sorted(only_ours)))


def _with_holders(readings: Sequence[Reading]) -> Sequence[Reading]:
    """The readings without the labels of the exporter's own pod, if the holders are in ``exported_`` labels."""
    if not any("exported_pod" in reading.labels for reading in readings):
        return readings
    exporter_labels = ("pod", "namespace", "container")
    return [
        reading._replace(labels={name: value for name, value in reading.labels.items() if name not in exporter_labels})
        for reading in readings
    ]


def _by_device_and_quantity(
    readings: Iterable[Reading], uuids: Mapping[tuple[str, str], str]
) -> dict[tuple[ComparedDevice, str], list[Reading]]:
    groups: dict[tuple[ComparedDevice, str], list[Reading]] = {}
    for reading in readings:
        if (compared_device := device(reading.labels, uuids)) is not None:
            groups.setdefault((compared_device, quantity(reading.labels).key), []).append(reading)
    return groups


def _side(reading: Reading) -> Side:
    last = reading.samples[-1]
    return Side(reading.name, last.value, reading.pod, last.at_s)


def _verdict_if_absent(name: str, key: str, our_quantities: Iterable[str]) -> tuple[Verdict, str]:
    """The verdict if gpustream lacks a quantity that they have of a GPU, with the reason."""
    if name not in _quantities_by_name():
        return "unknown", f"gpustream has no {name}: {counters.why_not_served(name)}"
    if key in our_quantities:
        return "missing", "gpustream has it of other GPUs: NVML does not say it of this one"
    profiles = [
        name
        for name, profile in PROFILES.items()
        if any(quantity.key == key for _, _, quantity in _quantities(profile))
    ]
    return "missing", f"gpustream has it with --names {' or '.join(profiles)}, if NVML says it"


def _compare_one(
    compared_device: ComparedDevice,
    key: str,
    theirs: Reading,
    ours: tuple[Sequence[Reading], Sequence[Reading]],
    tolerance: float,
    *,
    shared: bool,
) -> Compared:
    """Compares their series with the most similar of ours: that of the same name, else of the same pod.

    ``ours`` are the current series and those that have ended.
    """
    current, ended = ours
    our_reading = max(
        current, key=lambda reading: (reading.name == theirs.name, reading.pod == theirs.pod, reading.samples[-1].at_s)
    )
    ended_samples = [sample for reading in ended if reading.name == our_reading.name for sample in reading.samples]
    scales = quantity(theirs.labels).scale, quantity(our_reading.labels).scale
    verdict, reason = verdict_of(
        theirs, scales[0], sorted([*ended_samples, *our_reading.samples]), scales[1], tolerance
    )
    parts = [reading for reading in current if reading.name == our_reading.name]
    if verdict == "value" and len(parts) > 1 and (sums := _sums(parts)):
        of_whole, _ = verdict_of(theirs, scales[0], sums, scales[1], tolerance)
        if of_whole in FINE:
            verdict, reason = (
                "holder",
                "several pods hold the GPU: theirs is the whole of it, gpustream's the pod's part",
            )
    if verdict in FINE and theirs.pod != our_reading.pod:
        verdict = "holder"
        if theirs.pod is None:
            reason = "they name no pod: the kubelet told them of none when they were scraped"
        elif our_reading.pod is None and shared:
            reason = (
                "several pods hold the GPU: they give each of them the whole, gpustream each its part (gpu_pod_...)"
            )
        elif our_reading.pod is None:
            reason = "gpustream names no pod: several hold the GPU, or none held it when the value was read"
        else:
            reason = "another pod: theirs is who held the GPU at the scrape, ours who held it when the value was read"
    elif verdict in FINE and theirs.name != our_reading.name:
        reason = "; ".join(filter(None, ["another name for the same", reason]))
    return Compared(compared_device, key, _side(theirs), _side(our_reading), verdict, reason)


def _sums(readings: Sequence[Reading]) -> list[Sample]:
    """The sums of series at the times at which all of them have a sample."""
    values: dict[float, list[float]] = {}
    for at_s, value in (sample for reading in readings for sample in reading.samples):
        values.setdefault(at_s, []).append(value)
    return [Sample(at_s, sum(of_time)) for at_s, of_time in sorted(values.items()) if len(of_time) == len(readings)]


def verdict_of(
    theirs: Reading, their_scale: float, ours: Sequence[Sample], our_scale: float, tolerance: float
) -> tuple[Verdict, str]:
    """Whether two series of one quantity agree, and if not, why. ``ours``: the samples of the window, oldest first."""
    last = theirs.samples[-1]
    if not math.isfinite(last.value):  # not a number is like nothing else, and infinity is at no distance
        is_same = any(str(sample.value) == str(last.value) for sample in ours)
        return ("same", "") if is_same else ("value", f"theirs is {last.value}, and gpustream's is not")
    value = last.value / their_scale
    step = 1.0 / their_scale if last.value == int(last.value) and their_scale != 1.0 else 0.0
    history = [Sample(at_s, value / our_scale) for at_s, value in ours if math.isfinite(value)]
    if not history:
        return "value", f"gpustream's is {ours[-1].value}, and theirs is not"

    def is_close(a: float, b: float) -> bool:
        return abs(a - b) <= step + tolerance * max(abs(a), abs(b)) + 1e-9

    nearest = min(history, key=lambda sample: abs(sample.at_s - last.at_s))
    if is_close(value, nearest.value):
        return "same", ""
    close_samples = [sample for sample in history if is_close(value, sample.value)]
    if close_samples:
        nearest_close = min(close_samples, key=lambda sample: abs(sample.at_s - last.at_s))
        delay_s = last.at_s - nearest_close.at_s
        return "timing", f"theirs is what gpustream said {abs(delay_s):.0f} s {'before' if delay_s >= 0 else 'after'}"
    low, high = min(sample.value for sample in history), max(sample.value for sample in history)
    if low <= value <= high:
        return "timing", "theirs is between the lowest and the highest of gpustream's in the window"
    for factor in (either for base in _FACTORS for either in (base, 1.0 / base)):
        if value and low and (is_close(value / factor, nearest.value) or low <= value / factor <= high):
            return "unit", f"theirs is {factor:g} times gpustream's: another unit than its name has in gpustream"
    return "value", f"theirs is {value - nearest.value:+.6g} from gpustream's {nearest.value:.6g}, in base units"
