"""The settings of a process, and of ``gpustream run``."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from delivery.settings import DURATION, FLEET_SIZE, HOST_PORTS, LISTEN, URL, Cluster, Option
from delivery.values import Address
from producers.node.config import Node, ReadingSettings, node_name
from producers.settings import Interval
from producers.simulated.config import SimulationSettings
from sinks.scrape.config import SCRAPE_ADDRESS, ScrapeListen
from sinks.settings import NamingSettings

OWN_ADDRESS = Address("127.0.0.1", 9401)


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """What every long-running process is told beside its component's settings. ``listen`` None: nowhere."""

    listen: Annotated[
        Address | None,
        Option("--listen", LISTEN, "Where this process serves its own /metrics, /healthz and /readyz."),
    ] = OWN_ADDRESS
    log_format: Annotated[
        Literal["text", "json"], Option("--log-format", None, "How log lines on standard error are written.")
    ] = "text"


@dataclass(frozen=True, kw_only=True)
class RunSettings(ReadingSettings, SimulationSettings, NamingSettings, ProcessSettings):
    """``kafka`` None is the embedded broker, ``simulate`` None the GPUs of this machine. ``watched``: by a terminal."""

    simulate: Annotated[
        str | None,
        Option("--simulate", FLEET_SIZE, "Simulate so many nodes of so many GPUs.", shown="this machine's GPUs"),
    ] = None
    kafka: Annotated[
        str | None,
        Option("--kafka", HOST_PORTS, "Kafka's bootstrap brokers.", shown="a broker inside this process"),
    ] = None
    cluster: Cluster = "default"
    scrape_listen: ScrapeListen = SCRAPE_ADDRESS
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
    interval_s: Interval = 1.0
    node: Node = field(default_factory=node_name)
    watched: bool = False
