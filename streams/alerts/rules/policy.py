"""What a pod, or its namespace, says about alerts of its own. Pure.

In: a holder's annotations and the labels of its namespace. Out: a :class:`Policy`.
On failure: what is malformed is as if it were not there, and named in ``mistakes``.

``gpustream.dev/idle-after: 2h`` sets for how long its GPUs may be idle, ``gpustream.dev/alerts: off`` silences what is
about the pod's own doing: idle GPUs and errors of its programs, never the state of a GPU. A namespace says the same by
an annotation, which its pods inherit in gpu.workloads, or a label; a pod's goes before its namespace's.
"""

from functools import lru_cache
from typing import NamedTuple

from delivery.values import milliseconds
from topics.attributed import Holder

ALERTS = "gpustream.dev/alerts"
IDLE_AFTER = "gpustream.dev/idle-after"

_SHORTEST_MS = 1_000


class PolicyMistake(NamedTuple):
    """What is wrong with which annotation or label."""

    name: str
    text: str


class Policy(NamedTuple):
    """What a pod wants: no alerts about its own doing, and its own duration for idle GPUs; None: the rule's."""

    off: bool = False
    idle_after_ms: int | None = None
    mistakes: tuple[PolicyMistake, ...] = ()


DEFAULT = Policy()


def policy_of(holder: Holder) -> Policy:
    """The policy of a pod."""
    pod, namespace = holder.annotations, holder.namespace_labels
    if not pod and not namespace:
        return DEFAULT
    values = (pod.get(ALERTS), namespace.get(ALERTS), pod.get(IDLE_AFTER), namespace.get(IDLE_AFTER))
    return DEFAULT if values == (None, None, None, None) else _policy(*values)


@lru_cache(maxsize=4096)
def _policy(pod_alerts: str | None, alerts: str | None, pod_idle: str | None, idle: str | None) -> Policy:
    """The policy of these annotations of a pod and labels of its namespace, each text read once."""
    off: bool | None = None
    idle_after_ms: int | None = None
    mistakes: list[PolicyMistake] = []
    for whose, switch, duration in (("annotation", pod_alerts, pod_idle), ("namespace label", alerts, idle)):
        if off is None and switch is not None:
            if (word := switch.strip().lower()) in ("on", "off"):
                off = word == "off"
            else:
                text = f"the {whose} {ALERTS} is {switch[:80]!r}: write on or off"
                mistakes.append(PolicyMistake(ALERTS, text))
        if idle_after_ms is None and duration is not None:
            try:
                ms = milliseconds(duration)
                if ms < _SHORTEST_MS:
                    raise ValueError(f"{duration[:80]!r} is less than a second")
                idle_after_ms = ms
            except ValueError as error:
                text = f"the {whose} {IDLE_AFTER} is malformed: {error}"
                mistakes.append(PolicyMistake(IDLE_AFTER, text))
    return Policy(bool(off), idle_after_ms, tuple(mistakes))
