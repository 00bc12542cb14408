"""What an attributed tick says: who held each device, with their parts, and who held it when something happened to it.

In: a sample, and each snapshot that it or its events name, with its pods. Out: the record of gpu.attributed. Pure.

A pod that a snapshot names holds nothing if gpu.workloads says that it ended long before the sample, and if no pod of
that name may still run: kubelets go on listing a pod that ended until its devices are needed again. Nor does a pod hold
what it has by a claim for administration, as monitoring does.

An event names the snapshot of its own time, because another pod may have the device by the tick. Its pods are looked up
as of the event, at most a minute before the tick: for so long they are remembered.

On a node without a kubelet the jobs of a batch system hold the devices; each tick has its own.
"""

import contextlib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from streams.attribution.holders import HeldDevices, hold, observe, uids_of
from streams.attribution.log_time import Listing, Resolved
from streams.attribution.split import Rows, divide, rows_of
from topics.allocations import Allocations
from topics.attributed import AttributedDevice, AttributedEvent, AttributedSample, Attribution, Holder, holder_of_job
from topics.device_ids import DeviceIndex, UnknownDeviceId, parse
from topics.samples import Device, Event, Mig, Sample
from topics.workloads import UnwellDevice

EVENT_MS = 60_000  # an event's pods are looked up as of the event, but at most so long before its tick
READ_MS = 10_000  # for how long after its tick's time an event may come while the tick is read
Inventory = tuple[tuple[str, int | None, int | None, Mig | None], ...]
"""What a device id may say of each device of a tick: uuid, index, minor number and MIG place."""

_place = attrgetter("uuid", "index", "minor", "mig")


class Named(msgspec.Struct, frozen=True):
    """A snapshot that a tick or its events name, how certain it is, and its pods as of a time."""

    listing: Listing | None
    attribution: Attribution
    resolved: Resolved


class DevicesSeen(msgspec.Struct, frozen=True, gc=False):
    """What of the devices of a tick decides who holds them, beside the snapshot and its pods.

    ``inventory``: what a device id may say of each. ``processes``: of each how many it shows, and whether they can be
    seen; then whose each is, what it computes for, and whether it has no memory. ``uids``: of the pods that they show.
    """

    inventory: Inventory
    processes: list[str | bool | int | None]
    uids: frozenset[str]


class HeldDevice(msgspec.Struct, frozen=True, gc=False):
    """What stays the same of a device from tick to tick: its holders, what its processes say otherwise than the
    kubelet, and whose each process is."""

    holders: tuple[Holder, ...]
    conflict: str | None
    rows: Rows | None


class Memo(msgspec.Struct, frozen=True):
    """The last answer, and all that it depends on."""

    snapshot: Allocations
    seen: DevicesSeen
    resolved: Resolved
    held: HeldDevices
    devices: tuple[HeldDevice, ...]


_HELD_BY_NOBODY = HeldDevice((), None, None)


class Joined(msgspec.Struct, frozen=True):
    """An attributed sample, and the device ids that could not be read, if its holders were worked out again."""

    sample: AttributedSample
    unknown_ids: tuple[str, ...]


class _Then(NamedTuple):
    """What an event's holders rest on: the holders by the device's UUID in a snapshot, and how certain it is."""

    holders: Mapping[str, tuple[Holder, ...]]
    attribution: Attribution


def named_snapshots(sample: Sample) -> dict[int, int]:
    """The ``seq`` of each snapshot that events name and the tick does not, and the time of the last such event."""
    found: dict[int, int] = {}
    for device in sample.devices:
        for event in device.events or ():
            seq = event.allocations_seq
            if seq is not None and seq != sample.allocations_seq:
                at_ms = sample.ts_ms if event.ts_ms is None else min(event.ts_ms, sample.ts_ms + READ_MS)
                found[seq] = max(at_ms, sample.ts_ms - EVENT_MS, found.get(seq, 0))
    return found


def see(devices: Sequence[Device], last: Memo | None) -> DevicesSeen:
    """What decides who holds these devices: the same object as in the last answer if it is the same."""
    inventory = tuple(map(_place, devices))
    processes: list[str | bool | int | None] = []
    for device in devices:
        shown = device.processes
        processes += (None if shown is None else len(shown), device.info.get("processes_visible"))
        for one in shown or ():
            processes += (one.pod_uid, one.service, not one.memory_used_bytes)
    if last is None:
        return DevicesSeen(inventory, processes, uids_of(devices))
    was = last.seen
    if was.processes != processes:
        return DevicesSeen(was.inventory if was.inventory == inventory else inventory, processes, uids_of(devices))
    return was if was.inventory == inventory else DevicesSeen(inventory, processes, was.uids)


def attribute(
    sample: Sample,
    seen: DevicesSeen,
    offset: int,
    logged_ms: int,
    now: Named,
    earlier: Mapping[int, Named],
    last: Memo | None,
) -> tuple[Joined, Memo | None]:
    """The attributed tick, and the answer to remember. ``earlier`` are the snapshots that only events name, by seq."""
    memo, attribution, unknown_ids = last, now.attribution, tuple[str, ...]()
    holders: Mapping[str, tuple[Holder, ...]] = {}
    if now.listing is not None:
        memo = _memo(last, now.listing.snapshot, now.resolved, sample.devices, seen)
        holders, devices = memo.held.holders, memo.devices
        unknown_ids = memo.held.unknown_ids if last is None or memo.held is not last.held else ()
    elif sample.allocations_seq is None and any(d.jobs is not None for d in sample.devices):
        holders = {d.uuid: tuple(map(holder_of_job, d.jobs)) for d in sample.devices if d.jobs}
        attribution = "exact"
        devices = tuple([_held_by_jobs(d, holders.get(d.uuid, ())) for d in sample.devices])
    else:
        devices = (_HELD_BY_NOBODY,) * len(sample.devices)
    tick = _Then(holders, attribution)
    then: dict[int | None, _Then] = {
        seq: _Then(
            _held(one.listing.snapshot, one.resolved, sample.devices).holders if one.listing else {}, one.attribution
        )
        for seq, one in earlier.items()
    }
    shares = [divide(d, held.holders, held.rows) for d, held in zip(sample.devices, devices, strict=True)]
    attributed = [
        AttributedDevice(
            d.uuid, d.index, d.vendor, d.model, d.pci_bus_id, d.minor, d.state, d.mig, d.metrics, d.processes, d.jobs,
            None if d.events is None else _events(d.events, d.uuid, tick, then), d.info, d.xids, d.read_ms,
            d.compute_slices, share.holders, share.unattributed, share.scaled, held.conflict,
        )
        for d, held, share in zip(sample.devices, devices, shares, strict=True)
    ]  # fmt: skip
    out = AttributedSample(
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
        attribution=attribution,
        node_labels=now.resolved.node_labels,
        devices=tuple(attributed),
        unwell=_unwell(now.resolved.unwell, sample) if now.resolved.unwell else (),
    )
    return Joined(out, unknown_ids), memo


def _held_by_jobs(device: Device, jobs: tuple[Holder, ...]) -> HeldDevice:
    """A device that jobs hold. Its processes show their jobs as others show their pods: a job's id is its uid."""
    processes = [msgspec.structs.replace(one, pod_uid=one.job_id) for one in device.processes or ()]
    rows = rows_of(msgspec.structs.replace(device, processes=processes), jobs) if device.processes is not None else None
    return HeldDevice(jobs, None, rows)


def _unwell(reported: Sequence[UnwellDevice], sample: Sample) -> tuple[UnwellDevice, ...]:
    """What the API server says of devices, each by its UUID if its id means a device of the tick."""
    index, found = DeviceIndex(sample.devices), list[UnwellDevice]()
    for one in reported:
        uuid = None
        with contextlib.suppress(UnknownDeviceId):
            uuid = index.find(parse(one.device_id))
        found.append(one if uuid is None else msgspec.structs.replace(one, device_id=uuid))
    return tuple(found)


def _memo(
    last: Memo | None, snapshot: Allocations, found: Resolved, devices: Sequence[Device], seen: DevicesSeen
) -> Memo:
    """Who holds the devices of a tick by a snapshot: the last answer, as far as all is the same that it depends on."""
    held: HeldDevices | None = None
    if last is not None and last.snapshot is snapshot and last.seen.inventory is seen.inventory:
        was = last.resolved
        if was is found and last.seen is seen:
            return last
        if was is found or (
            was.dra is found.dra
            and was.admin is found.admin
            and was.over == found.over
            and was.pods.keys() == found.pods.keys()
            and all(found.pods[name] is pod for name, pod in was.pods.items())
        ):
            held = last.held
            if last.seen is seen and found.shows(seen.uids) == was.shows(seen.uids):
                return Memo(snapshot, seen, found, held, last.devices)
    if held is None:
        held = _held(snapshot, found, devices)
    pod_of, each = None if found.shown is None else found.shown.get, list[HeldDevice]()
    for device in devices:
        evidence = observe(device, held.holders.get(device.uuid, ()), pod_of)
        each.append(HeldDevice(evidence.holders, evidence.conflict, rows_of(device, evidence.holders)))
    return Memo(snapshot, seen, found, held, tuple(each))


def _held(snapshot: Allocations, found: Resolved, devices: Sequence[Device]) -> HeldDevices:
    return hold(snapshot, devices, found.pods, found.dra, over=found.over, admin=found.admin)


def _events(
    events: Sequence[Event], uuid: str, tick: _Then, earlier: Mapping[int | None, _Then]
) -> tuple[AttributedEvent, ...]:
    """The events of a device, each with its own holders and attribution if these are not the tick's."""
    held, found = tick.holders.get(uuid, ()), []
    for event in events:
        then = earlier.get(event.allocations_seq, tick)
        holders = then.holders.get(uuid, ())
        same = _identities(holders) == _identities(held)
        own = None if same else holders, None if then.attribution == tick.attribution else then.attribution
        found.append(AttributedEvent(event.kind, event.code, event.ts_ms, event.allocations_seq, *own))
    return tuple(found)


def _identities(holders: Sequence[Holder]) -> list[tuple[str, str, str | None, str | None]]:
    return [(one.namespace, one.pod, one.pod_uid, one.container) for one in holders]
