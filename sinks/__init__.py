"""Kafka -> the world: each sink reads gpu.attributed in a consumer group of its own."""

SINKS = {
    "remote-write": "sinks.remote_write.sink:RemoteWriteSink",
}
"""Every sink, as an import string."""
