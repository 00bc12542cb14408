"""The settings of the streams."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click

from delivery.settings import DURATION, READABLE_FILE, MemberSettings, Option
from streams.alerts.rules import rules_file


@dataclass(frozen=True, kw_only=True)
class AttributionSettings(MemberSettings):
    """How long a sample waits for its snapshot."""

    grace_s: Annotated[
        float, Option("--grace", DURATION, "attribution: how long a sample waits for the snapshot it names.")
    ] = 10.0
    group: str = "gpustream-attribution"


@dataclass(frozen=True, kw_only=True)
class UsageSettings(MemberSettings):
    """How the time of devices that pods share is divided, and which label names a team."""

    split: Annotated[Literal["used", "equal"], Option(
        "--split", None, "usage: how a device that pods share is divided: used (each pod has what it used, and what"
        " nobody used is divided equally) or equal. It stands in each record.",
    )] = "used"  # fmt: skip
    team_label: Annotated[str, Option(
        "--team-label", click.STRING, "usage: the label that names the team: the pod's own, else its namespace's.",
    )] = "team"  # fmt: skip
    group: str = "gpustream-usage"


@dataclass(frozen=True, kw_only=True)
class AlertSettings(MemberSettings):
    rules: Annotated[Path | None, Option(
        "--rules", READABLE_FILE, "alerts: a TOML file of rules, laid over the defaults; see `gpustream rules check`.",
        shown="those that come with it",
    )] = None  # fmt: skip
    group: str = "gpustream-alerts"

    def mistakes(self) -> list[str]:
        try:
            rules_file.load(self.rules)
        except rules_file.RulesError as error:
            return [*super().mistakes(), *map(str, error.mistakes)]
        return super().mistakes()
