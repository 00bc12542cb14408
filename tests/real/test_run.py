"""``topics create``, ``topics list`` and ``run`` against Apache Kafka and Prometheus."""

import subprocess
import sys

import msgspec

from tests.real.servers import KafkaServer, PrometheusServer


def _gpustream(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gpustream", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_run_on_a_kafka_of_ones_own_is_counted_by_prometheus(
    empty_kafka: KafkaServer, prometheus: PrometheusServer
) -> None:
    kafka = ("--kafka", empty_kafka.address)
    assert _gpustream("topics", "list", *kafka).returncode == 1
    assert "topics create" in _gpustream("run", "--simulate", "2x4", *kafka, "--listen", "off").stderr

    created = _gpustream("topics", "create", *kafka, "--partitions", "4", "--replication-factor", "1")
    assert created.returncode == 0, created.stderr
    assert _gpustream("topics", "list", *kafka).returncode == 0

    off = ("--listen", "off", "--scrape-listen", "127.0.0.1:0", "--cluster", "one-process")
    ended = ("--duration", "6s", "--summary", "json")
    url = ("--remote-write", prometheus.write_url)
    run = _gpustream("run", "--simulate", "2x4", *kafka, *off, *url, *ended)

    assert run.returncode == 0, run.stderr
    summary = msgspec.json.decode(run.stdout)
    assert summary["lost"] == summary["dropped"] == summary["dead_lettered"] == 0
    assert summary["attributed"]["exact"] == summary["ticks"] >= 10
    assert summary["delivered"] == {"scrape": summary["samples"], "remote_write": summary["samples"]}
    assert _stored(prometheus) == summary["ticks"]


def _stored(prometheus: PrometheusServer) -> int:
    """Ticks that Prometheus has: the distinct times of a series that each tick of a node has once per GPU 0."""
    query = 'sum(count_over_time(gpu_power_draw{k8s_cluster_name="one-process",gpu_index="0",gpu_mig_uuid=""}[5m]))'
    (row,) = prometheus.query(query)
    return int(row.value)
