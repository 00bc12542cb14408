"""The real servers that tests run against, and where their programs are found.

They are looked for in $GPUSTREAM_REAL_DIR (default ~/.cache/gpustream-real, filled by ``make real-servers``), then on
PATH. All bind to 127.0.0.1 only.
"""

import base64
import functools
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
from typing import Any, Self

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from delivery.connection import Connection
from tests.eventually import LIMIT_S
from tests.real.certificates import Authority
from tests.real.process import HttpServer, Server, listens
from topics.topic import load_topics

KAFKA = "kafka-4.1.1"
OLDEST_KAFKA = "kafka-3.4.1"
PROMETHEUS = "prometheus-3.15.0"
PROMETHEUS_2 = "prometheus-2.42.0"
ALERTMANAGER = "alertmanager-0.34.0"
PROMETHEUS_ADAPTER = "prometheus-adapter-0.12.0"
ASK_TIMEOUT_S = 60.0

CHECKPOINT = "bootstrap.checkpoint"
checkpoints: dict[Path, bytes] = {}
"""What a new data directory has beside its ids, by the version of Kafka. To make it takes a second of Java."""


class Missing(Exception):
    """A server's program is not on this machine; the message says how to get it."""


def real_dir() -> Path:
    """Where ``make real-servers`` puts the servers."""
    return Path(os.environ.get("GPUSTREAM_REAL_DIR") or Path.home() / ".cache" / "gpustream-real")


def find_java() -> Path:
    """The Java runtime, of JAVA_HOME or PATH; raises :class:`Missing`."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if not path:
        raise Missing("no java on this machine: install a Java runtime, 17 or newer")
    return Path(path)


def find_kafka() -> Path:
    """The folder of Apache Kafka's jars; raises :class:`Missing`."""
    libs = real_dir() / KAFKA / "libs"
    on_path = shutil.which("kafka-server-start.sh")
    for folder in [libs] + ([Path(on_path).resolve().parent.parent / "libs"] if on_path else []):
        if any(folder.glob("kafka_2.13-4.*.jar")):
            return folder
    raise Missing(f"no Apache Kafka 4 in {libs} or on PATH: run `make real-servers`")


def find_oldest_kafka() -> Path:
    """The folder of the jars of the oldest Apache Kafka that gpustream is tried on; raises :class:`Missing`."""
    libs = real_dir() / OLDEST_KAFKA / "libs"
    if any(libs.glob("kafka_2.13-3.*.jar")):
        return libs
    raise Missing(f"no Apache Kafka 3 in {libs}: run `make real-servers`")


def find_openssl() -> Path:
    """The openssl program; raises :class:`Missing`."""
    path = shutil.which("openssl")
    if not path:
        raise Missing("no openssl on PATH: install it")
    return Path(path)


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


def find_prometheus_adapter() -> Path:
    """The adapter that gives Prometheus' series to autoscalers; raises :class:`Missing`."""
    path = real_dir() / PROMETHEUS_ADAPTER / "adapter"
    if not path.is_file():
        raise Missing(f"no prometheus-adapter at {path}: run `make real-servers`")
    return path


@functools.cache  # it takes a tenth of a second, and each start of a Prometheus asks
def takes_remote_write_2(program: Path) -> bool:
    """Whether that Prometheus lets one choose the remote-write messages it accepts, which came with 2.0."""
    result = subprocess.run([program, "--help"], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return "remote-write-receiver.accepted-protobuf-messages" in result.stdout + result.stderr


def _programs(folder: str, name: str = "prometheus") -> list[Path]:
    built = shutil.which(str(real_dir() / folder / name))
    on_path = shutil.which(name)
    return [Path(path) for path in (built, on_path) if path]


PLAIN_PASSWORDS = {"plain": "Plain-Passw0rd"}
"""The users that may log in by PLAIN; only those that are written into the configuration can."""


class KafkaServer(Server):
    """Apache Kafka in KRaft mode: one node, broker and controller, in its default configuration, except for its size.

    Topics are not made on first use, so that a test finds out when something forgot to create them. With an authority
    it has listeners that ask who comes, and ACLs say what a user may do; who comes to ``address`` may do everything.
    """

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str] | None = None,
        heap: str = "512m",
        authority: Authority | None = None,
        libs: Path | None = None,
    ) -> None:
        super().__init__(directory, ports=5)
        self.libs = libs or find_kafka()
        self.settings = dict(settings or {})
        self.heap = heap
        self.authority = authority
        self.cluster_id = "g" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]

    @property
    def connection(self) -> Connection:
        """How a client of ours reaches it."""
        return Connection(self.address)

    @property
    def address(self) -> str:
        """``HOST:PORT`` for clients without security."""
        return f"127.0.0.1:{self.ports[0].number}"

    @property
    def controller(self) -> str:
        """``HOST:PORT`` for controllers."""
        return f"127.0.0.1:{self.ports[1].number}"

    @property
    def sasl_ssl(self) -> str:
        """``HOST:PORT`` for TLS with PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER.

        The certificate is for "localhost" only: 127.0.0.1 is a wrong host name.
        """
        return f"localhost:{self.ports[2].number}"

    @property
    def mtls(self) -> str:
        """``HOST:PORT`` for TLS with a client's certificate; the user is its CN."""
        return f"localhost:{self.ports[3].number}"

    @property
    def sasl_plaintext(self) -> str:
        """``HOST:PORT`` for SCRAM-SHA-512 without TLS, and no other mechanism."""
        return f"localhost:{self.ports[4].number}"

    def prepare(self) -> None:
        """Writes the configuration and formats the data directories, from the second time on with a checkpoint that
        Kafka's own tool has made."""
        security = self._security(self.authority) if self.authority else {}
        settings = {**self._defaults(), **security, **self.settings}
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        folders = [Path(folder) for folder in settings["log.dirs"].split(",")]
        if self.libs not in checkpoints:
            with self.log.open("ab") as log:
                format_it = ["kafka.tools.StorageTool", "format", "-t", self.cluster_id, "-c", str(self._properties)]
                subprocess.run([*self._java(), *format_it], check=True, stdout=log, stderr=log, timeout=LIMIT_S)
            checkpoints[self.libs] = (folders[0] / CHECKPOINT).read_bytes()
            return
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            meta = f"version=1\ncluster.id={self.cluster_id}\nnode.id={settings['node.id']}\n"
            (folder / "meta.properties").write_text(meta)
            (folder / CHECKPOINT).write_bytes(checkpoints[self.libs])

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
        """Creates topics with these partition counts and settings; raises ``KafkaException`` if one exists.

        They are seen when it returns: a broker says that it is done before its own metadata say so.
        """
        new_topics = [NewTopic(name, count, config=dict(settings or {})) for name, count in partitions.items()]
        admin = self.admin()  # a client that nothing refers to gives up what it was asked
        for future in admin.create_topics(new_topics, operation_timeout=ASK_TIMEOUT_S).values():
            future.result(ASK_TIMEOUT_S)
        self.wait_until(lambda: partitions.items() <= self.topics().items())

    def create_ours(self, partitions: Mapping[str, int]) -> None:
        """Creates topics of the contract with these partition counts, and the settings that they must have."""
        for name, count in partitions.items():
            self.create_topics({name: count}, load_topics()[name].settings())

    def topics(self) -> dict[str, int]:
        """The partition count of every topic but Kafka's own."""
        names = self.admin().list_topics(timeout=ASK_TIMEOUT_S).topics
        return {name: len(topic.partitions) for name, topic in names.items() if not name.startswith("__")}

    def empty(self) -> list[str]:
        """Deletes every topic and every consumer group without members. Returns the others."""
        admin = self.admin()
        if names := list(self.topics()):
            for future in admin.delete_topics(names, operation_timeout=ASK_TIMEOUT_S).values():
                future.result(ASK_TIMEOUT_S)
            self.wait_until(lambda: not self.topics())
        groups = [group.group_id for group in admin.list_consumer_groups().result(ASK_TIMEOUT_S).valid]
        failed: list[str] = []
        for group, future in (admin.delete_consumer_groups(groups) if groups else {}).items():
            code = error.args[0].code() if (error := future.exception(ASK_TIMEOUT_S)) else KafkaError.NO_ERROR
            if code == KafkaError.NON_EMPTY_GROUP:
                failed.append(group)
            elif error and code != KafkaError.GROUP_ID_NOT_FOUND:  # older brokers end a group with its last offset
                raise error
        return failed

    def add_user(self, name: str, password: str) -> None:
        """A user of SCRAM-SHA-256 and SCRAM-SHA-512, without any rights; or another password for one."""
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):  # one of a user in a request
            credentials = ScramCredentialInfo(mechanism, 4096)
            change = UserScramCredentialUpsertion(name, credentials, password.encode())
            self._ask("alter_user_scram_credentials", [change])

    def allow(self, user: str, operation: str, resource: str, name: str, *, prefixed: bool = False) -> None:
        """An ACL in Kafka's words: ``allow("sink", "READ", "TOPIC", "gpu.attributed")``."""
        binding = _acl(user, operation, resource, name, prefixed)
        self._ask("create_acls", [binding])
        self.wait_until(lambda: self._knows_acl(binding))

    def forbid(self, user: str, operation: str, resource: str, name: str, *, prefixed: bool = False) -> None:
        """Deletes an ACL of :meth:`allow`."""
        binding = _acl(user, operation, resource, name, prefixed)
        self._ask("delete_acls", [_exactly(binding)])
        self.wait_until(lambda: not self._knows_acl(binding))

    def set_quotas(self, client_id: str, **quotas: int) -> None:
        """What a client of that id may use: ``set_quotas("slow", producer_byte_rate=1000)``. It takes 2 s of Java."""
        entity = ["--entity-type", "clients", "--entity-name", client_id]
        values = ",".join(f"{name}={value}" for name, value in quotas.items())
        tool = ["kafka.admin.ConfigCommand", "--bootstrap-server", self.address, "--alter", "--add-config", values]
        subprocess.run([*self._java(), *tool, *entity], check=True, capture_output=True, timeout=LIMIT_S)

    def _knows_acl(self, acl: AclBinding) -> bool:
        """Whether the broker applies that ACL, some time after the controller has it."""
        admin = self.admin()
        return bool(admin.describe_acls(_exactly(acl)).result(ASK_TIMEOUT_S))

    def _ask(self, action: str, items: Sequence[Any]) -> None:
        admin = self.admin()  # a client that nothing refers to gives up what it was asked
        for future in getattr(admin, action)(items).values():
            future.result(ASK_TIMEOUT_S)

    @property
    def _properties(self) -> Path:
        return self.directory / "server.properties"

    def _java(self) -> list[str]:
        quick = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]  # to start: half the time and CPU of the defaults
        classes = self.libs.parent.with_name(f"{self.libs.parent.name}-classes") / "classes.jsa"
        if classes.is_file():  # half of what is left
            quick.append(f"-XX:SharedArchiveFile={classes}")
        return [str(find_java()), f"-Xmx{self.heap}", *quick, "-cp", f"{self.libs}/*"]

    def _defaults(self) -> dict[str, str]:
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{self.controller}",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{self.controller}",
            "controller.listener.names": "CONTROLLER",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
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
            "metadata.max.idle.interval.ms": "0",  # a broker that has nothing to do takes a third less CPU
            "auto.create.topics.enable": "false",
            "num.network.threads": "1",  # of each of five listeners
            "num.io.threads": "2",
            "log.cleaner.dedupe.buffer.size": str(4 << 20),  # its 128 MiB would be written at each start
        }

    def _security(self, authority: Authority) -> dict[str, str]:
        """The listeners with authentication, and the authorizer."""
        broker = authority.sign("broker", "DNS:localhost")
        keystore = self.directory / "keystore.pem"
        keystore.write_text(broker.key.read_text() + broker.certificate.read_text())
        login = "org.apache.kafka.common.security"
        scram = f"{login}.scram.ScramLoginModule required;"
        asking = f"SASL_SSL://{self.sasl_ssl},SSL://{self.mtls},SASL_PLAINTEXT://{self.sasl_plaintext}"
        plain = " ".join(f'user_{name}="{password}"' for name, password in PLAIN_PASSWORDS.items())
        return {
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
            "SSL:SSL,SASL_SSL:SASL_SSL,SASL_PLAINTEXT:SASL_PLAINTEXT",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{self.controller},{asking}",
            "advertised.listeners": f"PLAINTEXT://{self.address},{asking}",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(keystore),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(broker.ca),
            "listener.name.ssl.ssl.client.auth": "required",
            "ssl.principal.mapping.rules": "RULE:^CN=(.*)$/$1/",
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            "listener.name.sasl_plaintext.sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{login}.plain.PlainLoginModule required {plain};",
            "listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config": scram,
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": scram,
            "listener.name.sasl_plaintext.scram-sha-512.sasl.jaas.config": scram,
            "listener.name.sasl_ssl.oauthbearer.sasl.jaas.config": f"{login}.oauthbearer.OAuthBearerLoginModule"
            " required;",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        }


def _acl(user: str, operation: str, resource: str, name: str, prefixed: bool) -> AclBinding:
    pattern = ResourcePatternType.PREFIXED if prefixed else ResourcePatternType.LITERAL
    kind = ResourceType.BROKER if resource == "CLUSTER" else ResourceType[resource]  # librdkafka calls a cluster so
    return AclBinding(kind, name, pattern, f"User:{user}", "*", AclOperation[operation], AclPermissionType.ALLOW)


def _exactly(acl: AclBinding) -> AclBindingFilter:
    resource = (acl.restype, acl.name, acl.resource_pattern_type)
    return AclBindingFilter(*resource, acl.principal, acl.host, acl.operation, acl.permission_type)


def unsecured_token(user: str, lifetime_s: float = 3600.0) -> str:
    """A token by which OAUTHBEARER believes that it is that user: these brokers check no signature."""
    now_s = time.time()
    parts = ({"alg": "none"}, {"sub": user, "iat": now_s - 60, "exp": now_s + lifetime_s})
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*encoded, ""])


class KafkaCluster:
    """Three brokers that are controllers too, each in a rack of its own: replication 3, and 2 must have a record.

    ``brokers`` are servers like any other: to be killed, paused, and started again. A context manager.
    """

    def __init__(self, directory: Path, *, authority: Authority | None = None, heap: str = "384m") -> None:
        numbers = range(1, 4)
        self.brokers = [KafkaServer(directory / f"{n}", authority=authority, heap=heap) for n in numbers]
        voters = ",".join(f"{n}@{broker.controller}" for n, broker in zip(numbers, self.brokers, strict=True))
        for number, broker in zip(numbers, self.brokers, strict=True):
            broker.cluster_id = self.brokers[0].cluster_id
            broker.settings |= {"node.id": str(number), "broker.rack": f"rack-{number}"}
            broker.settings |= {"controller.quorum.voters": voters, "min.insync.replicas": "2"}
            broker.settings |= dict.fromkeys(_REPLICATIONS, "3")

    @property
    def address(self) -> str:
        """The three brokers, for clients without security."""
        return ",".join(broker.address for broker in self.brokers)

    def __enter__(self) -> Self:
        try:
            for broker in self.brokers:
                broker.begin()
            for broker in self.brokers:
                broker.wait_until(functools.partial(_knows_brokers, broker, len(self.brokers)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for broker in self.brokers:
            broker.close()


_REPLICATIONS = ("default.replication.factor", "offsets.topic.replication.factor")


def _knows_brokers(broker: KafkaServer, brokers: int) -> bool:
    """Whether it knows of that many brokers."""
    return broker.ready() and len(broker.admin().list_topics(timeout=ASK_TIMEOUT_S).brokers) == brokers


class AlertmanagerServer(HttpServer):
    """Alertmanager by itself, with one receiver of notifications: a webhook, or nothing.

    It notifies at once, of each alert by itself, and of what is resolved too, unless another configuration is given.
    """

    def __init__(self, directory: Path, *, webhook: str | None = None, configuration: str | None = None) -> None:
        super().__init__(directory)
        self.webhook = webhook
        self.configuration = configuration

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

    def alerts(self) -> list[Mapping[str, Any]]:
        """The alerts that it holds to be active, as its API gives them."""
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=LIMIT_S) as answer:  # noqa: S310 - http, and ours
            active: list[Mapping[str, Any]] = json.load(answer)
        return active


@dataclass(frozen=True)
class Series:
    """One series of a query's answer: its labels, and its points as (milliseconds since the epoch, value)."""

    labels: Mapping[str, str]
    points: Sequence[tuple[int, float]]

    @property
    def value(self) -> float:
        """The last point's value."""
        return self.points[-1][1]


class PrometheusServer(HttpServer):
    """Prometheus with the remote-write receiver on; its configuration is the default one: no out-of-order window."""

    def __init__(
        self,
        directory: Path,
        *,
        program: Path | None = None,
        options: Sequence[str] = (),
        config: str = "global: {}\n",
    ) -> None:
        super().__init__(directory)
        self.program = program or find_prometheus()
        self.options, self.config = list(options), config

    @property
    def write_url(self) -> str:
        """Where remote write goes."""
        return f"{self.url}/api/v1/write"

    @property
    def query_url(self) -> str:
        """What answers queries, without ``/api``."""
        return self.url

    def prepare(self) -> None:
        """Writes the configuration."""
        (self.directory / "prometheus.yml").write_text(self.config)

    def command(self) -> Sequence[str]:
        """The server in the foreground."""
        return [
            str(self.program),
            f"--config.file={self.directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.ports[0].number}",
            "--web.enable-remote-write-receiver",
            "--scrape.discovery-reload-interval=200ms",  # or what it is to scrape is left alone for 5 s
            "--log.level=warn",
            *self.options,
        ]

    def query(self, expr: str, time_ms: int | None = None) -> list[Series]:
        """The answer at that time (default now): one point per series, or all of them for a selector like ``x[5m]``.

        A range selector gives the stored points with their own timestamps, staleness markers left out; an instant one
        gives the time of the query.
        """
        time_s = time.time() if time_ms is None else time_ms / 1000
        return self._ask("query", {"query": expr, "time": f"{time_s:.3f}"})

    def query_range(self, expr: str, *, start_ms: int, end_ms: int, step_ms: int) -> list[Series]:
        """The answer at every step from start to end, both included."""
        span = {"start": f"{start_ms / 1000:.3f}", "end": f"{end_ms / 1000:.3f}", "step": f"{step_ms / 1000:.3f}"}
        return self._ask("query_range", {"query": expr, **span})

    def _ask(self, path: str, parameters: Mapping[str, str]) -> list[Series]:
        body = urllib.parse.urlencode(parameters).encode()
        with urllib.request.urlopen(f"{self.query_url}/api/v1/{path}", body, timeout=LIMIT_S) as answer:  # noqa: S310 - http, and ours
            data = json.load(answer)["data"]
        if data["resultType"] in {"scalar", "string"}:
            return [Series({}, [_point(data["result"])])]
        return [_series(item) for item in data["result"]]


def _series(item: Mapping[str, Any]) -> Series:
    pairs = item["values"] if "values" in item else [item["value"]]
    return Series(item["metric"], [_point(pair) for pair in pairs])


def _point(pair: Sequence[Any]) -> tuple[int, float]:
    return round(float(pair[0]) * 1000), float(pair[1])
