"""Fixtures of the real servers. A test here is marked `real`, and skipped, loudly, if its server can't be had.

With GPUSTREAM_REQUIRE_REAL=1 a server that can't be had is a failure; only Prometheus 2.42 is optional. Servers that
tests share end with the last test of this folder: all other tests come after them.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, groupby
from pathlib import Path

import pytest
from aiohttp import web

from producers.simulated import component as simulated
from tests.real import receivers
from tests.real.certificates import Authority
from tests.real.kubernetes import ApiServer, find_etcd, find_kube_apiserver
from tests.real.pipeline import Gpustream
from tests.real.servers import (
    AlertmanagerServer,
    KafkaCluster,
    KafkaServer,
    Missing,
    PrometheusServer,
    find_alertmanager,
    find_java,
    find_kafka,
    find_oldest_kafka,
    find_openssl,
    find_prometheus,
    find_prometheus_2,
)

FOLDER = Path(__file__).parent

os.environ.setdefault("GOGC", "400")
"""Servers and tools written in Go collect their garbage less often: a fifth less CPU, for some hundred MB."""

LONGEST_FIRST = (
    "test_cluster",
    "test_soak",
    "test_alert_sinks",
    "test_exhausted",
    "test_cluster_transport",
    "test_sharing",
    "test_node",
    "test_alerts",
    "test_dashboards",
    "test_reclaim",
    "test_doctor",
    "test_reader",
    "test_manifests",
    "test_installing",
    "test_acls",
    "test_auto_created_topics",
    "test_consumers",
    "test_alert_path",
    "test_servers",
    "test_simulated",
    "test_dead_letters",
    "test_run",
    "test_autoscaling",
    "test_scrape",
    "test_path",
)
"""The files that take the longest. They wait more than they compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test below this folder, and runs them before all others, the longest files first, and after them the
    files that have slow tests: what is short fills the gaps that they leave, and no worker has a long file at the end.

    What a server that is killed leaves open depends on the moment: it is reported with its test, and fails nothing.
    """
    files = [(path, list(tests)) for path, tests in groupby(items, key=lambda item: item.path)]
    turns: dict[Path, int] = {}
    for path, tests in files:
        if FOLDER in path.parents:
            _mark(tests)
            turns[path] = _turn(path)
        elif any(item.get_closest_marker("slow") for item in tests):
            turns[path] = len(LONGEST_FIRST) + 1
    files.sort(key=lambda file: turns.get(file[0], len(LONGEST_FIRST) + 2))
    items[:] = chain.from_iterable(tests for _, tests in files)


def _mark(ours: list[pytest.Item]) -> None:
    """Marks the tests of one file."""
    file = ours[0].getparent(pytest.Module) or ours[0]
    file.add_marker(pytest.mark.real)
    file.add_marker(pytest.mark.filterwarnings("always::ResourceWarning"))
    for item in ours:
        if why := receivers.why_not(item.name):
            item.add_marker(pytest.mark.skip(f"{receivers.chosen().__name__}: {why}"))


def _turn(path: Path) -> int:
    return LONGEST_FIRST.index(path.stem) if path.stem in LONGEST_FIRST else len(LONGEST_FIRST)


def need(*finders: Callable[[], Path]) -> None:
    """Skips the test if a program is missing, or fails it if real servers are required."""
    for find in finders:
        try:
            find()
        except Missing as missing:
            if os.environ.get("GPUSTREAM_REQUIRE_REAL") == "1":
                pytest.fail(f"GPUSTREAM_REQUIRE_REAL=1, but {missing}")
            pytest.skip(f"REAL SERVER MISSING: {missing}")


@pytest.fixture(autouse=True)
def patient_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated fleet that ends by itself waits until Kafka has all of it, however busy the machine is."""
    monkeypatch.setattr(simulated, "DRAIN_S", 60.0)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Signs the certificates of ``kafka``, and those of clients that a test wants it to believe."""
    need(find_openssl)
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="package")
def kafka(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[KafkaServer]:
    """One Apache Kafka for all tests here: never stop it, and use your own topics and users, or ``empty_kafka``."""
    need(find_java, find_kafka)
    with KafkaServer(tmp_path_factory.mktemp("kafka"), authority=authority) as server:
        yield server


@pytest.fixture
def empty_kafka(kafka: KafkaServer) -> KafkaServer:
    """That Apache Kafka without topics and consumer groups."""
    kafka.empty()
    return kafka


@pytest.fixture
def start_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., KafkaServer]]:
    """Starts brokers of the test's own, to be killed: ``start_kafka(settings={...}, authority=authority)``."""
    need(find_java, find_kafka)
    with ExitStack() as servers:

        def start(**options: object) -> KafkaServer:
            return servers.enter_context(KafkaServer(tmp_path_factory.mktemp("kafka"), **options))  # type: ignore[arg-type]

        yield start


@pytest.fixture(scope="package")
def oldest_kafka(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[KafkaServer]:
    """One Apache Kafka of the oldest version that gpustream is tried on."""
    need(find_java, find_oldest_kafka)
    directory = tmp_path_factory.mktemp("oldest-kafka")
    with KafkaServer(directory, authority=authority, libs=find_oldest_kafka(), heap="256m") as server:
        yield server


@pytest.fixture
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[KafkaCluster]:
    """Three brokers of the test's own, to be killed; they take 6 s and 1 GB."""
    need(find_java, find_kafka)
    with KafkaCluster(tmp_path_factory.mktemp("kafka"), authority=authority) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """One Prometheus 3 for all tests here: never stop it, and write under your own cluster name.

    If $GPUSTREAM_RECEIVER names another receiver, it is that.
    """
    need(find_prometheus)
    with receivers.chosen()(tmp_path_factory.mktemp("prometheus")) as server:
        yield server


@pytest.fixture
def start_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., PrometheusServer]]:
    """Starts servers of the test's own, to be killed: ``start_prometheus(options=["--..."])``."""
    need(find_prometheus)
    with ExitStack() as servers:

        def start(**options: object) -> PrometheusServer:
            directory = tmp_path_factory.mktemp("prometheus")
            return servers.enter_context(PrometheusServer(directory, **options))  # type: ignore[arg-type]

        yield start


@pytest.fixture(scope="package")
def prometheus_2_42(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """A Prometheus that takes remote write 1.0 only; optional, so that its absence is always a skip."""
    try:
        program = find_prometheus_2()
    except Missing as missing:
        pytest.skip(f"OPTIONAL REAL SERVER MISSING: {missing}")
    with PrometheusServer(tmp_path_factory.mktemp("prometheus-2"), program=program) as server:
        yield server


@pytest.fixture
def start_alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., AlertmanagerServer]]:
    """Starts servers of the test's own, to be killed: ``start_alertmanager(webhook="http://...")``."""
    need(find_alertmanager)
    with ExitStack() as servers:

        def start(**options: object) -> AlertmanagerServer:
            directory = tmp_path_factory.mktemp("alertmanager")
            return servers.enter_context(AlertmanagerServer(directory, **options))  # type: ignore[arg-type]

        yield start


@pytest.fixture(scope="package")
def kube_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One Kubernetes API for all tests here: never stop it, and use namespaces and nodes of your own."""
    need(find_etcd, find_kube_apiserver, find_openssl)
    with ApiServer(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server


@pytest.fixture
def start_kube_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ApiServer]]:
    """Starts APIs of the test's own, to be killed and emptied: ``start_kube_api(users=["producer"])``."""
    need(find_etcd, find_kube_apiserver, find_openssl)
    with ExitStack() as servers:

        def start(**options: object) -> ApiServer:
            directory = tmp_path_factory.mktemp("kubernetes")
            return servers.enter_context(ApiServer(directory, **options))  # type: ignore[arg-type]

        yield start


@pytest.fixture
async def receiver() -> AsyncIterator[str]:
    """The URL of a server that takes everything."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", _taken)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


async def _taken(_: web.Request) -> web.Response:
    return web.Response()


@pytest.fixture
def gpustream(tmp_path: Path) -> Iterator[Callable[..., Gpustream]]:
    """Makes `gpustream` processes, to be started and killed: ``gpustream("worker-a", "stream", "--kafka", ...)``."""
    with ExitStack() as processes:

        def make(name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Gpustream:
            process = Gpustream(tmp_path / name, *arguments, environment=environment)
            processes.callback(process.close)
            processes.callback(process.stop)  # it leaves its group, so that the next test need not wait for that
            return process

        yield make
