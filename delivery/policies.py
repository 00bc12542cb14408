"""The policies of pods and namespaces, which they state in annotations under ``gpustream.dev/``. Pure.

A pod or a namespace may have a policy about its alerts. ``gpustream.dev/idle-after: 2h`` sets how long its GPUs may be
idle. ``gpustream.dev/alerts: off`` silences alerts about what the pod does with its GPUs, and about errors of its
programs, but never about the state of a GPU. A namespace states its policy in a label, or in an annotation, which its
pods inherit in gpu.workloads. A pod's own policy wins. A malformed policy does not count, and is reported as an error.
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
_LONGEST_VALUE = 256  # characters; a longer one is wrong, whatever it says


class PolicyError(NamedTuple):
    """What is wrong with an annotation or label: its name, and a sentence for its author."""

    name: str
    text: str


class Policy(NamedTuple):
    """A pod's policy. ``off``: no alerts about what the pod does. ``idle_after_ms`` None: the rule's own counts."""

    off: bool = False
    idle_after_ms: int | None = None
    errors: tuple[PolicyError, ...] = ()


NO_POLICY = Policy()


class Bounds(NamedTuple):
    """The longest time for which a policy may silence alerts.

    ``overrides`` has other times for namespaces, by globs; the last one that matches counts.
    """

    longest_ms: int = 24 * 3_600_000
    overrides: tuple[tuple[tuple[str, ...], int], ...] = ()

    def longest(self, namespace: str) -> int:
        """The longest time for pods of a namespace, in ms."""
        longest_ms = self.longest_ms
        for globs, ms in self.overrides:
            longest_ms = ms if any(fnmatchcase(namespace, glob) for glob in globs) else longest_ms
        return longest_ms


DEFAULT_BOUNDS = Bounds()


def parse_policy(
    annotations: Mapping[str, str], namespace_labels: Mapping[str, str], namespace: str, bounds: Bounds
) -> Policy:
    """The policy in the annotations of a pod and the labels of its namespace."""
    if not annotations and not namespace_labels:
        return NO_POLICY
    texts = [source.get(name) for name in (ALERTS, IDLE_AFTER) for source in (annotations, namespace_labels)]
    if texts == [None] * 4:
        return NO_POLICY
    # an annotation may have 256 KiB, and the cache keeps it
    values = [text.strip()[:_LONGEST_VALUE] if text and len(text) > _LONGEST_VALUE else text for text in texts]
    return _policy(*values, bounds.longest(namespace))


@lru_cache(maxsize=4096)
def _policy(
    pod_alerts: str | None,
    namespace_alerts: str | None,
    pod_idle_after: str | None,
    namespace_idle_after: str | None,
    longest_ms: int,
) -> Policy:
    """The policy in these texts of a pod's annotations and its namespace's labels, cached."""
    off: bool | None = None
    idle_after_ms: int | None = None
    errors: list[PolicyError] = []
    for source, switch, duration in (
        ("annotation", pod_alerts, pod_idle_after),
        ("namespace label", namespace_alerts, namespace_idle_after),
    ):
        if off is None and switch is not None:
            if (word := switch.strip().lower()) in ("on", "off"):
                off = word == "off"
            else:
                text = f"the {source} {ALERTS} is {switch[:80]!r}: write on or off"
                errors.append(PolicyError(ALERTS, text))
        if idle_after_ms is None and duration is not None:
            try:
                ms = milliseconds(duration)
                if ms < _SHORTEST_MS:
                    raise ValueError(f"{duration[:80]!r} is less than a second")
                idle_after_ms = min(ms, longest_ms)
                if ms > longest_ms:
                    most = duration_words(longest_ms)
                    text = f"the {source} {IDLE_AFTER} is {duration[:80]!r}, and {most} is the most that counts here"
                    errors.append(PolicyError(IDLE_AFTER, text))
            except ValueError as error:
                text = f"the {source} {IDLE_AFTER} is malformed: {error}"
                errors.append(PolicyError(IDLE_AFTER, text))
    return Policy(bool(off), idle_after_ms, tuple(errors))


# -- which actions are allowed on a workload that wastes GPUs

RECLAIM = "gpustream.dev/reclaim"
"""On a namespace: the allowed actions. On a pod, or on an owner of it: ``off`` to allow none."""

RECLAIM_WORDS = ("event", "scale", "suspend", "deactivate", "partly")
"""The actions, each optionally with ``=DURATION``, and ``partly``: also if some of the workload's GPUs work."""


class OptIn(NamedTuple):
    """The actions that a namespace allows, each with the time in ms for which an alert must have fired, or None."""

    actions: Mapping[str, int | None] = {}
    partly: bool = False


def opt_in(text: str) -> OptIn:
    """Parse ``event=30m, scale=4h, partly``, or ``off``, which allows nothing. Raises ValueError with a sentence."""
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


def opted_out(annotations: Mapping[str, str], inherited: Mapping[str, str], fired_ms: int) -> str | None:
    """Why the annotations of a pod, of an owner of it, or of its namespace forbid an action; None: they don't.

    A pod's own annotation wins. ``Bounds`` do not count here: whoever asks to keep idle GPUs keeps them, however long
    that is. A malformed annotation forbids the action, too. ``fired_ms``: for how long the alert has fired.
    """
    alerts, idle_after = (annotations.get(name, inherited.get(name)) for name in (ALERTS, IDLE_AFTER))
    if alerts is not None and alerts.strip().lower() != "on":
        return f"{ALERTS} is {alerts[:80]!r}"
    if idle_after is not None:
        try:
            if milliseconds(idle_after) > fired_ms:
                return f"{IDLE_AFTER} is {idle_after[:80]!r}, and the alert has fired for {duration_words(fired_ms)}"
        except ValueError:
            return f"{IDLE_AFTER} is {idle_after[:80]!r}, which is no duration"
    if RECLAIM in annotations:
        return f"{RECLAIM} is {annotations[RECLAIM][:80]!r}; only a namespace's says what may be done"
    return None


# -- errors in annotations, for their authors

PREFIX = "gpustream.dev/"
POLICY_ANNOTATIONS = (ALERTS, IDLE_AFTER, RECLAIM)
"""The annotations of pods, of the templates that they are made from, and of namespaces."""
OWN_ANNOTATIONS = frozenset({"gpustream.dev/reclaimed-by", "gpustream.dev/reclaimed", "gpustream.dev/reclaim-undone"})
"""The annotations that gpustream itself writes."""

_SIMILARITY = 0.75
_LONGEST_NAME = 100
_MOST_NAMES = 256  # of an object that are compared: each takes some time, and a tenant may write thousands
_MOST_MISSPELT = 8  # each becomes an Event


def bounds(text: str) -> Bounds:
    """Parse ``24h``, or ``24h,notebooks-*=72h`` with other times for some namespaces; a later one wins."""
    first, *rest = text.split(",")
    pairs = [override.partition("=") for override in rest]
    if any(not glob.strip() or not equals for glob, equals, _ in pairs):
        raise ValueError(f"{text[:80]!r} is not known: write a duration, then NAMESPACE=DURATION after commas")
    overrides = tuple(((glob.strip(),), milliseconds(duration)) for glob, _, duration in pairs)
    return Bounds(milliseconds(first), overrides)


def bounds_text(bounds: Bounds) -> str:
    """The text that :func:`bounds` parses to this value."""
    overrides = [f"{','.join(globs)}={duration_text(ms / 1000)}" for globs, ms in bounds.overrides]
    return ",".join([duration_text(bounds.longest_ms / 1000), *overrides])


def annotation_errors(
    annotations: Mapping[str, str], namespace: str, bounds: Bounds, *, of_pod: bool
) -> list[PolicyError]:
    """The first unknown names, and the malformed values, among the annotations of a pod, or of a namespace."""
    compared = map(_misspelt, sorted(annotations)[:_MOST_NAMES])
    errors = [error for error in compared if error is not None][:_MOST_MISSPELT]
    errors += parse_policy(annotations, {}, namespace, bounds).errors
    if (text := annotations.get(RECLAIM)) is not None and not of_pod:
        try:
            opt_in(text)
        except ValueError as error:
            errors.append(PolicyError(RECLAIM, f"the annotation {RECLAIM} is malformed: {error}"))
    elif text is not None and text.strip().lower() != "off":
        message = f"the annotation {RECLAIM} is {text[:80]!r}: on a pod write off; what may be done says its namespace"
        errors.append(PolicyError(RECLAIM, message))
    return errors


@lru_cache(maxsize=4096)
def _misspelt(name: str) -> PolicyError | None:
    """The error of an unknown annotation whose name looks as if it was meant for gpustream; None for any other."""
    prefix, slash, last = name.lower().partition("/")
    if name in POLICY_ANNOTATIONS or name in OWN_ANNOTATIONS or not slash:
        return None
    suffixes = [annotation.removeprefix(PREFIX) for annotation in POLICY_ANNOTATIONS]
    matches = get_close_matches(last, suffixes, n=1, cutoff=_SIMILARITY)
    if f"{prefix}/" != PREFIX:
        matcher = SequenceMatcher(None, prefix, PREFIX.rstrip("/"))
        is_similar = matcher.real_quick_ratio() >= _SIMILARITY and matcher.ratio() >= _SIMILARITY
        if not is_similar or not matches:
            return None
    short_name = name[:_LONGEST_NAME]
    text = (
        f"did you mean {PREFIX}{matches[0]}?"
        if matches
        else f"pods and namespaces have {', '.join(POLICY_ANNOTATIONS)}"
    )
    return PolicyError(short_name, f"the annotation {short_name} is not known, and nobody reads it: {text}")
