"""The views: the fleet; tables of nodes, GPUs, pods, workloads and alerts; one GPU; one alert. Pure.

In:       a fleet, the alerts that fire, and the time.
Out:      lines, and rows of tables.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from delivery.values import counted
from gpustream import alerts
from gpustream.alerts import AlertRow
from gpustream.fleet import STATUSES, Device, Fleet, Node, Status, Use, pods, workloads
from gpustream.output import printable
from gpustream.top import draw
from gpustream.top.draw import (
    Column,
    Line,
    TableView,
    ago,
    amount_column,
    bar,
    bar_column,
    gib,
    plain,
    text_column,
    watts,
)
from topics.alerts import Alert

_NAMESPACE_FROM = 30
"""A column that is at least so wide has room for namespaces."""

LINE_EVERY_S = 5.0
"""How often the summary line is printed if the output is no terminal."""

_RANKS = {"critical": 2, "warning": 1}
_MIN_LISTED, _OTHER_LINES = 4, 14
"""How many alerts and idle pods the fleet's view always has room for; how many lines it needs for everything else."""


class FiringAlert(NamedTuple):
    """An alert that fires, and its row."""

    alert: Alert
    row: AlertRow


@dataclass
class Now:
    """One moment: the fleet and its alerts at ``at``. ``facts`` are rates; ``trouble`` says why no ticks come."""

    fleet: Fleet
    firing: list[FiringAlert]
    at: datetime
    title: str
    facts: Sequence[str] = ()
    trouble: str = ""

    @property
    def ms(self) -> int:
        """The time of the newest tick, but not later than when a tick came last: a node's clock may be ahead."""
        return self.fleet.now_ms

    def line(self) -> str:
        """A summary in one line, for an output that is no terminal."""
        fleet = self.fleet
        if not fleet.nodes and self.trouble:
            return self.trouble
        parts = [
            f"{len(fleet.nodes)} nodes, {len(list(fleet.gpus()))} GPUs ({_held(fleet.devices())} held)",
            *self.facts,
        ]
        parts += [counted(len(self.firing), "alert")] if self.firing else []
        current_devices = [device for device in fleet.devices() if not device.silent]
        ratios = [(use.used_ratio, use.who) for use in pods(current_devices) if use.used_ratio is not None]
        if ratios:
            ratio, name = max(ratios)
            parts.append(f"busiest {name} at {ratio:.0%}")
        return printable(", ".join(filter(None, [*parts, self.trouble])))


def firing(latest: alerts.LatestAlerts, at: datetime) -> list[FiringAlert]:
    """The alerts that fire, the most severe first."""
    return [FiringAlert(alert, alerts.row(alert, at)) for alert in latest.firing()]


# -- cells


def _status(status: Status) -> Line:
    return [(status, draw.STYLES[status])]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _holder_names(device: Device, width: int = 80) -> str:
    if device.parts:
        return f"{sum(bool(part.holders) for part in device.parts)} of {len(device.parts)} MIG devices held"
    return ", ".join(holder.pod if width < _NAMESPACE_FROM else holder.name for holder in device.holders)


def _held(devices: Iterable[Device]) -> int:
    """How many physical GPUs are held, whole or in MIG devices."""
    return len({device.gpu for device in devices if device.holders})


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _index(device: Device) -> tuple[int, str]:
    return -1 if device.index is None else device.index, device.mig


# -- the tables


class NodeRow(NamedTuple):
    """A node, and sums over its GPUs."""

    node: Node
    gpus: list[Device]
    held: int
    counts: Counter[Status]
    used_ratio: float | None
    memory_ratio: float | None
    power_watts: float | None
    celsius: float | None
    trouble: str


def node_row(node: Node) -> NodeRow:
    """The row of a node in the table of nodes."""
    gpus = node.gpus
    used = [gpu.used_ratio for gpu in gpus if gpu.used_ratio is not None]
    uncut_devices = [device for device in node.devices.values() if not device.parts]
    memory = [(device.memory_used_bytes, device.memory_total_bytes) for device in uncut_devices]
    known_memory = [(part, whole) for part, whole in memory if part is not None and whole]
    return NodeRow(
        node,
        gpus,
        _held(node.devices.values()),
        Counter(gpu.status for gpu in gpus),
        sum(used) / len(used) if used else None,
        sum(part for part, _ in known_memory) / sum(whole for _, whole in known_memory) if known_memory else None,
        _sum(gpu.power_watts for gpu in gpus),
        max((gpu.temperature_celsius for gpu in gpus if gpu.temperature_celsius is not None), default=None),
        ", ".join(f"GPU {gpu.index} {gpu.trouble}" for gpu in node.devices.values() if gpu.trouble and not gpu.mig),
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
        bar_column("USED", 12, lambda row: row.used_ratio, lambda _: draw.STYLES["busy"]),
        bar_column("MEMORY", 12, lambda row: row.memory_ratio, lambda _: draw.MEMORY),
        amount_column("POWER", 8, lambda row: row.power_watts, watts),
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
            "STATUS", 8, lambda gpu: STATUSES.index(gpu.status), lambda gpu, _: _status(gpu.status), descending=True
        ),
        bar_column("USED", 11, lambda gpu: gpu.used_ratio, lambda gpu: draw.STYLES[gpu.status]),
        bar_column(
            "MEMORY", 11, lambda gpu: _ratio(gpu.memory_used_bytes, gpu.memory_total_bytes), lambda _: draw.MEMORY
        ),
        amount_column("POWER", 6, lambda gpu: gpu.power_watts, watts),
        amount_column("°C", 3, lambda gpu: gpu.temperature_celsius),
        amount_column(
            "HELD", 8, lambda gpu: gpu.ts_ms - gpu.tenures[-1].from_ms if gpu.holders else None, ago, from_width=100
        ),
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
    """The columns of pods, or of workloads."""
    return (
        *first,
        text_column("TEAM", 8, lambda use: use.team, from_width=90),
        amount_column("GPUS", 5, lambda use: use.gpus),
        amount_column("IDLE", 5, lambda use: use.idle),
        bar_column("USED", 11, lambda use: use.used_ratio, lambda use: draw.STYLES[_use_status(use)]),
        amount_column("MEMORY", 8, lambda use: use.memory_used_bytes, gib),
        amount_column("POWER", 8, lambda use: use.power_watts, watts, from_width=100),
        amount_column("FOR", 7, lambda use: use.devices[0].ts_ms - use.since_ms, ago),
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


# -- the fleet


def fleet_lines(now: Now, width: int, height: int) -> list[Line]:
    """The fleet on one screen: how many GPUs do what, what fires, who idles, and every GPU as a sign."""
    gpus = list(now.fleet.gpus())
    if not gpus:
        return [[], [("waiting for the first tick", "dim")]]
    counts = Counter(gpu.status for gpu in gpus)
    ordered: dict[Status, int] = {status: counts[status] for status in STATUSES}
    current_gpus = [gpu for gpu in gpus if not gpu.silent]
    used = [gpu.used_ratio for gpu in current_gpus if gpu.used_ratio is not None]
    memory = [
        device
        for device in now.fleet.devices()
        if not device.silent and not device.parts
        if device.memory_used_bytes is not None and device.memory_total_bytes
    ]
    total_memory = sum(device.memory_total_bytes or 0 for device in memory)
    used_memory = sum(device.memory_used_bytes or 0 for device in memory)
    power = _sum(gpu.power_watts for gpu in current_gpus)
    limited = [gpu for gpu in current_gpus if gpu.power_watts is not None and gpu.power_limit_watts is not None]
    limited_power, limit = (
        _sum(getattr(gpu, name) for gpu in limited) for name in ("power_watts", "power_limit_watts")
    )
    third = max(16, (width - 8) // 3 - 7)
    legend: Line = []
    for status, count in ordered.items():
        if count or status in ("busy", "idle", "free", "failing"):
            mark = "▁▅█" if status == "busy" else draw.SIGNS[status]
            legend += [(f"{mark} {status} {count}", draw.STYLES[status]), ("  ", "")]
    lines: list[Line] = [
        [(f"{counted(len(now.fleet.nodes), 'node')}, {counted(len(gpus), 'GPU')}: ", "bold"), *legend[:-1]],
        draw.stacked(ordered, width),
        [
            ("used ", ""), *bar(sum(used) / len(used) if used else None, third, draw.STYLES["busy"]),
            ("  memory ", ""), *bar(_ratio(used_memory, total_memory), third, draw.MEMORY),
            ("  power ", ""), *bar(_ratio(limited_power, limit), third, draw.POWER), (f" {watts(power)}", ""),
        ],
        [],
    ]  # fmt: skip
    lines += _fires_and_idles(now, max(_MIN_LISTED, (height - _OTHER_LINES) // 3))
    return [*lines, [], [("GPUs by node", "bold")], *_map(now.fleet, width)]


def _fires_and_idles(now: Now, limit: int) -> list[Line]:
    """The alerts that fire, and the idle pods: at most ``limit`` of each, the worst first."""
    firing = draw.filtered_rows(ALERTS, list(now.firing), "", "SEVERITY", descending=True)
    lines: list[Line] = [[(f"alerts that fire: {len(firing)}", "bold")]]
    for alert in firing[:limit]:
        row = alert.row
        style = draw.SEVERITIES.get(row.severity, "")
        lines.append([(f"  {row.severity:<9}", style), (f"{row.alert} ", "bold"), (f"{row.lasted}: {row.summary}", "")])
    idle = sorted(
        (use for use in pods(now.fleet.devices()) if use.idle == use.gpus), key=lambda use: (-use.gpus, use.since_ms)
    )
    lines += [[], [(f"idle pods: {len(idle)}, and how long each has had its GPUs", "bold")]]
    for use in idle[:limit]:
        team = f", team {use.team}" if use.team else ""
        held_for = ago(max(device.ts_ms for device in use.devices) - use.since_ms)
        idleness = f"{counted(use.gpus, 'GPU')} for {held_for}{team}"
        lines.append([("  idle     ", draw.STYLES["idle"]), (f"{use.who} ", "bold"), (idleness, "")])
    return lines


def _map(fleet: Fleet, width: int) -> list[Line]:
    """Every node with a sign for each GPU, as many nodes side by side as there is room for."""
    nodes = sorted(fleet.nodes.values(), key=lambda node: (node.cluster, node.name))
    name_width = max(len(node.name) for node in nodes)
    node_width = name_width + 1 + max(len(node.gpus) for node in nodes) + 2
    per_line = max(1, (width + 2) // node_width)
    lines: list[Line] = []
    for start in range(0, len(nodes), per_line):
        line: Line = []
        for node in nodes[start : start + per_line]:
            signs = [draw.sign(gpu) for gpu in node.gpus]
            padding = " " * (node_width - name_width - 1 - len(signs))
            line += [(f"{node.name:<{name_width}} ", ""), *signs, (padding, "")]
        lines.append(line)
    return lines


# -- one GPU, one alert


def device_lines(now: Now, device: Device, width: int, height: int) -> list[Line]:
    """A device: what it is, its last minutes, who holds it and who did."""
    facts: list[str] = [device.model, device.uuid, device.zone, f"attribution {device.attribution}"]
    lines: list[Line] = [
        [(f"{device.where}  ", "bold"), *_status(device.status), (f"  {device.trouble}", draw.STYLES["failing"])],
        [(" · ".join(filter(None, facts)), "dim")],
    ]
    for firing in now.firing:
        if device.uuid in ([gpu.uuid for gpu in firing.alert.gpus] or [firing.alert.labels.get("gpu_uuid", "")]):
            row, style = firing.row, draw.SEVERITIES.get(firing.row.severity, "")
            lines.append([(f"{row.severity} ", style), (f"{row.alert} ", "bold"), (row.summary, "")])
    metrics = (
        ("used", "used_ratio", device.used_ratio, 1.0, draw.STYLES["busy"], lambda v: f"{v:.0%}"),
        ("memory", "memory_used_bytes", device.memory_used_bytes, device.memory_total_bytes, draw.MEMORY, gib),
        ("power", "power_watts", device.power_watts, device.power_limit_watts, draw.POWER, watts),
        ("heat", "temperature_celsius", device.temperature_celsius, 100.0, draw.HEAT, lambda v: f"{v:.0f} °C"),
    )
    until_ms = max(now.ms, device.ts_ms)
    columns = max(8, min(len(device.history.of("used_ratio", until_ms)), width - 31))
    rows = 1 if height < 30 else 3
    span = ago(device.history.span_ms * columns / len(device.history.of("used_ratio", until_ms)))
    lines += [[], [(f"the last {span}", "bold")]]
    for name, metric, value, maximum, style, text_for in metrics:
        values = device.history.of(metric, until_ms)[-columns:]
        measured = [value for value in values if value is not None]
        graph = draw.spark(values, maximum or max(measured, default=0.0), rows)
        spread = f"{text_for(min(measured))} to {text_for(max(measured))}" if measured else "not known"
        for number, blocks in enumerate(graph):
            last = number == len(graph) - 1
            current = "-" if value is None else text_for(value)
            label = f"{name if last else '':<7}{current if last else '':>8} "
            lines.append([(label, ""), (blocks, style), (f" {spread}" if last else "", "dim")])
    return [*lines, *_holder_lines(device, until_ms, columns)]


def _holder_lines(device: Device, until_ms: int, columns: int) -> list[Line]:
    """Who held a device when, under the sparklines: a line for each pod, the last one first. Then who holds it now."""
    slot_ms = device.history.span_ms // len(device.history.of("used_ratio", until_ms))
    first = until_ms // slot_ms - columns + 1
    spans: dict[str, list[str]] = {}
    for tenure in reversed(device.tenures):
        end_ms = until_ms if tenure.to_ms is None else tenure.to_ms
        for pod in tenure.pods or ("free",):
            cells = spans.setdefault(pod, [" "] * columns)
            begin, end = max(0, tenure.from_ms // slot_ms - first), min(columns - 1, end_ms // slot_ms - first)
            for index in range(begin, end + 1):
                cells[index] = "·" if pod == "free" else "━"
    lines: list[Line] = [[], [("who held it", "bold")]]
    for pod, cells in spans.items():
        style = draw.STYLES["free" if pod == "free" else "busy"]
        lines.append([(" " * 16, ""), ("".join(cells), style), (f" {pod}", "")])
    lines += [[], [("held by", "bold")]] if device.holders else []
    for holder in device.holders:
        facts = [
            "" if holder.used_ratio is None else f"{holder.used_ratio:.0%}",
            "" if holder.memory_used_bytes is None else gib(holder.memory_used_bytes),
            "" if holder.power_watts is None else watts(holder.power_watts),
            holder.workload,
            f"team {holder.team}" if holder.team else "",
        ]
        lines.append([(f"  {holder.name}  ", ""), (" · ".join(filter(None, facts)), "dim")])
    if device.processes:
        pids = ", ".join(str(process.pid) for process in device.processes[:8])
        lines.append(
            [(f"  {counted(len(device.processes), 'process')}: {pids}".replace("processs", "processes"), "dim")]
        )
    return lines


def alert_lines(now: Now, firing: FiringAlert, width: int, height: int) -> list[Line]:
    """The lines of an alert: its annotations and labels, and the GPUs that it is about."""
    alert = firing.alert
    lines: list[Line] = [
        [
            (f"{alert.severity} ", draw.SEVERITIES.get(alert.severity, "")),
            (alert.name, "bold"),
            (f"  for {firing.row.lasted}, since {firing.row.since}", ""),
        ],
        [],
        *(plain(f"{name}: {text}") for name, text in alert.annotations.items()),
        [],
        *(plain(f"{name}={text}", "dim") for name, text in alert.labels.items()),
        [],
    ]  # fmt: skip
    uuids = {gpu.uuid for gpu in alert.gpus} | {alert.labels.get("gpu_mig_uuid") or alert.labels.get("gpu_uuid")}
    for device in now.fleet.devices():
        if device.uuid in uuids:
            lines += [*device_lines(now, device, width, height), []]
    return lines
