"""The real servers that tests run against, and where their programs are found.

They are looked for in $GPUSTREAM_REAL_DIR (default ~/.cache/gpustream-real, filled by ``make real-servers``), then on
PATH. All bind to 127.0.0.1 only.
"""

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from delivery.connection import Connection
from tests.real.process import Server, listens
from topics.topic import load_topics

KAFKA = "kafka-4.1.1"
PROMETHEUS = "prometheus-3.15.0"
PROMETHEUS_2 = "prometheus-2.42.0"
ALERTMANAGER = "alertmanager-0.34.0"
ASK_TIMEOUT_S = 10.0


class Missing(Exception):
    """A server's program is not on this machine; the message says how to get it."""


def real_dir() -> Path:
    """Where ``make real-servers`` puts the servers."""
    return Path(os.environ.get("GPUSTREAM_REAL_DIR") or Path.home() / ".cache" / "gpustream-real")


def find_java() -> Path:
    """The Java runtime, of JAVA_HOME or PATH; raises :class:`Missing`."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if not found:
        raise Missing("no java on this machine: install a Java runtime, 17 or newer")
    return Path(found)


def find_kafka() -> Path:
    """The folder of Apache Kafka's jars; raises :class:`Missing`."""
    libs = real_dir() / KAFKA / "libs"
    on_path = shutil.which("kafka-server-start.sh")
    for folder in [libs] + ([Path(on_path).resolve().parent.parent / "libs"] if on_path else []):
        if any(folder.glob("kafka_2.13-4.*.jar")):
            return folder
    raise Missing(f"no Apache Kafka 4 in {libs} or on PATH: run `make real-servers`")


def find_prometheus() -> Path:
    """A Prometheus that takes remote write 2.0; raises :class:`Missing`."""
    for program in _programs(PROMETHEUS):
        if takes_remote_write_2(program):
            return program
    raise Missing(f"no Prometheus 3 in {real_dir() / PROMETHEUS} or on PATH: run `make real-servers`")


def find_prometheus_2() -> Path:
    """A Prometheus that takes remote write 1.0 only, such as Debian's 2.42; raises :class:`Missing`."""
    for program in _programs(PROMETHEUS_2):
        if not takes_remote_write_2(program):
            return program
    raise Missing(f"no Prometheus 2.42 in {real_dir() / PROMETHEUS_2} or on PATH: Debian 12's `prometheus` is one")


def find_promtool() -> Path:
    """Prometheus' tool that checks what it would scrape; raises :class:`Missing`."""
    for program in _programs(PROMETHEUS, "promtool"):
        return program
    raise Missing(f"no promtool in {real_dir() / PROMETHEUS} or on PATH: run `make real-servers`")


def find_alertmanager() -> Path:
    """Alertmanager; raises :class:`Missing`."""
    for program in _programs(ALERTMANAGER, "alertmanager"):
        return program
    raise Missing(f"no Alertmanager in {real_dir() / ALERTMANAGER} or on PATH: run `make real-servers`")


def takes_remote_write_2(program: Path) -> bool:
    """Whether that Prometheus lets one choose the remote-write messages it accepts, which came with 2.0."""
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False, timeout=30)
    return "remote-write-receiver.accepted-protobuf-messages" in done.stdout + done.stderr


def _programs(folder: str, name: str = "prometheus") -> list[Path]:
    built = shutil.which(str(real_dir() / folder / name))
    on_path = shutil.which(name)
    return [Path(found) for found in (built, on_path) if found]


class KafkaServer(Server):
    """Apache Kafka in KRaft mode: one node, broker and controller, in its default configuration but for its size.

    Topics are not made on first use, so that a test finds out when something forgot to create them.
    """

    def __init__(self, directory: Path, *, settings: Mapping[str, str] | None = None, heap: str = "512m") -> None:
        super().__init__(directory, ports=2)
        self.settings = dict(settings or {})
        self.heap = heap

    @property
    def connection(self) -> Connection:
        """How a client of ours reaches it."""
        return Connection(self.address)

    @property
    def address(self) -> str:
        """``HOST:PORT`` for clients."""
        return f"127.0.0.1:{self.ports[0].number}"

    def prepare(self) -> None:
        """Writes the configuration and formats the data directory."""
        lines = [f"{name}={value}" for name, value in {**self._defaults(), **self.settings}.items()]
        self._properties.write_text("\n".join(lines) + "\n")
        cluster_id = "g" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
        with self.log.open("ab") as log:
            format_it = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._properties)]
            subprocess.run([*self._java(), *format_it], check=True, stdout=log, stderr=log, timeout=ASK_TIMEOUT_S * 6)

    def command(self) -> Sequence[str]:
        """The broker in the foreground."""
        return [*self._java(), "kafka.Kafka", str(self._properties)]

    def ready(self) -> bool:
        """Whether the broker answers a metadata request and names itself."""
        if not listens(self.ports[0].number):
            return False
        try:
            return bool(self.admin().list_topics(timeout=2).brokers)
        except KafkaException:
            return False

    def admin(self) -> AdminClient:
        """A new client for what the helpers below do not do."""
        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def create_topics(self, partitions: Mapping[str, int], settings: Mapping[str, str] | None = None) -> None:
        """Creates topics with these partition counts and settings; raises ``KafkaException`` where one exists.

        They are seen when it returns: a broker says that it is done before its own metadata say so.
        """
        wanted = [NewTopic(name, count, 1, config=dict(settings or {})) for name, count in partitions.items()]
        admin = self.admin()  # a client that nothing refers to gives up what it was asked
        for done in admin.create_topics(wanted, operation_timeout=ASK_TIMEOUT_S).values():
            done.result(ASK_TIMEOUT_S)
        self.wait_until(lambda: partitions.items() <= self.topics().items())

    def create_ours(self, partitions: Mapping[str, int]) -> None:
        """Creates topics of the contract with these partition counts, and the settings that they must have."""
        for name, count in partitions.items():
            self.create_topics({name: count}, load_topics()[name].settings())

    def topics(self) -> dict[str, int]:
        """The partition count of every topic but Kafka's own."""
        found = self.admin().list_topics(timeout=ASK_TIMEOUT_S).topics
        return {name: len(topic.partitions) for name, topic in found.items() if not name.startswith("__")}

    def empty(self) -> None:
        """Deletes every topic and every consumer group without members; others keep their offsets."""
        admin = self.admin()
        if names := list(self.topics()):
            for done in admin.delete_topics(names, operation_timeout=ASK_TIMEOUT_S).values():
                done.result(ASK_TIMEOUT_S)
            self.wait_until(lambda: not self.topics())
        groups = [group.group_id for group in admin.list_consumer_groups().result(ASK_TIMEOUT_S).valid]
        for done in (admin.delete_consumer_groups(groups) if groups else {}).values():
            error = done.exception(ASK_TIMEOUT_S)
            if error and error.args[0].code() != KafkaError.NON_EMPTY_GROUP:
                raise error

    @property
    def _properties(self) -> Path:
        return self.directory / "server.properties"

    def _java(self) -> list[str]:
        quick = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")  # to start: half the time and CPU of the defaults
        return [str(find_java()), f"-Xmx{self.heap}", *quick, "-cp", f"{find_kafka()}/*"]

    def _defaults(self) -> dict[str, str]:
        broker, controller = (port.number for port in self.ports)
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker}",
            "log.dirs": str(self.directory / "data"),
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "broker.session.timeout.ms": "4000",  # so long is a killed broker kept from coming back
            "broker.heartbeat.interval.ms": "500",
            "auto.create.topics.enable": "false",
        }


class AlertmanagerServer(Server):
    """Alertmanager by itself, with one receiver of notifications: a webhook, or nothing.

    It notifies at once, of each alert by itself, and of what is resolved too, unless another configuration is given.
    """

    def __init__(self, directory: Path, *, webhook: str | None = None, configuration: str | None = None) -> None:
        super().__init__(directory)
        self.webhook = webhook
        self.configuration = configuration

    @property
    def url(self) -> str:
        """The server's base URL, without a slash at the end."""
        return f"http://127.0.0.1:{self.ports[0].number}"

    def prepare(self) -> None:
        """Writes the configuration."""
        (self.directory / "alertmanager.yml").write_text(self.configuration or self._quick())

    def _quick(self) -> str:
        webhooks = [{"url": self.webhook, "send_resolved": True}] if self.webhook else []
        receiver = {"name": "all", "webhook_configs": webhooks}
        quick = {"group_by": ["..."], "group_wait": "0s", "group_interval": "1s", "repeat_interval": "1h"}
        return json.dumps({"route": {"receiver": "all", **quick}, "receivers": [receiver]})

    def command(self) -> Sequence[str]:
        """The server in the foreground."""
        return [
            str(find_alertmanager()),
            f"--config.file={self.directory / 'alertmanager.yml'}",
            f"--storage.path={self.directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.ports[0].number}",
            "--cluster.listen-address=",
            "--log.level=warn",
        ]

    def ready(self) -> bool:
        """Whether it says that it is ready."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:  # noqa: S310 - http, and ours
                return bool(answer.status == 200)
        except OSError:
            return False

    def alerts(self) -> list[Mapping[str, Any]]:
        """The alerts that it holds to be active, as its API gives them."""
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=60) as answer:  # noqa: S310 - http, and ours
            found: list[Mapping[str, Any]] = json.load(answer)
        return found


@dataclass(frozen=True)
class Series:
    """One series of a query's answer: its labels, and its points as (milliseconds since the epoch, value)."""

    labels: Mapping[str, str]
    points: Sequence[tuple[int, float]]

    @property
    def value(self) -> float:
        """The last point's value."""
        return self.points[-1][1]


class PrometheusServer(Server):
    """Prometheus with the remote-write receiver on, in its default configuration: no out-of-order window."""

    def __init__(self, directory: Path, *, program: Path | None = None, options: Sequence[str] = ()) -> None:
        super().__init__(directory)
        self.program = program or find_prometheus()
        self.options = list(options)

    @property
    def url(self) -> str:
        """The server's base URL, without a slash at the end."""
        return f"http://127.0.0.1:{self.ports[0].number}"

    @property
    def write_url(self) -> str:
        """Where remote write goes."""
        return f"{self.url}/api/v1/write"

    def prepare(self) -> None:
        """Writes an empty configuration, which is the default one."""
        (self.directory / "prometheus.yml").write_text("global: {}\n")

    def command(self) -> Sequence[str]:
        """The server in the foreground."""
        return [
            str(self.program),
            f"--config.file={self.directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.ports[0].number}",
            "--web.enable-remote-write-receiver",
            "--log.level=warn",
            *self.options,
        ]

    def ready(self) -> bool:
        """Whether it says that it is ready."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:  # noqa: S310 - http, and ours
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expr: str, time_ms: int | None = None) -> list[Series]:
        """The answer at that time (default now): one point per series, or all of them for a selector like ``x[5m]``.

        A range selector gives the stored points with their own timestamps, staleness markers left out; an instant one
        gives the time of the query.
        """
        at = time.time() if time_ms is None else time_ms / 1000
        return self._ask("query", {"query": expr, "time": f"{at:.3f}"})

    def query_range(self, expr: str, *, start_ms: int, end_ms: int, step_ms: int) -> list[Series]:
        """The answer at every step from start to end, both included."""
        span = {"start": f"{start_ms / 1000:.3f}", "end": f"{end_ms / 1000:.3f}", "step": f"{step_ms / 1000:.3f}"}
        return self._ask("query_range", {"query": expr, **span})

    def _ask(self, path: str, parameters: Mapping[str, str]) -> list[Series]:
        body = urllib.parse.urlencode(parameters).encode()
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", body, timeout=60) as answer:  # noqa: S310 - http, and ours
            data = json.load(answer)["data"]
        if data["resultType"] in {"scalar", "string"}:
            return [Series({}, [_point(data["result"])])]
        return [_series(item) for item in data["result"]]


def _series(item: Mapping[str, Any]) -> Series:
    pairs = item["values"] if "values" in item else [item["value"]]
    return Series(item["metric"], [_point(pair) for pair in pairs])


def _point(pair: Sequence[Any]) -> tuple[int, float]:
    return round(float(pair[0]) * 1000), float(pair[1])
