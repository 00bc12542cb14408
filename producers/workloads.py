"""Sends the workloads of each node to gpu.workloads: when they change, and every 5 minutes.

In: a node's pods, with their owners and labels. Out: records on gpu.workloads, keyed by ``cluster/node``.
State: the pods of each node, the ended pods whose end was sent, and the nodes whose record waits. A removed node is
forgotten when its last record was passed to the sender.
On failure: while the broker is away, only the last state of each node is kept, and every end that was not sent yet.

An ended pod is in the record that reports its end, and then only in the complete records of every 5 minutes. So the
topic grows with the number of pods, and not with its square.
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
class _NodeState:
    """The pods of a node. ``running`` has the pods that run, and ``running_bytes`` is the same encoded.
    ``ended_by_uid`` are the ended pods, and ``sent_ends`` those of them that were sent, as they were sent.
    ``complete``: the next record must have all ended pods, not only the unsent ones."""

    seq: int
    ts_ms: int
    running: WorkloadsContent
    ended_by_uid: dict[str, Row]
    running_bytes: bytes = b""
    sent_ends: dict[str, Row] = field(default_factory=dict)
    complete: bool = True

    @property
    def unsent_ends(self) -> dict[str, Row]:
        return {uid: row for uid, row in self.ended_by_uid.items() if self.sent_ends.get(uid) != row}


class WorkloadsPublisher:
    """Sends a cluster's workloads. Call :meth:`publish` at each change, and keep :meth:`run` running beside it.

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
        self._node_states: dict[str, _NodeState] = {}
        self._queue_order: dict[str, None] = {}
        self._removed_nodes: set[str] = set()
        self._min_seq = 1
        self._last_progress_s = clock()
        self._complete_sent_s: dict[str, float] = {}
        self._in_flight: set[asyncio.Future[int]] = set()
        self._wake, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._checked_s = clock()

    def publish(self, ts_ms: int, node: str, content: WorkloadsContent) -> int | None:
        """Queue the content of a node at ``ts_ms``, without waiting; returns its ``seq``, or None if nothing changed.

        Its pods are those that run and those that ended within half an hour. Do not change any row afterwards. Raises
        ValueError if ``node`` can't be a name.
        """
        previous = self._node_states.get(node)
        self._removed_nodes.discard(node)
        state = _NodeState(
            seq=previous.seq + 1 if previous else self._min_seq,
            ts_ms=ts_ms,
            running=content._replace(pods=[row for row in content.pods if row.get("ended_ms") is None]),
            ended_by_uid={row["uid"]: row for row in content.pods if row.get("ended_ms") is not None},
        )
        try:
            state.running_bytes = state.running.encoded()
        except records.Unencodable:
            self._count_dropped("unencodable")
            return None
        if previous is not None:
            state.sent_ends, state.complete = previous.sent_ends, previous.complete
            if (state.running_bytes, state.unsent_ends) == (previous.running_bytes, previous.unsent_ends):
                previous.ended_by_uid = state.ended_by_uid
                return None
        self._node_states[records.checked_name("node", node)] = state
        self._queue(node)
        return state.seq

    def forget(self, node: str) -> None:
        """A node was removed: its last record is sent once, and never again.
        If the node comes back, its numbers are above those of every forgotten node."""
        if node in self._queue_order:
            self._removed_nodes.add(node)
        else:
            self._remove(node)

    def waited_s(self) -> float:
        """How long records have waited without any being acknowledged, in seconds; 0 if none waits."""
        return 0.0 if self._empty.is_set() else self._clock() - self._last_progress_s

    async def run(self) -> None:
        """Send what is published, until it is cancelled. To stop, call :meth:`drain` before."""
        while True:
            if self._queue_order and len(self._in_flight) < MAX_IN_FLIGHT:
                await self._send(next(iter(self._queue_order)))
                continue
            self._wake.clear()
            await set_within(self._wake, CHECK_S)
            if self._clock() - self._checked_s >= CHECK_S:
                self._checked_s = self._clock()
                self.queue_overdue()

    def queue_overdue(self) -> None:
        """Queue a complete record of each node whose last one is older than RESEND_S. It gets a new number, because it
        has more content than the last record of its node."""
        now_s = self._clock()
        for node, complete_sent_s in self._complete_sent_s.items():
            if now_s - complete_sent_s < RESEND_S:
                return
            state = self._node_states[node]
            if not state.complete:
                state.complete, state.seq = True, state.seq + 1
                if node not in self._queue_order:
                    self._queue(node)

    async def drain(self, timeout_s: float) -> int:
        """Wait until every record is acknowledged, at most ``timeout_s``; returns how many are not."""
        await set_within(self._empty, timeout_s)
        return len(self._queue_order) + len(self._in_flight)

    def _queue(self, node: str) -> None:
        if node in self._queue_order:
            self._count_dropped("superseded")
        self._queue_order[node] = None
        if self._empty.is_set():
            self._last_progress_s = self._clock()
        self._empty.clear()
        self._wake.set()

    async def _send(self, node: str) -> None:
        """Send a node's record: with the unsent ends, or with all ended pods if a complete record is due. A record that
        can't be sent is counted."""
        del self._queue_order[node]
        state = self._node_states[node]
        if state.complete:
            self._complete_sent_s.pop(node, None)
            self._complete_sent_s[node] = self._clock()
        rows = (state.ended_by_uid if state.complete else state.unsent_ends).values()
        state.sent_ends, state.complete = state.ended_by_uid, False
        if node in self._removed_nodes:
            self._remove(node)
        try:
            value = records.workloads(
                cluster=self._cluster,
                node=node,
                epoch=self._epoch,
                seq=state.seq,
                ts_ms=state.ts_ms,
                content=state.running._replace(pods=[*state.running.pods, *rows]).encoded(),
            )
            drop_reason = "too_large" if len(value) > LARGEST_VALUE_BYTES else ""
        except records.Unencodable:
            drop_reason = "unencodable"
        if drop_reason:
            self._count_dropped(drop_reason)
            self._note_empty()
            return
        acknowledged = await self._sender.send(workloads.TOPIC.name, value, key=node_key(self._cluster, node))
        self._in_flight.add(acknowledged)
        acknowledged.add_done_callback(self._settle)

    def _settle(self, done: "asyncio.Future[int]") -> None:
        self._in_flight.discard(done)
        self._last_progress_s = self._clock()
        self._wake.set()
        self._note_empty()
        count_settled(self._instruments, done, WORKLOADS, WORKLOADS_DROPPED)

    def _note_empty(self) -> None:
        if not self._queue_order and not self._in_flight:
            self._empty.set()

    def _remove(self, node: str) -> None:
        self._removed_nodes.discard(node)
        self._complete_sent_s.pop(node, None)
        state = self._node_states.pop(node, None)
        if state is not None:
            self._min_seq = max(self._min_seq, state.seq + 1)

    def _count_dropped(self, reason: str) -> None:
        self._instruments.counter(WORKLOADS_DROPPED, reason).inc()
