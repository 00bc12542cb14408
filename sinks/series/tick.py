"""The part of a gpu.attributed record that series are made of; the rest is not decoded.

In: the JSON of gpu.attributed. Out: a :class:`SeriesTick`.
State: for each node, the devices and holders of its last tick, as raw JSON and as objects. A part whose JSON is
the same in the next tick is not decoded again: it is the same object.
On failure: ``msgspec.DecodeError`` if the value is not such a record.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw

from topics.attributed import AttributedEvent, AttributedTick, Attribution, Holder
from topics.catalogue import CATALOGUE
from topics.samples import Job, Mig
from topics.topic import UInt, lenient

T = TypeVar("T")

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
    """A device's identity, jobs and events: all of its record except holders and measured values.

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
    attribution: Attribution | None = None


class DeviceReading(msgspec.Struct, frozen=True):
    """A device in a tick. ``parts`` has an entry for each holder, or is empty if no holder's part is known.

    ``device`` and ``holders`` are the same objects as in the last tick if their JSON has not changed.
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
_TURNS = 10


class _RawHolder(msgspec.Struct, frozen=True, gc=False):
    """A holder with its nested objects as raw JSON: they seldom change, so they are decoded only when they do."""

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
    """A device with its nested objects as raw JSON, for the same reason."""

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
    attribution: Attribution | None = None


class _RawTick(AttributedTick, frozen=True, kw_only=True):
    node_labels: dict[str, str] = msgspec.field(default_factory=dict)
    devices: tuple[_RawDevice, ...] = ()


class _LastTick(NamedTuple):
    """The devices and holders of a node's last tick: the fields compared with the next tick's, and the decoded objects.

    All four lists have an entry for each device.
    """

    device_fields: list[tuple[Any, ...]]
    holder_fields: list[list[tuple[Any, ...]]]
    devices: list[SeriesDevice]
    holders: list[tuple[Holder, ...]]


_DEVICE_FIELDS = SeriesDevice.__struct_fields__
_HOLDER_FIELDS = tuple([name for name in _RawHolder.__struct_fields__ if name != "parts"])
_device_fields, _holder_fields = attrgetter(*_DEVICE_FIELDS), attrgetter(*_HOLDER_FIELDS)
_RAW_DECODERS = {
    field.name: msgspec.json.Decoder(field.type).decode
    for field in (*msgspec.structs.fields(SeriesDevice), *msgspec.structs.fields(Holder))
    if field.name in ("mig", "jobs", "events", "info", "xids", "workload", "labels", "namespace_labels")
}
_NO_TICK = _LastTick([], [], [], [])
_decode_raw = msgspec.json.Decoder(_RawTick).decode


class TickDecoder:
    """Decodes ticks, and keeps the last one of each node to decode only what has changed.

    A node of which none came while the others had ten each is forgotten: many nodes may live for an hour only.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str], tuple[_LastTick, int]] = {}  # and which one it was of all ticks
        self._ticks = 0

    def decode(self, value: bytes) -> SeriesTick:
        """Decode a tick. Raises what msgspec raises if it is malformed or has a null where the type allows none."""
        tick = _decode_raw(value)
        node, devices = (tick.cluster, tick.node), tick.devices
        last, _ = self._nodes.pop(node, (_NO_TICK, 0))
        device_fields = list(map(_device_fields, devices))
        holder_fields = [list(map(_holder_fields, device.holders)) for device in devices]
        if last.device_fields != device_fields or last.holder_fields != holder_fields:
            last = _decode_changed(devices, device_fields, holder_fields, last)
        self._ticks += 1
        self._nodes[node] = last, self._ticks
        oldest, (_, number) = next(iter(self._nodes.items()))
        if len(self._nodes) > _NODES or self._ticks - number > _TURNS * len(self._nodes):
            del self._nodes[oldest]
        readings = []
        for device, holders, raw in zip(last.devices, last.holders, devices, strict=True):
            parts = tuple([holder.parts for holder in raw.holders])
            known = parts if any(parts) else ()
            readings.append(DeviceReading(device, holders, raw.metrics, known, raw.unattributed, raw.split_scaled))
        return SeriesTick(
            schema=tick.schema,
            cluster=tick.cluster,
            node=tick.node,
            run_id=tick.run_id,
            seq=tick.seq,
            ts_ms=tick.ts_ms,
            interval_ms=tick.interval_ms,
            offset=tick.offset,
            attribution=tick.attribution,
            node_labels=tick.node_labels,
            devices=tuple(readings),
        )


def _decode_changed(
    raw_devices: Iterable[_RawDevice],
    device_fields: Iterable[tuple[Any, ...]],
    holder_fields: Iterable[list[tuple[Any, ...]]],
    last: _LastTick,
) -> _LastTick:
    """Decode the devices and holders that differ from the last tick, and take the objects of the others from there.

    Devices in a row that have the same holders share one object for them.
    """
    decoded = _LastTick([], [], [], [])
    last_index = {device.uuid: index for index, device in enumerate(last.devices)}
    for raw, fields, fields_of_holders in zip(raw_devices, device_fields, holder_fields, strict=True):
        index = last_index.get(raw.uuid, -1)
        if index >= 0 and last.device_fields[index] == fields:
            decoded.device_fields.append(last.device_fields[index])
            decoded.devices.append(last.devices[index])
        else:
            decoded.device_fields.append(_copied(fields))
            decoded.devices.append(_decode_fields(SeriesDevice, _DEVICE_FIELDS, fields))
        if index >= 0 and last.holder_fields[index] == fields_of_holders:
            decoded.holder_fields.append(last.holder_fields[index])
            decoded.holders.append(last.holders[index])
        elif decoded.holders and decoded.holder_fields[-1] == fields_of_holders:
            decoded.holder_fields.append(decoded.holder_fields[-1])
            decoded.holders.append(decoded.holders[-1])
        else:
            decoded.holder_fields.append(list(map(_copied, fields_of_holders)))
            decoded.holders.append(tuple([_decode_fields(Holder, _HOLDER_FIELDS, of) for of in fields_of_holders]))
    return decoded


def _decode_fields(kind: type[T], names: Sequence[str], fields: Iterable[Any]) -> T:
    """The object with these fields, of which nested ones are raw JSON; what is absent has its default."""
    present = [(name, field) for name, field in zip(names, fields, strict=True) if field != _ABSENT]
    return kind(**{name: _RAW_DECODERS[name](field) if name in _RAW_DECODERS else field for name, field in present})


def _copied(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """The fields with raw JSON copied, so that they do not keep the whole record in memory."""
    return tuple([field.copy() if isinstance(field, Raw) else field for field in fields])


decode = lenient(TickDecoder().decode)
"""Decodes a tick of gpu.attributed. All sinks of this process that write series share it."""
