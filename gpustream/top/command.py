"""``gpustream top``: the fleet of any pipeline on the terminal, live.

In:       gpu.attributed from six minutes ago, of a large fleet from later, and gpu.alerts whole; in no consumer group.
Out:      the terminal application; lines, if standard output is no terminal.
On failure: a broker that does not answer or lacks a topic is a sentence and exit code 1, and so is later a topic that
has got other partitions; an outage is waited out then, and the screen says that nothing comes. A record that can't be
decoded is logged and passed over.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from delivery.connection import Connection
from delivery.ledger import Partition
from delivery.settings import DURATION
from gpustream import history, logs
from gpustream.alerts import LatestAlerts
from gpustream.command import KAFKA, Command, option
from gpustream.fleet import Fleet
from gpustream.history import Span
from gpustream.output import answer, is_screen
from gpustream.ticks import decode_tick
from gpustream.top.moment import LINE_EVERY_S, Now, firing
from topics import alerts, attributed
from topics.samples import silent_after_s

log = logging.getLogger(__name__)

_READ_EVERY_S = 0.2
_QUIET_S = 10.0
_HISTORY_S = 360.0
_HISTORY_TICKS = 20_000


@click.command(
    cls=Command,
    example=(
        "gpustream top --kafka 127.0.0.1:9092\n"
        "gpustream top --kafka kafka-0:9092 --since 5m\n"
        "gpustream top --kafka kafka-0:9092 --plain >> fleet.log"
    ),
)
@KAFKA
@option(
    "--since",
    "since_s",
    type=DURATION,
    show_default=f"6m, of a large fleet the last {_HISTORY_TICKS:,} ticks",
    help="How much of the past is read at the start.",
)
@option("--team-label", default="team", help="The label that names a pod's team: the pod's own, else its namespace's.")
@option("--plain", is_flag=True, help="Print a line every 5 s in place of the screen, as if this were no terminal.")
def top(connection: Connection, since_s: float | None, team_label: str, plain: bool) -> None:
    """Look at the fleet live: nodes, GPUs, pods, workloads, alerts, and each GPU's last minutes.

    It only reads, and in no consumer group: it disturbs nothing, and needs no right to write. ? lists the keys.
    """
    logs.setup(level=logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):
        answer(_show(connection, since_s, team_label, plain=plain or not is_screen()))


async def _show(connection: Connection, since_s: float | None, team_label: str, *, plain: bool) -> None:
    async with followed(connection, since_s, team_label) as (now, reading):
        if plain:
            showing = asyncio.create_task(_lines(now))
        else:
            from gpustream.top.app import TopApp

            showing = asyncio.create_task(TopApp(now).run_async())
            # as `timeout 60 gpustream top` ends it: else the terminal would stay as the screen has it
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, showing.cancel)
        await asyncio.wait((reading, showing), return_when=asyncio.FIRST_COMPLETED)
        showing.cancel()
        (result,) = await asyncio.gather(showing, return_exceptions=True)
    if isinstance(result, Exception):
        raise result


@contextlib.asynccontextmanager
async def followed(
    connection: Connection, since_s: float | None, team_label: str
) -> AsyncIterator[tuple[Callable[[], Now], "asyncio.Task[None]"]]:
    """Reads the fleet while inside. Gives a function that returns the current moment, and the reading task.

    The task ends only by an error.
    """
    fleet, latest_alerts, began_s = Fleet(team_label=team_label), LatestAlerts(), time.monotonic()
    async with history.opened(connection, [attributed.TOPIC.name, alerts.TOPIC.name]) as reader:
        since_ms = int((time.time() - (_HISTORY_S if since_s is None else since_s)) * 1000)
        ticks = await reader.spans(attributed.TOPIC.name, since_ms)
        spans = (latest_spans(ticks, _HISTORY_TICKS) if since_s is None else ticks) | await reader.spans(
            alerts.TOPIC.name
        )
        reading = asyncio.create_task(follow(reader, spans, fleet, latest_alerts))
        try:
            yield lambda: moment(fleet, latest_alerts, f"gpustream top {connection}", began_s), reading
        finally:
            reading.cancel()
            (result,) = await asyncio.gather(reading, return_exceptions=True)
    if isinstance(result, Exception):
        raise result


def latest_spans(spans: Mapping[Partition, Span], limit: int) -> dict[Partition, Span]:
    """About the last ``limit`` offsets of these spans, the same share of each: so all reach back to about one time."""
    share = min(1.0, limit / max(1, sum(end - start for start, end in spans.values())))
    return {tp: Span(end - int((end - start) * share), end) for tp, (start, end) in spans.items()}


async def _lines(now: Callable[[], Now]) -> None:
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        current = now()
        click.echo(f"{current.at:%H:%M:%SZ}  {current.line()}")


def moment(fleet: Fleet, latest_alerts: LatestAlerts, title: str, began_s: float) -> Now:
    """The fleet now, by this machine's clock. Its ``trouble`` is that no tick has come for some time."""
    at_s, at = time.monotonic(), datetime.now(UTC)
    fleet.age(at_s)
    nodes = fleet.nodes.values()
    quiet_s = at_s - max((node.at_s for node in nodes), default=began_s)
    is_quiet = quiet_s > _QUIET_S and all(
        at_s - node.at_s > silent_after_s(node.interval_ms, _QUIET_S) for node in nodes
    )
    quiet = f"no tick for {quiet_s:.0f} s: Kafka is away, or nothing is sent" if is_quiet else ""
    flow = fleet.flow()
    facts = [f"{flow.ticks_per_s:,.0f} ticks/s"]
    facts += [] if flow.latency_s is None else [f"lag {flow.latency_s:.1f} s"]
    return Now(fleet, firing(latest_alerts, at), at, title, facts, quiet)


async def follow(
    reader: history.History, spans: Mapping[Partition, Span], fleet: Fleet, latest_alerts: LatestAlerts
) -> None:
    """Adds the records of the spans, and then new ones, in batches: a poll for each record would be slow."""
    read_s = time.monotonic()

    def observe(records: Sequence[Any], after_s: float = float("-inf")) -> None:
        ahead_s = time.time() - time.monotonic()
        for record in records:
            if reader.connection.unprefixed(record.topic) == alerts.TOPIC.name:
                latest_alerts.update(record)
                continue
            for _, tick in history.decoded([record], decode_tick, log):
                logged_s = min(record.timestamp / 1000, time.time())
                fleet.observe(tick, max(logged_s - ahead_s, after_s), record.timestamp)

    async for records in reader.records(spans):
        observe(records)
        await asyncio.sleep(0)  # the screen is drawn meanwhile
    async for records in reader.after(spans, every_s=_READ_EVERY_S):
        observe(records, after_s=read_s)  # they came since then, also if the clock of this host is ahead
        read_s = time.monotonic()
