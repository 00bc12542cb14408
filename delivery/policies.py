"""What pods and namespaces say themselves, by annotations under ``gpustream.dev/``. Pure.

A pod, or its namespace, has a policy about alerts of its own: ``gpustream.dev/idle-after: 2h`` sets for how long its
GPUs may be idle, ``gpustream.dev/alerts: off`` silences what is about the pod's own doing: idle GPUs and errors of its
programs, never the state of a GPU. A namespace says the same by an annotation, which its pods inherit in gpu.workloads,
or a label; a pod's goes before its namespace's. What is malformed is as if it were not there, and named as a mistake.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from delivery.values import duration_words, milliseconds

ALERTS = "gpustream.dev/alerts"
IDLE_AFTER = "gpustream.dev/idle-after"

_SHORTEST_MS = 1_000


class PolicyMistake(NamedTuple):
    name: str
    text: str


class Policy(NamedTuple):
    """What a pod wants: no alerts about its own doing, and its own duration for idle GPUs; None: the rule's."""

    off: bool = False
    idle_after_ms: int | None = None
    mistakes: tuple[PolicyMistake, ...] = ()


NO_POLICY = Policy()


class Bounds(NamedTuple):
    """For how long a policy may silence alerts, by globs of namespaces: the last that matches counts."""

    longest_ms: int = 24 * 3_600_000
    overrides: tuple[tuple[tuple[str, ...], int], ...] = ()

    def longest(self, namespace: str) -> int:
        found = self.longest_ms
        for globs, ms in self.overrides:
            found = ms if any(fnmatchcase(namespace, glob) for glob in globs) else found
        return found


DAY = Bounds()


def policy_in(pod: Mapping[str, str], spaces: Mapping[str, str], namespace: str, bounds: Bounds) -> Policy:
    """The policy in the annotations of a pod and the labels of its namespace."""
    if not pod and not spaces:
        return NO_POLICY
    values = (pod.get(ALERTS), spaces.get(ALERTS), pod.get(IDLE_AFTER), spaces.get(IDLE_AFTER))
    return NO_POLICY if values == (None, None, None, None) else _policy(*values, bounds.longest(namespace))


@lru_cache(maxsize=4096)
def _policy(
    pod_alerts: str | None, alerts: str | None, pod_idle: str | None, idle: str | None, longest_ms: int
) -> Policy:
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
                idle_after_ms = min(ms, longest_ms)
                if ms > longest_ms:
                    most = duration_words(longest_ms)
                    text = f"the {whose} {IDLE_AFTER} is {duration[:80]!r}, and {most} is the most that counts here"
                    mistakes.append(PolicyMistake(IDLE_AFTER, text))
            except ValueError as error:
                text = f"the {whose} {IDLE_AFTER} is malformed: {error}"
                mistakes.append(PolicyMistake(IDLE_AFTER, text))
    return Policy(bool(off), idle_after_ms, tuple(mistakes))


# -- what may be done about a workload that wastes GPUs

RECLAIM = "gpustream.dev/reclaim"
"""Of a namespace: what may be done. Of a pod, or of an object above it: ``off``, nothing may."""

RECLAIM_WORDS = ("event", "scale", "suspend", "deactivate", "partly")
"""What may be done, each perhaps with ``=DURATION``; ``partly``: also if some of the workload's GPUs work."""


class OptIn(NamedTuple):
    """What a namespace lets be done, and after how long an alert has fired (None: it does not say)."""

    actions: Mapping[str, int | None] = {}
    partly: bool = False


def opt_in(text: str) -> OptIn:
    """What ``event=30m, scale=4h, partly`` says; ``off`` is nothing. Raises ValueError with a sentence."""
    actions: dict[str, int | None] = {}
    partly, words = False, [word.strip() for word in text.split(",")]
    if [word.lower() for word in words] == ["off"]:
        return OptIn()
    for word in words:
        name, equals, after = (part.strip() for part in word.partition("="))
        name = name.lower()
        if name not in RECLAIM_WORDS or (name == "partly" and equals):
            raise ValueError(
                f"{word[:80]!r} is not known: write off, or some of event, scale, suspend and deactivate, each with"
                " =DURATION if you like, and partly, with commas between them"
            )
        if name in actions or (name == "partly" and partly):
            raise ValueError(f"{name} is there twice")
        if name == "partly":
            partly = True
        else:
            actions[name] = milliseconds(after) if equals else None
    if not actions:
        raise ValueError("partly alone says nothing: write what may be done, too")
    return OptIn(actions, partly)


def opted_out(annotations: Mapping[str, str], inherited: Mapping[str, str], idle_ms: int) -> str | None:
    """Why a pod, or an object above it, is left alone by its own annotations or its namespace's; None if it is not.

    A pod's annotation goes before its namespace's. Nobody's ``longest`` counts here: who wants to keep idle GPUs is not
    stopped, however long that is. What can't be read leaves it alone, too.
    """
    for name in (ALERTS, IDLE_AFTER):
        text = annotations.get(name, inherited.get(name, ""))
        word = text.strip().lower()
        if name == ALERTS and word not in ("", "on"):
            return f"{name} is {text[:80]!r}"
        if name == IDLE_AFTER and word:
            try:
                if milliseconds(text) > idle_ms:
                    return f"{name} is {text[:80]!r}, and it is idle for {duration_words(idle_ms)}"
            except ValueError:
                return f"{name} is {text[:80]!r}, which is no duration"
    if RECLAIM in annotations:
        return f"{RECLAIM} is {annotations[RECLAIM][:80]!r}; only a namespace's says what may be done"
    return None
