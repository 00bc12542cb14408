"""What is said of a run where no screen is: a line now and then; and the summary at its end, for people.

In:       the fleet as it is; the counts of the run.
Out:      lines.
"""

import os
import sys
from collections.abc import Sequence

from gpustream.command import counted
from gpustream.fleet import Fleet, pods
from gpustream.tally import RunSummary

LINE_EVERY_S = 5.0


def is_screen() -> bool:
    """Whether a person is at a terminal that can show more than lines."""
    whole = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    return whole and os.environ.get("TERM", "") not in ("", "dumb")


def fleet_line(fleet: Fleet, facts: Sequence[str], alerts: int, trouble: str) -> str:
    """The fleet in a line: ``facts`` of its flow, how many ``alerts`` fire, and what is wrong, if anything is."""
    gpus = list(fleet.gpus())
    if not fleet.nodes and trouble:
        return trouble
    held = len({device.gpu for device in fleet.devices() if device.held})
    found = [f"{len(fleet.nodes)} nodes, {len(gpus)} GPUs ({held} held)", *facts]
    found += [counted(alerts, "alert")] if alerts else []
    known = [(use.used_ratio, use.who) for use in pods(fleet.devices()) if use.used_ratio is not None]
    if known:
        ratio, who = max(known)
        found.append(f"busiest {who} at {ratio:.0%}")
    return ", ".join([*found, *([trouble] if trouble else [])])


def summary_text(summary: RunSummary, seen: Sequence[str] = ()) -> str:
    """The end of a run for people: what was ``seen``, and where every tick went."""
    attributed = summary.attributed
    rows = [
        *(("seen" if not number else "", text) for number, text in enumerate(seen)),
        ("sampled", f"{summary.ticks:,} ticks, {summary.samples:,} values"),
        ("attributed", f"{attributed.exact:,} exact, {attributed.late:,} late, {attributed.none:,} without a snapshot"),
        *((f"to {name}", f"{values:,} values") for name, values in summary.delivered.items()),
        ("dead-lettered", f"{summary.dead_lettered:,}"),
        ("dropped", f"{summary.dropped:,}"),
        ("lost", f"{summary.lost:,}"),
    ]
    return "\n".join(f"{name:>16}  {text}" for name, text in rows)
