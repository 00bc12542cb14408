"""The settings that producers have in common."""

from dataclasses import dataclass
from typing import Annotated

from delivery.settings import DURATION, PREFIXES, SIZE, KafkaSettings, Option

Interval = Annotated[float, Option("--interval", DURATION, "Time between two readings of a node.")]

ResourcePrefixes = Annotated[tuple[str, ...], Option(
    "--resource-prefixes", PREFIXES, "A resource whose name begins with one of these is a GPU's.",
)]  # fmt: skip
GPU_RESOURCES = ("nvidia.com/",)


@dataclass(frozen=True, kw_only=True)
class BufferSettings(KafkaSettings):
    """How much is kept while Kafka is away: ticks of ``buffer_s``, and at most ``buffer_size`` bytes of them."""

    buffer_s: Annotated[float, Option("--buffer", DURATION, "How long ticks are kept while Kafka is away.")] = 900.0
    buffer_size: Annotated[
        int, Option("--buffer-size", SIZE, "How many bytes of them are kept; the oldest are dropped.")
    ] = 16 * 1024 * 1024

    def errors(self) -> list[str]:
        wrong = [] if self.buffer_s > 0 and self.buffer_size > 0 else ["--buffer and --buffer-size: must be above 0"]
        return [*super().errors(), *wrong]


def prefix_errors(prefixes: tuple[str, ...]) -> list[str]:
    if prefixes and all(prefixes):
        return []
    return ["--resource-prefixes: an empty prefix would take every resource for a GPU"]
