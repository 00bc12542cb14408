"""Kafka -> the world: each sink reads gpu.attributed in a consumer group of its own."""

SINKS = {
    "remote-write": "sinks.remote_write.sink:RemoteWriteSink",
    "scrape": "sinks.scrape.sink:ScrapeSink",
}
"""Every sink, as an import string."""
