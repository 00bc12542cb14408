"""The TLS of the metrics API: certificates as the files have them now, and whose certificate a client must show.

In: files, and the CA of the clients. Out: a context for a server. State: what the files held when a client came last.
On failure: ``CertificateError`` at the start; files that can't be used later leave what was read before, with a line in
the log.
"""

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from delivery.kafka_errors import describe

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 1.0


class CertificateError(Exception):
    """The certificates can't be used; the message says why."""

    exit_code = 1


class _Material(NamedTuple):
    """What a context is made of: the serving certificate, its key, and the CA of the clients if they must show one."""

    certificate: bytes
    key: bytes
    client_ca: str | None


class ServerTls:
    """A server's TLS. ``client_ca`` gives the PEM of the clients' CA, or None: nobody is asked for a certificate.

    ``optional``: a client may connect without a certificate, and has to show a token then.
    """

    def __init__(
        self, certificate: Path, key: Path, client_ca: Callable[[], str | None], *, optional: bool = False
    ) -> None:
        self._certificate, self._key, self._client_ca, self._optional = certificate, key, client_ca, optional
        self._checked_s = time.monotonic()
        try:
            self._material = self._read()
            self._context = self._new_context(self._material)
        except (OSError, ValueError) as error:
            raise CertificateError(self._problem(error)) from error

    @property
    def context(self) -> ssl.SSLContext:
        """The context to listen with. Each handshake uses the certificates that the files have then."""
        context = self._new_context(self._material)
        context.sni_callback = self._choose
        return context

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Give a new connection the present certificates; the files are read again at most once a second."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= _CHECK_EVERY_S:
            self._checked_s = now_s
            try:
                material = self._read()
                if material != self._material:
                    self._context = self._new_context(material)
                    self._material = material
                    log.info("new certificates: clients that connect from now on get these")
            except (OSError, ValueError) as error:
                log.warning("%s; going on with what was read before", self._problem(error))
        connection.context = self._context

    def _read(self) -> _Material:
        return _Material(self._certificate.read_bytes(), self._key.read_bytes(), self._client_ca())

    def _new_context(self, material: _Material) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_TICKET  # a session that is resumed would show no certificate again
        context.num_tickets = 0
        # without a password OpenSSL would ask for it on the terminal
        context.load_cert_chain(self._certificate, self._key, password="")
        if material.client_ca is not None:
            certificates = material.client_ca.encode("ascii", "ignore").decode()  # the text between them may be any
            context.load_verify_locations(cadata=certificates)
            context.verify_mode = ssl.CERT_OPTIONAL if self._optional else ssl.CERT_REQUIRED
        return context

    def _problem(self, error: Exception) -> str:
        files = f"{self._certificate} and {self._key}, or the clients' CA"
        return f"the certificates in {files}, can't be used: {describe(error)}"
