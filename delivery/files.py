"""Reads the files that users write: rules, prices, counters. None of them is large."""

from pathlib import Path

_LARGEST_BYTES = 1 << 20


class TooLarge(Exception):
    """The file can't be what it should be; the message says how large it may be."""


def read(path: Path) -> bytes:
    """The content of a file, of which no more is read than it may have. Raises OSError and TooLarge."""
    with path.open("rb") as file:
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise TooLarge(f"larger than {_LARGEST_BYTES >> 20} MiB")
    return content
