"""The tables of nodes, GPUs, pods, workloads and alerts: their rows and columns. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from gpustream.fleet import STATUSES, Device, Node, Status, Use, pods, workloads
from gpustream.top import draw
from gpustream.top.draw import (
    Column,
    TableView,
    amount_column,
    bar_column,
    gib,
    plain,
    text_column,
    time_column,
    watts,
)
from gpustream.top.moment import held

_NAMESPACE_FROM = 30
"""A column that is at least so wide has room for namespaces."""

_RANKS = {"critical": 2, "warning": 1}


# -- cells


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _memory_ratio(device: Device) -> float | None:
    return _ratio(device.metrics.memory_used_bytes, device.metrics.memory_total_bytes)


def _holder_names(device: Device, width: int = 80) -> str:
    if device.parts:
        return f"{sum(bool(part.holders) for part in device.parts)} of {len(device.parts)} MIG devices held"
    return ", ".join(holder.pod if width < _NAMESPACE_FROM else holder.name for holder in device.holders)


def _index(device: Device) -> tuple[int, str]:
    return -1 if device.index is None else device.index, device.mig


class Load(NamedTuple):
    """What some devices do: the mean of how much they are used, the shares of their memory and of their power limits,
    and their power. None: no device reports it."""

    used_ratio: float | None
    memory_ratio: float | None
    power_ratio: float | None
    power_watts: float | None


def load(devices: Iterable[Device]) -> Load:
    """The load of these devices. All counts in the GPUs, but the memory of a cut GPU that does not report it counts in
    its MIG devices."""
    devices = list(devices)
    gpus = [device for device in devices if not device.mig]
    used = [gpu.metrics.used_ratio for gpu in gpus if gpu.metrics.used_ratio is not None]
    reporting = {gpu.uuid for gpu in gpus if _memory_ratio(gpu) is not None}
    counting = [device.metrics for device in devices if not device.mig or device.gpu not in reporting]
    memory = [(metrics.memory_used_bytes, metrics.memory_total_bytes) for metrics in counting]
    power = [(gpu.metrics.power_watts, gpu.metrics.power_limit_watts) for gpu in gpus]
    known_power = [watts for watts, _ in power if watts is not None]
    return Load(
        used_ratio=sum(used) / len(used) if used else None,
        memory_ratio=_ratio_of_sums(memory),
        power_ratio=_ratio_of_sums(power),
        power_watts=sum(known_power) if known_power else None,
    )


def _ratio_of_sums(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    """The sum of parts by the sum of their wholes, of those of which both are known."""
    known = [(part, whole) for part, whole in pairs if part is not None and whole]
    return _ratio(sum(part for part, _ in known), sum(whole for _, whole in known))


# -- the tables


class NodeRow(NamedTuple):
    """A node, and sums over its GPUs."""

    node: Node
    gpus: list[Device]
    held: int
    counts: Counter[Status]
    load: Load
    celsius: float | None
    trouble: str


def node_row(node: Node) -> NodeRow:
    gpus = node.gpus
    return NodeRow(
        node,
        gpus,
        held(node.devices.values()),
        Counter(gpu.status for gpu in gpus),
        load(node.devices.values()),
        max((celsius for gpu in gpus if (celsius := gpu.metrics.temperature_celsius) is not None), default=None),
        ", ".join(dict.fromkeys(f"GPU {d.index} {d.trouble}" for d in node.devices.values() if d.trouble)),
    )


NODES = TableView(
    "Nodes",
    rows=lambda now: [node_row(node) for node in now.fleet.nodes.values()],
    key=lambda row: (row.node.cluster, row.node.name),
    text=lambda row: " ".join(
        (row.node.cluster, row.node.name, row.node.zone, row.trouble, *row.counts, *(g.model for g in row.gpus[:1]))
    ),
    columns=(
        text_column("NODE", 10, lambda row: row.node.name, share=2),
        Column("GPUS", 16, lambda row: len(row.gpus), lambda row, _: [draw.sign(gpu) for gpu in row.gpus]),
        amount_column("HELD", 5, lambda row: row.held),
        bar_column("USED", 12, lambda row: row.load.used_ratio, lambda _: draw.STYLES["busy"]),
        bar_column("MEMORY", 12, lambda row: row.load.memory_ratio, lambda _: draw.MEMORY),
        amount_column("POWER", 8, lambda row: row.load.power_watts, watts),
        amount_column("°C", 4, lambda row: row.celsius),
        text_column("MODEL", 12, lambda row: row.gpus[0].model if row.gpus else "", share=2, from_width=110),
        text_column("ZONE", 12, lambda row: row.node.zone, share=1, from_width=140),
        text_column("TROUBLE", 7, lambda row: row.trouble, draw.STYLES["failing"], share=3, from_width=90),
    ),
    sorted_by="NODE",
    empty="no node has sent a tick yet",
)

GPUS = TableView(
    "GPUs",
    rows=lambda now: list(now.fleet.devices()),
    key=lambda gpu: (gpu.cluster, gpu.node, gpu.uuid),
    text=lambda gpu: " ".join(
        [gpu.cluster, gpu.where, gpu.uuid, gpu.zone, gpu.model, gpu.status, gpu.trouble]
        + [f"{holder.name} {holder.workload} {holder.team}" for holder in gpu.holders]
    ),
    columns=(
        Column("NODE", 9, lambda gpu: (gpu.node, *_index(gpu)), lambda gpu, _: plain(gpu.node), share=1),
        Column("GPU", 9, _index, lambda gpu, _: plain(f"{'?' if gpu.index is None else gpu.index} {gpu.mig}")),
        Column(
            "STATUS", 8, lambda gpu: STATUSES.index(gpu.status), lambda gpu, _: draw.status(gpu.status), descending=True
        ),
        bar_column("USED", 11, lambda gpu: gpu.metrics.used_ratio, lambda gpu: draw.STYLES[gpu.status]),
        bar_column("MEMORY", 11, _memory_ratio, lambda _: draw.MEMORY),
        amount_column("POWER", 6, lambda gpu: gpu.metrics.power_watts, watts),
        amount_column("°C", 3, lambda gpu: gpu.metrics.temperature_celsius),
        time_column("HELD", lambda gpu: (gpu.ts_ms, gpu.tenures[-1]) if gpu.holders else None, from_width=100),
        text_column("TROUBLE", 15, lambda gpu: gpu.trouble, draw.STYLES["failing"], from_width=100),
        Column(
            "HELD BY",
            8,
            lambda gpu: _holder_names(gpu) or None,
            lambda gpu, width: plain(_holder_names(gpu, width)),
            share=3,
        ),
        text_column("MODEL", 12, lambda gpu: gpu.model, share=1, from_width=130),
    ),
    sorted_by="NODE",
    empty="no GPU is known yet",
)


def _use_columns(*first: Column) -> tuple[Column, ...]:
    return (
        *first,
        text_column("TEAM", 8, lambda use: use.team, from_width=90),
        amount_column("GPUS", 5, lambda use: use.gpus),
        amount_column("IDLE", 5, lambda use: use.idle),
        bar_column("USED", 11, lambda use: use.used_ratio, lambda use: draw.STYLES[_use_status(use)]),
        amount_column("MEMORY", 8, lambda use: use.memory_used_bytes, gib),
        amount_column("POWER", 8, lambda use: use.power_watts, watts, from_width=100),
        time_column("FOR", lambda use: (use.devices[0].ts_ms, use.since)),
        text_column("NODES", 12, lambda use: ", ".join(sorted({d.node for d in use.devices})), share=1, from_width=120),
    )


def _use_status(use: Use) -> Status:
    return "idle" if use.idle == use.gpus else "busy"


def _use_text(use: Use) -> str:
    nodes = {device.node for device in use.devices}
    return " ".join((use.who, use.workload, use.team, _use_status(use), *nodes))


PODS = TableView(
    "Pods",
    rows=lambda now: pods(now.fleet.devices()),
    key=lambda use: (use.who, use.devices[0].cluster, "" if use.namespace else use.devices[0].node),
    text=_use_text,
    columns=_use_columns(
        text_column("POD", 14, lambda use: use.who, share=3),
        text_column("WORKLOAD", 8, lambda use: use.workload, share=2),
    ),
    sorted_by="USED",
    empty="no pod holds a GPU",
)

WORKLOADS = TableView(
    "Workloads",
    rows=lambda now: workloads(now.fleet.devices()),
    key=lambda use: (use.who, use.devices[0].cluster),
    text=_use_text,
    columns=_use_columns(
        text_column("WORKLOAD", 14, lambda use: use.who, share=3), amount_column("PODS", 5, lambda use: use.pods)
    ),
    sorted_by="GPUS",
    empty="no workload holds a GPU",
)

ALERTS = TableView(
    "Alerts",
    rows=lambda now: list(now.firing),
    key=lambda firing: firing.alert.fingerprint,
    text=lambda firing: " ".join(firing.row),
    columns=(
        Column(
            "SEVERITY",
            9,
            lambda firing: (_RANKS.get(firing.alert.severity, 0), firing.alert.starts_at),
            lambda firing, _: plain(firing.row.severity, draw.SEVERITIES.get(firing.row.severity, "")),
            descending=True,
        ),
        Column("FOR", 7, lambda firing: firing.alert.starts_at, lambda firing, _: plain(firing.row.lasted), right=True),
        text_column("ALERT", 18, lambda firing: firing.row.alert, share=1),
        text_column("WHERE", 14, lambda firing: firing.row.where, share=2),
        text_column("WHO", 10, lambda firing: firing.row.who, share=2),
        text_column("SUMMARY", 20, lambda firing: firing.row.summary, share=5, from_width=120),
    ),
    sorted_by="SEVERITY",
    empty="no alert fires",
)

TABLES = (NODES, GPUS, PODS, WORKLOADS, ALERTS)
