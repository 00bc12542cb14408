"""gpu.dead-letters: whatever could not be decoded or delivered, with the reason."""

from typing import NamedTuple

from topics.topic import Topic

MAX_VALUE_BYTES = 64 * 1024
MAX_KEY_BYTES = 1024
"""A longer key is no key of ours, and could make the dead letter itself too large to be sent."""

Headers = list[tuple[str, bytes]]


class Origin(NamedTuple):
    """Where a record stood when it could not be used."""

    topic: str
    partition: int
    offset: int


class Letter(NamedTuple):
    """A dead letter as it is sent."""

    key: bytes | None
    value: bytes
    headers: Headers


def letter(key: bytes | None, value: bytes | None, origin: Origin, *, stage: str, error: str, at_ms: int) -> Letter:
    """The dead letter of a record: the first 64 KiB of its value, its key unless that is overlong, and why it is here.

    ``stage`` is the component that gave up, ``error`` one line of what was wrong, ``at_ms`` when.
    """
    value = value or b""
    headers = {
        "topic": origin.topic,
        "partition": str(origin.partition),
        "offset": str(origin.offset),
        "stage": stage,
        "error": error[:1000],
        "length": str(len(value)),
        "at_ms": str(at_ms),
    }
    return Letter(
        key if key is not None and len(key) <= MAX_KEY_BYTES else None,
        value[:MAX_VALUE_BYTES],
        [(name, text.encode("utf-8", "replace")) for name, text in headers.items()],
    )


TOPIC = Topic(
    name="gpu.dead-letters",
    key="the original record's, unless that is longer than 1 KiB",
    record=None,
    cleanup="delete",
    retention_hours=7 * 24,
    by_node=False,
    promise=(
        "The value is the first 64 KiB of the original bytes. Headers: topic, partition, offset (of the original), "
        "stage, error, length (of the original, in bytes), at_ms."
    ),
    example={},
)
