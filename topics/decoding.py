"""How a record is read: what is null is what is absent, unknown fields pass, and a bad one raises one kind of error."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

R = TypeVar("R", bound=msgspec.Struct)


def decoder(record: type[R]) -> Callable[[bytes], R]:
    """A function that decodes and validates the JSON of one record.

    It raises ``msgspec.DecodeError``, and nothing else, for what is not such a record: dead-letter it. Nulls where the
    type has none cost a second pass; our own producers write none.
    """
    strict = msgspec.json.Decoder(record)

    def decode(value: bytes) -> R:
        try:
            try:
                return strict.decode(value)
            except msgspec.ValidationError:
                return msgspec.convert(_without_nulls(msgspec.json.decode(value)), record)
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
