"""The settings of the Alertmanager sink, named as its options."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal
from urllib.parse import urlsplit

from sinks.settings import HttpSettings, http_mistakes, reading_mistakes, url_mistakes

API = "/api/v2/alerts"
_RARELY_S = 24 * 3600
RESERVED_HEADERS = frozenset({"content-type", "content-length"})


@dataclass(frozen=True, kw_only=True)
class AlertmanagerSettings(HttpSettings):
    """Settings; see :meth:`mistakes`. ``from_``: ``earliest``, ``latest`` or how many seconds back a new group starts;
    what is open is told whenever it began.

    ``urls`` are the Alertmanagers' own, each gets all. ``resend_s`` is how often what is open is told again,
    ``generator_url`` where notifications link to. ``max_alerts`` bounds a request.
    """

    kafka: str
    urls: tuple[str, ...]
    resend_s: float = 60.0
    generator_url: str | None = None
    group: str = "gpustream-sink-alertmanager"
    from_: Literal["earliest", "latest"] | float = 3600.0
    instance_id: str | None = None
    session_timeout_s: float = 10.0
    max_alerts: int = 256

    def mistakes(self) -> list[str]:
        """Every mistake in the settings, in words for whoever wrote them; empty when there is none."""
        return [
            *_urls(self.urls),
            *([] if 1 <= self.resend_s <= _RARELY_S else ["--resend: must be at least 1 s and at most 24 h"]),
            *reading_mistakes(self),
            *http_mistakes(self, RESERVED_HEADERS),
        ]

    def group_of(self, url: str) -> str:
        """The consumer group of one Alertmanager: the given one where it is the only one, else its own."""
        if len(self.urls) == 1:
            return self.group
        return f"{self.group}-{blake2b(url.encode(), digest_size=4).hexdigest()}"


def alerts_url(url: str) -> str:
    """Where an Alertmanager takes alerts."""
    return url.rstrip("/") + API


def _urls(urls: Iterable[str]) -> list[str]:
    given = [url.rstrip("/") for url in urls]
    wrong = [mistake for url in given for mistake in url_mistakes(url)]
    wrong += [f"--url: {url!r}: without {API}" for url in given if url.endswith(API)]
    wrong += [f"--url: {url!r}: without a query" for url in given if urlsplit(url).query or urlsplit(url).fragment]
    wrong += [f"--url: {url!r} is given twice" for url in sorted({url for url in given if given.count(url) > 1})]
    return wrong or ([] if given else ["--url: missing"])
