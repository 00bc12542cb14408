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
    Instrument(
        "gpustream_attribution_misordered_workloads_total",
        "counter",
        "Records of gpu.workloads that were logged before a time to which they were taken as read: the clocks of two "
        "brokers are more than half a second apart, and a replay may name other pods.",
    ),
    *instruments("attribution"),
)
