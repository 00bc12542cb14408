"""The settings of the remote-write sink, named as its options."""

from dataclasses import dataclass
from typing import Literal

from sinks.labels import LABEL_SETS, MAX_LABELS, LabelSet
from sinks.settings import HttpSettings, http_mistakes, reading_mistakes, url_mistakes
from topics.metric import PROFILES, Profile

PROTOCOLS = ("auto", "1.0", "2.0")
RESERVED_HEADERS = frozenset(
    {"content-type", "content-encoding", "x-prometheus-remote-write-version", "content-length"}
)


@dataclass(frozen=True, kw_only=True)
class RemoteWriteSettings(HttpSettings):
    """Settings; see :func:`mistakes`. ``from_``: ``earliest``, ``latest`` or how many seconds back a new group starts.

    ``labels`` None is the label set of ``names``; tenants' labels never make more than ``max_labels`` on a series.
    ``max_request_samples`` and ``max_in_flight`` bound a request and how many are under way.
    """

    kafka: str
    url: str
    cluster: str = "default"
    protocol: Literal["auto", "1.0", "2.0"] = "auto"
    names: Profile = "otel"
    labels: LabelSet | None = None
    max_labels: int = MAX_LABELS
    stale_after_s: float = 60.0
    group: str = "gpustream-sink-remote-write"
    from_: Literal["earliest", "latest"] | float = 3600.0
    instance_id: str | None = None
    session_timeout_s: float = 10.0
    max_request_samples: int = 10_000
    max_in_flight: int = 8

    def mistakes(self) -> list[str]:
        """Every mistake in the settings, in words for whoever wrote them; empty when there is none."""
        return [
            *url_mistakes(self.url),
            *_choices(self),
            *reading_mistakes(self),
            *http_mistakes(self, RESERVED_HEADERS),
            *_numbers(self),
        ]


def _choices(settings: RemoteWriteSettings) -> list[str]:
    wrong = []
    if settings.protocol not in PROTOCOLS:
        wrong.append(f"--protocol: {settings.protocol!r} is not one of {', '.join(PROTOCOLS)}")
    if settings.names not in PROFILES:
        wrong.append(f"--names: {settings.names!r} is not one of {', '.join(PROFILES)}")
    if settings.labels is not None and settings.labels not in LABEL_SETS:
        wrong.append(f"--labels: {settings.labels!r} is not one of {', '.join(LABEL_SETS)}")
    return wrong


def _numbers(settings: RemoteWriteSettings) -> list[str]:
    wrong = []
    if settings.stale_after_s <= 0:
        wrong.append("--stale-after: must be above zero")
    if min(settings.max_request_samples, settings.max_in_flight, settings.request_timeout_s) <= 0:
        wrong.append("limits of requests must be above zero")
    return wrong
