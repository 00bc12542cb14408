"""``topics create``, ``topics list`` and ``run`` against Apache Kafka and Prometheus."""

import subprocess
import sys

import msgspec

from tests.real.servers import KafkaServer, PrometheusServer


def _gpustream(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gpustream", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_run_on_a_kafka_of_ones_own_is_counted_by_prometheus(
    oldest_kafka: KafkaServer, prometheus: PrometheusServer
) -> None:
    """The oldest: on the newest each part runs in a test of its own."""
    oldest_kafka.empty()
    kafka = ("--kafka", oldest_kafka.address)
    assert _gpustream("topics", "list", *kafka).returncode == 1
    assert "topics create" in _gpustream("run", "--simulate", "2x4", *kafka, "--listen", "off").stderr

    created = _gpustream("topics", "create", *kafka, "--partitions", "4", "--replication-factor", "1")
    assert created.returncode == 0, created.stderr
    assert _gpustream("topics", "list", *kafka).returncode == 0

    off = ("--listen", "off", "--scrape-listen", "127.0.0.1:0", "--page-listen", "off", "--cluster", "own-kafka")
    duration = ("--duration", "4s", "--summary", "json")
    url = ("--remote-write", prometheus.write_url)
    run = _gpustream("run", "--simulate", "2x4", *kafka, *off, *url, *duration)

    assert run.returncode == 0, run.stderr
    summary = msgspec.json.decode(run.stdout)
    assert summary["lost"] == summary["dropped"] == summary["dead_lettered"] == 0
    assert summary["attributed"]["exact"] == summary["ticks"] >= 6
    assert summary["delivered"] == {"scrape": summary["samples"], "remote_write": summary["samples"]}
    assert _stored(prometheus, "own-kafka") == summary["ticks"]


def _stored(prometheus: PrometheusServer, cluster: str) -> int:
    """Ticks that Prometheus has: the distinct times of a series that each tick of a node has once per GPU 0."""
    chosen = f'k8s_cluster_name="{cluster}",gpu_index="0",gpu_mig_uuid=""'
    (row,) = prometheus.query(f"sum(count_over_time(gpu_power_draw{{{chosen}}}[5m]))")
    return int(row.value)
