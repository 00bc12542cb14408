"""How much a device works, whether a pod leaves it idle, and one word for its activity. Pure.

The streams use it, and so do the commands and pages that show the fleet to people.

docs/decisions/2026-11-22-idle-on-a-shared-gpu.md has the rule as a table.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, Protocol

import msgspec

from topics.attributed import AttributedDevice, Parts

IDLE_BELOW = 0.01  # a pod that does less than this share of a device's work is idle, unless a rule has another limit


class Ratios(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The metrics of the catalogue that show how much a device works."""

    gpu_utilization_ratio: float | None = None
    gpu_utilization_max_ratio: float | None = None
    graphics_engine_active_ratio: float | None = None
    sm_active_ratio: float | None = None
    encoder_utilization_ratio: float | None = None
    decoder_utilization_ratio: float | None = None


class Work(msgspec.Struct, frozen=True, gc=False):
    """How much a device works, 0-1.

    ``most`` is the largest measure of activity. ``measured``: at least one measure covers the whole device. ``video``
    is the larger measure of the video encoder and decoder.
    """

    most: float
    measured: bool
    video: float


def work_of(ratios: Ratios) -> Work:
    """How much a device with these metrics works."""
    used, peak = ratios.gpu_utilization_ratio, ratios.gpu_utilization_max_ratio
    engine, sms = ratios.graphics_engine_active_ratio, ratios.sm_active_ratio
    encoding, decoding = ratios.encoder_utilization_ratio, ratios.decoder_utilization_ratio
    video = 0.0  # comparisons take half the time of max(), and each device of each tick comes here
    if encoding is not None and encoding > video:
        video = encoding
    if decoding is not None and decoding > video:
        video = decoding
    most = video
    if used is not None and used > most:
        most = used
    if peak is not None and peak > most:
        most = peak
    if engine is not None and engine > most:
        most = engine
    if sms is not None and sms > most:
        most = sms
    measured = used is not None or peak is not None or engine is not None or sms is not None
    return Work(most, measured, video)


class PartHolder(Protocol):
    """The fields of a holder that are needed here."""

    @property
    def pod_uid(self) -> str | None: ...
    @property
    def parts(self) -> Parts | None: ...


def part_of(holders: Iterable[PartHolder]) -> float | None:
    """The sum of the parts of a pod's holders in a device's utilization; None: it is not known."""
    total: float | None = None
    for holder in holders:
        parts = holder.parts
        if parts is not None and (ratio := parts.utilization_ratio) is not None:
            total = ratio if total is None else ratio + total
    return total


class ProcessWork(Protocol):
    """The fields of a process on a device that are needed here."""

    @property
    def pod_uid(self) -> str | None: ...
    @property
    def job_id(self) -> str | None: ...
    @property
    def sm_utilization_ratio(self) -> float | None: ...


def work_by_uid(processes: Iterable[ProcessWork] | None) -> dict[str | None, float]:
    """The work of each pod's or batch job's processes on a device, by its UID; None: that of all others."""
    work_of_pods: dict[str | None, float] = {}
    for process in processes or ():
        uid = process.pod_uid or process.job_id  # a batch job's id is its uid
        work_of_pods[uid] = work_of_pods.get(uid, 0.0) + (process.sm_utilization_ratio or 0.0)
    return work_of_pods


def most_work_of(holders: Collection[PartHolder], processes: Iterable[ProcessWork] | None) -> float:
    """The most that one of a device's holders did, by its part or by its processes together."""
    work_of_pods = work_by_uid(processes)
    work_of_holders = [work_of_pods.get(holder.pod_uid, 0.0) for holder in holders if holder.pod_uid is not None]
    return max([part_of(holders) or 0.0, *work_of_holders])


def beside_parts(
    work: Work,
    unattributed: Parts | None,
    processes: Iterable[ProcessWork] | None,
    pods: Sequence[tuple[str | None, float | None]],
) -> tuple[list[float], float | None]:
    """What the pods of a device may have done beside their parts: the work of each one's processes; and the rest, which
    any of them may have done. ``pods``: the UID of each, and its part.

    The rest is the part of the device's work that is in no pod's part; None if one pod holds it alone. The measures of
    a device and of its processes differ. So a rest below half of the pods' parts counts as zero, unless a stranger may
    have done it: a process that belongs to none of the pods.
    """
    work_of_pods = work_by_uid(processes)
    work_of_processes = [work_of_pods.get(uid, 0.0) if uid is not None else 0.0 for uid, _ in pods]
    if len(pods) < 2:
        return work_of_processes, None
    parts_sum = sum([part or 0.0 for _, part in pods])
    if unattributed is not None and unattributed.utilization_ratio is not None:
        rest: float = unattributed.utilization_ratio
    else:
        rest = max(0.0, work.most - parts_sum)
    if 0.0 < rest < parts_sum / 2 and work_of_pods.keys() <= {uid for uid, _ in pods} - {None}:  # and no strangers
        rest = 0.0
    return work_of_processes, rest


def is_idle(below: float, work: Work, part: float | None, processes: float, rest: float | None) -> bool | None:
    """Whether a pod leaves a device idle; None: it is not known.

    A pod is judged by its own ``part`` of the device's work, whoever shares the device, and by the work of its
    ``processes``. The parts of all pods and the ``rest`` add up to the device's work. The pod may have done the rest,
    and all of the device's work if its part is not known. ``rest`` None: no other pod holds the device.
    """
    if (part or 0.0) >= below or processes >= below:
        return False
    if work.most < below:
        return True if work.measured else None
    if rest is None:
        return False
    return True if part is not None and rest < below and work.video < below else None


Activity = Literal["busy", "idle", "held", "free", "failing"]
"""A device's activity in a word. ``busy`` and ``idle`` devices are held; ``held``: it is not known whether it works."""


def device_activity(device: AttributedDevice) -> Activity:
    """The activity of a device of a tick. It is idle if all pods that hold it are."""
    work = work_of(Ratios(*map(device.metrics.get, Ratios.__struct_fields__)))
    holder_work = most_work_of(device.holders, device.processes)
    return activity_of(device.state, work, holder_work, held=bool(device.holders))


def activity_of_parts(activities: Collection[str]) -> Activity:
    """The activity of a GPU that is cut into MIG devices with these activities: that of the busiest, or failing if one
    fails."""
    ordered: tuple[Activity, ...] = ("failing", "busy", "held", "idle")
    return next((activity for activity in ordered if activity in activities), "free")


def activity_of(state: str, work: Work, holder_work: float, *, held: bool) -> Activity:
    """The activity of a device by its state, its work, and ``holder_work``, the most that one of its holders did."""
    if state in ("lost", "timeout"):
        return "failing"
    if not held:
        return "free"
    if max(work.most, holder_work) >= IDLE_BELOW:
        return "busy"
    return "idle" if work.measured else "held"
