"""The alert stream: judges every node's ticks by the rules, and writes what becomes of each alert.

In: gpu.attributed; gpu.alert-state, whole; of gpu.workloads, which nodes were removed; and what the reader knows of
offsets. Out: gpu.alerts by fingerprint, gpu.alert-state, and to gpu.alert-members what is a part of an alert of several
GPUs. That topic is an input too: whoever has the partition of such an alert, makes it of the reports of all nodes.
State: one :class:`~streams.alerts.node.Node` a node, by partition, in the order in which ticks of them were last read;
a node's state is written whenever it changes. Of each alert of several GPUs its group, in gpu.alert-groups, which is
written with each report.
On failure: what can't be decoded goes to gpu.dead-letters; an alert or a state that is too large is left out and
counted; an output that is not acknowledged ends the process.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import msgspec
from aiokafka.partitioner import murmur2

from delivery.instruments import Instrument, Instruments
from delivery.ledger import Partition, Slot
from delivery.policies import ALERTS as ALERTS_POLICY
from delivery.policies import IDLE_AFTER
from streams.alerts import groups, machine, memory
from streams.alerts.memory import NodeAlerts
from streams.alerts.node import Due, Log, Node, PartitionNodes
from streams.alerts.rules.rule import Rules, has_policy
from streams.alerts.tick import Tick
from streams.alerts.tick import decode as decode_tick
from streams.reader import Batch, Reads
from streams.settings import AlertSettings
from streams.stage import (
    ATTRIBUTED,
    SAMPLES,
    Clocks,
    Malformed,
    NodeWorker,
    Stream,
    decode_record,
    decode_value,
    instruments,
)
from topics.alerts import MAX_TIME_MS, Alert, AlertGroup, AlertReport, Severity, kafka_headers

log = logging.getLogger(__name__)

WORKLOADS = "gpu.workloads"
ALERTS, STATE, MEMBERS, GROUPS = "gpu.alerts", "gpu.alert-state", "gpu.alert-members", "gpu.alert-groups"

G = TypeVar("G", AlertReport, AlertGroup)

INSTRUMENTS = (
    Instrument("gpustream_alerts_ticks_total", "counter", "Node ticks read: judged, new_log (judged; the first after"
               " gpu.samples was deleted and created again), replayed (judged before), resumed (the first of a node"
               " that another worker had judged already).", ("outcome",)),
    Instrument("gpustream_alerts_transitions_total", "counter", "Alerts that fired, or were resolved, and were"
               " acknowledged; after a crash some again.", ("alertname", "state")),
    Instrument("gpustream_alerts_written_total", "counter", "Records acknowledged by the broker: alert, repeat (an"
               " open alert written again, daily), deletion, state.", ("record",)),
    Instrument("gpustream_alerts_unsendable_total", "counter", "Records that the broker does not take, too large: left"
               " out.", ("record",)),
    Instrument("gpustream_alerts_firing", "gauge", "Alerts that fire, by severity.", ("severity",)),
    Instrument("gpustream_alerts_pending", "gauge", "Conditions that hold, but not for long enough yet."),
    Instrument("gpustream_alerts_policies", "gauge", "Pods with a policy of their own about alerts, by namespace and"
               " annotation, as of the last tick of each node.", ("k8s_namespace_name", "policy")),
    Instrument("gpustream_alerts_maintained_nodes", "gauge", "Nodes in maintenance, of which nobody is alerted."),
    Instrument("gpustream_alerts_silent_nodes", "gauge", "Nodes without a tick for half a minute or more."),
    Instrument("gpustream_alerts_delay_seconds", "histogram", "From when a tick was logged until its alert was"
               " acknowledged.", buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)),
    *instruments(
        "gpustream_alerts_records_read_total", "gpustream_alerts_records_delivered_total",
        "gpustream_alerts_records_duplicate_total", "gpustream_alerts_records_dead_lettered_total",
        "gpustream_alerts_records_released_total", "gpustream_alerts_records_held", "gpustream_alerts_open_bytes",
        "gpustream_alerts_nodes", "gpustream_alerts_lag_records", "gpustream_alerts_misplaced_nodes_total",
        "gpustream_alerts_rebalances_total", "gpustream_alerts_holes_total", "gpustream_alerts_lost_offsets_total",
        "gpustream_alerts_loop_late_seconds"),
)  # fmt: skip


class Alerts(Stream[AlertSettings]):
    """The component: ``run`` judges until stopped; rules that are not right are an error."""

    name = "alerts"
    table = INSTRUMENTS
    watch_failure = "looking at the nodes failed"

    async def run(self, stop: asyncio.Event) -> None:
        self._rules = await asyncio.to_thread(self.settings.load)
        await super().run(stop)

    def make_worker(self, partitions: Mapping[str, int]) -> tuple["AlertWorker", Reads]:
        states, inputs = (STATE, GROUPS, WORKLOADS), (ATTRIBUTED, MEMBERS)
        compacted, watched = (STATE, GROUPS), (SAMPLES,)
        reads = Reads(inputs=inputs, states=states, compacted=compacted, watched=watched, partitions=partitions)
        return AlertWorker(self.instruments, self._rules, partitions=partitions[ATTRIBUTED]), reads


class AlertWorker(NodeWorker[PartitionNodes]):
    """Judges the nodes of its partitions: gives each its ticks, writes what comes of them, then finishes them."""

    new_partition = PartitionNodes
    inputs, lag_topics = (ATTRIBUTED, MEMBERS), (ATTRIBUTED, MEMBERS, STATE, GROUPS)
    batch_failure = "judging failed"

    def __init__(
        self, instruments: Instruments, rules: Rules, *, partitions: int, clocks: Clocks | None = None
    ) -> None:
        super().__init__(instruments, stage="alerts", partitions=partitions, clocks=clocks)
        self._rules, self._count = rules, partitions
        self._policies: set[tuple[str, str]] = set()
        self._groups: dict[int, dict[bytes, AlertGroup]] = {}
        self._groups_written: dict[tuple[int, bytes], int] = {}  # where in the topic, in this epoch
        self._grouping = asyncio.Lock()  # held while alerts of several GPUs are made, or deleted

    # -- records

    async def handle_batch(self, topic: str, partition: PartitionNodes, batch: Batch) -> None:
        if topic != MEMBERS:
            await super().handle_batch(topic, partition, batch)
            return
        async with self._grouping:
            if self.app.is_current(batch[0][0]):  # all of a batch were read in one epoch
                await self._group(partition.number, batch)

    def handle_record(self, topic: str, partition: PartitionNodes, slot: Slot, record: Any) -> None:
        """Judge a tick, or learn of a state. Raises Malformed."""
        if topic == STATE:
            self._learn(partition, slot, record)
        elif topic == GROUPS:
            self._learn_group(partition.number, slot, record)
        elif topic == WORKLOADS:
            partition.note_removal(record.key, record.value, record.timestamp)
            self.app.finish(slot)
        else:
            self._judge(partition, slot, record)

    def close_silent(self, partition: PartitionNodes) -> None:
        for node in partition.close_quiet():
            self._settle(partition, node)

    def _learn(self, partition: PartitionNodes, slot: Slot, record: Any) -> None:
        """Take on a node's state, or its deletion. Raises Malformed."""
        if record.value is None:
            partition.remove(record.key)
        else:
            state = decode_record(memory.decode, record.key, record.value)
            node = self._node(partition, record.key)
            partition.learn(node, state)
            partition.caught_up.attributed(state.offset)
            self._settle(partition, node)
        self.app.finish(slot)

    def _judge(self, partition: PartitionNodes, slot: Slot, record: Any) -> None:
        """Judge a node's tick. Raises Malformed."""
        tick = decode_record(decode_tick, record.key, record.value)
        if tick.ts_ms > MAX_TIME_MS:
            raise Malformed("undecodable", f"ts_ms is {tick.ts_ms}, past the year 9999")
        node, reader = self._node(partition, record.key), self.app.reader
        partition.rank(node, active=True)
        node.policies = policies_of(tick)
        partition.logged_ms = record.timestamp
        node.read_s = self._clocks.monotonic_s()
        known = Log(reader.input_ends.get(slot.tp, MAX_TIME_MS), partition.number in reader.torn)
        outcome = node.take(tick, slot, record.timestamp, self._rules, known)
        self._instruments.counter("gpustream_alerts_ticks_total", outcome).inc()
        if outcome == "new_log":
            what = "gpu.samples was deleted and created again: its new records are judged"
            log.warning("partition %d: %s", partition.number, what)
        if outcome == "replayed":
            slot.outcome = ("duplicate",)
        else:
            partition.caught_up.attributed(tick.offset, new_log=outcome == "new_log")
        self._settle(partition, node)

    # -- alerts of several GPUs

    def _learn_group(self, number: int, slot: Slot, record: Any) -> None:
        """Take on a group as it is in the topic, unless it is known as of a later report. Raises Malformed."""
        known = self._groups.setdefault(number, {})
        if record.value is None:
            if record.key in known and groups.is_over(known[record.key], self._clocks.now_ms()):
                del known[record.key]
        else:
            group = _decoded(groups.decode_group, record)
            if record.key not in known or known[record.key].offset <= group.offset:
                known[record.key] = group
            elif slot.offset > self._groups_written.get((number, record.key), -1):
                # written late, by a worker that had lost the partition: ours is to be the last one
                self._write_tasks.start(self.app, self._write_groups(number, {record.key: known[record.key]}))
        self.app.finish(slot)

    async def _group(self, number: int, batch: Batch) -> None:
        """Change the alerts of several GPUs by the reports of a batch. First the alerts are written, then the groups.
        When both are acknowledged, the reports are finished."""
        known, epoch = self._groups.setdefault(number, {}), self.app.reader.ledger.epoch
        ended = self.app.reader.input_ends.get(Partition(MEMBERS, number), MAX_TIME_MS)
        changed: dict[bytes, AlertGroup] = {}
        steps: list[groups.GroupStep] = []
        slots: list[Slot] = []
        for slot, record in batch:
            try:
                report = _decoded(groups.decode_report, record)
            except Malformed as error:
                await self._housekeeping.dead_letter(self.app, slot, record, error.reason, str(error))
                continue
            group = changed.get(record.key) or known.get(record.key)
            if group is not None and slot.offset <= group.offset and group.offset >= ended:  # the log is another one
                group = msgspec.structs.replace(group, offset=-1)
            step = groups.step(group, report, slot.offset, self._rules)
            if step.group is not group:
                changed[record.key] = step.group
            steps.append(step)
            slots.append(slot)
        sent = [
            await self.app.sender.send(
                ALERTS, memory.encode(alert), key=alert.fingerprint.encode(), headers=kafka_headers(alert)
            )
            for step in steps
            for alert in step.alerts
        ]
        await self._await_acks("alert", sent)
        await self._write_groups(number, changed)
        for alert, news in [(alert, step.news) for step in steps for alert in step.alerts]:
            self._note(alert, "alert" if news else "repeat")
        if epoch == self.app.reader.ledger.epoch:
            known |= changed
            for slot in slots:
                self.app.finish(slot)

    async def _write_groups(self, number: int, written: Mapping[bytes, AlertGroup | None]) -> None:
        sent: dict[bytes, asyncio.Future[int]] = {}
        for key, group in written.items():
            value = None if group is None else memory.encode(group)
            sent[key] = await self.app.sender.send(GROUPS, value, key=key, partition=number)
        await self._await_acks("state", sent.values())
        for key, one in sent.items():
            if one.exception() is None:
                self._groups_written[number, key] = one.result()

    async def _forget_groups(self, number: int, epoch: int) -> None:
        """Delete the alerts of groups that have been over for a week, and the groups. If a workload holds GPUs, only
        their number is kept. Meanwhile no report is worked on, because it may fire the alert again."""
        async with self._grouping:
            if epoch != self.app.reader.ledger.epoch:
                return
            known, now_ms = self._groups.setdefault(number, {}), self._clocks.now_ms()
            over = {key: group for key, group in known.items() if groups.is_over(group, now_ms)}
            alerts = [key for key, group in over.items() if group.alert is not None]
            await self._await_acks("alert", [await self.app.sender.send(ALERTS, None, key=key) for key in alerts])
            left = {key: groups.without_alert(group) for key, group in over.items()}
            await self._write_groups(number, left)
            if epoch == self.app.reader.ledger.epoch:
                for key, group in left.items():
                    known.pop(key, None)
                    if group is not None:
                        known[key] = group

    def _note(self, alert: Alert, record: str) -> None:
        """Count and log a record of gpu.alerts that was acknowledged."""
        self._instruments.counter("gpustream_alerts_written_total", record).inc()
        if record == "alert":
            state = alert.state if not alert.revision or not alert.is_open else "updated"
            self._instruments.counter("gpustream_alerts_transitions_total", alert.name, state).inc()
            log.info("%s", f"{alert.name} {state}: {alert.annotations.get('summary', alert.node)}")

    def _node(self, partition: PartitionNodes, key: bytes) -> Node:
        node = partition.nodes.get(key)
        if node is None:
            self._housekeeping.check_place(partition.number, key)
            node = partition.nodes[key] = Node(key)
        return node

    # -- writing

    def _settle(self, partition: PartitionNodes, node: Node) -> None:
        """Begin to write what is due, and finish what needs nothing more. What is only kept takes no room."""
        settled = node.settled()
        if (due := node.due(settled=settled)) is not None:
            settled = False
            self._write_tasks.start(self.app, self._write(partition, node, due, self.app.reader.ledger.epoch))
        for slot in node.finished(settled=settled):
            self.app.finish(slot)
        if settled:
            for slot in node.kept:
                self.app.reader.ledger.set_aside(slot)

    async def _write(self, partition: PartitionNodes, node: Node, due: Due, epoch: int) -> None:
        """The alerts, and when they are acknowledged the state, and then whatever has come due since.
        In a later epoch the state is in the topic after all: the ticks have waited for it, and go on from there."""
        sent: list[asyncio.Future[int]] = []
        for _, fingerprint, written in due.writes:
            key, value = fingerprint.encode(), memory.encode(written) if written is not None else None
            if isinstance(written, AlertReport):
                place = (murmur2(key) & 0x7FFFFFFF) % self._count
                sent.append(await self.app.sender.send(MEMBERS, value, key=key, partition=place))
            else:
                headers = [] if written is None else kafka_headers(written)
                sent.append(await self.app.sender.send(ALERTS, value, key=key, headers=headers))
        await self._await_acks("alert", sent)
        if epoch != self.app.reader.ledger.epoch:
            return
        await self._write_state(partition, node, memory.encode(due.state))
        self._instruments.counter("gpustream_alerts_written_total", "state").inc()
        if epoch != self.app.reader.ledger.epoch:
            now = self._partitions.get(partition.number)
            if now is not None and node.key in now.nodes:
                now.learn(now.nodes[node.key], due.state)
            return
        delay_s = max(0, self._clocks.now_ms() - due.state.logged_ms) / 1000
        for kind, _, alert in due.writes:
            if isinstance(alert, Alert):
                self._note(alert, kind)
            else:
                self._instruments.counter("gpustream_alerts_written_total", kind).inc()
            if kind in ("alert", "report"):
                self._instruments.histogram("gpustream_alerts_delay_seconds").observe(delay_s)
        node.written(due.state)
        self._settle(partition, node)

    async def _delete(self, partition: PartitionNodes, node: Node, last: NodeAlerts) -> None:
        """Delete the state of a node that nothing is left of, unless it comes back meanwhile."""
        node.writing = True
        epoch = self.app.reader.ledger.epoch
        await self._write_state(partition, node, None)
        if epoch != self.app.reader.ledger.epoch:
            return
        node.writing = False
        if node.current is last:
            del partition.nodes[node.key]
        else:
            node.durable = None
            self._settle(partition, node)

    async def _write_state(self, partition: PartitionNodes, node: Node, value: bytes | None) -> None:
        sent = await self.app.sender.send(STATE, value, key=node.key, partition=partition.number)
        await self._await_acks("state", [sent])

    # -- time

    def check_partition(self, number: int) -> None:
        """Find which nodes of a partition are quiet or silent now, by how far it has been read."""
        position = self.app.reader.ledger.expected(Partition(ATTRIBUTED, number))
        if position is None:
            return
        partition = self._partition(number)
        partition.caught_up.read(position)
        self.close_silent(partition)
        for node in partition.close_silent(self._rules, self._clocks.now_ms()):
            self._settle(partition, node)
            if node.settled() and node.current is not None and machine.is_over(node.current):
                self._write_tasks.start(self.app, self._delete(partition, node, node.current))
        now_ms, kept = self._clocks.now_ms(), self._groups.get(number, {})
        if not self._grouping.locked() and any(groups.is_over(group, now_ms) for group in kept.values()):
            self._write_tasks.start(self.app, self._forget_groups(number, self.app.reader.ledger.epoch))

    def observe(self) -> None:
        gauge = self._instruments.gauge
        nodes = [node for partition in self._partitions.values() for node in partition.nodes.values()]
        states = [node.current for node in nodes if node.current]
        tracked = [one for each in states for one in each.tracked]
        firing = Counter(one.alert.severity for one in tracked if one.alert is not None)
        for severity in get_args(Severity):
            gauge("gpustream_alerts_firing", severity).set(firing[severity])
        gauge("gpustream_alerts_pending").set(len(tracked) - firing.total())
        policies = Counter((one[0], one[2]) for node in nodes for one in node.policies)
        for pair in self._policies - policies.keys():
            gauge("gpustream_alerts_policies", *pair).set(0)
        for pair, count in policies.items():
            gauge("gpustream_alerts_policies", *pair).set(count)
        self._policies = set(policies)
        gauge("gpustream_alerts_maintained_nodes").set(sum(1 for each in states if each.maintenance is not None))
        gauge("gpustream_alerts_silent_nodes").set(sum(1 for each in states if each.silent))
        gauge("gpustream_alerts_nodes").set(len(states))
        self._housekeeping.observe(self.app.reader)

    # -- what the reader knows of offsets

    def forget(self) -> None:
        """Whatever was not acknowledged is read and judged again, as soon as it is known what has arrived."""
        for partition in self._partitions.values():
            partition.forget()
        self._groups_written.clear()
        self._write_tasks.forget()

    def drop(self, partitions: frozenset[int]) -> None:
        super().drop(partitions)
        for number in partitions:
            self._groups.pop(number, None)


def policies_of(tick: Tick) -> frozenset[tuple[str, str, str]]:
    """Namespace, pod and annotation of each policy that a tick's holders have."""
    held = [one for device in tick.devices for one in device.holders if has_policy(one)]
    return frozenset(
        (one.namespace, one.pod, name)
        for one in held
        for name in (ALERTS_POLICY, IDLE_AFTER)
        if name in one.annotations or name in one.namespace_labels
    )


def _decoded(decode: Callable[[bytes], G], record: Any) -> G:
    """The record of a topic that is keyed by the group. Raises Malformed."""
    found = decode_value(decode, record.value)
    if record.key != found.group.encode():
        raise Malformed("key", f"the key {record.key!r:.300} is not {found.group}")
    return found
