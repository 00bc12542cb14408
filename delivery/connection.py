"""How Kafka is reached: the value from which every Kafka client is made, and the secrets in the files that it names.

In: options, a client configuration file, certificates, a password file. Out: the secrets and TLS context of a
connection. The files are read again for each connection, so that the next one uses a rotated secret.
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
    """The current login and TLS context, for opening a connection. They are never shown or kept."""

    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    oauth_client_id: str = field(default="", repr=False)
    oauth_client_secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class Connection:
    """How Kafka is reached: ``servers`` are the bootstrap brokers, ``HOST:PORT[,...]``. It holds paths, and no secret.

    A secret that is not given is looked up in ``config``, a file that :mod:`delivery.kafka_config` reads. In Kafka the
    names of topics and consumer groups begin with ``topic_prefix``; a process uses the contract's names. Batches are
    written with ``compression``.
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
        """The name of a topic or a consumer group in Kafka."""
        return self.topic_prefix + name

    def unprefixed(self, name: str) -> str:
        """The contract's name of a topic or a consumer group of Kafka."""
        return name.removeprefix(self.topic_prefix)

    @property
    def has_tls(self) -> bool:
        """Whether connections use TLS."""
        return self.security in ("ssl", "sasl-ssl")

    @property
    def has_login(self) -> bool:
        """Whether the client logs in by SASL."""
        return self.security in ("sasl-plaintext", "sasl-ssl")

    def errors(self) -> list[str]:
        """What is wrong with these options, one sentence for people each; empty if nothing is."""
        try:
            secrets = self.secrets()
        except CredentialsError as error:
            return [str(error)]
        login_values = {
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
            installed = importlib.util.find_spec("aws_msk_iam_sasl_signer") is not None
            return [] if installed else ["--kafka-sasl-mechanism aws-msk-iam: run `pip install 'gpustream[msk]'` first"]
        errors = [
            f"{name}: missing: --kafka-sasl-mechanism {self.mechanism} needs it"
            for name, value in login_values.items()
            if not value and ("oauth" in name) == (self.mechanism == "oauthbearer")
        ]
        parts = urlsplit(self.token_endpoint or "")
        if self.mechanism == "oauthbearer" and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            errors.append("--kafka-oauth-token-endpoint: it must be https: the client's secret is sent to it")
        if parts.username or parts.password:
            errors.append("--kafka-oauth-token-endpoint: without a user and password: those are options of their own")
        return errors

    def secrets(self) -> Secrets:
        """The secrets that are in the files now. Raises CredentialsError."""
        config = kafka_config.read(self.config).values if self.config is not None else {}
        given: dict[str, str | None] = {}
        if self.has_login and self.mechanism == "oauthbearer":
            secret = _secret("--kafka-oauth-client-secret-file", self.oauth_client_secret_file)
            given = {"oauth_client_id": self.oauth_client_id, "oauth_client_secret": secret}
        elif self.has_login and self.mechanism != "aws-msk-iam":
            given = {"username": self.username, "password": _secret("--kafka-password-file", self.password_file)}
        login = {name: value or config.get(name, "") for name, value in given.items()}
        tls = None
        if self.has_tls:
            ca = _pem("--kafka-ca", self.ca, config.get("ca_pem"))
            cert = _pem("--kafka-cert", self.cert, config.get("cert_pem"))
            key = _pem("--kafka-key", self.key, config.get("key_pem"))
            tls = _context(ca, cert + key, config.get("key_password", ""))
        return Secrets(**login, tls=tls)

    def trust(self) -> ssl.SSLContext:
        """The TLS context for a token endpoint: it trusts the CAs of this machine, and those of the brokers."""
        context = ssl.create_default_context()
        if ca := _pem("--kafka-ca", self.ca, None):
            context.load_verify_locations(cadata=ca)
        return context


def _secret(option: str, path: Path | None) -> str | None:
    """The secret in a file, without its line end; None if ``path`` is None."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8-sig").strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise CredentialsError(f"{option} {path}: {reason}") from None
    if not text:
        reason = kafka_config.PIPE if path.is_fifo() else "it is empty: write the secret into it"
        raise CredentialsError(f"{option} {path}: {reason}")
    return text


def _pem(option: str, path: Path | None, inline: str | None) -> str:
    """The PEM blocks of a file, or of the configuration's own text; empty if there is neither."""
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
    """A TLS context that verifies the broker and its name, cached by its PEM texts because making it is slow.

    An empty ``ca`` means the CAs of this machine. Python reads a certificate from a file only: it gets one in memory.
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
            reason = error.reason or "not a certificate with its key"
            expected = "they must be a certificate and its private key, in PEM, and the key not encrypted"
            raise CredentialsError(f"--kafka-cert, --kafka-key: {expected} ({reason})") from None
        finally:
            os.close(file)
    return context
