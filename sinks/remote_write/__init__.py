"""Remote write: gpu.attributed -> Prometheus, Mimir and any other receiver of the protocol, 1.0 or 2.0.

The way of a record: ``partition`` puts it into its node's lane of the ``queue``. ``nodes`` turns it into samples, and
the queue puts many ticks into a request. ``refusals`` delivers the part of the request that the receiver accepts,
``send`` sends it until it is accepted or refused, ``encode_v1`` or ``encode_v2`` encodes it, and ``policy`` interprets
the answer. ``alerts`` and ``usage`` do the first three steps for gpu.alerts and gpu.usage. ``sink`` puts all of it
together.
"""
