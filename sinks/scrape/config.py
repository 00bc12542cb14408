"""The settings of the scrape sink."""

from dataclasses import dataclass
from typing import Annotated

from delivery.settings import LISTEN, Option
from delivery.values import Address
from sinks.series_settings import SeriesSettings
from sinks.settings import From, Group

ScrapeListen = Annotated[
    Address | None,
    Option("--scrape-listen", LISTEN, "Where the GPUs' /metrics is served; --listen stays this process's own."),
]
SCRAPE_ADDRESS = Address("127.0.0.1", 9400)


@dataclass(frozen=True, kw_only=True)
class ScrapeSettings(SeriesSettings):
    """Where the series are served (port 0: any free one; None: nowhere), and what they are called."""

    scrape_listen: ScrapeListen = SCRAPE_ADDRESS
    group: Group = "gpustream-sink-scrape"
    from_: From = "latest"
