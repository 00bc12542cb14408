"""The settings that sinks have in common."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import click

from delivery.settings import DURATION, HEADER, NAME, READABLE_FILE, START_FROM, MemberSettings, Option
from sinks.series.labels import MAX_LABELS, LabelSet
from topics.metric import Profile

Group = Annotated[str, Option("--group", NAME, "The consumer group.")]

From = Annotated[
    Literal["earliest", "latest"] | float,
    Option("--from", START_FROM, "Where a new group starts: that long ago, or an end."),
]


@dataclass(frozen=True, kw_only=True)
class SinkSettings(MemberSettings):
    """How a sink reads. ``from_``: ``earliest``, ``latest`` or how many seconds back a new group starts."""

    group: Group
    from_: From

    def mistakes(self) -> list[str]:
        """See :meth:`KafkaSettings.mistakes`."""
        found = super().mistakes()
        if isinstance(self.from_, str) and self.from_ not in {"earliest", "latest"}:
            found.append(f"--from: {self.from_!r} is not earliest, latest or a duration")
        if not isinstance(self.from_, str) and self.from_ < 0:
            found.append("--from: a duration must not be below zero")
        return found


@dataclass(frozen=True, kw_only=True)
class NamingSettings:
    """What metrics and labels are called. ``labels`` None is the label set of ``names``."""

    names: Annotated[Profile, Option("--names", None, "Metric names and units.")] = "otel"
    labels: Annotated[
        LabelSet | None,
        Option("--labels", click.Choice(["otel", "dcgm", "pod-devices"]), "The label names.", shown="those of --names"),
    ] = None

    @property
    def label_set(self) -> LabelSet:
        """The label set that is meant."""
        return self.labels or self.names


@dataclass(frozen=True, kw_only=True)
class SeriesSettings(SinkSettings, NamingSettings):
    """How a sink turns ticks into series. Tenants' labels never make more than ``max_labels`` on a series."""

    max_labels: Annotated[
        int,
        Option(
            "--max-labels",
            click.IntRange(min=1),
            "What is written on pods and namespaces never makes more labels than this on a series; gpu_pod_info has"
            " the rest.",
        ),
    ] = MAX_LABELS
    stale_after_s: Annotated[
        float,
        Option("--stale-after", DURATION, "The series of a node end when it has been silent for this long."),
    ] = 60.0

    def mistakes(self) -> list[str]:
        """See :meth:`KafkaSettings.mistakes`."""
        return [*super().mistakes(), *([] if self.stale_after_s > 0 else ["--stale-after: must be above zero"])]


@dataclass(frozen=True, kw_only=True)
class HttpSettings(SinkSettings):
    """How a receiver over HTTP is spoken to. ``headers`` are sent with each request; ``request_timeout_s`` bounds an
    attempt. ``RESERVED_HEADERS``, in lower case, are the sink's own."""

    RESERVED_HEADERS: ClassVar[frozenset[str]] = frozenset({"content-type", "content-length"})

    headers: Annotated[
        tuple[tuple[str, str], ...],
        Option(
            "--header", HEADER, "Sent with every request. Repeatable; in the variable, one a line.", repeatable=True
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
    tls_key: Annotated[Path | None, Option("--tls-key", READABLE_FILE, "The client's private key (PEM).")] = None
    request_timeout_s: float = 30.0

    def mistakes(self) -> list[str]:
        """See :meth:`KafkaSettings.mistakes`."""
        found = super().mistakes()
        basic = (self.basic_auth_user, self.basic_auth_password_file)
        if (basic[0] is None) != (basic[1] is None):
            found.append("--basic-auth-user and --basic-auth-password-file go together")
        if self.bearer_token_file is not None and basic != (None, None):
            found.append("--bearer-token-file: not together with --basic-auth-user")
        if self.tls_key is not None and self.tls_cert is None:
            found.append("--tls-key: needs --tls-cert")
        for name in ("basic_auth_password_file", "bearer_token_file", "tls_ca", "tls_cert", "tls_key"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                found.append(f"--{name.replace('_', '-')}: no file {path}")
        for name, value in self.headers:
            if name.lower() in self.RESERVED_HEADERS:
                found.append(f"--header: {name} is the sink's own")
            if not name or any(sign in name + value for sign in "\r\n\0"):
                found.append(f"--header: {name!r} is not a header")
        return found


def url_mistakes(url: str) -> list[str]:
    """What is wrong with a receiver's address."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return [f"--url: {url!r} is not http://... or https://..."]
    if parts.username is not None or parts.password is not None:
        return ["--url: credentials belong in --basic-auth-user and --basic-auth-password-file"]
    return []
