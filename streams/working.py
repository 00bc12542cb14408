"""A stage at work until its stream is stopped: given each batch, and looking at the time beside that."""

import asyncio
from collections.abc import AsyncIterable
from typing import Protocol

from streams.reader.app import ReaderApp
from streams.reader.reader import Batch


class Stage(Protocol):
    """What works on the batches of a stream."""

    async def take(self, batch: Batch) -> None:
        """Work on a batch of one partition."""

    async def look(self) -> None:
        """See to what waits for time to pass. Never returns."""


async def work(app: ReaderApp, stage: Stage, stop: asyncio.Event, *, name: str, failed: str) -> None:
    """Run the app with one agent, ``name``, until ``stop`` is set. A look that fails ends the process: ``failed``."""

    @app.agent(app.batches, name=name)  # type: ignore[untyped-decorator]
    async def agent(batches: AsyncIterable[Batch]) -> None:
        async for batch in batches:
            await stage.take(batch)

    def looked(looking: "asyncio.Task[None]") -> None:
        if not looking.cancelled():
            app.fail(f"{failed}: {looking.exception()!r}")

    looking = asyncio.create_task(stage.look())
    looking.add_done_callback(looked)
    try:
        await app.run(stop)
    finally:
        looking.cancel()
