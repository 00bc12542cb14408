"""gpu.dead-letters: whatever could not be decoded or delivered, with the reason."""

from collections.abc import Iterable
from typing import NamedTuple

from topics.topic import Topic

MAX_VALUE_BYTES = 64 * 1024
MAX_KEY_BYTES = 1024  # a longer key is no key of ours, and could make the dead letter itself too large to be sent
RESUBMITTED = "resubmitted"
"""The header of a receipt: the offset of the letter, in the same partition, that was sent to its topic again."""

_LONGEST_REASON = 60

HEADERS = {
    "topic": ("The topic of the original record.", None),
    "partition": ("Its partition there.", "none"),
    "offset": ("Its offset there.", "none"),
    "stage": ("The component that gave up.", None),
    "error": ("What was wrong, in one line. Before its first colon stands the class of the error.", None),
    "length": ("How long the original value is.", "bytes"),
    "at_ms": ("When the component gave up.", "ms since the epoch"),
}
"""What the headers of a dead letter say, and their units; each is text in UTF-8."""

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


class Cause(NamedTuple):
    """What the headers of a dead letter say: see :func:`letter`. ``length`` is that of the original value."""

    origin: Origin
    stage: str
    error: str
    length: int
    at_ms: int

    @property
    def reason(self) -> str:
        """The class of the error: what stands before its first colon."""
        return self.error.partition(":")[0][:_LONGEST_REASON].strip()


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


def cause(headers: Iterable[tuple[str, bytes]]) -> Cause | None:
    """What the headers of a record of the topic say; None if it is no dead letter, such as a receipt."""
    said = {name: value.decode("utf-8", "replace") for name, value in headers}
    try:
        origin = Origin(said["topic"], int(said["partition"]), int(said["offset"]))
        return Cause(origin, said["stage"], said["error"], int(said["length"]), int(said["at_ms"]))
    except (KeyError, ValueError):
        return None


def receipt(offset: int) -> Headers:
    """The headers of the receipt of a letter, which stands in the letter's partition and has its key and no value."""
    return [(RESUBMITTED, str(offset).encode())]


def resubmitted(headers: Iterable[tuple[str, bytes]]) -> int | None:
    """The offset of the letter that a receipt is of; None if the record is no receipt."""
    said = dict(headers).get(RESUBMITTED, b"")
    return int(said) if said.isdigit() else None


TOPIC = Topic(
    name="gpu.dead-letters",
    key="the original record's, unless that is longer than 1 KiB",
    record=None,
    cleanup="delete",
    retention_hours=7 * 24,
    by_node=False,
    promise=(
        "The value is the first 64 KiB of the original bytes, and the headers say the rest. A record with the header "
        "resubmitted is no letter: it says that the letter at that offset of its partition was sent to its topic again."
    ),
)
