"""The nodes of a worker: their states, which states the broker has, and which nodes are silent.

In: ticks, states read from Kafka, acknowledgements, and the ends of partitions. Out: records to write, and slots that
may be finished.
State: all of the above; no clock, no Kafka.

A state is written only if it changes, so the broker may not have a node's last tick. The slot of that tick therefore
stays open until the node's next tick is judged and, if that changed the state, written. A replay begins at or before
the last tick that was judged. If a tick is the first one of a node after its state, it was judged before: only its time
is used. If no tick comes for a while, a state with ``silent`` is written, and no slot stays open.
"""

import contextlib
from collections import deque
from typing import Literal

import msgspec

from delivery import replays
from delivery.ledger import Slot
from streams.alerts import groups, machine
from streams.alerts.machine import FORGET_MS, LogPosition
from streams.alerts.memory import NodeAlerts, is_saved, last_tick, order
from streams.alerts.reports import Step, Write
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Tick
from streams.caught_up import PartitionState
from streams.kept_state import KeptState, Order
from topics.alerts import Alert, AlertGroup
from topics.samples import silent_after_s
from topics.topic import UNDECODABLE

Outcome = Literal["judged", "new_log", "replayed", "resumed"]
"""How a tick was handled. ``judged``: it was new. ``new_log``: it was new, and the offsets of gpu.samples begin again
with it. ``replayed``: it was judged before. ``resumed``: it is the first after a state that was read, and another
worker has judged it."""

QUIET_S, LONGEST_QUIET_S = 30.0, 300.0
"""After three of its intervals without a tick, but not less and not more than this, a node is quiet: its state is
written, and its last tick does not hold back commits."""

NO_SAMPLES_S = 600.0
"""After so long without a sample in a partition its nodes are silent, even if the last sample was never attributed.
Attribution holds a sample for a few seconds; what it does not attribute for longer it has not read, or can't."""

_replace = msgspec.structs.replace


class Node(KeptState[NodeAlerts | None]):
    """A node of a partition, by its key.

    ``saved`` is the state that the broker has of this worker, or that it began with; ``current`` is the state after the
    last tick. ``open_slots``: the slots of the ticks at which a replay must begin. ``read_s``: when a tick was last
    read, by the monotonic clock. ``policies``: the alert policies of its pods, as namespace, pod and annotation.
    """

    __slots__ = ("_finished_slots", "_unwritten", "current", "key", "open_slots", "policies", "read_s", "saved")

    def __init__(self, key: bytes, saved: NodeAlerts | None = None) -> None:
        super().__init__(saved, () if saved is None else order(saved))
        self.key, self.saved, self.current = key, saved, saved
        self.read_s = float("-inf")
        self.policies: frozenset[tuple[str, str, str]] = frozenset()
        self.open_slots: deque[Slot] = deque()
        self._finished_slots: list[Slot] = []
        self._unwritten: list[Write] = []

    def quiet_s(self) -> float:
        """After how long without a tick the node is quiet."""
        interval_ms = None if self.current is None else self.current.interval_ms
        return min(silent_after_s(interval_ms, QUIET_S), LONGEST_QUIET_S)

    def current_order(self) -> Order:
        return () if self.current is None else order(self.current)

    def has_left(self) -> bool:
        """Whether the node was removed, and only has alerts that are resolved and not deleted yet."""
        state = self.current
        return state is not None and machine.is_retired(state) and not state.holdings and bool(state.resolved)

    # -- reading

    def judge(self, tick: Tick, slot: Slot, logged_ms: int, rules: Rules, *, has_gap: bool) -> Outcome:
        """Judge a tick that was read, and keep its slot open or let it finish. ``has_gap``: ticks were deleted unread.

        All ticks at or before the position of the state are replays, unless gpu.attributed was created again.
        """
        log_position = LogPosition(slot.offset, logged_ms)
        is_first_tick, self.is_fresh = self.is_fresh, False
        outcome: Outcome = "judged"
        state = machine.initial_state(tick, log_position) if self.current is None else self.current
        if self.current is not None:
            verdict = replays.verdict(last_tick(state), tick)
            if verdict == "replay":
                is_last_tick = tick.offset == state.offset and not self.open_slots
                (self.open_slots if is_last_tick else self._finished_slots).append(slot)
                return "replayed"
            if verdict == "new_log":  # gpu.samples was created again
                outcome, state = "new_log", _replace(state, generation=state.generation + 1)
            elif slot.offset <= state.position:  # gpu.attributed was created again
                state = _replace(state, generation=state.generation + 1)
            elif is_first_tick and not state.silent and not has_gap:
                self.current = machine.after_tick(state, tick, log_position, state.memory)
                self.open_slots.append(slot)
                return "resumed"
        self.apply(machine.step(state, tick, log_position, rules))
        self.open_slots.append(slot)
        return outcome

    def apply(self, step: Step) -> None:
        """Use the state of a step as the current one, and keep its records to be written."""
        self.current = step.state
        self._unwritten += step.writes

    # -- writing

    def settled(self) -> bool:
        """Whether nothing has to be written, and nothing is being written."""
        if self.saved is None or self.current is None:
            return self.current is None and not self.writing
        return not self.writing and not self._unwritten and is_saved(self.saved, self.current)

    def start_write(self, *, settled: bool) -> Step | None:
        """What to write now, if anything: the records, and the state after these are acknowledged. Until
        :meth:`finish_write` the node counts as writing."""
        if self.current is None or self.writing or (settled and not self.stale):
            return None
        pending = Step(self.current, tuple(self._unwritten))
        self._unwritten = []
        self.writing = True
        return pending

    def finish_write(self, state: NodeAlerts, offset: int | None) -> None:
        """The write is acknowledged or, without an offset, refused. Alerts that had to be in the state first may be
        written now."""
        self.wrote(offset, state, order(state))
        if self.saved is None or order(state) >= order(self.saved):
            self.saved = state
        if self.current is not None and self.settled():
            self.apply(machine.announce(self.current))

    def take_finished_slots(self, *, settled: bool) -> list[Slot]:
        """The slots of ticks that no replay needs any more. Each is returned once."""
        slots, self._finished_slots = self._finished_slots, []
        if self.saved is None or self.current is None:
            return slots
        saved, current = self.saved, self.current
        if settled and len(saved.tracked) == len(current.tracked) and saved.memory is current.memory:
            keep = 0 if self.saved.silent else 1
            while len(self.open_slots) > keep:
                slots.append(self.open_slots.popleft())
        while self.open_slots and self.open_slots[0].offset < self.saved.position:
            slots.append(self.open_slots.popleft())
        return slots


# -- the nodes of a partition


class _Removal(msgspec.Struct, frozen=True):
    """The field of a gpu.workloads record that is read here."""

    removed: bool | None = False


class PartitionNodes(PartitionState):
    """The nodes of one partition, by key. ``active`` has those that are not quiet, in the order in which their last
    ticks were read. ``logged_ms`` is the log time of the last tick of any node. ``groups`` has the alerts of several
    GPUs."""

    def __init__(self, number: int) -> None:
        super().__init__(number, NO_SAMPLES_S)
        self.nodes: dict[bytes, Node] = {}
        self.active: dict[bytes, Node] = {}
        self.groups: dict[bytes, KeptState[AlertGroup]] = {}
        self._removed_ms: dict[bytes, int] = {}
        self._judged_minute = -1

    def set_active(self, node: Node, *, active: bool) -> None:
        """Make a node the last of the active ones, or not active."""
        self.active.pop(node.key, None)
        if active:
            self.active[node.key] = node

    def read_state(self, node: Node, state: NodeAlerts, offset: int) -> None:
        """Use a state that was read, unless it is older, or ticks of the node were read already. A node without a tick
        since then is active unless its state is silent."""
        if node.read(offset, state, order(state)):
            node.saved = node.current = state
        if node.is_fresh:
            self.set_active(node, active=node.current is not None and not node.current.silent)

    def remove_state(self, key: bytes, offset: int) -> Node | None:
        """Forget a node whose state was deleted, unless a tick of it was read since. Returns it if it remains."""
        node = self.nodes.get(key)
        if node is None or not node.read(offset, None):
            return node
        del self.nodes[key]
        self.active.pop(key, None)
        return None

    def note_removal(self, key: bytes, value: bytes | None, logged_ms: int) -> None:
        """Note from a gpu.workloads record whether the cluster still has a node. A record that can't be decoded is
        ignored: attribution dead-letters it. A node without a tick for so long has left anyway."""
        self._removed_ms.pop(key, None)
        with contextlib.suppress(*UNDECODABLE):
            if value and msgspec.json.decode(value, type=_Removal).removed:
                self._removed_ms[key] = logged_ms
        while self._removed_ms and (oldest := next(iter(self._removed_ms.items())))[1] <= logged_ms - FORGET_MS:
            del self._removed_ms[oldest[0]]

    def judge_quiet(self) -> list[Node]:
        """Mark the active nodes without a tick for their ``quiet_s`` as quiet, and return them.

        For that long the log has continued without the node, or the partition has been read to its end. Only the latter
        counts for a node of which no tick was read yet: its last ticks may still have to be read again.
        """
        quiet: list[Node] = []
        for node in self.active.values():
            lasted_s = self.caught_up.lasted_s(node.read_s)
            if node.current is not None and not node.is_fresh:
                lasted_s = max(lasted_s, (self.logged_ms - node.current.logged_ms) / 1000)
            if lasted_s >= QUIET_S and lasted_s >= node.quiet_s():
                quiet.append(node)
            elif lasted_s < QUIET_S and not node.is_fresh:
                break  # those after it have sent ticks since
        for node in quiet:
            del self.active[node.key]
            if node.current is not None:
                node.apply(Step(_replace(node.current, silent=True)))
        return quiet

    def judge_silent(self, rules: Rules, now_ms: int, now_s: float) -> list[Node]:
        """Judge whether the nodes that are not active are silent or have left. Returns the nodes judged.

        They are judged as of the time up to which the partition was read to its end: what came later may have ticks.
        If the worker's clock is behind the brokers', the time for which the partition was read to its end counts.
        A node that has left is judged once a minute: for a week nothing is due but to delete its alerts in the end.
        """
        is_new_minute = now_ms // 60_000 != self._judged_minute
        self._judged_minute = now_ms // 60_000
        silent_nodes = [
            node
            for key, node in self.nodes.items()
            if key not in self.active
            and (is_new_minute or not node.has_left())
            and node.settled()
            and self.caught_up.lasted_s(node.read_s) >= node.quiet_s()
        ]
        for node in silent_nodes:
            if node.current is not None:
                read_ms = now_ms - round(self.caught_up.age_s(now_s) * 1000)
                watched_ms = node.current.logged_ms + round(self.caught_up.lasted_s(node.read_s) * 1000)
                at_ms, removed_ms = max(read_ms, watched_ms), self._removed_ms.get(node.key)
                node.apply(machine.step_without_tick(node.current, rules, now_ms=at_ms, removed_ms=removed_ms))
        return silent_nodes

    def forget(self) -> None:
        super().forget()
        self.groups = {key: KeptState(group.latest, group.order) for key, group in self.groups.items()}
        self.nodes = {key: Node(key, node.latest) for key, node in self.nodes.items() if node.latest}
        self.active = {key: node for key, node in self.nodes.items() if node.saved and not node.saved.silent}


# -- recorded ticks


class Replay:
    """Applies rules to recorded ticks of any number of nodes, in the order of their log, and returns the alerts.

    ``ticks`` and ``repeats`` count the ticks judged, and those that had been judged before. Without ``grouped`` it
    returns the alerts of single GPUs in place of alerts of several.

    A live worker finds a silent node by log time. Here a node was silent if the clocks of the ticks show it and, if
    log times are known, these show it, too: a clock that was set is no silence, and a log that stood still is none.
    If a node's clock was set back, its silence counts from the latest time that it has shown.
    """

    def __init__(self, rules: Rules, *, grouped: bool = True) -> None:
        self._rules, self._grouped = rules, grouped
        self._states: dict[tuple[str, str], NodeAlerts] = {}
        self._newest_ms: dict[tuple[str, str], int] = {}
        self._groups: dict[str, AlertGroup] = {}
        self._reports = self._logged_ms = 0
        self.ticks = self.repeats = 0

    @property
    def nodes(self) -> int:
        return len(self._states)

    def judge(self, tick: Tick, logged_ms: int | None = None) -> list[Alert]:
        """The transitions and updates that a tick causes."""
        node = (tick.cluster, tick.node)
        state = self._states.get(node)
        if state is not None and replays.verdict(last_tick(state), tick) == "replay":
            self.repeats += 1
            return []
        self.ticks += 1
        log_position = LogPosition(self.ticks, tick.ts_ms if logged_ms is None else logged_ms)
        before = machine.initial_state(tick, log_position) if state is None else state
        lasted_ms = min(tick.ts_ms - before.last_ts_ms, log_position.logged_ms - before.logged_ms)
        step = machine.step(machine.fire_node_silent(before, self._rules, lasted_ms), tick, log_position, self._rules)
        self._states[node] = step.state
        self._newest_ms[node] = max(tick.ts_ms, self._newest_ms.get(node, 0))
        self._logged_ms = max(self._logged_ms, logged_ms or 0)
        return self._alerts_of(step)

    def _alerts_of(self, step: Step) -> list[Alert]:
        """The alerts of a step: those of single devices or nodes first, then those of several GPUs."""
        if not self._grouped:
            return step.alerts
        alerts = [alert for kind, _, alert in step.writes if kind == "alert" and isinstance(alert, Alert)]
        for report in step.reports:
            self._reports += 1
            group_step = groups.step(self._groups.get(report.group), report, self._reports, self._rules)
            self._groups[report.group] = group_step.group
            alerts += group_step.alerts if group_step.is_news else ()
        return alerts

    def end(self) -> list[Alert]:
        """The alerts about nodes that stopped sending while others went on. Call it after the last tick."""
        now_ms = max((state.last_ts_ms for state in self._states.values()), default=0)
        alerts: list[Alert] = []
        for node, state in self._states.items():
            lasted_ms = now_ms - self._newest_ms[node]
            if self._logged_ms:
                lasted_ms = min(lasted_ms, self._logged_ms - state.logged_ms)
            alerts += self._alerts_of(machine.announce(machine.fire_node_silent(state, self._rules, lasted_ms)))
        return alerts
