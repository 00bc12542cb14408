"""How what the API server knows reaches gpu.workloads: when it changes, and every 5 minutes.

In: a node's pods, with their owners and labels. Out: records on gpu.workloads, keyed by ``cluster/node``.
State: the last record of each node, and the nodes whose last record was not handed over yet. A node that is gone is
forgotten once its last record was handed over.
On failure: while the broker is away only the newest record of a node is kept, for it says all that the older ones did.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from producers import instruments as names
from producers import records
from producers.sending import LARGEST_VALUE_BYTES, RESEND_S, RecordSender
from topics import workloads
from topics.instruments import Instruments
from topics.topic import node_key

MAX_IN_FLIGHT = 64
"""Records that may wait for their acknowledgement."""

CHECK_S = 1.0
"""How often to look for nodes whose record is to be sent again."""


@dataclass(frozen=True, slots=True)
class _Node:
    key: bytes
    seq: int
    content: bytes
    value: bytes


class WorkloadsPublisher:
    """The sending half of a cluster's workloads. Call :meth:`publish` on news, and keep :meth:`run` running beside it.

    ``epoch`` is that of the leader that writes. ``clock`` gives seconds and never steps back. Raises ValueError where
    ``cluster`` can't be a name.
    """

    def __init__(
        self,
        sender: RecordSender,
        instruments: Instruments,
        *,
        cluster: str,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = records.checked_name("cluster", cluster)
        self._epoch = epoch
        self._sender, self._instruments, self._clock = sender, instruments, clock
        self._nodes: dict[str, _Node] = {}
        self._waiting: dict[str, None] = {}
        self._leaving: set[str] = set()
        self._least_seq = 1
        self._moved_s = clock()
        self._sent_s: dict[str, float] = {}
        self._in_flight: set[asyncio.Future[int]] = set()
        self._wake, self._empty = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._checked_s = clock()

    def publish(
        self,
        ts_ms: int,
        node: str,
        node_labels: Mapping[str, str],
        pods: Iterable[Mapping[str, Any]],
        dra_devices: Iterable[Mapping[str, Any]] = (),
        admin_claims: Iterable[Mapping[str, Any]] = (),
        *,
        removed: bool = False,
    ) -> int | None:
        """Take what is known of a node at ``ts_ms``, without waiting; gives its ``seq``, or None where nothing changed.

        ``pods``, ``dra_devices`` and ``admin_claims`` are dicts as in gpu.workloads; ``removed``: there is no such node
        any more. Raises ValueError where ``node`` can't be a name.
        """
        last = self._nodes.get(node)
        self._leaving.discard(node)
        try:
            content = records.workloads_content(node_labels, pods, dra_devices, admin_claims, removed=removed)
        except records.Unencodable:
            self._count_dropped("unencodable")
            return None
        if last is not None and last.content == content:
            return None
        seq = last.seq + 1 if last else self._least_seq
        value = records.workloads(
            cluster=self._cluster,
            node=records.checked_name("node", node),
            epoch=self._epoch,
            seq=seq,
            ts_ms=ts_ms,
            content=content,
        )
        self._nodes[node] = _Node(node_key(self._cluster, node), seq, content, value)
        self._queue(node)
        return seq

    def forget(self, node: str) -> None:
        """A node is gone: what was published of it last is sent, and never again.

        Should it come back, its numbers go on above those of every node that is forgotten.
        """
        if node in self._waiting:
            self._leaving.add(node)
        else:
            self._drop(node)

    def waited_s(self) -> float:
        """For how long something has waited without anything being acknowledged; 0 where nothing waits."""
        return 0.0 if self._empty.is_set() else self._clock() - self._moved_s

    async def run(self) -> None:
        """Send what is published, for as long as it runs. Cancel it to stop, after :meth:`drain`."""
        while True:
            if self._waiting and len(self._in_flight) < MAX_IN_FLIGHT:
                await self._send(next(iter(self._waiting)))
            else:
                await self._sleep()

    async def drain(self, timeout_s: float) -> int:
        """Wait until all is acknowledged, at most ``timeout_s``; gives the number of records that are not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return len(self._waiting) + len(self._in_flight)

    def _queue(self, node: str) -> None:
        if len(self._nodes[node].value) > LARGEST_VALUE_BYTES:
            self._count_dropped("too_large")
            self._sent_s.pop(node, None)
            return
        if node in self._waiting:
            self._count_dropped("superseded")
        self._waiting[node] = None
        if self._empty.is_set():
            self._moved_s = self._clock()
        self._empty.clear()
        self._wake.set()

    async def _send(self, node: str) -> None:
        del self._waiting[node]
        self._sent_s.pop(node, None)
        self._sent_s[node] = self._clock()
        known = self._nodes[node]
        if node in self._leaving:
            self._drop(node)
        acknowledged = await self._sender.send(workloads.TOPIC.name, known.value, key=known.key)
        self._in_flight.add(acknowledged)
        acknowledged.add_done_callback(self._settle)

    def _settle(self, done: "asyncio.Future[int]") -> None:
        self._in_flight.discard(done)
        self._moved_s = self._clock()
        self._wake.set()
        if not self._waiting and not self._in_flight:
            self._empty.set()
        if done.cancelled():
            return
        if done.exception() is None:
            self._instruments.counter(names.WORKLOADS).inc()
        else:
            self._count_dropped("refused")

    async def _sleep(self) -> None:
        """Wait for news or an acknowledgement; where none comes, queue the nodes that were not heard of for long."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):
                await self._wake.wait()
        if self._clock() - self._checked_s >= CHECK_S:
            self._checked_s = self._clock()
            self._queue_overdue()

    def _queue_overdue(self) -> None:
        now_s = self._clock()
        for node, sent_s in self._sent_s.items():
            if now_s - sent_s < RESEND_S:
                return
            if node not in self._waiting:
                self._queue(node)

    def _drop(self, node: str) -> None:
        self._leaving.discard(node)
        self._sent_s.pop(node, None)
        known = self._nodes.pop(node, None)
        if known is not None:
            self._least_seq = max(self._least_seq, known.seq + 1)

    def _count_dropped(self, reason: str) -> None:
        self._instruments.counter(names.WORKLOADS_DROPPED, reason).inc()
