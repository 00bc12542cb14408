"""Replays recorded ticks: which alerts the rules would have given.

In: ticks, those of a node in their order, and when they were logged, if that is known. Out: the transitions of their
alerts, as the stream would have written them.
State: each node's.

A live worker finds a silent node by the time of the log. Here a node was silent if its own clock says so and, if the
ticks' log times are known, they do as well: a clock that is set is no silence, nor is a log that stood still for
everybody. A clock that was set back is not behind the others: its node was heard when its clock showed the most.
"""

from delivery import replays
from streams.alerts import machine
from streams.alerts.machine import LogPosition
from streams.alerts.memory import NodeAlerts, last_tick
from streams.alerts.rules.rule import Rules
from streams.alerts.tick import Tick
from topics.alerts import Alert


class Replay:
    """Ticks of any number of nodes. ``ticks`` and ``repeats`` count what was judged, and what had been before."""

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
