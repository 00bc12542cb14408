"""The HTTP server of every component: its own metrics, whether it lives, and whether it is ready.

In:       the registries and the readiness reasons of the components of this process.
Out:      ``/metrics`` (Prometheus text), ``/healthz`` (200 while the event loop turns), ``/readyz`` (503 and the
          reasons until there are none).
On failure: ``ListenError`` if the address can't be had.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from importlib.metadata import version

from aiohttp import web
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gpustream.values import Address
from topics.instruments import Instrument, Instruments

INSTRUMENTS = (
    Instrument("gpustream_build_info", "gauge", "Always 1; the version is a label.", ("version",)),
    Instrument("gpustream_ready", "gauge", "Whether the process is ready, as /readyz says: 1 or 0."),
    Instrument("gpustream_loop_lag_seconds", "gauge", "By how much the event loop was late at its last beat."),
)

_BEAT_S = 1.0


class ListenError(Exception):
    """The address to listen on can't be had."""

    exit_code = 1


class Health:
    """What a process says of itself. ``not_ready`` gives the reasons of all its components."""

    def __init__(self, registries: Iterable[CollectorRegistry], not_ready: Callable[[], list[str]]) -> None:
        self.not_ready = not_ready
        self.instruments = Instruments(INSTRUMENTS)
        self.instruments.gauge("gpustream_build_info", version("gpustream")).set(1)
        ProcessCollector(registry=self.instruments.registry)
        GCCollector(registry=self.instruments.registry)
        self.families = Families([*registries, self.instruments.registry])

    def metrics(self) -> bytes:
        """The metrics of every component in Prometheus text format."""
        self.instruments.gauge("gpustream_ready").set(not self.not_ready())
        return generate_latest(self.families)

    def application(self) -> web.Application:
        """The routes."""
        application = web.Application()
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        return application

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        reasons = self.not_ready()
        text = "".join(f"{reason}\n" for reason in reasons) or "ready\n"
        return web.Response(text=text, status=503 if reasons else 200)

    async def beat(self) -> None:
        """Measures, for ever, how late the event loop is."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self.instruments.gauge("gpustream_loop_lag_seconds").set(max(0.0, loop.time() - due))


class Families(Collector):
    """Several registries as one: a metric that two of them have is exposed once, with the samples of both."""

    def __init__(self, registries: Iterable[Collector]) -> None:
        self._registries = list(registries)

    def collect(self) -> Iterator[Metric]:
        """Every metric family once, without the ``_created`` series that the client library adds."""
        merged: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                known = merged.setdefault(family.name, family)
                known.samples = samples if known is family else [*known.samples, *samples]
        yield from merged.values()


@contextlib.asynccontextmanager
async def listening(application: web.Application, address: Address | None) -> AsyncIterator[Address | None]:
    """Serves the application while inside; gives the address it got, or None where it is off."""
    if address is None:
        yield None
        return
    runner = web.AppRunner(application, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address.host, address.port)
        try:
            await site.start()
        except OSError as error:
            raise ListenError(f"can't listen on {address}: {error.strerror or error}") from error
        yield Address(address.host, runner.addresses[0][1])
    finally:
        await runner.cleanup()
