"""What a person sees of a pipeline on a terminal: ``gpustream top``, and ``gpustream run`` on a terminal."""
