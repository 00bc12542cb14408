"""How snapshots reach gpu.allocations: acknowledged before a sample names them, and again while they are in use.

In: the snapshots that the next sample names. Out: records on gpu.allocations.
State: the snapshots sent lately, and when. On failure: a snapshot that can never be sent is counted, once.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from delivery.instruments import Instruments
from delivery.sender import Headers
from producers import instruments as names
from producers.numbering import Snapshot
from topics import allocations
from topics.topic import MAX_MESSAGE_BYTES

RESEND_S = 300.0
"""How long a record of state counts as just sent; readers look back 10 minutes for what a sample rests on."""

UNREADY_AFTER_S = 30.0
"""A producer whose records have waited for longer is not ready."""

LARGEST_VALUE_BYTES = MAX_MESSAGE_BYTES - 2048
"""What is left of a batch for one value beside its key and the batch's own framing."""


class RecordSender(Protocol):
    """What a publisher needs of :class:`delivery.sender.Sender`."""

    async def ready(self) -> None:
        """Wait until records are taken."""

    async def send(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> "asyncio.Future[int]":
        """Send a record, waiting for room; the future gives its offset or raises Unsendable."""


class ConnectedSender(RecordSender, Protocol):
    """What a component needs of :class:`delivery.sender.Sender` beside that."""

    async def start(self) -> None:
        """Connect, for as long as it takes until there is a broker with the topics."""

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Let go."""

    def not_ready(self) -> list[str]:
        """Why nothing is sent yet; empty once it has connected."""


def not_sent(sender: ConnectedSender, *, what: str, waited_s: float) -> list[str]:
    """Why a producer's records do not get to Kafka; empty where they do. ``what`` has waited for ``waited_s``."""
    waiting = [f"{what} has waited {waited_s:.0f} s for Kafka"] if waited_s > UNREADY_AFTER_S else []
    return sender.not_ready() or waiting


class SnapshotSender:
    """Which snapshots of one node are in the log, and how recently each was handed over."""

    def __init__(self, sender: RecordSender, instruments: Instruments, key: bytes, clock: Callable[[], float]) -> None:
        self._sender, self._instruments, self._key, self._clock = sender, instruments, key, clock
        self._sent_s: dict[Snapshot, float] = {}
        self._last_sent_s = self._last_repeat_s = clock()
        self._repeats: set[asyncio.Future[int]] = set()

    def due(self, named: Iterable[Snapshot]) -> Snapshot | None:
        """The first of the snapshots that a sample names which must be sent before it; None: the sample may go."""
        since_s = self._clock() - RESEND_S
        return next((one for one in named if self._sent_s.get(one, since_s) <= since_s), None)

    def idle_s(self) -> float:
        """Seconds after which :meth:`repeat` is due, if no sample brings the last snapshot along before."""
        return max(self._last_sent_s, self._last_repeat_s) + RESEND_S - self._clock()

    async def send(self, snapshot: Snapshot) -> None:
        """Send a snapshot and wait until it is acknowledged, or can never be."""
        handed_over_s = self._clock()
        if len(snapshot.value) > LARGEST_VALUE_BYTES:
            self._count_dropped("too_large")
        else:
            acknowledged = await self._hand_over(snapshot)
            await asyncio.wait([acknowledged])
            self._settle(acknowledged)
        self._sent_s = {one: at_s for one, at_s in self._sent_s.items() if handed_over_s - at_s < RESEND_S}
        self._sent_s.pop(snapshot, None)
        self._sent_s[snapshot] = self._last_sent_s = handed_over_s

    async def repeat(self, named: Iterable[Snapshot]) -> None:
        """Send the snapshots in use again. They were acknowledged before, so nothing waits for them now."""
        self._last_repeat_s = self._clock()
        if self._repeats or not self._sent_s:
            return
        last = next(reversed(self._sent_s))
        for snapshot in dict.fromkeys((*named, last)):
            if len(snapshot.value) <= LARGEST_VALUE_BYTES:
                repeated = await self._hand_over(snapshot)
                self._repeats.add(repeated)
                repeated.add_done_callback(self._settle)

    async def _hand_over(self, snapshot: Snapshot) -> "asyncio.Future[int]":
        return await self._sender.send(allocations.TOPIC.name, snapshot.value, key=self._key)

    def _settle(self, done: "asyncio.Future[int]") -> None:
        self._repeats.discard(done)
        if done.cancelled():
            return
        if done.exception() is None:
            self._instruments.counter(names.SNAPSHOTS).inc()
        else:
            self._count_dropped("refused")

    def _count_dropped(self, reason: str) -> None:
        self._instruments.counter(names.SNAPSHOTS_DROPPED, reason).inc()
