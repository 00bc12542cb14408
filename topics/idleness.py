"""How much a device works, whether a pod does nothing with it, and one word for what it does. Pure.

The streams use it, and so do the commands and pages that show the fleet to people.

docs/decisions/2026-11-22-idle-on-a-shared-gpu.md has the rule as a table.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from topics.attributed import AttributedDevice, Parts

IDLE_BELOW = 0.01  # a pod that does less than this share of a device's work is idle, unless a rule says otherwise


class Ratios(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The keys of the catalogue that say how much a device works."""

    gpu_utilization_ratio: float | None = None
    gpu_utilization_max_ratio: float | None = None
    graphics_engine_active_ratio: float | None = None
    sm_active_ratio: float | None = None
    encoder_utilization_ratio: float | None = None
    decoder_utilization_ratio: float | None = None


class Work(msgspec.Struct, frozen=True, gc=False):
    """``most`` is the most that any measure of activity shows, ``measured`` whether one shows all of the device's;
    ``video`` is that of the engines for video alone."""

    most: float
    measured: bool
    video: float


def work_of(ratios: Ratios) -> Work:
    used, peak = ratios.gpu_utilization_ratio, ratios.gpu_utilization_max_ratio
    engine, sms = ratios.graphics_engine_active_ratio, ratios.sm_active_ratio
    video = max(ratios.encoder_utilization_ratio or 0.0, ratios.decoder_utilization_ratio or 0.0)
    measured = used is not None or peak is not None or engine is not None or sms is not None
    return Work(max(used or 0.0, peak or 0.0, engine or 0.0, sms or 0.0, video), measured, video)


def part_of(parts: Iterable[Parts | None]) -> float | None:
    """What the holders of a pod did of a device's work, by the parts of each; None: it is not known."""
    whole: float | None = None
    for one in parts:
        if one is not None and one.utilization_ratio is not None:
            whole = one.utilization_ratio + (whole or 0)
    return whole


class ProcessWork(Protocol):
    """A process on a device, as far as idleness looks at it."""

    @property
    def pod_uid(self) -> str | None: ...
    @property
    def sm_utilization_ratio(self) -> float | None: ...


def work_by_pod(processes: Iterable[ProcessWork]) -> dict[str | None, float]:
    """What the processes of each pod did, by its uid; None: those that are of no pod."""
    ran: dict[str | None, float] = {}
    for one in processes:
        ran[one.pod_uid] = ran.get(one.pod_uid, 0.0) + (one.sm_utilization_ratio or 0.0)
    return ran


def rest_of(unattributed: Parts | None, work: Work, parts: Sequence[float | None], *, strangers: bool) -> float:
    """What of a device's work may be anybody's, by the parts of all its pods; ``strangers``: whether a process on it is
    of none of them.

    What a device does and what its processes do are two measures, which differ. So the rest is nobody's if it is less
    than half of what the pods are known to do, and no stranger may have done it.
    """
    known = sum([part or 0.0 for part in parts])
    rest = max(0.0, work.most - known)
    if unattributed is not None and unattributed.utilization_ratio is not None:
        rest = unattributed.utilization_ratio
    return 0.0 if rest < known / 2 and not strangers else rest


def is_idle(below: float, work: Work, part: float | None, processes: float, rest: float | None) -> bool | None:
    """Whether a pod does nothing with a device; None: it is not known.

    A pod is judged by its own ``part`` of the device's work, whoever shares the device, and by what its ``processes``
    do. The parts of all pods and the ``rest`` are the device's work. The rest may be the pod's own, and so is all that
    the device does if its part is not known. ``rest`` None: no other pod holds the device.
    """
    if (part or 0.0) >= below or processes >= below:
        return False
    if work.most < below:
        return True if work.measured else None
    if rest is None:
        return False
    return True if part is not None and rest < below and work.video < below else None


Activity = Literal["busy", "idle", "held", "free", "failing"]
"""A device in a word: ``busy`` and ``idle`` are held, ``held`` by pods of which it is not known whether they work."""


def device_activity(device: AttributedDevice) -> Activity:
    """What is said of a device of a tick. It is idle if all pods that hold it are."""
    work = work_of(Ratios(*map(device.metrics.get, Ratios.__struct_fields__)))
    done = [one.sm_utilization_ratio or 0.0 for one in device.processes or ()]
    part = part_of([one.parts for one in device.holders]) or 0.0
    return activity_of(device.state, work, max([part, *done]), held=bool(device.holders))


def activity_of(state: str, work: Work, done: float, *, held: bool) -> Activity:
    """One word for a device in that state, by how much it works, and ``done``, the most that one of its holders did."""
    if state in ("lost", "timeout"):
        return "failing"
    if not held:
        return "free"
    if max(work.most, done) >= IDLE_BELOW:
        return "busy"
    return "idle" if work.measured else "held"
