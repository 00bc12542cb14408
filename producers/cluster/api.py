"""The Kubernetes API over HTTP: requests and streams; bodies as they come.

In: where to find credentials; the API server's answers. Out: :class:`~producers.cluster.answers.Answer`,
:class:`~producers.cluster.answers.Stream`.
State: one connection pool, and the credentials, read again every minute and after a 401.
On failure: no answer is an Unreachable that says why; every status is an answer. Credentials that can't be read again
stay what they were.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from producers.cluster import instruments as names
from producers.cluster.answers import Answer, Stream, Unreachable, reaching, read_body, retry_after_s
from producers.cluster.credentials import SERVICE_ACCOUNT, ConfigError, Connection, Source
from topics.instruments import Instruments

log = logging.getLogger(__name__)

REFRESH_S = 60.0
LOAD_WITHIN_S = 30.0
REFRESH_AGAIN_S = 5.0
CONNECT_WITHIN_S = 10.0
SILENCE_S = 100.0
"""A watch says something every 60 s; one that is silent for so long is dead."""

LARGEST_ANSWER_BYTES = 256 * 1024 * 1024


class Api:
    """The API server of one cluster. ``kubeconfig`` None: the pod's service account, else what kubectl would use.

    Call :meth:`start` before anything else, and :meth:`close` when done.
    """

    def __init__(
        self,
        kubeconfig: Path | None,
        instruments: Instruments | None = None,
        *,
        service_account: Path = SERVICE_ACCOUNT,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._source = Source(kubeconfig, service_account)
        self._instruments = instruments
        self._refresh_s = refresh_s
        self._connection: Connection | None = None
        self._denied = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the configuration. Raises :class:`ConfigError`; whether anybody answers there is not asked."""
        self._connection = await self._source.connect()
        self._refreshing = asyncio.create_task(self._refresh_for_ever())

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
    ) -> Answer:
        """Ask, and wait at most ``timeout_s`` for all of the answer. ``body`` is JSON. Raises :class:`Unreachable`."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_WITHIN_S)
        sent = {"Content-Type": "application/json"} if body is not None else {}
        with self._counting_failures(), reaching(f"no answer within {timeout_s:g} s"):
            response = await self._ask(
                method, path, timeout, params=params, headers={**sent, **(headers or {})}, data=body
            )
            async with response:
                content = await read_body(response, LARGEST_ANSWER_BYTES + 1)
                if len(content) > LARGEST_ANSWER_BYTES:
                    raise Unreachable("cut", f"the answer is longer than {LARGEST_ANSWER_BYTES} bytes")
        self._count(response.status)
        return Answer(response.status, content, retry_after_s(response))

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, silence_s: float = SILENCE_S
    ) -> AsyncIterator[Stream]:
        """A GET whose answer is read while it comes; it is over when nothing comes for ``silence_s``.

        Raises :class:`Unreachable`, on entering and while it is read.
        """
        connect_s = min(CONNECT_WITHIN_S, silence_s)
        timeout = aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s, sock_read=silence_s)
        with self._counting_failures(), reaching(f"no answer within {silence_s:g} s"):
            response = await self._ask("GET", path, timeout, params=params, headers={})
        self._count(response.status)
        try:
            yield Stream(response)
        finally:
            response.close()

    async def close(self) -> None:
        """Let go; what is still asked fails."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])
        if self._connection is not None:
            await self._connection.close()

    async def _ask(self, method: str, path: str, timeout: aiohttp.ClientTimeout, **how: Any) -> aiohttp.ClientResponse:
        if self._connection is None:
            raise RuntimeError("not started")
        response = await self._connection.ask(method, path, timeout, **how)
        if response.status == 401:
            self._denied.set()
        return response

    def _count(self, code: int | str) -> None:
        if self._instruments is not None:
            self._instruments.counter(names.API_REQUESTS, str(code)).inc()

    @contextlib.contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except Unreachable as error:
            self._count(error.reason)
            raise

    async def _refresh_for_ever(self) -> None:
        """Credentials change under a process that runs for months: tokens every hour, certificates every year."""
        told = ""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s):
                    await self._denied.wait()
            denied = self._denied.is_set()
            self._denied.clear()
            problem = await self._refresh(anew=denied)
            if problem and problem != told:
                log.warning("the credentials could not be read again, and stay what they were: %s", problem)
            told = problem
            await asyncio.sleep(min(REFRESH_AGAIN_S, self._refresh_s))

    async def _refresh(self, *, anew: bool) -> str:
        """Read the credentials again; the problem, or nothing."""
        old = self._connection
        if old is None:
            return ""
        try:
            async with asyncio.timeout(LOAD_WITHIN_S):
                changed = await self._source.refreshed(old, anew=anew)
        except (ConfigError, TimeoutError) as error:
            return str(error) or f"they were not there within {LOAD_WITHIN_S:g} s"
        if changed is not None:
            log.info("the API server's certificate authority or our certificate changed: connecting anew")
            self._connection = changed
            await old.close()
        return ""
