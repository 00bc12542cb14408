"""The answers of a simulated fleet's truth to the questions of docs/consumers, computed without those programs."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

IDLE_BELOW = 0.05
SURELY_IDLE_S = 10.0
LONGEST_TICK_MS = 10_000

Row = dict[str, Any]
Sums = dict[tuple[str, str, str], float]
"""By namespace, workload and "GPU" or "MIG"."""


def parents(truth: list[Row]) -> set[str]:
    """The GPUs in MIG mode: of them alone a simulated fleet never knows the utilization, MIG devices apart."""
    has_parts: dict[str, bool] = defaultdict(bool)
    for row in truth:
        has_parts[row["uuid"]] |= row["utilization_ratio"] is not None
    return {uuid for uuid, is_known in has_parts.items() if uuid.startswith("GPU-") and not is_known}


def devices(truth: list[Row]) -> list[Row]:
    """The readings of what can be held: of a GPU in MIG mode, those of its MIG devices."""
    in_mig_mode = parents(truth)
    assert in_mig_mode
    return [row for row in truth if row["uuid"] not in in_mig_mode]


def with_parts(truth: list[Row], ticks: list[Row]) -> list[Row]:
    """The truth with what each pod that was reported used of a device, by the processes that were sampled with it.

    Before the API server reports the pods, it is not known whose processes those are: the parts are equal.
    """
    rows_by_device = {
        (tick["node"], tick["run_id"], tick["seq"], device["uuid"]): device
        for tick in ticks
        for device in tick["devices"]
    }
    sampled = [rows_by_device[row["node"], row["run_id"], row["seq"], row["uuid"]] for row in truth]
    return [{**row, "parts": _parts(row, device)} for row, device in zip(truth, sampled, strict=True)]


def _parts(row: Row, device: Row) -> dict[tuple[str, str], float]:
    if any("pod_uid" not in holder for holder in device.get("holders", [])):
        return {pod: (row["utilization_ratio"] or 0.0) / len(pods(row)) for pod in pods(row)}
    used: dict[str, float] = defaultdict(float)
    for process in device["processes"]:
        used[process["pod_uid"]] += process.get("sm_utilization_ratio", 0.0)
    total_ratio, total = row["utilization_ratio"] or 0.0, sum(used.values())
    share = total_ratio / total if total > total_ratio else 1.0
    return {(pod["namespace"], pod["pod"]): share * used[pod["pod_uid"]] for pod in row["reported"]}


def pods(row: Row) -> dict[tuple[str, str], str]:
    """The pods that were reported to hold a device, and their workloads."""
    return {(h["namespace"], h["pod"]): f"{h['workload']['kind']}/{h['workload']['name']}" for h in row["reported"]}


def workloads(truth: list[Row]) -> dict[tuple[str, str], str]:
    """The true workload of each pod, by the name that it has until the API server knows it: Pod/NAME."""
    return {(ns, f"Pod/{pod}"): workload for row in truth for (ns, pod), workload in pods(row).items()}


def with_workloads(truth: list[Row], actual: Mapping[tuple[str, str, str], float]) -> Sums:
    """The sums by the true workloads of the pods."""
    workload_of = workloads(truth)
    sums: Sums = defaultdict(float)
    for (namespace, workload, device), value in actual.items():
        kind = "GPU" if device == "GPU" else "MIG"
        sums[namespace, workload_of.get((namespace, workload), workload), kind] += value
    return dict(sums)


def true_sums(truth: list[Row], seconds: Callable[[Row], float]) -> Sums:
    """A device's time by namespace and workload, divided by the pods that held it."""
    sums: Sums = defaultdict(float)
    for row in devices(truth):
        holding = pods(row) or {("(nobody)", ""): ""}
        for (namespace, _), workload in holding.items():
            sums[namespace, workload, row["uuid"][:3]] += seconds(row) / len(holding)
    return {key: value for key, value in sums.items() if value}


def true_use(truth: list[Row], seconds: Callable[[Row], float]) -> Sums:
    """How much of a device's time was used, by namespace and workload: each pod's part of it."""
    sums: Sums = defaultdict(float)
    for row in devices(truth):
        holding = pods(row) or {("(nobody)", ""): ""}
        for pod, workload in holding.items():
            used = row["parts"].get(pod, row["utilization_ratio"] or 0.0)
            sums[pod[0], workload, row["uuid"][:3]] += seconds(row) * used
    return {key: value for key, value in sums.items() if value}


def elapsed(truth: list[Row]) -> Callable[[Row], float]:
    """The time since the node's last tick; zero for the first, and after a gap."""
    times: dict[str, list[int]] = {}
    for node in {row["node"] for row in truth}:
        times[node] = sorted({row["ts_ms"] for row in truth if row["node"] == node})
    before = {(node, b): a for node, all_of in times.items() for a, b in pairwise(all_of)}

    def seconds(row: Row) -> float:
        since_ms: int = row["ts_ms"] - before.get((row["node"], row["ts_ms"]), row["ts_ms"])
        return since_ms / 1000 if since_ms <= LONGEST_TICK_MS else 0.0

    return seconds


def last_ticks(truth: list[Row]) -> dict[str, int]:
    """When each node was last read."""
    return {row["node"]: row["ts_ms"] for row in sorted(truth, key=lambda row: row["ts_ms"])}


def idle_since(truth: list[Row]) -> dict[tuple[str, str, str, int], int]:
    """Since when the idle pods of each node's last tick have been idle: by node, device, pod and time of that tick."""
    last, by_device = last_ticks(truth), defaultdict(list)
    for row in sorted(truth, key=lambda row: -row["ts_ms"]):
        by_device[row["node"], row["uuid"]].append(row)
    since_ms = {}
    for (node, uuid), rows in by_device.items():
        since = None
        for row in rows:
            used = row["utilization_ratio"] is None or row["utilization_ratio"] >= IDLE_BELOW
            if used or pods(row).keys() != pods(rows[0]).keys():
                break
            since = row["ts_ms"]
        if since is not None:
            since_ms.update({(node, uuid, pod, last[node]): since for _, pod in pods(rows[0])})
    return since_ms


def surely_idle(truth: list[Row]) -> set[tuple[str, str, str, int]]:
    """What has been idle for so long that every reader that ran for a while knows it."""
    return {key for key, since in idle_since(truth).items() if key[3] - since >= SURELY_IDLE_S * 1000}


def surely_idle_pods(truth: list[Row]) -> set[tuple[str, str]]:
    """Devices and pods that were idle in the truth all the time, to the end."""
    last, idle = last_ticks(truth), idle_since(truth)
    busy = {
        (row["uuid"], pod)
        for row in truth
        for _, pod in pods(row)
        if row["utilization_ratio"] is None or row["utilization_ratio"] >= IDLE_BELOW
    }
    return {(uuid, pod) for node, uuid, pod, at_ms in idle if at_ms == last[node]} - busy
