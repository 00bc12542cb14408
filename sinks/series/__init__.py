"""A tick of gpu.attributed as series: their labels, names and values, once for all sinks that write series.

``translation`` is the way in: it takes a tick, and asks ``labels`` for labels and ``metrics`` for names and values.
What comes out is in ``model``: sets of series, and their samples.
"""
