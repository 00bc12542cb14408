"""The node: its GPUs as NVML tells, its pods as the kubelet tells -> gpu.samples, gpu.allocations."""
