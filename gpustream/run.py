"""``gpustream run``: this machine's GPUs or a simulated fleet, the streams and the sinks in one process.

It brings a broker of its own if none is given.

In:       the options of ``run``.
Out:      the terminal application on a terminal (lines elsewhere), and the summary on standard output.
On failure: 1 if a tick was lost or dropped, or a component failed.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import logging
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import msgspec
from prometheus_client import CollectorRegistry

from delivery import topic_admin
from delivery.clock import now_ms
from delivery.settings import (
    DURATION,
    FLEET_SIZE,
    HOST_PORTS,
    URL,
    Cluster,
    Compression,
    ConnectionSettings,
    Option,
    TopicAccess,
)
from delivery.tasks import until_stopped
from gpustream import alerts, command, logs, serve
from gpustream.command import OF_CONNECTION, Command, ProcessSettings
from gpustream.embedded import PARTITIONS, EmbeddedBroker, EmbeddedBrokerError
from gpustream.fleet import Fleet
from gpustream.output import failed, is_screen
from gpustream.pipeline import Failed, Pipeline, Tail
from gpustream.sightings import Sightings
from gpustream.tally import Run, Sampled, Tally
from gpustream.ticks import Tick
from gpustream.top.moment import LINE_EVERY_S, Now, firing
from producers import PRODUCERS
from producers.node.config import Node, ReadingSettings, node_name
from producers.settings import Interval
from producers.simulated.config import SimulationSettings
from sinks import SINKS
from sinks.page.config import PAGE_ADDRESS, PageListen
from sinks.scrape.config import SCRAPE_ADDRESS, ScrapeListen
from sinks.series_settings import NamingSettings
from streams import STREAMS
from topics import TOPICS

if TYPE_CHECKING:
    from gpustream.top.app import TopApp

UNWATCHED_S = 30.0
"""How long a run lasts without a terminal and without ``--duration``."""

STORY_RULES = Path(__file__).with_name("story.toml")
"""The rules of ``--story``: the defaults, with shorter times."""

_QUESTION = "Stop the pipeline? What was sampled arrives first, and a summary follows."
_LOG_LINES = 10
_RATE_COUNTS = 10
_MAX_TICKS_BEHIND = 2
"""A sink is shown as behind if it lacks more than this many ticks for each node."""

_DROPPED = "gpustream_producer_ticks_dropped_total"
_DELIVERED = {
    "scrape": "gpustream_scrape_values_delivered_total",
    "remote_write": "gpustream_remote_write_values_delivered_total",
}
"""The counter of each sink that a run may have, by the sink's name in the summary."""


@dataclass(frozen=True, kw_only=True)
class RunSettings(ReadingSettings, SimulationSettings, NamingSettings, ConnectionSettings, ProcessSettings):
    """``kafka`` None: the embedded broker. ``simulate`` None: this machine's GPUs. ``watched``: by a terminal."""

    simulate: Annotated[
        str | None,
        Option("--simulate", FLEET_SIZE, "Simulate so many nodes of so many GPUs.", shown="this machine's GPUs"),
    ] = None
    kafka: Annotated[
        str | None, Option("--kafka", HOST_PORTS, "Kafka's bootstrap brokers.", shown="a broker inside this process")
    ] = None
    cluster: Cluster = "default"
    compression: Compression = "zstd"
    scrape_listen: ScrapeListen = SCRAPE_ADDRESS
    page_listen: PageListen = PAGE_ADDRESS
    remote_write: Annotated[
        str | None, Option("--remote-write", URL, "Write every value to this remote-write receiver too.")
    ] = None
    duration_s: Annotated[
        float | None,
        Option("--duration", DURATION, "How long to sample.", shown="on a terminal until Ctrl-C, else 30s"),
    ] = None
    summary: Annotated[
        Literal["text", "json"], Option("--summary", None, "How the end is reported on standard output.")
    ] = "text"
    plain: Annotated[
        bool, Option("--plain", None, "Print a line every 5 s in place of the screen, as if this were no terminal.")
    ] = False
    interval_s: Interval = 1.0
    node: Node = field(default_factory=node_name)
    watched: bool = False


def _option_errors(values: dict[str, Any]) -> list[str]:
    simulate = values["simulate"]
    if simulate is None and not driver_is_here():
        return [
            "Missing option '--simulate': this machine has no NVIDIA driver (no libnvidia-ml.so.1) whose GPUs could be"
            " read. To see a fleet that is not there: --simulate 4x8"
        ]
    producer, useless = PRODUCERS["simulated" if simulate else "node"], []
    if values["kafka"] is None and values["kafka_config"] is None:
        useless = [name for name in OF_CONNECTION if name.startswith("kafka_") and values[name] is not None]
        values = {**values, "kafka": HOST_PORTS.example}
    messages = [f"--{name.replace('_', '-')}: it is of no use without --kafka or --kafka-config" for name in useless]
    naming = command.record_of(NamingSettings, values)
    return messages + naming.naming_errors() + command.errors(producer, {**values, "fleet": simulate})


def driver_is_here() -> bool:
    """Whether NVML's library can be loaded. Its kernel driver may still be missing."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


@click.command(
    cls=Command,
    check=_option_errors,
    example=(
        "gpustream run                      # the GPUs of this machine\n"
        "gpustream run --simulate 4x8 --story   # a fleet in which everything happens once within a minute\n"
        "gpustream run --simulate 4x8 --remote-write http://127.0.0.1:9090/api/v1/write --duration 1m --summary json"
    ),
)
@command.options(RunSettings)
def run(**values: Any) -> None:
    """Everything in one process: GPUs, stream, sinks, and a broker if none is given.

    On a terminal it shows the fleet as `gpustream top` does: ? lists the keys, and q stops it. It samples until its
    time is over or Ctrl-C, lets everything arrive, and says what became of every tick. Exit code 1 if any was lost or
    dropped.
    """
    watched = sys.stdout.isatty()
    logs.setup(values["log_format"], logging.WARNING if watched and not values["plain"] else logging.INFO)
    settings = RunSettings(**values, watched=watched)
    with contextlib.ExitStack() as stack:
        embedded = None
        if settings.kafka is None and settings.kafka_config is None:
            embedded = stack.enter_context(EmbeddedBroker())
            try:
                embedded.start({settings.topic_prefix + name: PARTITIONS for name in TOPICS})
            except EmbeddedBrokerError as error:
                raise failed(error) from error
        process = OneProcess(settings, embedded)
        code = serve.run(process.run, process.leave)
    raise SystemExit(code)


class BrokerEnded(Failed):
    """The embedded broker's process has ended, and its records are lost."""

    exit_code = serve.FAILED


class OneProcess:
    """The components of a run, and its state. ``embedded`` is the broker of this process, if it has one."""

    def __init__(self, settings: RunSettings, embedded: EmbeddedBroker | None) -> None:
        self._settings = settings
        self._embedded = embedded
        settings = dataclasses.replace(settings, kafka=embedded.address) if embedded else settings
        socket = settings.pod_resources_socket
        options = {
            **vars(settings),
            "rules": STORY_RULES if settings.story else None,
            "fleet": settings.simulate,
            "url": settings.remote_write,
            # a machine that has no kubelet when the run begins is not reported to lack one
            "pod_resources_socket": socket if socket is not None and socket.exists() else None,
        }
        enabled = ["scrape", "remote_write"] if settings.remote_write else ["scrape"]
        self._tally = Tally(enabled)
        producer = PRODUCERS["simulated" if settings.simulate else "node"]
        self._connection = command.settings(producer, options).connection()
        self._producer = command.component(producer, options)
        self._streams = [command.component(spec, options) for spec in STREAMS.values()]
        self._sinks = {
            name: command.component(SINKS[name.replace("_", "-")], options, on_outcome=self._tally.sinks[name].outcome)
            for name in enabled
        }
        self._page = command.component(SINKS["page"], options) if settings.page_listen else None
        self._alerts = alerts.LatestAlerts()
        self._fleet = Fleet(self._command_of)
        self._sightings = Sightings()
        self._started_s, self._line_due_s = time.monotonic(), LINE_EVERY_S
        self._not_ready: list[str] = []
        self._value_counts: deque[tuple[float, int]] = deque([(self._started_s, 0)], maxlen=_RATE_COUNTS)
        self._stopping = False
        self._screen: TopApp | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Runs until ``stop`` or its end, prints the summary, and gives the exit code."""
        duration_s = self._settings.duration_s
        if duration_s is None and not self._settings.watched:
            duration_s = UNWATCHED_S
        if not await until_stopped(stop, topic_admin.check(self._connection, TopicAccess(reads=tuple(TOPICS)))):
            return 0
        tail = Tail(self._connection, self._on_tick, self._on_alert, self._tally.dead_lettered)
        sinks = [*self._sinks.values(), *([self._page] if self._page else [])]
        pipeline = Pipeline(self._producer, self._streams, sinks, tail, self._check, self._behind)
        async with serve.observed(pipeline.components, self._settings.listen):
            running = asyncio.create_task(pipeline.run(stop, duration_s))
            if not self._settings.plain and is_screen():
                from gpustream.top.app import TopApp

                def stop_now() -> None:
                    self._stopping = True
                    os.kill(os.getpid(), signal.SIGINT)

                self._screen = TopApp(self._now, quit_now=stop_now, question=_QUESTION)
                showing = asyncio.create_task(self._screen.run_async())
                await asyncio.wait((running, showing), return_when=asyncio.FIRST_COMPLETED)
                if showing.done():  # it ends before the pipeline only if it fails
                    stop.set()
                else:
                    self._screen.exit()
                await asyncio.wait((running, showing))
                for line in list(self._screen.logged)[-_LOG_LINES:]:
                    click.echo(line, err=True)
            await running
        summary = self._tally.summary(
            self._sampled(),
            values=int(self._producer.sampled_values),
            delivered=self._delivered(),
            dropped=_counter_total(self._producer.registry, _DROPPED),
        )
        if self._settings.summary == "json":
            click.echo(msgspec.json.encode(summary).decode())
        else:
            click.echo(summary.text(self._sightings.lines()))
        return 0 if summary.ok else serve.FAILED

    def leave(self, code: int) -> None:
        """Ends the process at once, and leaves the terminal as it was."""
        driver = self._screen._driver if self._screen else None  # noqa: SLF001 - Textual has no public way
        if driver is not None:
            with contextlib.suppress(Exception):
                driver.stop_application_mode()
        os._exit(code)

    def _sampled(self) -> Sampled:
        """Each node's runs so far, with the number of the last tick of each."""
        cluster = self._settings.cluster
        return {Run(cluster, node, run_id): seq for node, run_id, seq in self._producer.sampled()}

    def _behind(self) -> int:
        """How many sampled ticks have not come out of attribution, or are not in some sink."""
        sampled = self._sampled()
        return self._tally.undelivered(sampled) + self._tally.unattributed(sampled)

    def _delivered(self) -> dict[str, int]:
        """How many metric values each sink has delivered, by its own counter."""
        return {name: _counter_total(sink.registry, _DELIVERED[name]) for name, sink in self._sinks.items()}

    def _command_of(self, node: str, pid: int) -> str:
        """The command of a process of this machine, as procfs has it."""
        if self._settings.simulate or node != self._settings.node:
            return ""
        try:
            return (self._settings.procfs / str(pid) / "comm").read_text(errors="replace").strip()
        except OSError:
            return ""

    def _on_tick(self, tick: Tick) -> None:
        if self._tally.attributed(Run(tick.cluster, tick.node, tick.run_id), tick.seq, tick.attribution):
            self._fleet.observe(tick, time.monotonic(), now_ms())
            self._sightings.tick(tick)

    def _on_alert(self, record: Any) -> None:
        alert = self._alerts.update(record)
        if alert is not None:
            self._sightings.alert(alert)

    def _check(self, not_ready: list[str]) -> None:
        """Called ten times a second: prints a line every five seconds, and ends the run if its broker has ended."""
        if self._embedded is not None and not self._embedded.running:
            raise BrokerEnded("the embedded broker ended, and all that it held is gone")
        self._not_ready = not_ready
        elapsed_s = time.monotonic() - self._started_s
        if self._screen is not None or elapsed_s < self._line_due_s:
            return
        while self._line_due_s <= elapsed_s:
            self._line_due_s += LINE_EVERY_S
        click.echo(f"{elapsed_s:5.0f} s  {self._now().line()}", err=self._settings.summary == "json")

    def _now(self) -> Now:
        at_s, values, sampled = time.monotonic(), int(self._producer.sampled_values), self._sampled()
        self._fleet.age(at_s)
        self._value_counts.append((at_s, values))
        flow, (earlier_s, earlier_values) = self._fleet.flow(), self._value_counts[0]
        facts = [
            f"{flow.ticks_per_s:,.0f} ticks/s, {(values - earlier_values) / max(0.1, at_s - earlier_s):,.0f} values/s"
        ]
        facts += [] if flow.latency_s is None else [f"lag {flow.latency_s:.1f} s"]
        for name, count in self._delivered().items():
            behind = self._tally.behind(name, sampled)
            late = f" ({behind:,} ticks behind)" if behind > _MAX_TICKS_BEHIND * len(self._fleet.nodes) else ""
            facts.append(f"{name} {count:,} values{late}")
        facts += [f"page {self._page.url}"] if self._page else []
        trouble = (
            f"{'not ready' if flow.ticks else 'starting'}: {'; '.join(self._not_ready)}" if self._not_ready else ""
        )
        trouble = "stopping: what was sampled goes on to arrive" if self._stopping else trouble
        simulated, at = self._settings.simulate, datetime.now(UTC)
        source = f"{simulated} GPUs simulated" if simulated else f"the GPUs of {self._settings.node}"
        page = self._settings.page_listen
        title = " · ".join(filter(None, ("gpustream", source, f"http://{page}" if page else "")))
        return Now(self._fleet, firing(self._alerts, at), at, title, facts, trouble)


def _counter_total(registry: CollectorRegistry, counter: str) -> int:
    return int(
        sum(sample.value for family in registry.collect() for sample in family.samples if sample.name == counter)
    )
