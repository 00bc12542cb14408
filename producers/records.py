"""The records that producers write, with their numbers: plain dicts in, JSON bytes out. All of it is pure.

In: what was read at each tick; what is known of a node's pods. Out: values of gpu.samples, gpu.allocations and
gpu.workloads; and the runs, ticks and snapshots of a node, numbered as readers rely on.
State: a node's run, the last tick of it, and the last snapshot of it.
On failure: :class:`Unencodable`, for something that JSON has no word for.
A missing value is absent: ``None``, NaN and infinities are left out, and zero is zero.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import orjson

from topics.topic import SCHEMA, Name

READ_MS = 10_000  # a tick is read within this after its time; a later time is of a clock that was set back
Containers = Iterable[Mapping[str, Any]] | None  # those of gpu.allocations as dicts; None: there is no kubelet


class Unencodable(Exception):
    """This record holds something that JSON has no word for, such as lone surrogates. Drop and count it."""


def checked_name(what: str, name: str) -> str:
    """``name``, if it can name a cluster or a node. Raises ValueError, which says what a name may consist of."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ValueError(f"{what} {name!r}: a name has 1-253 of A-Z a-z 0-9 . _ -") from None


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


def snapshot(*, cluster: str, node: str, run_id: int, seq: int, ts_ms: int, content: bytes) -> bytes:
    """A snapshot of a node; ``content`` is what :func:`containers_content` made of its containers."""
    head = {"schema": SCHEMA, "cluster": cluster, "node": node, "run_id": run_id, "seq": seq, "ts_ms": ts_ms}
    return _dumps({**head, "containers": orjson.Fragment(content)})


def workloads(*, cluster: str, node: str, epoch: int, seq: int, ts_ms: int, content: bytes) -> bytes:
    """What the API server knows of a node's pods; ``content`` is an encoded :class:`WorkloadsContent`."""
    head = {"schema": SCHEMA, "cluster": cluster, "node": node, "epoch": epoch, "seq": seq, "ts_ms": ts_ms}
    return _dumps(head)[:-1] + b"," + content[1:]


def containers_content(containers: Iterable[Mapping[str, Any]]) -> bytes:
    """The containers of a snapshot in one order, so that equal content is equal bytes (a kubelet's order varies)."""

    def order(row: Mapping[str, Any]) -> tuple[str, ...]:
        ids = row["device_ids"]
        return (row["namespace"], row["pod"], row["container"], row.get("resource", ""), ids[0] if ids else "")

    rows = [_present({**row, "device_ids": sorted(row.get("device_ids") or ())}) for row in containers]
    return _dumps(sorted(rows, key=order), sort_keys=True)


class WorkloadsContent(NamedTuple):
    """What a gpu.workloads record says of a node beside its numbers.

    ``pods``, ``dra_devices``, ``admin_claims`` and ``unwell`` are dicts as in the record; ``removed``: there is no such
    node any more. ``shed`` is not in the record: how many pods had no room in it, or none for labels and annotations.
    """

    node_labels: Mapping[str, str]
    pods: Sequence[Mapping[str, Any]]
    dra_devices: Sequence[Mapping[str, Any]] = ()
    admin_claims: Sequence[Mapping[str, Any]] = ()
    removed: bool = False
    shed: int = 0
    unwell: Sequence[Mapping[str, Any]] = ()

    def encoded(self) -> bytes:
        """It in one order, so that equal content is equal bytes. Raises Unencodable."""
        rows = sorted(map(_present, self.pods), key=lambda pod: (pod["namespace"], pod["name"], pod["uid"]))
        dra = sorted(map(_present, self.dra_devices), key=lambda row: (row["driver"], row["pool"], row["device"]))
        content = {"node_labels": dict(self.node_labels), "pods": rows, "dra_devices": dra}
        if admin := sorted(map(dict, self.admin_claims), key=lambda row: sorted(row.items())):
            content["admin_claims"] = admin
        if unwell := sorted(map(_present, self.unwell), key=lambda row: sorted(row.items())):
            content["unwell"] = unwell
        return _dumps(content | {"removed": True} if self.removed else content, sort_keys=True)


def _device(device: Mapping[str, Any]) -> Mapping[str, Any]:
    """A device without its missing values; most have none, and go out as they are.
    No metric is missing if their sum is finite. One that overflows costs a copy, and changes nothing."""
    metrics, processes = device.get("metrics"), device.get("processes")
    try:
        whole = math.isfinite(sum(metrics.values())) if metrics else True
    except (TypeError, OverflowError):
        whole = False
    if whole and all(_is_present(value) for row in processes or () for value in row.values()):
        return device
    clean = _present(device)
    if metrics is not None:
        clean["metrics"] = _present(metrics)
    if processes is not None:
        clean["processes"] = [_present(row) for row in processes]
    return clean


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
    """A tick with its place in its run. ``value`` is None if it could not be encoded; its ``seq`` is used up.
    ``snapshots`` are its own and those that its events name, in order."""

    run_id: int
    seq: int
    value: bytes | None
    snapshots: tuple[Snapshot, ...] = ()


class Numbering:
    """Gives one node's ticks and snapshots their numbers. ``run_id`` is the first run's, milliseconds since the epoch
    at its start; ``interval_ms`` is how far apart its ticks are meant to be. Raises ValueError if ``cluster`` or
    ``node`` can't be a name."""

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
        """Number a tick read at ``ts_ms``. A time that is not after the last tick's starts a new run.

        Without ``containers`` no snapshot is named. ``in_force`` gives those of an earlier time: an event names the
        snapshot of its own time, if it came after the tick before, or while this one was read. Snapshots are in the
        order of time.
        """
        before_ms, self._last_ts_ms = self._last_ts_ms, ts_ms
        if ts_ms <= before_ms:
            self.run_id = next(run_id for run_id in itertools.count(ts_ms) if run_id not in self._seqs)
            self._seqs[self.run_id], self._snapshot = 0, None
        seq = self._seqs[self.run_id] = self._seqs[self.run_id] + 1
        named: dict[Snapshot, None] = {}
        own: Snapshot | None = None
        try:
            if containers is not None:
                events = [event for device in devices for event in device.get("events") or () if "ts_ms" in event]
                known = in_force is not None and ts_ms > before_ms
                times = sorted({event["ts_ms"] for event in events}) if known else []
                earlier = self._snapshots_at([at_ms for at_ms in times if before_ms < at_ms <= ts_ms], in_force)
                own = self._snapshot_of(ts_ms, containers)
                later = self._snapshots_at([at_ms for at_ms in times if 0 < at_ms - ts_ms <= READ_MS], in_force)
                named = dict.fromkeys([*earlier.values(), own, *later.values()])
                by_time = earlier | later
                devices = [_with_seqs(device, by_time) if device.get("events") else device for device in devices]
            value = sample(
                cluster=self.cluster,
                node=self.node,
                run_id=self.run_id,
                seq=seq,
                ts_ms=ts_ms,
                allocations_seq=own.seq if own else None,
                interval_ms=self._interval_ms,
                devices=devices,
            )
        except Unencodable:
            return NumberedTick(self.run_id, seq, None)
        return NumberedTick(self.run_id, seq, value, tuple(named))

    def _snapshots_at(self, times: Sequence[int], in_force: Callable[[int], Containers] | None) -> dict[int, Snapshot]:
        """The snapshot in force at each of these times, which are in order, if it is known."""
        known = {at_ms: in_force(at_ms) for at_ms in times} if in_force is not None else {}
        return {at_ms: self._snapshot_of(at_ms, rows) for at_ms, rows in known.items() if rows is not None}

    def _snapshot_of(self, ts_ms: int, containers: Iterable[Mapping[str, Any]]) -> Snapshot:
        """The snapshot in force: the last one, or a new one if the content differs."""
        last, content = self._snapshot, containers_content(containers)
        if last is not None and last.content == content:
            return last
        run_id, seq = self.run_id, last.seq + 1 if last else 1
        value = snapshot(cluster=self.cluster, node=self.node, run_id=run_id, seq=seq, ts_ms=ts_ms, content=content)
        self._snapshot = Snapshot(run_id, seq, content, value)
        return self._snapshot


def _with_seqs(device: Mapping[str, Any], snapshots: Mapping[int, Snapshot]) -> Mapping[str, Any]:
    """A device whose events say which snapshot was in force at their time, if that is known."""
    events = [
        {**event, "allocations_seq": snapshots[at_ms].seq} if (at_ms := event.get("ts_ms")) in snapshots else event
        for event in device["events"]
    ]
    return {**device, "events": events}
