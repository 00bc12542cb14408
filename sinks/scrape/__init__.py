"""Scrape: gpu.attributed -> /metrics, the latest value of every series, for Prometheus to scrape."""
