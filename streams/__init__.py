"""Streams: Kafka -> Kafka."""

STREAMS = {
    "attribution": "streams.attribution.component:Attribution",
    "alerts": "streams.alerts.component:Alerts",
}
"""Every stream, as an import string."""

STREAMS = {
    "attribution": "streams.attribution.component:Attribution",
    "alerts": "streams.alerts.component:Alerts",
}
"""Every stream, as an import string of its component."""
