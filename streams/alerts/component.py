"""The alert stream: applies the rules to every node's ticks, and writes the alerts that fire, change or are resolved.

In: gpu.attributed; all of gpu.alert-state; from gpu.workloads, which nodes were removed; and the offsets that the
reader knows. Out: gpu.alerts by fingerprint, gpu.alert-state, and to gpu.alert-members the parts of alerts of several
GPUs. The last topic is an input, too: the worker that has the partition of such an alert makes it from the reports of
all nodes.
State: one :class:`~streams.alerts.node.Node` for each node, by partition; its state is written whenever it changes.
One :class:`~topics.alerts.AlertGroup` for each alert of several GPUs, in gpu.alert-groups, written after its alert.
On failure: a record that can't be decoded goes to gpu.dead-letters; an alert or a state that is too large is left out
and counted; an output that is not acknowledged ends the process.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import msgspec

from delivery.instruments import Instrument, Instruments, named
from delivery.ledger import Partition, Slot
from delivery.policies import ALERTS as ALERTS_POLICY
from delivery.policies import IDLE_AFTER
from delivery.sender import partition_of
from streams.alerts import groups, machine, memory
from streams.alerts.memory import NodeAlerts
from streams.alerts.node import Node, PartitionNodes
from streams.alerts.reports import Step
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import decode as decode_tick
from streams.app import Stream
from streams.kept_state import KeptState
from streams.reader import Batch, Reads
from streams.settings import AlertSettings
from streams.stage import ATTRIBUTED, COMMON, SAMPLES, Clocks, Malformed, NodeWorker, decode_record, decode_value
from topics.alerts import Alert, AlertGroup, AlertReport, Severity, kafka_headers
from topics.times import MAX_TIME_MS

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
    Instrument("gpustream_alerts_silent_nodes", "gauge", "Nodes without a tick for three of their intervals, but at"
               " least half a minute and at most five minutes."),
    Instrument("gpustream_alerts_delay_seconds", "histogram", "From when a tick was logged until its alert was"
               " acknowledged.", buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)),
    *named(
        COMMON,
        "gpustream_alerts_records_read_total", "gpustream_alerts_records_delivered_total",
        "gpustream_alerts_records_duplicate_total", "gpustream_alerts_records_dead_lettered_total",
        "gpustream_alerts_records_released_total", "gpustream_alerts_records_held", "gpustream_alerts_open_bytes",
        "gpustream_alerts_nodes", "gpustream_alerts_lag_records", "gpustream_alerts_misplaced_nodes_total",
        "gpustream_alerts_rebalances_total", "gpustream_alerts_holes_total", "gpustream_alerts_lost_offsets_total",
        "gpustream_alerts_loop_late_seconds"),
)  # fmt: skip


class Alerts(Stream[AlertSettings]):
    """The component: ``run`` applies the rules until stopped. Invalid rules are an error at the start."""

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
    """Gives the nodes of its partitions their ticks, writes their alerts and states, and then finishes the ticks."""

    new_partition = PartitionNodes
    inputs, lag_topics = (ATTRIBUTED, MEMBERS), (ATTRIBUTED, MEMBERS, STATE, GROUPS)
    batch_failure = "judging failed"

    def __init__(
        self, instruments: Instruments, rules: Rules, *, partitions: int, clocks: Clocks | None = None
    ) -> None:
        super().__init__(instruments, stage="alerts", partitions=partitions, clocks=clocks)
        self._rules = rules
        self._policies: set[tuple[str, str]] = set()
        self._group_lock = asyncio.Lock()  # held while alerts of several GPUs are written or deleted

    # -- records

    async def handle_batch(self, topic: str, partition: PartitionNodes, batch: Batch) -> None:
        if topic != MEMBERS:
            await super().handle_batch(topic, partition, batch)
            return
        async with self._group_lock:
            await self._update_groups(partition, batch)

    def handle_record(self, topic: str, partition: PartitionNodes, slot: Slot, record: Any) -> None:
        """Judge a tick, or read a state, a group or a node's removal. Raises Malformed."""
        if topic == ATTRIBUTED:
            self._judge_tick(partition, slot, record)
            return
        if topic == WORKLOADS:
            partition.note_removal(record.key, record.value, record.timestamp)
        elif topic == GROUPS:
            self._read_group(partition, slot, record)
        elif record.value is None:
            if (remaining := partition.remove_state(record.key, slot.offset)) is not None:
                self._write_and_finish(partition, remaining)
        else:
            state = decode_record(memory.decode, record.key, record.value)
            node = self._node_of(partition, record.key)
            partition.read_state(node, state, slot.offset)
            partition.caught_up.attributed(state.offset)
            self._write_and_finish(partition, node)
        self.app.finish(slot)

    def close_silent(self, partition: PartitionNodes) -> None:
        for node in partition.judge_quiet():
            self._write_and_finish(partition, node)

    def _judge_tick(self, partition: PartitionNodes, slot: Slot, record: Any) -> None:
        """Judge a node's tick. Raises Malformed."""
        tick = decode_record(decode_tick, record.key, record.value)
        node, reader = self._node_of(partition, record.key), self.app.reader
        partition.set_active(node, active=True)
        node.policies = frozenset(
            (holder.namespace, holder.pod, name)
            for device in tick.devices
            for holder in device.holders
            for name in (ALERTS_POLICY, IDLE_AFTER)
            if name in holder.annotations or name in holder.namespace_labels
        )
        partition.logged_ms = record.timestamp
        node.read_s = self._clocks.monotonic_s()
        has_gap = partition.number in reader.torn
        outcome = node.judge(tick, slot, record.timestamp, self._rules, has_gap=has_gap)
        self._instruments.counter("gpustream_alerts_ticks_total", outcome).inc()
        if outcome == "new_log":
            message = "gpu.samples was deleted and created again: its new records are judged"
            log.warning("partition %d: %s", partition.number, message)
        if outcome == "replayed":
            slot.outcome = ("duplicate",)
        else:
            partition.caught_up.attributed(tick.offset, new_log=outcome == "new_log")
        self._write_and_finish(partition, node)

    # -- alerts of several GPUs

    def _read_group(self, partition: PartitionNodes, slot: Slot, record: Any) -> None:
        """Use a group that was read, or its deletion, unless a later version of it is known. Raises Malformed."""
        known = partition.groups.get(record.key)
        if record.value is None:
            if known is not None and groups.is_over(known.latest, self.now_ms()):
                del partition.groups[record.key]
            return
        group = _decode_grouped(groups.decode_group, record)
        known = partition.groups.setdefault(record.key, KeptState(group))
        known.read(slot.offset, group, groups.order(group))
        if known.stale:
            self._write_tasks.start(self._write_again(partition, record.key, self.epoch))

    async def _update_groups(self, partition: PartitionNodes, batch: Batch) -> None:
        """Update the alerts of several GPUs from a batch of reports. The alerts are written first, then the groups.
        When both are acknowledged, the reports are finished."""
        epoch = self.epoch
        log_end = self.app.reader.input_ends.get(Partition(MEMBERS, partition.number), MAX_TIME_MS)
        changed: dict[bytes, AlertGroup] = {}
        steps: list[groups.GroupStep] = []
        slots: list[Slot] = []
        for slot, record in batch:
            await self._turns.next()
            if not self.app.is_current(slot):
                return
            known = partition.groups.get(record.key)
            group = changed.get(record.key) or (None if known is None else known.latest)
            if group is not None and slot.offset <= group.offset and group.offset >= log_end:
                group = msgspec.structs.replace(group, generation=group.generation + 1, offset=-1)  # created again
            try:
                report = _decode_grouped(groups.decode_report, record)
                step = groups.step(group, report, slot.offset, self._rules)
            except Malformed as error:
                await self.dead_letter(slot, record, error.reason, str(error))
                continue
            except msgspec.DecodeError as error:
                await self.dead_letter(slot, record, "undecodable", str(error))
                continue
            if step.group is not group:
                changed[record.key] = step.group
            steps.append(step)
            slots.append(slot)
        acks = [
            await self.app.sender.send(
                ALERTS, memory.encode(alert), key=alert.fingerprint.encode(), headers=kafka_headers(alert)
            )
            for step in steps
            for alert in step.alerts
        ]
        await self._await_acks("alert", acks)
        await self._write_groups(partition, changed)
        for alert, is_news in [(alert, step.is_news) for step in steps for alert in step.alerts]:
            self._count_and_log(alert, "alert" if is_news else "repeat")
        if epoch == self.epoch:
            for slot in slots:
                self.app.finish(slot)

    async def _write_groups(self, partition: PartitionNodes, group_by_key: Mapping[bytes, AlertGroup | None]) -> None:
        """Write groups, or their deletions, to gpu.alert-groups, and use them when these are acknowledged."""
        acks: list[asyncio.Future[int]] = []
        for key, group in group_by_key.items():
            value = None if group is None else memory.encode(group)
            acks.append(await self.app.sender.send(GROUPS, value, key=key, partition=partition.number))
        offsets = await self._await_acks("state", acks)
        for (key, group), offset in zip(group_by_key.items(), offsets, strict=True):
            if group is None:
                partition.groups.pop(key, None)
            else:
                partition.groups.setdefault(key, KeptState(group)).wrote(offset, group, groups.order(group))

    async def _write_again(self, partition: PartitionNodes, key: bytes, epoch: int) -> None:
        """Write a group again, as it is now. If a later one is read meanwhile, write that too."""
        async with self._group_lock:
            while epoch == self.epoch and (group := partition.groups.get(key)) is not None and group.stale:
                await self._write_groups(partition, {key: group.latest})

    async def _delete_groups(self, partition: PartitionNodes, epoch: int) -> None:
        """Delete the groups that have been over for a week, and their alerts. Of a workload that still holds GPUs the
        number of these is kept. Meanwhile no report is handled, because it may fire the alert again."""
        async with self._group_lock:
            if epoch != self.epoch:
                return
            now_ms = self.now_ms()
            known = {key: group.latest for key, group in partition.groups.items()}
            over = {key: group for key, group in known.items() if groups.is_over(group, now_ms)}
            alerts = [key for key, group in over.items() if group.alert is not None]
            await self._await_acks("alert", [await self.app.sender.send(ALERTS, None, key=key) for key in alerts])
            remaining = {key: groups.without_alert(group) for key, group in over.items()}
            await self._write_groups(partition, remaining)

    def _count_and_log(self, alert: Alert, record: str) -> None:
        """Count and log a record of gpu.alerts that was acknowledged."""
        self._instruments.counter("gpustream_alerts_written_total", record).inc()
        if record == "alert":
            state = alert.state if not alert.revision or not alert.is_open else "updated"
            self._instruments.counter("gpustream_alerts_transitions_total", alert.name, state).inc()
            log.info("%s", f"{alert.name} {state}: {alert.annotations.get('summary', alert.node)}")

    def _node_of(self, partition: PartitionNodes, key: bytes) -> Node:
        node = partition.nodes.get(key)
        if node is None:
            self.check_place(partition.number, key)
            node = partition.nodes[key] = Node(key)
        return node

    # -- writing

    def _write_and_finish(self, partition: PartitionNodes, node: Node) -> None:
        """Start to write a node's new records and state, and finish the ticks that no replay needs any more.
        The slots of a settled node stay open, but do not count against the limit of records held."""
        settled = node.settled()
        if (pending := node.start_write(settled=settled)) is not None:
            settled = False
            self._write_tasks.start(self._write_node(partition, node, pending, self.epoch))
        for slot in node.take_finished_slots(settled=settled):
            self.app.finish(slot)
        if settled:
            for slot in node.open_slots:
                self.app.reader.ledger.set_aside(slot)

    async def _write_node(self, partition: PartitionNodes, node: Node, pending: Step, epoch: int) -> None:
        """Write the alerts, then the state, and then what has become due meanwhile; each waits for acknowledgements.
        If an epoch ends while the state is written, the node uses it like one that was read from the topic."""
        acks: list[asyncio.Future[int]] = []
        for _, fingerprint, record in pending.writes:
            key, value = fingerprint.encode(), memory.encode(record) if record is not None else None
            if isinstance(record, AlertReport):
                number = partition_of(key, self._partition_count)
                acks.append(await self.app.sender.send(MEMBERS, value, key=key, partition=number))
            else:
                headers = [] if record is None else kafka_headers(record)
                acks.append(await self.app.sender.send(ALERTS, value, key=key, headers=headers))
        await self._await_acks("alert", acks)
        if epoch != self.epoch:
            return
        offset = await self._write_state(partition, node, memory.encode(pending.state))
        self._instruments.counter("gpustream_alerts_written_total", "state").inc()
        if epoch != self.epoch:
            current_partition = self._partitions.get(partition.number)
            if current_partition is not None and offset is not None and node.key in current_partition.nodes:
                current_partition.read_state(current_partition.nodes[node.key], pending.state, offset)
            return
        delay_s = max(0, self.now_ms() - pending.state.logged_ms) / 1000
        for kind, _, alert in pending.writes:
            if isinstance(alert, Alert):
                self._count_and_log(alert, kind)
            else:
                self._instruments.counter("gpustream_alerts_written_total", kind).inc()
            if kind in ("alert", "report"):
                self._instruments.histogram("gpustream_alerts_delay_seconds").observe(delay_s)
        node.finish_write(pending.state, offset)
        self._write_and_finish(partition, node)

    async def _delete(self, partition: PartitionNodes, node: Node, last: NodeAlerts) -> None:
        """Delete the empty state of a node that was removed. If the node comes back meanwhile, write its new state."""
        node.writing = True
        epoch = self.epoch
        node.wrote(await self._write_state(partition, node, None), None)
        if epoch != self.epoch:
            return
        if node.current is last:
            del partition.nodes[node.key]
        else:
            node.saved = None
            self._write_and_finish(partition, node)

    async def _write_state(self, partition: PartitionNodes, node: Node, value: bytes | None) -> int | None:
        """Write a state, or its deletion. Returns its offset, or None if the broker refuses it."""
        ack = await self.app.sender.send(STATE, value, key=node.key, partition=partition.number)
        return (await self._await_acks("state", [ack]))[0]

    # -- time

    def check_clock(self, partition: PartitionNodes) -> None:
        """Judge which nodes of a partition are quiet or silent, by how far it was read, and delete what is over."""
        self.close_silent(partition)
        now_ms, now_s = self.now_ms(), self._clocks.monotonic_s()
        for node in partition.judge_silent(self._rules, now_ms, now_s):
            self._write_and_finish(partition, node)
            if node.settled() and node.current is not None and machine.is_over(node.current):
                self._write_tasks.start(self._delete(partition, node, node.current))
        if not self._group_lock.locked() and any(
            groups.is_over(group.latest, now_ms) for group in partition.groups.values()
        ):
            self._write_tasks.start(self._delete_groups(partition, self.epoch))

    def observe(self) -> None:
        gauge = self._instruments.gauge
        nodes = [node for partition in self._partitions.values() for node in partition.nodes.values()]
        states = [node.current for node in nodes if node.current]
        tracked = [condition for state in states for condition in state.tracked]
        firing = Counter(condition.alert.severity for condition in tracked if condition.alert is not None)
        for severity in get_args(Severity):
            gauge("gpustream_alerts_firing", severity).set(firing[severity])
        gauge("gpustream_alerts_pending").set(len(tracked) - firing.total())
        policies = Counter((namespace, name) for node in nodes for namespace, _, name in node.policies)
        for namespace, name in self._policies - policies.keys():
            self._instruments.remove_gauge("gpustream_alerts_policies", namespace, name)
        for (namespace, name), count in policies.items():
            gauge("gpustream_alerts_policies", namespace, name).set(count)
        self._policies = set(policies)
        gauge("gpustream_alerts_maintained_nodes").set(sum(1 for state in states if state.maintenance is not None))
        gauge("gpustream_alerts_silent_nodes").set(sum(1 for state in states if state.silent))
        gauge("gpustream_alerts_nodes").set(len(states))
        super().observe()


def _decode_grouped(decode: Callable[[bytes], G], record: Any) -> G:
    """A report or a group, whose record's key is the group's fingerprint. Raises Malformed."""
    decoded = decode_value(decode, record.value)
    if record.key != decoded.group.encode():
        raise Malformed("key", f"the key {record.key!r:.300} is not {decoded.group}")
    return decoded
