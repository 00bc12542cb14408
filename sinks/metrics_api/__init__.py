"""Metrics API: gpu.attributed -> what autoscalers ask: plain JSON by workload, and custom.metrics.k8s.io."""
