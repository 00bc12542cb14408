"""Reads a Kafka client configuration file, as a cloud's console hands it out for librdkafka or Java.

In: lines ``name=value`` (or ``name: value``), with comments and continued lines. Out: the settings of a connection,
under the same names for both dialects, and the lines that can't be used here. On failure: CredentialsError, in a
sentence.

Source: librdkafka's CONFIGURATION.md, Kafka's documentation of its producer's and consumer's settings, and the login
modules of Apache Kafka (KIP-768), Strimzi and AWS for what stands in ``sasl.jaas.config``.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from delivery import values

Security = Literal["plaintext", "ssl", "sasl-plaintext", "sasl-ssl"]
Mechanism = Literal["plain", "scram-sha-256", "scram-sha-512", "oauthbearer", "aws-msk-iam"]


class CredentialsError(Exception):
    """A secret or certificate can't be read or used; the message says what to do, and repeats no secret.

    At the start it ends a command. Later the connection is tried again, with what is in the files then.
    """


_NAMES = {
    "bootstrap.servers": "servers",
    "metadata.broker.list": "servers",
    "security.protocol": "security",
    "sasl.mechanism": "mechanism",
    "sasl.mechanisms": "mechanism",
    "sasl.username": "username",
    "sasl.password": "password",
    "sasl.oauthbearer.token.endpoint.url": "token_endpoint",
    "sasl.oauthbearer.client.id": "oauth_client_id",
    "sasl.oauthbearer.client.secret": "oauth_client_secret",
    "sasl.oauthbearer.scope": "oauth_scope",
    "ssl.ca.location": "ca",
    "ssl.ca.pem": "ca_pem",
    "ssl.certificate.location": "cert",
    "ssl.certificate.pem": "cert_pem",
    "ssl.key.location": "key",
    "ssl.key.pem": "key_pem",
    "ssl.key.password": "key_password",
    "ssl.truststore.location": "ca",
    "ssl.truststore.certificates": "ca_pem",
    "ssl.keystore.location": "cert",
    "ssl.keystore.certificate.chain": "cert_pem",
    "ssl.keystore.key": "key_pem",
    "client.id": "client_id",
}
"""Our name of each setting of the two dialects."""

_JAAS = {
    "username": "username",
    "password": "password",
    "clientid": "oauth_client_id",
    "oauth.client.id": "oauth_client_id",
    "clientsecret": "oauth_client_secret",
    "oauth.client.secret": "oauth_client_secret",
    "scope": "oauth_scope",
    "oauth.scope": "oauth_scope",
    "oauth.token.endpoint.uri": "token_endpoint",
}
"""Our name of each option of a login module."""

_IMPLIED = (
    "ssl.truststore.type",
    "ssl.keystore.type",
    "sasl.oauthbearer.method",
    "sasl.login.callback.handler.class",
    "sasl.client.callback.handler.class",
)
"""Settings that are not needed: what they say follows from the others."""

_RAW_VALUES = ("sasl.username", "sasl.password", "sasl.oauthbearer.client.secret", "ssl.key.password")
"""A backslash in these may be part of the value. In others Java puts one before a colon or an equals sign."""

_CHOICES = (
    ("security", "security.protocol", get_args(Security)),
    ("mechanism", "sasl.mechanism", get_args(Mechanism)),
)
_STORES = ("ssl.truststore.location", "ssl.keystore.location")
_VERIFICATION = {"ssl.endpoint.identification.algorithm": "https", "enable.ssl.certificate.verification": "true"}
_PAIR = re.compile(r"""([\w.]+)\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s;"']+)""")
_LOGIN_MODULE = re.compile(rf"[\w.$]+\s+\w+(?:\s+{_PAIR.pattern})*\s*;?")
_ESCAPED = re.compile(r"\\([:=#!])")
_LINE_END = re.compile(r"\r\n|\r|\n")
_SETTING = re.compile(r"([^\s=:]*)\s*[=:]\s*(.*)", re.DOTALL)
_NAME = re.compile(r"[a-z][a-z0-9._-]*")
_LARGEST = 1 << 20

PIPE = "it is a pipe, and this is read again for each connection: write it into a file"
"""Why a file is empty when it is read again, if it is a pipe, such as a shell's <(command)."""


class KafkaConfig(NamedTuple):
    """A parsed file: ``values`` by our names, and in ``unused`` a text for each line that can't be used.

    The values hold secrets and are used only for a connection. ``unused`` repeats no value.
    """

    values: dict[str, str]
    unused: tuple[str, ...]

    def __repr__(self) -> str:
        return f"KafkaConfig of {', '.join(self.values)}"


def read(path: Path) -> KafkaConfig:
    """Read and parse a file. Raises CredentialsError with a sentence that repeats no value."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")  # an editor of Windows may add a byte order mark
    except OSError as error:
        raise CredentialsError(f"--kafka-config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        text = ""
    config = parse(text if len(text) <= _LARGEST else "")
    if not config.values:
        reason = PIPE if path.is_fifo() else "not a file of lines such as bootstrap.servers=kafka-0:9092"
        raise CredentialsError(f"--kafka-config {path}: {reason}")
    return config


def parse(text: str) -> KafkaConfig:
    """The settings in a text. Raises CredentialsError."""
    values: dict[str, str] = {}
    unused = []
    for number, name, value in _lines(text):
        setting = _parse_setting(name, value)
        if isinstance(setting, str):
            unused.append(f"line {number}{setting}")
        else:
            values |= setting
    for name, kafka_name, choices in _CHOICES:
        if name in values:
            values[name] = chosen = values[name].lower().replace("_", "-")
            if chosen not in choices:
                raise CredentialsError(
                    f"--kafka-config: {kafka_name}: {chosen[:40]!r} can't be used here: use one of {', '.join(choices)}"
                )
    return KafkaConfig(values, tuple(unused))


def _parse_setting(name: str, value: str) -> dict[str, str] | str:
    """The values of a line by our names, or why it can't be used. It repeats no malformed name: it may be a secret."""
    if name == "sasl.jaas.config":
        return _parse_login_module(value)
    if name not in _RAW_VALUES:
        value = _ESCAPED.sub(r"\1", value)
    if name in _STORES:
        with contextlib.suppress(OSError):
            if b"-----BEGIN" not in Path(value).read_bytes():  # a Java key store
                return f", {name}: no PEM file: give one with --kafka-ca, --kafka-cert and --kafka-key"
    if name in _VERIFICATION and value.lower() != _VERIFICATION[name]:
        return f", {name}: brokers and their names are always verified"
    if _NAMES.get(name) == "servers":
        try:
            return {"servers": values.host_ports(re.sub(r"\w+://", "", value))}
        except ValueError as error:
            raise CredentialsError(f"--kafka-config: {name}: {error}") from None
    if name in _NAMES:
        return {_NAMES[name]: _pem(value) if _NAMES[name].endswith("_pem") else value}
    if name in _IMPLIED or name in _VERIFICATION:
        return {}
    return f", {name}" if _NAME.fullmatch(name) else ": no setting"


def _parse_login_module(value: str) -> dict[str, str] | str:
    """The options of a login module by our names, or why they can't be used.

    Java removes the backslashes of the file first, and then those of the quoted text. A file that was not written for
    Java may have only the second ones: it can't be parsed the first way.
    """
    for text in (re.sub(r"\\(.)", r"\1", value), value):
        if _LOGIN_MODULE.fullmatch(text):
            options = {_JAAS[key.lower()]: option for key, option in _PAIR.findall(text) if key.lower() in _JAAS}
            return {
                name: re.sub(r"\\(.)", r"\1", option[1:-1]) if option[0] in "\"'" else option
                for name, option in options.items()
            }
    return ", sasl.jaas.config: not a login module with options such as username='me', and each quote closed"


def _pem(value: str) -> str:
    """PEM split into lines again. Kafka's documentation joins them by continued lines, which leaves spaces."""
    text = value.replace("\\n", "\n")
    return text if "\n" in text else "\n".join(re.findall(r"-----[A-Z0-9 ]+-----|[^\s-]+", text))


def _lines(text: str) -> Iterator[tuple[int, str, str]]:
    """The line number, name and value of each setting; a line that ends in a backslash continues in the next one."""
    first_number, joined = 0, ""
    for number, line in enumerate([*_LINE_END.split(text), ""], 1):
        if not joined:
            first_number = number
        joined += line.strip()
        if joined.endswith("\\") and not joined.startswith(("#", "!")):
            joined = joined[:-1]
            continue
        if joined and not joined.startswith(("#", "!", "[")):
            match = _SETTING.fullmatch(joined)
            yield first_number, match[1] if match else "", match[2].strip() if match else ""
        joined = ""
