"""The receiver over HTTP: one attempt at a time, and the credentials as they are in their files by now.

The only network code of the sink. Whatever goes wrong on the way is an :class:`Answer` with status 0.
"""

import asyncio
import base64
import ssl
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path

import aiohttp

from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.policy import Answer, Protocol

WRITTEN = "X-Prometheus-Remote-Write-Samples-Written"
_TEXT_BYTES = 16 * 1024
_LOOK_EVERY_S = 1.0

_HEADERS: dict[Protocol, dict[str, str]] = {
    "1.0": {"Content-Type": "application/x-protobuf", "X-Prometheus-Remote-Write-Version": "0.1.0"},
    "2.0": {
        "Content-Type": "application/x-protobuf;proto=io.prometheus.write.v2.Request",
        "X-Prometheus-Remote-Write-Version": "2.0.0",
    },
}

Stamp = tuple[tuple[int, int, int] | None, ...]


class Client:
    """A receiver. Use :meth:`close` when done."""

    def __init__(self, settings: RemoteWriteSettings) -> None:
        self._settings = settings
        self._credentials = Credentials(settings)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        """Make one attempt at sending a compressed request."""
        session = self._session or self._open()
        try:
            headers, context = self._credentials.now()
            async with session.post(
                self._settings.url,
                data=body,
                headers={**_HEADERS[protocol], **headers},
                ssl=context or True,
                allow_redirects=False,
            ) as response:
                text = (await response.content.read(_TEXT_BYTES)).decode("utf-8", "replace")
                await response.read()
                return _answer(response.status, text, response.headers)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return Answer(0, f"{type(error).__name__}: {error}".strip(": "))

    async def close(self) -> None:
        """Close what is open."""
        if self._session is not None:
            await self._session.close()
            self._session = None
            await asyncio.sleep(0)

    def _open(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._settings.request_timeout_s),
            headers={
                **dict(self._settings.headers),
                "User-Agent": f"gpustream/{version('gpustream')}",
                "Content-Encoding": "snappy",
            },
            auto_decompress=True,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self._session


class Credentials:
    """What proves who we are: read from its files again when they change, looked at once a second."""

    def __init__(self, settings: RemoteWriteSettings) -> None:
        self._settings = settings
        self._secret = settings.bearer_token_file or settings.basic_auth_password_file
        self._tls = (settings.tls_ca, settings.tls_cert, settings.tls_key)
        self._looked_s = float("-inf")
        self._stamp: Stamp | None = None
        self._headers: dict[str, str] = {}
        self._context: ssl.SSLContext | None = None

    def now(self) -> tuple[dict[str, str], ssl.SSLContext | None]:
        """Headers, and the TLS context (None: the default one). Raises OSError or ValueError for unusable files."""
        if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            stamp = tuple(_stamp(path) for path in (self._secret, *self._tls))
            if stamp != self._stamp:
                self._headers, self._context = self._authorization(), self._tls_context()
                self._stamp = stamp
            self._looked_s = time.monotonic()
        return self._headers, self._context

    def _authorization(self) -> dict[str, str]:
        if self._secret is None:
            return {}
        secret = self._secret.read_text().strip()
        if self._settings.bearer_token_file is not None:
            return {"Authorization": f"Bearer {secret}"}
        pair = f"{self._settings.basic_auth_user}:{secret}".encode()
        return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}

    def _tls_context(self) -> ssl.SSLContext | None:
        authority, cert, key = self._tls
        if authority is None and cert is None:
            return None
        context = ssl.create_default_context(cafile=authority)
        if cert is not None:
            context.load_cert_chain(cert, key)
        return context


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _answer(status: int, text: str, headers: Mapping[str, str]) -> Answer:
    written = headers.get(WRITTEN, "")
    return Answer(status, text, int(written) if written.isdigit() else None, _retry_after(headers.get("Retry-After")))


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait, from a number or a date; None where it is neither."""
    if value is None:
        return None
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
