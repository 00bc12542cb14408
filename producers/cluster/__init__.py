"""The cluster: its pods, nodes, claims and owners as the Kubernetes API has them -> gpu.workloads."""
