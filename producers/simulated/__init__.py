"""A simulated fleet: nodes, GPUs and pods that behave like real ones, the same for the same seed."""
