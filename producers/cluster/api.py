"""The Kubernetes API over HTTP: configuration, authentication and requests; bodies as they come.

In: the service account's files or a kubeconfig; the API server's answers. Out: :class:`Answer`, :class:`Stream`.
State: one connection pool, and the credentials, read again every minute and after a 401.
On failure: no answer is an :class:`Unreachable` that says why; every status is an answer. Credentials that can't be
read again stay what they were.

Source: kubernetes_asyncio's configuration loaders, whose own refreshing leaves out token files of a kubeconfig and
certificates. The package takes 0.3 s and 37 MiB to import, so that it is imported at :meth:`Api.start`.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import aiohttp

from producers.cluster import instruments as names
from topics.instruments import Instruments

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token, the CA and its namespace."""

REFRESH_S = 60.0
LOAD_WITHIN_S = 30.0
REFRESH_AGAIN_S = 5.0
CONNECT_WITHIN_S = 10.0
SILENCE_S = 100.0
"""A watch says something every 60 s; one that is silent for so long is dead."""

LARGEST_ANSWER_BYTES = 256 * 1024 * 1024
LARGEST_ERROR_BYTES = 64 * 1024
ERROR_WITHIN_S = 10.0

NoAnswer = Literal["connection", "tls", "timeout", "cut"]


class ConfigError(Exception):
    """The configuration can't be used; the message is a sentence. Nothing to retry."""

    exit_code = 1


class Unreachable(Exception):
    """There was no answer, or not all of it; the message says why. Ask again later."""

    def __init__(self, reason: NoAnswer, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Answer(NamedTuple):
    """What the API server answered, whatever its status."""

    status: int
    body: bytes
    retry_after_s: float | None


class Stream:
    """An answer that is read line by line."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.retry_after_s = _retry_after_s(response)

    async def error_body(self) -> bytes:
        """The beginning of the body. Raises :class:`Unreachable`."""
        with _reaching():
            async with asyncio.timeout(ERROR_WITHIN_S):
                return await _read(self._response, LARGEST_ERROR_BYTES)

    async def lines(self, cap: int) -> AsyncGenerator[bytes | None]:
        """The lines as they come, without empty ones; None for each that was longer than ``cap`` and is dropped.

        Raises :class:`Unreachable`, also where the stream ends in the middle of a line.
        """
        lines = _Lines(cap)
        chunks = self._response.content.iter_any()
        while True:
            with _reaching():
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            for line in lines.feed(chunk):
                yield line
        if lines.unfinished:
            raise Unreachable("cut", "the stream ended in the middle of a line")


class _Lines:
    """Splits a stream of bytes into lines. A list of parts, because a line may come in thousands of them."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._parts: list[bytes] = []
        self._size = 0

    @property
    def unfinished(self) -> bool:
        """Whether a line has begun that has not ended."""
        return self._size > 0

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """The lines that end in this chunk."""
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            self._keep(end)
            if self._size:
                yield None if self._size > self._cap else b"".join(self._parts)
            self._parts, self._size = [], 0
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._cap:
            self._parts = []
        elif part:
            self._parts.append(part)


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
        self._source = _Source(kubeconfig, service_account)
        self._instruments = instruments
        self._refresh_s = refresh_s
        self._connection: _Connection | None = None
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
        with self._counting_failures(), _reaching():
            response = await self._ask(
                method, path, timeout, params=params, headers={**sent, **(headers or {})}, data=body
            )
            async with response:
                content = await _read(response, LARGEST_ANSWER_BYTES + 1)
                if len(content) > LARGEST_ANSWER_BYTES:
                    raise Unreachable("cut", f"the answer is longer than {LARGEST_ANSWER_BYTES} bytes")
        self._count(response.status)
        return Answer(response.status, content, _retry_after_s(response))

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, silence_s: float = SILENCE_S
    ) -> AsyncIterator[Stream]:
        """A GET whose answer is read while it comes; it is over when nothing comes for ``silence_s``.

        Raises :class:`Unreachable`, on entering and while it is read.
        """
        connect_s = min(CONNECT_WITHIN_S, silence_s)
        timeout = aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s, sock_read=silence_s)
        with self._counting_failures(), _reaching():
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


class _Connection:
    """A pool of connections with one TLS context; ``stamp`` tells whether its certificates are still those."""

    def __init__(self, configuration: Any, loader: Any, stamp: tuple[bytes | None, ...]) -> None:
        client = importlib.import_module("kubernetes_asyncio.client")
        self.configuration, self.loader, self.stamp = configuration, loader, stamp
        self._client = client.ApiClient(configuration)
        self._agent = f"gpustream/{version('gpustream')}"

    async def ask(
        self, method: str, path: str, timeout: aiohttp.ClientTimeout, *, headers: Mapping[str, str], **how: Any
    ) -> aiohttp.ClientResponse:
        """The answer, unread. The pool is used as it is: the client's own requests would write JSON bodies again."""
        rest = self._client.rest_client
        sent = {"User-Agent": self._agent, **headers}
        if (token := await self.configuration.get_api_key_with_prefix("BearerToken")) is not None:
            sent["Authorization"] = token.strip()
        response: aiohttp.ClientResponse = await rest.pool_manager.request(
            method,
            self.configuration.host + path,
            headers=sent,
            timeout=timeout,
            allow_redirects=False,
            proxy=rest.proxy,
            server_hostname=rest.server_hostname,
            **how,
        )
        return response

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()


class _Source(NamedTuple):
    """Where the configuration comes from."""

    kubeconfig: Path | None
    service_account: Path

    async def connect(self) -> _Connection:
        """A new connection. Raises :class:`ConfigError`."""
        await asyncio.to_thread(importlib.import_module, "kubernetes_asyncio.config")
        configuration, loader = await self._loaded()
        try:
            stamp = await asyncio.to_thread(_stamp, configuration)
            return _Connection(configuration, loader, stamp)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(f"the certificates of {self._name()} can't be used: {error}") from error

    async def refreshed(self, old: _Connection, *, anew: bool) -> _Connection | None:
        """Give an open connection the credentials of now; a new connection where its certificates changed.

        ``anew`` forgets what a login command said before. Raises :class:`ConfigError`.
        """
        configuration, loader = await self._loaded(None if anew else old.loader)
        if await asyncio.to_thread(_stamp, configuration) != old.stamp or configuration.host != old.configuration.host:
            return await self.connect()
        old.configuration.api_key, old.loader = configuration.api_key, loader
        return None

    async def _loaded(self, loader: Any = None) -> tuple[Any, Any]:
        configuration = importlib.import_module("kubernetes_asyncio.client").Configuration()
        configuration.host = ""
        configuration.disable_strict_ssl_verification = True  # no cluster's own certificates hold to all of RFC 5280
        try:
            loader = await self._load(configuration, loader)
        except ConfigError:
            raise
        except Exception as error:  # the library raises whatever a file's contents lead to
            raise ConfigError(f"{self._name()} can't be used: {_said(error)}") from error
        if not configuration.host:
            raise ConfigError(f"{self._name()} names no server")
        return configuration, loader

    async def _load(self, configuration: Any, loader: Any) -> Any:
        config = importlib.import_module("kubernetes_asyncio.config")
        if self.in_cluster():
            files = {
                "token_filename": str(self.service_account / "token"),
                "cert_filename": str(self.service_account / "ca.crt"),
            }
            await asyncio.to_thread(config.load_incluster_config, configuration, try_refresh_token=False, **files)
        elif loader is not None:
            await loader.load_and_set(configuration)
        else:
            paths = os.pathsep.join(map(str, self._kubeconfigs()))
            loader = await config.load_kube_config(paths, client_configuration=configuration, persist_config=False)
        return loader

    def in_cluster(self) -> bool:
        """Whether this is a pod that was given a service account, and told nothing else."""
        in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and (self.service_account / "token").exists()
        return self.kubeconfig is None and in_pod

    def _kubeconfigs(self) -> list[Path]:
        """The kubeconfigs that are there. Raises :class:`ConfigError` where none is."""
        named = os.environ.get("KUBECONFIG", "")
        paths = [Path(path).expanduser() for path in named.split(os.pathsep) if path] or [
            Path.home() / ".kube" / "config"
        ]
        if self.kubeconfig is not None:
            paths = [self.kubeconfig]
        if there := [path for path in paths if path.is_file()]:
            return there
        sought = " and ".join(map(str, paths))
        if self.kubeconfig is not None:
            raise ConfigError(f"there is no kubeconfig at {sought}")
        raise ConfigError(
            f"no way to the Kubernetes API: this is not a pod with a service account ({self.service_account}), and"
            f" there is no kubeconfig at {sought}; name one with --kubeconfig"
        )

    def _name(self) -> str:
        if self.in_cluster():
            return f"the service account in {self.service_account}"
        return f"the kubeconfig {self.kubeconfig or os.environ.get('KUBECONFIG') or '~/.kube/config'}"


def _stamp(configuration: Any) -> tuple[bytes | None, ...]:
    """What the certificates of a configuration are, in full: a file may keep its name, its size and its time."""
    files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    return tuple(Path(file).read_bytes() if file else None for file in files)


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """The Retry-After header; the API server writes whole seconds."""
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < 9 else None


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or the first ``most`` bytes of it."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) >= most:
            break
    return bytes(content[:most])


@contextlib.contextmanager
def _reaching() -> Iterator[None]:
    """Everything that goes wrong on the way, as :class:`Unreachable`."""
    try:
        yield
    except TimeoutError as error:
        raise Unreachable("timeout", f"no answer in time: {_said(error)}") from error
    except (aiohttp.ClientSSLError, ssl.SSLError) as error:
        raise Unreachable("tls", f"TLS: {_said(error)}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise Unreachable("connection", _said(error)) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip(": ")
