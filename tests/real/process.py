"""A server process of the tests: started, stopped, killed, paused, and never left behind.

Ports are held for the life of the server, so that it can be restarted on the same one: a socket that is bound with
SO_REUSEADDR and never listens keeps everybody else away, the kernel's choice of outgoing ports included, while a server
that sets SO_REUSEADDR, as Java's and Go's do, may still listen there.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

START_TIMEOUT_S = 60.0
LOG_TAIL_BYTES = 4000

REAPER = """
import os, signal, sys
alive = set()
for line in sys.stdin:
    sign, pid = line[0], int(line[1:])
    (alive.add if sign == "+" else alive.discard)(pid)
for pid in alive:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
"""Kills what is still alive when its standard input ends, which it does however the test run ends."""

_reaper: subprocess.Popen[str] | None = None


class StartError(Exception):
    """The server did not come up; the message ends with the tail of its log."""


class HeldPort:
    """A free port of 127.0.0.1, kept for one server until ``release``."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Lets go of the port."""
        self._socket.close()


def listens(port: int) -> bool:
    """Whether something accepts connections at that port of 127.0.0.1."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class Server:
    """One server process with its directory, log and held ports; a context manager that starts and stops it.

    A subclass gives the command (:meth:`command`) and what it means to be up (:meth:`ready`), and may prepare its
    directory (:meth:`prepare`), once. All methods block; a coroutine calls them by ``asyncio.to_thread``.
    ``environment`` is added to the tests' own.
    """

    stop_timeout_s = 20.0

    def __init__(self, directory: Path, *, ports: int = 1, environment: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self.environment = dict(environment or {})
        self.log = directory / "server.log"
        self.ports = [HeldPort() for _ in range(ports)]
        self._process: subprocess.Popen[bytes] | None = None
        self._prepared = False

    def prepare(self) -> None:
        """Makes the directory ready, before the first start."""

    def command(self) -> Sequence[str]:
        """The command that serves until it is stopped."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether the server answers requests."""
        raise NotImplementedError

    @property
    def running(self) -> bool:
        """Whether the process exists, paused or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id; raises ``RuntimeError`` when it is not started."""
        if self._process is None:
            raise RuntimeError("not started")
        return self._process.pid

    def start(self) -> Self:
        """Starts the server and waits until it answers; raises :class:`StartError` when it does not within a minute."""
        if not self.running:
            self.begin()
            self.wait_until(self.ready)
        return self

    def begin(self) -> None:
        """Starts the server, and leaves the waiting to the caller."""
        if not self._prepared:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.prepare()
            self._prepared = True
        with self.log.open("ab") as log:
            self._process = _spawn(self.command(), log, self.directory, self.environment)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until the condition holds; raises :class:`StartError` when the process ends or time runs out first."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not self.running:
                raise StartError(f"{type(self).__name__} ended: {self.log_tail()}")
            if time.monotonic() > deadline:
                self.kill9()
                raise StartError(f"{type(self).__name__} is not up after {timeout_s:g} s: {self.log_tail()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends the server in good order, and kills it if that takes longer than ``stop_timeout_s``."""
        if not self.running:
            return
        self.sigcont()
        self._signal(signal.SIGTERM)
        try:
            self._reap(self.stop_timeout_s)
        except subprocess.TimeoutExpired:
            self.kill9()

    def kill9(self) -> None:
        """Kills the server with SIGKILL: it flushes nothing."""
        if self.running:
            self._signal(signal.SIGKILL)
            self._reap(None)

    def restart(self) -> Self:
        """Starts the server again on the same ports and data, stopping it first if it runs."""
        self.stop()
        return self.start()

    def sigstop(self) -> None:
        """Pauses the server: connections stay open and nothing is answered.

        A thread that is on another core goes on until it next enters the kernel: returns when each has stopped.
        """
        self._signal(signal.SIGSTOP)
        self.wait_until(self._stopped)

    def sigcont(self) -> None:
        """Lets a paused server go on."""
        self._signal(signal.SIGCONT)

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        try:
            return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)
        except OSError:  # a thread that has just ended
            return False

    def close(self) -> None:
        """Ends the server at once, for good, and lets go of its ports."""
        self.kill9()
        for port in self.ports:
            port.release()

    def log_tail(self) -> str:
        """The end of what the server wrote."""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def _reap(self, timeout_s: float | None) -> None:
        if self._process is not None:
            self._process.wait(timeout_s)
            _tell_reaper(f"-{self._process.pid}")

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


class HttpServer(Server):
    """A server on HTTP; it is up when it answers 200 at ``health``."""

    health = "/-/ready"

    @property
    def url(self) -> str:
        """The base URL, without a slash at the end."""
        return f"http://127.0.0.1:{self.ports[0].number}"

    def get(self, path: str, timeout_s: float = 2) -> str | None:
        """The body of an answer with 200, or None."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=timeout_s) as answer:  # noqa: S310 - http, and ours
                text: str = answer.read().decode()
                return text
        except OSError:
            return None

    def ready(self) -> bool:
        """Whether it says that it is ready."""
        return self.get(self.health) is not None


def _spawn(
    command: Sequence[str], log: IO[bytes], directory: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=directory,
        env=os.environ | environment,
        start_new_session=True,
    )
    _tell_reaper(f"+{process.pid}")
    return process


def _tell_reaper(line: str) -> None:
    global _reaper
    if _reaper is None:
        _reaper = subprocess.Popen(
            [sys.executable, "-S", "-c", REAPER], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
    if _reaper.stdin is not None:
        print(line, file=_reaper.stdin, flush=True)
