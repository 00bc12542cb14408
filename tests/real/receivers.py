"""Receivers other than Prometheus, in its place in the tests of remote write and of the dashboards.

``make receivers`` builds them and runs those tests with each. For one test, set ``GPUSTREAM_RECEIVER=mimir``. What a
receiver does otherwise than Prometheus is in its class, and the tests of that are skipped.
"""

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tests.real.process import HeldPort
from tests.real.servers import Missing, PrometheusServer, Series, real_dir

MIMIR = "mimir-3.0.5-aced80d"
CORTEX = "cortex-1.21.1"
THANOS = "thanos-0.41.0"
VICTORIA_METRICS = "victoria-metrics-1.151.0"


class Receiver(PrometheusServer):
    """A receiver that answers Prometheus' queries below ``/prometheus``.

    ``differs``: parts of the names of tests of which this one has not what they need, and why.
    """

    folder: str
    program_name: str
    differs: ClassVar[Mapping[str, str]] = {}

    def __init__(self, directory: Path) -> None:
        program = real_dir() / self.folder / self.program_name
        if not program.is_file():
            raise Missing(f"no {program}: run `make receivers`")
        super().__init__(directory, program=program)
        self.ports.append(HeldPort())

    @property
    def query_url(self) -> str:
        return f"{self.url}/prometheus"


class MimirServer(Receiver):
    """Grafana Mimir, all of it in one process, with one tenant."""

    folder, program_name, health = MIMIR, "mimir", "/ready"

    @property
    def write_url(self) -> str:
        return f"{self.url}/api/v1/push"

    def prepare(self) -> None:
        """Writes the configuration."""
        ring = {"instance_addr": "127.0.0.1", "kvstore": {"store": "inmemory"}}
        http, grpc = (port.number for port in self.ports)
        configuration = {
            "multitenancy_enabled": False,
            "usage_stats": {"enabled": False},
            "activity_tracker": {"filepath": f"{self.directory}/activity"},
            "common": {"storage": {"backend": "filesystem", "filesystem": {"dir": f"{self.directory}/common"}}},
            "blocks_storage": {
                "storage_prefix": "blocks",
                "tsdb": {"dir": f"{self.directory}/tsdb"},
                "bucket_store": {"sync_dir": f"{self.directory}/sync"},
            },
            "compactor": {"data_dir": f"{self.directory}/compactor", "sharding_ring": ring},
            "ruler_storage": {"storage_prefix": "ruler"},
            "alertmanager_storage": {"storage_prefix": "alertmanager"},
            "server": {
                "http_listen_address": "127.0.0.1",
                "http_listen_port": http,
                "grpc_listen_address": "127.0.0.1",
                "grpc_listen_port": grpc,
                "log_level": "warn",
            },
            "ingest_storage": {"enabled": False},
            "ingester": {"ring": ring | {"replication_factor": 1, "min_ready_duration": "0s"}},
            "distributor": {"ring": ring},
            "store_gateway": {"sharding_ring": ring | {"replication_factor": 1}},
            "frontend": {"address": "127.0.0.1"},
            "query_scheduler": {"ring": ring},
            "ruler": {"ring": ring},
        }
        (self.directory / "mimir.yaml").write_text(json.dumps(configuration))

    def command(self) -> Sequence[str]:
        return [str(self.program), f"-config.file={self.directory}/mimir.yaml"]


class CortexServer(Receiver):
    """Cortex, all of it in one process, with one tenant."""

    folder, program_name, health = CORTEX, "cortex", "/ready"

    @property
    def write_url(self) -> str:
        return f"{self.url}/api/v1/push"

    def prepare(self) -> None:
        """Writes the configuration."""
        store = {"kvstore": {"store": "inmemory"}}
        http, grpc = (port.number for port in self.ports)
        configuration = {
            "auth_enabled": False,
            "server": {
                "http_listen_address": "127.0.0.1",
                "http_listen_port": http,
                "grpc_listen_address": "127.0.0.1",
                "grpc_listen_port": grpc,
                "log_level": "warn",
            },
            "distributor": {"remote_writev2_enabled": True, "ring": store | {"instance_addr": "127.0.0.1"}},
            "ingester": {
                "lifecycler": {
                    "address": "127.0.0.1",
                    "min_ready_duration": "0s",
                    "final_sleep": "0s",
                    "ring": store | {"replication_factor": 1},
                }
            },
            "blocks_storage": {
                "backend": "filesystem",
                "filesystem": {"dir": f"{self.directory}/blocks"},
                "tsdb": {"dir": f"{self.directory}/tsdb"},
                "bucket_store": {"sync_dir": f"{self.directory}/sync"},
            },
            "compactor": {"data_dir": f"{self.directory}/compactor", "sharding_ring": store},
            "ruler": {"rule_path": f"{self.directory}/rules"},
            "ruler_storage": {"backend": "local", "local": {"directory": f"{self.directory}/rules"}},
            "alertmanager": {"external_url": "http://127.0.0.1/alertmanager"},
            "alertmanager_storage": {"backend": "local", "local": {"path": f"{self.directory}/alertmanager"}},
        }
        for folder in ("rules", "alertmanager"):
            (self.directory / folder).mkdir()
        (self.directory / "cortex.yaml").write_text(json.dumps(configuration))

    def command(self) -> Sequence[str]:
        return [str(self.program), f"-config.file={self.directory}/cortex.yaml"]


class ThanosServer(Receiver):
    """Thanos: what receives, and what answers queries of that."""

    folder, program_name = THANOS, "thanos"
    differs: ClassVar[Mapping[str, str]] = {"2.0": "it speaks 1.0 only"}

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.ports += [HeldPort() for _ in range(3)]

    @property
    def write_url(self) -> str:
        return f"http://{self._addresses[1]}/api/v1/receive"

    @property
    def query_url(self) -> str:
        return self.url

    def prepare(self) -> None:
        """Needs no configuration."""

    def command(self) -> Sequence[str]:
        querying, writing, receiving, receiving_grpc, querying_grpc = self._addresses
        receive = [
            f"--tsdb.path={self.directory}/data",
            '--label=receive="true"',
            f"--remote-write.address={writing}",
            f"--http-address={receiving}",
            f"--grpc-address={receiving_grpc}",
            f"--receive.local-endpoint={receiving_grpc}",
            "--tsdb.too-far-in-future.time-window=10m",  # or one sample of the future keeps out all of the present
        ]
        query = [f"--http-address={querying}", f"--grpc-address={querying_grpc}", f"--endpoint={receiving_grpc}"]
        program = str(self.program)
        both = (shlex.join([program, "receive", *receive]), shlex.join([program, "query", *query]))
        return ["bash", "-c", f"{both[0]} & {both[1]} & wait -n"]

    def ready(self) -> bool:
        """Whether a query reaches what receives."""
        return super().ready() and "receive" in (self.get("/api/v1/stores") or "")

    def _ask(self, path: str, parameters: Mapping[str, str]) -> list[Series]:
        own = {"receive", "tenant_id"}  # the labels that it gives to all series
        answer = super()._ask(path, parameters)
        return [Series({name: of.labels[name] for name in of.labels if name not in own}, of.points) for of in answer]

    @property
    def _addresses(self) -> list[str]:
        return [f"127.0.0.1:{port.number}" for port in self.ports]


class VictoriaMetricsServer(Receiver):
    """VictoriaMetrics, one node, which keeps one of several equal samples."""

    folder, program_name, health = VICTORIA_METRICS, "victoria-metrics", "/health"
    differs: ClassVar[Mapping[str, str]] = {
        "2.0": "it speaks 1.0 only",
        "test_what_is_older_than_an_hour_is_dropped": "it takes samples of any time in any order",
        "test_requests_of_several_ticks_of_a_node_whose_answers_are_lost": "it refuses no sample that it has",
        "test_a_node_far_ahead_and_one_behind_cost_the_others_nothing": "it takes samples of any time in any order",
        "gpu-device/Power/C": "its rate() is that of the samples in the range, without extrapolation",
    }

    def prepare(self) -> None:
        """Needs no configuration."""

    def command(self) -> Sequence[str]:
        return [
            str(self.program),
            f"-storageDataPath={self.directory}/data",
            f"-httpListenAddr=127.0.0.1:{self.ports[0].number}",
            "-dedup.minScrapeInterval=1ms",
            "-search.latencyOffset=0",
            "-search.disableCache",
            "-loggerLevel=WARN",
        ]

    def _ask(self, path: str, parameters: Mapping[str, str]) -> list[Series]:
        self.get("/internal/force_flush", timeout_s=10)  # what it took is found at once
        answer = super()._ask(path, parameters)  # a range selector has staleness markers, as NaN
        return [Series(of.labels, [point for point in of.points if not math.isnan(point[1])]) for of in answer]


RECEIVERS: Mapping[str, type[PrometheusServer]] = {
    "prometheus": PrometheusServer,
    "mimir": MimirServer,
    "cortex": CortexServer,
    "thanos": ThanosServer,
    "victoria-metrics": VictoriaMetricsServer,
}


def chosen() -> type[PrometheusServer]:
    """The receiver that the environment names, Prometheus if it names none."""
    return RECEIVERS[os.environ.get("GPUSTREAM_RECEIVER", "prometheus")]


def why_not(test: str) -> str | None:
    """Why a test does not hold with the chosen receiver, None if it should."""
    receiver = chosen()
    differs = receiver.differs if issubclass(receiver, Receiver) else {}
    return next((why for part, why in differs.items() if part in test), None)
