"""What of a record of gpu.attributed series are made of: the rest is not decoded.

In: the JSON of gpu.attributed. Out: a :class:`SeriesTick`.
State: of the last tick of each node that was heard of lately, what it said of its devices, as it was written there.
What is written the same again is not decoded again, and is the same object.
On failure: ``msgspec.DecodeError`` for what is no such record.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Raw

from topics.attributed import AttributedEvent, AttributedTick, Holder
from topics.catalogue import CATALOGUE
from topics.samples import Job, Mig
from topics.topic import UInt, lenient

KEYS = tuple(CATALOGUE)
"""The keys of metrics, in the order of their fields."""

if TYPE_CHECKING:

    class Metrics(msgspec.Struct):
        """A value for each key of the catalogue, None if it is not known."""

        def __init__(self, **values: float) -> None: ...
        def __getattr__(self, key: str) -> float | None: ...
else:
    Metrics = msgspec.defstruct(
        "Metrics", [(key, float | None, None) for key in KEYS], frozen=True, omit_defaults=True, gc=False
    )


class SeriesParts(msgspec.Struct, frozen=True, gc=False):
    """See :class:`topics.attributed.Parts`."""

    utilization_ratio: float | None = None
    memory_used_bytes: float | None = None
    power_watts: float | None = None


class SeriesDevice(msgspec.Struct, frozen=True):
    """What a device is and what happened on it: all of its record but holders and measured values.

    See :class:`topics.attributed.AttributedDevice`.
    """

    uuid: str
    index: UInt | None = None
    vendor: str = "nvidia"
    model: str | None = None
    pci_bus_id: str | None = None
    minor: UInt | None = None
    mig: Mig | None = None
    jobs: tuple[Job, ...] | None = None
    events: tuple[AttributedEvent, ...] | None = None
    info: dict[str, str] = {}
    xids: dict[str, UInt] = {}
    conflict: str | None = None


class DeviceReading(msgspec.Struct, frozen=True):
    """A device in a tick. ``parts`` has one for each holder, or is empty if nothing is known of any.

    For as long as records say the same of the device, or of who holds it, that is the same object.
    """

    device: SeriesDevice
    holders: tuple[Holder, ...] = ()
    metrics: Metrics = Metrics()
    parts: tuple[SeriesParts | None, ...] = ()
    unattributed: SeriesParts | None = None
    split_scaled: bool = False


class SeriesTick(AttributedTick, frozen=True, kw_only=True):
    """See :class:`topics.attributed.AttributedSample`."""

    node_labels: dict[str, str] = msgspec.field(default_factory=dict)
    devices: tuple[DeviceReading, ...] = ()


# -- decoding

_ABSENT = Raw(b"")
_NODES = 20_000


class _RawHolder(msgspec.Struct, frozen=True, gc=False):
    """A holder as it is in a record: what is known of it beside its name seldom changes, and is not decoded."""

    namespace: str
    pod: str
    pod_uid: str | None = None
    container: str | None = None
    workload: Raw = _ABSENT
    job: str | None = None
    statefulset: str | None = None
    deployment: str | None = None
    labels: Raw = _ABSENT
    namespace_labels: Raw = _ABSENT
    parts: SeriesParts | None = None


class _RawDevice(msgspec.Struct, frozen=True, gc=False):
    """A device as it is in a record, likewise."""

    uuid: str
    index: UInt | None = None
    vendor: str = "nvidia"
    model: str | None = None
    pci_bus_id: str | None = None
    minor: UInt | None = None
    mig: Raw = _ABSENT
    metrics: Metrics = Metrics()
    jobs: Raw = _ABSENT
    events: Raw = _ABSENT
    info: Raw = _ABSENT
    xids: Raw = _ABSENT
    holders: tuple[_RawHolder, ...] = ()
    unattributed: SeriesParts | None = None
    split_scaled: bool = False
    conflict: str | None = None


class _RawTick(AttributedTick, frozen=True, kw_only=True):
    node_labels: dict[str, str] = msgspec.field(default_factory=dict)
    devices: tuple[_RawDevice, ...] = ()


class _Said(NamedTuple):
    """What a tick said of a node's devices and of the holders of each, as it was written; and what that is."""

    fields: list[tuple[Any, ...]]
    holder_fields: list[list[tuple[Any, ...]]]
    devices: list[SeriesDevice]
    holders: list[tuple[Holder, ...]]


_OF_DEVICE = SeriesDevice.__struct_fields__
_of_device = attrgetter(*_OF_DEVICE)
_of_holder = attrgetter(*[name for name in _RawHolder.__struct_fields__ if name != "parts"])
_RAW = {
    field.name: msgspec.json.Decoder(field.type).decode
    for field in (*msgspec.structs.fields(SeriesDevice), *msgspec.structs.fields(Holder))
    if field.name in ("mig", "jobs", "events", "info", "xids", "workload", "labels", "namespace_labels")
}
_NOTHING = _Said([], [], [], [])
_decode_raw = msgspec.json.Decoder(_RawTick).decode


class TickDecoder:
    """Decodes ticks, and remembers of each node what the last one said of its devices."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str], _Said] = {}

    def decode(self, value: bytes) -> SeriesTick:
        """A tick. Raises what msgspec does for what is none, or has a null where the type allows none."""
        tick = _decode_raw(value)
        key, raws = (tick.cluster, tick.node), tick.devices
        was = self._nodes.pop(key, _NOTHING)
        fields, holder_fields = list(map(_of_device, raws)), [list(map(_of_holder, raw.holders)) for raw in raws]
        if was.fields != fields or was.holder_fields != holder_fields:
            was = _said(raws, fields, holder_fields, was)
        self._nodes[key] = was
        if len(self._nodes) > _NODES:
            del self._nodes[next(iter(self._nodes))]
        return SeriesTick(
            schema=tick.schema,
            cluster=tick.cluster,
            node=tick.node,
            run_id=tick.run_id,
            seq=tick.seq,
            ts_ms=tick.ts_ms,
            offset=tick.offset,
            attribution=tick.attribution,
            node_labels=tick.node_labels,
            devices=tuple(map(_reading, was.devices, was.holders, raws)),
        )


def _reading(device: SeriesDevice, holders: tuple[Holder, ...], raw: _RawDevice) -> DeviceReading:
    parts = tuple([one.parts for one in raw.holders])
    return DeviceReading(device, holders, raw.metrics, parts if any(parts) else (), raw.unattributed, raw.split_scaled)


def _said(
    raws: Iterable[_RawDevice],
    fields: Iterable[tuple[Any, ...]],
    holder_fields: Iterable[list[tuple[Any, ...]]],
    was: _Said,
) -> _Said:
    """What is said of devices. What was said of a device before, or of the one before it, is the same object."""
    said = _Said([], [], [], [])
    before = {device.uuid: number for number, device in enumerate(was.devices)}
    for raw, of_device, of_holders in zip(raws, fields, holder_fields, strict=True):
        number = before.get(raw.uuid, -1)
        if number >= 0 and was.fields[number] == of_device:
            said.fields.append(was.fields[number])
            said.devices.append(was.devices[number])
        else:
            known = [(name, one) for name, one in zip(_OF_DEVICE, of_device, strict=True) if one != _ABSENT]
            said.fields.append(_copied(of_device))
            said.devices.append(SeriesDevice(**{name: _RAW[name](one) if name in _RAW else one for name, one in known}))
        if number >= 0 and was.holder_fields[number] == of_holders:
            said.holder_fields.append(was.holder_fields[number])
            said.holders.append(was.holders[number])
        elif said.holders and said.holder_fields[-1] == of_holders:
            said.holder_fields.append(said.holder_fields[-1])
            said.holders.append(said.holders[-1])
        else:
            said.holder_fields.append(list(map(_copied, of_holders)))
            said.holders.append(tuple(map(_holder, raw.holders)))
    return said


def _holder(raw: _RawHolder) -> Holder:
    return Holder(
        raw.namespace,
        raw.pod,
        pod_uid=raw.pod_uid,
        container=raw.container,
        workload=_RAW["workload"](raw.workload) if raw.workload else None,
        job=raw.job,
        statefulset=raw.statefulset,
        deployment=raw.deployment,
        labels=_RAW["labels"](raw.labels) if raw.labels else {},
        namespace_labels=_RAW["namespace_labels"](raw.namespace_labels) if raw.namespace_labels else {},
    )


def _copied(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same without the record around it."""
    return tuple([one.copy() if isinstance(one, Raw) else one for one in fields])


decode = lenient(TickDecoder().decode)
"""A tick of gpu.attributed, for every sink of this process that writes series."""
