"""The policies of pods and namespaces, which they state in annotations under ``gpustream.dev/``. Pure.

A pod or a namespace may have a policy about its alerts. ``gpustream.dev/idle-after: 2h`` sets how long its GPUs may be
idle. ``gpustream.dev/alerts: off`` silences alerts about what the pod does, which are idle GPUs and errors of its
programs, but never about the state of a GPU. A namespace states its policy in a label, or in an annotation, which its
pods inherit in gpu.workloads. A pod's own policy wins. A malformed one does not count, and is reported as a mistake.
"""

from collections.abc import Mapping
from difflib import SequenceMatcher, get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from delivery.values import duration_text, duration_words, milliseconds

ALERTS = "gpustream.dev/alerts"
IDLE_AFTER = "gpustream.dev/idle-after"

_SHORTEST_MS = 1_000


class PolicyError(NamedTuple):
    name: str
    text: str


class Policy(NamedTuple):
    """What a pod wants: no alerts about its own doing, and its own duration for idle GPUs; None: the rule's."""

    off: bool = False
    idle_after_ms: int | None = None
    errors: tuple[PolicyError, ...] = ()


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


DEFAULT_BOUNDS = Bounds()


def parse_policy(pod: Mapping[str, str], spaces: Mapping[str, str], namespace: str, bounds: Bounds) -> Policy:
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
    errors: list[PolicyError] = []
    for whose, switch, duration in (("annotation", pod_alerts, pod_idle), ("namespace label", alerts, idle)):
        if off is None and switch is not None:
            if (word := switch.strip().lower()) in ("on", "off"):
                off = word == "off"
            else:
                text = f"the {whose} {ALERTS} is {switch[:80]!r}: write on or off"
                errors.append(PolicyError(ALERTS, text))
        if idle_after_ms is None and duration is not None:
            try:
                ms = milliseconds(duration)
                if ms < _SHORTEST_MS:
                    raise ValueError(f"{duration[:80]!r} is less than a second")
                idle_after_ms = min(ms, longest_ms)
                if ms > longest_ms:
                    most = duration_words(longest_ms)
                    text = f"the {whose} {IDLE_AFTER} is {duration[:80]!r}, and {most} is the most that counts here"
                    errors.append(PolicyError(IDLE_AFTER, text))
            except ValueError as error:
                text = f"the {whose} {IDLE_AFTER} is malformed: {error}"
                errors.append(PolicyError(IDLE_AFTER, text))
    return Policy(bool(off), idle_after_ms, tuple(errors))


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
    """Why nothing may be done to a pod, or an object above it, by its own annotations or its namespace's; None: it may.

    A pod's own annotation wins. ``longest`` does not count here: who asks to keep idle GPUs keeps them, however long
    that is. If an annotation can't be read, nothing is done either.
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


# -- mistakes in annotations, for their authors

PREFIX = "gpustream.dev/"
POLICY_ANNOTATIONS = (ALERTS, IDLE_AFTER, RECLAIM)
"""The annotations of pods, of the templates that they are made from, and of namespaces."""
OWN_ANNOTATIONS = frozenset({"gpustream.dev/reclaimed-by", "gpustream.dev/reclaimed", "gpustream.dev/reclaim-undone"})
"""The annotations that gpustream itself writes."""

_NEAR = 0.75
_LONGEST_NAME = 100


def bounds(text: str) -> Bounds:
    """``24h``, or ``24h,notebooks-*=72h`` with others for some namespaces, a later one over an earlier one."""
    first, *rest = text.split(",")
    pairs = [one.partition("=") for one in rest]
    if any(not glob.strip() or not equals for glob, equals, _ in pairs):
        raise ValueError(f"{text[:80]!r} is not known: write a duration, then NAMESPACE=DURATION after commas")
    overrides = tuple(((glob.strip(),), milliseconds(duration)) for glob, _, duration in pairs)
    return Bounds(milliseconds(first), overrides)


def bounds_text(of: Bounds) -> str:
    """As :func:`bounds` reads them."""
    some = [f"{','.join(globs)}={duration_text(ms / 1000)}" for globs, ms in of.overrides]
    return ",".join([duration_text(of.longest_ms / 1000), *some])


def annotation_errors(
    annotations: Mapping[str, str], namespace: str, longest: Bounds, *, of_pod: bool
) -> list[PolicyError]:
    """What is wrong with the annotations of a pod, or of its namespace: names that nobody reads, and values."""
    found = [mistake for name in sorted(annotations) if (mistake := _misspelt(name)) is not None]
    found += parse_policy(annotations, {}, namespace, longest).errors
    if (text := annotations.get(RECLAIM)) is not None and not of_pod:
        try:
            opt_in(text)
        except ValueError as error:
            found.append(PolicyError(RECLAIM, f"the annotation {RECLAIM} is malformed: {error}"))
    elif text is not None and text.strip().lower() != "off":
        why = f"the annotation {RECLAIM} is {text[:80]!r}: on a pod write off; what may be done says its namespace"
        found.append(PolicyError(RECLAIM, why))
    return found


@lru_cache(maxsize=4096)
def _misspelt(name: str) -> PolicyError | None:
    """The mistake in the name of an annotation that is not known, and looks as if it was meant for gpustream."""
    prefix, slash, last = name.lower().partition("/")
    if name in POLICY_ANNOTATIONS or name in OWN_ANNOTATIONS or not slash:
        return None
    meant = get_close_matches(last, [known.removeprefix(PREFIX) for known in POLICY_ANNOTATIONS], n=1, cutoff=_NEAR)
    if f"{prefix}/" != PREFIX:
        near = SequenceMatcher(None, prefix, PREFIX.rstrip("/")).ratio() >= _NEAR
        if not near or not meant:
            return None
    shown = name[:_LONGEST_NAME]
    text = f"did you mean {PREFIX}{meant[0]}?" if meant else f"pods and namespaces have {', '.join(POLICY_ANNOTATIONS)}"
    return PolicyError(shown, f"the annotation {shown} is not known, and nobody reads it: {text}")
