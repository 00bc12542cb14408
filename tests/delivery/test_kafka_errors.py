"""An error of Kafka becomes one sentence with the remedy."""

import asyncio
import ssl
from pathlib import Path
from socket import gaierror

import pytest
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    IllegalSaslStateError,
    InvalidSessionTimeoutError,
    InvalidTimestampError,
    KafkaConnectionError,
    MessageSizeTooLargeError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnsupportedSaslMechanismError,
    for_code,
)

from delivery.connection import Connection, CredentialsError
from delivery.kafka_errors import describe, of_connecting
from topics.topic import MAX_MESSAGE_BYTES

PLAIN = Connection("k:1")
TLS = Connection("k:1", security="ssl", ca=Path("/ca.pem"))
MUTUAL = Connection("k:1", security="ssl", cert=Path("/c.pem"))
LOGIN = Connection("k:1", security="sasl-ssl", mechanism="scram-sha-512", username="u")
TOKEN = Connection("k:1", security="sasl-ssl", mechanism="oauthbearer")


def unverified(code: int, message: str = "why") -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, message
    return error


def of_tls(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, reason)
    error.reason = reason
    return error


def closed(cause: BaseException) -> KafkaConnectionError:
    error = KafkaConnectionError("Connection at k:1 closed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "connection", "expected"),
    [
        (unverified(10), TLS, "has expired: renew it"),
        (unverified(9), TLS, "not valid yet: set this machine's clock"),
        (unverified(62, "Hostname mismatch."), TLS, "not who it should be: Hostname mismatch: name brokers as"),
        (unverified(20), TLS, "not signed by a CA of /ca.pem (why): give the certificate of the CA"),
        (unverified(19), LOGIN, "not signed by a CA that this machine trusts"),
        (of_tls("WRONG_VERSION_NUMBER"), TLS, "does not speak TLS: give its port for TLS"),
        (
            closed(of_tls("TLSV13_ALERT_CERTIFICATE_REQUIRED")),
            TLS,
            "wants a certificate of the client: give --kafka-cert",
        ),
        (closed(of_tls("SSLV3_ALERT_CERTIFICATE_EXPIRED")), MUTUAL, "does not accept the certificate of --kafka-cert"),
        (of_tls("NO_SHARED_CIPHER"), TLS, "the TLS handshake failed: NO_SHARED_CIPHER"),
        (
            SaslAuthenticationFailed(),
            LOGIN,
            "does not accept the user u with this password by SCRAM-SHA-512: check both",
        ),
        (ValueError("Server sent wrong signature!"), LOGIN, "does not accept the user u with this password"),
        (ValueError("unpack requires a buffer of 4 bytes"), PLAIN, "its answer is none of a Kafka broker: give the"),
        (UnicodeError("encoding with 'idna' codec failed"), PLAIN, "its name can't be that of a host (encoding with"),
        (SaslAuthenticationFailed(), TOKEN, "does not accept the token"),
        (UnsupportedSaslMechanismError(), LOGIN, "does not offer SCRAM-SHA-512: give another --kafka-sasl-mechanism"),
        (IllegalSaslStateError(), LOGIN, "wants no login on this port"),
        (CredentialsError("--kafka-password-file /p: it is empty"), LOGIN, "--kafka-password-file /p: it is empty"),
    ],
)
def test_an_error_that_must_be_fixed_is_named_at_once(error: Exception, connection: Connection, expected: str) -> None:
    assert expected in (of_connecting(error, connection, "u") or "")


@pytest.mark.parametrize(
    ("error", "connection", "expected"),
    [
        (closed(asyncio.IncompleteReadError(b"", 4)), PLAIN, "may want TLS, --kafka-security ssl or sasl-ssl"),
        (ConnectionResetError(), TLS, "closes the connection in the TLS handshake"),
    ],
)
def test_a_broker_that_closes_a_connection_may_only_be_stopping_until_it_does_so_again(
    error: Exception, connection: Connection, expected: str
) -> None:
    assert of_connecting(error, connection) is None
    assert expected in (of_connecting(error, connection, again=True) or "")


@pytest.mark.parametrize("error", [ConnectionRefusedError(), TimeoutError(), OSError(-2, "Name or service not known")])
def test_a_broker_that_is_away_needs_no_fix(error: Exception) -> None:
    assert of_connecting(error, LOGIN, again=True) is None


@pytest.mark.parametrize(
    ("error", "advertised", "expected"),
    [
        (gaierror(-2, "Name or service not known"), None, "(Name or service not known): look at this machine's name s"),
        (gaierror(-2, "Name or service not known"), "kafka-0", "at the brokers' advertised.listeners, which have this"),
        (ConnectionRefusedError(), "localhost", "Kafka names itself so, and that is this machine: set its advertised."),
        (OSError("Multiple exceptions: [Errno 111] ..."), "127.0.0.1", "set its advertised.listeners to an address"),
    ],
)
def test_an_address_that_only_kafka_knows_is_kafkas_to_mend(
    error: Exception, advertised: str | None, expected: str
) -> None:
    assert expected in (of_connecting(error, PLAIN, advertised=advertised) or "")


@pytest.mark.parametrize("server", ["k:1", "[fd00::1]:9092", "kafka.localhost.example:9092"])
def test_a_kafka_elsewhere_that_names_itself_this_machine_is_to_be_mended(server: str) -> None:
    trouble = of_connecting(ConnectionRefusedError(), Connection(server), advertised="localhost")
    assert "set its advertised.listeners" in (trouble or "")


@pytest.mark.parametrize("server", ["localhost:9092", "127.0.0.1:19092", "[::1]:9092"])
def test_a_kafka_on_this_machine_that_is_away_needs_no_fix(server: str) -> None:
    assert of_connecting(ConnectionRefusedError(), Connection(server), advertised="localhost") is None
    assert of_connecting(ConnectionRefusedError(), Connection("k:1"), advertised="kafka-0") is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TopicAuthorizationFailedError("gpu.samples"), "use the topic gpu.samples: give its user the ACLs"),
        (TopicAuthorizationFailedError({"b", "a"}), "use the topic a, b: "),
        (GroupAuthorizationFailedError("g"), "Read the consumer group g: add the ACL Read on Group g for its user"),
        (GroupAuthorizationFailedError("Unable to get coordinator id for g"), "Read the consumer group g: add the ACL"),
        (TransactionalIdAuthorizationFailed("t"), "use the transactional id t: add the ACL Write on TransactionalId t"),
        (ClusterAuthorizationFailedError(), "do what this needs of the cluster: "),
    ],
)
def test_a_missing_acl_is_named_with_its_resource(error: Exception, expected: str) -> None:
    assert f"Kafka does not let this client {expected}" in describe(error)
    assert type(error).__name__ in describe(error)


def test_a_session_timeout_that_the_brokers_refuse_is_named_with_their_limits() -> None:
    text = describe(InvalidSessionTimeoutError())
    assert text.startswith("Kafka does not take this --session-timeout: group.min.session.timeout.ms")
    assert text.endswith("(InvalidSessionTimeoutError)")


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        (InvalidTimestampError(), "message.timestamp.type of the topic to LogAppendTime"),
        (for_code(19)(), "min.insync.replicas: `gpustream doctor`"),
        (MessageSizeTooLargeError(), f"max.message.bytes of the topic to {MAX_MESSAGE_BYTES}"),
    ],
)
def test_what_makes_kafka_refuse_a_record_is_named_with_the_setting_of_the_topic(error: Exception, mend: str) -> None:
    assert describe(error).startswith("Kafka does not take a ")
    assert mend in describe(error)
    assert describe(error).endswith(f"({type(error).__name__})")


def test_a_description_has_no_password_of_a_url() -> None:
    assert describe(OSError("url='http://me:hunter2@proxy:3128'")) == "OSError: url='http://***@proxy:3128'"


def test_an_error_is_named_once() -> None:
    assert describe(KafkaConnectionError("away")) == "KafkaConnectionError: away"
    assert describe(TimeoutError()) == "TimeoutError"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (81, "GroupMaxSizeReachedError: [Error 81] GroupMaxSizeReachedError"),
        (82, "FencedInstanceIdError: [Error 82] FencedInstanceIdError"),
        (87, "InvalidRecordError: [Error 87] InvalidRecordError"),
    ],
)
def test_an_error_for_which_aiokafka_has_no_class_has_its_own_name(code: int, text: str) -> None:
    assert describe(for_code(code)()) == text


@pytest.mark.parametrize("code", [74, 75, 78, 88, 89])
def test_a_temporary_error_for_which_aiokafka_has_no_class_is_retried(code: int) -> None:
    assert for_code(code).retriable
