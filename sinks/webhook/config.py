"""The settings of the webhook sink, named as its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sinks.settings import HttpSettings, http_mistakes, reading_mistakes, url_mistakes

RESERVED_HEADERS = frozenset({"content-type", "content-length", "idempotency-key", "x-gpustream-signature"})


@dataclass(frozen=True, kw_only=True)
class WebhookSettings(HttpSettings):
    """Settings; see :meth:`mistakes`. ``from_``: ``earliest``, ``latest`` or how many seconds back a new group starts.

    ``secret_file`` holds the key of the signature; ``unsigned`` says that there is none. ``max_in_flight``
    bounds how many requests are under way.
    """

    kafka: str
    url: str
    secret_file: Path | None = None
    unsigned: bool = False
    group: str = "gpustream-sink-webhook"
    from_: Literal["earliest", "latest"] | float = 3600.0
    instance_id: str | None = None
    session_timeout_s: float = 10.0
    max_in_flight: int = 8

    def mistakes(self) -> list[str]:
        """Every mistake in the settings, in words for whoever wrote them; empty when there is none."""
        return [
            *url_mistakes(self.url),
            *_secret(self.secret_file, unsigned=self.unsigned),
            *reading_mistakes(self),
            *http_mistakes(self, RESERVED_HEADERS),
        ]


def _secret(file: Path | None, *, unsigned: bool) -> list[str]:
    if file is None:
        return [] if unsigned else ["--secret-file: missing; or say --unsigned"]
    if unsigned:
        return ["--unsigned: not together with --secret-file"]
    if not file.is_file():
        return [f"--secret-file: no file {file}"]
    return [] if file.read_bytes().strip() else [f"--secret-file: {file} is empty"]
