"""How a shared device is divided: what each holder did on it, and the rest that is nobody's.

In: a device of a tick, with its processes, and its holders. Out: the holders with their parts, and the rest. Pure. The
parts and the rest add up to the device, to the last bits of a float. No part is negative. The order of processes and
holders does not matter.

- Utilization is divided by the processes' ``sm_utilization_ratio``, memory by their ``memory_used_bytes``. A holder's
  part is the sum over its pod's processes. If the sum over all pods is more than the device, each part is scaled by
  device / sum, the rest is 0, and the split is flagged.
- The rest is what no holder's process accounts for: processes of no pod, or of a pod that holds nothing, an MPS server
  that is not a holder's own, memory of the driver and of contexts.
- A pod's power is ``power_watts`` times its part of the utilization: the power of the time in which it ran. The power
  of the time in which nobody ran is the rest, idle power included. A pod's energy is the sum over time of its power.

A part that is not known is absent, and then the rest is absent, too, because it would have what is not known:

- A pod whose uid is not known has no part if there are processes of a pod that is none of the holders: they may be its.
- A pod has no part if one of its processes does not say how much it uses.

Whose each process is stays the same from tick to tick: :func:`rows_of` says it once, and :func:`divide` each tick.

Nothing is divided if the processes can't be seen. A quantity is not divided if the device does not have it (a MIG
device has neither utilization nor power of its own) or if no process has it. Records do not say which container the
``container_id`` of a process is. So of a pod with several containers on the device, the first one by name has the pod's
whole part, and the others have none: sums over a pod's rows are right, whichever it was.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streams.attribution.holders import processes_visible
from topics.attributed import Holder, Parts
from topics.samples import Device, Process

_SLACK = 1e-9  # a sum may exceed the device by this share: ratios of percents do not add up exactly
_LARGEST = 1e30  # a larger value measures nothing, and sums of such values may not be floats
Amount = int | float

_NONE: frozenset[int] = frozenset()
_NO_PARTS = Parts()

_replace = msgspec.structs.replace


class Split(msgspec.Struct, frozen=True, gc=False):
    """Holders with their parts, the rest, and whether the processes' sum exceeded the device."""

    holders: tuple[Holder, ...]
    unattributed: Parts | None = None
    scaled: bool = False


class Rows(msgspec.Struct, frozen=True, gc=False):
    """Whose each process is, and of whom it is not known: places of holders, the one behind the last for nobody.

    ``absent`` have no part: they, and the further containers of a pod, whose part the first one has. ``one``: there is
    one holder only, and all processes are its. ``few``: no holder has more than two processes, so that it does not
    matter in which order they are added.
    """

    count: int
    of: tuple[int, ...]
    unknown: frozenset[int] = _NONE
    absent: frozenset[int] = _NONE
    one: bool = False
    few: bool = False


class _Shares(msgspec.Struct, frozen=True, gc=False):
    """One quantity: what each holder has of it and, behind the last, the rest; None: not known.
    ``absent`` are the places of the holders without a share."""

    of: list[Amount | None]
    absent: frozenset[int]
    scaled: bool = False


def rows_of(device: Device, holders: Sequence[Holder]) -> Rows | None:
    """Whose each process of a device is: the place of the holder that has its pod's part, or the one behind the last.
    None: nothing is divided. A pod whose uid is not known has the processes if it is the only one and they are all of
    one pod."""
    processes, nobody = device.processes, len(holders)
    if not holders or processes is None or not processes_visible(device):
        return None
    by_uid: dict[str | None, int] = {holder.pod_uid: row for row, holder in enumerate(holders)}
    if len(by_uid) == nobody and None not in by_uid:
        of = tuple([by_uid.get(process.pod_uid, nobody) for process in processes])
        few = all(of.count(row) <= 2 for row in range(nobody))
        return Rows(nobody, of, one=nobody == 1 and set(of) == {0}, few=few)
    first: dict[str | tuple[str, str], int] = {}
    for row in sorted(range(nobody), key=lambda row: holders[row].container or ""):
        first.setdefault(holders[row].pod_uid or (holders[row].namespace, holders[row].pod), row)
    by_uid = {pod: row for pod, row in first.items() if isinstance(pod, str)}
    nameless = [row for pod, row in first.items() if not isinstance(pod, str)]
    others = {p.pod_uid for p in processes if p.service is None and p.pod_uid is not None}.difference(by_uid)
    if len(nameless) == len(first) == len(others) == 1:
        by_uid[others.pop()] = nameless.pop()
    unknown = frozenset(nameless) if others else _NONE
    of = tuple([by_uid.get(process.pod_uid, nobody) for process in processes])
    return Rows(nobody, of, unknown, unknown.union(set(range(nobody)).difference(first.values())))


def divide(device: Device, holders: tuple[Holder, ...], rows: Rows | None) -> Split:
    """The parts of a device; none if it has no ``rows``."""
    processes, metrics = device.processes, device.metrics
    if rows is None or processes is None:
        return Split(holders)
    if rows.one:
        return _of_one(holders[0], processes, metrics)
    busy, watts, power = metrics.get("gpu_utilization_ratio"), metrics.get("power_watts"), None
    utilization = _divided(busy, [process.sm_utilization_ratio for process in processes], rows, 1.0)
    bytes_used = [process.memory_used_bytes for process in processes]
    memory = _divided(metrics.get("memory_used_bytes"), bytes_used, rows, _LARGEST)
    if utilization is not None and busy is not None and watts is not None and 0 <= watts <= _LARGEST:
        watts_per_ratio = watts / max(1.0, busy)
        *busy_parts, idle = utilization.of
        drawn: list[Amount] = [watts_per_ratio * (part or 0) for part in busy_parts]
        power = _fitted(watts, drawn, utilization.absent, all_known=idle is not None)
    if utilization is None and memory is None:
        return Split(holders)
    nothing = [None] * (len(holders) + 1)
    *parts, rest = map(Parts, *[one.of if one else nothing for one in (utilization, memory, power)])
    with_parts = [
        _replace(holder, parts=None if part == _NO_PARTS else part) for holder, part in zip(holders, parts, strict=True)
    ]
    scaled = (utilization is not None and utilization.scaled) or (memory is not None and memory.scaled)
    return Split(tuple(with_parts), None if rest == _NO_PARTS else rest, scaled)


def _of_one(holder: Holder, processes: Sequence[Process], metrics: Mapping[str, Amount | None]) -> Split:
    """The parts of a device that one pod holds, and all its processes are that pod's: most are so. They are the same as
    if others held it, too, and had no process on it."""
    busy, watts = metrics.get("gpu_utilization_ratio"), metrics.get("power_watts")
    ratio, idle, scaled = _used(busy, [process.sm_utilization_ratio for process in processes], 1.0)
    bytes_used = [process.memory_used_bytes for process in processes]
    memory, free, too_full = _used(metrics.get("memory_used_bytes"), bytes_used, _LARGEST)
    if ratio is None and memory is None:
        return Split((holder,))
    drawn = undrawn = None
    if ratio is not None and busy is not None and watts is not None and 0 <= watts <= _LARGEST:
        drawn = watts / max(1.0, busy) * ratio
        drawn, undrawn = (drawn, watts - drawn) if drawn <= watts else (watts * 1.0, 0)
    rest = Parts(idle, free, undrawn)
    return Split((_replace(holder, parts=Parts(ratio, memory, drawn)),), rest, scaled or too_full)


def _used(whole: Amount | None, amounts: list[Any], most: Amount) -> tuple[Amount | None, Amount | None, bool]:
    """What all processes use of a quantity, the rest, and whether it is more than the whole; None: not known."""
    if whole is None or not 0 <= whole <= _LARGEST or None in amounts:
        return None, None, False
    used: Amount = 0
    for amount in sorted(amounts) if len(amounts) > 2 else amounts:
        if amount > most:
            used += most
        elif amount > 0:
            used += amount
    return (used, whole - used, False) if used <= whole else (whole * 1.0, 0, used > whole * (1 + _SLACK))


def _divided(whole: Amount | None, amounts: list[Any], rows: Rows, most: Amount) -> _Shares | None:
    """A quantity that the device has and, where there are processes, at least one of them. None: can't be divided.

    What a holder uses is the sum over its processes. Floats are added from the least, so that their order does not
    matter.
    """
    if whole is None or not 0 <= whole <= _LARGEST:
        return None
    n, unknown, absent = rows.count, rows.unknown, rows.absent
    if None in amounts:
        if amounts.count(None) == len(amounts):
            return None
        unknown |= {row for amount, row in zip(amounts, rows.of, strict=True) if amount is None and row < n}
        absent |= unknown
        amounts = [amount or 0 for amount in amounts]
    used: list[Amount] = [0] * (n + 1)
    pairs = zip(amounts, rows.of, strict=True)
    for amount, row in pairs if rows.few else sorted(pairs):
        if amount > most:
            used[row] += most
        elif amount > 0:
            used[row] += amount
    used.pop()
    return _fitted(whole, used, absent, all_known=not unknown)


def _fitted(whole: Amount, used: list[Amount], absent: frozenset[int], *, all_known: bool) -> _Shares:
    """Shares that are not more than the whole, and the rest."""
    if absent:
        used = [0 if row in absent else amount for row, amount in enumerate(used)]
    total = used[0] if len(used) == 1 else sum(sorted(used))
    rest, scaled = whole - total, False
    if total > whole:
        used, rest, scaled = [whole * (amount / total) for amount in used], 0, total > whole * (1 + _SLACK)
    shares: list[Amount | None] = [*used, rest if all_known else None]
    for row in absent:
        shares[row] = None
    return _Shares(shares, absent, scaled)
