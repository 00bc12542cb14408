"""Alertmanager: gpu.alerts -> the open alerts of one or several Alertmanagers, API v2."""
