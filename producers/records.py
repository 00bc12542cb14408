"""The records that producers write, with their numbers, and the ticks that wait to be sent. All of it is pure.

In: the devices and containers of each tick, and the pods of a node, as plain dicts. Out: values of gpu.samples,
gpu.allocations and gpu.workloads, in JSON; the runs, ticks and snapshots of a node, numbered as readers expect; the
oldest tick that waits, and those that were dropped.
State: a node's run, the last tick of it, and the last snapshot of it; its ticks that wait.
On failure: :class:`Unencodable`, for a value that JSON can't express.
A missing value is absent: ``None``, NaN and infinities are left out, and zero is zero.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cramjam
import msgspec
import orjson

from topics.topic import MAX_MESSAGE_BYTES, SCHEMA, Name

READ_MS = 10_000  # reading a tick takes at most this; an event that is later is from before the clock was set back
LARGEST_TICK_BYTES = MAX_MESSAGE_BYTES // 2  # with its processes: attribution adds the holders
PLAIN_TICKS = 4  # how many of the newest ticks are not compressed, if there is room
MIN_COMPRESSED_BYTES = 512  # a smaller tick is not worth compressing
_CROWDED_SHARE = 7 / 8  # a buffer fuller than this has no room for several uncompressed ticks in flight
Containers = Iterable[Mapping[str, Any]] | None  # those of gpu.allocations as dicts; None: there is no kubelet


class Unencodable(Exception):
    """The record has a value that JSON can't express, such as lone surrogates. Drop and count it."""


def checked_name(name_kind: str, name: str) -> str:
    """``name``, if it is valid for a cluster or a node. Raises ValueError with a text that begins with ``name_kind``,
    and says which names are valid."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ValueError(f"{name_kind} {name!r}: a name has 1-253 of A-Z a-z 0-9 . _ -") from None


def sample(
    *,
    cluster: str,
    node: str,
    run_id: int,
    seq: int,
    ts_ms: int,
    allocations_seq: int | None,
    interval_ms: int | None = None,
    devices: Sequence[Mapping[str, Any]],
) -> bytes:
    """One node's tick. ``devices`` are dicts as in gpu.samples; ``allocations_seq`` None: there is no kubelet."""
    head = {"schema": SCHEMA, "cluster": cluster, "node": node, "run_id": run_id, "seq": seq, "ts_ms": ts_ms}
    head |= {"allocations_seq": allocations_seq, "interval_ms": interval_ms}
    return _dumps({**head, "devices": [_device(device) for device in devices]})


def fitting_sample(*, devices: Sequence[Mapping[str, Any]], **head: Any) -> tuple[bytes, int]:
    """A tick as :func:`sample` makes it. If it is too large, the devices with the most processes are without them, as
    many as need be; returns how many, too. Whoever may use a GPU may start any number of processes there."""
    value, kept, crowded = sample(devices=devices, **head), list(devices), 0
    excess_bytes = len(value) - LARGEST_TICK_BYTES
    if excess_bytes <= 0:
        return value, 0
    for number in sorted(range(len(kept)), key=lambda number: -len(kept[number].get("processes") or ())):
        if excess_bytes > 0 and kept[number].get("processes"):
            bare = {key: rows for key, rows in kept[number].items() if key != "processes"}
            excess_bytes -= len(_dumps(_device(kept[number]))) - len(_dumps(_device(bare)))
            kept[number], crowded = bare, crowded + 1
    return sample(devices=kept, **head), crowded


def snapshot(*, cluster: str, node: str, run_id: int, seq: int, ts_ms: int, content: bytes) -> bytes:
    """A snapshot of a node; ``content`` is what :func:`containers_content` made of its containers."""
    head = {"schema": SCHEMA, "cluster": cluster, "node": node, "run_id": run_id, "seq": seq, "ts_ms": ts_ms}
    return _dumps({**head, "containers": orjson.Fragment(content)})


def workloads(*, cluster: str, node: str, epoch: int, seq: int, ts_ms: int, content: bytes) -> bytes:
    """A record of gpu.workloads; ``content`` is an encoded :class:`WorkloadsContent`."""
    head = {"schema": SCHEMA, "cluster": cluster, "node": node, "epoch": epoch, "seq": seq, "ts_ms": ts_ms}
    return _dumps(head)[:-1] + b"," + content[1:]


def containers_content(containers: Iterable[Mapping[str, Any]]) -> bytes:
    """The containers of a snapshot, sorted, so that equal content gives equal bytes (a kubelet's order varies)."""

    def sort_key(row: Mapping[str, Any]) -> tuple[str, ...]:
        ids = row["device_ids"]
        return (row["namespace"], row["pod"], row["container"], row.get("resource", ""), ids[0] if ids else "")

    rows = [_present({**row, "device_ids": sorted(row.get("device_ids") or ())}) for row in containers]
    return _dumps(sorted(rows, key=sort_key), sort_keys=True)


class WorkloadsContent(NamedTuple):
    """The content of a gpu.workloads record, without its numbers.

    ``pods``, ``dra_devices``, ``admin_claims`` and ``unwell`` are dicts as in the record. ``removed``: the node does
    not exist any more. ``shed`` is not in the record: it counts the pods for which, or for whose labels and
    annotations, the record had no room.
    """

    node_labels: Mapping[str, str]
    pods: Sequence[Mapping[str, Any]]
    dra_devices: Sequence[Mapping[str, Any]] = ()
    admin_claims: Sequence[Mapping[str, Any]] = ()
    removed: bool = False
    shed: int = 0
    unwell: Sequence[Mapping[str, Any]] = ()

    def encoded(self) -> bytes:
        """The content as JSON, sorted, so that equal content gives equal bytes. Raises Unencodable."""
        rows = sorted(map(_present, self.pods), key=lambda pod: (pod["namespace"], pod["name"], pod["uid"]))
        dra_devices = sorted(
            map(_present, self.dra_devices), key=lambda row: (row["driver"], row["pool"], row["device"])
        )
        content = {"node_labels": dict(self.node_labels), "pods": rows, "dra_devices": dra_devices}
        if admin_claims := sorted(map(dict, self.admin_claims), key=lambda row: sorted(row.items())):
            content["admin_claims"] = admin_claims
        if unwell_devices := sorted(map(_present, self.unwell), key=lambda row: sorted(row.items())):
            content["unwell"] = unwell_devices
        return _dumps(content | {"removed": True} if self.removed else content, sort_keys=True)


def _device(device: Mapping[str, Any]) -> Mapping[str, Any]:
    """A device without its missing values. Most have none, and are returned as they are: if the sum of the metrics is
    finite, none is missing. A sum that overflows only costs a copy."""
    metrics, processes = device.get("metrics"), device.get("processes")
    try:
        has_all_values = math.isfinite(sum(metrics.values())) if metrics else True
    except (TypeError, OverflowError):
        has_all_values = False
    if has_all_values and all(_is_present(value) for row in processes or () for value in row.values()):
        return device
    cleaned = _present(device)
    if metrics is not None:
        cleaned["metrics"] = _present(metrics)
    if processes is not None:
        cleaned["processes"] = [_present(row) for row in processes]
    return cleaned


def _present(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if _is_present(value)}


def _is_present(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _dumps(record: object, *, sort_keys: bool = False) -> bytes:
    try:
        return orjson.dumps(record, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except orjson.JSONEncodeError as error:
        raise Unencodable(str(error)) from error


# -- the numbers of a node's records


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A snapshot of gpu.allocations: its identity in its run, its content in one order, and the encoded record."""

    run_id: int
    seq: int
    content: bytes
    value: bytes


class NumberedTick(NamedTuple):
    """A tick with its run and its number. ``value`` is None if it could not be encoded; the ``seq`` is used up anyway.
    ``snapshots`` are the tick's own and those that its events name, in order. ``crowded`` is how many devices have so
    many processes that their lists had no room."""

    run_id: int
    seq: int
    value: bytes | None
    snapshots: tuple[Snapshot, ...] = ()
    crowded: int = 0


class Numbering:
    """Numbers the ticks and snapshots of one node. ``run_id`` is that of the first run: its start in milliseconds since
    the epoch. ``interval_ms`` is the time between two ticks. Raises ValueError if ``cluster`` or ``node`` can't be a
    name."""

    def __init__(self, *, cluster: str, node: str, run_id: int, interval_ms: int | None = None) -> None:
        self.cluster = checked_name("cluster", cluster)
        self.node = checked_name("node", node)
        self.run_id, self._interval_ms = run_id, interval_ms
        self._seqs = {run_id: 0}
        self._last_ts_ms = -1
        self._snapshot: Snapshot | None = None

    def runs(self) -> dict[int, int]:
        """The last ``seq`` of every run so far."""
        return dict(self._seqs)

    def step(
        self,
        ts_ms: int,
        devices: Sequence[Mapping[str, Any]],
        containers: Containers,
        in_force: Callable[[int], Containers] | None = None,
    ) -> NumberedTick:
        """Number a tick read at ``ts_ms``. If its time is not after the last tick's, a new run begins.

        Without ``containers`` the tick names no snapshot. ``in_force`` returns the containers at an earlier time, for
        the events: an event after the previous tick, or while this one was read, names the snapshot of its own time.
        Snapshots are numbered in the order of time.
        """
        previous_ts_ms, self._last_ts_ms = self._last_ts_ms, ts_ms
        if ts_ms <= previous_ts_ms:
            self.run_id = next(run_id for run_id in itertools.count(ts_ms) if run_id not in self._seqs)
            self._seqs[self.run_id], self._snapshot = 0, None
        seq = self._seqs[self.run_id] = self._seqs[self.run_id] + 1
        snapshots: dict[Snapshot, None] = {}
        tick_snapshot: Snapshot | None = None
        try:
            if containers is not None:
                events = [event for device in devices for event in device.get("events") or () if "ts_ms" in event]
                known = {
                    at_ms: rows
                    for at_ms in sorted({event["ts_ms"] for event in events})
                    if in_force is not None and previous_ts_ms < min(at_ms, ts_ms)  # none of an earlier run
                    if at_ms <= ts_ms + READ_MS and (rows := in_force(at_ms)) is not None
                }
                earlier = {at_ms: self._snapshot_of(at_ms, rows) for at_ms, rows in known.items() if at_ms <= ts_ms}
                tick_snapshot = self._snapshot_of(ts_ms, containers)
                later = {at_ms: self._snapshot_of(at_ms, rows) for at_ms, rows in known.items() if at_ms > ts_ms}
                snapshots = dict.fromkeys([*earlier.values(), tick_snapshot, *later.values()])
                snapshot_by_time = earlier | later
                devices = [
                    _with_seqs(device, snapshot_by_time) if device.get("events") else device for device in devices
                ]
            value, crowded = fitting_sample(
                cluster=self.cluster,
                node=self.node,
                run_id=self.run_id,
                seq=seq,
                ts_ms=ts_ms,
                allocations_seq=tick_snapshot.seq if tick_snapshot else None,
                interval_ms=self._interval_ms,
                devices=devices,
            )
        except Unencodable:
            return NumberedTick(self.run_id, seq, None)
        return NumberedTick(self.run_id, seq, value, tuple(snapshots), crowded)

    def _snapshot_of(self, ts_ms: int, containers: Iterable[Mapping[str, Any]]) -> Snapshot:
        """The snapshot of these containers: the last one if its content is equal, else a new one."""
        last, content = self._snapshot, containers_content(containers)
        if last is not None and last.content == content:
            return last
        run_id, seq = self.run_id, last.seq + 1 if last else 1
        value = snapshot(cluster=self.cluster, node=self.node, run_id=run_id, seq=seq, ts_ms=ts_ms, content=content)
        self._snapshot = Snapshot(run_id, seq, content, value)
        return self._snapshot


def _with_seqs(device: Mapping[str, Any], snapshot_by_time: Mapping[int, Snapshot]) -> Mapping[str, Any]:
    """A device whose events name the snapshots that were in force at their times, if they are known."""
    events = [
        {**event, "allocations_seq": snapshot_by_time[event_ms].seq}
        if (event_ms := event.get("ts_ms")) in snapshot_by_time
        else event
        for event in device["events"]
    ]
    return {**device, "events": events}


# -- the ticks that wait to be sent


@dataclass(frozen=True, slots=True, eq=False)
class WaitingTick:
    """An encoded tick, the snapshots that it names, and the time of its creation on a clock that never steps back."""

    value: bytes
    snapshots: tuple[Snapshot, ...]
    made_at_s: float
    compressed: bool = False


def compressed(tick: WaitingTick) -> WaitingTick:
    """The tick with its value compressed; the same tick if that would not be smaller."""
    if tick.compressed or len(tick.value) < MIN_COMPRESSED_BYTES:
        return tick
    value = bytes(cramjam.zstd.compress(tick.value, level=1))
    return replace(tick, value=value, compressed=True) if len(value) < len(tick.value) else tick


class RetryBuffer:
    """The ticks of one node that wait to be sent, bounded by bytes and by age: the oldest is dropped.

    The newest few are not compressed, so that a tick that is sent at once costs nothing extra. Those that wait longer
    are compressed, each by itself; a tick of many devices becomes a tenth as large.
    ``max_bytes`` bounds the sum of their values, compressed or not, and of ``in_flight_bytes``, which the owner sets to
    the bytes that are sent and not yet acknowledged. ``max_age_s`` bounds how long a tick waits. The newest tick is
    never dropped for its size: a buffer smaller than a tick holds one tick.
    """

    def __init__(self, *, max_bytes: int = 16 * 1024 * 1024, max_age_s: float = 900.0) -> None:
        self.max_bytes, self.max_age_s = max_bytes, max_age_s
        self.in_flight_bytes = 0
        self.bytes = 0
        self._compressed_ticks: deque[WaitingTick] = deque()
        self._plain_ticks: deque[WaitingTick] = deque()

    def __len__(self) -> int:
        return len(self._compressed_ticks) + len(self._plain_ticks)

    @property
    def crowded(self) -> bool:
        """Whether a compressed tick should wait until those in flight are acknowledged, because it needs more room when
        it is sent."""
        return self.bytes + self.in_flight_bytes > self.max_bytes * _CROWDED_SHARE

    def capacity(self, value: bytes) -> int:
        """How many ticks like this one fit."""
        waiting = compressed(WaitingTick(value, (), 0.0)).value
        return 1 + max(0, self.max_bytes - len(value)) // max(1, len(waiting))

    def head(self) -> WaitingTick | None:
        """The oldest tick, compressed or not; it stays in the buffer."""
        ticks = self._compressed_ticks or self._plain_ticks
        return ticks[0] if ticks else None

    def push(self, tick: WaitingTick) -> list[WaitingTick]:
        """Add the newest tick; returns the ticks that were dropped because there was no room."""
        self._plain_ticks.append(tick)
        self.bytes += len(tick.value)
        while len(self._plain_ticks) > 1 and (len(self._plain_ticks) > PLAIN_TICKS or self._is_over_limit()):
            plain = self._plain_ticks.popleft()
            self._compressed_ticks.append(compressed(plain))
            self.bytes += len(self._compressed_ticks[-1].value) - len(plain.value)
        dropped = []
        while len(self) > 1 and self._is_over_limit():
            dropped.append(self._pop_oldest())
        return dropped

    def expire(self, now_s: float) -> list[WaitingTick]:
        """Drop the ticks that have waited for longer than ``max_age_s``, and return them."""
        expired = []
        while (head := self.head()) is not None and now_s - head.made_at_s > self.max_age_s:
            expired.append(self._pop_oldest())
        return expired

    def pop(self) -> WaitingTick:
        """Remove the oldest tick and return it uncompressed. Raises IndexError if the buffer is empty."""
        tick = self._pop_oldest()
        if not tick.compressed:
            return tick
        return replace(tick, value=bytes(cramjam.zstd.decompress(tick.value)), compressed=False)

    def clear(self) -> None:
        self._compressed_ticks.clear()
        self._plain_ticks.clear()
        self.bytes = 0

    def _is_over_limit(self) -> bool:
        return self.bytes + self.in_flight_bytes > self.max_bytes

    def _pop_oldest(self) -> WaitingTick:
        tick = (self._compressed_ticks or self._plain_ticks).popleft()
        self.bytes -= len(tick.value)
        return tick
