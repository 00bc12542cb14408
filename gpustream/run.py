"""``gpustream run``: this machine's GPUs or a simulated fleet, the streams and the sinks in one process.

It brings a broker of its own where none is given.

In:       the options of ``run``.
Out:      a live view on a terminal (lines elsewhere), and the summary on standard output.
On failure: 1 where a tick was lost or dropped, or a component failed.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import click
import msgspec
from prometheus_client import CollectorRegistry

from delivery import topic_admin
from gpustream import components, serve
from gpustream.alerts_command import Seen, row
from gpustream.config import RunSettings
from gpustream.display import Display, displayed
from gpustream.embedded import EmbeddedBroker, every_topic
from gpustream.fleet import Fleet
from gpustream.live import Frame, summary_text
from gpustream.pipeline import Failed, Pipeline
from gpustream.tail import Tail
from gpustream.tally import Run, Sampled, Summary, Tally
from producers import PRODUCERS
from sinks import SINKS
from streams import STREAMS
from topics import registry
from topics.attributed import AttributedSample

UNWATCHED_S = 30.0
"""How long a run lasts that nobody watches and nobody gave a duration."""

_DROPPED = "gpustream_producer_ticks_dropped_total"


def run(chosen: RunSettings) -> int:
    """Runs until its end, prints the summary, and gives the exit code."""
    with _broker(chosen.kafka) as kafka:
        return serve.run(lambda stop: OneProcess(chosen, kafka).run(stop))


class BrokerEnded(Failed):
    """The embedded broker's process is gone, and all that it held."""

    exit_code = serve.FAILED


class Broker(NamedTuple):
    """Where Kafka is, and the embedded broker if it is that one."""

    address: str
    embedded: EmbeddedBroker | None = None


@contextlib.contextmanager
def _broker(kafka: str | None) -> Iterator[Broker]:
    if kafka is not None:
        yield Broker(kafka)
        return
    with EmbeddedBroker() as embedded:
        embedded.start(every_topic())
        yield Broker(embedded.address, embedded)


class Sampling:
    """A producer of samples, telling what it sampled in the terms of the tally."""

    def __init__(self, producer: Any, cluster: str) -> None:
        self._producer = producer
        self._cluster = cluster
        self.name: str = producer.name
        self.registry = producer.registry
        self.run = producer.run
        self.not_ready = producer.not_ready

    def sampled(self) -> list[Sampled]:
        """Every run of every node so far, and the last tick of each."""
        return [Sampled(Run(self._cluster, node, run_id), seq) for node, run_id, seq in self._producer.sampled()]

    @property
    def values(self) -> int:
        """Metric values in the sampled ticks."""
        return int(self._producer.sampled_values)

    @property
    def dropped(self) -> int:
        """Ticks that never reached Kafka."""
        return _counted(self.registry, _DROPPED)


class OneProcess:
    """The components of a run, and what is known of it."""

    def __init__(self, chosen: RunSettings, kafka: Broker) -> None:
        self._chosen = chosen
        self._kafka = kafka
        self._fleet = Fleet(self._command_of)
        options = _options(chosen, kafka.address)
        self._tally = Tally(_key(name) for name in _enabled(chosen))
        sinks = {_key(name): self._sink(name, options) for name in _enabled(chosen)}
        self._producer = Sampling(
            components.make(PRODUCERS["simulated" if chosen.simulate else "node"], options), chosen.cluster
        )
        self._alerts = Seen()
        tail = Tail(kafka.address, self._on_tick, self._alerts.see, self._tally.dead_lettered)
        streams = [components.make(row, options) for row in STREAMS.values()]
        self._pipeline = Pipeline(self._producer, streams, sinks, tail, self._tally, self._look)
        self._began_s = time.monotonic()
        self._display: Display | None = None

    async def run(self, stop: asyncio.Event) -> int:
        """Runs until ``stop`` or its end, and prints the summary."""
        duration_s = self._chosen.duration_s
        if duration_s is None and not self._chosen.watched:
            duration_s = UNWATCHED_S
        await topic_admin.check(self._kafka.address, registry.load())
        with displayed(watched=self._chosen.watched, to_stderr=self._chosen.summary == "json") as self._display:
            async with serve.observed(self._pipeline.components, self._chosen.listen):
                await self._pipeline.run(stop, duration_s)
        summary = self._tally.summary(
            self._producer.sampled(),
            values=self._producer.values,
            delivered=self._delivered(),
            dropped=self._producer.dropped,
        )
        _print(summary, self._chosen.summary)
        return 0 if summary.ok else serve.FAILED

    def _sink(self, name: str, options: Mapping[str, Any]) -> Any:
        return components.make(SINKS[name], options, on_outcome=self._tally.sinks[_key(name)].outcome)

    @property
    def _source(self) -> str:
        simulated = self._chosen.simulate
        return f"{simulated} GPUs simulated" if simulated else f"the GPUs of {self._chosen.node}"

    def _command_of(self, node: str, pid: int) -> str:
        """The command of a process of this machine, as procfs has it."""
        if self._chosen.simulate or node != self._chosen.node:
            return ""
        try:
            return (self._chosen.procfs / str(pid) / "comm").read_text(errors="replace").strip()
        except OSError:
            return ""

    def _delivered(self) -> dict[str, int]:
        """Metric values that each sink delivered, as it counts them itself."""
        return {
            name: _counted(sink.registry, f"gpustream_{name}_values_delivered_total")
            for name, sink in self._pipeline.sinks.items()
        }

    def _on_tick(self, tick: AttributedSample) -> None:
        if self._tally.attributed(Run(tick.cluster, tick.node, tick.run_id), tick.seq, tick.attribution):
            self._fleet.observe(tick, time.monotonic(), int(time.time() * 1000))

    def _look(self, not_ready: list[str]) -> None:
        if self._kafka.embedded is not None and not self._kafka.embedded.running:
            raise BrokerEnded("the embedded broker ended, and all that it held is gone")
        if self._display is not None:
            self._display.show(time.monotonic() - self._began_s, lambda: self._frame(not_ready))

    def _frame(self, not_ready: list[str]) -> Frame:
        sampled, now = self._producer.sampled(), datetime.now(UTC)
        return Frame(
            elapsed_s=time.monotonic() - self._began_s,
            title=f"gpustream, {self._source}",
            view=self._fleet.view(time.monotonic()),
            delivered=self._delivered(),
            behind={name: self._tally.behind(name, sampled) for name in self._tally.sinks},
            not_ready=not_ready,
            alerts=[row(alert, now) for alert in self._alerts.open()],
        )


def _enabled(chosen: RunSettings) -> Iterable[str]:
    return ["scrape", "remote-write"] if chosen.remote_write else ["scrape"]


def _key(sink: str) -> str:
    """What the summary calls a sink."""
    return sink.replace("-", "_")


def _options(chosen: RunSettings, kafka: str) -> dict[str, Any]:
    """The options of every component. A machine that has no kubelet when the run begins is not said to lack one."""
    socket = chosen.pod_resources_socket
    kubelet = socket if socket is not None and socket.exists() else None
    own = {"kafka": kafka, "fleet": chosen.simulate, "url": chosen.remote_write, "pod_resources_socket": kubelet}
    return {**vars(chosen), **own}


def _counted(registry: CollectorRegistry, counter: str) -> int:
    return int(sum(s.value for family in registry.collect() for s in family.samples if s.name == counter))


def _print(summary: Summary, form: Literal["text", "json"]) -> None:
    click.echo(msgspec.json.encode(summary).decode() if form == "json" else summary_text(summary))
