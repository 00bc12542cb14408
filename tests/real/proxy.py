"""A proxy in front of a remote-write receiver that can kill its client between an accepted write and the answer."""

import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_HOP = {"connection", "host", "content-length", "transfer-encoding"}


class KillingProxy:
    """Forwards POSTs to ``target``. Once armed, the next write that the receiver accepts is never answered.

    ``on_accepted`` is called instead, after the receiver has stored the write: what it kills has not committed.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.on_accepted: Callable[[], None] | None = None
        self.kills = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Where to write to."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/api/v1/write"

    def arm(self, on_accepted: Callable[[], None]) -> None:
        """Kill at the next accepted write."""
        self.on_accepted = on_accepted

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()

    def _accepted(self) -> bool:
        """Whether this accepted write is the one to kill at; it does so."""
        with self._lock:
            kill, self.on_accepted = self.on_accepted, None
            if kill is None:
                return False
            self.kills += 1
        kill()
        return True

    def _handler(proxy) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has a self of its own
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
                request = urllib.request.Request(proxy.target, data=body, headers=headers, method="POST")  # noqa: S310
                try:
                    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                        status, reply, text = answer.status, dict(answer.headers), answer.read()
                except urllib.error.HTTPError as error:
                    status, reply, text = error.code, dict(error.headers), error.read()
                if 200 <= status < 300 and proxy._accepted():
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in reply.items():
                    if name.lower() not in _HOP | {"date"}:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        return Handler
