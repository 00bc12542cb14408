"""The settings of the streams."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

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
