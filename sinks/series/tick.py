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


class _RawDevice(msgspec.Struct, frozen=True, gc=False):
    """A device as it is in a record: what seldom changes is not decoded."""

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
    holders: Raw = _ABSENT
    unattributed: Parts | None = None
    split_scaled: bool = False
    conflict: str | None = None


class _RawTick(AttributedTick, frozen=True, kw_only=True):
    node_labels: dict[str, str] = msgspec.field(default_factory=dict)
    devices: tuple[_RawDevice, ...] = ()


class _Said(NamedTuple):
    """What was said of a device last, as it was written, and what that is. ``parts`` are those of its holders."""

    fields: tuple[Any, ...]
    device: SeriesDevice
    parts: tuple[Parts | None, ...]


_FIELDS = SeriesDevice.__struct_fields__
_fields = attrgetter(*_FIELDS)
_DECODERS = {
    field.name: msgspec.json.Decoder(field.type).decode
    for field in msgspec.structs.fields(SeriesDevice)
    if field.name in ("mig", "jobs", "events", "info", "xids", "holders")
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
    was, fields = before.get(raw.uuid), _fields(raw)
    if was is None or was.fields != fields:
        was = _decoded(fields, was)
    said[raw.uuid] = was
    return DeviceReading(was.device, raw.metrics, was.parts, raw.unattributed, raw.split_scaled)


def _decoded(fields: tuple[Any, ...], was: _Said | None) -> _Said:
    """What these fields say. That holders have other parts makes it no other device."""
    kept = tuple([one.copy() if isinstance(one, Raw) else one for one in fields])
    there: dict[str, Any] = {
        name: _DECODERS[name](one) if name in _DECODERS else one
        for name, one in zip(_FIELDS, kept, strict=True)
        if one != _ABSENT
    }
    holders: tuple[Holder, ...] = there.get("holders", ())
    parts = tuple([one.parts for one in holders])
    if any(parts):
        there["holders"] = tuple([msgspec.structs.replace(one, parts=None) for one in holders])
    device = SeriesDevice(**there)
    same = was is not None and was.device == device
    return _Said(kept, was.device if was and same else device, parts if any(parts) else ())


decode = lenient(TickDecoder().decode)
"""A tick of gpu.attributed, for every sink of this process that writes series."""
