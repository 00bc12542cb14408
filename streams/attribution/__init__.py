"""gpu.samples, gpu.allocations and gpu.workloads -> gpu.attributed."""
