"""A connection is opened with the current contents of the files, and is not retried in a loop if it can't succeed."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError, SaslAuthenticationFailed

from delivery import opening
from delivery.connection import Connection

SECRET = "Tr0ub4dor&3"  # noqa: S105


class Broker:
    """Accepts one password, and remembers the options of each connect. ``_writer``: as a connection has it."""

    _writer: asyncio.StreamWriter | None = None

    def __init__(self, password: str = SECRET) -> None:
        self.password = password
        self.connect_calls: list[dict[str, Any]] = []
        self.away = self.silent = False

    async def connect(self, host: str, port: int, **options: Any) -> object:
        self.connect_calls.append(options)
        if self.silent:
            raise TimeoutError
        if self.away:
            raise ConnectionRefusedError(111, "Connect call failed")
        if options["sasl_plain_password"] != self.password:
            raise SaslAuthenticationFailed("Authentication failed")
        return self


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    fake = Broker()
    monkeypatch.setattr(opening, "create_conn", fake.connect)
    monkeypatch.setattr(opening, "_brokers", {})
    return fake


@pytest.fixture
def connection(tmp_path: Path) -> Connection:
    (tmp_path / "password").write_text(SECRET)
    return Connection(
        "k:1",
        security="sasl-plaintext",
        mechanism="plain",
        username="u",
        password_file=tmp_path / "password",
    )


async def open_it(connection: Connection, host: str = "k") -> Any:
    return await opening._open(host, 1, **opening.options(connection))


async def test_each_connection_uses_the_current_password(broker: Broker, connection: Connection) -> None:
    await open_it(connection)
    broker.password = "another"  # noqa: S105
    assert connection.password_file is not None
    connection.password_file.write_text("another")
    await open_it(connection)

    assert [options["sasl_plain_password"] for options in broker.connect_calls] == [SECRET, "another"]


async def test_a_client_is_made_without_any_secret(connection: Connection) -> None:
    assert SECRET not in repr(opening.options(connection))


async def test_an_error_that_must_be_fixed_is_reported_until_a_connection_is_open(
    broker: Broker, connection: Connection
) -> None:
    broker.password = "another"  # noqa: S105
    with pytest.raises(opening.Unusable, match=r"Kafka at k:1: it does not accept the user u"):
        await open_it(connection)
    assert "it does not accept the user u" in (opening.trouble(connection) or "")
    assert opening.trouble(replace(connection, servers="other:1")) is None
    broker.password = SECRET
    await open_it(connection)
    assert opening.trouble(connection) is None


async def test_an_ipv6_broker_is_named_as_it_would_be_typed(broker: Broker, connection: Connection) -> None:
    broker.password = "another"  # noqa: S105
    with pytest.raises(opening.Unusable, match=r"Kafka at \[fd00::1\]:1: it does not"):
        await open_it(connection, "fd00::1")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch, pauses_s: list[float]) -> list[float]:
    """The pauses that were requested; none takes time."""
    monkeypatch.setattr("delivery.opening.time.monotonic", lambda: 0.0)
    return pauses_s


async def test_it_is_tried_again_after_longer_and_longer_pauses(
    broker: Broker, connection: Connection, pauses: list[float]
) -> None:
    broker.password = "another"  # noqa: S105
    for _ in range(6):
        with pytest.raises(opening.Unusable):
            await open_it(connection)

    assert pauses == [0.5, 1.0, 2.0, 5.0, 5.0]


async def test_an_unreachable_broker_is_no_error_and_causes_no_pause(
    broker: Broker, connection: Connection, pauses: list[float]
) -> None:
    broker.away = True
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            await open_it(connection)
    assert opening.trouble(connection) is None
    assert pauses == []


async def test_a_name_server_that_does_not_answer_is_reported(
    broker: Broker, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", no_answer)
    monkeypatch.setattr(opening, "_LOOKUP_S", 0.01)
    broker.silent = True
    with pytest.raises(opening.Unusable, match=r"k:1: its name is not resolved \(no name server answers\): look at"):
        await open_it(connection)


async def test_a_broker_that_does_not_answer_is_named(broker: Broker, connection: Connection) -> None:
    broker.silent = True
    with pytest.raises(TimeoutError, match=r"^no answer from 192\.0\.2\.1:1$"):
        await open_it(connection, "192.0.2.1")
    assert opening.trouble(connection) is None


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has it")
async def test_a_connection_that_a_firewall_has_forgotten_is_broken_after_15_s(
    broker: Broker, connection: Connection
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, broker._writer = await asyncio.open_connection(*server.getsockname())
        await open_it(connection)
        sock = broker._writer.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000, "if it is used"
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1, "if it is not used"
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
        broker._writer.close()
        await broker._writer.wait_closed()


async def test_a_missing_password_file_is_an_error_that_can_pass(broker: Broker, connection: Connection) -> None:
    assert connection.password_file is not None
    connection.password_file.unlink()
    with pytest.raises(KafkaConnectionError, match="--kafka-password-file"):
        await open_it(connection)
    assert broker.connect_calls == []
    connection.password_file.write_text(SECRET)
    await open_it(connection)
    assert opening.trouble(connection) is None


class Greeted:
    """A connection whose first request is never answered."""

    _writer = None

    def __init__(self) -> None:
        self.connecting, self.closed = asyncio.Event(), False

    async def send(self, request: object) -> object:
        self.connecting.set()
        return await asyncio.Event().wait()

    def close(self) -> None:
        self.closed = True


async def test_a_connection_that_is_cancelled_before_its_first_answer_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    greeted = Greeted()

    async def connect(host: str, port: int, **options: Any) -> Greeted:
        return greeted

    monkeypatch.setattr(opening, "create_conn", connect)
    monkeypatch.setattr(opening, "_brokers", {})
    opened = asyncio.create_task(open_it(Connection("k:1")))
    await greeted.connecting.wait()
    opened.cancel()
    await asyncio.wait([opened])

    assert opened.cancelled()
    assert greeted.closed


async def test_a_broker_that_kafka_calls_by_the_name_of_this_machine_is_reported(
    broker: Broker, connection: Connection
) -> None:
    broker.away = True
    with pytest.raises(ConnectionRefusedError):
        await open_it(connection)
    with pytest.raises(opening.Unusable, match=r"^Kafka at localhost:1: Kafka names itself so, and"):
        await open_it(connection, "localhost")
