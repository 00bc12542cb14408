"""The settings of the remote-write sink."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from delivery.settings import URL, Option
from sinks.series_settings import SeriesSettings
from sinks.settings import From, Group, ReceiverSettings, url_errors


@dataclass(frozen=True, kw_only=True)
class RemoteWriteSettings(SeriesSettings, ReceiverSettings):
    """Where to write, how, and what. ``max_request_samples`` and ``max_in_flight`` bound a request and how many
    there are at a time."""

    RESERVED_HEADERS: ClassVar[frozenset[str]] = frozenset(
        {"content-type", "content-encoding", "x-prometheus-remote-write-version", "content-length"}
    )

    url: Annotated[str, Option("--url", URL, "Where to write to, as given.")]
    protocol: Annotated[Literal["auto", "1.0", "2.0"], Option("--protocol", None, "Which remote write to speak.")] = (
        "auto"
    )
    group: Group = "gpustream-sink-remote-write"
    from_: From = 3600.0
    max_request_samples: int = 10_000
    max_in_flight: int = 8

    def errors(self) -> list[str]:
        return [*url_errors(self.url), *super().errors()]
