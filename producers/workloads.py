"""Sends what the API server knows to gpu.workloads: when it changes, and every 5 minutes.

In: a node's pods, with their owners and labels. Out: records on gpu.workloads, keyed by ``cluster/node``.
State: what is known of each node, which pods' ends were sent, and the nodes whose record waits. A node that is gone is
forgotten once its last record was handed over.
On failure: while the broker is away, only the last state of each node is kept, and every end that was not sent yet.

A pod that ended is in the record that reports its end, and then only in the records of every 5 minutes. So the topic
grows with the number of pods, and not with its square.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from delivery.instruments import Instruments
from delivery.sender import Sender
from delivery.tasks import set_within
from producers import records
from producers.publisher import LARGEST_VALUE_BYTES, RESEND_S, WORKLOADS, WORKLOADS_DROPPED, count_settled
from producers.records import WorkloadsContent
from topics import workloads
from topics.topic import node_key

MAX_IN_FLIGHT = 64  # records that may wait for their acknowledgement
CHECK_S = 1.0  # how often to look for nodes whose record must be sent again


Row = Mapping[str, Any]


@dataclass(slots=True)
class _KnownNode:
    """What is known of a node. ``running`` has the pods that run, and ``present`` is the same encoded; ``unsent`` are
    the pods whose end, or what is known of them since, was not sent yet; ``whole``: the next record has all that ended.
    """

    seq: int
    ts_ms: int
    running: WorkloadsContent
    ended: dict[str, Row]
    present: bytes = b""
    sent: dict[str, Row] = field(default_factory=dict)
    whole: bool = True

    @property
    def unsent(self) -> dict[str, Row]:
        return {uid: row for uid, row in self.ended.items() if self.sent.get(uid) != row}


class WorkloadsPublisher:
    """The sending half of a cluster's workloads. Call :meth:`publish` on news, and keep :meth:`run` running beside it.

    ``epoch`` is that of the leader that writes. ``clock`` gives seconds and never steps back. Raises ValueError if
    ``cluster`` can't be a name.
    """

    def __init__(
        self,
        sender: Sender,
        instruments: Instruments,
        *,
        cluster: str,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = records.checked_name("cluster", cluster)
        self._epoch = epoch
        self._sender, self._instruments, self._clock = sender, instruments, clock
        self._nodes: dict[str, _KnownNode] = {}
        self._waiting: dict[str, None] = {}
        self._leaving: set[str] = set()
        self._least_seq = 1
        self._moved_s = clock()
        self._whole_s: dict[str, float] = {}
        self._in_flight: set[asyncio.Future[int]] = set()
        self._wake, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._checked_s = clock()

    def publish(self, ts_ms: int, node: str, content: WorkloadsContent) -> int | None:
        """Take what is known of a node at ``ts_ms``, without waiting; gives its ``seq``, or None if nothing changed.

        Its pods are those that run and those that ended within half an hour; no row is changed any more. Raises
        ValueError if ``node`` can't be a name.
        """
        last = self._nodes.get(node)
        self._leaving.discard(node)
        known = _KnownNode(
            seq=last.seq + 1 if last else self._least_seq,
            ts_ms=ts_ms,
            running=content._replace(pods=[row for row in content.pods if row.get("ended_ms") is None]),
            ended={row["uid"]: row for row in content.pods if row.get("ended_ms") is not None},
        )
        try:
            known.present = known.running.encoded()
        except records.Unencodable:
            self._count_dropped("unencodable")
            return None
        if last is not None:
            known.sent, known.whole = last.sent, last.whole
            if (known.present, known.unsent) == (last.present, last.unsent):
                last.ended = known.ended
                return None
        self._nodes[records.checked_name("node", node)] = known
        self._queue(node)
        return known.seq

    def forget(self, node: str) -> None:
        """A node is gone: its last record is sent once, and never again.
        Should it come back, its numbers go on above those of every node that is forgotten."""
        if node in self._waiting:
            self._leaving.add(node)
        else:
            self._drop(node)

    def waited_s(self) -> float:
        """For how long something has waited without anything being acknowledged; 0 if nothing waits."""
        return 0.0 if self._empty.is_set() else self._clock() - self._moved_s

    async def run(self) -> None:
        """Send what is published, for as long as it runs. Cancel it to stop, after :meth:`drain`."""
        while True:
            if self._waiting and len(self._in_flight) < MAX_IN_FLIGHT:
                await self._send(next(iter(self._waiting)))
                continue
            self._wake.clear()
            await set_within(self._wake, CHECK_S)
            if self._clock() - self._checked_s >= CHECK_S:
                self._checked_s = self._clock()
                self.queue_overdue()

    def queue_overdue(self) -> None:
        """Make whole records due of the nodes that were not heard of for long. Each has a number of its own, because it
        says more than the last record of its node did."""
        now_s = self._clock()
        for node, whole_s in self._whole_s.items():
            if now_s - whole_s < RESEND_S:
                return
            known = self._nodes[node]
            if not known.whole:
                known.whole, known.seq = True, known.seq + 1
                if node not in self._waiting:
                    self._queue(node)

    async def drain(self, timeout_s: float) -> int:
        """Wait until all is acknowledged, at most ``timeout_s``; gives the number of records that are not."""
        await set_within(self._empty, timeout_s)
        return len(self._waiting) + len(self._in_flight)

    def _queue(self, node: str) -> None:
        if node in self._waiting:
            self._count_dropped("superseded")
        self._waiting[node] = None
        if self._empty.is_set():
            self._moved_s = self._clock()
        self._empty.clear()
        self._wake.set()

    async def _send(self, node: str) -> None:
        """Send what is known of a node now: what changed, or all if that is due. What can't be sent is counted."""
        del self._waiting[node]
        known = self._nodes[node]
        if known.whole:
            self._whole_s.pop(node, None)
            self._whole_s[node] = self._clock()
        rows = (known.ended if known.whole else known.unsent).values()
        known.sent, known.whole = known.ended, False
        if node in self._leaving:
            self._drop(node)
        try:
            value = records.workloads(
                cluster=self._cluster,
                node=node,
                epoch=self._epoch,
                seq=known.seq,
                ts_ms=known.ts_ms,
                content=known.running._replace(pods=[*known.running.pods, *rows]).encoded(),
            )
            problem = "too_large" if len(value) > LARGEST_VALUE_BYTES else ""
        except records.Unencodable:
            problem = "unencodable"
        if problem:
            self._count_dropped(problem)
            self._note_empty()
            return
        acknowledged = await self._sender.send(workloads.TOPIC.name, value, key=node_key(self._cluster, node))
        self._in_flight.add(acknowledged)
        acknowledged.add_done_callback(self._settle)

    def _settle(self, done: "asyncio.Future[int]") -> None:
        self._in_flight.discard(done)
        self._moved_s = self._clock()
        self._wake.set()
        self._note_empty()
        count_settled(self._instruments, done, WORKLOADS, WORKLOADS_DROPPED)

    def _note_empty(self) -> None:
        if not self._waiting and not self._in_flight:
            self._empty.set()

    def _drop(self, node: str) -> None:
        self._leaving.discard(node)
        self._whole_s.pop(node, None)
        known = self._nodes.pop(node, None)
        if known is not None:
            self._least_seq = max(self._least_seq, known.seq + 1)

    def _count_dropped(self, reason: str) -> None:
        self._instruments.counter(WORKLOADS_DROPPED, reason).inc()
