"""The settings of the streams."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click
import msgspec

from delivery import prices
from delivery.settings import DURATION, READABLE_FILE, URL, MemberSettings, Option
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import Rules, Wording
from topics.alerts import RUNBOOKS


@dataclass(frozen=True, kw_only=True)
class AttributionSettings(MemberSettings):
    """How long a sample waits for its snapshot."""

    grace_s: Annotated[
        float, Option("--grace", DURATION, "attribution: how long a sample waits for the snapshot it names.")
    ] = 10.0
    group: str = "gpustream-attribution"


@dataclass(frozen=True, kw_only=True)
class TeamSettings(MemberSettings):
    team_label: Annotated[str, Option(
        "--team-label", click.STRING, "usage, alerts: the label that names the team: the pod's own, else its"
        " namespace's.",
    )] = "team"  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class UsageSettings(TeamSettings):
    """How the time of devices that pods share is divided."""

    split: Annotated[Literal["used", "equal"], Option(
        "--split", None, "usage: how a device that pods share is divided: used (each pod has what it used, and what"
        " nobody used is divided equally) or equal. It stands in each record.",
    )] = "used"  # fmt: skip
    group: str = "gpustream-usage"


@dataclass(frozen=True, kw_only=True)
class AlertSettings(TeamSettings):
    """The rules of the alerts, and what alerts say about teams, costs and runbooks."""

    rules: Annotated[Path | None, Option(
        "--rules", READABLE_FILE,
        "alerts: a TOML file of rules, which change the defaults or add to them; see `gpustream rules check`.",
        shown="those that come with it",
    )] = None  # fmt: skip
    prices: Annotated[Path | None, Option(
        "--prices", READABLE_FILE, "alerts: a file of what a GPU-hour costs, as for `gpustream usage`: alerts about"
        " idle GPUs say what they cost.", shown="no costs",
    )] = None  # fmt: skip
    runbook_url: Annotated[str, Option(
        "--runbook-url", URL, "alerts: where the runbooks are: an alert's is at this address, with /NAME.md after"
        " it.",
    )] = RUNBOOKS  # fmt: skip
    group: str = "gpustream-alerts"

    def load(self) -> Rules:
        """The rules, with the wording of their alerts. Raises RulesError or PricesError."""
        price_list = prices.load(self.prices) if self.prices is not None else None
        wording = Wording(self.runbook_url.rstrip("/"), self.team_label, price_list)
        return msgspec.structs.replace(rules_file.load(self.rules), wording=wording)

    def errors(self) -> list[str]:
        errors = super().errors()
        try:
            self.load()
        except rules_file.RulesError as error:
            errors += map(str, error.errors)
        except prices.PricesError as error:
            errors += str(error).splitlines()
        return errors
