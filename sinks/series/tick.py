"""What of a record of gpu.attributed series are made of: the rest is not decoded.

In: the JSON of gpu.attributed. Out: a :class:`SeriesTick`.
On failure: ``msgspec.DecodeError`` for what is no such record.
"""

from typing import TYPE_CHECKING

import msgspec

from topics.attributed import AttributedEvent, AttributedTick, Holder, Parts
from topics.catalogue import CATALOGUE
from topics.samples import Job, Mig
from topics.topic import UInt, decoder

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


class SeriesDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """See :class:`topics.attributed.AttributedDevice`."""

    uuid: str
    index: UInt | None = None
    vendor: str = "nvidia"
    model: str | None = None
    pci_bus_id: str | None = None
    minor: UInt | None = None
    mig: Mig | None = None
    metrics: Metrics = Metrics()
    jobs: tuple[Job, ...] | None = None
    events: tuple[AttributedEvent, ...] | None = None
    info: dict[str, str] = {}
    xids: dict[str, UInt] = {}
    holders: tuple[Holder, ...] = ()
    unattributed: Parts | None = None
    split_scaled: bool = False
    conflict: str | None = None


class SeriesTick(AttributedTick, frozen=True, kw_only=True):
    """See :class:`topics.attributed.AttributedSample`."""

    node_labels: dict[str, str] = msgspec.field(default_factory=dict)
    devices: tuple[SeriesDevice, ...] = ()


decode = decoder(SeriesTick)
