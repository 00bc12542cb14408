"""What of a shared device is each pod's, and what is nobody's.

In: a device of a tick, with its processes, and its holders. Out: the holders with their parts, and the rest.
Pure. The parts and the rest are the device, to the last bits of a float; no part is negative; the order of processes
and holders does not matter.

Utilization is divided by the processes' ``sm_utilization_ratio``, memory by their ``memory_used_bytes``. A part is the
sum over the pod's processes; where the pods' sum is more than the device, each is scaled by device / sum, the rest is 0
and the split is flagged. What no holder's process accounts for is the rest: processes of no pod, or of one that is not
known, driver and context memory.

A pod's power is ``power_watts * its utilization part``: the power of the time in which it ran. The power of the time in
which nobody did, idle power included, is the rest. A pod's energy is the sum over time of its power.

Nothing is divided where the processes can't be seen, and no quantity that the device lacks (a MIG device has neither
utilization nor power of its own) or that none of the processes has. Records do not say which container a process's
``container_id`` is, so of a pod with several containers on the device the first by name has the pod's whole part and
the others have zeros: sums over a pod's rows are right, whichever it was.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from topics.attributed import Holder, Parts
from topics.samples import Device, Process

_SLACK = 1e-9
"""By how much of it a sum may exceed the device before it counts as more: ratios of percents do not add up exactly."""

_LARGEST = 1e30
"""What is larger measures nothing, and sums of it may not be floats."""

Row = int
"""The place of a holder among a device's."""

_replace = msgspec.structs.replace


class Split(NamedTuple):
    """Holders with their parts, the rest, and whether the processes' sum exceeded the device."""

    holders: tuple[Holder, ...]
    unattributed: Parts | None = None
    scaled: bool = False


class _Shares(NamedTuple):
    """One quantity: what each row has of it, and the rest."""

    of: dict[Row, int | float]
    rest: int | float
    scaled: bool


def split(device: Device, holders: tuple[Holder, ...]) -> Split:
    """The parts of a device; without any where it has no holder or its processes can't be seen."""
    if not holders or not seen(device):
        return Split(holders)
    processes = device.processes or ()
    rows = _rows(processes, holders)
    metrics = device.metrics
    utilization = _shares(metrics.get("gpu_utilization_ratio"), _ratios(processes), rows, math.fsum)
    memory = _shares(metrics.get("memory_used_bytes"), [p.memory_used_bytes for p in processes], rows, sum)
    power = _power(metrics.get("power_watts"), utilization)
    if utilization is None and memory is None:
        return Split(holders)
    found = (utilization, memory, power)
    return Split(
        tuple([_replace(holder, parts=_parts(row, *found)) for row, holder in enumerate(holders)]),
        Parts(*[None if shares is None else shares.rest for shares in found]),
        any(shares is not None and shares.scaled for shares in (utilization, memory)),
    )


def seen(device: Device) -> bool:
    """Whether the tick says which pods' processes are on the device."""
    return device.processes is not None and device.info.get("processes_visible") != "false"


def _rows(processes: Iterable[Process], holders: Sequence[Holder]) -> list[Row | None]:
    """Whose each process is: the row that has its pod's part, or None.

    A pod whose uid is not known has the processes if it is the only one and they are all of one pod.
    """
    firsts: dict[tuple[str, str, str | None], Row] = {}
    for row in sorted(range(len(holders)), key=lambda row: holders[row].container or ""):
        holder = holders[row]
        firsts.setdefault((holder.namespace, holder.pod, holder.pod_uid), row)
    by_uid: dict[str | None, Row] = {key[2]: row for key, row in firsts.items() if key[2] is not None}
    if len(firsts) == 1 and not by_uid:
        uids = {process.pod_uid for process in processes} - {None}
        if len(uids) == 1:
            by_uid = {uids.pop(): next(iter(firsts.values()))}
    return [by_uid.get(process.pod_uid) for process in processes]


def _ratios(processes: Iterable[Process]) -> list[float | None]:
    return [None if (ratio := p.sm_utilization_ratio) is None else min(max(0.0, ratio), 1.0) for p in processes]


def _shares(
    whole: int | float | None,
    used: Sequence[int | float | None],
    rows: Sequence[Row | None],
    add: Callable[[Iterable[int | float]], int | float],
) -> _Shares | None:
    """A quantity divided by what each process uses; None where it can't be."""
    if whole is None or not 0 <= whole <= _LARGEST or (used and all(amount is None for amount in used)):
        return None
    amounts: dict[Row, list[int | float]] = {}
    for row, amount in zip(rows, used, strict=True):
        if row is not None and amount:
            amounts.setdefault(row, []).append(amount)
    return _fitted(whole, {row: add(several) for row, several in amounts.items()}, add)


def _fitted(
    whole: int | float, of: Mapping[Row, int | float], add: Callable[[Iterable[int | float]], int | float]
) -> _Shares:
    """Shares that are not more than the whole, and the rest."""
    total = add(of.values())
    if total <= whole:
        return _Shares(dict(of), whole - total, scaled=False)
    scaled = {row: whole * (amount / total) for row, amount in of.items()}
    return _Shares(scaled, 0, scaled=total > whole * (1 + _SLACK))


def _power(whole: int | float | None, utilization: _Shares | None) -> _Shares | None:
    """The power of the time in which each row ran."""
    if utilization is None or whole is None or not 0 <= whole <= _LARGEST:
        return None
    busy = max(1.0, math.fsum([*utilization.of.values(), utilization.rest]))
    return _fitted(whole, {row: whole * (part / busy) for row, part in utilization.of.items()}, math.fsum)


def _parts(row: Row, *found: _Shares | None) -> Parts:
    return Parts(*[None if shares is None else shares.of.get(row, 0) for shares in found])
