"""One moment of the fleet, which the tables and views show. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from delivery.values import counted, printable
from gpustream import alerts
from gpustream.alerts import AlertRow
from gpustream.fleet import Device, Fleet, pods
from topics.alerts import Alert

LINE_EVERY_S = 5.0
"""How often the summary line is printed if the output is no terminal."""


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

    def line(self) -> str:
        """A summary in one line, for an output that is no terminal."""
        fleet = self.fleet
        if not fleet.nodes and self.trouble:
            return self.trouble
        parts = [
            f"{len(fleet.nodes)} nodes, {len(list(fleet.gpus()))} GPUs ({held(fleet.devices())} held)",
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


def held(devices: Iterable[Device]) -> int:
    """How many physical GPUs are held, whole or in MIG devices."""
    return len({device.gpu for device in devices if device.holders})
