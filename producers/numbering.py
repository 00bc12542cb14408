"""The numbers of a node's records: runs, ticks, snapshots. Pure: it knows no clock, network or log.

In: what was read at each tick. Out: the encoded sample, and the snapshots that it and its events name.
State: the run, the last tick of it, and the last snapshot of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from producers import records

READ_MS = 10_000
"""So long after its time a tick may still be read; what has a later time is of a clock that was set back."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A snapshot of gpu.allocations: its identity in its run, its content in one order, and the encoded record."""

    run_id: int
    seq: int
    content: bytes
    value: bytes


Containers = Iterable[Mapping[str, Any]] | None
"""Those of gpu.allocations as dicts; None: there is no kubelet."""


class Numbered(NamedTuple):
    """A tick with its place in its run. ``value`` is None where it could not be encoded; its ``seq`` is spent.

    ``snapshots`` are its own and those that its events name, in order.
    """

    run_id: int
    seq: int
    value: bytes | None
    snapshots: tuple[Snapshot, ...] = ()


class Numbering:
    """Gives one node's ticks and snapshots their numbers.

    ``run_id`` is the first run's, milliseconds since the epoch at its start. Raises ValueError where ``cluster`` or
    ``node`` can't be a name.
    """

    def __init__(self, *, cluster: str, node: str, run_id: int) -> None:
        self.cluster = records.checked_name("cluster", cluster)
        self.node = records.checked_name("node", node)
        self.run_id = run_id
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
    ) -> Numbered:
        """Number a tick read at ``ts_ms``. A time that is not after the last tick's starts a new run.

        Without ``containers`` no snapshot is named. ``in_force`` gives those of an earlier time: an event names the
        snapshot of its own time, if it came after the tick before, or while this one was read. Snapshots are in the
        order of time.
        """
        before_ms = self._last_ts_ms
        if ts_ms <= before_ms:
            self._start_run(ts_ms)
        self._last_ts_ms = ts_ms
        seq = self._seqs[self.run_id] = self._seqs[self.run_id] + 1
        try:
            named: dict[Snapshot, None] = {}
            own: Snapshot | None = None
            if containers is not None:
                times = _times(devices) if in_force is not None and ts_ms > before_ms else []
                earlier = self._snapshots_at([at_ms for at_ms in times if before_ms < at_ms <= ts_ms], in_force)
                own = self._snapshot_of(ts_ms, containers)
                later = self._snapshots_at([at_ms for at_ms in times if 0 < at_ms - ts_ms <= READ_MS], in_force)
                by_time = earlier | later
                named = dict.fromkeys([*earlier.values(), own, *later.values()])
                devices = [_with_seqs(device, by_time) if device.get("events") else device for device in devices]
            value = records.sample(
                cluster=self.cluster,
                node=self.node,
                run_id=self.run_id,
                seq=seq,
                ts_ms=ts_ms,
                allocations_seq=own.seq if own else None,
                devices=devices,
            )
        except records.Unencodable:
            return Numbered(self.run_id, seq, None)
        return Numbered(self.run_id, seq, value, tuple(named))

    def _start_run(self, ts_ms: int) -> None:
        run_id = ts_ms
        while run_id in self._seqs:
            run_id += 1
        self.run_id = run_id
        self._seqs[run_id] = 0
        self._snapshot = None

    def _snapshots_at(self, times: Sequence[int], in_force: Callable[[int], Containers] | None) -> dict[int, Snapshot]:
        """The snapshot in force at each of these times, which are in order, where it is known."""
        known = {at_ms: in_force(at_ms) for at_ms in times} if in_force is not None else {}
        return {at_ms: self._snapshot_of(at_ms, rows) for at_ms, rows in known.items() if rows is not None}

    def _snapshot_of(self, ts_ms: int, containers: Iterable[Mapping[str, Any]]) -> Snapshot:
        """The snapshot in force: the last one, or a new one where the content differs."""
        last = self._snapshot
        content = records.containers_content(containers)
        if last is not None and last.content == content:
            return last
        seq = last.seq + 1 if last else 1
        value = records.snapshot(
            cluster=self.cluster, node=self.node, run_id=self.run_id, seq=seq, ts_ms=ts_ms, content=content
        )
        self._snapshot = Snapshot(self.run_id, seq, content, value)
        return self._snapshot


def _times(devices: Sequence[Mapping[str, Any]]) -> list[int]:
    """The times of the events of a tick, in order."""
    return sorted({event["ts_ms"] for device in devices for event in device.get("events") or () if "ts_ms" in event})


def _with_seqs(device: Mapping[str, Any], snapshots: Mapping[int, Snapshot]) -> Mapping[str, Any]:
    """A device whose events say which snapshot was in force at their time, where that is known."""
    events = [
        {**event, "allocations_seq": snapshots[at_ms].seq} if (at_ms := event.get("ts_ms")) in snapshots else event
        for event in device["events"]
    ]
    return {**device, "events": events}
