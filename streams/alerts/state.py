"""What the alert stream remembers of a node, and how that is told apart from an older state of it."""

import msgspec

from streams.alerts.memory import Memory
from topics.alerts import AlertState, Tracked
from topics.decoding import decoder
from topics.replays import Last

Order = tuple[int, int, bool]
"""By which of two states of a node the later one is known."""

Identity = tuple[str, str, str, str]
"""What a condition is told apart by, within a node: the rule's name, the device, the pod's uid, the rule's own key."""


class NodeState(AlertState, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a node, its memory decoded."""

    memory: Memory = Memory()


decode = decoder(NodeState)
encode = msgspec.json.Encoder().encode


def order(state: NodeState) -> Order:
    """Which of two states of a node is the later one."""
    return state.generation, state.offset, state.silent


def last_tick(state: NodeState) -> Last:
    """The last tick of a node, by which replays are known."""
    return Last(state.run_id, state.seq, state.offset, max(state.newest_ts_ms, state.last_ts_ms))


def identity(tracked: Tracked) -> Identity:
    """What a tracked condition is about."""
    return tracked.name, tracked.device, tracked.pod_uid, tracked.key
