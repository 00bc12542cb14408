"""``gpustream usage``: who had how many GPU-hours, and what they cost; also on a bill."""
