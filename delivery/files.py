"""Reads the files that users write: rules, prices, counters. None of them is large."""

from pathlib import Path

import yaml

_LARGEST_BYTES = 1 << 20
_pipes: dict[Path, bytes] = {}


class TooLarge(Exception):
    """The file can't be what it should be; the message says how large it may be."""


def read(path: Path) -> bytes:
    """The content of a file, of which no more is read than it may have. Raises OSError and TooLarge.

    A pipe, as a shell makes it of ``<(command)``, is empty after the first time: its content is kept for the next ones.
    """
    if (is_pipe := path.is_fifo()) and path in _pipes:
        return _pipes[path]
    with path.open("rb") as file:
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise TooLarge(f"larger than {_LARGEST_BYTES >> 20} MiB")
    if is_pipe:
        _pipes[path] = content
    return content


class YamlLoader(yaml.SafeLoader):
    """YAML as Go reads it: an escape that is no character, such as half of a surrogate pair, is an error of the file,
    and not of whoever writes the text later."""

    def scan_flow_scalar(self, style: str) -> yaml.ScalarToken:
        """The next text in quotes. Raises ScannerError."""
        start_mark = self.get_mark()
        try:
            token: yaml.ScalarToken = super().scan_flow_scalar(style)
            token.value.encode()
        except (ValueError, OverflowError) as error:
            problem = "a text in quotes has an escape that is no character"
            raise yaml.scanner.ScannerError(None, None, problem, start_mark) from error
        return token
