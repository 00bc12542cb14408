"""The usage stream: books every node's ticks, and writes the records of minutes and hours.

In: gpu.attributed; gpu.usage-state, from its beginning; and what the reader knows of offsets. Out: gpu.usage-minutes
and gpu.usage, in the partition number of the node's ticks, and gpu.usage-state by node.
State: one :class:`NodeBooks` per node, by partition. When a minute closes, its records are written; when they are
acknowledged, the books; and when those are acknowledged, the ticks that they include are finished. So a worker that
takes over starts from the last books, reads the later ticks again, and writes the same records.
On failure: what can't be decoded goes to gpu.dead-letters; a record or books that are too large are left out and
counted; an output that is not acknowledged ends the process.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from delivery.instruments import Instrument, Instruments, named
from delivery.ledger import Slot
from streams.app import Stream
from streams.caught_up import PartitionState
from streams.kept_state import KeptState
from streams.reader import Reads
from streams.settings import UsageSettings
from streams.stage import ATTRIBUTED, COMMON, SAMPLES, Clocks, Malformed, NodeWorker, decode_record
from streams.usage.bookkeeper import FORGET_MS, Bookkeeper
from streams.usage.books import Accounting, Books, encode
from streams.usage.books import decode as decode_books
from streams.usage.tick import decode as decode_tick
from topics.usage import HOURS, MINUTE_MS, MINUTES, STATE, Usage

KEEP_S = 75.0
"""If a node closes no minute for this time, its books are written all the same: its ticks would delay the commit."""
LEADERS_APART_MS = 60_000
"""By how much the log time of the next record may be behind the clock here, or behind the last record."""
_TOPICS = {"minute": MINUTES.name, "hour": HOURS.name, "state": STATE.name}  # by the kind of record
NO_SAMPLES_S = 24 * 3600.0
"""After so long without a sample in a partition its nodes are silent, even if the last sample was never attributed, for
example because it is a dead letter: gpu.samples does not have it any more."""

INSTRUMENTS = (
    Instrument("gpustream_usage_ticks_total", "counter", "Node ticks read: booked, opened (the first of a run), behind"
               " (their time was booked or closed before), ahead (of their log time by more than a minute: not booked),"
               " replayed (read before).", ("outcome",)),
    Instrument("gpustream_usage_unbooked_seconds_total", "counter", "Time of ticks that came after it was booked or"
               " closed: a clock was set back, or the node was silent for longer than 20 minutes and three of its"
               " intervals. A replay books the latter."),
    Instrument("gpustream_usage_written_total", "counter", "Records acknowledged by the broker: minute, hour, state.",
               ("record",)),
    Instrument("gpustream_usage_unsendable_total", "counter", "Records that the broker does not take, too large: left"
               " out.", ("record",)),
    Instrument("gpustream_usage_open_hours", "gauge", "Hours of nodes that are not final."),
    Instrument("gpustream_usage_state_bytes", "gauge", "Bytes of the books of all nodes, as they were last written."),
    *named(
        COMMON,
        "gpustream_usage_records_read_total", "gpustream_usage_records_delivered_total",
        "gpustream_usage_records_duplicate_total", "gpustream_usage_records_dead_lettered_total",
        "gpustream_usage_records_released_total", "gpustream_usage_records_held", "gpustream_usage_open_bytes",
        "gpustream_usage_nodes", "gpustream_usage_lag_records", "gpustream_usage_misplaced_nodes_total",
        "gpustream_usage_rebalances_total", "gpustream_usage_holes_total", "gpustream_usage_lost_offsets_total",
        "gpustream_usage_loop_late_seconds"),
)  # fmt: skip


class UsageStream(Stream[UsageSettings]):
    """The usage stream as a component."""

    name = "usage"
    table = INSTRUMENTS
    watch_failure = "checking the nodes failed"

    def make_worker(self, partitions: Mapping[str, int]) -> tuple["UsageWorker", Reads]:
        state = (STATE.name,)
        reads = Reads(inputs=(ATTRIBUTED,), states=state, compacted=state, watched=(SAMPLES,), partitions=partitions)
        policy = Accounting(self.settings.split, self.settings.team_label)
        return UsageWorker(self.instruments, policy, partitions=partitions[ATTRIBUTED]), reads


class NodeBooks(KeptState[bytes | None]):
    """A node of a partition. ``kept`` are the slots of the ticks that are not in the books that the broker has; the
    first was read at ``kept_s`` of the monotonic clock. ``due`` are the records to write. ``sent`` are the books that
    were sent last."""

    __slots__ = ("due", "keeper", "kept", "kept_s", "key", "sent")

    def __init__(self, key: bytes, books: Books, policy: Accounting, latest: bytes | None = None) -> None:
        super().__init__(latest, () if latest is None else books.order)
        self.key, self.keeper = key, Bookkeeper(books, policy)
        self.kept: deque[Slot] = deque()
        self.kept_s = 0.0
        self.due: list[Usage] = []
        self.sent = b""

    def current_order(self) -> tuple[int, ...]:
        return self.keeper.books.order


class PartitionBooks(PartitionState):
    """The nodes of one partition, by key. ``passed_ms``: the log time up to which silent nodes have been closed."""

    def __init__(self, policy: Accounting, number: int) -> None:
        super().__init__(number, NO_SAMPLES_S)
        self.policy = policy
        self.nodes: dict[bytes, NodeBooks] = {}
        self.passed_ms = 0

    def forget(self) -> None:
        super().forget()
        self.passed_ms = 0
        self.nodes = {
            key: NodeBooks(key, decode_books(node.latest), self.policy, node.latest)
            for key, node in self.nodes.items()
            if node.latest is not None
        }


class UsageWorker(NodeWorker[PartitionBooks]):
    """Books the ticks of the nodes of its partitions, writes the records and the books, then finishes the ticks."""

    inputs, lag_topics = (ATTRIBUTED,), (ATTRIBUTED, STATE.name)
    batch_failure = "booking failed"

    def __init__(
        self, instruments: Instruments, policy: Accounting, *, partitions: int, clocks: Clocks | None = None
    ) -> None:
        super().__init__(instruments, stage="usage", partitions=partitions, clocks=clocks)
        self.new_partition = partial(PartitionBooks, policy)

    # -- records

    def handle_record(self, topic: str, partition: PartitionBooks, slot: Slot, record: Any) -> None:
        """Book a tick, or read the books of a node, or their deletion, from the state topic. Raises Malformed."""
        if topic == ATTRIBUTED:
            self._book(partition, slot, record)
            return
        node = partition.nodes.get(record.key)
        if record.value is None:
            if node is not None and node.read(slot.offset, None):
                del partition.nodes[record.key]
        elif node is None or record.value != node.sent:
            books = decode_record(decode_books, record.key, record.value)
            if node is None:
                self.check_place(partition.number, record.key)
            if node is None or node.read(slot.offset, record.value, books.order):
                partition.nodes[record.key] = NodeBooks(record.key, books, partition.policy, record.value)
                partition.caught_up.attributed(books.offset)
        self.app.finish(slot)

    def close_silent(self, partition: PartitionBooks) -> None:
        self._pass_time(partition, partition.logged_ms - LEADERS_APART_MS)

    def _book(self, partition: PartitionBooks, slot: Slot, record: Any) -> None:
        """Book a node's tick. Raises Malformed."""
        tick = decode_record(decode_tick, record.key, record.value)
        node = partition.nodes.get(record.key)
        if node is None:
            self.check_place(partition.number, record.key)
            books = Books(schema=1, cluster=tick.cluster, node=tick.node)
            node = partition.nodes[record.key] = NodeBooks(record.key, books, partition.policy)
        logged_ms = tick.logged_ms
        if logged_ms is None:
            logged_ms = record.timestamp if record.timestamp >= 0 else self.now_ms()
        logs = node.keeper.books.logs
        try:
            outcome, records, unbooked_ms = node.keeper.book(tick, logged_ms)
        except msgspec.DecodeError as error:
            raise Malformed("undecodable", str(error)) from error
        self._instruments.counter("gpustream_usage_ticks_total", outcome).inc()
        partition.logged_ms = max(partition.logged_ms, logged_ms)
        if outcome == "replayed":
            slot.outcome = ("duplicate",)
            self.app.finish(slot)
            return
        if unbooked_ms:
            self._instruments.counter("gpustream_usage_unbooked_seconds_total").inc(unbooked_ms / 1000)
        partition.caught_up.attributed(tick.offset, new_log=node.keeper.books.logs > logs)
        node.is_fresh = False
        if not node.kept:
            node.kept_s = self._clocks.monotonic_s()
        node.kept.append(slot)
        self.app.reader.ledger.set_aside(slot)
        if records:
            node.due += records
            self._start_write(partition.number, node)

    # -- writing

    def _start_write(self, number: int, node: NodeBooks, *, force: bool = False) -> None:
        """Start to write what is due; ``force``: write the books even if no record is due."""
        if not node.writing and (node.due or node.stale or force):
            node.writing = True
            self._write_tasks.start(self._write(number, node, self.epoch))

    async def _write(self, number: int, node: NodeBooks, epoch: int) -> None:
        """Write the records, then, once acknowledged, the books; repeat while more has become due. If the epoch ends
        meanwhile, stop: what was not acknowledged is read again."""
        while epoch == self.epoch:
            node.writing = True
            records, node.due = node.due, []
            value, order, slots = encode(node.keeper.books), node.keeper.books.order, tuple(node.kept)
            node.kept.clear()
            minutes = [usage for usage in records if usage.end_ms - usage.start_ms == MINUTE_MS]
            hours = [usage for usage in records if usage.end_ms - usage.start_ms != MINUTE_MS]
            await asyncio.gather(
                self._send(number, "minute", ((usage.key.encode(), encode(usage)) for usage in minutes)),
                self._send(number, "hour", ((usage.key.encode(), encode(usage)) for usage in hours)),
            )
            if epoch != self.epoch:
                return
            node.sent = value
            (offset,) = await self._send(number, "state", [(node.key, value)])
            if epoch != self.epoch:
                return
            node.wrote(offset, value, order)
            for slot in slots:
                self.app.finish(slot)
            if not node.due and not node.stale:
                break

    async def _send(self, number: int, kind: str, values: Iterable[tuple[bytes, bytes | None]]) -> list[int | None]:
        """Send values of a kind, each with its key, and wait until the broker has them. Returns the offset of each, or
        None if it is refused."""
        sent = []
        for key, value in values:  # of a node that is new in the middle of an hour there are hundreds
            await self._turns.next()
            sent.append(await self.app.sender.send(_TOPICS[kind], value, key=key, partition=number))
        offsets = await self._await_acks(kind, sent)
        self._instruments.counter("gpustream_usage_written_total", kind).inc(len(offsets) - offsets.count(None))
        return offsets

    # -- time

    def check_clock(self, partition: PartitionBooks) -> None:
        """Close the windows that the next record of the partition would close. Write the books of nodes that have kept
        ticks for too long, or whose last books in the topic are another worker's.

        This clock may be ahead of the brokers': if books are to be written first, their acknowledgement shows it."""
        now_s = self._clocks.monotonic_s()
        age_s = partition.caught_up.age_s(now_s)
        is_compared = self.app.sender.ahead_ms is not None or not any(node.kept for node in partition.nodes.values())
        if is_compared and age_s < FORGET_MS / 1000:
            self._pass_time(partition, self.now_ms() - round(age_s * 1000) - LEADERS_APART_MS)
        for node in partition.nodes.values():
            self._start_write(partition.number, node, force=bool(node.kept) and now_s - node.kept_s >= KEEP_S)

    def _pass_time(self, partition: PartitionBooks, log_ms: int) -> None:
        """The log has advanced to a time: once a minute, close the windows of the silent nodes."""
        if log_ms // MINUTE_MS <= partition.passed_ms // MINUTE_MS:
            return
        partition.passed_ms = log_ms
        for node in list(partition.nodes.values()):
            books = node.keeper.books
            if records := node.keeper.close_silent(log_ms):
                node.due += records
                self._start_write(partition.number, node)
            elif not (books.hours or node.writing or node.kept) and log_ms - books.logged_ms >= FORGET_MS:
                del partition.nodes[node.key]
                self._write_tasks.start(self._send(partition.number, "state", [(node.key, None)]))

    def observe(self) -> None:
        gauge = self._instruments.gauge
        nodes = [node for partition in self._partitions.values() for node in partition.nodes.values()]
        gauge("gpustream_usage_nodes").set(len(nodes))
        gauge("gpustream_usage_open_hours").set(sum([len(node.keeper.books.hours) for node in nodes]))
        gauge("gpustream_usage_state_bytes").set(sum([len(node.latest or b"") for node in nodes]))
        super().observe()
