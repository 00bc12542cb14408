"""A proxy in front of a remote-write receiver that fails as receivers fail, and records what was accepted, and when."""

import contextlib
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple

from tests.sinks.remote_write import wire

Failure = Literal["away", "hangs", "500", "503", "429", "reset", "slow", "unanswered"]
"""What the receiver does to each request: refuse the connection; take it and never answer; answer with that status;
break the connection in the middle of the body; answer after 5 s; store the request and break the connection."""

FAILURES: tuple[Failure, ...] = ("away", "hangs", "500", "503", "429", "reset", "slow", "unanswered")

SLOW_S = 5.0
_OF_EVERY_TICK = "gpu_memory_used"
_HOP = {"connection", "host", "content-length", "transfer-encoding", "date"}


class Accepted(NamedTuple):
    """A node's tick that the receiver took: CLUSTER/NODE, the time of the reading, and when it was first accepted."""

    node: str
    ts_ms: int
    at_ms: int


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    proxy: "FaultyReceiver"

    def handle_error(self, *_: object) -> None:
        """A sink that is killed breaks its connections."""


class FaultyReceiver:
    """Forwards POSTs to ``target``, and fails them inside ``failing``.

    Once armed with ``kill_at_next``, the next write that the receiver accepts is never answered, and what was given is
    called instead, after the receiver has stored the write: the sink that it kills has not committed.
    ``newest_ms`` is the latest reading of each node that was accepted.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.failure: Failure | None = None
        self.kills = 0
        self.newest_ms: dict[str, int] = {}
        self.accepted: list[Accepted] = []
        self._kill: Callable[[], None] | None = None
        self.mended = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Request)
        self._server.proxy = self
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Where to write to."""
        return f"http://localhost:{self._server.server_address[1]}/api/v1/write"

    @contextlib.contextmanager
    def failing(self, failure: Failure) -> Iterator[None]:
        """Every request fails in this way for as long as it lasts."""
        self.mended.clear()
        self.failure = failure
        try:
            yield
        finally:
            self.failure = None
            self.mended.set()

    def kill_at_next(self, kill: Callable[[], None]) -> None:
        """Kill at the next accepted write."""
        self._kill = kill

    def close(self) -> None:
        """Stop serving."""
        self.mended.set()
        self._server.shutdown()
        self._server.server_close()

    def forward(self, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """Forward the request; returns the answer of the receiver. Raises OSError if it does not."""
        request = urllib.request.Request(self.target, data=body, headers=headers, method="POST")  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                status, reply, text = answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, reply, text = error.code, dict(error.headers), error.read()
        return status, reply, text

    def note(self, body: bytes, version: str) -> None:
        """Remember which ticks were in an accepted request."""
        at_ms, read_request = int(time.time() * 1000), wire.read_v2 if version.startswith("2") else wire.read_v1
        samples = read_request(wire.unsnappy(body), _OF_EVERY_TICK)
        labels = [(dict(sample.labels), sample.ts_ms) for sample in samples]
        with self._lock:
            for node, ts_ms in sorted(
                {
                    (f"{series_labels['k8s_cluster_name']}/{series_labels['k8s_node_name']}", read_ms)
                    for series_labels, read_ms in labels
                }
            ):
                if ts_ms > self.newest_ms.get(node, 0):
                    self.newest_ms[node] = ts_ms
                    self.accepted.append(Accepted(node, ts_ms, at_ms))

    def to_kill(self) -> Callable[[], None] | None:
        with self._lock:
            kill, self._kill = self._kill, None
            self.kills += kill is not None
        return kill


class _Request(BaseHTTPRequestHandler):
    """A request of the sink."""

    server: _Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length, failure = int(self.headers.get("Content-Length", 0)), self.server.proxy.failure
        body = self.rfile.read({"away": 0, "reset": length // 2}.get(str(failure), length))
        if failure == "hangs":
            self.server.proxy.mended.wait()
        if failure == "slow":
            time.sleep(SLOW_S)
        if failure in {"away", "reset", "hangs"}:
            self._break()
        elif failure in {"500", "503", "429"}:
            self._answer(int(failure), {"Retry-After": "1"} if failure == "429" else {}, b"as asked")
        else:
            self._pass_on(body, is_answered=failure != "unanswered")

    def _pass_on(self, body: bytes, *, is_answered: bool) -> None:
        """Forward the request; its answer is returned if ``is_answered``."""
        try:
            answer = self.server.proxy.forward(body, {k: v for k, v in self.headers.items() if k.lower() not in _HOP})
        except OSError:  # it is away itself
            return self._break()
        if answer[0] < 300:
            self.server.proxy.note(body, self.headers["X-Prometheus-Remote-Write-Version"])
            if kill := self.server.proxy.to_kill():
                is_answered = False
                kill()
        return self._answer(*answer) if is_answered else self._break()

    def _answer(self, status: int, headers: dict[str, str], text: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _break(self) -> None:
        """Reset the connection."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Quiet."""
