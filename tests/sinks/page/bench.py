"""A page server of the tests."""

import contextlib
from collections.abc import AsyncIterator, Collection

import aiohttp

from delivery.instruments import Instruments
from sinks import http_server
from sinks.page.fleet import Fleet
from sinks.page.server import CAUGHT_UP, OPENED, PageServer
from sinks.page.sink import INSTRUMENTS
from tests.sinks.page.ticks import START_MS, device, holder, tick


class Bench:
    """A page server with a fleet of one node, whose frames are made by hand."""

    def __init__(self, prefix: str = "/", hosts: Collection[str] | None = ()) -> None:
        instruments = Instruments(INSTRUMENTS)
        self.opened, self.caught_up = instruments.gauge(OPENED), instruments.counter(CAUGHT_UP)
        self.fleet = Fleet(START_MS)
        self.pages = PageServer(self.fleet, instruments, prefix, hosts)
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Serves while inside; gives a client."""
        served = http_server.listening(
            self.pages.routes(),
            ("127.0.0.1", 0),
            option="--page-listen",
            middlewares=[self.pages.guard],
            closing=self.pages.end,
            cancel_on_leave=False,
        )
        async with served as (host, port), aiohttp.ClientSession() as client:
            self.url = f"http://{host}:{port}"
            yield client

    async def beat(self, seq: int) -> None:
        """A tick, and the frame of it."""
        self.fleet.add_tick(tick(seq, device("GPU-a", holder("p-0"), used=0.5)), float(seq))
        self.pages.make_frames(START_MS + seq * 1000)
