"""From a record of the log to a record of the contract, or the reason why it is none."""

from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import msgspec

from topics.topic import MAX_MESSAGE_BYTES, node_key

Reason = Literal["undecodable", "key", "oversized", "unsendable"]


class OfNode(Protocol):
    """A record about a node."""

    @property
    def cluster(self) -> str: ...
    @property
    def node(self) -> str: ...


R = TypeVar("R", bound=OfNode)


class Malformed(Exception):
    """A record that can never be used: ``reason`` is its class, the message says what is wrong. Dead-letter it."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


def decoded(decode: Callable[[bytes], R], key: bytes | None, value: bytes | None) -> R:
    """The record of a topic that is keyed by node. Raises Malformed."""
    if value is None:
        raise Malformed("undecodable", "no value")
    if len(value) > MAX_MESSAGE_BYTES:
        raise Malformed("oversized", f"{len(value)} bytes, and a record may have {MAX_MESSAGE_BYTES}")
    try:
        record = decode(value)
    except msgspec.DecodeError as error:
        raise Malformed("undecodable", str(error)) from error
    if key != node_key(record.cluster, record.node):
        raise Malformed("key", f"the key {key!r:.300} is not {record.cluster}/{record.node}")
    return record
