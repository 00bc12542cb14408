"""Sinks: Kafka -> the world."""
