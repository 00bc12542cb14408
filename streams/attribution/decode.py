"""From a record of the log to a record of the contract, or the reason why it is none."""

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from topics.allocations import Allocations
from topics.decoding import decoder
from topics.samples import Sample
from topics.topic import MAX_MESSAGE_BYTES, node_key
from topics.workloads import NodeWorkloads

Reason = Literal["undecodable", "key", "oversized", "unsendable"]
NodeRecord = Sample | Allocations | NodeWorkloads

_DECODERS: Mapping[str, Callable[[bytes], NodeRecord]] = {
    "gpu.samples": decoder(Sample),
    "gpu.allocations": decoder(Allocations),
    "gpu.workloads": decoder(NodeWorkloads),
}


class Malformed(Exception):
    """A record that can never be used: ``reason`` is its class, the message says what is wrong. Dead-letter it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


def decode(topic: str, key: bytes | None, value: bytes | None) -> NodeRecord:
    """The record of a node topic. Raises Malformed."""
    if value is None:
        raise Malformed("undecodable", "no value")
    if len(value) > MAX_MESSAGE_BYTES:
        raise Malformed("oversized", f"{len(value)} bytes, and a record may have {MAX_MESSAGE_BYTES}")
    try:
        record = _DECODERS[topic](value)
    except msgspec.DecodeError as error:
        raise Malformed("undecodable", str(error)) from error
    if key != node_key(record.cluster, record.node):
        raise Malformed("key", f"the key {key!r:.300} is not {record.cluster}/{record.node}")
    return record
