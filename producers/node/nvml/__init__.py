"""NVML: what the driver says of each GPU, on threads of their own, since any of its calls may hang."""
