"""Opens connections to brokers for all Kafka clients, with the secrets that are in the files at that moment.

In: a :class:`Connection`. Out: aiokafka's options for a client, and a sentence about what is wrong (:func:`trouble`).
State: for each broker, whether the last connection could be opened, and why not.
On failure: if a person must mend something, clients connect again only every few seconds. aiokafka would try ten times
a second, and a TLS handshake and a login cost CPU on both sides. aiokafka logs the sentence for a client that was
connected before.

An aiokafka client keeps the password and the TLS context that it was made with. So this module replaces, for the whole
process, aiokafka's one function that opens a connection, and gives it the current secrets. It finds a client's
:class:`Connection` in the client's :class:`_Login`.
"""

import asyncio
import logging
import os
import socket
import ssl
import time
from typing import Any

import aiokafka.client
from aiokafka.abc import AbstractTokenProvider
from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import KafkaConnectionError, KafkaError

from delivery import kafka_errors, tokens
from delivery.connection import Connection, CredentialsError, Secrets
from delivery.values import Address

PAUSES_S = (0.5, 1.0, 2.0, 5.0)  # between attempts to connect to a broker with a trouble
_REMEMBERED_S = 20.0  # a trouble is reported for so long after the last attempt to connect
_SILENCE_S = 15
_LOOKUP_S = 6.0  # the second name server is asked after 5 s
_PLACEHOLDER_CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""A client must be made with a context. This one trusts nobody, and is replaced before it is used."""


class Unusable(KafkaConnectionError):  # type: ignore[misc] # aiokafka has no types
    """A broker is up, but a person must mend something before it can be used; the message says what."""

    def __str__(self) -> str:
        return str(self.args[0])


class ClientClosed(KafkaConnectionError):  # type: ignore[misc]
    """The client was closed, and its tasks end by this error. It is not reported."""


class _Login(AbstractTokenProvider):  # type: ignore[misc]
    """A client's :class:`Connection`, from which it gets tokens, and the client's open connections to brokers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.opened: list[AIOKafkaConnection] = []
        self.closed = False

    async def token(self) -> str:
        return await tokens.token(self.connection)


class _Broker:
    """How the last attempts to connect with one broker ended."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.failures, self.failed_s = 0, 0.0
        self.answered = False

    async def pause(self) -> None:
        """Wait, after a failure with a trouble, until the next attempt may be made."""
        if self.trouble is not None:
            pause_s = PAUSES_S[min(self.failures, len(PAUSES_S)) - 1]
            await asyncio.sleep(max(0.0, self.failed_s + pause_s - time.monotonic()))

    def failed(self, trouble: str | None) -> None:
        """Note a failure, and its trouble if a person must mend something."""
        self.trouble, self.failures, self.failed_s = trouble, self.failures + 1, time.monotonic()

    def opened(self) -> None:
        """Note that a connection is open."""
        self.trouble, self.failures, self.answered = None, 0, True


_brokers: dict[tuple[Connection, str, int], _Broker] = {}


def options(connection: Connection) -> dict[str, Any]:
    """aiokafka's options for a client of this connection."""
    options: dict[str, Any] = {
        "bootstrap_servers": connection.servers,
        "security_protocol": connection.security.upper().replace("-", "_"),
        "sasl_oauth_token_provider": _Login(connection),
    }
    if connection.has_tls:
        options |= {"ssl_context": _PLACEHOLDER_CONTEXT}
    if connection.has_login:
        mechanism = "oauthbearer" if connection.mechanism == "aws-msk-iam" else str(connection.mechanism)
        options |= {"sasl_mechanism": mechanism.upper(), "sasl_plain_username": "", "sasl_plain_password": ""}
    return options


def trouble(connection: Connection) -> str | None:
    """What a person must mend before all brokers can be reached, as of the last failure; None if nothing is known."""
    since_s = time.monotonic() - _REMEMBERED_S
    troubles = [
        (broker.failed_s, f"Kafka at {Address(host, port)}: {broker.trouble}")
        for (broker_connection, host, port), broker in _brokers.items()
        if broker_connection == connection and broker.trouble is not None and broker.failed_s >= since_s
    ]
    return max(troubles)[1] if troubles else None


def close(client: aiokafka.client.AIOKafkaClient) -> None:
    """Close every connection of a client at once; it can open no other.

    aiokafka leaks its connection if its bootstrap is cancelled, and all of them if its own close is cancelled.
    """
    login = client._sasl_oauth_token_provider  # noqa: SLF001 - there is no other way
    if client._sync_task is not None:  # noqa: SLF001 - likewise
        client._sync_task.cancel()  # noqa: SLF001 - likewise
    login.closed = True
    for conn in login.opened:
        conn.close()
    login.opened.clear()


async def _open(host: str, port: int, **options: Any) -> AIOKafkaConnection:
    """aiokafka's ``create_conn`` with the current secrets. Raises :class:`Unusable`, and what that raises."""
    login = options["sasl_oauth_token_provider"]
    if not isinstance(login, _Login):  # the client was not made by delivery.clients
        return await create_conn(host, port, **options)
    if login.closed:
        raise ClientClosed
    connection = login.connection
    broker = _brokers.setdefault((connection, host, port), _Broker())
    await broker.pause()
    secrets = Secrets()
    try:
        secrets = connection.secrets()
        options |= {"ssl_context": secrets.tls}
        options |= {"sasl_plain_username": secrets.username, "sasl_plain_password": secrets.password}
        conn = await _connect(host, port, **options)
    except (KafkaError, OSError, TimeoutError, CredentialsError, ValueError, KeyError, AssertionError) as error:
        advertised = None if str(Address(host, port)) in connection.servers.split(",") else host
        reason = kafka_errors.of_connecting(
            error, connection, secrets.username, again=broker.failures > 0, advertised=advertised
        )
        broker.failed(reason)
        if reason is None:
            raise
        tokens.forget(connection)
        raise Unusable(trouble(connection)) from None
    _limit_silence(conn)
    if not (connection.has_login or broker.answered):
        await _send_first_request(conn, connection, broker)
    broker.opened()
    if login.closed:
        conn.close()
        raise ClientClosed
    login.opened = [*(other for other in login.opened if other.connected()), conn]
    return conn


async def _connect(host: str, port: int, **options: Any) -> AIOKafkaConnection:
    """aiokafka's ``create_conn``. A timeout says what it waited for: a name server, or the broker."""
    try:
        return await create_conn(host, port, **options)
    except TimeoutError as error:
        lookup = asyncio.ensure_future(asyncio.get_running_loop().getaddrinfo(host, port))
        lookup.add_done_callback(lambda done: done.cancelled() or done.exception())  # or its error is logged
        if not (await asyncio.wait([lookup], timeout=_LOOKUP_S))[0]:
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers") from error
        raise TimeoutError(f"no answer from {Address(host, port)}") from error


def _limit_silence(conn: AIOKafkaConnection) -> None:
    """Let the kernel break the connection if it gets no acknowledgement for some seconds, used or not.

    A firewall or a NAT that has forgotten a connection drops what comes on it. The kernel would go on for a quarter of
    an hour, and aiokafka, which keeps a connection whose request for metadata had no answer, would ask there again.
    """
    if conn._writer is None or not hasattr(socket, "TCP_USER_TIMEOUT"):  # noqa: SLF001 - there is no option
        return  # it was closed meanwhile, or this is not Linux
    with socket.socket(fileno=os.dup(conn._writer.get_extra_info("socket").fileno())) as sock:  # noqa: SLF001
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENCE_S // 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)


async def _send_first_request(conn: AIOKafkaConnection, connection: Connection, broker: _Broker) -> None:
    """Send one request, to find out whether the broker wants a login.

    To a client that does not log in, such a broker answers ApiVersions, and closes the connection at the next request.
    """
    try:
        await conn.send(aiokafka.client.MetadataRequest([]))
    except BaseException as error:
        conn.close()
        if not isinstance(error, KafkaError | TimeoutError):
            raise
        broker.failed(kafka_errors.of_first_request(connection) if broker.failures else None)
        if broker.trouble is None:
            raise
        raise Unusable(trouble(connection)) from error


def _keep_log_record(record: logging.LogRecord) -> bool:
    """Drop what aiokafka logs of a bootstrap address and of a closed client: whoever starts a client logs the first."""
    args = record.args if isinstance(record.args, tuple) else ()
    of_address = len(args) == 3 and isinstance(args[2], Unusable)
    return not of_address and not any(isinstance(arg, ClientClosed) for arg in args)


aiokafka.client.create_conn = _open
aiokafka.client.log.addFilter(_keep_log_record)
