"""What the Alertmanager sink says of itself."""

from sinks import outcomes, receiver
from topics.instruments import Instrument

COMPONENT = "alertmanager"

INSTRUMENTS: tuple[Instrument, ...] = (
    *outcomes.instruments(COMPONENT),
    *receiver.instruments(COMPONENT),
    Instrument("gpustream_alertmanager_open_alerts", "gauge", "Alerts that are told again and again.", ("receiver",)),
    Instrument(
        "gpustream_alertmanager_resent_total",
        "counter",
        "Alerts that were told again, because they are open or have ended lately.",
        ("receiver",),
    ),
    Instrument(
        "gpustream_alertmanager_refused_total",
        "counter",
        "Alerts that were refused, each time that they were told.",
        ("receiver",),
    ),
)
