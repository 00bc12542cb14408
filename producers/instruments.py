"""What every producer counts about itself."""

from delivery.instruments import Instrument

MADE = "gpustream_producer_ticks_made_total"
VALUES = "gpustream_producer_values_made_total"
SENT = "gpustream_producer_ticks_sent_total"
DROPPED = "gpustream_producer_ticks_dropped_total"
HELD = "gpustream_producer_ticks_held"
BUFFERED = "gpustream_producer_buffered_bytes"
SNAPSHOTS = "gpustream_producer_snapshots_sent_total"
SNAPSHOTS_DROPPED = "gpustream_producer_snapshots_dropped_total"
WORKLOADS = "gpustream_producer_workloads_sent_total"
WORKLOADS_DROPPED = "gpustream_producer_workloads_dropped_total"
RUNS = "gpustream_producer_runs_total"

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument(MADE, "counter", "Ticks that were sampled; each ends as sent, dropped or held."),
    Instrument(VALUES, "counter", "Metric values in the ticks that were sampled."),
    Instrument(SENT, "counter", "Ticks that the broker acknowledged."),
    Instrument(
        DROPPED,
        "counter",
        "Ticks that were never acknowledged: buffer_full and buffer_age gave way to newer ones, too_large and refused"
        " could never be sent, unencodable could not be written, stopped were left at the stop.",
        ("reason",),
    ),
    Instrument(HELD, "gauge", "Ticks that wait to be sent or to be acknowledged."),
    Instrument(BUFFERED, "gauge", "Bytes of the ticks that are held; those that wait for long are compressed."),
    Instrument(SNAPSHOTS, "counter", "Snapshots of allocations that the broker acknowledged, repeats included."),
    Instrument(SNAPSHOTS_DROPPED, "counter", "Snapshots that could never be sent, by reason.", ("reason",)),
    Instrument(WORKLOADS, "counter", "Records of workloads that the broker acknowledged, repeats included."),
    Instrument(
        WORKLOADS_DROPPED,
        "counter",
        "Records of workloads that were not sent: superseded by a newer one while the broker was away, or could never"
        " be sent.",
        ("reason",),
    ),
    Instrument(RUNS, "counter", "Runs that began: one per node at the start, and one each time a clock stepped back."),
)

DROP_REASONS = ("buffer_full", "buffer_age", "too_large", "refused", "unencodable", "stopped")
