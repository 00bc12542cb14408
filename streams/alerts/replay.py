"""What rules would have made of ticks that were recorded.

In: ticks, those of a node in their order. Out: the transitions of their alerts, as the stream would have written them.
State: each node's.

A node that sent nothing for as long as a rule says is found by the gap to its next tick, or by how far the others have
come: a live worker finds it by its clock.
"""

from streams.alerts import machine
from streams.alerts.judge import Judge
from streams.alerts.machine import Place, Step, Write
from streams.alerts.rule import Rules
from streams.alerts.state import NodeState
from streams.alerts.tick import Tick
from topics.alerts import Alert


class Replay:
    """Ticks of any number of nodes. ``ticks`` and ``repeats`` count what was judged, and what had been before."""

    def __init__(self, rules: Rules) -> None:
        self._judge = Judge(rules)
        self._states: dict[tuple[str, str], NodeState] = {}
        self._newest_ms = 0
        self.ticks = self.repeats = 0

    @property
    def nodes(self) -> int:
        """How many nodes there were."""
        return len(self._states)

    def take(self, tick: Tick) -> list[Alert]:
        """The transitions that a tick brings."""
        node, place = (tick.cluster, tick.node), Place(self.ticks, tick.ts_ms)
        state = self._states.get(node)
        if state is not None and tick.offset <= state.offset:
            self.repeats += 1
            return []
        self.ticks += 1
        self._newest_ms = max(self._newest_ms, tick.ts_ms)
        silent = Step(machine.begin(tick, place)) if state is None else self._silence(state, tick.ts_ms)
        step = machine.step(silent.state, tick, place, self._judge)
        self._states[node] = step.state
        return [*silent.alerts, *step.alerts]

    def end(self) -> list[Alert]:
        """The transitions of nodes that sent nothing any more while others did."""
        steps = [self._silence(state, self._newest_ms) for state in self._states.values()]
        return [alert for step in steps for alert in step.alerts]

    def _silence(self, state: NodeState, now_ms: int) -> Step:
        """A node that had sent nothing for a while at a time."""
        writes: list[Write] = []
        for rule in self._judge.silent:
            if now_ms - state.last_ts_ms >= rule.for_ms:
                step = machine.silence(state, rule, self._judge)
                state = step.state
                writes += step.writes
        return Step(state, tuple(writes))
