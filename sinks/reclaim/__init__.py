"""Reclaim: gpu.alerts -> what a namespace lets be done about workloads that waste GPUs, in its cluster."""
