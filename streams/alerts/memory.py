"""The memory that the conditions have of a node: its devices, since when pods hold them, and the last counter readings.

In: ticks. Out: the memory after each. It is the same object if nothing changed, and has the same devices if only
counters changed, so that the state is only written on changes. Pure; all times are the ticks' own.

Errors are counted within the last minute of the ticks' time. That window moves in buckets of five seconds, so a counter
that rises all the time takes at most 14 numbers:

- An error counts from the tick that shows it, for at least 60 s and less than 65 s, and never again.
- The first reading of a counter shows no error. A reading below the last one is of a counter that was reset to zero, so
  all of it is errors.
- A tick without a reading shows no error. The next reading has the errors that came meanwhile.
- If the node's clock is set back, the errors that still count get the time of the first tick after that.
"""

from collections.abc import Sequence
from itertools import product, repeat
from operator import attrgetter

import msgspec

from delivery.replays import LastTick
from streams.alerts.tick import Device, Tick
from streams.alerts.uses import UseNeeds, Uses, update_uses
from topics.alerts import AlertState, Tracked
from topics.attributed import Holder, HoldingPod, by_pod
from topics.topic import decoder, shared

WINDOW_MS = 60_000
BUCKET_MS = 5_000
YOUNG_MS = 10_000  # a condition that is pending for less is not saved yet; rising counters are saved at this interval
YOUNG_USES_MS = 20_000  # sums of use, which every tick changes, are saved at this interval
MOST_REMOVED = 2048  # removed devices whose errors are remembered: the producer itself counts those of half as many
_LARGEST = 1e30  # a counter that reads more counts nothing, and sums of such readings may not be floats
XID = "xid/"  # the prefix of the names of XID counters; the code follows

COUNTERS = (
    "ecc_uncorrected_volatile_total", "ecc_uncorrected_aggregate_total", "nvlink_crc_errors_total",
    "nvlink_replay_errors_total", "nvlink_recovery_errors_total",
)  # fmt: skip
"""The metrics of which rules judge the errors within a minute."""

_replace = msgspec.structs.replace


class ErrorWindow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A counter's last reading, and its errors by bucket: (the bucket's start in units of :data:`BUCKET_MS`, count)."""

    value: float
    errors: tuple[tuple[int, float], ...] = ()


ErrorWindows = dict[str, ErrorWindow]  # of one device, by metric
_AT_ZERO = ErrorWindow(0.0)  # shared by all counters that are zero, which are most


class PodMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pod that holds a device. ``since_ms`` is the time of the first tick in which it did or, if the node's clock was
    set back to before that, of the first tick after."""

    namespace: str
    pod: str
    since_ms: int
    pod_uid: str | None = None
    workload_kind: str | None = None
    workload_name: str | None = None
    observed: bool = False


class Count(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The producer's count of XID errors of one code, in the last tick that has it."""

    value: float


class DeviceMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device as it was in the last tick that has it. ``missing_ms`` is the time of the first tick without it or, if
    the node's clock was set back to before that, of the first tick after."""

    index: int | None = None
    model: str | None = None
    pci_bus_id: str | None = None
    parent: str | None = None
    profile: str | None = None
    pods: tuple[PodMemory, ...] = ()
    counts: dict[str, Count] = {}
    missing_ms: int = 0


class Memory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The memory of a node, by the devices' UUIDs. ``run_id`` is 0 before the first tick. ``removed_counts`` are those
    of the last devices that were removed in this run: one that is made again has the same UUID, and its producer goes
    on counting."""

    run_id: int = 0
    devices: dict[str, DeviceMemory] = {}
    windows: dict[str, ErrorWindows] = {}
    uses: dict[str, Uses] = {}
    removed_counts: dict[str, dict[str, Count]] = {}

    def xid_counts(self, uuid: str, run_id: int) -> dict[str, Count]:
        """How many XID errors a device had in a run of the producer, by code, until the last tick that has it."""
        if self.run_id != run_id:
            return {}
        device = self.devices.get(uuid)
        return device.counts if device is not None else self.removed_counts.get(uuid, {})


def with_known_uids(tick: Tick, memory: Memory) -> Tick:
    """The tick, in which a pod without a uid has the one that it had on its device before. A kubelet that was restarted
    names pods without their uids for some seconds, and if nothing else reports these, each pod would seem to end."""
    if all(holder.pod_uid for device in tick.devices for holder in device.holders):
        return tick
    devices = []
    for device in tick.devices:
        remembered = memory.devices.get(device.uuid)
        uids = {(pod.namespace, pod.pod): pod.pod_uid for pod in remembered.pods} if remembered is not None else {}
        named = {(holder.namespace, holder.pod) for holder in device.holders if holder.pod_uid}
        holders = [
            holder
            if holder.pod_uid or (holder.namespace, holder.pod) in named
            else _replace(holder, pod_uid=uids.get((holder.namespace, holder.pod)))
            for holder in device.holders
        ]
        devices.append(_replace(device, holders=tuple(holders)))
    return _replace(tick, devices=tuple(devices))


def remember(memory: Memory, tick: Tick, forget_ms: int, use_needs: UseNeeds | None = None) -> Memory:
    """The memory after a tick; the same object if nothing changed.

    A missing device is forgotten if it was removed: a MIG device whose GPU is ok, a GPU with another one at its PCI
    address, or any device that is missing for ``forget_ms``. ``use_needs``: the sums of use to keep, None for none.
    """
    changed: dict[str, DeviceMemory] = {}
    changed_windows: dict[str, ErrorWindows] = {}
    uses: dict[str, Uses] = {}
    for device in tick.devices:
        remembered, windows_before = memory.devices.get(device.uuid), memory.windows.get(device.uuid)
        updated = _update_device(remembered, device, tick, memory.xid_counts(device.uuid, tick.run_id))
        windows_now = update_windows(device, windows_before, tick.ts_ms)
        if updated is not remembered:
            changed[device.uuid] = updated
        if windows_now is not None and windows_now is not windows_before:
            changed_windows[device.uuid] = windows_now
        if use_needs is not None and updated.pods:
            device_uses = update_uses(device, updated.pods, memory.uses.get(device.uuid, ()), tick, use_needs)
            if device_uses:
                uses[device.uuid] = device_uses
    present = {device.uuid for device in tick.devices}
    missing = [uuid for uuid in memory.devices if uuid not in present]
    devices = memory.devices
    if changed or missing:
        devices = _update_devices(memory, changed, missing, tick, forget_ms)
    windows = {**memory.windows, **changed_windows} if changed_windows else memory.windows
    removed_counts = memory.removed_counts if memory.run_id == tick.run_id else {}
    if devices is not memory.devices:
        if any(uuid not in devices for uuid in windows):
            windows = {uuid: of_device for uuid, of_device in windows.items() if uuid in devices}
        if memory.run_id == tick.run_id:
            counts = {uuid: device.counts for uuid, device in memory.devices.items() if device.counts}
            removed = [item for item in (removed_counts | counts).items() if item[0] not in devices]
            removed_counts = dict(removed[-MOST_REMOVED:])
    uses |= {uuid: memory.uses[uuid] for uuid in missing if uuid in devices and uuid in memory.uses}
    uses = memory.uses if uses == memory.uses else uses
    after = Memory(tick.run_id, devices, windows, uses, removed_counts)
    unchanged = after.run_id == memory.run_id and devices is memory.devices and windows is memory.windows
    return memory if unchanged and after.uses is memory.uses else after


def _update_devices(
    memory: Memory, changed: dict[str, DeviceMemory], missing: Sequence[str], tick: Tick, forget_ms: int
) -> dict[str, DeviceMemory]:
    """The devices after a tick, without those that were removed; the same object if nothing changed."""
    devices = {**memory.devices, **changed}
    ok_devices = {device.uuid for device in tick.devices if device.state == "ok"}
    pci_bus_ids = {device.pci_bus_id for device in tick.devices if device.mig is None} - {None}
    for uuid in missing:
        remembered = devices.pop(uuid)
        replaced = (
            remembered.parent in ok_devices if remembered.parent is not None else remembered.pci_bus_id in pci_bus_ids
        )
        if not replaced and not (remembered.missing_ms and tick.ts_ms - remembered.missing_ms >= forget_ms):
            counts = remembered.counts if memory.run_id == tick.run_id else {}
            missing_ms = min(remembered.missing_ms or tick.ts_ms, tick.ts_ms)
            devices[uuid] = _replace(remembered, counts=counts, missing_ms=missing_ms)
    return memory.devices if devices == memory.devices else devices


def _update_device(
    remembered: DeviceMemory | None, device: Device, tick: Tick, counts: dict[str, Count]
) -> DeviceMemory:
    """The memory of a device after a tick; the same object if nothing changed. ``counts`` are those of its XID errors
    before, within the run of the producer, which counts them from its start."""
    pods = _update_pods(remembered.pods if remembered is not None else (), device, tick)
    if device.xids:
        changed_counts = {
            XID + code: Count(total)
            for code, total in device.xids.items()
            if (count := counts.get(XID + code)) is None or count.value != total
        }
        counts = {**counts, **changed_counts} if changed_counts else counts
    if (
        remembered is not None
        and pods is remembered.pods
        and counts == remembered.counts
        and not remembered.missing_ms
        and remembered.index == device.index
        and remembered.model == device.model
        and remembered.pci_bus_id == device.pci_bus_id
    ):
        return remembered
    parent, profile = (device.mig.parent_uuid, device.mig.profile) if device.mig is not None else (None, None)
    return DeviceMemory(
        device.index, _interned(device.model), device.pci_bus_id, parent, _interned(profile), pods, counts
    )


def _update_pods(previous: tuple[PodMemory, ...], device: Device, tick: Tick) -> tuple[PodMemory, ...]:
    """The pods that hold a device after a tick, each with since when. If that is not known they are those of before."""
    if tick.attribution_of(device) == "none":
        return previous
    holders = device.holders
    if len(previous) == len(holders) == 1:  # most devices
        if _is_same_holding(previous[0], holders[0], tick.ts_ms):
            return previous
    elif len(previous) == len(holders) and all(map(_is_same_holding, previous, holders, repeat(tick.ts_ms))):
        return previous
    pod_by_identity = {HoldingPod(pod.namespace, pod.pod, pod.pod_uid): pod for pod in previous}
    pods: list[PodMemory] = []
    for pod, (holder, *_) in by_pod(holders).items():
        remembered = pod_by_identity.get(pod)
        if remembered is None or not _is_same_holding(remembered, holder, tick.ts_ms):
            owner = holder.workload
            kind, name = (_interned(owner.kind), owner.name) if owner is not None else (None, None)
            namespace, since_ms = shared(holder.namespace), tick.ts_ms
            if remembered is not None and remembered.observed == holder.observed:  # only its workload has changed
                since_ms = min(since_ms, remembered.since_ms)
            remembered = PodMemory(namespace, holder.pod, since_ms, holder.pod_uid, kind, name, holder.observed)
        pods.append(remembered)
    return previous if tuple(pods) == previous else tuple(pods)


def _is_same_holding(pod: PodMemory, holder: Holder, ts_ms: int) -> bool:
    """Whether a holder is the remembered pod, unchanged, and ``since_ms`` is not in the future."""
    return (
        pod.pod == holder.pod
        and pod.pod_uid == holder.pod_uid
        and pod.namespace == holder.namespace
        and pod.observed == holder.observed
        and pod.since_ms <= ts_ms
        and (
            (owner := holder.workload) is None or (pod.workload_name == owner.name and pod.workload_kind == owner.kind)
        )
    )


def _interned(text: str | None) -> str | None:
    """One object for equal texts: many devices and pods share them."""
    return None if text is None else shared(text)


# -- errors within a minute


def update_windows(device: Device, before: ErrorWindows | None, ts_ms: int) -> ErrorWindows | None:
    """The windows of a device's counters after a tick; the same object if nothing changed, None without counters."""
    values = _counter_values(device.metrics)
    quiet_windows = _QUIET_WINDOWS.get(values, _NOT_QUIET)
    if quiet_windows is not _NOT_QUIET and (before is None or before is quiet_windows):
        return quiet_windows
    windows, changed = before or {}, dict[str, ErrorWindow]()
    for name, value in zip(COUNTERS, values, strict=True):
        window = windows.get(name)
        if value is not None and not -_LARGEST <= value <= _LARGEST:
            value = None
        if window is None:
            if value is not None:
                changed[name] = ErrorWindow(value) if value else _AT_ZERO  # the first reading
        elif window.errors or (value is not None and value != window.value):
            updated = next_window(window, value, ts_ms)
            if updated is not window:
                changed[name] = updated
    return {**windows, **changed} if changed else before


_counter_values = attrgetter(*COUNTERS)
_NOT_QUIET: ErrorWindows = {}
_QUIET_WINDOWS: dict[tuple[float | None, ...], ErrorWindows | None] = {
    values: {name: _AT_ZERO for name, value in zip(COUNTERS, values, strict=True) if value is not None} or None
    for values in product((None, 0.0), repeat=len(COUNTERS))
}
"""The windows of a device that never had an error, by its counters' values: most devices share them."""


def next_window(window: ErrorWindow, value: float | None, ts_ms: int) -> ErrorWindow:
    """The window after a tick; the same object if nothing changed. ``value`` is None if the tick has no reading."""
    if value is None:
        value = window.value
    rise = value - window.value if value >= window.value else value
    bucket = ts_ms // BUCKET_MS
    earlier_errors = [error for error in window.errors if error[0] < bucket and _is_in_window(error[0], ts_ms)]
    rise += sum([count for start, count in window.errors if start >= bucket])
    errors = (*earlier_errors, (bucket, rise)) if rise else tuple(earlier_errors)
    return window if value == window.value and errors == window.errors else ErrorWindow(value, errors)


def errors_in_window(window: ErrorWindow | None, ts_ms: int) -> float:
    """The number of errors in the window that ends with a tick."""
    if window is None or not window.errors:
        return 0.0
    return sum([count for start, count in window.errors if _is_in_window(start, ts_ms)])


def _is_in_window(start: int, ts_ms: int) -> bool:
    return ts_ms - start * BUCKET_MS < WINDOW_MS + BUCKET_MS


# -- the state of a node, as it is in gpu.alert-state

Identity = tuple[str, str, str, str]  # of a condition of a node: rule, device UUID, pod uid, the rule's own key


class NodeAlerts(AlertState, frozen=True, kw_only=True, omit_defaults=True):
    memory: Memory = Memory()


decode = decoder(NodeAlerts)
encode = msgspec.json.Encoder().encode


def order(state: NodeAlerts) -> tuple[int, int, bool]:
    """The later of two states of a node has the greater one."""
    return state.generation, state.offset, state.silent


def last_tick(state: NodeAlerts) -> LastTick:
    """The last tick of a node, by which :mod:`delivery.replays` recognizes one that is read again."""
    return LastTick(state.run_id, state.seq, state.offset, max(state.newest_ts_ms, state.last_ts_ms))


def identity(tracked: Tracked) -> Identity:
    return tracked.name, tracked.device, tracked.pod_uid, tracked.key


def is_saved(saved: NodeAlerts, current: NodeAlerts) -> bool:
    """Whether a replay from the saved state gives the current one, so that nothing has to be written.
    A condition that became pending a moment ago is not saved yet. Counters that rise all the time are saved at
    intervals."""
    if (saved.maintenance, saved.interval_ms) != (current.maintenance, current.interval_ms):
        return False
    if saved.silent != current.silent or saved.generation != current.generation:
        return False
    now_ms, saved_memory, memory = current.last_ts_ms, saved.memory, current.memory
    if saved_memory is not memory:
        only_uses = saved_memory.windows is memory.windows
        young = 0 <= now_ms - saved.last_ts_ms < (YOUNG_USES_MS if only_uses else YOUNG_MS)
        if not young or saved_memory.devices is not memory.devices or saved_memory.run_id != memory.run_id:
            return False
    if saved.resolved is not current.resolved and saved.resolved != current.resolved:
        return False
    if saved.tracked is current.tracked:
        return True
    saved_identities = {identity(condition) for condition in saved.tracked}
    worth_writing = [
        condition
        for condition in current.tracked
        if identity(condition) in saved_identities
        or condition.alert is not None
        or condition.blind_ms is not None
        or not 0 <= now_ms - condition.since_ms < YOUNG_MS
    ]
    return saved.tracked == tuple(worth_writing)
