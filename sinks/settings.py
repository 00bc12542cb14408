"""The settings that sinks have in common, and those of the sinks that are one module.

A sink that is a folder has its settings in its ``config.py``. Those of ``alertmanager.py``, ``webhook.py`` and
``parquet.py`` are here, because the command's help imports settings, and those modules import their clients.
"""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from delivery.settings import DIRECTORY, DURATION, HEADER, NAME, READABLE_FILE, START_FROM, URL, MemberSettings, Option
from topics.alerts import CLOUD_EVENT
from topics.blake2 import blake2b

ALERTS_PATH = "/api/v2/alerts"
_LONGEST_RESEND_S = 24 * 3600
LOOPBACK = ("127.0.0.1", "::1", "[::1]", "localhost")

Group = Annotated[str, Option("--group", NAME, "The consumer group.")]
From = Annotated[
    Literal["earliest", "latest"] | float,
    Option("--from", START_FROM, "Where a new group starts: so long ago, at the earliest record, or after the latest."),
]


@dataclass(frozen=True, kw_only=True)
class SinkSettings(MemberSettings):
    """How a sink reads. ``from_``: ``earliest``, ``latest`` or how many seconds back a new group starts."""

    group: Group
    from_: From


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """How a server is spoken to over HTTP. ``headers`` are sent with each request; ``request_timeout_s`` bounds an
    attempt. ``RESERVED_HEADERS``, in lower case, are the client's own."""

    RESERVED_HEADERS: ClassVar[frozenset[str]] = frozenset({"content-type", "content-length"})

    headers: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "--header",
            HEADER,
            "Sent with every request. Repeatable; in the variable, one a line: a secret belongs there, because everyone"
            " on the machine can read a command line.",
            repeatable=True,
        ),
    ] = ()
    basic_auth_user: Annotated[
        str | None, Option("--basic-auth-user", None, "The user name of basic authentication.")
    ] = None
    basic_auth_password_file: Annotated[
        Path | None, Option("--basic-auth-password-file", READABLE_FILE, "The file that holds its password.")
    ] = None
    bearer_token_file: Annotated[
        Path | None, Option("--bearer-token-file", READABLE_FILE, "The file that holds a bearer token.")
    ] = None
    tls_ca: Annotated[
        Path | None, Option("--tls-ca", READABLE_FILE, "The certificates to trust (PEM).", shown="the system's")
    ] = None
    tls_cert: Annotated[Path | None, Option("--tls-cert", READABLE_FILE, "The client's certificate (PEM).")] = None
    tls_key: Annotated[Path | None, Option("--tls-key", READABLE_FILE, "Its private key (PEM), not encrypted.")] = None
    request_timeout_s: float = 30.0

    def errors(self) -> list[str]:
        """What is wrong with these settings together."""
        errors: list[str] = []
        basic = (self.basic_auth_user, self.basic_auth_password_file)
        if (basic[0] is None) != (basic[1] is None):
            errors.append("--basic-auth-user and --basic-auth-password-file go together")
        if self.bearer_token_file is not None and basic != (None, None):
            errors.append("--bearer-token-file: not together with --basic-auth-user")
        if self.tls_key is not None and self.tls_cert is None:
            errors.append("--tls-key: needs --tls-cert")
        for name in ("basic_auth_password_file", "bearer_token_file", "tls_ca", "tls_cert", "tls_key"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                errors.append(f"--{name.replace('_', '-')}: no file {path}")
        names = [name for name, _ in self.headers if name.lower() in self.RESERVED_HEADERS]
        return errors + [f"--header: {name} is the sink's own" for name in names]


@dataclass(frozen=True, kw_only=True)
class ReceiverSettings(HttpSettings, SinkSettings):
    """How a sink's receiver is spoken to over HTTP."""

    def errors(self) -> list[str]:
        return [*SinkSettings.errors(self), *HttpSettings.errors(self)]


def url_errors(url: str) -> list[str]:
    """What is wrong with a receiver's address."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return [f"--url: {url!r} is not http://... or https://..."]
    if parts.username is not None or parts.password is not None:
        return ["--url: credentials belong in --basic-auth-user and --basic-auth-password-file"]
    return []


@dataclass(frozen=True, kw_only=True)
class AlertmanagerSettings(ReceiverSettings):
    """Which Alertmanagers there are; each gets all alerts that are open, whenever they began. ``max_alerts`` bounds a
    request."""

    urls: Annotated[
        tuple[str, ...],
        Option(
            "--url",
            URL,
            "An Alertmanager, without /api/v2/alerts. Repeatable; in the variable, separated by spaces.",
            repeatable=True,
        ),
    ]
    resend_s: Annotated[
        float,
        Option(
            "--resend",
            DURATION,
            "How often what is open is sent again. If this sink is gone, alerts end after four times that.",
        ),
    ] = 60.0
    generator_url: Annotated[
        str | None, Option("--generator-url", URL, "Where notifications link to as the source of an alert.")
    ] = None
    group: Group = "gpustream-sink-alertmanager"
    from_: From = 3600.0
    max_alerts: int = 256

    def errors(self) -> list[str]:
        urls = [url.rstrip("/") for url in self.urls]
        errors = [error for url in urls for error in url_errors(url)]
        errors += [f"--url: {url!r}: without {ALERTS_PATH}" for url in urls if url.endswith(ALERTS_PATH)]
        errors += [f"--url: {url!r}: without a query" for url in urls if urlsplit(url).query or urlsplit(url).fragment]
        errors += [f"--url: {url!r} is given twice" for url in sorted({url for url in urls if urls.count(url) > 1})]
        if not urls:
            errors.append("--url: missing")
        errors += super().errors()
        if not 1 <= self.resend_s <= _LONGEST_RESEND_S:
            errors.append("--resend: must be at least 1 s and at most 24 h")
        return errors

    def group_of(self, url: str) -> str:
        """The consumer group of one Alertmanager: the given one if there is only one, else its own."""
        if len(self.urls) == 1:
            return self.group
        return f"{self.group}-{blake2b(url.encode(), 4).hex()}"


@dataclass(frozen=True, kw_only=True)
class WebhookSettings(ReceiverSettings):
    """Where to post, and with which signature: ``secret_file`` holds its key, ``unsigned`` says that there is none.

    ``max_in_flight`` bounds how many requests are under way.
    """

    RESERVED_HEADERS: ClassVar[frozenset[str]] = frozenset(
        {"content-type", "content-length", "idempotency-key", "x-gpustream-signature"}
        | {f"ce-{attribute.name}" for attribute in CLOUD_EVENT}
    )

    url: Annotated[str, Option("--url", URL, "Where to post to, as given.")]
    secret_file: Annotated[
        Path | None,
        Option(
            "--secret-file",
            READABLE_FILE,
            "The file that holds the key with which X-Gpustream-Signature signs each body (HMAC-SHA256).",
        ),
    ] = None
    unsigned: Annotated[bool, Option("--unsigned", None, "Bodies are not signed.")] = False
    format: Annotated[
        Literal["record", "cloudevents"],
        Option(
            "--format",
            None,
            "What is posted: the record of gpu.alerts as it is, or a CloudEvent, as Knative and its like take it.",
        ),
    ] = "record"
    content_mode: Annotated[
        Literal["binary", "structured"],
        Option(
            "--content-mode",
            None,
            "How a CloudEvent is posted: binary has the record as the body and the rest in headers, structured has all"
            " in one JSON body.",
        ),
    ] = "binary"
    group: Group = "gpustream-sink-webhook"
    from_: From = 3600.0
    max_in_flight: int = 8

    def errors(self) -> list[str]:
        errors = url_errors(self.url)
        file = self.secret_file
        if self.content_mode == "structured" and self.format == "record":
            errors.append("--content-mode: it is of no use without --format cloudevents")
        if file is None:
            errors += [] if self.unsigned else ["--secret-file: missing; or say --unsigned"]
        elif self.unsigned:
            errors.append("--unsigned: not together with --secret-file")
        elif not file.is_file():
            errors.append(f"--secret-file: no file {file}")
        elif not file.read_bytes().strip():
            errors.append(f"--secret-file: {file} is empty")
        return [*errors, *super().errors()]


@dataclass(frozen=True, kw_only=True)
class ParquetSettings(SinkSettings):
    """Where files are written, and how soon."""

    path: Annotated[
        Path,
        Option(
            "--path",
            DIRECTORY,
            "The directory below which files are written: of one Kafka, and the same for all workers of the group.",
        ),
    ]
    write_every_s: Annotated[
        float,
        Option(
            "--write-every",
            DURATION,
            "How long records are held before they are written, so that a file is not written again for each.",
        ),
    ] = 60.0
    group: Group = "gpustream-sink-parquet"
    from_: From = "earliest"

    def errors(self) -> list[str]:
        errors = super().errors()
        if importlib.util.find_spec("pyarrow") is None:
            errors.append("sink parquet: run `pip install 'gpustream[parquet]'` first: it needs pyarrow")
        path: Path | None = self.path  # None: it is missing or a file, which is an error already
        if path and not _can_be_written_to(path):
            errors.append(f"--path: {path} is no directory that can be written to")
        if self.write_every_s < 0:
            errors.append("--write-every: must not be below zero")
        return errors


def _can_be_written_to(directory: Path) -> bool:
    """Whether a directory can be written to, or is not there yet."""
    try:
        directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # such as a directory above it that must not be searched
        return False
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)
