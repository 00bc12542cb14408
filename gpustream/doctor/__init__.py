"""``gpustream doctor``: checks a running pipeline end to end."""
