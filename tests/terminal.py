"""A process on its own terminal, and its output there."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping

from tests.eventually import eventually_sync


class Terminal:
    """``python -m gpustream`` with these arguments on a terminal."""

    def __init__(
        self, *arguments: str, size: tuple[int, int] = (80, 24), environ: Mapping[str, str] | None = None
    ) -> None:
        our_end, child_end = pty.openpty()
        self._fd = our_end
        self.resize(*size)
        ours_alone = ("COLUMNS", "LINES")  # pytest's workers have them, and they override the terminal's size
        inherited = {name: value for name, value in os.environ.items() if name not in ours_alone}
        environment = {**inherited, "TERM": "xterm-256color", **(environ or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpustream", *arguments],
            stdin=child_end, stdout=child_end, stderr=child_end, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(child_end)
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
        """Changes the size of the terminal; the process gets a SIGWINCH."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        """Types these keys."""
        os.write(self._fd, keys)

    def shows(self, part: bytes, since: int = 0) -> None:
        """Waits until ``part`` is in the output, at or after index ``since``."""
        eventually_sync(lambda: part in self.written[since:])

    def ended(self) -> bytes:
        """Waits for the process's end, and returns its whole output."""
        self.process.wait(30)
        self._reader.join(10)
        return bytes(self.written)

    def close(self) -> None:
        """Kills the process, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._fd)
