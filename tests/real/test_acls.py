"""Each component with exactly the ACLs that docs/how-to/kafka.md lists, on a broker that checks; and with one less."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner

from delivery import topic_admin
from delivery.values import Address
from gpustream.acls import Acl, of_commands
from gpustream.cli import main
from gpustream.serve import Component
from producers.cluster.component import ClusterProducer
from producers.cluster.config import ClusterSettings
from producers.node.component import NodeProducer
from producers.node.config import NodeSettings
from producers.replay.component import TraceReplay
from producers.replay.config import ReplaySettings
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from sinks.alertmanager import AlertmanagerSink
from sinks.metrics_api.config import MetricsApiSettings
from sinks.metrics_api.sink import MetricsApiSink
from sinks.page.config import PageSettings
from sinks.page.sink import PageSink
from sinks.parquet import ParquetSink
from sinks.reclaim.config import ReclaimSettings
from sinks.reclaim.sink import ReclaimSink
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.sink import RemoteWriteSink
from sinks.scrape.config import ScrapeSettings
from sinks.scrape.sink import ScrapeSink
from sinks.settings import AlertmanagerSettings, ParquetSettings, WebhookSettings
from sinks.webhook import WebhookSink
from streams.alerts.component import Alerts
from streams.attribution.component import Attribution
from streams.settings import AlertSettings, AttributionSettings, UsageSettings
from streams.usage.component import UsageStream
from tests.eventually import eventually
from tests.producers.cluster.api_server import kubeconfig
from tests.producers.cluster.test_component import cluster_of
from tests.producers.node.test_component import FakeGpus, FakeKubelet
from tests.producers.replay import trace_files
from tests.real.certificates import Authority
from tests.real.contents import committed, ends
from tests.real.pipeline import running
from tests.real.servers import KafkaServer
from topics.attributed import TOPIC as ATTRIBUTED
from topics.topic import load_topics, node_key
from topics.usage import HOUR_MS, Usage

ACLS = of_commands()
COMPONENTS = [name for name in ACLS if name.split()[0] in ("produce", "stream", "sink")]
INPUTS = {
    "stream attribution": ("gpu.samples",),
    "stream alerts": ("gpu.attributed",),
    "sink remote-write": ("gpu.attributed", "gpu.alerts"),
    "sink scrape": ("gpu.attributed",),
    "sink alertmanager": ("gpu.alerts",),
    "sink webhook": ("gpu.alerts",),
    "sink reclaim": ("gpu.alerts",),
    "sink parquet": ("gpu.usage",),
}
"""What a component has to commit to its end."""

OUTPUTS = {
    "produce node": ("gpu.samples", "gpu.allocations"),
    "produce cluster": ("gpu.workloads",),
    "produce simulated": ("gpu.samples", "gpu.allocations", "gpu.workloads"),
    "produce replay": ("gpu.samples", "gpu.allocations", "gpu.workloads"),
    "stream attribution": ("gpu.attributed", "gpu.dead-letters"),
    "stream usage": ("gpu.usage-state", "gpu.dead-letters"),
    **dict.fromkeys(("stream alerts", *(name for name in INPUTS if name.startswith("sink"))), ("gpu.dead-letters",)),
}
"""Where something new of a component has to be. One that is not here only reads, and is ready when it has."""


@pytest.fixture
async def flow(empty_kafka: KafkaServer) -> KafkaServer:
    """A broker with all topics, and in each of the flow's a valid record and a malformed one."""
    await topic_admin.create(empty_kafka.connection, partitions=1, replication_factor=1)
    async with AIOKafkaProducer(bootstrap_servers=empty_kafka.address) as producer:
        for name, topic in load_topics().items():
            if topic.record is not None:
                node = node_key(topic.example["cluster"], topic.example.get("node", ""))
                key = node if topic.by_node else topic.example.get("fingerprint", "").encode()
                key = msgspec.convert(topic.example, Usage).key.encode() if topic.record is Usage else key
                await producer.send_and_wait(name, json.dumps(topic.example).encode(), key=key)
        for name in dict.fromkeys(name for names in INPUTS.values() for name in names):
            await producer.send_and_wait(name, b"{", key=b"c/malformed")
    return empty_kafka


@dataclass
class Users:
    """Users of the broker by certificate, and what they may do."""

    kafka: KafkaServer
    authority: Authority

    def settings(self, user: str) -> dict[str, Any]:
        """The settings with which a component logs in as that user."""
        signed = self.authority.sign(user)
        files = {"kafka_ca": signed.ca, "kafka_cert": signed.certificate, "kafka_key": signed.key}
        return {"kafka": self.kafka.mtls, "kafka_security": "ssl", **files}

    async def allow(self, user: str, *acls: Acl) -> None:
        for acl in acls:
            await asyncio.to_thread(self.kafka.allow, user, *_parts_of(acl), prefixed=acl.prefixed)

    async def forbid(self, user: str, *acls: Acl) -> None:
        for acl in acls:
            await asyncio.to_thread(self.kafka.forbid, user, *_parts_of(acl), prefixed=acl.prefixed)


def _parts_of(acl: Acl) -> tuple[str, str, str]:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", acl.operation).upper(), acl.resource.upper(), acl.name


@pytest.fixture
def users(kafka: KafkaServer, authority: Authority) -> Users:
    return Users(kafka, authority)


def component(name: str, url: str, api: str, **kafka: Any) -> Component:
    """The component as its command makes it, except for its sources: GPUs, a kubelet, Kubernetes."""
    fakes: dict[str, Any] = {"gpus": FakeGpus(), "kubelet": FakeKubelet([])}
    factories: dict[str, Callable[[], Component]] = {
        "produce node": lambda: NodeProducer(NodeSettings(**kafka, node="n", interval_s=0.2), **fakes),
        "produce cluster": lambda: ClusterProducer(ClusterSettings(**kafka, kubeconfig=Path(api), lease=None)),
        "produce simulated": lambda: SimulatedFleet(SimulatedSettings(**kafka, fleet="1x1", interval_s=0.2)),
        "produce replay": lambda: TraceReplay(ReplaySettings(**kafka, trace=("alibaba-gpu-2023", Path(api).parent))),
        "stream attribution": lambda: Attribution(AttributionSettings(**kafka)),
        "stream alerts": lambda: Alerts(AlertSettings(**kafka)),
        "stream usage": lambda: UsageStream(UsageSettings(**kafka)),
        "sink remote-write": lambda: RemoteWriteSink(RemoteWriteSettings(**kafka, url=url, from_="earliest")),
        "sink scrape": lambda: ScrapeSink(
            ScrapeSettings(**kafka, scrape_listen=Address("127.0.0.1", 0), from_="earliest")
        ),
        "sink alertmanager": lambda: AlertmanagerSink(AlertmanagerSettings(**kafka, urls=(url,), from_="earliest")),
        "sink webhook": lambda: WebhookSink(WebhookSettings(**kafka, url=url, unsigned=True, from_="earliest")),
        "sink metrics-api": lambda: MetricsApiSink(MetricsApiSettings(**kafka, metrics_listen=Address("127.0.0.1", 0))),
        "sink page": lambda: PageSink(PageSettings(**kafka, page_listen=Address("127.0.0.1", 0))),
        "sink reclaim": lambda: ReclaimSink(ReclaimSettings(**kafka, kubeconfig=Path(api))),
        "sink parquet": lambda: ParquetSink(
            ParquetSettings(**kafka, path=Path(api).parent / "parquet", write_every_s=0.2)
        ),
    }
    return factories[name]()


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[str]:
    """The kubeconfig of an API server with one node, in a folder that has a trace, too."""
    trace_files.gpu_2023(tmp_path, ["n-0,1,1,4,T4"], [trace_files.pod("p-0", 1, 500, 60, 660)])
    async with cluster_of("n") as server:
        config = tmp_path / "kubeconfig"
        config.write_text(kubeconfig(server.url, {"token": "t"}))
        yield str(config)


def _reports(refused: Component, missing: Acl) -> bool:
    sentence = f"add the ACL {missing.operation} on {missing.resource} {missing.name}"
    return any(sentence in reason for reason in refused.not_ready())


async def test_topics_are_made_mended_and_listed_with_exactly_the_acls_of_that(
    empty_kafka: KafkaServer, users: Users
) -> None:
    await users.allow("topics", *ACLS["topics create"])
    connection = ScrapeSettings(**users.settings("topics")).connection()
    assert len(await topic_admin.create(connection, partitions=1, replication_factor=1)) == len(load_topics())
    await users.allow("lists", *ACLS["topics list"])
    actual, unchecked = await topic_admin.inspect(ScrapeSettings(**users.settings("lists")).connection())
    assert (set(actual), unchecked) == (set(load_topics()), None)


async def test_below_a_prefix_two_prefixed_acls_are_enough(empty_kafka: KafkaServer, users: Users) -> None:
    prefix = "team-a."
    for resource in ("TOPIC", "GROUP"):
        await asyncio.to_thread(empty_kafka.allow, "team", "ALL", resource, prefix, prefixed=True)
    settings = {**users.settings("team"), "topic_prefix": prefix}
    stream = Attribution(AttributionSettings(**settings))
    await topic_admin.create(stream.settings.connection(), partitions=1, replication_factor=1)
    async with running(SimulatedFleet(SimulatedSettings(**settings, fleet="1x1", interval_s=0.2)), stream):

        async def attributed() -> bool:
            return (await ends(empty_kafka.address, f"{prefix}gpu.attributed"))[0] > 0

        await eventually(attributed)
    assert all(name.startswith(prefix) for name in empty_kafka.topics())


@pytest.mark.parametrize("name", COMPONENTS)
async def test_a_component_works_with_exactly_its_acls_and_names_each_that_is_missing(
    flow: KafkaServer, users: Users, receiver: str, api: str, name: str
) -> None:
    user = name.replace(" ", "-")
    await users.allow(user, *ACLS[name])
    for missing in ACLS[name]:
        await users.forbid(user, missing)
        refused = component(name, receiver, api, **users.settings(user))
        task = asyncio.create_task(refused.run(asyncio.Event()))
        await eventually(partial(_reports, refused, missing), f"it says that {missing} is missing", unless=task)
        task.cancel()  # and no stop, in which a producer would wait for what it can't send
        await asyncio.wait([task])
        await users.allow(user, missing)

    before = {topic: (await ends(flow.address, topic))[0] for topic in OUTPUTS.get(name, ())}
    groups = [acl.name for acl in ACLS[name] if acl.resource == "Group"]
    allowed = component(name, receiver, api, **users.settings(user))
    async with running(allowed):

        async def worked() -> bool:
            grown = [(await ends(flow.address, topic))[0] > before[topic] for topic in before]
            records = [
                await committed(flow.address, groups[0], topic) == await ends(flow.address, topic)
                for topic in INPUTS.get(name, ())
            ]
            return all(grown + records) and (name in OUTPUTS or not allowed.not_ready())

        await eventually(worked)


@pytest.mark.parametrize("command", [("usage",), ("report",), ("replay", "--from", "3h"), ("reclaim", "list")])
async def test_a_command_answers_with_exactly_its_acls_and_names_each_that_is_missing(
    flow: KafkaServer, users: Users, command: tuple[str, ...]
) -> None:
    name = " ".join(command) if " ".join(command) in ACLS else command[0]
    options = [
        option for key, value in users.settings(name).items() for option in (f"--{key.replace('_', '-')}", str(value))
    ]
    await users.allow(name, *ACLS[name])
    async with AIOKafkaProducer(bootstrap_servers=flow.address) as producer:
        for seq in (1, 2):  # in an hour that is final, so that there is something to write
            ts_ms = (time.time_ns() // 3_600_000_000_000 - 2) * HOUR_MS + seq * 1000
            position = {"node": "n", "run_id": 1, "seq": seq, "offset": seq, "ts_ms": ts_ms, "logged_ms": ts_ms}
            await producer.send_and_wait(
                "gpu.attributed", json.dumps({**ATTRIBUTED.example, **position}).encode(), key=b"n"
            )
    for missing in ACLS[name]:
        await users.forbid(name, missing)
        refused = await asyncio.to_thread(CliRunner().invoke, main, [*command, *options])
        assert refused.exit_code == 1
        assert "Kafka does not let this client" in refused.output
        assert missing.name in refused.output
        await users.allow(name, missing)
    result = await asyncio.to_thread(CliRunner().invoke, main, [*command, *options])
    assert result.exit_code == 0, result.output
