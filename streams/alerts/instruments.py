"""What the alert stream says of itself."""

from streams.bookkeeping import instruments
from topics.instruments import Instrument

INSTRUMENTS = (
    Instrument(
        "gpustream_alerts_ticks_total",
        "counter",
        "Node ticks read: judged, new_log (judged; the first after gpu.samples was deleted and created again), replayed"
        " (judged before), resumed (the first of a node that another worker had judged already).",
        ("outcome",),
    ),
    Instrument(
        "gpustream_alerts_transitions_total",
        "counter",
        "Alerts that fired, or were resolved, and were acknowledged; after a crash some again.",
        ("alertname", "state"),
    ),
    Instrument(
        "gpustream_alerts_written_total",
        "counter",
        "Records acknowledged by the broker: alert, repeat (an open alert written again, daily), deletion, state.",
        ("record",),
    ),
    Instrument(
        "gpustream_alerts_unsendable_total",
        "counter",
        "Records that the broker does not take, too large: left out.",
        ("record",),
    ),
    Instrument("gpustream_alerts_firing", "gauge", "Alerts that fire, by severity.", ("severity",)),
    Instrument("gpustream_alerts_pending", "gauge", "Conditions that hold, but not for long enough yet."),
    Instrument("gpustream_alerts_silent_nodes", "gauge", "Nodes without a tick for half a minute or more."),
    Instrument(
        "gpustream_alerts_delay_seconds",
        "histogram",
        "From when a tick was logged until its alert was acknowledged.",
        buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
    ),
    *instruments("alerts"),
)
