"""The node: its GPUs from NVML, its pods from the kubelet -> gpu.samples, gpu.allocations."""
