"""A way to a server that can be cut as networks cut it: connections break, or stay and carry nothing."""

import asyncio
import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Self


class Line:
    """Forwards connections to a port of 127.0.0.1, as they are; enter it on the event loop that uses it."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """How many connections of clients there are."""
        return len(self._tasks)

    def silence(self) -> None:
        """Let nothing through, in either direction; connections stay, and new ones are accepted."""
        self._open.clear()

    def mend(self) -> None:
        """Let everything through again, also what was held back."""
        self._open.set()

    def breaks(self) -> None:
        """Break every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        self.breaks()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._forward(reader, writer))
        self._tasks.add(task)
        await asyncio.wait([task])
        self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._hold(writer), contextlib.suppress(OSError):
            await self._open.wait()
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self.target)
            with self._hold(target_writer):
                pumps = [
                    asyncio.ensure_future(self._pump(*stream_pair))
                    for stream_pair in ((reader, target_writer), (target_reader, writer))
                ]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            await self._open.wait()
            writer.write(chunk)
            await writer.drain()

    @contextlib.contextmanager
    def _hold(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
