"""One transition as a request: the record itself, signed, under the transition's identity.

A transition that is sent again has the same bytes, and so the same signature.
"""

import hashlib
import hmac
import time
from pathlib import Path

from sinks.receiver import Request
from topics.alerts import Alert, transition_id

SIGNATURE = "X-Gpustream-Signature"
_LOOK_EVERY_S = 1.0


def request(alert: Alert, body: bytes, secret: bytes | None) -> Request:
    """The request of an alert whose record has these bytes. ``secret`` None: it is not signed."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": transition_id(alert)}
    if secret is not None:
        headers[SIGNATURE] = signature(body, secret)
    return Request(body, headers)


def signature(body: bytes, secret: bytes) -> str:
    """``sha256=`` and the HMAC-SHA256 of the body in hex."""
    return f"sha256={hmac.new(secret, body, hashlib.sha256).hexdigest()}"


class Secret:
    """The key of the signature, as it is in its file by now, looked at once a second.

    Space and line ends around it are not of it.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._looked_s = float("-inf")
        self._secret: bytes | None = None

    def now(self) -> bytes | None:
        """The key; None if there is to be none. Raises OSError or ValueError if it can't be had."""
        if self._file is not None and time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            self._secret = _read(self._file)
            self._looked_s = time.monotonic()
        return self._secret


def _read(file: Path) -> bytes:
    secret = file.read_bytes().strip()
    if not secret:
        raise ValueError(f"{file} is empty")
    return secret
