"""docker-compose.yml without Docker: its commands and its Prometheus as processes, and what the dashboard shows."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.eventually import eventually_sync
from tests.k8s import dashboard
from tests.k8s.dashboard import Query
from tests.real.conftest import need
from tests.real.pipeline import Gpustream
from tests.real.servers import KafkaServer, PrometheusServer, Series, find_java, find_kafka, find_prometheus
from tests.test_compose import OURS, config

STAYING = ("producer", "attribution", "remote-write")
GPUS = 4 * 8

ALL = {"cluster": ".*", "namespace": ".*", "node": ".*", "idle": "5s", "__rate_interval": "8s"}
"""The variables as Grafana fills them for All, on a fleet that is seconds old."""

NOT_IN_COMPOSE = {"Ticks per second-E": "no scrape sink runs", "Ticks that wait-D": "no scrape sink runs"}
EMPTY_IS_GOOD = {
    "GPUs to look at-A": "a fleet without faults",
    "Alerts-A": "no alert fires",
    "Lost, refused, late-A": "no tick was dropped",
    "Lost, refused, late-B": "all was decoded",
    "Lost, refused, late-D": "nothing was refused",
    "Lost, refused, late-E": "every tick is exact",
}
OR_ZERO = " or vector(0)"
ANSWERED = [query for query in dashboard.queries() if str(query) not in NOT_IN_COMPOSE | EMPTY_IS_GOOD]


class ComposePrometheus(PrometheusServer):
    """Prometheus in the configuration of the compose file, with the processes' addresses for the services' names."""

    def __init__(self, directory: Path, targets: Sequence[str]) -> None:
        super().__init__(directory)
        self.targets = list(targets)

    def prepare(self) -> None:
        """Writes the configuration, with everything looked at each second and no Alertmanager."""
        settings: dict[str, Any] = config("prometheus")
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings["rule_files"] = [str(dashboard.PROMETHEUS / name) for name in settings["rule_files"]]
        del settings["alerting"]
        (job,) = settings["scrape_configs"]
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": self.targets}]
        (self.directory / "prometheus.yml").write_text(yaml.safe_dump(settings))

    def rules(self) -> list[dict[str, Any]]:
        """Every rule, with its health and its state."""
        with urllib.request.urlopen(f"{self.url}/api/v1/rules", timeout=10) as answer:  # noqa: S310 - http, and ours
            groups = json.load(answer)["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


class Composed(NamedTuple):
    """What runs: the processes of the compose file that stay, and Prometheus."""

    processes: dict[str, Gpustream]
    prometheus: ComposePrometheus

    def answer(self, query: Query, labels: Iterable[str] = ()) -> list[Series]:
        """What the query gives for everything, as soon as one series has all these labels."""
        expr, wanted = dashboard.filled(query.expr, ALL), set(labels)

        def found() -> list[Series]:
            every = self.prometheus.query(expr)
            return every if any(wanted <= series.labels.keys() for series in every) else []

        return eventually_sync(found, f"{query} has {wanted or 'an answer'}")


class Network:
    """The names of the compose file's network, as addresses of this machine."""

    def __init__(self, kafka: KafkaServer, prometheus: PrometheusServer) -> None:
        self._addresses = {"kafka:29092": kafka.address, "http://prometheus:9090": prometheus.url}

    def arguments(self, service: str) -> list[str]:
        """The service's command."""
        return [self._here(word) for word in OURS[service]["command"]]

    def environment(self, service: str) -> dict[str, str]:
        """What the service is given as environment."""
        return {name: self._here(value) for name, value in OURS[service]["environment"].items()}

    def _here(self, text: str) -> str:
        for name, address in self._addresses.items():
            text = text.replace(name, address)
        return text


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    """The compose file's fleet on its way into its Prometheus."""
    need(find_java, find_kafka, find_prometheus)
    folder = tmp_path_factory.mktemp("composed")
    processes = {name: Gpustream(folder / name) for name in STAYING}
    targets = [f"127.0.0.1:{process.ports[0].number}" for process in processes.values()]
    with ExitStack() as running:
        kafka = running.enter_context(KafkaServer(folder / "kafka", heap="256m"))
        prometheus = running.enter_context(ComposePrometheus(folder / "prometheus", targets))
        network = Network(kafka, prometheus)
        create_topics(network)
        for name, process in processes.items():
            process.arguments, process.environment = network.arguments(name), network.environment(name)
            running.enter_context(process)
        yield Composed(processes, prometheus)


def create_topics(network: Network) -> None:
    """Runs the service `topics` to its end."""
    command = [sys.executable, "-m", "gpustream", *network.arguments("topics")]
    environment = os.environ | network.environment("topics")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


OF_A_KNOWN_POD = {"k8s_workload_kind", "k8s_workload_name"}
"""What a pod lacks in its first two seconds, before what the API server says of it counts."""


@pytest.mark.parametrize("query", ANSWERED, ids=str)
def test_a_panel_shows_the_fleet(composed: Composed, query: Query) -> None:
    grouped = re.match(r"\w+ by \(([^)]+)\)", query.expr)
    by = frozenset(grouped[1].split(", ")) if grouped else frozenset[str]()
    found = composed.answer(query._replace(expr=query.expr.removesuffix(OR_ZERO)), by)
    if by:
        assert {frozenset(series.labels) for series in found} <= {by, by - OF_A_KNOWN_POD}


@pytest.mark.parametrize("query", dashboard.label_queries(), ids=str)
def test_a_variable_has_values(composed: Composed, query: Query) -> None:
    values = {series.labels.get(query.ref) for series in composed.answer(query)}
    assert values - {None}


def test_no_query_is_left_out() -> None:
    named = {str(query) for query in dashboard.queries()}
    assert named >= NOT_IN_COMPOSE.keys() | EMPTY_IS_GOOD.keys()
    assert len(ANSWERED) == len(dashboard.queries()) - len(NOT_IN_COMPOSE) - len(EMPTY_IS_GOOD)


@pytest.mark.parametrize("name", NOT_IN_COMPOSE)
def test_a_sink_that_does_not_run_is_no_mistake_of_the_query(composed: Composed, name: str) -> None:
    (query,) = [query for query in dashboard.queries() if str(query) == name]
    assert composed.prometheus.query(dashboard.filled(query.expr, ALL)) == []
    instead = query.expr.replace("gpustream_scrape_", "gpustream_remote_write_")
    assert composed.answer(query._replace(expr=instead))


@pytest.mark.parametrize("name", EMPTY_IS_GOOD)
def test_what_is_empty_in_a_good_fleet_is_a_query_all_the_same(composed: Composed, name: str) -> None:
    (query,) = [query for query in dashboard.queries() if str(query) == name]
    found = composed.prometheus.query(dashboard.filled(query.expr, ALL))
    assert len(found) == query.expr.endswith(OR_ZERO)


def test_gpus_to_look_at_would_be_found(composed: Composed) -> None:
    (query,) = [query for query in dashboard.queries() if query.panel == "GPUs to look at"]
    anything = query.expr.replace(" > 0", " >= 0")
    assert anything.count(" >= 0") == anything.count("label_replace(")
    findings = {series.labels["finding"] for series in composed.answer(query._replace(expr=anything))}
    assert findings == set(re.findall(r'"finding", "([^"]+)"', anything))


def test_the_dashboard_counts_the_fleet(composed: Composed) -> None:
    composed.prometheus.wait_until(lambda: shown(composed, "GPUs") == GPUS)
    assert 0 < shown(composed, "Held") < GPUS
    assert 0 < shown(composed, "Utilization of what is held") < 1


def test_a_filter_leaves_one_node(composed: Composed) -> None:
    chosen = {"cluster": "compose", "node": "sim-0001"}
    composed.prometheus.wait_until(lambda: shown(composed, "GPUs", **chosen) == GPUS / 4)
    assert shown(composed, "GPUs", **chosen, namespace="none") == 0


def shown(composed: Composed, panel: str, **chosen: str) -> float:
    """What a panel with one number shows, with these variables chosen."""
    (query,) = [query for query in dashboard.queries() if query.panel == panel]
    found = composed.prometheus.query(dashboard.filled(query.expr, ALL | chosen))
    return found[0].value if found else 0.0


def test_every_rule_is_evaluated_and_no_alert_is_raised_by_a_fleet_that_is_well(composed: Composed) -> None:
    composed.prometheus.wait_until(lambda: {rule["health"] for rule in composed.prometheus.rules()} == {"ok"})
    assert [rule["name"] for rule in composed.prometheus.rules() if rule["state"] == "firing"] == []


def test_a_component_that_ends_is_seen(composed: Composed) -> None:
    composed.processes["producer"].stop()
    down = next(rule for rule in composed.prometheus.rules() if rule["name"] == "GpustreamDown")
    composed.prometheus.wait_until(lambda: bool(composed.prometheus.query(down["query"])))
    (silent,) = composed.prometheus.query(down["query"])
    assert silent.labels["instance"] == composed.prometheus.targets[STAYING.index("producer")]
