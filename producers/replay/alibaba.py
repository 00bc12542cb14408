"""The traces of https://github.com/alibaba/clusterdata, each as nodes, pods and ticks. Pure, except for reading files.

``alibaba-genai``: readings of the GPU of each serving container, every 57 s. The trace does not say which of them are
on one machine, so each is a pod on a node with one GPU of its own.
``alibaba-gpu-2023``: nodes, and pods with what they asked for and when they ran. The trace does not say on which node a
pod ran, so it gets the first node in the file that has room for it. The share that a pod asked for counts as used,
because the trace has no readings.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from producers.records import checked_name
from producers.replay.trace import JsonDict, NoTrace, Refused, Rows, Trace, TraceTick, identity, number, table
from producers.replay.trace import whole as whole_number
from topics.times import MAX_TIME_MS

NAMESPACE = "alibaba"
RESOURCE = "nvidia.com/gpu"
GENAI_INTERVAL_MS = 57_000

_DUTY, _MEMORY = "pod_gpu_duty_cycle_anon.csv", "pod_gpu_memory_used_bytes_anon.csv"
_NODES, _PODS = "openb_node_list_gpu_node.csv", "openb_pod_list_default.csv"
_MOST_BYTES = 1 << 50
_MOST_GPUS = 16
_WHOLE = 1000


def _container(pod: str, device_ids: Iterable[str]) -> JsonDict:
    row = {"namespace": NAMESPACE, "pod": pod, "container": "main", "resource": RESOURCE}
    return {**row, "device_ids": list(device_ids)}


# -- alibaba-genai


def genai(folder: Path, rows: Rows, _: int | None = None) -> Trace:
    """The readings of each container's GPU. Raises NoTrace and OSError."""
    metrics: dict[tuple[int, str], dict[str, float]] = {}

    def reading(key: str, most: float) -> "Iterator[None]":
        file, scale = (_DUTY, 100) if key == "gpu_utilization_ratio" else (_MEMORY, 1)

        def parse(_: int, seconds: str, value: str, address: str) -> None:
            ts_ms = round(number("timestamp_anon", seconds, MAX_TIME_MS // 1000) * 1000)
            if address in ("", "None", "NULL"):
                raise Refused("container_ip", "it names no container")
            read = number("value", value, most) / scale
            if key in (node_metrics := metrics.setdefault((ts_ms, _checked("container_ip", address)), {})):
                raise Refused("repeated", f"{address} at {seconds} is there already")
            node_metrics[key] = read if scale != 1 else int(read)

        return table(folder, file, ("timestamp_anon", "value", "container_ip"), parse, rows)

    for _row in itertools.chain(reading("gpu_utilization_ratio", 100), reading("memory_used_bytes", _MOST_BYTES)):
        pass
    readings = sorted(key for key, read in metrics.items() if read)
    if not readings:
        raise NoTrace(f"{folder}: no reading in {_DUTY} and {_MEMORY}")
    began: dict[str, int] = {}
    for ts_ms, address in readings:
        began.setdefault(address, ts_ms)

    def ticks() -> Iterator[TraceTick]:
        uuids = {address: f"GPU-{identity('alibaba-genai', address)}" for address in began}
        for ts_ms, address in readings:
            gpu = uuids[address]
            device = {"uuid": gpu, "index": 0, "minor": 0, "state": "ok", "metrics": metrics[ts_ms, address]}
            yield TraceTick(ts_ms, f"node-{address}", [device], [_container(f"pod-{address}", [gpu])])

    pods = {f"node-{address}": [_pod(f"pod-{address}", started_ms)] for address, started_ms in began.items()}
    return Trace(pods, ticks(), GENAI_INTERVAL_MS, readings[0][0], readings[-1][0])


def _pod(name: str, started_ms: int, ended_ms: int | None = None, labels: dict[str, str] | None = None) -> JsonDict:
    """A pod as in gpu.workloads."""
    row: JsonDict = {"namespace": NAMESPACE, "name": name, "uid": identity("pod", name), "phase": "Running"}
    row |= {"started_ms": started_ms, "labels": labels or {}, "owners": []}
    return row if ended_ms is None else {**row, "phase": "Succeeded", "ended_ms": ended_ms}


def _checked(column: str, name: str) -> str:
    """A name that can be part of a node's. Raises Refused."""
    try:
        return checked_name("node", f"node-{name}").removeprefix("node-")
    except ValueError:
        raise Refused(column, f"{column} {name[:40]!r} is not a name") from None


# -- alibaba-gpu-2023


class _PodRow(NamedTuple):
    """A pod that ran in [start_ms, end_ms), and its requests: ``milli`` thousandths of each of its GPUs."""

    line: int
    name: str
    gpus: int
    milli: int
    models: frozenset[str]
    qos: str
    start_ms: int
    end_ms: int


class PlacedPod(NamedTuple):
    """A pod on GPUs of its node, by their numbers. ``replica`` distinguishes it from others on a shared GPU."""

    pod: _PodRow
    gpus: tuple[int, ...]
    replica: int


@dataclass
class _TraceNode:
    """A node of the trace: the free thousandths of each GPU, and its pods."""

    name: str
    model: str
    free: list[int]
    pods: list[PlacedPod] = field(default_factory=list)

    def room(self, pod: _PodRow) -> tuple[int, ...]:
        """The first GPUs that have room for a pod, shared ones first; empty if there is no room."""
        if pod.models and self.model not in pod.models:
            return ()
        fitting = [number for number, free in enumerate(self.free) if free >= pod.milli]
        if pod.milli < _WHOLE:
            fitting.sort(key=lambda number: self.free[number] == _WHOLE)
        return tuple(fitting[: pod.gpus]) if len(fitting) >= pod.gpus else ()


def gpu_2023(folder: Path, rows: Rows, interval_ms: int | None) -> Trace:
    """The pods on the nodes, read every ``interval_ms`` and whenever a pod comes or goes.

    Raises NoTrace and OSError.
    """
    interval_ms = interval_ms or 300_000
    seen: set[str] = set()

    def unseen(name: str) -> str:
        if name in seen:
            raise Refused("repeated", f"{name} is there already")
        seen.add(name)
        return name

    def node(_: int, name: str, gpus: str, model: str) -> _TraceNode:
        return _TraceNode(unseen(_checked("sn", name)), model, [_WHOLE] * whole_number("gpu", gpus, _MOST_GPUS))

    def pod(line: int, name: str, gpus: str, milli: str, *rest: str) -> _PodRow | None:
        spec, qos, scheduled, deleted = rest
        request = whole_number("num_gpu", gpus, _MOST_GPUS), whole_number("gpu_milli", milli, _WHOLE)
        if not name:
            raise Refused("name", "it has no name")
        if not request[0] or not scheduled:
            return None
        seconds = (("scheduled_time", scheduled), ("deletion_time", deleted))
        start_ms, end_ms = (whole_number(column, text, MAX_TIME_MS // 1000) * 1000 for column, text in seconds)
        if end_ms <= start_ms:
            raise Refused("deletion_time", f"{name} was deleted at {deleted}, which is not after {scheduled}")
        if not request[1] or (request[0] > 1 and request[1] < _WHOLE):
            raise Refused("gpu_milli", f"{request[1]} thousandths of each of {request[0]} GPUs can't be held")
        return _PodRow(line, unseen(name), *request, frozenset(filter(None, spec.split("|"))), qos, start_ms, end_ms)

    nodes = list(table(folder, _NODES, ("sn", "gpu", "model"), node, rows))
    columns = ("name", "num_gpu", "gpu_milli", "gpu_spec", "qos", "scheduled_time", "deletion_time")
    _place([row for row in table(folder, _PODS, columns, pod, rows) if row], nodes, rows)
    used = {node.name: node for node in nodes if node.pods}
    if not used:
        raise NoTrace(f"{folder}: no pod of {_PODS} ran on a node of {_NODES}")
    pods = {
        name: [_pod(row.name, row.start_ms, row.end_ms, {"qos": row.qos}) for row, *_ in used_node.pods]
        for name, used_node in used.items()
    }
    ticks = heapq.merge(*(_ticks(used_node, interval_ms) for used_node in used.values()), key=lambda tick: tick.ts_ms)
    placed = [placed.pod for used_node in used.values() for placed in used_node.pods]
    return Trace(pods, ticks, interval_ms, min(row.start_ms for row in placed), max(row.end_ms for row in placed))


def _place(pods: list[_PodRow], nodes: list[_TraceNode], rows: Rows) -> None:
    """Put each pod on the first node that has room when it starts. Pods that end at that time make room first."""
    running: list[tuple[int, int, _TraceNode, PlacedPod]] = []
    for turn, pod in enumerate(sorted(pods, key=lambda pod: pod.start_ms)):
        while running and running[0][0] <= pod.start_ms:
            *_, node, ended = heapq.heappop(running)
            for gpu in ended.gpus:
                node.free[gpu] += ended.pod.milli
        node_and_gpus = next(((node, gpus) for node in nodes if (gpus := node.room(pod))), None)
        if node_and_gpus is None:
            rows.read[_PODS] -= 1
            rows.leave_out(_PODS, pod.line, Refused("no_room", f"{pod.name} fits on no node"))
            continue
        node, gpus = node_and_gpus
        node.pods.append(PlacedPod(pod, gpus, turn))
        for gpu in gpus:
            node.free[gpu] -= pod.milli
        heapq.heappush(running, (pod.end_ms, turn, node, node.pods[-1]))


def _ticks(node: _TraceNode, interval_ms: int) -> Iterator[TraceTick]:
    """The node's ticks from its first pod to its last. A tick stands for the time since the one before it, so it has
    the holders of that time, and there is one at each change of holders."""
    changes = {at_ms for placed in node.pods for at_ms in (placed.pod.start_ms, placed.pod.end_ms)}
    first_ms, last_ms = min(changes), max(changes)
    between = range(first_ms - first_ms % interval_ms + interval_ms, last_ms, interval_ms)
    times = heapq.merge(sorted(changes), (at_ms for at_ms in between if at_ms not in changes))
    coming, running = list(reversed(node.pods)), list[PlacedPod]()
    devices, containers = _reading(node, running)
    for ts_ms in times:
        yield TraceTick(ts_ms, node.name, devices, containers)
        if ts_ms in changes:
            running = [placed for placed in running if placed.pod.end_ms > ts_ms]
            while coming and coming[-1].pod.start_ms <= ts_ms:
                running.append(coming.pop())
            devices, containers = _reading(node, running)


def _reading(node: _TraceNode, running: Iterable[PlacedPod]) -> tuple[list[JsonDict], list[JsonDict]]:
    """The devices and containers while these pods run."""
    uuids = [f"GPU-{identity('alibaba-gpu-2023', node.name, number)}" for number in range(len(node.free))]
    devices: list[JsonDict] = [
        {"uuid": uuid, "index": number, "minor": number, "model": node.model, "state": "ok", "processes": []}
        for number, uuid in enumerate(uuids)
    ]
    containers = []
    for placed in running:
        shared = placed.pod.milli < _WHOLE
        containers.append(
            _container(
                placed.pod.name, [f"{uuids[gpu]}::{placed.replica}" if shared else uuids[gpu] for gpu in placed.gpus]
            )
        )
        process = {"pod_uid": identity("pod", placed.pod.name), "sm_utilization_ratio": placed.pod.milli / _WHOLE}
        for gpu in placed.gpus:
            devices[gpu]["processes"].append({"pid": placed.replica + 1, **process})
    milli = [sum(placed.pod.milli for placed in running if number in placed.gpus) for number in range(len(devices))]
    for device, used in zip(devices, milli, strict=True):
        device["metrics"] = {"gpu_utilization_ratio": used / _WHOLE}
    return devices, containers
