"""What the attribution stream says of itself."""

from topics.instruments import Instrument

INSTRUMENTS = (
    Instrument(
        "gpustream_attribution_ticks_total",
        "counter",
        "Node ticks attributed: exact by the snapshot they name, late by the last one known, none without one.",
        ("attribution",),
    ),
    Instrument(
        "gpustream_attribution_read_total", "counter", "Records read, replays after a rebalance included.", ("topic",)
    ),
    Instrument(
        "gpustream_attribution_dead_lettered_total",
        "counter",
        "Records that went to gpu.dead-letters, by why: undecodable, key, oversized or unsendable.",
        ("topic", "reason"),
    ),
    Instrument("gpustream_attribution_held_ticks", "gauge", "Node ticks that wait for a snapshot or a pod."),
    Instrument("gpustream_attribution_open_bytes", "gauge", "Bytes of records that were read and are not finished."),
    Instrument("gpustream_attribution_nodes", "gauge", "Nodes whose state is held."),
    Instrument("gpustream_attribution_lag_records", "gauge", "Records not yet finished, by topic.", ("topic",)),
    Instrument(
        "gpustream_attribution_unknown_device_ids_total", "counter", "Device ids of a snapshot in no known grammar."
    ),
    Instrument(
        "gpustream_attribution_misplaced_nodes_total",
        "counter",
        "Nodes whose key does not belong in their partition: another partitioner wrote them.",
    ),
    Instrument("gpustream_attribution_rebalances_total", "counter", "Times that partitions were taken away."),
    Instrument("gpustream_attribution_holes_total", "counter", "Gaps in the offsets of a log that proved real."),
    Instrument(
        "gpustream_attribution_lost_offsets_total",
        "counter",
        "Offsets that retention took before they were read.",
    ),
)
