"""The settings of the replay of a published trace."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import click

from delivery.settings import DURATION, EXISTING_DIRECTORY, KafkaSettings, Option, Text

SHORTEST_INTERVAL_S = 1.0


class KnownTrace(NamedTuple):
    """A trace that can be replayed. ``source``: where it is published. ``open``: the function that reads its folder.
    ``files``: what the folder must have. ``interval_s``: the time between the readings that are made of it; None: it
    has readings of its own."""

    source: str
    open: str
    files: tuple[str, ...]
    interval_s: float | None


TRACES = {
    "alibaba-genai": KnownTrace(
        "https://github.com/alibaba/clusterdata/tree/master/cluster-trace-v2026-GenAI",
        "producers.replay.alibaba:genai",
        ("pod_gpu_duty_cycle_anon.csv", "pod_gpu_memory_used_bytes_anon.csv"),
        None,
    ),
    "alibaba-gpu-2023": KnownTrace(
        "https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023",
        "producers.replay.alibaba:gpu_2023",
        ("openb_node_list_gpu_node.csv", "openb_pod_list_default.csv"),
        300.0,
    ),
}
"""The traces, by the names that ``--trace`` takes."""


class _TraceFolder(click.Tuple):
    """The name of a trace and a folder. In the variable, the folder is all that follows the name."""

    example = ("alibaba-genai", ".")

    def __init__(self) -> None:
        super().__init__([click.Choice(list(TRACES)), EXISTING_DIRECTORY])

    @property
    def name(self) -> str:  # type: ignore[override] # as in click
        return "NAME DIR"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name and the folder, which has the files of the trace."""
        name, folder = super().convert(value, param, ctx)
        missing = [file for file in TRACES[name].files if path_of(folder, file) is None]
        if missing and value != self.example:
            self.fail(f"{folder} has no {', '.join(missing)}, nor its .tar.gz: fetch {TRACES[name].source}", param, ctx)
        return name, folder

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return rv.split(None, 1)


def _speed(text: str) -> float:
    if text == "max":
        return math.inf
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 1 <= speed < math.inf:
        raise ValueError(f"{text!r} is not a speed: write 60 for a minute in a second, 1 for as it happened, or max")
    return speed


SPEED = Text("FACTOR|max", _speed, "60", show=lambda speed: "max" if speed == math.inf else f"{speed:g}")


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(KafkaSettings):
    """Which trace is replayed, and how fast."""

    trace: Annotated[tuple[str, Path], Option(
        "--trace", _TraceFolder(),
        "Which published trace, alibaba-genai or alibaba-gpu-2023, and the folder with its files, as they are"
        " published. docs/operations/benchmarks.md says where they are had.",
    )]  # fmt: skip
    speed: Annotated[
        float, Option("--speed", SPEED, "How many times faster than it happened; max: as fast as Kafka takes it.")
    ] = math.inf
    interval_s: Annotated[float | None, Option(
        "--interval", DURATION,
        "alibaba-gpu-2023: time between two readings of a node, beside those when a pod comes or goes.", shown="5m",
    )] = None  # fmt: skip

    def errors(self) -> list[str]:
        found = super().errors()
        name, _ = self.trace
        if TRACES[name].interval_s is None and self.interval_s is not None:
            found.append(f"--interval: {name} has readings of its own")
        if self.interval_s is not None and self.interval_s < SHORTEST_INTERVAL_S:
            found.append(f"--interval: {self.interval_s:g} s is too short; the trace counts in seconds")
        return found


def path_of(folder: Path, file: str) -> Path | None:
    """Where a file of a trace is: as it is named, or in the archive of its name, in the folder or its ``csv``."""
    names = (file, file.removesuffix(".csv") + ".tar.gz")
    paths = (folder / sub / name for name in names for sub in ("", "csv"))
    return next((path for path in paths if path.is_file()), None)
