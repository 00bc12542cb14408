"""The rules in force, as the state machine asks them."""

from collections.abc import Sequence

from streams.alerts import conditions, describe
from streams.alerts.describe import Described
from streams.alerts.finding import Finding
from streams.alerts.memory import Memory
from streams.alerts.rule import Rule, Rules
from streams.alerts.state import NodeState
from streams.alerts.tick import Tick
from topics.alerts import Tracked


class Judge:
    """What of a tick is as the rules say, and in what words."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.names = frozenset(rule.name for rule in rules.rules)
        self.silent: Sequence[Rule] = rules.of("node_silent")

    def evaluate(self, tick: Tick, memory: Memory) -> tuple[list[Finding], Memory]:
        """What holds in a tick, and what is remembered after it."""
        return conditions.evaluate(self.rules, tick, memory)

    def is_known(self, one: Tracked, tick: Tick) -> bool:
        """Whether a tick in which it was not found says that it does not hold."""
        return conditions.is_known(self.rules, tick, name=one.name, device=one.device, pod_uid=one.pod_uid)

    def because(self, one: Tracked, tick: Tick) -> str:
        """Why what held is not found any more."""
        return conditions.because(self.rules, tick, name=one.name, device=one.device, pod_uid=one.pod_uid, key=one.key)

    def describe(self, finding: Finding, tick: Tick, since_ms: int) -> Described:
        """The labels and annotations of what a tick shows to have held since a time."""
        return describe.describe(finding, tick, since_ms)

    def describe_silent(self, rule: Rule, state: NodeState) -> Described:
        """Those of a node without ticks."""
        return describe.silent(rule, state, state.memory)
