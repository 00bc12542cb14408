"""gpu.dead-letters: records that could not be decoded or delivered, with the reason."""

from collections.abc import Iterable
from typing import NamedTuple

from topics.topic import Topic

MAX_VALUE_BYTES = 64 * 1024
MAX_KEY_BYTES = 1024  # no key of ours is longer; a longer one could make the dead letter too large to be sent
RESUBMITTED = "resubmitted"
"""The header of a receipt: the offset, in the same partition, of the letter that was sent to its topic again."""

_LONGEST_REASON = 60
_LONGEST_OFFSET = 20

HEADERS = {
    "topic": ("The topic of the original record.", None),
    "partition": ("Its partition there.", "none"),
    "offset": ("Its offset there.", "none"),
    "stage": ("The component that gave up.", None),
    "error": ("What was wrong, in one line. Before its first colon stands the class of the error.", None),
    "length": ("How long the original value is.", "bytes"),
    "at_ms": ("When the component gave up.", "ms since the epoch"),
}
"""The headers of a dead letter, with meaning and unit; each value is text in UTF-8."""

Headers = list[tuple[str, bytes]]


class Origin(NamedTuple):
    """The place of a record that could not be used."""

    topic: str
    partition: int
    offset: int


class Letter(NamedTuple):
    """A dead letter as it is sent."""

    key: bytes | None
    value: bytes
    headers: Headers


class Cause(NamedTuple):
    """The parsed headers of a dead letter: see :func:`letter`. ``length`` is that of the original value in bytes."""

    origin: Origin
    stage: str
    error: str
    length: int
    at_ms: int

    @property
    def reason(self) -> str:
        """The class of the error: the text before its first colon."""
        return self.error.partition(":")[0][:_LONGEST_REASON].strip()


def letter(key: bytes | None, value: bytes | None, origin: Origin, *, stage: str, error: str, at_ms: int) -> Letter:
    """The dead letter of a record: the first 64 KiB of its value, its key unless that is too long, and the reason.

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


def cause(headers: Iterable[tuple[str, bytes | None]]) -> Cause | None:
    """Parse the headers of a record of the topic; None if it is no dead letter, such as a receipt."""
    values = {name: (value or b"").decode("utf-8", "replace") for name, value in headers}
    try:
        origin = Origin(values["topic"], int(values["partition"]), int(values["offset"]))
        return Cause(origin, values["stage"], values["error"], int(values["length"]), int(values["at_ms"]))
    except (KeyError, ValueError):
        return None


def receipt(offset: int) -> Headers:
    """The headers of a letter's receipt: a record in the letter's partition, with its key or an empty one, no value."""
    return [(RESUBMITTED, str(offset).encode())]


def resubmitted(headers: Iterable[tuple[str, bytes | None]]) -> int | None:
    """The offset of a receipt's letter; None if the record is no receipt."""
    offset = dict(headers).get(RESUBMITTED) or b""
    return int(offset) if offset.isdigit() and len(offset) < _LONGEST_OFFSET else None


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
