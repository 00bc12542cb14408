"""The file that a cloud's console hands out for Kafka clients, as librdkafka and Java's client read it.

In: lines ``name=value`` (or ``name: value``), with comments and continued lines. Out: the settings that a connection
needs, under the same names for both dialects, and the lines that can't be used here. On failure: CredentialsError, in a
sentence.

Source: librdkafka's CONFIGURATION.md, Kafka's documentation of its producer's and consumer's settings, and the login
modules of Apache Kafka (KIP-768), Strimzi and AWS for what stands in ``sasl.jaas.config``.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from delivery import values

SECURITY = ("plaintext", "ssl", "sasl-plaintext", "sasl-ssl")
MECHANISMS = ("plain", "scram-sha-256", "scram-sha-512", "oauthbearer", "aws-msk-iam")


class CredentialsError(Exception):
    """What a connection needs can't be read, or can't be used; the message says what to do, and repeats no secret.

    At the start it ends a command; later it is tried again, because a file that is mended is read again.
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
"""What we call each setting of the two dialects."""

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
"""And each option of a login module."""

_UNDERSTOOD = (
    "ssl.truststore.type",
    "ssl.keystore.type",
    "sasl.oauthbearer.method",
    "sasl.login.callback.handler.class",
    "sasl.client.callback.handler.class",
)
"""They say how the settings above are meant, which is found without them."""

_AS_WRITTEN = ("sasl.username", "sasl.password", "sasl.oauthbearer.client.secret", "ssl.key.password")
"""In these a backslash may be meant. In others Java writes one before a colon and an equals sign."""

_CHOICES = (("security", "security.protocol", SECURITY), ("mechanism", "sasl.mechanism", MECHANISMS))
_STORES = ("ssl.truststore.location", "ssl.keystore.location")
_VERIFICATION = {"ssl.endpoint.identification.algorithm": "https", "enable.ssl.certificate.verification": "true"}
_PAIR = re.compile(r"""([\w.]+)\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s;"']+)""")
_LOGIN_MODULE = re.compile(rf"[\w.$]+\s+\w+(?:\s+{_PAIR.pattern})*\s*;?")
_ESCAPED = re.compile(r"\\([:=#!])")
_LINE_END = re.compile(r"\r\n|\r|\n")
_SETTING = re.compile(r"([^\s=:]*)\s*[=:]\s*(.*)", re.DOTALL)
_NAME = re.compile(r"[a-z][a-z0-9._-]*")
_LARGEST_BYTES = 1 << 20


class KafkaConfig(NamedTuple):
    """What a file says: ``values`` by our names, and a line of text for each of its lines that can't be used.

    The values hold secrets: they go nowhere but into a connection. ``unused`` repeats no value.
    """

    values: dict[str, str]
    unused: tuple[str, ...]

    def __repr__(self) -> str:
        return f"KafkaConfig of {', '.join(self.values)}"


def read(path: Path) -> KafkaConfig:
    """The file as it is now. Raises CredentialsError with a sentence that says what is wrong, and repeats no value."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"--kafka-config {path}: {error.strerror}") from None
    try:
        text = content.decode("utf-8-sig")  # Windows puts a mark before the first line
    except UnicodeDecodeError:
        text = ""
    found = parse(text) if len(content) <= _LARGEST_BYTES else KafkaConfig({}, ())
    if not found.values:
        raise CredentialsError(f"--kafka-config {path}: not a file of lines such as bootstrap.servers=kafka-0:9092")
    return found


def parse(text: str) -> KafkaConfig:
    """The settings in a text. Raises CredentialsError."""
    values: dict[str, str] = {}
    unused = []
    for number, name, value in _lines(text):
        taken = _taken(name, value)
        if isinstance(taken, str):
            unused.append(f"line {number}{taken}")
        else:
            values |= taken
    for name, setting, choices in _CHOICES:
        if name in values:
            values[name] = chosen = values[name].lower().replace("_", "-")
            if chosen not in choices:
                can = ", ".join(choices)
                raise CredentialsError(
                    f"--kafka-config: {setting}: {chosen[:40]!r} can't be used here: use one of {can}"
                )
    return KafkaConfig(values, tuple(unused))


def _taken(name: str, value: str) -> dict[str, str] | str:
    """What a line gives under our names, or why it can't be used. A name that is none may be a secret."""
    if name == "sasl.jaas.config":
        return _login(value)
    if name not in _AS_WRITTEN:
        value = _ESCAPED.sub(r"\1", value)
    if name in _STORES:
        with contextlib.suppress(OSError):
            if b"-----BEGIN" not in Path(value).read_bytes():  # a store of Java's
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
    if name in _UNDERSTOOD or name in _VERIFICATION:
        return {}
    return f", {name}" if _NAME.fullmatch(name) else ": no setting"


def _login(value: str) -> dict[str, str] | str:
    """What the options of a login module give under our names, or why they can't be used.

    Java takes the backslashes of the file away first, and then those of the quoted text. A file that was not written
    for Java may have the second ones only: it makes no sense the first way.
    """
    for text in (re.sub(r"\\(.)", r"\1", value), value):
        if _LOGIN_MODULE.fullmatch(text):
            found = {_JAAS[key.lower()]: quoted for key, quoted in _PAIR.findall(text) if key.lower() in _JAAS}
            return {ours: re.sub(r"\\(.)", r"\1", it[1:-1]) if it[0] in "\"'" else it for ours, it in found.items()}
    return ", sasl.jaas.config: not a login module with options such as username='me', and each quote closed"


def _pem(value: str) -> str:
    """PEM in lines again. Kafka's documentation continues a line after each of them, which leaves spaces."""
    text = value.replace("\\n", "\n")
    return text if "\n" in text else "\n".join(re.findall(r"-----[A-Z0-9 ]+-----|[^\s-]+", text))


def _lines(text: str) -> Iterator[tuple[int, str, str]]:
    """The number, the name and the value of each setting; a line that ends in a backslash goes on in the next one."""
    begins, whole = 0, ""
    for number, line in enumerate([*_LINE_END.split(text), ""], 1):
        if not whole:
            begins = number
        whole += line.strip()
        if whole.endswith("\\") and not whole.startswith(("#", "!")):
            whole = whole[:-1]
            continue
        if whole and not whole.startswith(("#", "!", "[")):
            match = _SETTING.fullmatch(whole)
            yield begins, match[1] if match else "", match[2].strip() if match else ""
        whole = ""
