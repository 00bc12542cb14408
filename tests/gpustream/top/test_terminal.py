"""``gpustream run`` and ``gpustream top`` on a real terminal, by what they write to it."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.eventually import eventually_sync

pytestmark = pytest.mark.slow

ENTERS, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"
COLOUR = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|9[0-7]|38)(?:;[0-9;]*)?m")


class Terminal:
    """A process on a terminal of its own, and all that it wrote there."""

    def __init__(
        self, *arguments: str, size: tuple[int, int] = (80, 24), environ: Mapping[str, str] | None = None
    ) -> None:
        ours, theirs = pty.openpty()
        self._fd = ours
        self.resize(*size)
        environment = {**os.environ, "TERM": "xterm-256color", **(environ or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpustream", *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.written = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._fd, 65536)
            except OSError:  # the other side is closed
                return
            if not read:
                return
            self.written += read

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def shows(self, part: bytes, since: int = 0) -> None:
        """Waits until this was written after that place."""
        eventually_sync(lambda: part in self.written[since:])

    def ended(self) -> bytes:
        """All that it wrote, when it has ended."""
        self.process.wait(30)
        self._reader.join(10)
        return bytes(self.written)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._fd)


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts the command on a terminal; what still runs is killed in the end."""
    started: list[Terminal] = []

    def run(*arguments: str, **how: Any) -> Terminal:
        started.append(Terminal(*arguments, **how))
        return started[-1]

    yield run
    for one in started:
        one.close()


def run_options(port: int) -> list[str]:
    return [
        "run",
        "--simulate",
        "2x4",
        "--interval",
        "250ms",
        "--listen",
        "off",
        "--scrape-listen",
        f"127.0.0.1:{port}",
    ]


def test_a_run_asks_before_it_stops_and_leaves_the_summary_on_a_terminal_as_it_was(start: Any, port: int) -> None:
    terminal = start(*run_options(port))
    terminal.shows(b"GPUs by node")
    terminal.press(b"3")
    terminal.shows(b"STATUS")
    terminal.press(b"q")
    terminal.shows(b"Stop the pipeline?")
    terminal.press(b"n")
    mark = len(terminal.written)
    terminal.resize(200, 60)
    os.killpg(terminal.process.pid, signal.SIGWINCH)
    terminal.shows(b"MODEL", since=mark)
    terminal.press(b"qy")
    written = terminal.ended()

    assert terminal.process.returncode == 0
    left = written[written.rindex(LEAVES) :]
    assert written.count(ENTERS) == 1
    assert b"pods at a time" in left
    assert left.split()[-2:] == [b"lost", b"0"]
    assert b"\x1b[?25h" in written[written.index(ENTERS) :]


def test_ctrl_c_stops_a_run_at_once_and_no_colour_is_written_if_none_is_wanted(start: Any, port: int) -> None:
    terminal = start(*run_options(port), environ={"NO_COLOR": "1"})
    terminal.shows(b"GPUs by node")
    terminal.press(b"\x03")
    written = terminal.ended()

    assert terminal.process.returncode == 0
    assert written.split()[-2:] == [b"lost", b"0"]
    assert COLOUR.findall(written) == []


def test_a_plain_run_has_no_screen(start: Any, port: int) -> None:
    terminal = start(*run_options(port), "--plain", "--duration", "1s")
    written = terminal.ended()

    assert terminal.process.returncode == 0
    assert ENTERS not in written
    assert written.split()[-2:] == [b"lost", b"0"]


def test_a_component_that_fails_is_said_on_a_terminal_as_it_was(start: Any, port: int) -> None:
    terminal = start(*run_options(port), "--truth", "/proc/version")
    written = terminal.ended()

    assert terminal.process.returncode == 1
    assert b"simulated failed" in written[written.rindex(LEAVES) :]
