"""What the conditions remember of a node: its devices, who holds them since when, and how far their counters were.

In: ticks. Out: the memory after each. It is the same object if nothing changed, and has the same devices if only
counters changed: so the state is written on changes only. Pure; all times are the ticks' own.

Errors are counted within the last minute of the ticks' time. That window moves in buckets of five seconds, so a counter
that rises all the time takes at most 14 numbers:

- An error counts from the tick that shows it, for at least 60 s and for less than 65 s. It never comes back.
- The first reading of a counter is where it begins: it shows no error. A reading below the last one is a counter that
  began again at zero, so all of it is errors.
- A tick without a reading shows no error. Those that came meanwhile are shown by the next reading.
- If the node's clock was set back, what counted before counts as shown by the first tick after.
"""

from collections.abc import Sequence
from itertools import product, repeat
from operator import attrgetter
from sys import intern

import msgspec

from delivery.replays import LastTick
from streams.alerts.tick import Device, Tick
from streams.alerts.uses import UseNeeds, Uses, uses_of
from topics.alerts import AlertState, Tracked
from topics.attributed import Holder, HoldingPod, by_pod
from topics.topic import decoder

WINDOW_MS = 60_000
BUCKET_MS = 5_000
XID = "xid/"  # what the names of counters of XID errors begin with; the code follows

COUNTERS = (
    "ecc_uncorrected_volatile_total", "ecc_uncorrected_aggregate_total", "nvlink_crc_errors_total",
    "nvlink_replay_errors_total", "nvlink_recovery_errors_total",
)  # fmt: skip
"""The metrics whose errors within a minute rules judge."""

_replace = msgspec.structs.replace


class Window(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A counter's last reading, and its errors by bucket: (its start in units of :data:`BUCKET_MS`, how many)."""

    value: float
    errors: tuple[tuple[int, float], ...] = ()


Windows = dict[str, Window]  # of one device, by the metric
_AT_ZERO = Window(0.0)  # what most counters are, shared by all of them


class HeldBy(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pod that holds a device, and the first tick in which it did.
    If the node's clock was set back to before that, it is the first tick since."""

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
    uses: dict[str, Uses] = {}


def remember(memory: Memory, tick: Tick, forget_ms: int, use_needs: UseNeeds | None = None) -> Memory:
    """The memory after a tick. A device that is missing is forgotten when it has left: a MIG device whose GPU is well
    without it, a GPU that has another in its place, or what has been away for ``forget_ms``. ``wanted``: what of its
    use is remembered."""
    changed: dict[str, Seen] = {}
    counted: dict[str, Windows] = {}
    uses: dict[str, Uses] = {}
    for device in tick.devices:
        seen, before = memory.devices.get(device.uuid), memory.windows.get(device.uuid)
        now, counters = _seen(seen, device, tick, memory.run_id), windows_of(device, before, tick.ts_ms)
        if now is not seen:
            changed[device.uuid] = now
        if counters is not None and counters is not before:
            counted[device.uuid] = counters
        if use_needs is not None and now.pods:
            used = uses_of(device, now.pods, memory.uses.get(device.uuid, ()), tick, use_needs)
            if used:
                uses[device.uuid] = used
    present = {device.uuid for device in tick.devices}
    missing = [uuid for uuid in memory.devices if uuid not in present]
    devices = _without_what_left(memory, changed, missing, tick, forget_ms) if changed or missing else memory.devices
    windows = {**memory.windows, **counted} if counted else memory.windows
    if devices is not memory.devices and any(uuid not in devices for uuid in windows):
        windows = {uuid: counters for uuid, counters in windows.items() if uuid in devices}
    uses |= {uuid: memory.uses[uuid] for uuid in missing if uuid in devices and uuid in memory.uses}
    after = Memory(tick.run_id, devices, windows, memory.uses if uses == memory.uses else uses)
    same = after.run_id == memory.run_id and devices is memory.devices and windows is memory.windows
    return memory if same and after.uses is memory.uses else after


def _without_what_left(
    memory: Memory, changed: dict[str, Seen], missing: Sequence[str], tick: Tick, forget_ms: int
) -> dict[str, Seen]:
    """The devices after a tick; the same object if nothing changed."""
    devices = {**memory.devices, **changed}
    well = {device.uuid for device in tick.devices if device.state == "ok"}
    places = {device.pci_bus_id for device in tick.devices if device.mig is None} - {None}
    for uuid in missing:
        seen = devices.pop(uuid)
        replaced = seen.parent in well if seen.parent is not None else seen.pci_bus_id in places
        if not replaced and not (seen.missing_ms and tick.ts_ms - seen.missing_ms >= forget_ms):
            counts = seen.counts if memory.run_id == tick.run_id else {}
            devices[uuid] = _replace(seen, counts=counts, missing_ms=seen.missing_ms or tick.ts_ms)
    return memory.devices if devices == memory.devices else devices


def _seen(seen: Seen | None, device: Device, tick: Tick, run_id: int) -> Seen:
    """A device as it is now; the same object if nothing changed. XID errors are counted within a run of the producer,
    which counts them since its start."""
    pods = _pods(seen.pods if seen is not None else (), device.holders, tick)
    counts = seen.counts if seen is not None and run_id in (tick.run_id, 0) else {}
    if device.xids:
        risen = {
            XID + code: Count(total)
            for code, total in device.xids.items()
            if (count := counts.get(XID + code)) is None or count.value != total
        }
        counts = {**counts, **risen} if risen else counts
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
            namespace, since_ms = intern(holder.namespace), tick.ts_ms
            if known is not None and known.observed == holder.observed:  # it has another workload now
                since_ms = min(since_ms, known.since_ms)
            known = HeldBy(namespace, holder.pod, since_ms, holder.pod_uid, kind, name, holder.observed)
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
        and (
            (owner := holder.workload) is None or (pod.workload_name == owner.name and pod.workload_kind == owner.kind)
        )
    )


def _shared(text: str | None) -> str | None:
    """A text that many have, as one object."""
    return None if text is None else intern(text)


# -- errors within a minute


def windows_of(device: Device, before: Windows | None, ts_ms: int) -> Windows | None:
    """The counters of a device after a tick; the same object if nothing changed, None if it has none."""
    values = _counters(device.metrics)
    quiet = _QUIET.get(values, _LOUD)
    if quiet is not _LOUD and (before is None or before is quiet):
        return quiet
    known, changed = before or {}, dict[str, Window]()
    for name, value in zip(COUNTERS, values, strict=True):
        window = known.get(name)
        if window is None:
            if value is not None:
                changed[name] = began(value)
        elif window.errors or (value is not None and value != window.value):
            now = read(window, value, ts_ms)
            if now is not window:
                changed[name] = now
    return {**known, **changed} if changed else before


_counters = attrgetter(*COUNTERS)
_LOUD: Windows = {}
_QUIET: dict[tuple[float | None, ...], Windows | None] = {
    values: {name: _AT_ZERO for name, value in zip(COUNTERS, values, strict=True) if value is not None} or None
    for values in product((None, 0.0), repeat=len(COUNTERS))
}
"""The windows of a device that never had an error, by its counters: most devices share them."""


def began(value: float) -> Window:
    return Window(value) if value else _AT_ZERO


def read(window: Window, value: float | None, ts_ms: int) -> Window:
    """The window after a tick; the same object if nothing changed. ``value`` None: the tick has no reading."""
    if value is None:
        value = window.value
    rise = value - window.value if value >= window.value else value
    now = ts_ms // BUCKET_MS
    kept = [one for one in window.errors if one[0] < now and _is_in(one[0], ts_ms)]
    rise += sum([count for start, count in window.errors if start >= now])
    errors = (*kept, (now, rise)) if rise else tuple(kept)
    return window if value == window.value and errors == window.errors else Window(value, errors)


def within(window: Window | None, ts_ms: int) -> float:
    """The errors in the window that ends with a tick."""
    if window is None or not window.errors:
        return 0.0
    return sum([count for start, count in window.errors if _is_in(start, ts_ms)])


def _is_in(start: int, ts_ms: int) -> bool:
    return ts_ms - start * BUCKET_MS < WINDOW_MS + BUCKET_MS


# -- the state of a node, as gpu.alert-state has it

Order = tuple[int, int, bool]  # by which of two states of a node the later one is known
Identity = tuple[str, str, str, str]  # of a condition within a node: rule, device UUID, pod uid, the rule's own key


class NodeAlerts(AlertState, frozen=True, kw_only=True, omit_defaults=True):
    memory: Memory = Memory()


decode = decoder(NodeAlerts)
encode = msgspec.json.Encoder().encode


def order(state: NodeAlerts) -> Order:
    return state.generation, state.offset, state.silent


def last_tick(state: NodeAlerts) -> LastTick:
    """The last tick of a node, by which replays are known."""
    return LastTick(state.run_id, state.seq, state.offset, max(state.newest_ts_ms, state.last_ts_ms))


def identity(tracked: Tracked) -> Identity:
    return tracked.name, tracked.device, tracked.pod_uid, tracked.key
