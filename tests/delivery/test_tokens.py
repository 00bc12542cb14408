"""A token is requested when it is needed, and again before it expires."""

import sys
from base64 import b64decode
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from delivery import tokens
from delivery.connection import Connection, CredentialsError
from sinks import http_server

SECRET = "Tr0ub4dor&3:/"  # noqa: S105


@dataclass
class Endpoint:
    """A token endpoint: its requests, and its answer."""

    url: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    status: int = 200
    answer: object = field(default_factory=lambda: {"access_token": "t", "expires_in": 100})

    async def handle(self, request: web.Request) -> web.Response:
        basic = b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode()
        self.requests.append((basic, dict(await request.post())))
        return web.json_response(self.answer, status=self.status)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    new_endpoint, app = Endpoint(), web.Application()
    app.router.add_post("/token", new_endpoint.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    new_endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/token"
    yield new_endpoint
    await runner.cleanup()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake_time = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(tokens, "time", SimpleNamespace(time=lambda: fake_time.s))
    return fake_time


def client(endpoint: Endpoint, tmp_path: Path) -> Connection:
    (tmp_path / "secret").write_text(SECRET)
    return Connection(
        "k:1",
        security="sasl-ssl",
        mechanism="oauthbearer",
        token_endpoint=endpoint.url,
        oauth_client_id="me",
        oauth_client_secret_file=tmp_path / "secret",
        oauth_scope="kafka",
    )


async def test_a_new_token_is_requested_when_four_fifths_of_its_life_are_over(
    endpoint: Endpoint, tmp_path: Path, clock: SimpleNamespace
) -> None:
    connection = client(endpoint, tmp_path)
    assert await tokens.token(connection) == "t"
    clock.s += 79
    await tokens.token(connection)
    assert endpoint.requests == [("me:Tr0ub4dor%263%3A%2F", {"grant_type": "client_credentials", "scope": "kafka"})]
    clock.s += 1
    endpoint.answer = {"access_token": "next", "expires_in": "100"}
    assert await tokens.token(connection) == "next"


@pytest.mark.parametrize(
    "expires",
    [
        "1.2.3",
        "\N{SUPERSCRIPT TWO}",
        pytest.param(10**400, id="huge"),
        -1,
        None,
        "soon",
    ],
)
async def test_a_token_whose_life_is_no_number_is_used_for_five_minutes(
    endpoint: Endpoint, tmp_path: Path, clock: SimpleNamespace, expires: object
) -> None:
    connection = client(endpoint, tmp_path)
    endpoint.answer = {"access_token": "t", "expires_in": expires}
    assert await tokens.token(connection) == "t"
    clock.s += 239
    await tokens.token(connection)
    assert len(endpoint.requests) == 1
    clock.s += 1
    await tokens.token(connection)
    assert len(endpoint.requests) == 2


async def test_a_token_that_the_broker_refused_is_not_used_again(endpoint: Endpoint, tmp_path: Path) -> None:
    connection = client(endpoint, tmp_path)
    await tokens.token(connection)
    tokens.forget(connection)
    await tokens.token(connection)
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [
        (401, {"error": "invalid_client", "error_description": "who?"}, r"answers 401 \(invalid_client who\?\): check"),
        (200, {"token": "t"}, r"answers 200 \(OK\): check --kafka-oauth-client-id"),
        (302, [], "answers 302"),
        (503, "down", "answers 503"),
    ],
)
async def test_an_endpoint_without_a_token_is_named_with_a_remedy(
    endpoint: Endpoint, tmp_path: Path, status: int, answer: object, expected: str
) -> None:
    endpoint.status, endpoint.answer = status, answer
    with pytest.raises(CredentialsError, match=expected) as raised:
        await tokens.token(client(endpoint, tmp_path))
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "expected"), [("[" * 60_000, "recursion|Expecting value"), ("[" * 70_000, "its answer is too long")]
)
async def test_an_endpoint_that_answers_nonsense_without_end_costs_no_memory_and_ends_nothing(
    tmp_path: Path, answer: str, expected: str
) -> None:
    async def answers(_: web.Request) -> web.Response:
        return web.Response(text=answer, content_type="application/json")

    async with http_server.listening([web.post("/token", answers)], ("127.0.0.1", 0), option="--listen") as (_, port):
        connection = client(Endpoint(f"http://127.0.0.1:{port}/token"), tmp_path)
        with pytest.raises(CredentialsError, match=expected):
            await tokens.token(connection)


async def test_an_endpoint_that_is_away_is_named(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.url = "http://127.0.0.1:1/token"
    with pytest.raises(CredentialsError, match=r"no token from http://127.0.0.1:1/token: .*is it up"):
        await tokens.token(client(endpoint, tmp_path))


async def test_no_error_repeats_the_password_of_a_proxy_or_what_an_endpoint_repeats_of_a_secret(
    monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint, tmp_path: Path
) -> None:
    endpoint.status, endpoint.answer = 400, {"error": "invalid", "error_description": f"client_secret={SECRET}"}
    with pytest.raises(CredentialsError, match="it answers 400") as repeated:
        await tokens.token(client(endpoint, tmp_path))
    monkeypatch.setenv("https_proxy", endpoint.url.replace("http://", "http://me:hunter2@"))  # it makes no tunnels
    endpoint.url = "https://tokens.example/token"
    with pytest.raises(CredentialsError, match=r"no token from https://tokens.example/token: 40\d") as refused:
        await tokens.token(client(endpoint, tmp_path))

    assert SECRET not in str(repeated.value)
    assert "hunter2" not in str(refused.value)


async def test_an_aws_role_gets_a_token_of_the_brokers_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    package = tmp_path / "aws_msk_iam_sasl_signer"  # as AWS made it: the package itself imports nothing
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MSKAuthTokenProvider.py").write_text(
        "def generate_auth_token(region, aws_debug_creds=False): return f'of {region}', 9_999_999_999_000\n"
    )
    for module in (package.name, f"{package.name}.MSKAuthTokenProvider"):
        monkeypatch.setitem(sys.modules, module, None)  # so that it is removed after the test
        del sys.modules[module]
    monkeypatch.syspath_prepend(tmp_path)
    connection = Connection("b-1.c.kafka.eu-central-1.amazonaws.com:9098", mechanism="aws-msk-iam")

    assert await tokens.token(connection) == "of eu-central-1"
    with pytest.raises(CredentialsError, match="set AWS_REGION"):
        await tokens.token(Connection("k:1", mechanism="aws-msk-iam"))


async def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aws_msk_iam_sasl_signer", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "aws_msk_iam_sasl_signer.MSKAuthTokenProvider", raising=False)
    connection = Connection("b-1.c.kafka.us-gov-west-1.amazonaws.com:9098", mechanism="aws-msk-iam")
    with pytest.raises(CredentialsError, match=r"pip install 'gpustream\[msk\]'"):
        await tokens.token(connection)
