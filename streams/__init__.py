"""Streams: Kafka -> Kafka."""

STREAMS = {
    "attribution": "streams.attribution.component:Attribution",
}
"""Every stream, as an import string."""

STREAMS = {
    "attribution": "streams.attribution.component:Attribution",
}
"""Every stream, as an import string of its component."""
