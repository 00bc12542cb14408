"""Kafka's errors as sentences that say what to do about them.

In: an error of the Kafka client, of Python's TLS, or of the broker. Out: a line that says what to do. Pure.

aiokafka has no classes for some errors of brokers, and would take each of them for the unexpected error of a server,
which nobody can act on. So this module adds those classes to aiokafka's table.

Source: Kafka's protocol for its error codes; OpenSSL's x509_vfy.h for those of certificates; and observations of Apache
Kafka 4.1 with clients that connect with or without TLS, without a login, or with a login that the port does not want.
"""

import asyncio
import errno
import socket
import ssl

import aiokafka.errors
from aiokafka.errors import (
    BrokerResponseError,
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    IllegalSaslStateError,
    InvalidSessionTimeoutError,
    InvalidTimestampError,
    MessageSizeTooLargeError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnsupportedSaslMechanismError,
)

from delivery.connection import Connection, CredentialsError
from delivery.redaction import redact


class FencedLeaderEpochError(BrokerResponseError):  # type: ignore[misc] # aiokafka has no types
    """The client's metadata are older than the broker's."""

    errno, message, retriable, invalid_metadata = 74, "FENCED_LEADER_EPOCH", True, True


class UnknownLeaderEpochError(BrokerResponseError):  # type: ignore[misc]
    """The broker's metadata are older than the client's."""

    errno, message, retriable, invalid_metadata = 75, "UNKNOWN_LEADER_EPOCH", True, True


class OffsetNotAvailableError(BrokerResponseError):  # type: ignore[misc]
    """A new leader does not know yet where its log ends."""

    errno, message, retriable = 78, "OFFSET_NOT_AVAILABLE", True


class GroupMaxSizeReachedError(BrokerResponseError):  # type: ignore[misc]
    """The consumer group has as many members as the broker's group.max.size allows."""

    errno, message = 81, "GROUP_MAX_SIZE_REACHED"


class FencedInstanceIdError(BrokerResponseError):  # type: ignore[misc]
    """Another process has joined the consumer group with the instance id of this one."""

    errno, message = 82, "FENCED_INSTANCE_ID"


class InvalidRecordError(BrokerResponseError):  # type: ignore[misc]
    """The broker does not take the record, such as one without a key in a compacted topic."""

    errno, message = 87, "INVALID_RECORD"


class UnstableOffsetCommitError(BrokerResponseError):  # type: ignore[misc]
    """A transaction that commits offsets of the group is still open."""

    errno, message, retriable = 88, "UNSTABLE_OFFSET_COMMIT", True


class ThrottlingQuotaExceededError(BrokerResponseError):  # type: ignore[misc]
    """The broker's quota of such requests is used up for now."""

    errno, message, retriable = 89, "THROTTLING_QUOTA_EXCEEDED", True


aiokafka.errors.kafka_errors |= {kind.errno: kind for kind in BrokerResponseError.__subclasses__()}

_ACLS = "give its user the ACLs of this component that docs/how-to/kafka.md lists"
_DENIED = {
    GroupAuthorizationFailedError: "Read the consumer group {names}: add the ACL Read on Group {names} for its user",
    TransactionalIdAuthorizationFailed: "use the transactional id {names}: add the ACL Write on TransactionalId {names}"
    " for its user",
    TopicAuthorizationFailedError: f"use the topic {{names}}: {_ACLS}",
    ClusterAuthorizationFailedError: f"do what this needs of the cluster: {_ACLS}",
}
_SESSIONS = "group.min.session.timeout.ms and group.max.session.timeout.ms of its brokers allow 6s to 30m by default"
_TOO_FEW_REPLICAS = (
    "a record while fewer of its replicas are in sync than min.insync.replicas: `gpustream doctor` says of which topics"
)
_REFUSED = {
    InvalidSessionTimeoutError: f"this --session-timeout: {_SESSIONS}",
    InvalidTimestampError: "a time that is so far from its own: set this machine's clock right, and"
    " message.timestamp.type of the topic to LogAppendTime, as `gpustream topics create` does",
    NotEnoughReplicasError: _TOO_FEW_REPLICAS,
    NotEnoughReplicasAfterAppendError: _TOO_FEW_REPLICAS,
    MessageSizeTooLargeError: "a record of this size: set max.message.bytes of the topic to 4194304, as"
    " `gpustream topics create` does",
}
_ADMIN_ERROR_PREFIX = "Unable to get coordinator id for "
"""aiokafka's admin client puts this before the group's name."""

_EXPIRED, _NOT_YET, _OTHER_NAME, _OTHER_ADDRESS = 10, 9, 62, 64
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL")
_OF_CERTIFICATE = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")


def describe(error: BaseException) -> str:
    """One line with an error's class and message, without a password of a URL; for a missing ACL, or what Kafka
    does not take, what to do."""
    name, text = type(error).__name__, redact(str(error))
    for kind, action in _DENIED.items():
        if isinstance(error, kind):
            subject = error.args[0] if error.args else ""
            names = subject if isinstance(subject, str) else ", ".join(sorted(map(str, subject)))
            names = names.removeprefix(_ADMIN_ERROR_PREFIX)
            return f"Kafka does not let this client {action.format(names=names)} ({name})"
    for kind, action in _REFUSED.items():
        if isinstance(error, kind):
            return f"Kafka does not take {action} ({name})"
    return text if text.startswith(name) else f"{name}: {text}".strip(": ")


def of_connecting(
    error: BaseException, connection: Connection, user: str = "", *, again: bool = False, advertised: str | None = None
) -> str | None:
    """What a person must mend before a connection can be opened; None: only that it failed is known.

    ``user`` is the name of the login. A connection that is closed without a reason may be that of a broker that stops,
    unless it is closed ``again``. ``advertised`` is the host, if its name is from Kafka and not from --kafka.
    """
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, CredentialsError):
            return str(cause)
        if isinstance(cause, ssl.SSLError) and (reason := _of_tls(cause, connection)):
            return reason
        if isinstance(cause, OSError) and (reason := _of_network(cause, connection, advertised)):
            return reason
        if isinstance(cause, UnicodeError) and "idna" in str(cause):
            return f"its name can't be that of a host ({cause}): look at --kafka"
        if reason := _of_login(cause, connection, user):
            return reason
    closed = (asyncio.IncompleteReadError, ConnectionResetError, ssl.SSLEOFError)
    if not again or not any(isinstance(cause, closed) for cause in causes):
        return None
    if connection.has_tls:
        return "it closes the connection in the TLS handshake: give its port for TLS, or --kafka-security without ssl"
    return (
        "it closes the connection at the first request: it may want TLS, --kafka-security ssl or sasl-ssl,"
        " or be no Kafka broker"
    )


def _of_network(error: OSError, connection: Connection, advertised: str | None) -> str | None:
    if isinstance(error, socket.gaierror):
        where = "--kafka" if advertised is None else "the brokers' advertised.listeners, which have this name"
        return f"its name is not resolved ({error.strerror}): look at this machine's name servers, and at {where}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"no file descriptor is left ({error.strerror}): raise the limit, see `ulimit -n`"
    hosts = {server.rpartition(":")[0].strip("[]") for server in connection.servers.split(",")}
    if advertised in _THIS_MACHINE and hosts.isdisjoint(_THIS_MACHINE):
        return "Kafka names itself so, and that is this machine: set its advertised.listeners to an address for clients"
    return None


def of_first_request(connection: Connection) -> str:
    """What is wrong if a broker accepts a connection, and closes it at the first request after ApiVersions."""
    security = "sasl-ssl" if connection.has_tls else "sasl-plaintext"
    return f"it closes the connection: it wants a login: give --kafka-security {security} and how to log in"


def _of_tls(error: ssl.SSLError, connection: Connection) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return "its certificate has expired: renew it, or set this machine's clock right"
        if error.verify_code == _NOT_YET:
            return "its certificate is not valid yet: set this machine's clock right"
        if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
            return (
                f"it is not who it should be: {error.verify_message.rstrip('.')}: name brokers as their certificates do"
            )
        trusted = f"a CA of {connection.ca}" if connection.ca else "a CA that this machine trusts"
        return (
            f"its certificate is not signed by {trusted} ({error.verify_message}): give the certificate of the CA that"
            " signed it with --kafka-ca"
        )
    reason = error.reason or ""
    if any(code in reason for code in _NOT_TLS):
        return "it does not speak TLS: give its port for TLS, or --kafka-security without ssl"
    if "ALERT" in reason and any(code in reason for code in _OF_CERTIFICATE):
        if connection.cert is None:
            return "it wants a certificate of the client: give --kafka-cert and --kafka-key"
        return (
            f"it does not accept the certificate of --kafka-cert ({reason}): it has expired, or is not signed by a CA"
            " that the broker trusts"
        )
    return f"the TLS handshake failed: {reason}" if reason and not isinstance(error, ssl.SSLEOFError) else None


def _of_login(error: BaseException, connection: Connection, user: str) -> str | None:
    mechanism = (connection.mechanism or "").upper()
    if isinstance(error, UnsupportedSaslMechanismError):
        return f"it does not offer {mechanism}: give another --kafka-sasl-mechanism, one that is enabled on this port"
    if isinstance(error, IllegalSaslStateError):
        return "it wants no login on this port: give --kafka-security plaintext or ssl, or another port"
    refused = (SaslAuthenticationFailed, ValueError, KeyError, AssertionError)  # the last three are the client's own
    if not isinstance(error, refused):
        return None
    if not connection.has_login:
        return "its answer is none of a Kafka broker: give the address of a broker with --kafka"
    if connection.mechanism == "oauthbearer":
        return "it does not accept the token: check what --kafka-oauth-client-id may do, the audience and the scope"
    if connection.mechanism == "aws-msk-iam":
        return "it does not accept the AWS role of this process: allow it kafka-cluster:Connect"
    return f"it does not accept the user {user} with this password by {mechanism}: check both, and the user's mechanism"
