"""What can be looked at: the fleet, and tables of nodes, GPUs, pods, workloads and alerts; and one GPU. Pure.

In:       a fleet, the alerts that fire, and the time.
Out:      lines, and rows of tables.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from gpustream import alerts
from gpustream.alerts import AlertRow
from gpustream.command import counted
from gpustream.fleet import STATUSES, Device, Fleet, Node, Status, Use, pods, workloads
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
    watts,
    words_column,
)
from topics.alerts import Alert

_NAMESPACE_FROM = 30
"""A column that is at least so wide has room for namespaces."""

LINE_EVERY_S = 5.0
"""How often the line is printed if there is no screen."""

_RANKS = {"critical": 2, "warning": 1}
_LEAST_LISTED, _UNLISTED = 4, 14
"""The fewest alerts, and idle pods, that the fleet's view lists; and how many lines it needs for other things."""


class FiringAlert(NamedTuple):
    """An alert that fires, and how people read it."""

    alert: Alert
    row: AlertRow


@dataclass
class Now:
    """One moment: the fleet and its alerts at ``at``; ``facts`` of the flow, and what is wrong with it."""

    fleet: Fleet
    firing: list[FiringAlert]
    at: datetime
    title: str
    facts: Sequence[str] = ()
    trouble: str = ""

    @property
    def ms(self) -> int:
        """The time of the newest tick: ages are by the nodes' clocks."""
        return self.fleet.now_ms

    def line(self) -> str:
        """All of it in one line, if there is no screen."""
        fleet = self.fleet
        if not fleet.nodes and self.trouble:
            return self.trouble
        held = len({device.gpu for device in fleet.devices() if device.held})
        found = [f"{len(fleet.nodes)} nodes, {len(list(fleet.gpus()))} GPUs ({held} held)", *self.facts]
        found += [counted(len(self.firing), "alert")] if self.firing else []
        known = [(use.used_ratio, use.who) for use in pods(fleet.devices()) if use.used_ratio is not None]
        if known:
            ratio, who = max(known)
            found.append(f"busiest {who} at {ratio:.0%}")
        return ", ".join(filter(None, [*found, self.trouble]))


def firing(seen: alerts.Seen, at: datetime) -> list[FiringAlert]:
    """The alerts that fire, the most severe first."""
    return [FiringAlert(alert, alerts.row(alert, at)) for alert in seen.open()]


# -- cells


def _status(status: Status) -> Line:
    return [(status, draw.STYLES[status])]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _who(device: Device, width: int = 80) -> str:
    if device.parts:
        return f"{sum(bool(part.held) for part in device.parts)} of {len(device.parts)} MIG devices held"
    return ", ".join(one.pod if width < _NAMESPACE_FROM else one.name for one in device.held)


def _index(device: Device) -> tuple[int, str]:
    return -1 if device.index is None else device.index, device.mig


# -- the tables


class NodeRow(NamedTuple):
    """A node, and sums over its GPUs."""

    node: Node
    gpus: list[Device]
    counts: Counter[Status]
    used_ratio: float | None
    memory_ratio: float | None
    power_watts: float
    celsius: float | None
    trouble: str


def node_row(node: Node) -> NodeRow:
    """A row of the nodes' table."""
    gpus = node.gpus
    used = [gpu.used_ratio for gpu in gpus if gpu.used_ratio is not None]
    memory = [(d.memory_used_bytes, d.memory_total_bytes) for d in node.devices.values() if not d.parts]
    known = [(part, whole) for part, whole in memory if part is not None and whole]
    return NodeRow(
        node,
        gpus,
        Counter(gpu.status for gpu in gpus),
        sum(used) / len(used) if used else None,
        sum(part for part, _ in known) / sum(whole for _, whole in known) if known else None,
        sum(gpu.power_watts or 0.0 for gpu in gpus),
        max((gpu.temperature_celsius for gpu in gpus if gpu.temperature_celsius is not None), default=None),
        ", ".join(f"GPU {gpu.index} {gpu.trouble}" for gpu in node.devices.values() if gpu.trouble and not gpu.mig),
    )


NODES = TableView(
    "Nodes",
    rows=lambda now: [node_row(node) for node in now.fleet.nodes.values()],
    key=lambda one: (one.node.cluster, one.node.name),
    text=lambda one: " ".join(
        (one.node.cluster, one.node.name, one.node.zone, one.trouble, *one.counts, *(g.model for g in one.gpus[:1]))
    ),
    columns=(
        words_column("NODE", 10, lambda one: one.node.name, share=2),
        Column("GPUS", 16, lambda one: len(one.gpus), lambda one, _: [draw.sign(gpu) for gpu in one.gpus]),
        amount_column("HELD", 5, lambda one: len(one.gpus) - one.counts["free"]),
        bar_column("USED", 12, lambda one: one.used_ratio, lambda _: draw.STYLES["busy"]),
        bar_column("MEMORY", 12, lambda one: one.memory_ratio, lambda _: draw.MEMORY),
        amount_column("POWER", 8, lambda one: one.power_watts, watts),
        amount_column("°C", 4, lambda one: one.celsius),
        words_column("MODEL", 12, lambda one: one.gpus[0].model if one.gpus else "", share=2, from_width=110),
        words_column("ZONE", 12, lambda one: one.node.zone, share=1, from_width=140),
        words_column("TROUBLE", 7, lambda one: one.trouble, draw.STYLES["failing"], share=3, from_width=90),
    ),
    sorted_by="NODE",
    empty="no node has sent a tick yet",
)

GPUS = TableView(
    "GPUs",
    rows=lambda now: list(now.fleet.devices()),
    key=lambda one: one.uuid,
    text=lambda one: " ".join(
        [one.cluster, one.where, one.uuid, one.zone, one.model, one.status, one.trouble]
        + [f"{held.name} {held.workload} {held.team}" for held in one.held]
    ),
    columns=(
        Column("NODE", 9, lambda one: (one.node, *_index(one)), lambda one, _: plain(one.node), share=1),
        Column("GPU", 9, _index, lambda one, _: plain(f"{'?' if one.index is None else one.index} {one.mig}")),
        Column("STATUS", 8, lambda one: STATUSES.index(one.status), lambda one, _: _status(one.status), falling=True),
        bar_column("USED", 11, lambda one: one.used_ratio, lambda one: draw.STYLES[one.status]),
        bar_column(
            "MEMORY", 11, lambda one: _ratio(one.memory_used_bytes, one.memory_total_bytes), lambda _: draw.MEMORY
        ),
        amount_column("POWER", 6, lambda one: one.power_watts, watts),
        amount_column("°C", 3, lambda one: one.temperature_celsius),
        amount_column(
            "HELD", 8, lambda one: one.ts_ms - one.tenures[-1].from_ms if one.held else None, ago, from_width=100
        ),
        words_column("TROUBLE", 15, lambda one: one.trouble, draw.STYLES["failing"], from_width=100),
        Column("HELD BY", 8, lambda one: _who(one) or None, lambda one, width: plain(_who(one, width)), share=3),
        words_column("MODEL", 12, lambda one: one.model, share=1, from_width=130),
    ),
    sorted_by="NODE",
    empty="no GPU is known yet",
)


def _use_columns(*first: Column) -> tuple[Column, ...]:
    """The columns of pods, or of workloads."""
    return (
        *first,
        words_column("TEAM", 8, lambda one: one.team, from_width=90),
        amount_column("GPUS", 5, lambda one: one.gpus),
        amount_column("IDLE", 5, lambda one: one.idle),
        bar_column("USED", 11, lambda one: one.used_ratio, lambda one: draw.STYLES[_use_status(one)]),
        amount_column("MEMORY", 8, lambda one: one.memory_used_bytes, gib),
        amount_column("POWER", 8, lambda one: one.power_watts, watts, from_width=100),
        amount_column("FOR", 7, lambda one: one.devices[0].ts_ms - one.since_ms, ago),
        words_column(
            "NODES", 12, lambda one: ", ".join(sorted({d.node for d in one.devices})), share=1, from_width=120
        ),
    )


def _use_status(use: Use) -> Status:
    return "idle" if use.idle == use.gpus else "busy"


def _use_text(use: Use) -> str:
    nodes = {device.node for device in use.devices}
    return " ".join((use.who, use.workload, use.team, _use_status(use), *nodes))


PODS = TableView(
    "Pods",
    rows=lambda now: pods(now.fleet.devices()),
    key=lambda one: (one.who, "" if one.namespace else one.devices[0].node),
    text=_use_text,
    columns=_use_columns(
        words_column("POD", 14, lambda one: one.who, share=3),
        words_column("WORKLOAD", 8, lambda one: one.workload, share=2),
    ),
    sorted_by="USED",
    empty="no pod holds a GPU",
)

WORKLOADS = TableView(
    "Workloads",
    rows=lambda now: workloads(now.fleet.devices()),
    key=lambda one: one.who,
    text=_use_text,
    columns=_use_columns(
        words_column("WORKLOAD", 14, lambda one: one.who, share=3), amount_column("PODS", 5, lambda one: one.pods)
    ),
    sorted_by="GPUS",
    empty="no workload holds a GPU",
)

ALERTS = TableView(
    "Alerts",
    rows=lambda now: list(now.firing),
    key=lambda one: one.alert.fingerprint,
    text=lambda one: " ".join(one.row),
    columns=(
        Column(
            "SEVERITY",
            9,
            lambda one: (_RANKS.get(one.alert.severity, 0), one.alert.starts_at),
            lambda one, _: plain(one.row.severity, draw.SEVERITIES.get(one.row.severity, "")),
            falling=True,
        ),
        Column("FOR", 7, lambda one: one.alert.starts_at, lambda one, _: plain(one.row.lasted), right=True),
        words_column("ALERT", 18, lambda one: one.row.alert, share=1),
        words_column("WHERE", 14, lambda one: one.row.where, share=2),
        words_column("WHO", 10, lambda one: one.row.who, share=2),
        words_column("SUMMARY", 20, lambda one: one.row.summary, share=5, from_width=120),
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
    used = [gpu.used_ratio for gpu in gpus if gpu.used_ratio is not None]
    memory = [
        d for d in now.fleet.devices() if not d.parts and d.memory_used_bytes is not None and d.memory_total_bytes
    ]
    whole = sum(d.memory_total_bytes or 0 for d in memory)
    limit = sum(gpu.power_limit_watts or 0.0 for gpu in gpus)
    power = sum(gpu.power_watts or 0.0 for gpu in gpus)
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
            ("  memory ", ""), *bar(_ratio(sum(d.memory_used_bytes or 0 for d in memory), whole), third, draw.MEMORY),
            ("  power ", ""), *bar(_ratio(power, limit), third, draw.POWER), (f" {watts(power)}", ""),
        ],
        [],
    ]  # fmt: skip
    lines += _fires_and_idles(now, max(_LEAST_LISTED, (height - _UNLISTED) // 3))
    return [*lines, [], [("GPUs by node", "bold")], *_map(now.fleet, width)]


def _fires_and_idles(now: Now, most: int) -> list[Line]:
    """The alerts that fire, and the pods that idle: at most ``most`` of each, the worst first."""
    firing = draw.chosen(ALERTS, list(now.firing), "", "SEVERITY", falling=True)
    lines: list[Line] = [[(f"alerts that fire: {len(firing)}", "bold")]]
    for one in firing[:most]:
        said = one.row
        style = draw.SEVERITIES.get(said.severity, "")
        lines.append(
            [(f"  {said.severity:<9}", style), (f"{said.alert} ", "bold"), (f"{said.lasted}: {said.summary}", "")]
        )
    idle = sorted(
        (use for use in pods(now.fleet.devices()) if use.idle == use.gpus), key=lambda use: (-use.gpus, use.since_ms)
    )
    lines += [[], [(f"idle pods: {len(idle)}, and how long each has had its GPUs", "bold")]]
    for use in idle[:most]:
        team = f", team {use.team}" if use.team else ""
        held = ago(max(device.ts_ms for device in use.devices) - use.since_ms)
        lines.append(
            [
                ("  idle     ", draw.STYLES["idle"]),
                (f"{use.who} ", "bold"),
                (f"{counted(use.gpus, 'GPU')} for {held}{team}", ""),
            ]
        )
    return lines


def _map(fleet: Fleet, width: int) -> list[Line]:
    """Every node with a sign for each GPU, as many nodes side by side as there is room for."""
    nodes = sorted(fleet.nodes.values(), key=lambda node: (node.cluster, node.name))
    named = max(len(node.name) for node in nodes)
    cells = named + 1 + max(len(node.gpus) for node in nodes) + 2
    beside = max(1, (width + 2) // cells)
    lines: list[Line] = []
    for at in range(0, len(nodes), beside):
        line: Line = []
        for node in nodes[at : at + beside]:
            signs = [draw.sign(gpu) for gpu in node.gpus]
            line += [(f"{node.name:<{named}} ", ""), *signs, (" " * (cells - named - 1 - len(signs)), "")]
        lines.append(line)
    return lines


# -- one GPU, one alert


def device_lines(now: Now, device: Device, width: int, height: int) -> list[Line]:
    """A device: what it is, its last minutes, who holds it and who did."""
    said: list[str] = [device.model, device.uuid, device.zone, f"attribution {device.attribution}"]
    lines: list[Line] = [
        [(f"{device.where}  ", "bold"), *_status(device.status), (f"  {device.trouble}", draw.STYLES["failing"])],
        [(" · ".join(filter(None, said)), "dim")],
    ]
    for one in now.firing:
        if device.uuid in ([gpu.uuid for gpu in one.alert.gpus] or [one.alert.labels.get("gpu_uuid", "")]):
            style = draw.SEVERITIES.get(one.row.severity, "")
            lines.append([(f"{one.row.severity} ", style), (f"{one.row.alert} ", "bold"), (one.row.summary, "")])
    metrics = (
        ("used", "used_ratio", device.used_ratio, 1.0, draw.STYLES["busy"], lambda v: f"{v:.0%}"),
        ("memory", "memory_used_bytes", device.memory_used_bytes, device.memory_total_bytes, draw.MEMORY, gib),
        ("power", "power_watts", device.power_watts, device.power_limit_watts, draw.POWER, watts),
        ("heat", "temperature_celsius", device.temperature_celsius, 100.0, draw.HEAT, lambda v: f"{v:.0f} °C"),
    )
    wide = max(8, min(len(device.history.of("used_ratio", now.ms)), width - 31))
    tall = 1 if height < 30 else 3
    span = ago(device.history.span_ms * wide / len(device.history.of("used_ratio", now.ms)))
    lines += [[], [(f"the last {span}", "bold")]]
    for name, metric, value, most, style, words in metrics:
        values = device.history.of(metric, now.ms)[-wide:]
        known = [one for one in values if one is not None]
        drawn = draw.spark(values, most or max(known, default=0.0), tall)
        spread = f"{words(min(known))} to {words(max(known))}" if known else "not known"
        for number, of in enumerate(drawn):
            last = number == len(drawn) - 1
            words_now = "-" if value is None else words(value)
            lines.append(
                [
                    (f"{name if last else '':<7}{words_now if last else '':>8} ", ""),
                    (of, style),
                    (f" {spread}" if last else "", "dim"),
                ]
            )
    return [*lines, *_timeline(now, device, wide), *_holder_lines(device)]


def _timeline(now: Now, device: Device, wide: int) -> list[Line]:
    """Who held it when, under the sparklines: a line for each pod, the last one first."""
    slot_ms = device.history.span_ms // len(device.history.of("used_ratio", now.ms))
    first = now.ms // slot_ms - wide + 1
    spans: dict[str, list[str]] = {}
    for tenure in reversed(device.tenures):
        ends = now.ms if tenure.to_ms is None else tenure.to_ms
        for pod in tenure.pods or ("free",):
            cells = spans.setdefault(pod, [" "] * wide)
            for at in range(max(0, tenure.from_ms // slot_ms - first), min(wide - 1, ends // slot_ms - first) + 1):
                cells[at] = "·" if pod == "free" else "━"
    lines: list[Line] = [[], [("who held it", "bold")]]
    for pod, cells in spans.items():
        style = draw.STYLES["free" if pod == "free" else "busy"]
        lines.append([(" " * 16, ""), ("".join(cells), style), (f" {pod}", "")])
    return lines


def _holder_lines(device: Device) -> list[Line]:
    lines: list[Line] = [[], [("held by", "bold")]] if device.held else []
    for one in device.held:
        known = [
            "" if one.used_ratio is None else f"{one.used_ratio:.0%}",
            "" if one.memory_used_bytes is None else gib(one.memory_used_bytes),
            "" if one.power_watts is None else watts(one.power_watts),
            one.workload,
            f"team {one.team}" if one.team else "",
        ]
        lines.append([(f"  {one.name}  ", ""), (" · ".join(filter(None, known)), "dim")])
    if device.processes:
        pids = ", ".join(str(process.pid) for process in device.processes[:8])
        lines.append(
            [(f"  {counted(len(device.processes), 'process')}: {pids}".replace("processs", "processes"), "dim")]
        )
    return lines


def alert_lines(now: Now, one: FiringAlert, width: int, height: int) -> list[Line]:
    """An alert: what it says, and the GPU that it is about."""
    alert = one.alert
    lines: list[Line] = [
        [
            (f"{alert.severity} ", draw.SEVERITIES.get(alert.severity, "")),
            (alert.name, "bold"),
            (f"  for {one.row.lasted}, since {one.row.since}", ""),
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
