"""A certificate authority of the tests, made by openssl."""

import subprocess
from pathlib import Path
from typing import NamedTuple

CONFIGURATION = """
[req]
distinguished_name = nothing
[nothing]
[authority]
basicConstraints = critical, CA:true
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[host]
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


class Certificate(NamedTuple):
    """PEM files: a certificate, its key without a password, and the certificate of whoever signed it."""

    certificate: Path
    key: Path
    ca: Path


class Authority:
    """A certificate authority, and the certificates that it has signed; all in one folder."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.ca = directory / "ca.crt"
        (directory / "openssl.cnf").write_text(CONFIGURATION)
        self._openssl("ca", "-subj", "/CN=ca of the tests", "-extensions", "authority")

    def sign(self, name: str, *alternatives: str) -> Certificate:
        """A certificate for CN=name, made at the first call, with alternative names such as ``DNS:localhost``."""
        signed = Certificate(self.directory / f"{name}.crt", self.directory / f"{name}.key", self.ca)
        if not signed.certificate.exists():
            names = ["-addext", f"subjectAltName={','.join(alternatives)}"] if alternatives else []
            signer = ["-CA", str(self.ca), "-CAkey", str(self.directory / "ca.key")]
            self._openssl(name, "-subj", f"/CN={name}", "-extensions", "host", *names, *signer)
        return signed

    def _openssl(self, name: str, *arguments: str) -> None:
        files = ["-config", "openssl.cnf", "-keyout", f"{name}.key", "-out", f"{name}.crt"]
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command = ["openssl", "req", "-x509", "-days", "2", *files, *key, *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd=self.directory)
