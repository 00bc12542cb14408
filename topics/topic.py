"""What a topic is: its name, key, record type and broker settings; the table of all topics; and decoders of records.

Source: the Kafka topic configuration reference for the names in :meth:`Topic.settings`.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from topics import TOPICS

R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")

SCHEMA = 1  # the version in every record; under one version no field changes its unit or meaning
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""The largest record batch that a topic accepts, and so the largest record that can be sent."""

PARTITIONS = 32
REPLICATION_FACTOR = 3

_HOUR_MS = 3_600_000

FIRST_VERSION = "0.1.0"

EXAMPLES = Path(__file__).parent / "examples"
"""An example record of each topic that has a record type, in a file named after the topic."""


def about(
    meaning: str, unit: str | None = None, *, words: tuple[str, ...] = (), since: str = FIRST_VERSION
) -> msgspec.Meta:
    """The documentation of a field, for the docs and the JSON Schema.

    ``unit`` is that of a number, "none" if it has none. ``words`` are the values of a string that this version knows.
    ``since`` is the version that first wrote the field.
    """
    if words:
        meaning += " A later version may have other words."
    keywords = {"x-unit": unit} if unit else {}
    if since != FIRST_VERSION:
        keywords["x-since"] = since
    return msgspec.Meta(description=meaning, examples=list(words) or None, extra_json_schema=keywords or None)


Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9._-]{1,253}\Z")]  # the name of a cluster or a node
Cluster = Annotated[Name, about("The cluster's name: 1-253 of A-Z a-z 0-9 . _ -")]
Node = Annotated[Name, about("The node's name: 1-253 of A-Z a-z 0-9 . _ -")]

UInt = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A count, a sequence number or a time in milliseconds since the epoch."""

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer. It is bounded, because JSON allows one of 400 digits, which no float can hold."""

Number = Int | float
"""A measured value."""

Version = Annotated[Literal[1], about("The version of the record's form.", "none")]


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """One topic of the contract.

    ``record`` is the type of its values (None: they are not our JSON). ``key`` describes its keys, and ``promise`` what
    a reader may rely on. ``retention_hours`` None: the last record of each key is kept. ``by_node``: all records of a
    node are in the partition of the key ``cluster/node``; such topics have the same number of partitions.
    ``segment_ms`` is short for a topic that is compacted and written often, because Kafka does not compact the newest
    segment.
    """

    name: str
    key: str = "cluster/node"
    record: type[msgspec.Struct] | None
    cleanup: Literal["delete", "compact", "compact,delete"]
    retention_hours: int | None = None
    by_node: bool = True
    promise: str
    segment_ms: int = _HOUR_MS

    @property
    def example(self) -> dict[str, Any]:
        """A record of the topic, as the docs and its JSON Schema show it."""
        return msgspec.json.decode((EXAMPLES / f"{self.name}.json").read_bytes(), type=dict[str, Any])

    def settings(self) -> dict[str, str]:
        """The broker settings that the topic must have, by their Kafka names."""
        settings = {
            "cleanup.policy": self.cleanup,
            "message.timestamp.type": "LogAppendTime",
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
            "segment.ms": str(self.segment_ms),
        }
        if self.retention_hours is not None:
            settings["retention.ms"] = str(self.retention_hours * _HOUR_MS)
        return settings


def node_key(cluster: str, node: str) -> bytes:
    """The key of every record that is about a node: ``cluster/node`` in UTF-8."""
    return f"{cluster}/{node}".encode()


@lru_cache(maxsize=8192)
def shared(text: str) -> str:
    """One object for equal texts that many records have. In Python 3.12, ``sys.intern`` keeps each text for ever."""
    return text


def load_topics() -> dict[str, Topic]:
    """Every topic of the contract by its name, in the order of the flow. Loads no Kafka client and no Faust."""
    topics: list[Topic] = [resolve_name(path) for path in TOPICS.values()]
    return {topic.name: topic for topic in topics}


def decoder(record: type[R]) -> Callable[[bytes], R]:
    """A function that decodes and validates the JSON of one record.

    For anything else it raises ``msgspec.DecodeError``, and no other error: dead-letter it. If a field is null and its
    type does not allow that, a second pass treats it as absent; our own producers write no such null. That pass takes
    sixty times the memory of the record, so one that is larger than a producer may write gets none.
    """
    return lenient(msgspec.json.Decoder(record).decode)


UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for what is no such JSON, is no UTF-8, or is nested too deeply."""


def lenient(strict: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """A ``strict`` decode function of msgspec, with the second pass and the errors of :func:`decoder`."""

    def decode(value: bytes) -> T:
        try:
            try:
                return strict(value)
            except msgspec.ValidationError:
                if len(value) > MAX_MESSAGE_BYTES:
                    raise
                return strict(msgspec.json.encode(_without_nulls(msgspec.json.decode(value))))
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(f"JSON is malformed: {error}") from error
        except RecursionError:
            raise msgspec.DecodeError("JSON is nested too deeply") from None

    return decode


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
