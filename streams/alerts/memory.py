"""What the conditions remember of a node: its devices, who holds them since when, and how far their counters were.

In: ticks. Out: the memory after each; the same object if nothing changed, and in it the same devices if nothing but
the counters in windows did, so that state is written on changes only. Pure; all times are of the ticks.
"""

from collections.abc import Sequence
from itertools import repeat
from sys import intern

import msgspec

from delivery.replays import Last
from streams.alerts import windows
from streams.alerts.tick import Device, Tick
from streams.alerts.windows import Window
from topics.alerts import AlertState, Tracked
from topics.attributed import Holder, HoldingPod, by_pod
from topics.topic import decoder

XID = "xid/"
"""What the names of counters of XID errors begin with; the code follows."""

COUNTERS = (
    "ecc_uncorrected_volatile_total",
    "ecc_uncorrected_aggregate_total",
    "nvlink_crc_errors_total",
    "nvlink_replay_errors_total",
    "nvlink_recovery_errors_total",
)
"""The metrics whose errors within a minute rules judge."""

Windows = dict[str, Window]
"""Of one device, by the metric."""

_replace = msgspec.structs.replace


class HeldBy(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pod that holds a device, and the first tick in which it did.

    Where the node's clock was set back to before that, it is the first tick since.
    """

    namespace: str
    pod: str
    since_ms: int
    pod_uid: str | None = None
    workload_kind: str | None = None
    workload_name: str | None = None
    observed: bool = False


class Count(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many XID errors of a code the producer had counted in the last tick that has them."""

    value: float


class Seen(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device of the inventory as it was when last seen. ``missing_ms``: the first tick without it."""

    index: int | None = None
    model: str | None = None
    pci_bus_id: str | None = None
    parent: str | None = None
    profile: str | None = None
    pods: tuple[HeldBy, ...] = ()
    counts: dict[str, Count] = {}
    missing_ms: int = 0


class Memory(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is remembered of a node, each by the device's uuid. ``run_id`` 0: nothing yet."""

    run_id: int = 0
    devices: dict[str, Seen] = {}
    windows: dict[str, Windows] = {}


def remember(memory: Memory, tick: Tick, forget_ms: int) -> Memory:
    """The memory after a tick. A GPU that is missing is forgotten after a time, or when another is in its place."""
    changed: dict[str, Seen] = {}
    counted: dict[str, Windows] = {}
    for device in tick.devices:
        seen, counters = memory.devices.get(device.uuid), memory.windows.get(device.uuid)
        now, read = _seen(seen, device, tick, memory.run_id), _windows(counters, device, tick.ts_ms)
        if now is not seen:
            changed[device.uuid] = now
        if read is not counters and read is not None:
            counted[device.uuid] = read
    gone: list[str] = []
    if len(memory.devices) != len(tick.devices) or any(one.uuid not in memory.devices for one in tick.devices):
        present = {device.uuid for device in tick.devices}
        gone = [uuid for uuid in memory.devices if uuid not in present]
    if not changed and not counted and not gone and memory.run_id == tick.run_id:
        return memory
    devices = _devices(memory, tick, changed, gone, forget_ms)
    counters_by_device = {**memory.windows, **counted} if counted else memory.windows
    if devices is not memory.devices and any(uuid not in devices for uuid in counters_by_device):
        counters_by_device = {uuid: one for uuid, one in counters_by_device.items() if uuid in devices}
    if memory.run_id == tick.run_id and devices is memory.devices and counters_by_device is memory.windows:
        return memory
    return Memory(tick.run_id, devices, counters_by_device)


def _devices(memory: Memory, tick: Tick, changed: dict[str, Seen], gone: list[str], forget_ms: int) -> dict[str, Seen]:
    """The inventory after a tick; the same object if nothing changed."""
    if not changed and not gone:
        return memory.devices
    devices = {**memory.devices, **changed}
    for uuid in gone:
        seen = devices.pop(uuid)
        if seen.counts and memory.run_id != tick.run_id:
            seen = _replace(seen, counts={})
        if not _forgotten(seen, tick, forget_ms):
            devices[uuid] = seen if seen.missing_ms else _replace(seen, missing_ms=tick.ts_ms)
    return memory.devices if devices == memory.devices else devices


def _windows(before: Windows | None, device: Device, ts_ms: int) -> Windows | None:
    """The counters of a device after a tick; the same object if nothing changed, None if it has none."""
    metrics, known, changed = device.metrics, before or {}, dict[str, Window]()
    for name in COUNTERS:
        value, window = getattr(metrics, name), known.get(name)
        if window is None:
            if value is not None:
                changed[name] = windows.began(value)
        elif window.errors or (value is not None and value != window.value):
            now = windows.read(window, value, ts_ms)
            if now is not window:
                changed[name] = now
    return {**known, **changed} if changed else before


def _seen(seen: Seen | None, device: Device, tick: Tick, run_id: int) -> Seen:
    pods = _pods(seen.pods if seen is not None else (), device.holders, tick)
    counts = _counts(seen, device, tick, run_id)
    if (
        seen is not None
        and pods is seen.pods
        and counts is seen.counts
        and not seen.missing_ms
        and seen.index == device.index
        and seen.model == device.model
        and seen.pci_bus_id == device.pci_bus_id
    ):
        return seen
    parent, profile = (device.mig.parent_uuid, device.mig.profile) if device.mig is not None else (None, None)
    return Seen(device.index, _shared(device.model), device.pci_bus_id, parent, _shared(profile), pods, counts)


def _pods(held: tuple[HeldBy, ...], holders: Sequence[Holder], tick: Tick) -> tuple[HeldBy, ...]:
    """Who holds a device now; each pod since it first did. Without a snapshot it is not known, and stays."""
    if tick.attribution == "none":
        return held
    if len(held) == len(holders) and all(map(_same, held, holders, repeat(tick.ts_ms))):
        return held
    since = {HoldingPod(pod.namespace, pod.pod, pod.pod_uid): pod for pod in held}
    pods: list[HeldBy] = []
    for pod, (holder, *_) in by_pod(holders).items():
        known = since.get(pod)
        if known is None or not _same(known, holder, tick.ts_ms):
            owner = holder.workload
            kind, name = (_shared(owner.kind), owner.name) if owner is not None else (None, None)
            known = HeldBy(
                intern(holder.namespace), holder.pod, tick.ts_ms, holder.pod_uid, kind, name, holder.observed
            )
        pods.append(known)
    return held if tuple(pods) == held else tuple(pods)


def _same(pod: HeldBy, holder: Holder, ts_ms: int) -> bool:
    """Whether the holder is the pod, as it is remembered; not from after now."""
    return (
        pod.pod == holder.pod
        and pod.pod_uid == holder.pod_uid
        and pod.namespace == holder.namespace
        and pod.observed == holder.observed
        and pod.since_ms <= ts_ms
    )


def _shared(text: str | None) -> str | None:
    """A text of which there are few, as one object for all who have it."""
    return None if text is None else intern(text)


def _counts(seen: Seen | None, device: Device, tick: Tick, run_id: int) -> dict[str, Count]:
    """The XID errors of a run of the producer, which counts them since its start."""
    before = seen.counts if seen is not None and run_id in (tick.run_id, 0) else {}
    after = {
        XID + code: Count(total)
        for code, total in device.xids.items()
        if (count := before.get(XID + code)) is None or count.value != total
    }
    if after or seen is None:
        return {**before, **after}
    return before if before or not seen.counts else {}


def _forgotten(seen: Seen, tick: Tick, forget_ms: int) -> bool:
    """Whether a device that is not there has left: a MIG device whose GPU is well without it, a GPU that has another in
    its place, or what has been away for long."""
    if seen.missing_ms and tick.ts_ms - seen.missing_ms >= forget_ms:
        return True
    if seen.parent is not None:
        return any(device.uuid == seen.parent and device.state == "ok" for device in tick.devices)
    return seen.pci_bus_id is not None and any(
        device.mig is None and device.pci_bus_id == seen.pci_bus_id for device in tick.devices
    )


# -- the state of a node, as gpu.alert-state has it

Order = tuple[int, int, bool]
"""By which of two states of a node the later one is known."""

Identity = tuple[str, str, str, str]
"""What identifies a condition within a node: the rule's name, the device, the pod's uid, the rule's own key."""


class NodeAlerts(AlertState, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a node, its memory decoded."""

    memory: Memory = Memory()


decode = decoder(NodeAlerts)
encode = msgspec.json.Encoder().encode


def order(state: NodeAlerts) -> Order:
    """Which of two states of a node is the later one."""
    return state.generation, state.offset, state.silent


def last_tick(state: NodeAlerts) -> Last:
    """The last tick of a node, by which replays are known."""
    return Last(state.run_id, state.seq, state.offset, max(state.newest_ts_ms, state.last_ts_ms))


def identity(tracked: Tracked) -> Identity:
    """What a tracked condition is about."""
    return tracked.name, tracked.device, tracked.pod_uid, tracked.key
