"""The server's TLS: whose certificate is shown, who may come in, and what happens when files change."""

import asyncio
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import Counter

from sinks import http_server
from sinks.http_server import listening
from sinks.metrics_api import tls as module
from sinks.metrics_api.holdings import Holdings
from sinks.metrics_api.server import Access, Api
from sinks.metrics_api.tls import CertificateError, ServerTls
from tests.real.certificates import Authority, Certificate

BASE = "/apis/custom.metrics.k8s.io/v1beta2"
PLAIN = "/v1/workloads/ml/Job/none"


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHECK_EVERY_S", 0.0)


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> list[Authority]:
    """Two authorities that do not trust each other."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on PATH")
    return [Authority(tmp_path_factory.mktemp("authority")) for _ in range(2)]


class Files:
    """The files that a server is given, which may change."""

    def __init__(self, directory: Path, authority: Authority, clients: Authority) -> None:
        self.certificate, self.key, self.ca = directory / "tls.crt", directory / "tls.key", directory / "ca.crt"
        self.become(authority, clients)

    def become(self, authority: Authority, clients: Authority) -> None:
        """Replace the files: signed by ``authority``, with the CA of ``clients``."""
        serving = authority.sign("server", "DNS:localhost")
        self.certificate.write_bytes(serving.certificate.read_bytes())
        self.key.write_bytes(serving.key.read_bytes())
        self.ca.write_bytes(clients.ca.read_bytes())


async def ask(
    address: tuple[str, int], trusted: Authority, client_certificate: Certificate | None, path: str = PLAIN
) -> int | str:
    """The status of the answer, or why there is none."""
    context = ssl.create_default_context(cafile=trusted.ca)
    if client_certificate is not None:
        context.load_cert_chain(client_certificate.certificate, client_certificate.key)
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as client,
            client.get(f"https://localhost:{address[1]}{path}") as answer,
        ):
            return answer.status
    except aiohttp.ClientConnectorCertificateError:
        return "the server is not trusted"
    except (aiohttp.ClientError, ConnectionError):
        return "refused"


def api(names: Callable[[], frozenset[str]] = frozenset, token: Path | None = None, *, own_ca: bool = True) -> Api:
    """A server without holdings."""
    counter = Counter("requests_total", "Requests.", ("code",), registry=None)
    cluster: object = object()
    access = Access(guarded=True, names=names, token_file=token, own_ca=own_ca)
    return Api(Holdings(), access, cluster, counter.labels)  # type: ignore[arg-type]


async def test_only_certificates_of_the_clients_ca_come_in_and_only_front_proxies_may_ask_everything(
    tmp_path: Path, authorities: list[Authority]
) -> None:
    ours, foreign = authorities
    files = Files(tmp_path, ours, ours)
    tls = ServerTls(files.certificate, files.key, files.ca.read_text)
    server = api(lambda: frozenset({"front-proxy-client"}))
    async with listening(
        server.routes(), ("127.0.0.1", 0), option="--metrics-listen", context=tls.context, middlewares=[server.guard]
    ) as address:
        proxy, client = ours.sign("front-proxy-client"), ours.sign("keda")
        assert await ask(address, ours, proxy, BASE) == 200
        assert await ask(address, ours, client, BASE) == 403
        assert await ask(address, ours, client) == 404
        assert await ask(address, ours, foreign.sign("front-proxy-client"), BASE) == "refused"
        assert await ask(address, ours, None, BASE) == "refused"


async def test_a_bundle_of_the_clients_cas_may_name_them_in_any_language(
    tmp_path: Path, authorities: list[Authority]
) -> None:
    ours = authorities[0]
    files = Files(tmp_path, ours, ours)
    tls = ServerTls(
        files.certificate, files.key, lambda: f"\ufeff# F\u0151tan\u00fas\u00edtv\u00e1ny\n{files.ca.read_text()}"
    )
    async with listening(api().routes(), ("127.0.0.1", 0), option="--metrics-listen", context=tls.context) as address:
        assert await ask(address, ours, ours.sign("keda")) == 404


async def test_if_the_front_proxies_ca_is_also_that_of_users_only_the_front_proxy_may_ask_anything(
    tmp_path: Path, authorities: list[Authority]
) -> None:
    ours = authorities[0]
    files = Files(tmp_path, ours, ours)
    tls = ServerTls(files.certificate, files.key, files.ca.read_text)
    server = api(lambda: frozenset({"front-proxy-client"}), own_ca=False)
    async with listening(
        server.routes(), ("127.0.0.1", 0), option="--metrics-listen", context=tls.context, middlewares=[server.guard]
    ) as address:
        assert await ask(address, ours, ours.sign("a-tenant")) == 401
        assert await ask(address, ours, ours.sign("a-tenant"), BASE) == 403
        assert await ask(address, ours, ours.sign("front-proxy-client")) == 404


async def test_with_optional_certificates_a_client_without_one_needs_the_token(
    tmp_path: Path, authorities: list[Authority]
) -> None:
    ours, foreign = authorities
    files = Files(tmp_path, ours, ours)
    (tmp_path / "token").write_text("secret")
    tls = ServerTls(files.certificate, files.key, files.ca.read_text, optional=True)
    server = api(token=tmp_path / "token")
    async with listening(
        server.routes(), ("127.0.0.1", 0), option="--metrics-listen", context=tls.context, middlewares=[server.guard]
    ) as address:
        assert await ask(address, ours, None) == 401
        assert await ask(address, ours, None, BASE) == 401
        assert await ask(address, ours, ours.sign("keda")) == 404
        assert await ask(address, ours, foreign.sign("keda")) == "refused"


async def test_changed_files_are_shown_to_the_next_client_without_a_restart(
    tmp_path: Path, authorities: list[Authority]
) -> None:
    ours, foreign = authorities
    files = Files(tmp_path, ours, ours)
    tls = ServerTls(files.certificate, files.key, files.ca.read_text)
    server = api()
    async with listening(
        server.routes(), ("127.0.0.1", 0), option="--metrics-listen", context=tls.context, middlewares=[server.guard]
    ) as address:
        assert await ask(address, ours, ours.sign("keda")) == 404
        files.become(foreign, foreign)
        assert await ask(address, foreign, foreign.sign("keda")) == 404
        assert await ask(address, ours, foreign.sign("keda")) == "the server is not trusted"
        assert await ask(address, foreign, ours.sign("keda")) == "refused"


async def test_files_that_are_broken_for_a_time_change_nothing(
    tmp_path: Path, authorities: list[Authority], caplog: pytest.LogCaptureFixture
) -> None:
    ours = authorities[0]
    files = Files(tmp_path, ours, ours)
    tls = ServerTls(files.certificate, files.key, files.ca.read_text)
    server = api()
    async with listening(
        server.routes(), ("127.0.0.1", 0), option="--metrics-listen", context=tls.context, middlewares=[server.guard]
    ) as address:
        files.key.write_text("half a k")
        assert await ask(address, ours, ours.sign("keda")) == 404
        files.ca.unlink()
        assert await ask(address, ours, ours.sign("keda")) == 404
    assert "going on with what was read before" in caplog.text


async def test_a_client_that_says_nothing_loses_its_connection(
    tmp_path: Path, authorities: list[Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", 0.2)
    files = Files(tmp_path, *authorities)
    tls = ServerTls(files.certificate, files.key, files.ca.read_text)
    async with listening(api().routes(), ("127.0.0.1", 0), option="--metrics-listen", context=tls.context) as address:
        reader, writer = await asyncio.open_connection(*address)
        assert await asyncio.wait_for(reader.read(), 10.0) == b""
        writer.close()


async def test_clients_that_never_end_their_handshake_keep_nobody_out(
    tmp_path: Path, authorities: list[Authority], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CLIENTS", 8)
    ours = authorities[0]
    files = Files(tmp_path, ours, ours)
    tls = ServerTls(files.certificate, files.key, files.ca.read_text)
    async with listening(api().routes(), ("127.0.0.1", 0), option="--metrics-listen", context=tls.context) as address:
        silent = [await asyncio.open_connection(*address) for _ in range(8)]
        assert await ask(address, ours, ours.sign("keda")) == 404
        assert await asyncio.wait_for(silent[0][0].read(), 10.0) == b"", "the oldest has made room"
        for _, opened in silent[1:]:
            opened.write(b"no TLS")
        await asyncio.gather(*(opened.read() for opened, _ in silent), return_exceptions=True)
        for _, opened in silent:
            opened.close()
        assert await ask(address, ours, ours.sign("keda")) == 404


def test_certificates_that_can_not_be_used_are_a_clear_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_text("no certificate")
    (tmp_path / "tls.key").write_text("no key")

    with pytest.raises(CertificateError, match=r"tls\.crt and .*tls\.key.* can't be used: SSLError"):
        ServerTls(tmp_path / "tls.crt", tmp_path / "tls.key", lambda: None)
