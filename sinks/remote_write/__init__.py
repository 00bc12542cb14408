"""Remote write: gpu.attributed -> Prometheus, Mimir and whatever else speaks the protocol, 1.0 or 2.0.

A record's way: ``partition`` puts it into the ``queue`` of its node, which makes requests of what ``nodes`` write;
``refusals`` delivers what the receiver takes of a request, ``send`` sends it until it is accepted or refused,
``encode_v1`` or ``encode_v2`` writes its bytes, and ``policy`` says what the answer means. ``alerts`` does for
gpu.alerts what the first three do. ``sink`` puts them together.
"""
