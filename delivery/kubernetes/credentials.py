"""The credentials for the API server, and the connections that use them.

In: the service account's files or a kubeconfig. Out: :class:`ApiConnection`.
On failure: :class:`ConfigError`, in a sentence.

Source: kubernetes_asyncio's configuration loaders. Their own refreshing leaves out the token files of a kubeconfig, and
certificates. The package takes 0.3 s and 37 MiB to import, so it is imported only when a connection is made.
"""

import asyncio
import importlib
import os
import ssl
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from delivery.kafka_errors import describe
from delivery.proxy import ProxyError, proxy_of, usable

_READ_AHEAD_BYTES = 2 * 1024 * 1024
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # a pod's token, CA and namespace


class ConfigError(Exception):
    """The configuration can't be used; the message is a sentence. A retry does not help."""

    exit_code = 1


class ApiConnection:
    """A pool of connections with one TLS context; ``stamp`` has the certificates that it was made from."""

    def __init__(self, configuration: Any, loader: Any, stamp: tuple[bytes | None, ...]) -> None:
        client = importlib.import_module("kubernetes_asyncio.client")
        self.configuration, self.loader, self.stamp = configuration, loader, stamp
        proxy = configuration.proxy
        self._proxy = usable(proxy, "proxy-url in its kubeconfig") if proxy else proxy_of(configuration.host)
        self._client = client.ApiClient(configuration)
        rest = self._client.rest_client
        pool = rest.pool_manager  # its session ignores networks in NO_PROXY, and uses a .netrc
        rest.pool_manager = aiohttp.ClientSession(connector=pool.connector, read_bufsize=_READ_AHEAD_BYTES)
        pool.detach()
        self._agent = f"gpustream/{version('gpustream')}"

    async def request(
        self, method: str, path: str, timeout: aiohttp.ClientTimeout, *, headers: Mapping[str, str], **options: Any
    ) -> aiohttp.ClientResponse:
        """Send a request and return the unread response. It uses the pool: the client re-encodes JSON bodies."""
        rest = self._client.rest_client
        all_headers = {"User-Agent": self._agent, **headers}
        if (token := await self.configuration.get_api_key_with_prefix("BearerToken")) is not None:
            all_headers["Authorization"] = token.strip()
        options |= {"proxy": self._proxy, "server_hostname": rest.server_hostname, "allow_redirects": False}
        url = self.configuration.host + path
        try:
            response: aiohttp.ClientResponse = await rest.pool_manager.request(
                method, url, headers=all_headers, timeout=timeout, **options
            )
        except (AssertionError, RuntimeError) as error:  # aiohttp's, if the pool is closed before or during the request
            if not rest.pool_manager.closed:
                raise
            raise aiohttp.ClientConnectionError(
                "its connections are replaced: the certificates have changed"
            ) from error
        return response

    async def close(self) -> None:
        await self._client.close()


class CredentialSource(NamedTuple):
    """Where the credentials are: a kubeconfig, or the folder of a pod's service account."""

    kubeconfig: Path | None
    service_account: Path

    async def connect(self) -> ApiConnection:
        """A new connection. Raises :class:`ConfigError`."""
        try:
            Path.home()
        except RuntimeError:  # a user without a name and without HOME: the library needs one when it is imported
            os.environ["HOME"] = "/"
        await asyncio.to_thread(importlib.import_module, "kubernetes_asyncio.config")
        configuration, loader = await self._loaded()
        try:
            stamp = await asyncio.to_thread(_stamp, configuration)
            return ApiConnection(configuration, loader, stamp)
        except ProxyError as error:
            raise ConfigError(f"no way to the API server of {self._name()}: {error}") from error
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(f"the certificates of {self._name()} can't be used: {error}") from error

    async def refreshed(self, old: ApiConnection, *, login: bool) -> ApiConnection | None:
        """Give an open connection the current credentials; returns a new connection if the certificates changed.
        ``login``: run the kubeconfig's login command again, even if its last token is still valid. Raises
        :class:`ConfigError`."""
        configuration, loader = await self._loaded(None if login else old.loader)
        try:
            stamp = await asyncio.to_thread(_stamp, configuration)
        except OSError as error:
            raise ConfigError(f"the certificates of {self._name()} can't be read: {error}") from error
        if stamp != old.stamp or configuration.host != old.configuration.host:
            return await self.connect()
        old.configuration.api_key, old.loader = configuration.api_key, loader
        return None

    async def _loaded(self, loader: Any = None) -> tuple[Any, Any]:
        """The configuration, and the loader that can read it again."""
        configuration = importlib.import_module("kubernetes_asyncio.client").Configuration()
        configuration.host = ""
        configuration.disable_strict_ssl_verification = True  # clusters' own certificates do not follow all of RFC 5280
        config = importlib.import_module("kubernetes_asyncio.config")
        try:
            if self.in_cluster():
                token, ca = str(self.service_account / "token"), str(self.service_account / "ca.crt")
                files = {"token_filename": token, "cert_filename": ca}
                await asyncio.to_thread(config.load_incluster_config, configuration, try_refresh_token=False, **files)
            elif loader is not None:
                await loader.load_and_set(configuration)
            else:
                paths = os.pathsep.join(map(str, self._kubeconfigs()))
                loader = await config.load_kube_config(paths, client_configuration=configuration, persist_config=False)
        except ConfigError:
            raise
        except Exception as error:  # the library raises whatever a file's contents lead to
            raise ConfigError(f"{self._name()} can't be used: {describe(error)}") from error
        if not configuration.host:
            raise ConfigError(f"{self._name()} names no server")
        if not isinstance(configuration.proxy, str | None):
            raise ConfigError(f"{self._name()} has a proxy-url that is no text")
        return configuration, loader

    def in_cluster(self) -> bool:
        """Whether the service account is used: this is a pod that has one, and no kubeconfig is named."""
        in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and (self.service_account / "token").exists()
        return self.kubeconfig is None and in_pod

    def _kubeconfigs(self) -> list[Path]:
        """The kubeconfigs that exist. Raises :class:`ConfigError` if there is none."""
        variable = os.environ.get("KUBECONFIG", "")
        paths = [Path(path).expanduser() for path in variable.split(os.pathsep) if path]
        paths = [self.kubeconfig] if self.kubeconfig is not None else paths or [Path.home() / ".kube" / "config"]
        if existing := [path for path in paths if path.is_file()]:
            return existing
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
    """The content of a configuration's certificate files: a file may change without a new name, size or time."""
    files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
    return tuple(Path(file).read_bytes() if file else None for file in files)
