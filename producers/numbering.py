"""The numbers of a node's records: runs, ticks, snapshots. Pure: it knows no clock, network or log.

In: what was read at each tick. Out: the encoded sample, and the snapshots that it and its events name.
State: the run, the last tick of it, and the last snapshot of it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from producers import records


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

    ``snapshots`` are those that its events name and, last, its own.
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

        Without ``containers`` no snapshot is named. ``in_force`` gives those of an earlier time: each event names the
        snapshot of its own time, which is never older than the one that the tick before named.
        """
        if ts_ms <= self._last_ts_ms:
            self._start_run(ts_ms)
        self._last_ts_ms = ts_ms
        seq = self._seqs[self.run_id] = self._seqs[self.run_id] + 1
        try:
            named: dict[Snapshot, None] = {}
            if containers is not None:
                devices = self._with_snapshots(ts_ms, devices, in_force, named)
                own = self._snapshot_of(ts_ms, containers)
                named.pop(own, None)
                named[own] = None
            value = records.sample(
                cluster=self.cluster,
                node=self.node,
                run_id=self.run_id,
                seq=seq,
                ts_ms=ts_ms,
                allocations_seq=own.seq if containers is not None else None,
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

    def _with_snapshots(
        self,
        ts_ms: int,
        devices: Sequence[Mapping[str, Any]],
        in_force: Callable[[int], Containers] | None,
        named: dict[Snapshot, None],
    ) -> Sequence[Mapping[str, Any]]:
        """The devices, each event with the number of its snapshot; those snapshots are added to ``named``."""
        times = {event["ts_ms"] for device in devices for event in device.get("events") or () if "ts_ms" in event}
        if in_force is None or not times:
            return devices
        seqs: dict[int, int] = {}
        for at_ms in sorted(times):
            if (containers := in_force(at_ms)) is not None:
                snapshot = self._snapshot_of(min(at_ms, ts_ms), containers)
                named[snapshot], seqs[at_ms] = None, snapshot.seq
        return [_with_seqs(device, seqs) if device.get("events") else device for device in devices]

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


def _with_seqs(device: Mapping[str, Any], seqs: Mapping[int, int]) -> Mapping[str, Any]:
    """A device whose events say which snapshot was in force at their time, where that is known."""
    events = [
        {**event, "allocations_seq": seqs[at_ms]} if (at_ms := event.get("ts_ms")) in seqs else event
        for event in device["events"]
    ]
    return {**device, "events": events}
