"""The settings of the Alertmanager sink."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated
from urllib.parse import urlsplit

from delivery.settings import DURATION, URL, Option
from sinks.settings import From, Group, HttpSettings, url_mistakes

API = "/api/v2/alerts"
_RARELY_S = 24 * 3600


@dataclass(frozen=True, kw_only=True)
class AlertmanagerSettings(HttpSettings):
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

    def mistakes(self) -> list[str]:
        """See :meth:`KafkaSettings.mistakes`."""
        found = [*_url_mistakes(self.urls), *super().mistakes()]
        if not 1 <= self.resend_s <= _RARELY_S:
            found.append("--resend: must be at least 1 s and at most 24 h")
        return found

    def group_of(self, url: str) -> str:
        """The consumer group of one Alertmanager: the given one if there is only one, else its own."""
        if len(self.urls) == 1:
            return self.group
        return f"{self.group}-{blake2b(url.encode(), digest_size=4).hexdigest()}"


def alerts_url(url: str) -> str:
    """Where an Alertmanager takes alerts."""
    return url.rstrip("/") + API


def _url_mistakes(urls: Iterable[str]) -> list[str]:
    given = [url.rstrip("/") for url in urls]
    wrong = [mistake for url in given for mistake in url_mistakes(url)]
    wrong += [f"--url: {url!r}: without {API}" for url in given if url.endswith(API)]
    wrong += [f"--url: {url!r}: without a query" for url in given if urlsplit(url).query or urlsplit(url).fragment]
    wrong += [f"--url: {url!r} is given twice" for url in sorted({url for url in given if given.count(url) > 1})]
    return wrong or ([] if given else ["--url: missing"])
