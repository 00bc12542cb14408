"""A tick of gpu.attributed as series: their labels, names and values, once for all sinks that write series."""
