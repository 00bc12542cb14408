"""A Kafka with its default `auto.create.topics.enable=true`: whatever starts before `topics create` makes no topic."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from delivery import clients, topic_admin
from gpustream.serve import Component
from producers.cluster.component import ClusterProducer
from producers.cluster.config import ClusterSettings
from producers.node.component import NodeProducer
from producers.node.config import NodeSettings
from producers.simulated.component import SimulatedFleet
from producers.simulated.config import SimulatedSettings
from sinks.alertmanager import AlertmanagerSink
from sinks.remote_write.config import RemoteWriteSettings
from sinks.remote_write.sink import RemoteWriteSink
from sinks.scrape.config import ScrapeSettings
from sinks.scrape.sink import ScrapeSink
from sinks.settings import AlertmanagerSettings, WebhookSettings
from sinks.webhook import WebhookSink
from streams.alerts.component import Alerts
from streams.attribution.component import Attribution
from streams.settings import AlertSettings, AttributionSettings
from tests.eventually import eventually
from tests.real.conftest import need
from tests.real.pipeline import running
from tests.real.servers import KafkaServer, find_java, find_kafka
from tests.real.test_topics import compare

NOWHERE = "http://127.0.0.1:1"

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: nowhere
contexts: [{name: nowhere, context: {cluster: nowhere, user: nobody}}]
clusters: [{name: nowhere, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: nobody, user: {}}]
"""


@pytest.fixture(scope="module")
def broker_that_creates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A broker that makes a topic when it is asked for."""
    need(find_java, find_kafka)
    settings = {"auto.create.topics.enable": "true"}
    with KafkaServer(tmp_path_factory.mktemp("kafka"), settings=settings, heap="256m") as server:
        yield server


@pytest.fixture
def creating(broker_that_creates: KafkaServer) -> KafkaServer:
    """Without topics."""
    broker_that_creates.empty()
    return broker_that_creates


def components(kafka: str, kubeconfig: Path) -> list[Component]:
    """One of each. What the fleet has for topics that are missing is not waited for."""
    kubeconfig.write_text(KUBECONFIG)
    fleet = SimulatedFleet(SimulatedSettings(kafka=kafka, fleet="2x1", interval_s=0.1))
    fleet.drain_s = 0.1
    return [
        NodeProducer(NodeSettings(kafka=kafka, node="n", pod_resources_socket=None)),
        ClusterProducer(ClusterSettings(kafka=kafka, kubeconfig=kubeconfig, lease=None)),
        fleet,
        Attribution(AttributionSettings(kafka=kafka)),
        Alerts(AlertSettings(kafka=kafka)),
        RemoteWriteSink(RemoteWriteSettings(kafka=kafka, url=NOWHERE)),
        ScrapeSink(ScrapeSettings(kafka=kafka, scrape_listen=None, from_="earliest")),
        AlertmanagerSink(AlertmanagerSettings(kafka=kafka, urls=(NOWHERE,))),
        WebhookSink(WebhookSettings(kafka=kafka, url=NOWHERE, unsigned=True)),
    ]


def waits_for_topics(component: Component) -> bool:
    """Whether it reports the missing topics and the command to run."""
    return any("is missing" in line and "`gpustream topics create`" in line for line in component.not_ready())


async def test_a_client_that_uses_a_topic_by_name_does_not_make_it(creating: KafkaServer) -> None:
    consumer = clients.consumer(creating.connection)
    await consumer.start()
    try:
        consumer.subscribe(["gpu.samples"])
        await consumer._client.force_metadata_update()
        assert creating.topics() == {}
    finally:
        await consumer.stop()


async def test_asking_for_a_topic_does_not_create_it(creating: KafkaServer) -> None:
    found_mismatches = await compare(creating.address)

    assert {mismatch.have for mismatch in found_mismatches} == {"missing"}
    assert creating.topics() == {}


async def test_nothing_makes_a_topic_and_all_goes_on_once_they_are_created(
    creating: KafkaServer, tmp_path: Path
) -> None:
    for component in components(creating.address, tmp_path / "kubeconfig"):
        async with running(component):
            await eventually(partial(waits_for_topics, component))
    assert creating.topics() == {}

    all_components = components(creating.address, tmp_path / "kubeconfig")
    scrape = next(component for component in all_components if isinstance(component, ScrapeSink))
    async with running(*all_components):
        await eventually(lambda: all(map(waits_for_topics, all_components)))
        assert creating.topics() == {}
        await topic_admin.create(creating.connection, partitions=2, replication_factor=1)
        await eventually(lambda: not any(map(waits_for_topics, all_components)) and len(scrape.series()) >= 2)
    assert set(creating.topics().values()) == {2}
