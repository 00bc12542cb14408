"""The terminal application: ``gpustream top``, and ``gpustream run`` on a terminal."""
