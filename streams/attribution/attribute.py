"""Makes the record of an attributed tick: the holders of each device with their parts, and the holders at each event.

In: a sample, and each snapshot that it or its events name, with its pods. Out: the record of gpu.attributed. Pure.

A pod that a snapshot names holds nothing if gpu.workloads reports that it ended long before the sample, and if no pod
of that name may still run: a kubelet lists an ended pod until its devices are needed again. A pod does not hold a
device to which a claim for administration gives it access, as monitoring has.

An event names the snapshot of its own time, because another pod may have the device by the time of the tick. The pods
of an event are looked up as of the event, at most a minute before the tick: they are remembered for that long.

On a node without a kubelet the jobs of a batch system hold the devices; each tick lists its jobs. If the jobs of one
device are not known, nothing is known of its holders, and the others' are exact.
"""

import contextlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from streams.attribution.holders import (
    ProcessOwners,
    SnapshotHolders,
    add_observed,
    divide,
    holders_by_snapshot,
    owners_of,
    process_uids,
)
from streams.attribution.log_time import IndexedSnapshot, ResolvedPods
from topics.allocations import Allocations
from topics.attributed import AttributedDevice, AttributedEvent, AttributedSample, Attribution, Holder, holder_of_job
from topics.device_ids import DeviceIndex, UnknownDeviceId, parse
from topics.samples import Device, Event, Mig, Sample
from topics.workloads import UnwellDevice

EVENT_MS, LONGEST_EVENT_MS = 60_000, 600_000
"""How long before its tick an event may have come, so that the pods of its time are looked up: the node's interval, but
at least the first of these and at most the second."""
READ_MS = 10_000  # an event may be this much later than its tick's time, because it comes while the tick is read
_inventory_fields = attrgetter("uuid", "index", "minor", "mig")
_replace = msgspec.structs.replace


class ResolvedSnapshot(msgspec.Struct, frozen=True):
    """The snapshot that a tick or its events are joined with (None: none), how it was found, and its pods as of a
    time."""

    snapshot: IndexedSnapshot | None
    attribution: Attribution
    pods: ResolvedPods


class DeviceFacts(msgspec.Struct, frozen=True, gc=False):
    """What decides who holds the devices of a tick, beside the snapshot and its pods.

    ``inventory`` has what a device id may refer to: each device's UUID, index, minor number and MIG instance.
    ``processes`` has, flat, for each device the number of its processes and whether all can be seen, and for each
    process its pod's uid, its service, and whether it is without memory. ``uids`` are those of the pods that the
    processes show.
    """

    inventory: tuple[tuple[str, int | None, int | None, Mig | None], ...]
    processes: list[str | bool | int | None]
    uids: frozenset[str]


class HeldDevice(msgspec.Struct, frozen=True, gc=False):
    """What stays the same of a device from tick to tick: its holders, their conflict, and who owns each process.

    ``attribution`` is what the holders rest on, if that differs from the tick's.
    """

    holders: tuple[Holder, ...]
    conflict: str | None
    owners: ProcessOwners | None
    attribution: Attribution | None = None


class Memo(msgspec.Struct, frozen=True):
    """Who held the devices in the last tick, and the inputs of that answer. It is reused while these are the same."""

    snapshot: Allocations
    facts: DeviceFacts
    pods: ResolvedPods
    holders: SnapshotHolders
    devices: tuple[HeldDevice, ...]


_HELD_BY_NOBODY = HeldDevice((), None, None)


class Joined(msgspec.Struct, frozen=True):
    """An attributed sample. ``unknown_ids`` has its snapshot's device ids in no known grammar, but only if the holders
    were worked out again."""

    sample: AttributedSample
    unknown_ids: tuple[str, ...]


class _HoldersAtTime(NamedTuple):
    """The holders at the time of a tick or an event, by the device's UUID, and how their snapshot was found."""

    by_uuid: Mapping[str, tuple[Holder, ...]]
    attribution: Attribution


def event_span_ms(sample: Sample) -> int:
    """How long before a tick its events may have come, to be attributed to the pods of their time."""
    return min(max(sample.interval_ms or 0, EVENT_MS), LONGEST_EVENT_MS)


def event_snapshots(sample: Sample) -> dict[int, int]:
    """The ``seq`` of each snapshot that events name and the tick does not, with the time of the last such event."""
    times_ms: dict[int, int] = {}
    for device in sample.devices:
        for event in device.events or ():
            seq = event.allocations_seq
            if seq is not None and seq != sample.allocations_seq:
                event_ms = sample.ts_ms if event.ts_ms is None else min(event.ts_ms, sample.ts_ms + READ_MS)
                times_ms[seq] = max(event_ms, sample.ts_ms - event_span_ms(sample), times_ms.get(seq, 0))
    return times_ms


def facts_of(devices: Sequence[Device], last: Memo | None) -> DeviceFacts:
    """The facts of these devices. Those that equal the facts of the last tick are the same objects."""
    inventory = tuple(map(_inventory_fields, devices))
    processes: list[str | bool | int | None] = []
    for device in devices:
        on_device = device.processes
        processes += (None if on_device is None else len(on_device), device.info.get("processes_visible"))
        for process in on_device or ():
            processes += (process.pod_uid, process.service, not process.memory_used_bytes)
    previous = None if last is None else last.facts
    if previous is not None and previous.inventory == inventory:
        inventory = previous.inventory
    if previous is None or previous.processes != processes:
        return DeviceFacts(inventory, processes, process_uids(devices))
    return previous if previous.inventory is inventory else DeviceFacts(inventory, processes, previous.uids)


def attribute(
    sample: Sample,
    facts: DeviceFacts,
    offset: int,
    logged_ms: int,
    current: ResolvedSnapshot,
    by_event: Mapping[int, ResolvedSnapshot],
    last: Memo | None,
) -> tuple[Joined, Memo | None]:
    """The attributed tick, and the memo for the next one. ``current`` is the tick's own snapshot, ``by_event`` has the
    snapshots that only events name, by seq."""
    at_tick, devices, memo = _holders_at_tick(sample, facts, current, last)
    unknown_ids = memo.holders.unknown_ids if memo and (last is None or memo.holders is not last.holders) else ()
    at_events: dict[int | None, _HoldersAtTime] = {
        seq: _HoldersAtTime(
            _holders(resolved.snapshot.snapshot, resolved.pods, sample.devices).by_uuid if resolved.snapshot else {},
            resolved.attribution,
        )
        for seq, resolved in by_event.items()
    }
    splits = [divide(d, held.holders, held.owners) for d, held in zip(sample.devices, devices, strict=True)]
    attributed = [
        AttributedDevice(
            d.uuid, d.index, d.vendor, d.model, d.pci_bus_id, d.minor, d.state, d.mig, d.metrics, d.processes, d.jobs,
            None if d.events is None else _events(d.events, d.uuid, at_tick, at_events), d.info, d.xids, d.read_ms,
            d.compute_slices, split.holders, split.unattributed, split.scaled, held.conflict, held.attribution,
        )
        for d, held, split in zip(sample.devices, devices, splits, strict=True)
    ]  # fmt: skip
    record = AttributedSample(
        schema=1,
        cluster=sample.cluster,
        node=sample.node,
        run_id=sample.run_id,
        seq=sample.seq,
        ts_ms=sample.ts_ms,
        allocations_seq=sample.allocations_seq,
        interval_ms=sample.interval_ms,
        offset=offset,
        logged_ms=logged_ms,
        attribution=at_tick.attribution,
        node_labels=current.pods.node_labels,
        devices=tuple(attributed),
        unwell=_unwell(current.pods.unwell, sample) if current.pods.unwell else (),
    )
    return Joined(record, unknown_ids), memo


def _holders_at_tick(
    sample: Sample, facts: DeviceFacts, current: ResolvedSnapshot, last: Memo | None
) -> tuple[_HoldersAtTime, Sequence[HeldDevice], Memo | None]:
    """The holders of a tick's devices, by its snapshot or, on a node without a kubelet, by its jobs; and the memo."""
    if current.snapshot is not None:
        memo = _memo(last, current.snapshot.snapshot, current.pods, sample.devices, facts)
        return _HoldersAtTime(memo.holders.by_uuid, current.attribution), memo.devices, memo
    if sample.allocations_seq is not None or all(device.jobs is None for device in sample.devices):
        return _HoldersAtTime({}, current.attribution), (_HELD_BY_NOBODY,) * len(sample.devices), last
    by_uuid = {device.uuid: tuple(map(holder_of_job, device.jobs)) for device in sample.devices if device.jobs}
    held: list[HeldDevice] = []
    for device in sample.devices:
        jobs, owners = by_uuid.get(device.uuid, ()), None
        if device.processes is not None:  # divided by job as others are by pod: a job's id takes the uid's place
            processes = [_replace(process, pod_uid=process.job_id) for process in device.processes]
            owners = owners_of(_replace(device, processes=processes), jobs)
        held.append(HeldDevice(jobs, None, owners, "none" if device.jobs is None else None))
    return _HoldersAtTime(by_uuid, "exact"), held, last


def _unwell(reported: Sequence[UnwellDevice], sample: Sample) -> tuple[UnwellDevice, ...]:
    """The devices that the API server reports as unwell, each once: with its UUID if its id means a device of the tick,
    or says the UUID of one that is gone."""
    index, unwell = DeviceIndex(sample.devices), dict[UnwellDevice, None]()
    for device in reported:
        uuid = None
        with contextlib.suppress(UnknownDeviceId):
            ref = parse(device.device_id)
            uuid = index.find(ref) or ref.uuid
        unwell[device if uuid is None else _replace(device, device_id=uuid)] = None
    return tuple(unwell)


def _memo(
    last: Memo | None, snapshot: Allocations, pods: ResolvedPods, devices: Sequence[Device], facts: DeviceFacts
) -> Memo:
    """Who holds the devices of a tick by a snapshot. The parts of the last answer that had the same inputs are
    reused."""
    holders: SnapshotHolders | None = None
    if last is not None and last.snapshot is snapshot and last.facts.inventory is facts.inventory:
        previous = last.pods
        if previous is pods and last.facts is facts:
            return last
        if previous is pods or (
            previous.dra is pods.dra
            and previous.admin is pods.admin
            and previous.ended == pods.ended
            and previous.pods.keys() == pods.pods.keys()
            and all(pods.pods[name] is pod for name, pod in previous.pods.items())
        ):
            holders = last.holders
            if last.facts is facts and pods.pods_of(facts.uids) == previous.pods_of(facts.uids):
                return Memo(snapshot, facts, pods, holders, last.devices)
    if holders is None:
        holders = _holders(snapshot, pods, devices)
    pod_of, held = None if pods.by_uid is None else pods.by_uid.get, list[HeldDevice]()
    for device in devices:
        all_holders, conflict = add_observed(device, holders.by_uuid.get(device.uuid, ()), pod_of, holders.by_claim)
        held.append(HeldDevice(all_holders, conflict, owners_of(device, all_holders)))
    return Memo(snapshot, facts, pods, holders, tuple(held))


def _holders(snapshot: Allocations, pods: ResolvedPods, devices: Sequence[Device]) -> SnapshotHolders:
    return holders_by_snapshot(snapshot, devices, pods.pods, pods.dra, ended=pods.ended, admin=pods.admin)


def _events(
    events: Sequence[Event], uuid: str, at_tick: _HoldersAtTime, at_events: Mapping[int | None, _HoldersAtTime]
) -> tuple[AttributedEvent, ...]:
    """The events of a device. An event has holders and an attribution of its own only if these are not the tick's."""
    tick_holders, attributed = at_tick.by_uuid.get(uuid, ()), []
    for event in events:
        at_event = at_events.get(event.allocations_seq, at_tick)
        holders = at_event.by_uuid.get(uuid, ())
        attributed.append(
            AttributedEvent(
                event.kind,
                event.code,
                event.ts_ms,
                event.allocations_seq,
                None if _identities(holders) == _identities(tick_holders) else holders,
                None if at_event.attribution == at_tick.attribution else at_event.attribution,
            )
        )
    return tuple(attributed)


def _identities(holders: Sequence[Holder]) -> list[tuple[str, str, str | None, str | None]]:
    return [(holder.namespace, holder.pod, holder.pod_uid, holder.container) for holder in holders]
