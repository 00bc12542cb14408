"""What the remote-write sink says of itself."""

from sinks import outcomes
from topics.instruments import Instrument

COMPONENT = "remote_write"

INSTRUMENTS: tuple[Instrument, ...] = (
    *outcomes.instruments(COMPONENT),
    Instrument(
        "gpustream_remote_write_values_delivered_total",
        "counter",
        "Values of metrics that the receiver accepted, without derived series and staleness markers.",
    ),
    Instrument(
        "gpustream_remote_write_values_refused_total",
        "counter",
        "Values of metrics that the receiver refused, by reason.",
        ("reason",),
    ),
    Instrument(
        "gpustream_remote_write_values_left_out_total",
        "counter",
        "Values of metrics that were not sent, because the receiver refused their series in the ten minutes before, by "
        "the reason of that.",
        ("reason",),
    ),
    Instrument(
        "gpustream_remote_write_series_left_out",
        "gauge",
        "Series that are not sent for ten minutes, because the receiver refused them.",
    ),
    Instrument(
        "gpustream_remote_write_values_clashing_total",
        "counter",
        "Samples left out because another device of the tick has the same labels.",
    ),
    Instrument(
        "gpustream_remote_write_alert_samples_refused_total",
        "counter",
        "Samples of gpu_alert_firing that the receiver refused, by reason; left_out: not sent for that.",
        ("reason",),
    ),
    Instrument(
        "gpustream_remote_write_samples_accepted_total", "counter", "Samples accepted, with derived ones and markers."
    ),
    Instrument("gpustream_remote_write_markers_total", "counter", "Series ended with a staleness marker."),
    Instrument(
        "gpustream_remote_write_requests_total",
        "counter",
        "Attempts, by protocol and what the answer meant.",
        ("protocol", "result"),
    ),
    Instrument(
        "gpustream_remote_write_request_seconds",
        "histogram",
        "How long an attempt took.",
        buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    ),
    Instrument("gpustream_remote_write_request_bytes_total", "counter", "Bytes sent, compressed."),
    Instrument(
        "gpustream_remote_write_receiver_failing",
        "gauge",
        "1 while the receiver does not answer, answers with a failure, or refuses everything, else 0.",
    ),
)
