"""The cluster: its pods, nodes, claims and owners as the Kubernetes API tells -> gpu.workloads."""
