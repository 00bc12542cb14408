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

A part that is not known is absent. Then the rest is absent, too, because it would include that part:

- A pod whose uid is not known has no part if there are processes of a pod that is none of the holders: they may be its.
- A pod has no part if one of its processes does not report how much it uses.

Which holder owns a process stays the same from tick to tick: :func:`owners_of` works it out once, and :func:`divide`
uses it in each tick.

Nothing is divided if the processes can't be seen. A quantity is not divided if the device does not have it (a MIG
device has neither utilization nor power of its own) or if no process has it. Records do not have the container of a
process, only its ``container_id``. So if a pod has several containers on the device, the first one by name has the
pod's whole part, and the others have none: sums over a pod's rows are right, whichever container it was.
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

_NO_ROWS: frozenset[int] = frozenset()
_NO_PARTS = Parts()

_replace = msgspec.structs.replace


class Split(msgspec.Struct, frozen=True, gc=False):
    """Holders with their parts, the rest, and whether the processes' sum exceeded the device."""

    holders: tuple[Holder, ...]
    unattributed: Parts | None = None
    scaled: bool = False


class ProcessOwners(msgspec.Struct, frozen=True, gc=False):
    """Which holder owns each process of a device. A holder is its index here, its row; ``holders`` is their number.

    ``rows`` has the row of each process; the row behind the last one means no holder. ``unknown`` are the holders of
    which it is not known which processes are theirs. ``absent`` are the holders without a part: the unknown ones, and
    the further containers of a pod, whose part the first one has. ``sole``: there is one holder, and it owns all
    processes. ``unsorted``: no holder has more than two processes, so the order in which they are added does not
    matter.
    """

    holders: int
    rows: tuple[int, ...]
    unknown: frozenset[int] = _NO_ROWS
    absent: frozenset[int] = _NO_ROWS
    sole: bool = False
    unsorted: bool = False


class _Shares(msgspec.Struct, frozen=True, gc=False):
    """One quantity: the amount of each holder and, behind the last, the rest; None: not known.
    ``absent`` are the rows of the holders without an amount."""

    amounts: list[Amount | None]
    absent: frozenset[int]
    scaled: bool = False


def owners_of(device: Device, holders: Sequence[Holder]) -> ProcessOwners | None:
    """Which holder owns each process of a device; None: nothing is divided.
    A pod whose uid is not known owns the processes if it is the only holder and they are all of one pod."""
    processes, count = device.processes, len(holders)
    if not holders or processes is None or not processes_visible(device):
        return None
    row_by_uid: dict[str | None, int] = {holder.pod_uid: row for row, holder in enumerate(holders)}
    if len(row_by_uid) == count and None not in row_by_uid:
        rows = tuple([row_by_uid.get(process.pod_uid, count) for process in processes])
        unsorted = all(rows.count(row) <= 2 for row in range(count))
        return ProcessOwners(count, rows, sole=count == 1 and set(rows) == {0}, unsorted=unsorted)
    first_rows: dict[str | tuple[str, str], int] = {}
    for row in sorted(range(count), key=lambda row: holders[row].container or ""):
        first_rows.setdefault(holders[row].pod_uid or (holders[row].namespace, holders[row].pod), row)
    row_by_uid = {pod: row for pod, row in first_rows.items() if isinstance(pod, str)}
    without_uid = [row for pod, row in first_rows.items() if not isinstance(pod, str)]
    other_uids = {p.pod_uid for p in processes if p.service is None and p.pod_uid is not None}.difference(row_by_uid)
    if len(without_uid) == len(first_rows) == len(other_uids) == 1:
        row_by_uid[other_uids.pop()] = without_uid.pop()
    unknown = frozenset(without_uid) if other_uids else _NO_ROWS
    rows = tuple([row_by_uid.get(process.pod_uid, count) for process in processes])
    return ProcessOwners(count, rows, unknown, unknown.union(set(range(count)).difference(first_rows.values())))


def divide(device: Device, holders: tuple[Holder, ...], owners: ProcessOwners | None) -> Split:
    """The parts of a device; none if the owners of its processes are None."""
    processes, metrics = device.processes, device.metrics
    if owners is None or processes is None:
        return Split(holders)
    if owners.sole:
        return _divide_sole(holders[0], processes, metrics)
    busy, watts, power = metrics.get("gpu_utilization_ratio"), metrics.get("power_watts"), None
    utilization = _shares(busy, [process.sm_utilization_ratio for process in processes], owners, 1.0)
    bytes_used = [process.memory_used_bytes for process in processes]
    memory = _shares(metrics.get("memory_used_bytes"), bytes_used, owners, _LARGEST)
    if utilization is not None and busy is not None and watts is not None and 0 <= watts <= _LARGEST:
        watts_per_ratio = watts / max(1.0, busy)
        *ratios, idle = utilization.amounts
        watts_used: list[Amount] = [watts_per_ratio * (ratio or 0) for ratio in ratios]
        power = _fit(watts, watts_used, utilization.absent, all_known=idle is not None)
    if utilization is None and memory is None:
        return Split(holders)
    unknown = [None] * (len(holders) + 1)
    columns = [unknown if shares is None else shares.amounts for shares in (utilization, memory, power)]
    *parts, rest = map(Parts, *columns)
    with_parts = [
        _replace(holder, parts=None if part == _NO_PARTS else part) for holder, part in zip(holders, parts, strict=True)
    ]
    scaled = (utilization is not None and utilization.scaled) or (memory is not None and memory.scaled)
    return Split(tuple(with_parts), None if rest == _NO_PARTS else rest, scaled)


def _divide_sole(holder: Holder, processes: Sequence[Process], metrics: Mapping[str, Amount | None]) -> Split:
    """The parts of a device that one pod holds and on which all processes are that pod's: the usual case. They are the
    same as if other pods without a process held it, too."""
    busy, watts = metrics.get("gpu_utilization_ratio"), metrics.get("power_watts")
    ratio, idle_ratio, scaled = _total(busy, [process.sm_utilization_ratio for process in processes], 1.0)
    bytes_used = [process.memory_used_bytes for process in processes]
    memory, other_memory, memory_scaled = _total(metrics.get("memory_used_bytes"), bytes_used, _LARGEST)
    if ratio is None and memory is None:
        return Split((holder,))
    power = other_power = None
    if ratio is not None and busy is not None and watts is not None and 0 <= watts <= _LARGEST:
        power = watts / max(1.0, busy) * ratio
        power, other_power = (power, watts - power) if power <= watts else (watts * 1.0, 0)
    rest = Parts(idle_ratio, other_memory, other_power)
    return Split((_replace(holder, parts=Parts(ratio, memory, power)),), rest, scaled or memory_scaled)


def _total(whole: Amount | None, amounts: list[Any], limit: Amount) -> tuple[Amount | None, Amount | None, bool]:
    """What all processes use of a quantity, the rest, and whether they use more than the whole; None: not known.
    ``limit`` is the most that one process can use."""
    if whole is None or not 0 <= whole <= _LARGEST or None in amounts:
        return None, None, False
    total: Amount = 0
    for amount in sorted(amounts) if len(amounts) > 2 else amounts:
        if amount > limit:
            total += limit
        elif amount > 0:
            total += amount
    return (total, whole - total, False) if total <= whole else (whole * 1.0, 0, total > whole * (1 + _SLACK))


def _shares(whole: Amount | None, amounts: list[Any], owners: ProcessOwners, limit: Amount) -> _Shares | None:
    """What each holder uses of a quantity: the sum over its processes, each at most ``limit``.

    None: it can't be divided, because the device does not have it or no process does. Floats are added from the least,
    so that their order does not matter.
    """
    if whole is None or not 0 <= whole <= _LARGEST:
        return None
    count, unknown, absent = owners.holders, owners.unknown, owners.absent
    if None in amounts:
        if amounts.count(None) == len(amounts):
            return None
        unknown |= {row for amount, row in zip(amounts, owners.rows, strict=True) if amount is None and row < count}
        absent |= unknown
        amounts = [amount or 0 for amount in amounts]
    used: list[Amount] = [0] * (count + 1)
    pairs = zip(amounts, owners.rows, strict=True)
    for amount, row in pairs if owners.unsorted else sorted(pairs):
        if amount > limit:
            used[row] += limit
        elif amount > 0:
            used[row] += amount
    used.pop()
    return _fit(whole, used, absent, all_known=not unknown)


def _fit(whole: Amount, used: list[Amount], absent: frozenset[int], *, all_known: bool) -> _Shares:
    """The amounts, scaled so that they are not more than the whole, and the rest."""
    if absent:
        used = [0 if row in absent else amount for row, amount in enumerate(used)]
    total = used[0] if len(used) == 1 else sum(sorted(used))
    rest, scaled = whole - total, False
    if total > whole:
        used, rest, scaled = [whole * (amount / total) for amount in used], 0, total > whole * (1 + _SLACK)
    amounts: list[Amount | None] = [*used, rest if all_known else None]
    for row in absent:
        amounts[row] = None
    return _Shares(amounts, absent, scaled)
