"""What of a shared device is each pod's, and what is nobody's.

In: a device of a tick, with its processes, and its holders. Out: the holders with their parts, and the rest.
Pure. The parts and the rest are the device, to the last bits of a float; no part is negative; the order of processes
and holders does not matter.

Utilization is divided by the processes' ``sm_utilization_ratio``, memory by their ``memory_used_bytes``. A part is the
sum over the pod's processes; where the pods' sum is more than the device, each is scaled by device / sum, the rest is 0
and the split is flagged. What no holder's process accounts for is the rest: processes of no pod, or of one that is not
known, an MPS server that is not a holder's own, driver and context memory.

A pod's power is ``power_watts * its utilization part``: the power of the time in which it ran. The power of the time in
which nobody did, idle power included, is the rest. A pod's energy is the sum over time of its power.

Nothing is divided where the processes can't be seen, and no quantity that the device lacks (a MIG device has neither
utilization nor power of its own) or that none of the processes has. Records do not say which container a process's
``container_id`` is, so of a pod with several containers on the device the first by name has the pod's whole part and
the others have zeros: sums over a pod's rows are right, whichever it was.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple, TypeGuard

import msgspec

from topics.attributed import Holder, Parts
from topics.samples import Device, Process

_SLACK = 1e-9
"""By how much of it a sum may exceed the device before it counts as more: ratios of percents do not add up exactly."""

_LARGEST = 1e30
"""What is larger measures nothing, and sums of it may not be floats."""

Amount = int | float

_replace = msgspec.structs.replace


class Split(NamedTuple):
    """Holders with their parts, the rest, and whether the processes' sum exceeded the device."""

    holders: tuple[Holder, ...]
    unattributed: Parts | None = None
    scaled: bool = False


class _Shares(NamedTuple):
    """One quantity: what each holder has of it, and the rest."""

    of: list[Amount]
    rest: Amount
    scaled: bool


_Quantities = tuple[_Shares | None, _Shares | None, _Shares | None]
"""Utilization, memory and power, as :class:`Parts` has them; None: can't be divided."""


def split(device: Device, holders: tuple[Holder, ...]) -> Split:
    """The parts of a device; without any where it has no holder or its processes can't be seen."""
    processes = device.processes
    if not holders or processes is None or not seen(device):
        return Split(holders)
    utilization, memory, power = _divided(device.metrics, processes, _rows(processes, holders), len(holders))
    if utilization is None and memory is None:
        return Split(holders)
    rows = zip(holders, _column(utilization), _column(memory), _column(power), strict=False)
    return Split(
        tuple([_replace(holder, parts=Parts(busy, used, watts)) for holder, busy, used, watts in rows]),
        Parts(_rest(utilization), _rest(memory), _rest(power)),
        _scaled(utilization) or _scaled(memory),
    )


def _divided(
    metrics: Mapping[str, Amount | None], processes: Sequence[Process], rows: Sequence[int], n: int
) -> _Quantities:
    """Each quantity that the device has and, where there are processes, at least one of them."""
    ratios = [(a, row) for p, row in zip(processes, rows, strict=True) if (a := p.sm_utilization_ratio) is not None]
    held = [(a, row) for p, row in zip(processes, rows, strict=True) if (a := p.memory_used_bytes) is not None]
    busy = metrics.get("gpu_utilization_ratio") if ratios or not processes else None
    used = metrics.get("memory_used_bytes") if held or not processes else None
    watts = metrics.get("power_watts")
    utilization = _fitted(busy, _sums(ratios, n, 1.0)) if _measured(busy) else None
    memory = _fitted(used, _sums(held, n, _LARGEST)) if _measured(used) else None
    if utilization is None or not _measured(busy) or not _measured(watts):
        return utilization, memory, None
    per_ratio = watts / max(1.0, busy)
    return utilization, memory, _fitted(watts, [per_ratio * part for part in utilization.of])


def _column(shares: _Shares | None) -> Iterable[Amount | None]:
    return repeat(None) if shares is None else shares.of


def _rest(shares: _Shares | None) -> Amount | None:
    return None if shares is None else shares.rest


def _scaled(shares: _Shares | None) -> bool:
    return shares is not None and shares.scaled


def seen(device: Device) -> bool:
    """Whether the tick says which pods' processes are on the device."""
    return device.processes is not None and device.info.get("processes_visible") != "false"


def _rows(processes: Sequence[Process], holders: Sequence[Holder]) -> list[int]:
    """Whose each process is: the place of the holder that has its pod's part, or the one behind the last.

    A pod whose uid is not known has the processes if it is the only one and they are all of one pod.
    """
    nobody = len(holders)
    if nobody == 1 and (uid := holders[0].pod_uid) is not None:
        return [0 if process.pod_uid == uid else 1 for process in processes]
    by_uid: dict[str | None, int] = {}
    for row in sorted(range(nobody), key=lambda row: holders[row].container or ""):
        by_uid.setdefault(holders[row].pod_uid, row)
    unknown = by_uid.pop(None) if None in by_uid else None
    if unknown is not None and not by_uid and len({(holder.namespace, holder.pod) for holder in holders}) == 1:
        uids = {process.pod_uid for process in processes if process.service is None} - {None}
        if len(uids) == 1:
            by_uid = {uids.pop(): unknown}
    return [by_uid.get(process.pod_uid, nobody) for process in processes]


def _measured(whole: Amount | None) -> TypeGuard[Amount]:
    """Whether a device's value can be divided."""
    return whole is not None and 0 <= whole <= _LARGEST


def _sums(amounts: Sequence[tuple[Amount, int]], n: int, most: Amount) -> list[Amount]:
    """What the processes of each holder use. Floats are added from the least, so that their order does not matter."""
    used: list[Amount] = [0] * (n + 1)
    for amount, row in sorted(amounts) if len(amounts) > 2 else amounts:
        if amount > 0:
            used[row] += min(amount, most)
    return used[:n]


def _fitted(whole: Amount, used: list[Amount]) -> _Shares:
    """Shares that are not more than the whole, and the rest."""
    total = used[0] if len(used) == 1 else sum(sorted(used))
    if total <= whole:
        return _Shares(used, whole - total, scaled=False)
    return _Shares([whole * (amount / total) for amount in used], 0, scaled=total > whole * (1 + _SLACK))
