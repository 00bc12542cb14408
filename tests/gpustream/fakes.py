"""A component that does only what a test says."""

import asyncio
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from delivery.instruments import Instrument, Instruments

INSTRUMENTS = (Instrument("gpustream_fake_steps_total", "counter", "Steps of the fake.", ("kind",)),)


@dataclass(frozen=True)
class FakeSettings:
    """Named as options are, with units."""

    kafka: str
    cluster: str
    grace_s: float = 10.0
    instance_id: str | None = None

    def errors(self) -> list[str]:
        """What is wrong with the settings together."""
        return ["--grace must be below 100 s"] if self.grace_s >= 100 else []


class FakeComponent:
    """Runs until it is stopped; fails at once with ``error`` if that is given."""

    name = "fake"

    def __init__(self, settings: FakeSettings, error: Exception | None = None) -> None:
        self.settings = settings
        self.error = error
        self.reasons = ["no assignment yet"]
        self.started = asyncio.Event()
        self.registry: CollectorRegistry = Instruments(INSTRUMENTS).registry

    async def run(self, stop: asyncio.Event) -> None:
        """Waits for ``stop``."""
        self.started.set()
        if self.error:
            raise self.error
        await stop.wait()

    def not_ready(self) -> list[str]:
        """The reasons set by the test."""
        return self.reasons
