"""``gpustream report``: who had the GPUs, what of them was used, what was wasted, and which alerts fired."""
