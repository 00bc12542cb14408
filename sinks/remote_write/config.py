"""The settings of the remote-write sink, named as its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from sinks.labels import LABEL_SETS, MAX_LABELS, LabelSet
from topics.metric import PROFILES, Profile

PROTOCOLS = ("auto", "1.0", "2.0")
RESERVED_HEADERS = frozenset(
    {"content-type", "content-encoding", "x-prometheus-remote-write-version", "content-length"}
)


@dataclass(frozen=True, kw_only=True)
class RemoteWriteSettings:
    """Settings; see :func:`mistakes`. ``from_``: ``earliest``, ``latest`` or how many seconds back a new group starts.

    ``labels`` None is the label set of ``names``; tenants' labels never make more than ``max_labels`` on a series.
    ``headers`` are sent with each request. ``max_request_samples`` and ``max_in_flight`` bound a request and how many
    are under way, ``request_timeout_s`` an attempt.
    """

    kafka: str
    url: str
    cluster: str = "default"
    protocol: Literal["auto", "1.0", "2.0"] = "auto"
    names: Profile = "otel"
    labels: LabelSet | None = None
    max_labels: int = MAX_LABELS
    headers: tuple[tuple[str, str], ...] = ()
    basic_auth_user: str | None = None
    basic_auth_password_file: Path | None = None
    bearer_token_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    stale_after_s: float = 60.0
    group: str = "gpustream-sink-remote-write"
    from_: Literal["earliest", "latest"] | float = 3600.0
    instance_id: str | None = None
    session_timeout_s: float = 10.0
    max_request_samples: int = 10_000
    max_in_flight: int = 8
    request_timeout_s: float = 30.0

    def mistakes(self) -> list[str]:
        """Every mistake in the settings, in words for whoever wrote them; empty when there is none."""
        return [*_url(self.url), *_choices(self), *_credentials(self), *_headers(self.headers), *_numbers(self)]


def _url(url: str) -> list[str]:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return [f"--url: {url!r} is not http://... or https://..."]
    if parts.username is not None or parts.password is not None:
        return ["--url: credentials belong in --basic-auth-user and --basic-auth-password-file"]
    return []


def _choices(settings: RemoteWriteSettings) -> list[str]:
    wrong = []
    if settings.protocol not in PROTOCOLS:
        wrong.append(f"--protocol: {settings.protocol!r} is not one of {', '.join(PROTOCOLS)}")
    if settings.names not in PROFILES:
        wrong.append(f"--names: {settings.names!r} is not one of {', '.join(PROFILES)}")
    if settings.labels is not None and settings.labels not in LABEL_SETS:
        wrong.append(f"--labels: {settings.labels!r} is not one of {', '.join(LABEL_SETS)}")
    if isinstance(settings.from_, str) and settings.from_ not in {"earliest", "latest"}:
        wrong.append(f"--from: {settings.from_!r} is not earliest, latest or a duration")
    if not settings.kafka:
        wrong.append("--kafka: missing")
    if not settings.group:
        wrong.append("--group: empty")
    return wrong


def _credentials(settings: RemoteWriteSettings) -> list[str]:
    wrong = []
    basic = (settings.basic_auth_user, settings.basic_auth_password_file)
    if (basic[0] is None) != (basic[1] is None):
        wrong.append("--basic-auth-user and --basic-auth-password-file go together")
    if settings.bearer_token_file is not None and basic != (None, None):
        wrong.append("--bearer-token-file: not together with --basic-auth-user")
    if settings.tls_key is not None and settings.tls_cert is None:
        wrong.append("--tls-key: needs --tls-cert")
    for name in ("basic_auth_password_file", "bearer_token_file", "tls_ca", "tls_cert", "tls_key"):
        path: Path | None = getattr(settings, name)
        if path is not None and not path.is_file():
            wrong.append(f"--{name.replace('_', '-')}: no file {path}")
    return wrong


def _headers(headers: tuple[tuple[str, str], ...]) -> list[str]:
    wrong = [f"--header: {name} is the sink's own" for name, _ in headers if name.lower() in RESERVED_HEADERS]
    bad = [name for name, value in headers if not name or any(sign in name + value for sign in "\r\n\0")]
    return [*wrong, *(f"--header: {name!r} is not a header" for name in bad)]


def _numbers(settings: RemoteWriteSettings) -> list[str]:
    wrong = []
    if settings.stale_after_s <= 0:
        wrong.append("--stale-after: must be above zero")
    if settings.session_timeout_s < 1:
        wrong.append("--session-timeout: must be at least 1 s")
    if not isinstance(settings.from_, str) and settings.from_ < 0:
        wrong.append("--from: a duration must not be below zero")
    if min(settings.max_request_samples, settings.max_in_flight, settings.request_timeout_s) <= 0:
        wrong.append("limits of requests must be above zero")
    return wrong
