"""NVML: what the driver tells of each GPU, on threads of their own, since any of its calls may hang."""
