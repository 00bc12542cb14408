"""Streams: Kafka -> Kafka."""
