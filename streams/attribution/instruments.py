"""What the attribution stream says of itself."""

from streams.bookkeeping import instruments
from topics.instruments import Instrument

INSTRUMENTS = (
    Instrument(
        "gpustream_attribution_ticks_total",
        "counter",
        "Node ticks attributed: exact by the snapshot they name, late by the last one known, none without one.",
        ("attribution",),
    ),
    Instrument("gpustream_attribution_held_ticks", "gauge", "Node ticks that wait for a snapshot or a pod."),
    Instrument(
        "gpustream_attribution_unknown_device_ids_total", "counter", "Device ids of a snapshot in no known grammar."
    ),
    *instruments("attribution"),
)
