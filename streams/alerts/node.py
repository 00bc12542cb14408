"""What a worker holds of its nodes: their states, what of them the broker has, and which of them are silent.

In: ticks, states that were read, acknowledgements, where the broker says that partitions end. Out: what is to be
written, and which slots may be finished.
State: all of it; no clock, no Kafka.

A state is written only when it changes. So a replay must find out the rest: the slot of a node's last tick stays open
until its next tick is judged and, if that changed anything, written. A replay therefore begins at or before the last
tick that was judged. The first tick of a node after its state is one that was judged before: only its time is taken
over. If no tick comes for a while, a state that says so is written, and nothing stays open.
"""

import contextlib
from collections import deque
from typing import Literal, NamedTuple

import msgspec

from delivery import replays
from delivery.ledger import Slot
from streams.alerts import groups, machine
from streams.alerts.machine import LogPosition
from streams.alerts.memory import NodeAlerts, Order, last_tick, order
from streams.alerts.reports import Step, Write
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Tick
from streams.caught_up import CaughtUp, PartitionState
from topics.alerts import Alert, AlertGroup

Outcome = Literal["judged", "new_log", "replayed", "resumed"]
"""What a tick was: ``judged``, a new one; ``new_log``, a new one with which the offsets of gpu.samples begin again;
``replayed``, judged before; ``resumed``, the first after a state that was read, judged before by another worker."""

QUIET_S = 30.0  # after so long without a tick a node's state is written, and its last tick holds back no commit

_replace = msgspec.structs.replace


class Log(NamedTuple):
    """The partition that ticks are read from: its end at the assignment, and whether unread ticks were lost."""

    ended: int
    torn: bool


class Due(NamedTuple):
    """What is to be written: first the alerts in their order and, when they are acknowledged, the state."""

    writes: tuple[Write, ...]
    state: NodeAlerts


class Node:
    """A node of a partition, by its key.

    ``durable`` is the state that the broker has, ``current`` the one after the last tick. ``fresh``: no tick was read
    since the state was. ``stale``: the topic's last state is not ours. ``writing``: something is on its way.
    ``kept``: the slots of the ticks that a replay must begin with. ``read_s``: when a tick was last read, of the
    monotonic clock. ``policies``: which pods have one about alerts, as namespace, pod and annotation.
    """

    __slots__ = (
        "_echoes", "_over", "_writes", "current", "durable", "fresh", "kept", "key", "policies", "read_s", "stale",
        "writing",
    )  # fmt: skip

    def __init__(self, key: bytes, durable: NodeAlerts | None = None) -> None:
        self.key = key
        self.durable = self.current = durable
        self.fresh, self.stale, self.writing = True, False, False
        self._echoes: deque[Order] = deque()
        self.read_s = float("-inf")
        self.policies: frozenset[tuple[str, str, str]] = frozenset()
        self.kept: deque[Slot] = deque()
        self._over: list[Slot] = []
        self._writes: list[Write] = []

    # -- what was read

    def learn(self, state: NodeAlerts) -> None:
        """A state of this node was read. It is taken on, unless ticks were read since.

        If ticks were, a state that is not ours was written late, by a worker that had lost the partition. Ours is
        written again, so that the last state in the topic is always the one that the partition's owner goes by.
        """
        ours = order(state) in self._echoes
        while ours and self._echoes.popleft() != order(state):
            pass
        if self.fresh and not self.writing:
            self.durable = self.current = state
        elif not ours:
            self.stale = not self._echoes

    def take(self, tick: Tick, slot: Slot, logged_ms: int, rules: Rules, log: Log) -> Outcome:
        """A tick was read."""
        place = LogPosition(slot.offset, logged_ms)
        fresh, self.fresh = self.fresh, False
        outcome: Outcome = "judged"
        state = machine.begin(tick, place) if self.current is None else self.current
        if fresh and self.current is not None and state.position >= log.ended:  # the log is another one now
            state = _replace(state, generation=state.generation + 1, silent=True)
        elif self.current is not None:
            verdict = replays.verdict(last_tick(state), tick)
            if verdict == "replay":
                again = tick.offset == state.offset and not self.kept
                (self.kept if again else self._over).append(slot)
                return "replayed"
            if verdict == "new_log":  # of the samples
                outcome, state = "new_log", _replace(state, generation=state.generation + 1)
            elif fresh and not state.silent and not log.torn:
                self.current = machine.arrived(state, tick, place, state.memory)
                self.kept.append(slot)
                return "resumed"
        self.close(machine.step(state, tick, place, rules))
        self.kept.append(slot)
        return outcome

    def close(self, step: Step) -> None:
        self.current = step.state
        self._writes += step.writes

    # -- what is to be done

    def settled(self) -> bool:
        """Whether the broker has all that is worth having."""
        if self.durable is None or self.current is None:
            return self.current is None and not self.writing
        return not self.writing and not self._writes and machine.same(self.durable, self.current)

    def due(self, *, settled: bool) -> Due | None:
        """What is to be written; from now on it is on its way."""
        if self.current is None or self.writing or (settled and not self.stale):
            return None
        due = Due(tuple(self._writes), self.current)
        self._writes = []
        self.writing, self.stale = True, False
        self._echoes.append(order(due.state))
        return due

    def written(self, state: NodeAlerts) -> None:
        """All that was due is acknowledged. Alerts that the state had before they were written are due now."""
        self.durable, self.writing = state, False
        if self.current is not None and self.settled():
            self.close(machine.announce(self.current))

    def finished(self, *, settled: bool) -> list[Slot]:
        """The slots of ticks that no replay needs any more, each once."""
        over, self._over = self._over, []
        if self.durable is None or self.current is None:
            return over
        durable, current = self.durable, self.current
        if settled and len(durable.tracked) == len(current.tracked) and durable.memory is current.memory:
            keep = 0 if self.durable.silent else 1
            while len(self.kept) > keep:
                over.append(self.kept.popleft())
        while self.kept and self.kept[0].offset < self.durable.position:
            over.append(self.kept.popleft())
        return over


# -- the nodes of a partition


class _Removal(msgspec.Struct, frozen=True):
    """What of gpu.workloads is looked at."""

    removed: bool | None = False


class PartitionNodes(PartitionState):
    """The nodes of one partition, by key. ``active`` are those that are not known to be quiet, in the order in which
    their last ticks were read. ``logged_ms`` is when the last tick of any was logged."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.nodes: dict[bytes, Node] = {}
        self.active: dict[bytes, Node] = {}
        self._removed_ms: dict[bytes, int] = {}

    def rank(self, node: Node, *, active: bool) -> None:
        """A node is active now, the last one, or it is not."""
        self.active.pop(node.key, None)
        if active:
            self.active[node.key] = node

    def learn(self, node: Node, state: NodeAlerts) -> None:
        """A state was read. A node that no tick was read of is active unless its state says that it is silent."""
        node.learn(state)
        if node.fresh:
            self.rank(node, active=node.current is not None and not node.current.silent)

    def remove(self, key: bytes) -> None:
        """The state of a node was deleted. One that a tick was read of stays."""
        node = self.nodes.get(key)
        if node is not None and node.fresh and not node.writing:
            del self.nodes[key]
            self.active.pop(key, None)

    def note_removal(self, key: bytes, value: bytes | None, logged_ms: int) -> None:
        """Whether the cluster still has a node, by gpu.workloads. Attribution dead-letters what can't be decoded."""
        self._removed_ms.pop(key, None)
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if value and msgspec.json.decode(value, type=_Removal).removed:
                self._removed_ms[key] = logged_ms

    def close_quiet(self) -> list[Node]:
        """Take the nodes that had no tick for a while as quiet, and no longer as active.

        The log has gone on for that long without the node, or the partition has been read to its end for as long. Only
        the latter counts for a node of which no tick was read: its last ticks may still have to be read again.
        """
        quiet: list[Node] = []
        for node in self.active.values():
            current = node.current
            passed = current is not None and not node.fresh and self.logged_ms - current.logged_ms >= QUIET_S * 1000
            if passed or self.caught_up.lasted_s(node.read_s) >= QUIET_S:
                quiet.append(node)
            elif not node.fresh:
                break
        for node in quiet:
            del self.active[node.key]
            if node.current is not None:
                node.close(Step(machine.quiet(node.current)))
        return quiet

    def close_silent(self, rules: Rules, now_ms: int) -> list[Node]:
        """Judge the nodes that are not active: whether they are silent, or have left. Gives those that were judged."""
        found = [
            node
            for key, node in self.nodes.items()
            if key not in self.active and node.settled() and self.caught_up.lasted_s(node.read_s) >= QUIET_S
        ]
        for node in found:
            if node.current is not None:
                removed_ms = self._removed_ms.get(node.key)
                node.close(machine.without_ticks(node.current, rules, now_ms=now_ms, removed_ms=removed_ms))
        return found

    def forget(self) -> None:
        """Only what the broker has is known from now on: the rest is read again."""
        self.nodes = {key: Node(key, node.durable) for key, node in self.nodes.items() if node.durable}
        self.active = {key: node for key, node in self.nodes.items() if node.durable and not node.durable.silent}
        self.caught_up, self.logged_ms = CaughtUp(), 0


# -- recorded ticks


class Replay:
    """Recorded ticks of any number of nodes, in the order in which they were read: which alerts the rules would have
    given, and which updates. ``ticks`` and ``repeats`` count what was judged, and what had been before.

    A live worker finds a silent node by the time of the log. Here a node was silent if its own clock says so and, if
    the ticks' log times are known, they do as well: a clock that is set is no silence, nor is a log that stood still
    for everybody. A clock that was set back is not behind the others: its node was heard when its clock showed the
    most. Not ``grouped``: the alerts of single GPUs, which are parts of those.
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

    def take(self, tick: Tick, logged_ms: int | None = None) -> list[Alert]:
        """The transitions that a tick brings."""
        node = (tick.cluster, tick.node)
        state = self._states.get(node)
        if state is not None and replays.verdict(last_tick(state), tick) == "replay":
            self.repeats += 1
            return []
        self.ticks += 1
        place = LogPosition(self.ticks, tick.ts_ms if logged_ms is None else logged_ms)
        before = machine.begin(tick, place) if state is None else state
        lasted_ms = min(tick.ts_ms - before.last_ts_ms, place.logged_ms - before.logged_ms)
        step = machine.step(machine.silence(before, self._rules, lasted_ms), tick, place, self._rules)
        self._states[node] = step.state
        self._newest_ms[node] = max(tick.ts_ms, self._newest_ms.get(node, 0))
        self._logged_ms = max(self._logged_ms, logged_ms or 0)
        return self._written(step)

    def _written(self, step: Step) -> list[Alert]:
        """What comes of a step, the alerts of several GPUs after the others."""
        if not self._grouped:
            return step.alerts
        found = [one for kind, _, one in step.writes if kind == "alert" and isinstance(one, Alert)]
        for report in step.reports:
            self._reports += 1
            after = groups.step(self._groups.get(report.group), report, self._reports, self._rules)
            self._groups[report.group] = after.group
            found += after.alerts if after.news else ()
        return found

    def end(self) -> list[Alert]:
        """The transitions of nodes that sent nothing any more while others did."""
        now_ms = max((state.last_ts_ms for state in self._states.values()), default=0)
        found: list[Alert] = []
        for node, state in self._states.items():
            lasted_ms = now_ms - self._newest_ms[node]
            if self._logged_ms:
                lasted_ms = min(lasted_ms, self._logged_ms - state.logged_ms)
            found += self._written(machine.announce(machine.silence(state, self._rules, lasted_ms)))
        return found
