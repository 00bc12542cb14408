"""The live view of a run: tables on a terminal, a line now and then elsewhere, and the summary for people.

In:       a :class:`~gpustream.fleet.View` and the counts of the run.
Out:      renderables of rich, and plain lines.
"""

import dataclasses
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpustream.alerts_command import Row
from gpustream.fleet import Use, View
from gpustream.tally import Summary

_CHROME = 10
"""Lines of the screen that are no pod: the head, and the tables' titles and rules."""

_ALERTS = 4
"""So many of the alerts that fire are shown, each on a line."""

_BEHIND = 2
"""A sink is behind, and said to be, when it lacks more than so many ticks a node."""

_NUMBER_WIDTH = 7
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
    alerts: Sequence[Row] = ()

    @property
    def trouble(self) -> str:
        """What is not ready, in a line; empty where all is."""
        if not self.not_ready:
            return ""
        return f"{'not ready' if self.view.ticks else 'starting'}: {'; '.join(self.not_ready)}"


def screen(frame: Frame, height: int) -> RenderableType:
    """The frame as tables, in so many lines."""
    alerts = _alerts(frame.alerts)
    rows = max(2, height - _CHROME - len(alerts))
    idle = frame.view.idle[: rows // 2]
    busiest = [use for use in frame.view.uses if use not in idle][: rows - len(idle)]
    noun = "pods" if not frame.view.uses or any(use.namespace for use in frame.view.uses) else "processes"
    count = len(frame.view.idle)
    tables = _table(noun, f"busiest {noun}", busiest), _table(noun, f"{noun} that idle: {count}", idle)
    return Group(_headline(frame), *alerts, *tables)


def line(frame: Frame) -> str:
    """The frame as one line."""
    busiest = [f"busiest {use.who} at {use.utilization_ratio:.0%}" for use in frame.view.uses[:1]]
    count = len(frame.alerts)
    alerts = [f"{count} alert{'s' * (count > 1)}"] if count else []
    facts = [*_facts(frame), *alerts, *busiest] if frame.view.ticks or not frame.trouble else []
    return f"{frame.elapsed_s:5.0f} s  " + ", ".join([*facts, *([frame.trouble] if frame.trouble else [])])


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


def _headline(frame: Frame) -> RenderableType:
    head = Text.assemble((f"{frame.title}  ", "bold"), f"{frame.elapsed_s:.0f} s")
    facts = [Text(", ".join(_facts(frame)))] if frame.view.ticks or not frame.trouble else []
    return Group(head, *facts, *([Text(frame.trouble, style="yellow")] if frame.trouble else []))


def _alerts(firing: Sequence[Row]) -> list[Text]:
    """A line for the number of alerts that fire, and one for each of the first few; none where none fires."""
    if not firing:
        return []
    lines = [f"  {one.severity} {one.alert}, {one.where}, for {one.lasted}: {one.summary}" for one in firing[:_ALERTS]]
    head = Text(f"alerts that fire: {len(firing)}", style="bold", no_wrap=True)
    return [head, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines)]


def _facts(frame: Frame) -> list[str]:
    view = frame.view
    latency = [] if view.latency_s is None else [f"lag {view.latency_s:.1f} s"]
    return [
        f"{view.nodes} nodes, {view.gpus} GPUs ({view.held} held)",
        f"{view.ticks_per_s:,.0f} ticks/s, {view.values_per_s:,.0f} values/s",
        *latency,
        *(f"{name} {_delivered(frame, name)}" for name in frame.delivered),
    ]


def _delivered(frame: Frame, name: str) -> str:
    behind = frame.behind.get(name, 0)
    late = f" ({behind:,} ticks behind)" if behind > _BEHIND * frame.view.nodes else ""
    return f"{frame.delivered[name]:,} values{late}"


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
