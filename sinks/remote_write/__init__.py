"""Remote write: gpu.attributed -> Prometheus, Mimir and whatever else speaks the protocol, 1.0 or 2.0.

A record's way: ``partition`` (``alerts`` for gpu.alerts) makes series of it and cuts requests, ``refusals`` delivers
what the receiver takes of them, ``send`` sends each until it is accepted or refused, ``encode_v1`` or ``encode_v2``
writes its bytes, and ``policy`` says what the answer means. ``sink`` puts them together, as ``config`` says.
"""
