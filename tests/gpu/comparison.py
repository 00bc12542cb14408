"""The ticks of a node beside what nvidia-smi said at the same time. Pure.

A value of a tick agrees if it lies between what nvidia-smi said just before and just after it, give or take the step
that nvidia-smi rounds to. A value that changes within a second may lie outside: so the share that agrees is what
counts, and how far the others are off.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.gpu.nvidia_smi import FIELDS, Sample

ENOUGH = 0.9
"""The share of a key's values that must agree."""

AROUND_MS = 2500
"""nvidia-smi's answers so long before and after a reading may be compared with it."""


@dataclass
class Outcome:
    """Of one key: how many values were compared, how many of them agreed, the farthest that one was off (in the
    catalogue's unit, with both values), and how often only one of the two had a value."""

    compared: int = 0
    agreed: int = 0
    worst: float = 0.0
    worst_pair: tuple[float, float] | None = None
    only_node: int = 0
    only_smi: int = 0

    @property
    def is_good(self) -> bool:
        """Whether the two are of one opinion."""
        one_sided = max(self.only_node, self.only_smi)
        return self.agreed >= ENOUGH * self.compared and one_sided <= max(1, (1 - ENOUGH) * (self.compared + one_sided))


def compare(ticks: Iterable[Mapping[str, Any]], samples: Sequence[Sample]) -> dict[str, Outcome]:
    """By key. Only whole GPUs that answered are compared: nvidia-smi's query has no MIG devices."""
    outcomes: dict[str, Outcome] = {}
    ended = [sample.ended_ms for sample in samples]
    for tick in ticks:
        for device in tick["devices"]:
            if device["state"] != "ok" or device.get("mig"):
                continue
            at_ms = device.get("read_ms", tick["ts_ms"])
            around = _around(samples, ended, at_ms, device["uuid"])
            if around:
                _judge(device["metrics"], around, outcomes)
    return outcomes


def _around(samples: Sequence[Sample], ended: Sequence[int], at_ms: int, uuid: str) -> list[Mapping[str, float | None]]:
    """What nvidia-smi said of the GPU in the two answers before and the two after; nothing if one side is missing."""
    index = bisect_right(ended, at_ms)
    near = samples[max(0, index - 2) : index + 2]
    near = [sample for sample in near if abs(sample.ended_ms - at_ms) <= AROUND_MS and uuid in sample.values]
    on_both_sides = any(sample.ended_ms <= at_ms for sample in near) and any(sample.ended_ms > at_ms for sample in near)
    return [sample.values[uuid] for sample in near] if on_both_sides else []


def _judge(
    metrics: Mapping[str, float], around: Sequence[Mapping[str, float | None]], outcomes: dict[str, Outcome]
) -> None:
    for key in around[0]:
        outcome, answers = outcomes.setdefault(key, Outcome()), [answer.get(key) for answer in around]
        values = [answer for answer in answers if answer is not None]
        value = metrics.get(key)
        if value is None and not values:
            continue
        if value is None:
            outcome.only_smi += 1
        elif not values:
            outcome.only_node += 1
        else:
            _count(outcome, value, values, FIELDS[key].step)


def _count(outcome: Outcome, value: float, values: Sequence[float], step: float) -> None:
    outcome.compared += 1
    low, high = min(values) - step, max(values) + step
    off = max(low - value, value - high, 0.0)
    if off <= step * 1e-6:
        outcome.agreed += 1
    elif off > outcome.worst:
        outcome.worst, outcome.worst_pair = off, (value, min(values, key=lambda answer: abs(answer - value)))
