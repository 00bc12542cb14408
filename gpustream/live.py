"""The live view of a run: what gpu.attributed says of the fleet now, as tables or lines, and the summary for people.

In:       ticks, and the time of their arrival in seconds on one clock that never steps back; the counts of the run.
Out:      renderables of rich, redrawn in place on a terminal; a plain line now and then elsewhere.
State:    the last tick of each node, and a utilization per device, smoothed over some seconds while its pods stay. A
          device that no pod holds is its processes'.
"""

import contextlib
import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpustream.alerts import AlertRow
from gpustream.command import counted
from gpustream.tally import Summary
from topics.attributed import AttributedDevice, AttributedSample, Parts, by_pod

SILENT_S = 60.0
"""A node that has said nothing for this long is left out."""

IDLE_RATIO = 0.05
"""A pod whose GPUs are used less than this is idle."""

_SMOOTHING_S = 10.0
_WINDOW_S = 5.0

Who = tuple[str, str]
"""A pod's namespace and name; a process has no namespace, and is named by its PID."""


class Use(NamedTuple):
    """A pod (or a process), the top of its owner chain (or its command), and what it does with the GPUs that it alone
    or with others holds."""

    namespace: str
    name: str
    workload: str
    gpus: int
    utilization_ratio: float
    memory_used_bytes: float

    @property
    def who(self) -> str:
        """How it is called."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class View(NamedTuple):
    """The fleet at one time. ``latency_s`` is the median of tick read to tick arrived, None before the first."""

    nodes: int
    gpus: int
    held: int
    ticks: int
    ticks_per_s: float
    values_per_s: float
    latency_s: float | None
    uses: list[Use]

    @property
    def idle(self) -> list[Use]:
        """Those who hold GPUs and hardly use them, those with most GPUs first."""
        idle = [use for use in self.uses if use.utilization_ratio < IDLE_RATIO]
        return sorted(idle, key=lambda use: (-use.gpus, use.utilization_ratio))


class _Held(NamedTuple):
    """What one pod or process has of a device: its own part, or None if that is not known: all that the device has."""

    who: Who
    workload: str
    utilization_ratio: float | None
    memory_used_bytes: float | None


class _SeenDevice(NamedTuple):
    """A device of a node's last tick; ``gpu`` is the UUID of the physical one."""

    gpu: str
    utilization_ratio: float | None
    memory_used_bytes: float
    held: list[_Held]


class _Node(NamedTuple):
    """A node's last tick."""

    at_s: float
    devices: dict[str, _SeenDevice]


class _Arrival(NamedTuple):
    at_s: float
    values: int
    latency_s: float


class Fleet:
    """Takes ticks in, and gives a view of the fleet.

    ``command_of`` gives the command of a process by its node and PID; empty if it is not known.
    """

    def __init__(self, command_of: Callable[[str, int], str] = lambda _node, _pid: "") -> None:
        self._command_of = command_of
        self._nodes: dict[tuple[str, str], _Node] = {}
        self._arrivals: deque[_Arrival] = deque()
        self._ticks = 0

    def observe(self, tick: AttributedSample, at_s: float, wall_ms: int) -> None:
        """Takes a tick in that arrived at ``at_s``, when the wall clock said ``wall_ms``."""
        key = (tick.cluster, tick.node)
        before = self._nodes.get(key, _Node(at_s, {}))
        weight = min(1.0, (at_s - before.at_s) / _SMOOTHING_S)
        devices = {}
        for device in tick.devices:
            held = self._held(tick.node, device)
            used, last = device.metrics.get("gpu_utilization_ratio"), before.devices.get(device.uuid)
            same = last is not None and [one.who for one in last.held] == [one.who for one in held]
            if same and used is not None and last is not None and last.utilization_ratio is not None:
                used = last.utilization_ratio + (used - last.utilization_ratio) * weight
            memory = device.metrics.get("memory_used_bytes") or 0.0
            gpu = device.mig.parent_uuid if device.mig else device.uuid
            devices[device.uuid] = _SeenDevice(gpu, used, memory, held)
        self._nodes[key] = _Node(at_s, devices)
        values = sum(len(device.metrics) for device in tick.devices)
        self._arrivals.append(_Arrival(at_s, values, max(0.0, (wall_ms - tick.ts_ms) / 1000)))
        self._ticks += 1
        self._forget(at_s)

    def view(self, now_s: float) -> View:
        """The fleet at ``now_s``."""
        self._forget(now_s)
        devices = [device for node in self._nodes.values() for device in node.devices.values()]
        latencies = sorted(arrival.latency_s for arrival in self._arrivals)
        return View(
            nodes=len(self._nodes),
            gpus=len({device.gpu for device in devices}),
            held=len({device.gpu for device in devices if device.held}),
            ticks=self._ticks,
            ticks_per_s=len(self._arrivals) / _WINDOW_S,
            values_per_s=sum(arrival.values for arrival in self._arrivals) / _WINDOW_S,
            latency_s=latencies[len(latencies) // 2] if latencies else None,
            uses=uses(devices),
        )

    def _held(self, node: str, device: AttributedDevice) -> list[_Held]:
        """Each pod that holds the device, once; each process on a device that no pod holds."""
        if not device.holders:
            return [
                _Held(
                    ("", f"pid {one.pid}"),
                    self._command_of(node, one.pid),
                    one.sm_utilization_ratio,
                    one.memory_used_bytes,
                )
                for one in device.processes or ()
            ]
        held = []
        for pod, holders in by_pod(device.holders).items():  # of a pod's containers one has its parts
            holder = next((one for one in holders if one.parts is not None), holders[0])
            workload = f"{holder.workload.kind}/{holder.workload.name}" if holder.workload else ""
            parts = holder.parts or Parts()
            held.append(_Held((pod.namespace, pod.pod), workload, parts.utilization_ratio, parts.memory_used_bytes))
        return held

    def _forget(self, now_s: float) -> None:
        while self._arrivals and now_s - self._arrivals[0].at_s > _WINDOW_S:
            self._arrivals.popleft()
        for key in [key for key, node in self._nodes.items() if now_s - node.at_s > SILENT_S]:
            del self._nodes[key]


def uses(devices: Iterable[_SeenDevice]) -> list[Use]:
    """Everyone who holds a device, the busiest first. Devices that do not say how busy they are don't count."""
    held: dict[Who, list[tuple[_SeenDevice, _Held]]] = {}
    for device in devices:
        for one in device.held:
            held.setdefault(one.who, []).append((device, one))
    found = []
    for who, of in held.items():
        ratios, memory = [], 0.0
        for device, part in of:
            ratio = device.utilization_ratio if part.utilization_ratio is None else part.utilization_ratio
            ratios += [] if ratio is None else [ratio]
            memory += device.memory_used_bytes if part.memory_used_bytes is None else part.memory_used_bytes
        if ratios:
            gpus = len({device.gpu for device, _ in of})
            found.append(Use(*who, of[0][1].workload, gpus, sum(ratios) / len(ratios), memory))
    return sorted(found, key=lambda use: (-use.utilization_ratio, use.who))


# -- how it is shown


_CHROME = 10
"""Lines of the screen that are no pod: the head, and the tables' titles and rules."""

_ALERTS = 4
"""So many of the alerts that fire are shown, each on a line."""

_BEHIND = 2
"""A sink is behind, and said to be, when it lacks more than so many ticks a node."""

_NUMBER_WIDTH = 7
DRAW_EVERY_S = 0.5
LINE_EVERY_S = 5.0
_GIB = 1024.0**3


@dataclasses.dataclass(frozen=True)
class Frame:
    """One moment of a run: ``delivered`` values and ``behind`` ticks (sampled, not yet taken) by sink.

    ``alerts`` are those that fire, the most severe first; ``not_ready`` is what is waited for until the first tick is
    there, and what is wrong after that.
    """

    elapsed_s: float
    title: str
    view: View
    delivered: dict[str, int]
    behind: dict[str, int]
    not_ready: Sequence[str] = ()
    alerts: Sequence[AlertRow] = ()

    @property
    def trouble(self) -> str:
        """What is not ready, in a line; empty where all is."""
        if not self.not_ready:
            return ""
        return f"{'not ready' if self.view.ticks else 'starting'}: {'; '.join(self.not_ready)}"


def screen(frame: Frame, height: int) -> RenderableType:
    """The frame as tables, in so many lines."""
    parts: list[RenderableType] = [Text.assemble((f"{frame.title}  ", "bold"), f"{frame.elapsed_s:.0f} s")]
    if frame.view.ticks or not frame.trouble:
        parts.append(Text(", ".join(_facts(frame))))
    if frame.trouble:
        parts.append(Text(frame.trouble, style="yellow"))
    alerts: list[Text] = []
    if frame.alerts:
        alerts.append(Text(f"alerts that fire: {len(frame.alerts)}", style="bold", no_wrap=True))
    for one in frame.alerts[:_ALERTS]:
        said = f"  {one.severity} {one.alert}, {one.where}, for {one.lasted}: {one.summary}"
        alerts.append(Text(said, no_wrap=True, overflow="ellipsis"))
    rows = max(2, height - _CHROME - len(alerts))
    idle = frame.view.idle[: rows // 2]
    busiest = [use for use in frame.view.uses if use not in idle][: rows - len(idle)]
    noun = "pods" if not frame.view.uses or any(use.namespace for use in frame.view.uses) else "processes"
    count = len(frame.view.idle)
    tables = _table(noun, f"busiest {noun}", busiest), _table(noun, f"{noun} that idle: {count}", idle)
    return Group(*parts, *alerts, *tables)


def line(frame: Frame) -> str:
    """The frame as one line."""
    busiest = [f"busiest {use.who} at {use.utilization_ratio:.0%}" for use in frame.view.uses[:1]]
    alerts = [counted(len(frame.alerts), "alert")] if frame.alerts else []
    facts = [*_facts(frame), *alerts, *busiest] if frame.view.ticks or not frame.trouble else []
    return f"{frame.elapsed_s:5.0f} s  " + ", ".join([*facts, *([frame.trouble] if frame.trouble else [])])


def _facts(frame: Frame) -> list[str]:
    view = frame.view
    found = [
        f"{view.nodes} nodes, {view.gpus} GPUs ({view.held} held)",
        f"{view.ticks_per_s:,.0f} ticks/s, {view.values_per_s:,.0f} values/s",
    ]
    found += [] if view.latency_s is None else [f"lag {view.latency_s:.1f} s"]
    for name, values in frame.delivered.items():
        behind = frame.behind.get(name, 0)
        late = f" ({behind:,} ticks behind)" if behind > _BEHIND * view.nodes else ""
        found.append(f"{name} {values:,} values{late}")
    return found


def _table(noun: str, title: str, uses: Sequence[Use]) -> Table:
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold", box=None, header_style="dim", expand=True
    )
    whose, what = ("pod", "workload") if noun == "pods" else ("process", "command")
    for name, share in ((whose, 4), (what, 3)):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=share)
    for name in ("GPUs", "used", "memory"):
        table.add_column(name, justify="right", no_wrap=True, width=_NUMBER_WIDTH)
    for use in uses:
        memory = f"{use.memory_used_bytes / _GIB:.0f} GiB"
        table.add_row(use.who, use.workload, str(use.gpus), f"{use.utilization_ratio:.0%}", memory)
    return table


class Display:
    """Draws a frame every ``every_s``: the first after ``first_s``."""

    def __init__(self, draw: Callable[[Frame], object], every_s: float, first_s: float = 0.0) -> None:
        self._draw, self._every_s, self._due_s = draw, every_s, first_s

    def is_due(self, elapsed_s: float) -> bool:
        """Whether it is time for a frame."""
        return elapsed_s >= self._due_s

    def show(self, frame: Frame) -> None:
        """Draws a frame that is due."""
        while self._due_s <= frame.elapsed_s:
            self._due_s += self._every_s
        self._draw(frame)


@contextlib.contextmanager
def displayed(*, watched: bool, to_stderr: bool) -> Iterator[Display]:
    """Redraws in place on a terminal that is ``watched``; else writes lines, on standard error if ``to_stderr``."""
    if not watched:
        out = sys.stderr if to_stderr else sys.stdout
        yield Display(lambda frame: click.echo(line(frame), file=out), LINE_EVERY_S, LINE_EVERY_S)
        return
    with Live(console=Console(), auto_refresh=False) as drawn:
        yield Display(lambda frame: drawn.update(screen(frame, drawn.console.height), refresh=True), DRAW_EVERY_S)


def summary_text(summary: Summary) -> str:
    """The end of a run for people."""
    attributed = summary.attributed
    rows = [
        ("sampled", f"{summary.ticks:,} ticks, {summary.samples:,} values"),
        ("attributed", f"{attributed.exact:,} exact, {attributed.late:,} late, {attributed.none:,} without a snapshot"),
        *((f"to {name}", f"{values:,} values") for name, values in summary.delivered.items()),
        ("dead-lettered", f"{summary.dead_lettered:,}"),
        ("dropped", f"{summary.dropped:,}"),
        ("lost", f"{summary.lost:,}"),
    ]
    return "\n".join(f"{name:>16}  {text}" for name, text in rows)
