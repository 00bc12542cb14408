"""Remote write: gpu.attributed -> Prometheus, Mimir and whatever else speaks the protocol, 1.0 or 2.0."""
