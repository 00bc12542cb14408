"""Kafka -> the world: each sink reads gpu.attributed, gpu.alerts or both in a consumer group of its own."""

SINKS = {
    "remote-write": "sinks.remote_write.sink:RemoteWriteSink",
    "scrape": "sinks.scrape.sink:ScrapeSink",
    "alertmanager": "sinks.alertmanager.sink:AlertmanagerSink",
    "webhook": "sinks.webhook.sink:WebhookSink",
}
"""Every sink, as an import string."""
