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

from streams.attribution.holders import HeldDevices, hold, observe
from streams.attribution.log_time import Listing, Resolved
from streams.attribution.split import split
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


class Named(NamedTuple):
    """A snapshot that a tick or its events name, how certain it is, and its pods as of a time."""

    listing: Listing | None
    attribution: Attribution
    resolved: Resolved


class Memo(msgspec.Struct, frozen=True):
    """The last answer, and all that it depends on."""

    snapshot: Allocations
    inventory: Inventory
    resolved: Resolved
    held: HeldDevices


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


def attribute(
    sample: Sample, offset: int, logged_ms: int, now: Named, earlier: Mapping[int, Named], last: Memo | None
) -> tuple[Joined, Memo | None]:
    """The attributed tick, and the answer to remember. ``earlier`` are the snapshots that only events name, by seq."""
    memo, pod_of, unknown_ids = last, None, tuple[str, ...]()
    holders: Mapping[str, tuple[Holder, ...]] = {}
    if now.listing is not None:
        memo = _memo(last, now.listing.snapshot, now.resolved, sample)
        holders = memo.held.holders
        unknown_ids = memo.held.unknown_ids if last is None or memo.held is not last.held else ()
        pod_of = None if now.resolved.shown is None else now.resolved.shown.get
    elif sample.allocations_seq is None and any(d.jobs is not None for d in sample.devices):
        holders = {d.uuid: tuple(map(holder_of_job, d.jobs)) for d in sample.devices if d.jobs}
        now = now._replace(attribution="exact")
    by_job = now.listing is None and bool(holders)
    tick = _Then(holders, now.attribution)
    then: dict[int | None, _Then] = {}
    for seq, named in earlier.items():
        held = _memo(None, named.listing.snapshot, named.resolved, sample).held.holders if named.listing else {}
        then[seq] = _Then(held, named.attribution)
    devices: list[AttributedDevice] = []
    for d in sample.devices:
        if by_job:
            shared, conflict = split(_with_jobs_as_pods(d), holders.get(d.uuid, ())), None
        else:
            all_holders, conflict = observe(d, holders.get(d.uuid, ()), pod_of)
            shared = split(d, all_holders)
        events = None if d.events is None else _events(d.events, d.uuid, tick, then)
        one = AttributedDevice(
            d.uuid, d.index, d.vendor, d.model, d.pci_bus_id, d.minor, d.state, d.mig, d.metrics, d.processes, d.jobs,
            events, d.info, d.xids, d.read_ms, d.compute_slices, shared.holders, shared.unattributed, shared.scaled,
            conflict,
        )  # fmt: skip
        devices.append(one)
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
        attribution=now.attribution,
        node_labels=now.resolved.node_labels,
        devices=tuple(devices),
        unwell=_unwell(now.resolved.unwell, sample) if now.resolved.unwell else (),
    )
    return Joined(out, unknown_ids), memo


def _with_jobs_as_pods(device: Device) -> Device:
    """A device whose processes show their jobs as others show their pods: a job's id is its holder's uid."""
    if not device.processes:
        return device
    processes = tuple([msgspec.structs.replace(one, pod_uid=one.job_id) for one in device.processes])
    return msgspec.structs.replace(device, processes=processes)


def _unwell(said: Sequence[UnwellDevice], sample: Sample) -> tuple[UnwellDevice, ...]:
    """What the API server says of devices, each by its UUID if its id means a device of the tick."""
    index, found = DeviceIndex(sample.devices), list[UnwellDevice]()
    for one in said:
        uuid = None
        with contextlib.suppress(UnknownDeviceId):
            uuid = index.find(parse(one.device_id))
        found.append(one if uuid is None else msgspec.structs.replace(one, device_id=uuid))
    return tuple(found)


def _memo(last: Memo | None, snapshot: Allocations, found: Resolved, sample: Sample) -> Memo:
    """Who holds the devices of a sample by a snapshot: the last answer, if all is the same that it depends on."""
    inventory = tuple(map(_place, sample.devices))
    if last is not None and last.snapshot is snapshot and last.inventory == inventory:
        was = last.resolved
        if was is found:
            return last
        if (
            was.dra is found.dra
            and was.admin is found.admin
            and was.over == found.over
            and was.pods.keys() == found.pods.keys()
            and all(found.pods[name] is pod for name, pod in was.pods.items())
        ):
            return Memo(snapshot, inventory, found, last.held)
    held = hold(snapshot, sample.devices, found.pods, found.dra, over=found.over, admin=found.admin)
    return Memo(snapshot, inventory, found, held)


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
