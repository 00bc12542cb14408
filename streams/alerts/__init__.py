"""Alerts: gpu.attributed -> gpu.alerts."""
