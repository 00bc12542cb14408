"""The settings that sinks have in common, and what is wrong with them, in words for whoever wrote them."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from delivery.positions import From
from sinks.consumer import SinkSettings

_FILES = ("basic_auth_password_file", "bearer_token_file", "tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """How a receiver over HTTP is spoken to. ``headers`` are sent with each request; ``request_timeout_s`` bounds an
    attempt."""

    headers: tuple[tuple[str, str], ...] = ()
    basic_auth_user: str | None = None
    basic_auth_password_file: Path | None = None
    bearer_token_file: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    request_timeout_s: float = 30.0


class StartingSettings(SinkSettings, Protocol):
    """How a sink reads, and where a new group starts."""

    @property
    def from_(self) -> From: ...


def url_mistakes(url: str) -> list[str]:
    """What is wrong with a receiver's address."""
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return [f"--url: {url!r} is not http://... or https://..."]
    if parts.username is not None or parts.password is not None:
        return ["--url: credentials belong in --basic-auth-user and --basic-auth-password-file"]
    return []


def reading_mistakes(settings: StartingSettings) -> list[str]:
    """What is wrong with how the sink reads."""
    wrong = []
    if isinstance(settings.from_, str) and settings.from_ not in {"earliest", "latest"}:
        wrong.append(f"--from: {settings.from_!r} is not earliest, latest or a duration")
    if not isinstance(settings.from_, str) and settings.from_ < 0:
        wrong.append("--from: a duration must not be below zero")
    if not settings.kafka:
        wrong.append("--kafka: missing")
    if not settings.group:
        wrong.append("--group: empty")
    if settings.session_timeout_s < 1:
        wrong.append("--session-timeout: must be at least 1 s")
    return wrong


def http_mistakes(settings: HttpSettings, reserved: Collection[str]) -> list[str]:
    """What is wrong with credentials and headers; ``reserved`` headers, in lower case, are the sink's own."""
    return [*_credentials(settings), *_headers(settings.headers, reserved)]


def _credentials(settings: HttpSettings) -> list[str]:
    wrong = []
    basic = (settings.basic_auth_user, settings.basic_auth_password_file)
    if (basic[0] is None) != (basic[1] is None):
        wrong.append("--basic-auth-user and --basic-auth-password-file go together")
    if settings.bearer_token_file is not None and basic != (None, None):
        wrong.append("--bearer-token-file: not together with --basic-auth-user")
    if settings.tls_key is not None and settings.tls_cert is None:
        wrong.append("--tls-key: needs --tls-cert")
    for name in _FILES:
        path: Path | None = getattr(settings, name)
        if path is not None and not path.is_file():
            wrong.append(f"--{name.replace('_', '-')}: no file {path}")
    return wrong


def _headers(headers: tuple[tuple[str, str], ...], reserved: Collection[str]) -> list[str]:
    wrong = [f"--header: {name} is the sink's own" for name, _ in headers if name.lower() in reserved]
    bad = [name for name, value in headers if not name or any(sign in name + value for sign in "\r\n\0")]
    return [*wrong, *(f"--header: {name!r} is not a header" for name in bad)]
