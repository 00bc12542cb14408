"""The numbers of a node's records: runs, ticks, snapshots. Pure: it knows no clock, network or log.

In: what was read at each tick. Out: the encoded sample, and the snapshot that it names.
State: the run, the last tick of it, and the last snapshot of it.
"""

from collections.abc import Iterable, Mapping, Sequence
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


class Numbered(NamedTuple):
    """A tick with its place in its run. ``value`` is None where it could not be encoded; its ``seq`` is spent."""

    run_id: int
    seq: int
    value: bytes | None
    snapshot: Snapshot | None


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
        self, ts_ms: int, devices: Sequence[Mapping[str, Any]], containers: Iterable[Mapping[str, Any]] | None
    ) -> Numbered:
        """Number a tick read at ``ts_ms``. A time that is not after the last tick's starts a new run.

        ``containers`` are those of gpu.allocations as dicts; None: there is no kubelet, and no snapshot is named.
        """
        if ts_ms <= self._last_ts_ms:
            self._start_run(ts_ms)
        self._last_ts_ms = ts_ms
        seq = self._seqs[self.run_id] = self._seqs[self.run_id] + 1
        try:
            named = None if containers is None else self._snapshot_of(ts_ms, containers)
            value = records.sample(
                cluster=self.cluster,
                node=self.node,
                run_id=self.run_id,
                seq=seq,
                ts_ms=ts_ms,
                allocations_seq=named.seq if named else None,
                devices=devices,
            )
        except records.Unencodable:
            return Numbered(self.run_id, seq, None, None)
        return Numbered(self.run_id, seq, value, named)

    def _start_run(self, ts_ms: int) -> None:
        run_id = ts_ms
        while run_id in self._seqs:
            run_id += 1
        self.run_id = run_id
        self._seqs[run_id] = 0
        self._snapshot = None

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
