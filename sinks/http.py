"""A receiver over HTTP: one attempt at a time, with the credentials as they are in their files by now.

The only network code of the sinks that write over HTTP. Whatever goes wrong on the way is a :class:`Reply` with
status 0.
"""

import asyncio
import base64
import random
import ssl
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import aiohttp

from delivery.dead_letters import Abandoned
from sinks.settings import HttpSettings

MAX_RETRY_AFTER_S = 300.0
_TEXT_BYTES = 16 * 1024
_LOOK_EVERY_S = 1.0

Stamp = tuple[tuple[int, int, int] | None, ...]


class Reply(NamedTuple):
    """What came back. ``status`` 0: nothing did, and ``text`` says why."""

    status: int
    text: str = ""
    headers: Mapping[str, str] = {}

    @property
    def retry_after_s(self) -> float | None:
        """How long the receiver wants us to wait, from a number or a date; None if it does not say."""
        value = self.headers.get("Retry-After")
        if value is None:
            return None
        if value.isascii() and value.isdigit():
            return float(value)
        try:
            return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
        except (ValueError, TypeError, OverflowError):
            return None


class Http:
    """A client of receivers. Use :meth:`close` when done."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._credentials = Credentials(settings)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Make one attempt at sending a body."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._settings.request_timeout_s),
                headers={**dict(self._settings.headers), "User-Agent": f"gpustream/{version('gpustream')}"},
                auto_decompress=True,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        try:
            own, context = self._credentials.now()
            async with self._session.post(
                url, data=body, headers={**headers, **own}, ssl=context or True, allow_redirects=False
            ) as response:
                text = (await response.content.read(_TEXT_BYTES)).decode("utf-8", "replace")
                await response.read()
                return Reply(response.status, text, response.headers)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return Reply(0, f"{type(error).__name__}: {error}".strip(": "))

    async def close(self) -> None:
        """Close what is open."""
        if self._session is not None:
            await self._session.close()
            self._session = None
            await asyncio.sleep(0)


class Credentials:
    """What proves who we are: read from its files again when they change, looked at once a second."""

    def __init__(self, settings: HttpSettings) -> None:
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


async def pause(
    attempt: int, retry_after_s: float | None, abandon: asyncio.Event, *, first_s: float, max_s: float
) -> None:
    """Wait before the next attempt: longer each time, and as long as the receiver asks. Raises Abandoned."""
    delay = min(max_s, first_s * 2 ** min(attempt, 16)) * random.uniform(0.5, 1.0)
    if retry_after_s is not None:
        delay = max(delay, min(retry_after_s, MAX_RETRY_AFTER_S))
    try:
        async with asyncio.timeout(delay):
            await abandon.wait()
    except TimeoutError:
        return
    raise Abandoned


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
