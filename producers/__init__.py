"""Producers: the world -> Kafka."""
