"""``gpustream dead-letters``: what could not be used, and why; and how it is sent again after a fix."""
