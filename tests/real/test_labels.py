"""Common label settings on a real Prometheus: the results of queries by pod, compared with the truth."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.real.servers import PrometheusServer

pytestmark = pytest.mark.real

Row = dict[str, Any]
Pod = tuple[str, str]

MIB = 1 << 20

BY_POD = 'max by (node, pod, namespace) (dcgm_gpu_utilization{cluster="CLUSTER",region="eu"})'
"""The part of the usual autoscaling rule that asks for GPUs."""

ATTEMPTS = 5
"""On a busy machine the pods of a node may be known too late for its ticks. Then another fleet is run."""


class Filled(NamedTuple):
    """The run of a fleet with shared and MIG devices: its cluster, its truth, and its summary."""

    cluster: str
    truth: list[Row]
    summary: dict[str, Any]

    @property
    def last(self) -> list[Row]:
        """The truth of each node's last tick."""
        newest: dict[str, int] = {}
        for row in self.truth:
            newest[row["node"]] = max(row["seq"], newest.get(row["node"], 0))
        return [row for row in self.truth if row["seq"] == newest[row["node"]]]


def fill(prometheus: PrometheusServer, directory: Path, cluster: str, *options: str) -> Filled:
    """Run a fleet of which every tick is attributed exactly."""
    for attempt in range(ATTEMPTS):
        filled = run(prometheus, directory / f"truth-{attempt}.jsonl", f"{cluster}-{attempt}", *options)
        if filled.summary["attributed"]["exact"] == filled.summary["ticks"]:
            return filled
    pytest.fail(f"in each of {ATTEMPTS} runs pods were known too late")


def run(prometheus: PrometheusServer, truth: Path, cluster: str, *options: str) -> Filled:
    arguments: list[str | Path] = ["run", "--simulate", "5x8", "--pod-life", "2h", "--truth", truth, "--duration", "6s"]
    arguments += ["--remote-write", prometheus.write_url, "--summary", "json"]
    arguments += ["--scrape-listen", "off", "--page-listen", "off", "--listen", "off"]
    command = [sys.executable, "-m", "gpustream", *arguments, "--cluster", cluster, "--names", "dcgm-legacy", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in truth.read_text().splitlines()]
    return Filled(cluster, rows, json.loads(result.stdout.splitlines()[-1]))


def pods_of(rows: list[Row]) -> set[Pod]:
    return {(holder["namespace"], holder["pod"]) for row in rows for holder in row["reported"]}


def pods_seen(prometheus: PrometheusServer, expr: str, at_ms: int) -> set[Pod]:
    label_sets = [series.labels for series in prometheus.query(expr, at_ms)]
    return {(labels["namespace"], labels["pod"]) for labels in label_sets if "pod" in labels}


def sums(prometheus: PrometheusServer, expr: str, at_ms: int) -> Mapping[str, float]:
    return {series.labels["uuid"]: float(series.value) for series in prometheus.query(expr, at_ms)}


def test_a_query_by_pod_sees_every_pod_and_sums_over_a_device_stay_the_devices(
    prometheus: PrometheusServer, tmp_path: Path
) -> None:
    """Preset and external label on the way: so the labels are those that the usual rule asks for."""
    options = ["--parts-by-pod", "--relabel", "preset:kubernetes", "--external-label", "region=eu"]
    fleet = fill(prometheus, tmp_path, "by-pod", *options)
    at_ms = max(row["ts_ms"] for row in fleet.last)
    pods = pods_of(fleet.last)
    held_pods = {
        (holder["namespace"], holder["pod"])
        for row in fleet.last
        for holder in row["reported"]
        if row["uuid"].startswith("GPU-") and len({(h["namespace"], h["pod"]) for h in row["reported"]}) == 1
    }
    assert len(held_pods) < len(pods) * 2 / 3, "the fleet has to have shared and MIG devices"

    by_pod = BY_POD.replace("CLUSTER", fleet.cluster)
    assert pods_seen(prometheus, by_pod, at_ms) == pods
    assert pods_seen(prometheus, by_pod.replace("utilization", "temp"), at_ms) == held_pods, "what is not divided"

    row_by_uuid = {row["uuid"]: row for row in fleet.last}
    used = sums(prometheus, f'sum by (uuid) (dcgm_fb_used{{cluster="{fleet.cluster}"}})', at_ms)
    assert used == {
        uuid: pytest.approx(row["memory_used_bytes"] / MIB)
        for uuid, row in row_by_uuid.items()
        if row["memory_used_bytes"] is not None
    }
    busy = sums(prometheus, f'sum by (uuid) (dcgm_gpu_utilization{{cluster="{fleet.cluster}"}})', at_ms)
    ratio_by_uuid = {
        uuid: row["utilization_ratio"] for uuid, row in row_by_uuid.items() if row["utilization_ratio"] is not None
    }
    assert {uuid: value for uuid, value in busy.items() if uuid in ratio_by_uuid} == {
        uuid: pytest.approx(100 * ratio) for uuid, ratio in ratio_by_uuid.items()
    }
    assert all(uuid.startswith("MIG-") for uuid in busy.keys() - ratio_by_uuid.keys())
    assert fleet.summary["lost"] == fleet.summary["dropped"] == fleet.summary["dead_lettered"] == 0


def test_series_that_rules_make_the_same_are_written_once(prometheus: PrometheusServer, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(
        """
metric_relabel_configs:
- {source_labels: [__name__], regex: dcgm_gpu_utilization|dcgm_power_usage, action: keep}
- {source_labels: [pod_name], regex: (.+), target_label: exported_pod}
- {regex: pod_name|pod_namespace|container_name|uuid|gpu, action: labeldrop}
"""
    )
    fleet = fill(prometheus, tmp_path, "merged", "--relabel", str(rules))
    assert fleet.summary["lost"] == fleet.summary["dropped"] == fleet.summary["dead_lettered"] == 0

    of_ticks: dict[tuple[str, int], set[str | None]] = defaultdict(set)
    for row in [row for row in fleet.truth if row["uuid"].startswith("GPU-")]:
        pods = {holder["pod"] for holder in row["reported"]}
        of_ticks[row["node"], row["seq"]].add(pods.pop() if len(pods) == 1 else None)
    of_fleet = f'{{cluster="{fleet.cluster}"}}'
    names = [series.labels for series in prometheus.query(f"sum by (__name__, node, exported_pod) ({of_fleet})")]
    assert {name_labels["__name__"] for name_labels in names} == {"dcgm_power_usage", "dcgm_gpu_utilization"}
    expected = {(node, pod) for (node, _), pods in of_ticks.items() for pod in pods}
    pods_by_node = {
        (name_labels["node"], name_labels.get("exported_pod"))
        for name_labels in names
        if name_labels["__name__"] == "dcgm_power_usage"
    }
    assert pods_by_node <= expected
    (stored,) = prometheus.query(f"sum(count_over_time(dcgm_power_usage{of_fleet}[5m]))")
    assert int(stored.value) == sum(len(pods) for pods in of_ticks.values())
