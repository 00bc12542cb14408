"""The settings of the simulated fleet."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from delivery.settings import DURATION, FILE, FLEET_SIZE, Option, Text
from producers.settings import BufferSettings, Interval
from producers.simulated.behaviours import BEHAVIOURS, Behaviour, behaviour_names
from producers.simulated.fleet import Fleet, parse_size

SHORTEST_INTERVAL_S = 0.01
BEHAVIOUR_NAMES = Text("NAME[,...]|all", behaviour_names, "hung,straggler", show=",".join)


@dataclass(frozen=True, kw_only=True)
class SimulationSettings:
    """What a fleet is made from, beside its size. Lines are appended to the file ``truth``."""

    seed: Annotated[
        int, Option("--seed", click.INT, "What the fleet is made from: the same seed is the same fleet.")
    ] = 1
    pod_life_s: Annotated[float, Option("--pod-life", DURATION, "How long a pod lives, on average.")] = 300.0
    behaviours: Annotated[tuple[Behaviour, ...], Option(
        "--behaviours", BEHAVIOUR_NAMES,
        f"What goes wrong in the fleet, on GPUs of its own in every ten nodes: {', '.join(BEHAVIOURS)}, or all.",
        shown="nothing",
    )] = ()  # fmt: skip
    story: Annotated[bool, Option(
        "--story", None,
        "Let the first minute show everything once: an XID error after 25 s, and a GPU that is lost after 35 s."
        " With `gpustream run` alerts come soon, too: a pod that idles is reported after 20 s.",
    )] = False  # fmt: skip
    truth: Annotated[Path | None, Option(
        "--truth", FILE,
        "Write who really held each GPU, what each of them did with it, and what it was read as, to this file, one"
        " JSON object a line.",
    )] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SimulatedSettings(BufferSettings, SimulationSettings):
    """A fleet as a producer. ``buffer_size`` is for all nodes together. It ends after ``stop_after_ticks`` of each."""

    fleet: Annotated[str, Option("--fleet", FLEET_SIZE, "So many nodes of so many GPUs.")] = "4x8"
    interval_s: Interval = 1.0
    buffer_size: int = 256 * 1024 * 1024
    stop_after_ticks: int | None = None

    def errors(self) -> list[str]:
        found = super().errors()
        if not self.interval_s >= SHORTEST_INTERVAL_S:
            found.append(f"--interval: {self.interval_s:g} s is too short; the least is 10ms")
        if self.truth and not _can_be_written(self.truth):
            found.append(f"--truth: {self.truth} can't be written: is its folder there, and may this user write to it?")
        size = (1, 1)
        try:
            size = parse_size(self.fleet)
        except ValueError as error:
            found.append(str(error))
        try:
            self.fleet_of(*size)
        except ValueError as error:
            found.append(str(error))
        return found

    def fleet_of(self, nodes: int, gpus: int) -> Fleet:
        """A fleet of that size. Raises ValueError if there is none."""
        return Fleet(
            nodes,
            gpus,
            cluster=self.cluster,
            seed=self.seed,
            pod_life_s=self.pod_life_s,
            behaviours=self.behaviours,
            story=self.story,
        )


def _can_be_written(file: Path) -> bool:
    """Whether a file can be written to, or made."""
    try:
        file.stat()
    except FileNotFoundError:
        return os.access(file.parent, os.W_OK)
    except OSError:  # such as a folder that must not be searched, or a name that is too long
        return False
    return os.access(file, os.W_OK)
