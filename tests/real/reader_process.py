"""A process that reads every value and writes it to another topic; tests stop, kill and start it again.

It is given an :class:`Echo` as JSON, and says ``ready`` when it reads.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec

from delivery.ledger import Partition
from delivery.settings import MemberSettings
from streams.app import ReaderApp
from streams.reader import Batch, Reads
from tests.real.process import Server

ROOT = Path(__file__).parents[2]


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    """From ``NAME-in``, with ``NAME-state`` beside it, to ``NAME-out``, as the group ``NAME``."""

    kafka: str
    name: str
    instance_id: str | None = None
    session_timeout_s: float = 10.0
    leave_on_stop: bool = False


class Stateless:
    """A stage that keeps nothing."""

    def forget(self) -> None:
        """Nothing is kept."""

    def drop(self, partitions: frozenset[int]) -> None:
        """Nothing is kept."""

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Nothing is kept."""

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        """Nothing is kept."""


def echo_app(echo: Echo) -> ReaderApp:
    """The app, with its agent."""
    member = MemberSettings(
        group=echo.name,
        kafka=echo.kafka,
        instance_id=echo.instance_id,
        session_timeout_s=echo.session_timeout_s,
        leave_on_stop=echo.leave_on_stop,
    )
    app = ReaderApp(member, Reads(inputs=(f"{echo.name}-in",), states=(f"{echo.name}-state",)), Stateless())

    @app.agent(app.batches, name="echo")  # type: ignore[untyped-decorator]
    async def agent(batches: AsyncIterator[Batch]) -> None:
        async for batch in batches:
            await _write_on(app, f"{echo.name}-out", batch)

    return app


async def _write_on(app: ReaderApp, output: str, batch: Batch) -> None:
    for slot, record in batch:
        if not app.is_current(slot):
            return
        if slot.tp.topic in app.reader.reads.inputs:
            app.finish_when(slot, await app.sender.send(output, record.value, partition=slot.tp.partition))
        else:
            app.finish(slot)


async def _main(echo: Echo) -> None:
    app, stop = echo_app(echo), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    running = asyncio.create_task(app.run(stop))
    while app.not_ready() and not running.done():  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.05)
    print("ready", flush=True)  # noqa: T201 - for the one who started it
    await running


def main() -> None:
    """Run until stopped."""
    asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=Echo)))


class EchoProcess(Server):
    """The process, to be stopped and killed; ``ready``: whether it has reported so since its last start."""

    def __init__(self, directory: Path, echo: Echo) -> None:
        super().__init__(directory, ports=0)
        self._echo = echo
        self._said = 0

    def command(self) -> list[str]:
        """This module, in a process of its own."""
        self._said = self._times_ready()
        run = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.real.reader_process import main; main()"
        return [sys.executable, "-c", run, msgspec.json.encode(self._echo).decode()]

    def ready(self) -> bool:
        """Whether it reads."""
        return self._times_ready() > self._said

    @property
    def exit_code(self) -> int | None:
        """What it ended with; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def _times_ready(self) -> int:
        return self.log.read_bytes().count(b"ready\n") if self.log.exists() else 0

    def listening_ports(self) -> set[int]:
        """The TCP ports at which it accepts connections."""
        inodes = {str(fd.readlink()) for fd in Path(f"/proc/{self.pid}/fd").iterdir() if fd.is_symlink()}
        return {
            int(row[1].rsplit(":", 1)[1], 16)
            for table in ("tcp", "tcp6")
            for row in map(str.split, Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:])
            if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
        }
