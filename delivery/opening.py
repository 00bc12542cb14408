"""Opens connections to brokers for all Kafka clients, with the secrets that are in the files at that moment.

In: a :class:`Connection`. Out: aiokafka's options for a client, and what is wrong, in a sentence (:func:`trouble`).
State: for each broker, whether the last connection could be opened, and why not.
On failure: if something must be mended, connecting is tried again only every few seconds, because a TLS handshake and a
login cost CPU on both sides, and clients try ten times a second. aiokafka logs the sentence for a client that was
connected before.

An aiokafka client keeps the password and the TLS context that it was made with. So this module replaces, for the whole
process, aiokafka's one function that opens a connection, and gives it the secrets of now. A client's :class:`_Login`
says which connection it is for.
"""

import asyncio
import logging
import ssl
import time
from typing import Any

import aiokafka.client
from aiokafka.abc import AbstractTokenProvider
from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.errors import KafkaConnectionError, KafkaError

from delivery import kafka_errors, tokens
from delivery.connection import Connection, CredentialsError, Secrets

PAUSES_S = (0.5, 1.0, 2.0, 5.0)  # between two attempts to connect to a broker of which something must be mended
_REMEMBERED_S = 20.0  # if nobody has tried to connect with a broker for so long, its trouble is not reported any more
_TO_FILL_IN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""A client must be made with a context. This one trusts nobody, and is replaced before it is used."""


class Unusable(KafkaConnectionError):  # type: ignore[misc] # aiokafka has no types
    """A broker is there, and no connection with it can be opened until something is mended: the message says what."""

    def __str__(self) -> str:
        return str(self.args[0])


class ClientClosed(KafkaConnectionError):  # type: ignore[misc]
    """The client was given up, and its tasks end with it. That is no trouble to report."""


class _Login(AbstractTokenProvider):  # type: ignore[misc]
    """Says for which :class:`Connection` a client opens connections, gives it a token, and knows which are open."""

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
        """Wait, after a failure, until it may be tried again."""
        if self.failures:
            after_s = PAUSES_S[min(self.failures, len(PAUSES_S)) - 1]
            await asyncio.sleep(max(0.0, self.failed_s + after_s - time.monotonic()))

    def failed(self, trouble: str | None) -> None:
        """It could not be opened: because of this trouble, or just so."""
        self.trouble, self.failures, self.failed_s = trouble, self.failures + 1, time.monotonic()

    def opened(self) -> None:
        """A connection is open."""
        self.trouble, self.failures, self.answered = None, 0, True


_brokers: dict[tuple[Connection, str, int], _Broker] = {}


def options(connection: Connection) -> dict[str, Any]:
    """What makes aiokafka's clients connect so."""
    given: dict[str, Any] = {
        "bootstrap_servers": connection.servers,
        "security_protocol": connection.security.upper().replace("-", "_"),
        "sasl_oauth_token_provider": _Login(connection),
    }
    if connection.has_tls:
        given |= {"ssl_context": _TO_FILL_IN}
    if connection.has_login:
        mechanism = "oauthbearer" if connection.mechanism == "aws-msk-iam" else str(connection.mechanism)
        given |= {"sasl_mechanism": mechanism.upper(), "sasl_plain_username": "", "sasl_plain_password": ""}
    return given


def trouble(connection: Connection) -> str | None:
    """What must be mended before Kafka can be reached, or all of it can; None if nothing is known to be wrong."""
    recent_s = time.monotonic() - _REMEMBERED_S
    found = [
        (broker.failed_s, f"Kafka at {host}:{port}: {broker.trouble}")
        for (whose, host, port), broker in _brokers.items()
        if whose == connection and broker.trouble is not None and broker.failed_s >= recent_s
    ]
    return max(found)[1] if found else None


def close(client: aiokafka.client.AIOKafkaClient) -> None:
    """Close every connection of a client, at once and for ever.

    aiokafka forgets the connection of a bootstrap that is cancelled, and all of them if its own end is cancelled.
    """
    login = client._sasl_oauth_token_provider  # noqa: SLF001 - there is no other way
    if client._sync_task is not None:  # noqa: SLF001 - likewise
        client._sync_task.cancel()  # noqa: SLF001 - likewise
    login.closed = True
    for opened in login.opened:
        opened.close()
    login.opened.clear()


async def _open(host: str, port: int, **given: Any) -> AIOKafkaConnection:
    """aiokafka's ``create_conn``, with what stands in the files now. Raises :class:`Unusable`, and what it raises."""
    login = given["sasl_oauth_token_provider"]
    if not isinstance(login, _Login):  # a client that is not ours
        return await create_conn(host, port, **given)
    if login.closed:
        raise ClientClosed
    connection = login.connection
    broker = _brokers.setdefault((connection, host, port), _Broker())
    if broker.trouble is not None:
        await broker.pause()
    secrets = Secrets()
    try:
        secrets = connection.secrets()
        given |= {"ssl_context": secrets.tls}
        given |= {"sasl_plain_username": secrets.username, "sasl_plain_password": secrets.password}
        opened = await create_conn(host, port, **given)
    except (KafkaError, OSError, TimeoutError, CredentialsError, ValueError, KeyError, AssertionError) as error:
        why = kafka_errors.of_connecting(error, connection, secrets.username, again=broker.failures > 0)
        broker.failed(why)
        if why is None:
            raise
        tokens.forget(connection)
        raise Unusable(trouble(connection)) from None
    if not (connection.has_login or broker.answered):
        await _greet(opened, connection, broker)
    broker.opened()
    if login.closed:
        opened.close()
        raise ClientClosed
    login.opened = [*(one for one in login.opened if one.connected()), opened]
    return opened


async def _greet(opened: AIOKafkaConnection, connection: Connection, broker: _Broker) -> None:
    """Ask for something once: a broker that wants a login answers who does not log in only as long as it says hello."""
    try:
        await opened.send(aiokafka.client.MetadataRequest([]))
    except BaseException as error:
        opened.close()
        if not isinstance(error, KafkaError | TimeoutError):
            raise
        broker.failed(kafka_errors.of_first_request(connection) if broker.failures else None)
        if broker.trouble is None:
            raise
        raise Unusable(trouble(connection)) from error


def _is_news(record: logging.LogRecord) -> bool:
    """Not of an address: whoever starts a client logs that itself. And not of a client that was given up."""
    args = record.args if isinstance(record.args, tuple) else ()
    of_address = len(args) == 3 and isinstance(args[2], Unusable)
    return not of_address and not any(isinstance(one, ClientClosed) for one in args)


aiokafka.client.create_conn = _open
aiokafka.client.log.addFilter(_is_news)
