"""The worker of the alert stream: decodes what the reader delivers, judges it, writes what comes of it, finishes it.

In: batches of records, each with its slot, and what the reader knows of offsets. Out: gpu.alerts, gpu.alert-state,
gpu.dead-letters.
State: one :class:`~streams.alerts.node.Node` a node, by partition, in the order in which ticks of them were last read.
On failure: what can't be decoded is a dead letter; an alert or a state that is too large is left out and counted; an
output that is not acknowledged ends the process.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from delivery.instruments import Instruments
from delivery.ledger import Partition, Slot
from delivery.sender import Unsendable
from streams.alerts import machine, memory
from streams.alerts.memory import NodeAlerts
from streams.alerts.node import Due, Log, Node
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import decode as decode_tick
from streams.app import ReaderApp
from streams.reader import Batch
from streams.stage import Bookkeeping, Malformed, decode_record
from topics.alerts import MAX_TIME_MS, Severity

log = logging.getLogger(__name__)

ATTRIBUTED, SAMPLES, WORKLOADS = "gpu.attributed", "gpu.samples", "gpu.workloads"
ALERTS, STATE = "gpu.alerts", "gpu.alert-state"

QUIET_S = 30.0
"""After so long without a tick a node's state is written, and its last tick holds back no commit any more."""

BREAK_S = 10.0
"""Between answers of the broker that are further apart than this, it is not known what came."""

_LOOK_EVERY_S = 1.0
_MOST_ASKED = 600


class Clocks:
    """The worker's own clocks, which judge silence and nothing else."""

    def monotonic_s(self) -> float:
        """Seconds of the clock that is never set."""
        return time.monotonic()

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return time.time_ns() // 1_000_000


class Ends(NamedTuple):
    """Where the partition ended, and that of the samples, when the broker was asked."""

    asked_s: float
    end: int
    samples_end: int | None


class CaughtUp:
    """For how long one partition has been read to its end without a break.

    ``newest`` is the greatest offset of a sample that its records are of.
    """

    def __init__(self) -> None:
        self.newest = -1
        self._asked: deque[Ends] = deque(maxlen=_MOST_ASKED)
        self._since_s, self._until_s = float("inf"), float("-inf")

    def attributed(self, offset: int, *, new_log: bool = False) -> None:
        """A record of the sample at this offset was read. ``new_log``: the offsets of the samples began again."""
        self.newest = offset if new_log else max(self.newest, offset)

    def ends(self, ends: Ends) -> None:
        """The broker has said where the partitions end."""
        self._asked.append(ends)

    def read(self, position: int) -> None:
        """The partition was read to this position: all is known that there was when its end was asked.

        No sample may wait to be attributed: a stream that stands still is not a node that is silent.
        """
        while self._asked and position >= self._asked[0].end:
            samples_end = self._asked[0].samples_end
            if samples_end is not None and self.newest + 1 < samples_end:
                return
            at_s = self._asked.popleft().asked_s
            if at_s - self._until_s > BREAK_S:
                self._since_s = at_s
            self._until_s = at_s

    def lasted_s(self, since_s: float) -> float:
        """For how long, from that time on, the partition has been read to its end; below 0: not at all."""
        return self._until_s - max(since_s, self._since_s)


class _Removal(msgspec.Struct, frozen=True):
    """What of gpu.workloads is looked at."""

    removed: bool | None = False


class AlertWorker:
    """Judges the nodes of its partitions: gives each its ticks, writes what comes of them, then finishes them."""

    app: ReaderApp

    def __init__(
        self, instruments: Instruments, rules: Rules, *, partitions: int, clocks: Clocks | None = None
    ) -> None:
        self._instruments, self._rules, self._clocks = instruments, rules, clocks or Clocks()
        self._books = Bookkeeping(instruments, stage="alerts", partitions=partitions)
        self._nodes: dict[int, dict[bytes, Node]] = defaultdict(dict)
        self._active: dict[int, dict[bytes, Node]] = defaultdict(dict)
        self._caught_up: dict[int, CaughtUp] = defaultdict(CaughtUp)
        self._logged_ms: dict[int, int] = {}
        self._removed_ms: dict[int, dict[bytes, int]] = defaultdict(dict)
        self._writing: set[asyncio.Task[None]] = set()
        self._leftover: set[asyncio.Task[None]] = set()

    # -- records

    async def take(self, batch: Batch) -> None:
        """Judge a batch of one partition. Nothing is raised: a fault here ends the process."""
        try:
            ticks = bool(batch) and batch[0][0].tp.topic == ATTRIBUTED
            if ticks and self._leftover:
                await asyncio.wait(self._leftover)
            for slot, record in batch:
                if not self.app.current(slot):
                    return
                self._books.read(slot.tp.topic)
                try:
                    if slot.tp.topic == STATE:
                        self._learn(slot, record)
                    elif slot.tp.topic == WORKLOADS:
                        self._note_removal(slot, record)
                    else:
                        self._judge(slot, record)
                except Malformed as error:
                    await self._books.dead_letter(self.app, slot, record, error.reason, str(error))
            if ticks:
                self._write_quiet(batch[0][0].tp.partition)
        except Exception as error:
            log.exception("judging failed")
            self.app.fail(f"judging failed: {error!r}")

    def _learn(self, slot: Slot, record: Any) -> None:
        """Take on a node's state, or its deletion."""
        partition, key = slot.tp.partition, record.key
        node = self._nodes[partition].get(key)
        if record.value is None:
            if node is not None and node.fresh and not node.writing:
                del self._nodes[partition][key]
                self._active[partition].pop(key, None)
        else:
            learned = decode_record(memory.decode, key, record.value)
            node = self._node(partition, key)
            node.learn(learned)
            self._caught_up[partition].attributed(learned.offset)
            self._settle(partition, key, node)
            if node.fresh:
                self._rank(partition, key, node)
        self.app.finish(slot)

    def _rank(self, partition: int, key: bytes, node: Node) -> None:
        """A node that no tick was read of is active unless its state says that it is silent."""
        self._active[partition].pop(key, None)
        if node.current is not None and not node.current.silent:
            self._active[partition][key] = node

    def _note_removal(self, slot: Slot, record: Any) -> None:
        """Whether the cluster still has a node. What can't be decoded says nothing: attribution dead-letters it."""
        removed = self._removed_ms[slot.tp.partition]
        removed.pop(record.key, None)
        try:
            if record.value and msgspec.json.decode(record.value, type=_Removal).removed:
                removed[record.key] = record.timestamp
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        self.app.finish(slot)

    def _judge(self, slot: Slot, record: Any) -> None:
        """Judge a node's tick. Raises Malformed."""
        partition, key, reader = slot.tp.partition, record.key, self.app.reader
        tick = decode_record(decode_tick, key, record.value)
        if tick.ts_ms > MAX_TIME_MS:
            raise Malformed("undecodable", f"ts_ms is {tick.ts_ms}, past the year 9999")
        node = self._node(partition, key)
        self._active[partition].pop(key, None)
        self._active[partition][key] = node
        node.read_s = self._clocks.monotonic_s()
        self._logged_ms[partition] = record.timestamp
        known = Log(reader.input_ends.get(slot.tp, MAX_TIME_MS), partition in reader.torn)
        outcome = node.take(tick, slot, record.timestamp, self._rules, known)
        self._instruments.counter("gpustream_alerts_ticks_total", outcome).inc()
        if outcome == "new_log":
            what = "gpu.samples was deleted and created again: its new records are judged"
            log.warning("partition %d: %s", partition, what)
        if outcome != "replayed":
            self._caught_up[partition].attributed(tick.offset, new_log=outcome == "new_log")
        self._settle(partition, key, node)

    def _node(self, partition: int, key: bytes) -> Node:
        node = self._nodes[partition].get(key)
        if node is None:
            self._books.check_place(partition, key)
            node = self._nodes[partition][key] = Node()
        return node

    # -- writing

    def _settle(self, partition: int, key: bytes, node: Node) -> None:
        """Begin to write what is due, and finish what needs nothing more. What is only kept takes no room."""
        due = node.due()
        if due is not None:
            self._start(self._write(partition, key, node, due, self.app.reader.ledger.epoch))
        for slot in node.finished():
            self.app.finish(slot)
        if node.settled():
            for slot in node.kept:
                self.app.reader.ledger.set_aside(slot)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin to write. What can't be written ends the process."""

        def ended(writing: "asyncio.Task[None]") -> None:
            self._writing.discard(writing)
            self._leftover.discard(writing)
            if not writing.cancelled() and writing.exception() is not None:
                self.app.fail(f"not written: {writing.exception()!r}")

        writing = asyncio.create_task(work)
        self._writing.add(writing)
        writing.add_done_callback(ended)

    async def _write(self, partition: int, key: bytes, node: Node, due: Due, epoch: int) -> None:
        """The alerts, and when they are acknowledged the state, and then whatever has come due since.

        In a later epoch the state is in the topic after all: the ticks have waited for it, and go on from there.
        """
        sender, ledger = self.app.sender, self.app.reader.ledger
        values = [memory.encode(write.alert) if write.alert is not None else None for write in due.writes]
        keys = [write.fingerprint.encode() for write in due.writes]
        sent = [await sender.send(ALERTS, value, key=one) for one, value in zip(keys, values, strict=True)]
        await self._acknowledged("alert", sent)
        if epoch != ledger.epoch:
            return
        sent = [await sender.send(STATE, memory.encode(due.state), key=key, partition=partition)]
        await self._acknowledged("state", sent)
        self._instruments.counter("gpustream_alerts_written_total", "state").inc()
        if epoch == ledger.epoch:
            self._report(due)
            node.written(due.state)
            self._settle(partition, key, node)
        elif (late := self._nodes[partition].get(key)) is not None:
            late.learn(due.state)
            self._rank(partition, key, late)

    async def _acknowledged(self, what: str, sent: Sequence["asyncio.Future[int]"]) -> None:
        """Wait for all. What can never be sent is left out: to stop for it would stop for ever."""
        for error in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(error, Unsendable):
                self._instruments.counter("gpustream_alerts_unsendable_total", what).inc()
                log.error("a record of %s is left out: %s", ALERTS if what == "alert" else STATE, error)
            elif isinstance(error, BaseException):
                raise error

    def _report(self, due: Due) -> None:
        """Count and log what was acknowledged."""
        delay_s = max(0, self._clocks.now_ms() - due.state.logged_ms) / 1000
        for kind, _, alert in due.writes:
            self._instruments.counter("gpustream_alerts_written_total", kind).inc()
            if kind == "alert" and alert is not None:
                self._instruments.counter("gpustream_alerts_transitions_total", alert.name, alert.state).inc()
                self._instruments.histogram("gpustream_alerts_delay_seconds").observe(delay_s)
                said = f"{alert.name} {alert.state}: {alert.annotations.get('summary', alert.node)}"
                log.info("%s", said)

    # -- time

    async def look(self) -> None:
        """See, again and again, which nodes are silent now. Never returns."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            waiting = {tp.partition for tp in self.app.reader.pending_states()}
            for partition in self._nodes.keys() - waiting:
                self.look_at(partition)
            self._observe()

    def look_at(self, partition: int) -> None:
        """See which nodes of a partition are quiet or silent now, by how far it has been read."""
        position = self.app.reader.ledger.expected(Partition(ATTRIBUTED, partition))
        if position is not None:
            self._caught_up[partition].read(position)
            self._write_quiet(partition)
            self._judge_silent(partition)

    def _write_quiet(self, partition: int) -> None:
        """Write the state of nodes without a tick for a while; those of which one was read last are last.

        The log has gone on for that while without the node, or the partition has been read to its end for as long. Of a
        node that no tick was read of only the latter counts: its last ticks may be yet to be read again.
        """
        logged_ms, caught_up, quiet = self._logged_ms.get(partition, 0), self._caught_up[partition], []
        for key, node in self._active[partition].items():
            current = node.current
            passed = current is not None and not node.fresh and logged_ms - current.logged_ms >= QUIET_S * 1000
            if passed or caught_up.lasted_s(node.read_s) >= QUIET_S:
                quiet.append((key, node))
            elif not node.fresh:
                break
        for key, node in quiet:
            del self._active[partition][key]
            if node.current is not None:
                node.close(machine.Step(machine.quiet(node.current)))
                self._settle(partition, key, node)

    def _judge_silent(self, partition: int) -> None:
        """Find the nodes that have been silent for as long as a rule says, and those that never came back."""
        now_ms, caught_up = self._clocks.now_ms(), self._caught_up[partition]
        nodes = [(key, node) for key, node in self._nodes[partition].items() if key not in self._active[partition]]
        for key, node in nodes:
            if not node.settled() or caught_up.lasted_s(node.read_s) < QUIET_S:
                continue
            if node.current is not None:
                removed_ms = self._removed_ms[partition].get(key)
                node.close(machine.without_ticks(node.current, self._rules, now_ms=now_ms, removed_ms=removed_ms))
            self._settle(partition, key, node)
            if node.settled() and node.current is not None and machine.is_over(node.current):
                self._start(self._delete(partition, key, node, node.current))

    async def _delete(self, partition: int, key: bytes, node: Node, last: NodeAlerts) -> None:
        """Delete the state of a node that nothing is left of, unless it comes back meanwhile."""
        node.writing = True
        epoch = self.app.reader.ledger.epoch
        await self._acknowledged("state", [await self.app.sender.send(STATE, None, key=key, partition=partition)])
        if epoch != self.app.reader.ledger.epoch:
            return
        node.writing = False
        if node.current is last:
            del self._nodes[partition][key]
        else:
            node.durable = None
            self._settle(partition, key, node)

    # -- what the reader knows of offsets

    def forget(self) -> None:
        """Whatever was not acknowledged is read and judged again, as soon as it is known what has arrived."""
        for partition, nodes in self._nodes.items():
            self._nodes[partition] = {key: Node(node.durable) for key, node in nodes.items() if node.durable}
            self._active[partition] = {
                key: node for key, node in self._nodes[partition].items() if node.durable and not node.durable.silent
            }
        self._leftover |= self._writing
        self._caught_up.clear()
        self._logged_ms.clear()

    def drop(self, partitions: frozenset[int]) -> None:
        """Drop the state of these partitions: it is read again, or another worker's now."""
        for partition in partitions:
            self._nodes.pop(partition, None)
            self._active.pop(partition, None)
            self._removed_ms.pop(partition, None)

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Nothing is kept for what may be read again."""

    def ends(self, asked_s: float, ends: Mapping[Partition, int]) -> None:
        """The broker has said where the partitions end."""
        lags: dict[str, int] = defaultdict(int)
        for tp, end in ends.items():
            read = self.app.reader.ledger.expected(tp)
            lags[tp.topic] += max(0, end - read) if read is not None else 0
            if tp.topic == ATTRIBUTED:
                samples_end = ends.get(Partition(SAMPLES, tp.partition))
                self._caught_up[tp.partition].ends(Ends(asked_s, end, samples_end))
        for topic in (ATTRIBUTED, STATE):
            self._instruments.gauge("gpustream_alerts_lag_records", topic).set(lags[topic])

    def _observe(self) -> None:
        gauge = self._instruments.gauge
        states = [node.current for nodes in self._nodes.values() for node in nodes.values() if node.current]
        tracked = [one for each in states for one in each.tracked]
        firing = Counter(one.alert.severity for one in tracked if one.alert is not None)
        for severity in get_args(Severity):
            gauge("gpustream_alerts_firing", severity).set(firing[severity])
        gauge("gpustream_alerts_pending").set(len(tracked) - firing.total())
        gauge("gpustream_alerts_silent_nodes").set(sum(1 for each in states if each.silent))
        gauge("gpustream_alerts_nodes").set(len(states))
        self._books.observe(self.app.reader)
