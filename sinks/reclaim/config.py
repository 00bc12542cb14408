"""The settings of the reclaim sink."""

from dataclasses import dataclass
from typing import Annotated

import click

from delivery.settings import DURATION, NAME, Kubeconfig, Option, Text
from sinks.settings import From, SinkSettings

ALERT_NAMES = Text("NAME[,...]", lambda text: tuple(map(str.strip, text.split(","))), "GPUHeldIdle", show=",".join)


@dataclass(frozen=True, kw_only=True)
class ReclaimSettings(SinkSettings):
    """What may be done about alerts, beside what namespaces say. A dry run unless ``act``."""

    act: Annotated[
        bool,
        Option(
            "--act",
            None,
            "Do it: write Events, and stop workloads, of namespaces whose annotation gpustream.dev/reclaim says so.",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        Option("--dry-run", None, "Change nothing, and write what would be done to gpu.actions. It is the default."),
    ] = False
    alert_names: Annotated[
        tuple[str, ...], Option("--alert-names", ALERT_NAMES, "Which alerts are acted on, by their rules' names.")
    ] = ("GPUHeldIdle",)
    least_s: Annotated[
        float,
        Option(
            "--least",
            DURATION,
            "No workload is stopped before its alert has fired for this long, however soon its namespace wants it. If"
            " the namespace does not say when, it is then.",
        ),
    ] = 3600.0
    budget: Annotated[
        int,
        Option(
            "--budget",
            click.IntRange(min=0),
            "So many workloads are stopped within any hour, over all replicas of this sink.",
        ),
    ] = 10
    event_budget: Annotated[
        int, Option("--event-budget", click.IntRange(min=0), "Of so many workloads Events are written within any hour.")
    ] = 60
    alert_age_s: Annotated[
        float,
        Option(
            "--alert-age",
            DURATION,
            "An alert that was not confirmed of all its GPUs for this long is not acted on. The alert stream does that"
            " each hour, while ticks show it.",
        ),
    ] = 7200.0
    kubeconfig: Kubeconfig = None
    group: Annotated[
        str, Option("--group", NAME, "The consumer group. The sinks of several clusters on one Kafka need one each.")
    ] = "gpustream-sink-reclaim"
    from_: From = "earliest"

    def errors(self) -> list[str]:
        errors = super().errors()
        if self.act and self.dry_run:
            errors.append("--act and --dry-run: one or the other")
        if self.alert_age_s <= 0:
            errors.append("--alert-age: must be above zero")
        if not all(self.alert_names):
            errors.append("--alert-names: an empty name")
        return errors
