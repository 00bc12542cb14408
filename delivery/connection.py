"""How Kafka is reached: one value, from which every Kafka client is made, and the secrets in the files that it names.

In: options, a file of a cloud's console, certificates, a file with a password. Out: what a connection is opened with.
The files are read again for each connection, so that a rotated secret is used from the next connection on.
On failure: :class:`CredentialsError`, in a sentence that names the option and repeats no secret.
"""

import importlib.util
import os
import re
import ssl
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from delivery import kafka_config
from delivery.kafka_config import CredentialsError as CredentialsError

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_PEM_BLOCK = re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?-----END [A-Z0-9 ]+-----", re.DOTALL)


@dataclass(frozen=True)
class Secrets:
    """What a connection is opened with now. It is never shown, and nothing keeps it."""

    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    oauth_client_id: str = field(default="", repr=False)
    oauth_client_secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class Connection:
    """``servers`` are the bootstrap brokers, ``HOST:PORT[,...]``; as text it is those. It holds no secret, only paths.

    What is None is looked for in ``config``, a file that :mod:`delivery.kafka_config` reads. ``topic_prefix`` stands
    before each topic and consumer group in Kafka; in a process they have the contract's names. ``compression`` is that
    of the batches that are written; a batch that is read says its own.
    """

    servers: str
    security: str = "plaintext"
    mechanism: str | None = None
    username: str | None = None
    password_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token_endpoint: str | None = None
    oauth_client_id: str | None = None
    oauth_client_secret_file: Path | None = None
    oauth_scope: str | None = None
    client_id: str | None = None
    config: Path | None = None
    topic_prefix: str = ""
    compression: str = "zstd"

    def __str__(self) -> str:
        return self.servers

    def prefixed(self, name: str) -> str:
        """The name by which Kafka knows a topic or a consumer group."""
        return self.topic_prefix + name

    def unprefixed(self, name: str) -> str:
        """The contract's name of a topic or a consumer group that Kafka knows."""
        return name.removeprefix(self.topic_prefix)

    @property
    def has_tls(self) -> bool:
        """Whether the broker is spoken to through TLS."""
        return self.security in ("ssl", "sasl-ssl")

    @property
    def has_login(self) -> bool:
        """Whether the client says who it is by SASL."""
        return self.security in ("sasl-plaintext", "sasl-ssl")

    def errors(self) -> list[str]:
        """What keeps a connection from being opened with this, in words for whoever wrote it."""
        try:
            secrets = self.secrets()
        except CredentialsError as error:
            return [str(error)]
        found = {
            "--kafka-username": secrets.username,
            "--kafka-password-file": secrets.password,
            "--kafka-oauth-token-endpoint": self.token_endpoint,
            "--kafka-oauth-client-id": secrets.oauth_client_id,
            "--kafka-oauth-client-secret-file": secrets.oauth_client_secret,
        }
        if not self.has_login:
            return []
        if self.mechanism is None:
            return [f"--kafka-sasl-mechanism: missing: --kafka-security {self.security} wants a login"]
        if self.mechanism == "aws-msk-iam":
            there = importlib.util.find_spec("aws_msk_iam_sasl_signer") is not None
            return [] if there else ["--kafka-sasl-mechanism aws-msk-iam: run `pip install 'gpustream[msk]'` first"]
        needed = [name for name in found if ("oauth" in name) == (self.mechanism == "oauthbearer")]
        wrong = [
            f"{name}: missing: --kafka-sasl-mechanism {self.mechanism} needs it" for name in needed if not found[name]
        ]
        parts = urlsplit(self.token_endpoint or "")
        if self.mechanism == "oauthbearer" and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            wrong.append("--kafka-oauth-token-endpoint: it must be https: the client's secret is sent to it")
        if parts.username or parts.password:
            wrong.append("--kafka-oauth-token-endpoint: without a user and password: those are options of their own")
        return wrong

    def secrets(self) -> Secrets:
        """What stands in the files now. Raises CredentialsError."""
        config = kafka_config.read(self.config).values if self.config is not None else {}
        login: dict[str, str] = {}
        if self.has_login and self.mechanism == "oauthbearer":
            secret = _secret("--kafka-oauth-client-secret-file", self.oauth_client_secret_file)
            login = {
                "oauth_client_id": self.oauth_client_id or config.get("oauth_client_id", ""),
                "oauth_client_secret": secret or config.get("oauth_client_secret", ""),
            }
        elif self.has_login and self.mechanism != "aws-msk-iam":
            secret = _secret("--kafka-password-file", self.password_file)
            login = {
                "username": self.username or config.get("username", ""),
                "password": secret or config.get("password", ""),
            }
        tls = None
        if self.has_tls:
            ca = _pem("--kafka-ca", self.ca, config.get("ca_pem"))
            cert = _pem("--kafka-cert", self.cert, config.get("cert_pem"))
            key = _pem("--kafka-key", self.key, config.get("key_pem"))
            tls = _context(ca, cert + key, config.get("key_password", ""))
        return Secrets(**login, tls=tls)

    def trust(self) -> ssl.SSLContext:
        """What a token endpoint is verified by: the CAs of this machine, and those of the brokers."""
        context = ssl.create_default_context()
        if ca := _pem("--kafka-ca", self.ca, None):
            context.load_verify_locations(cadata=ca)
        return context


def _secret(option: str, path: Path | None) -> str | None:
    """The secret in a file, without the end of its line; None if no file is named."""
    if path is None:
        return None
    try:
        text = path.read_text().strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise CredentialsError(f"{option} {path}: {why}") from None
    if not text:
        raise CredentialsError(f"{option} {path}: it is empty: write the secret into it")
    return text


def _pem(option: str, path: Path | None, inline: str | None) -> str:
    """The PEM blocks of a file, or of what a configuration holds itself; no text if there is neither."""
    try:
        text = path.read_text(errors="replace") if path is not None else inline or ""
    except OSError as error:
        raise CredentialsError(f"{option} {path}: {error.strerror}") from None
    blocks = _PEM_BLOCK.findall(text)
    if not blocks and (path is not None or text):
        raise CredentialsError(f"{option} {path or 'in --kafka-config'}: no PEM file: it has no -----BEGIN")
    return "".join(f"{block}\n" for block in blocks)


@lru_cache(maxsize=4)
def _context(ca: str, identity: str, key_password: str) -> ssl.SSLContext:
    """A context that verifies the broker and its name, kept by the PEM texts that it is made from: making it is slow.

    ``ca`` empty are the CAs of this machine. Python reads a certificate from a file only: it is given one in memory.
    """
    try:
        context = ssl.create_default_context(cadata=ca or None)
    except ssl.SSLError as error:
        raise CredentialsError(f"--kafka-ca: not a certificate ({error.reason or error})") from None
    if identity:
        file = os.memfd_create("client-certificate", os.MFD_CLOEXEC)
        try:
            os.write(file, identity.encode())
            context.load_cert_chain(f"/proc/self/fd/{file}", password=lambda: key_password)
        except ssl.SSLError as error:
            why = error.reason or "not a certificate with its key"
            what = "they must be a certificate and its private key, in PEM, and the key not encrypted"
            raise CredentialsError(f"--kafka-cert, --kafka-key: {what} ({why})") from None
        finally:
            os.close(file)
    return context
