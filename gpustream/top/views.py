"""The views: the fleet, one GPU, one alert. Pure."""

from collections import Counter

from delivery.values import counted
from gpustream.fleet import STATUSES, Device, Fleet, Status, pods
from gpustream.top import draw
from gpustream.top.draw import Line, ago, bar, gib, plain, watts
from gpustream.top.moment import FiringAlert, Now
from gpustream.top.tables import ALERTS, load

_MIN_LISTED, _OTHER_LINES = 4, 14
"""How many alerts and idle pods the fleet's view always has room for; how many lines it needs for everything else."""


# -- the fleet


def fleet_lines(now: Now, width: int, height: int) -> list[Line]:
    """The fleet on one screen: how many GPUs do what, what fires, who idles, and every GPU as a sign."""
    gpus = list(now.fleet.gpus())
    if not gpus:
        return [[], [("waiting for the first tick", "dim")]]
    counts = Counter(gpu.status for gpu in gpus)
    ordered: dict[Status, int] = {status: counts[status] for status in STATUSES}
    use = load(device for device in now.fleet.devices() if not device.silent)
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
            ("used ", ""), *bar(use.used_ratio, third, draw.STYLES["busy"]),
            ("  memory ", ""), *bar(use.memory_ratio, third, draw.MEMORY),
            ("  power ", ""), *bar(use.power_ratio, third, draw.POWER), (f" {watts(use.power_watts)}", ""),
        ],
        [],
    ]  # fmt: skip
    lines += _alerts_and_idle_pods(now, max(_MIN_LISTED, (height - _OTHER_LINES) // 3))
    return [*lines, [], [("GPUs by node", "bold")], *_gpu_map(now.fleet, width)]


def _alerts_and_idle_pods(now: Now, limit: int) -> list[Line]:
    """The alerts that fire, and the idle pods: at most ``limit`` of each, the worst first."""
    firing = draw.filtered_rows(ALERTS, list(now.firing), "", "SEVERITY", descending=True)
    lines: list[Line] = [[(f"alerts that fire: {len(firing)}", "bold")]]
    for alert in firing[:limit]:
        row = alert.row
        style = draw.SEVERITIES.get(row.severity, "")
        lines.append([(f"  {row.severity:<9}", style), (f"{row.alert} ", "bold"), (f"{row.lasted}: {row.summary}", "")])
    idle = sorted(
        (use for use in pods(now.fleet.devices()) if use.idle == use.gpus),
        key=lambda use: (-use.gpus, use.since.from_ms),
    )
    lines += [[], [(f"idle pods: {len(idle)}, and how long each has had its GPUs", "bold")]]
    for use in idle[:limit]:
        team = f", team {use.team}" if use.team else ""
        held_for = draw.held_for(max(device.ts_ms for device in use.devices), use.since)
        idleness = f"{counted(use.gpus, 'GPU')} for {held_for}{team}"
        lines.append([("  idle     ", draw.STYLES["idle"]), (f"{use.who} ", "bold"), (idleness, "")])
    return lines


def _gpu_map(fleet: Fleet, width: int) -> list[Line]:
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
        [(f"{device.where}  ", "bold"), *draw.status(device.status), (f"  {device.trouble}", draw.STYLES["failing"])],
        [(" · ".join(filter(None, facts)), "dim")],
    ]
    for firing in now.firing:
        labels = firing.alert.labels
        if device.uuid in (
            [gpu.uuid for gpu in firing.alert.gpus] or [labels.get("gpu_uuid", ""), labels.get("gpu_mig_uuid", "")]
        ):
            row, style = firing.row, draw.SEVERITIES.get(firing.row.severity, "")
            lines.append([(f"{row.severity} ", style), (f"{row.alert} ", "bold"), (row.summary, "")])
    current = device.metrics
    metrics = (
        ("used", "used_ratio", 1.0, draw.STYLES["busy"], lambda v: f"{v:.0%}"),
        ("memory", "memory_used_bytes", current.memory_total_bytes, draw.MEMORY, gib),
        ("power", "power_watts", current.power_limit_watts, draw.POWER, watts),
        ("heat", "temperature_celsius", 100.0, draw.HEAT, lambda v: f"{v:.0f} °C"),
    )
    until_ms = max(now.fleet.now_ms, device.ts_ms)
    columns = max(8, min(device.history.slots, width - 31))
    rows = 1 if height < 30 else 3
    lines += [[], [(f"the last {ago(device.history.slot_ms * columns)}", "bold")]]
    for name, metric, maximum, style, text_for in metrics:
        value = getattr(current, metric)
        values = device.history.of(metric, until_ms)[-columns:]
        measured = [value for value in values if value is not None]
        graph = draw.spark(values, maximum or max(measured, default=0.0), rows)
        spread = f"{text_for(min(measured))} to {text_for(max(measured))}" if measured else "not known"
        for number, blocks in enumerate(graph):
            last = number == len(graph) - 1
            value_text = "-" if value is None else text_for(value)
            label = f"{name if last else '':<7}{value_text if last else '':>8} "
            lines.append([(label, ""), (blocks, style), (f" {spread}" if last else "", "dim")])
    return [*lines, *_holder_lines(device, until_ms, columns)]


def _holder_lines(device: Device, until_ms: int, columns: int) -> list[Line]:
    """Who held a device when, under the sparklines: a line for each pod, the last one first. Then who holds it now.
    Those of a GPU that is cut are those of its MIG devices, and who held it before."""
    slot_ms = device.history.slot_ms
    first = until_ms // slot_ms - columns + 1
    spans: dict[str, list[str]] = {}
    profiles = [(part, f"{part.mig} ") for part in device.parts] + [(device, "")]
    for part, profile in profiles:
        for tenure in reversed(part.tenures):
            end_ms = until_ms if tenure.to_ms is None else tenure.to_ms
            for pod in tenure.pods or (() if part.parts else ("free",)):
                cells = spans.setdefault(profile + pod, [" "] * columns)
                begin, end = max(0, tenure.from_ms // slot_ms - first), min(columns - 1, end_ms // slot_ms - first)
                for index in range(begin, end + 1):
                    cells[index] = "━" if tenure.pods else "·"
    lines: list[Line] = [[], [("who held it", "bold")]]
    for pod, cells in spans.items():
        style = draw.STYLES["busy" if "━" in cells else "free"]
        lines.append([(" " * 16, ""), ("".join(cells), style), (f" {pod}", "")])
    held_by = [(profile, holder) for part, profile in profiles for holder in part.holders]
    lines += [[], [("held by", "bold")]] if held_by else []
    for profile, holder in held_by:
        facts = [
            "" if holder.used_ratio is None else f"{holder.used_ratio:.0%}",
            "" if holder.memory_used_bytes is None else gib(holder.memory_used_bytes),
            "" if holder.power_watts is None else watts(holder.power_watts),
            holder.workload,
            f"team {holder.team}" if holder.team else "",
        ]
        lines.append([(f"  {profile}{holder.name}  ", ""), (" · ".join(filter(None, facts)), "dim")])
    if device.processes:
        pids = ", ".join(str(process.pid) for process in device.processes[:8])
        noun = "process" if len(device.processes) == 1 else "processes"
        lines.append([(f"  {len(device.processes)} {noun}: {pids}", "dim")])
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
