"""gpu.dead-letters: whatever could not be decoded or delivered, with the reason."""

from typing import NamedTuple

from topics.topic import Topic

MAX_VALUE_BYTES = 64 * 1024

Headers = list[tuple[str, bytes]]


class Origin(NamedTuple):
    """Where a record stood when it could not be used."""

    topic: str
    partition: int
    offset: int


def letter(value: bytes, origin: Origin, *, stage: str, error: str, at_ms: int) -> tuple[bytes, Headers]:
    """The value and headers of a dead letter: the first 64 KiB of the original bytes, and why they are here.

    ``stage`` is the component that gave up, ``error`` one line of what was wrong, ``at_ms`` when.
    """
    headers = {
        "topic": origin.topic,
        "partition": str(origin.partition),
        "offset": str(origin.offset),
        "stage": stage,
        "error": error[:1000],
        "length": str(len(value)),
        "at_ms": str(at_ms),
    }
    return value[:MAX_VALUE_BYTES], [(name, text.encode("utf-8", "replace")) for name, text in headers.items()]


TOPIC = Topic(
    name="gpu.dead-letters",
    key="the original record's",
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
