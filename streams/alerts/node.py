"""What a worker holds of one node: its state, what of it the broker has, and the ticks that a replay must begin with.

In: ticks, states that were read, acknowledgements. Out: what is to be written, and which slots may be finished.
State: all of it; no clock, no Kafka.

A state is written only when it changes. So a replay must find out the rest: the slot of a node's last tick stays open
until its next tick is judged and, if that changed anything, written. A replay therefore begins at or before the last
tick that was judged. The first tick of a node after its state is one that was judged before: only its time is taken
over. If no tick comes for a while, a state that says so is written, and nothing stays open.
"""

from collections import deque
from typing import Literal, NamedTuple

import msgspec

from delivery import replays
from delivery.ledger import Slot
from streams.alerts import machine
from streams.alerts.machine import LogPosition, Step, Write
from streams.alerts.memory import NodeAlerts, Order, last_tick, order
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Tick
from topics.alerts import Alert

Outcome = Literal["judged", "new_log", "replayed", "resumed"]
"""What a tick was: a new one; a new one with which the offsets of gpu.samples begin again; one that had been judged
before its node's state was written; or the first after that."""

_replace = msgspec.structs.replace


class Log(NamedTuple):
    """What is known of the partition that ticks are read from: where it ended at the assignment, and whether ticks
    were lost before they were read."""

    ended: int
    torn: bool


class Due(NamedTuple):
    """What is to be written: first the alerts in their order and, when they are acknowledged, the state."""

    writes: tuple[Write, ...]
    state: NodeAlerts


class Node:
    """A node of a partition.

    ``durable`` is the state that the broker has, ``current`` the one after the last tick. ``fresh``: no tick was read
    since the state was. ``stale``: the topic's last state is not ours. ``writing``: something is on its way.
    ``kept``: the slots of the ticks that a replay must begin with. ``read_s``: when a tick was last read, of the
    monotonic clock.
    """

    __slots__ = ("_echoes", "_over", "_writes", "current", "durable", "fresh", "kept", "read_s", "stale", "writing")

    def __init__(self, durable: NodeAlerts | None = None) -> None:
        self.durable = self.current = durable
        self.fresh, self.stale, self.writing = True, False, False
        self._echoes: deque[Order] = deque()
        self.read_s = float("-inf")
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
        """A step was made."""
        self.current = step.state
        self._writes += step.writes

    # -- what is to be done

    def due(self) -> Due | None:
        """What is to be written; from now on it is on its way."""
        if self.current is None or self.writing or not (self.stale or self._changed()):
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

    def settled(self) -> bool:
        """Whether the broker has all that is worth having."""
        return not self.writing and not self._changed()

    def finished(self) -> list[Slot]:
        """The slots of ticks that no replay needs any more, each once."""
        over, self._over = self._over, []
        if self.durable is None or self.current is None:
            return over
        durable, current = self.durable, self.current
        if self.settled() and len(durable.tracked) == len(current.tracked) and durable.memory is current.memory:
            keep = 0 if self.durable.silent else 1
            while len(self.kept) > keep:
                over.append(self.kept.popleft())
        while self.kept and self.kept[0].offset < self.durable.position:
            over.append(self.kept.popleft())
        return over

    def _changed(self) -> bool:
        if self.durable is None or self.current is None:
            return self.current is not None
        return bool(self._writes) or not machine.same(self.durable, self.current)


class Replay:
    """Recorded ticks of any number of nodes, in the order in which they were read: which alerts the rules would have
    given. ``ticks`` and ``repeats`` count what was judged, and what had been before.

    A live worker finds a silent node by the time of the log. Here a node was silent if its own clock says so and, if
    the ticks' log times are known, they do as well: a clock that is set is no silence, nor is a log that stood still
    for everybody. A clock that was set back is not behind the others: its node was heard when its clock showed the
    most.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._states: dict[tuple[str, str], NodeAlerts] = {}
        self._newest_ms: dict[tuple[str, str], int] = {}
        self._logged_ms = 0
        self.ticks = self.repeats = 0

    @property
    def nodes(self) -> int:
        """How many nodes there were."""
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
        return step.alerts

    def end(self) -> list[Alert]:
        """The transitions of nodes that sent nothing any more while others did."""
        now_ms = max((state.last_ts_ms for state in self._states.values()), default=0)
        found: list[Alert] = []
        for node, state in self._states.items():
            lasted_ms = now_ms - self._newest_ms[node]
            if self._logged_ms:
                lasted_ms = min(lasted_ms, self._logged_ms - state.logged_ms)
            found += machine.announce(machine.silence(state, self._rules, lasted_ms)).alerts
        return found
