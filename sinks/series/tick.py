"""What of a record of gpu.attributed series are made of: the rest is not decoded.

In: the JSON of gpu.attributed. Out: a :class:`SeriesTick`.
State: of the last tick of each node that was heard of lately, what it said of its devices, as it was written there.
What is written the same again is not decoded again, and is the same object.
On failure: ``msgspec.DecodeError`` for what is no such record.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Raw

from topics.attributed import AttributedEvent, AttributedTick, Holder, Parts
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


class SeriesDevice(msgspec.Struct, frozen=True):
    """What a device is, who holds it and what happened on it: all of its record but measured values, and parts.

    See :class:`topics.attributed.AttributedDevice`. For as long as a record says the same, it is the same object.
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
    holders: tuple[Holder, ...] = ()
    conflict: str | None = None


class DeviceReading(NamedTuple):
    """A device in a tick. ``parts`` has one for each holder, or is empty if nothing is known of any."""

    device: SeriesDevice
    metrics: Metrics = Metrics()
    parts: tuple[Parts | None, ...] = ()
    unattributed: Parts | None = None
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
    parts: Parts | None = None


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
    unattributed: Parts | None = None
    split_scaled: bool = False
    conflict: str | None = None


class _RawTick(AttributedTick, frozen=True, kw_only=True):
    node_labels: dict[str, str] = msgspec.field(default_factory=dict)
    devices: tuple[_RawDevice, ...] = ()


class _Said(NamedTuple):
    """What was said of a device last, and of its holders, as it was written; and what that is."""

    fields: tuple[Any, ...]
    holders: list[tuple[Any, ...]]
    device: SeriesDevice


_OF_DEVICE = tuple([name for name in SeriesDevice.__struct_fields__ if name != "holders"])
_OF_HOLDER = tuple([name for name in _RawHolder.__struct_fields__ if name != "parts"])
_of_device, _of_holder = attrgetter(*_OF_DEVICE), attrgetter(*_OF_HOLDER)
_RAW = {
    field.name: msgspec.json.Decoder(field.type).decode
    for field in (*msgspec.structs.fields(SeriesDevice), *msgspec.structs.fields(Holder))
    if field.name in ("mig", "jobs", "events", "info", "xids", "workload", "labels", "namespace_labels")
}
_decode_raw = msgspec.json.Decoder(_RawTick).decode


class TickDecoder:
    """Decodes ticks, and remembers of each node what the last one said of its devices."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str], dict[str, _Said]] = {}

    def decode(self, value: bytes) -> SeriesTick:
        """A tick. Raises what msgspec does for what is none, or has a null where the type allows none."""
        tick = _decode_raw(value)
        key = (tick.cluster, tick.node)
        before, said = self._nodes.pop(key, {}), dict[str, _Said]()
        devices = tuple([_reading(one, before, said) for one in tick.devices])
        self._nodes[key] = said
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
            devices=devices,
        )


def _reading(raw: _RawDevice, before: Mapping[str, _Said], said: dict[str, _Said]) -> DeviceReading:
    """A device in a tick, and what is said of it now."""
    was, fields, holders = before.get(raw.uuid), _of_device(raw), list(map(_of_holder, raw.holders))
    if was is None or was.fields != fields or was.holders != holders:
        fields, holders = _copied(fields), list(map(_copied, holders))
        held_by = tuple([Holder(**_decoded(_OF_HOLDER, one)) for one in holders])
        was = _Said(fields, holders, SeriesDevice(**_decoded(_OF_DEVICE, fields), holders=held_by))
    said[raw.uuid] = was
    parts = tuple([one.parts for one in raw.holders])
    return DeviceReading(was.device, raw.metrics, parts if any(parts) else (), raw.unattributed, raw.split_scaled)


def _copied(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same without the record around it."""
    return tuple([one.copy() if isinstance(one, Raw) else one for one in fields])


def _decoded(names: tuple[str, ...], fields: tuple[Any, ...]) -> dict[str, Any]:
    """What these fields say, as far as they are there."""
    there = [(name, one) for name, one in zip(names, fields, strict=True) if one != _ABSENT]
    return {name: _RAW[name](one) if name in _RAW else one for name, one in there}


decode = lenient(TickDecoder().decode)
"""A tick of gpu.attributed, for every sink of this process that writes series."""
