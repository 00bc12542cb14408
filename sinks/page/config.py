"""The settings of the page."""

import re
from dataclasses import dataclass
from typing import Annotated

from delivery.settings import LISTEN, KafkaSettings, Option, Text
from delivery.values import Address
from sinks.settings import LOOPBACK

PageListen = Annotated[
    Address | None,
    Option(
        "--page-listen",
        LISTEN,
        "Where the page is served, to whoever can connect: it knows no log-in and no TLS. Beyond loopback put a reverse"
        " proxy in front that brings both. --listen stays this process's own.",
    ),
]
PAGE_ADDRESS = Address("127.0.0.1", 9402)
_PREFIX = re.compile(r"/([A-Za-z0-9._~-]+/)*")


def host_name(text: str) -> str:
    """The name in a Host header, or in the option: in lower case, without a port, brackets, and a dot at its end."""
    return re.sub(r":\d*$", "", text.strip()).strip("[]").removesuffix(".").lower()


HOST_NAMES = Text(
    "NAME[,...]", lambda text: tuple(filter(None, map(host_name, text.split(",")))), "gpus.example.com", show=",".join
)


@dataclass(frozen=True, kw_only=True)
class PageSettings(KafkaSettings):
    """Where the page is served, and what it calls a team."""

    page_listen: PageListen = PAGE_ADDRESS
    page_prefix: Annotated[
        str,
        Option(
            "--page-prefix",
            None,
            "The path below which the page is served, such as /gpus/, for a reverse proxy that hands paths on as they"
            " are. One that takes its prefix away needs none: all addresses in the page are relative.",
        ),
    ] = "/"
    page_host: Annotated[
        tuple[str, ...],
        Option(
            "--page-host",
            HOST_NAMES,
            "The names by which browsers may ask for the page, for a reverse proxy that hands on the name that it was"
            " asked for. Addresses and localhost always may. Any other is refused, so that no web site can read the"
            " page through a name of its own.",
            shown="localhost only on loopback, else every name",
        ),
    ] = ()
    team_label: Annotated[
        str, Option("--team-label", None, "The label that names a pod's team: the pod's own, else its namespace's.")
    ] = "team"

    def errors(self) -> list[str]:
        errors = super().errors()
        if self.page_listen is None:
            errors.append("--page-listen: off is not possible: it is all that this sink does")
        if not _PREFIX.fullmatch(self.page_prefix):
            errors.append(f"--page-prefix: {self.page_prefix!r} does not begin and end with a slash, such as /gpus/")
        return errors

    @property
    def is_public(self) -> bool:
        """Whether other machines may reach it."""
        return self.page_listen is not None and self.page_listen.host not in LOOPBACK
