"""The sources of a connection: options, a cloud's properties file, and secrets that are read when they are needed."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from delivery.connection import Connection, CredentialsError
from delivery.kafka_config import PIPE
from delivery.settings import KafkaSettings

SECRET = "Tr0ub4dor&3"  # noqa: S105
CONFIG = f"""bootstrap.servers=b:9093
security.protocol=SASL_SSL
sasl.mechanism=PLAIN
sasl.username=u
sasl.password={SECRET}
"""


@dataclass
class Files:
    """A folder of files that options name."""

    folder: Path

    def __call__(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def login(files: Files, **changed: Any) -> KafkaSettings:
    """The settings of a user of SCRAM without TLS."""
    fields = {
        "kafka": "k:1",
        "kafka_security": "sasl-plaintext",
        "kafka_sasl_mechanism": "scram-sha-512",
        "kafka_username": "u",
        "kafka_password_file": files("password", f"{SECRET}\n"),
    }
    return KafkaSettings(**{**fields, **changed})


def test_a_password_is_read_when_it_is_needed(files: Files) -> None:
    connection = login(files).connection()
    assert connection.secrets().password == SECRET
    files("password", "another\n")
    assert connection.secrets().password == "another"  # noqa: S105


def test_a_file_of_a_cloud_is_enough(files: Files) -> None:
    settings = KafkaSettings(kafka_config=files("client.properties", CONFIG))
    connection = settings.connection()

    assert settings.errors() == []
    assert (connection.servers, connection.security, connection.mechanism) == ("b:9093", "sasl-ssl", "plain")
    assert (connection.secrets().username, connection.secrets().password) == ("u", SECRET)


def test_an_option_wins_over_its_line(files: Files) -> None:
    config = files("client.properties", CONFIG)
    connection = login(files, kafka="k:1", kafka_config=config, kafka_username="me").connection()

    assert (str(connection), connection.security, connection.mechanism) == ("k:1", "sasl-plaintext", "scram-sha-512")
    assert connection.secrets().username == "me"


@pytest.mark.parametrize("begin", ["", "\ufeff"])
def test_a_password_is_utf_8_in_any_locale_without_a_byte_order_mark(files: Files, begin: str) -> None:
    path = files("password", f"{begin}p\u00e4ssword\r\n")
    script = f"""
from pathlib import Path
from delivery.connection import Connection
connection = Connection("k:1", "sasl-ssl", "plain", username="u", password_file=Path({str(path)!r}))
assert connection.secrets().password == "p\\u00e4ssword"
"""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **locale}, check=True)


def test_a_pipe_that_has_nothing_more_is_named(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    try:
        path = Path(f"/dev/fd/{read_end}")
        connection = Connection("k:1", "sasl-plaintext", "plain", username="u", password_file=path)
        assert connection.errors() == [f"--kafka-password-file {path}: {PIPE}"]
        with pytest.raises(CredentialsError, match=f"--kafka-config {path}: {PIPE}"):
            KafkaSettings(kafka_config=path).connection()
    finally:
        os.close(read_end)


def test_a_password_in_the_file_of_a_cloud_is_read_again_too(files: Files) -> None:
    connection = KafkaSettings(kafka_config=files("client.properties", CONFIG)).connection()
    files("client.properties", CONFIG.replace(SECRET, "another"))

    assert connection.secrets().password == "another"  # noqa: S105


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"kafka": None}, "--kafka: missing: give Kafka's bootstrap brokers, or a --kafka-config that has them"),
        ({"kafka_sasl_mechanism": None}, "--kafka-sasl-mechanism: missing: --kafka-security sasl-plaintext wants"),
        ({"kafka_username": None}, "--kafka-username: missing: --kafka-sasl-mechanism scram-sha-512 needs it"),
        ({"kafka_password_file": None}, "--kafka-password-file: missing: --kafka-sasl-mechanism scram-sha-512"),
        ({"kafka_password_file": Path("/nowhere")}, "--kafka-password-file /nowhere: No such file or directory"),
        ({"kafka_sasl_mechanism": "oauthbearer"}, "--kafka-oauth-token-endpoint: missing"),
        ({"kafka_security": "ssl"}, "--kafka-sasl-mechanism: it is of no use without a login"),
        ({"kafka_ca": Path("/ca")}, "--kafka-ca: it is of no use without TLS: --kafka-security ssl or sasl-ssl"),
        ({"kafka_config": Path("/nowhere")}, "--kafka-config /nowhere: No such file or directory"),
    ],
)
def test_an_error_names_its_option_and_what_to_do(files: Files, changed: dict[str, Any], error: str) -> None:
    assert login(files, **changed).errors()[0].startswith(error)


@pytest.mark.parametrize("installed", [False, True])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    files: Files, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    errors = login(files, kafka_sasl_mechanism="aws-msk-iam").errors()
    missing = "--kafka-sasl-mechanism aws-msk-iam: run `pip install 'gpustream[msk]'` first"
    assert (missing in errors) is not installed


def test_a_secret_is_sent_to_a_token_endpoint_by_https_only(files: Files) -> None:
    oauth = {
        "kafka_sasl_mechanism": "oauthbearer",
        "kafka_username": None,
        "kafka_password_file": None,
        "kafka_oauth_client_id": "me",
        "kafka_oauth_client_secret_file": files("secret", SECRET),
    }
    for endpoint, error_count in (
        ("https://l.example/token", 0),
        ("http://l.example/token", 1),
        ("http://localhost/t", 0),
        ("https://u:p@l", 1),
    ):
        errors = login(files, kafka_oauth_token_endpoint=endpoint, **oauth).errors()
        assert len(errors) == error_count, errors


@pytest.mark.parametrize("text", ["", "\n", "not PEM"])
def test_a_malformed_certificate_is_named(files: Files, text: str) -> None:
    connection = Connection("k:1", security="ssl", ca=files("ca.pem", text))
    with pytest.raises(CredentialsError, match=r"--kafka-ca .*ca.pem: no PEM file"):
        connection.secrets()


def test_a_certificate_without_its_key_is_one_sentence(files: Files) -> None:
    cert = files("c.pem", "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    with pytest.raises(CredentialsError, match="--kafka-cert, --kafka-key: they must be a certificate and its private"):
        Connection("k:1", security="ssl", cert=cert).secrets()


def test_no_text_of_a_connection_has_a_secret(files: Files) -> None:
    config = files("client.properties", CONFIG)
    settings = login(files, kafka_config=config)
    connection = settings.connection()
    shown_objects = [settings, connection, connection.secrets(), settings.errors(), vars(settings)]

    assert not [text for text in shown_objects if SECRET in f"{text} {text!r}"]


def test_brokers_and_their_names_are_verified() -> None:
    context = Connection("k:1", security="ssl").secrets().tls

    assert context is not None
    assert context.check_hostname
    assert context.verify_mode.name == "CERT_REQUIRED"
