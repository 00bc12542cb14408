"""A rule, and what an override or a pod's own policy (:mod:`delivery.policies`) makes of it. Pure."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from math import inf
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from delivery.policies import ALERTS, DEFAULT_BOUNDS, IDLE_AFTER, NO_POLICY, Bounds, Policy, parse_policy
from delivery.prices import Prices
from streams.alerts.uses import STEP_MS, UseNeeds
from streams.alerts.xids import XidKind
from topics.alerts import RUNBOOKS, Severity
from topics.attributed import Holder
from topics.idleness import IDLE_BELOW

Kind = Literal[
    "held_idle", "used_unallocated", "attribution_conflict", "xid", "ecc_uncorrectable", "row_remap_failure",
    "row_remap_pending", "thermal_slowdown", "power_brake", "nvlink_errors", "lost", "not_answering", "missing",
    "node_silent", "policy_invalid", "stalled", "underused", "memory_hoarded", "straggler", "crash_loop",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
WASTE: tuple[Kind, ...] = ("held_idle", "stalled", "underused", "memory_hoarded", "straggler", "crash_loop")
"""What pods do with their GPUs: it is judged for each pod on a device, and is one alert a workload."""
OF_ALL: tuple[Kind, ...] = ("stalled",)
"""What is true of a workload only if it is true of all its GPUs."""

WINDOWED: tuple[Kind, ...] = ("underused", "memory_hoarded")
"""What is judged by what pods did in a window."""

CAUSES: tuple[Kind, ...] = ("crash_loop", "held_idle", "memory_hoarded", "underused")
"""Of which one at a time is reported of a pod on a device, the first of them: it is the cause of the others."""

_CACHED = 10_000  # of how many pods' rules are remembered; past that, all are found again


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """Other settings for some of what a rule is about. What is given must all match; each matches by any of its globs.
    ``changes``: fields of :class:`Rule`."""

    namespace: tuple[str, ...] = ()
    workload_kind: tuple[str, ...] = ()
    workload: tuple[str, ...] = ()
    pod_labels: dict[str, tuple[str, ...]] = {}
    namespace_labels: dict[str, tuple[str, ...]] = {}
    xid: tuple[int, ...] = ()
    changes: dict[str, Any] = {}


class Rule(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A rule; ``kind`` says what it judges, and which of the thresholds it reads.
    It fires when it has held for ``for_ms``, is critical when it has for ``critical_ms`` (0: never by that), and
    resolves when it has not held for ``keep_firing_ms``."""

    name: str
    kind: Kind
    enabled: bool = True
    severity: Severity = "warning"
    for_ms: int = 0
    keep_firing_ms: int = 0
    critical_ms: int = 0
    idle_below: float = IDLE_BELOW
    grace_ms: int = 0
    memory_held_bytes: float = 0.0
    used_above: float = 0.05
    power_below: float = 0.4
    sm_active_below: float = 0.3
    tensor_active_below: float = 0.02
    used_below: float = 0.1
    window_ms: int = 4 * 3_600_000
    memory_above: float = 0.5
    peers: int = 3
    deviations: float = 3.5
    restarts: int = 3
    at_least: int = 1
    recoveries: int = 1
    forget_ms: int = 0
    application_severity: Severity = "info"
    driver_severity: Severity = "warning"
    recovered_severity: Severity = "info"
    unknown_severity: Severity = "warning"
    copy_labels: tuple[str, ...] = ("team", "project", "owner", "cost-center")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    overrides: tuple[Override, ...] = ()

    def with_severity(self, xid: XidKind) -> "Rule":
        severities: dict[XidKind, Severity] = {
            "hardware": self.severity,
            "driver": self.driver_severity,
            "application": self.application_severity,
            "recovered": self.recovered_severity,
            "unknown": self.unknown_severity,
        }
        return self if self.severity == severities[xid] else msgspec.structs.replace(self, severity=severities[xid])

    @cached_property
    def most_work(self) -> float:
        """What is no idleness for any pod."""
        return max(self._thresholds)

    @cached_property
    def least_work(self) -> float:
        """What is no idleness for some pod."""
        return min(self._thresholds)

    @cached_property
    def least_used(self) -> float:
        """What is less than full use for every pod."""
        return min([self.used_above, *(float(one.changes.get("used_above", 1.0)) for one in self.overrides)])

    @property
    def _thresholds(self) -> list[float]:
        return [self.idle_below, *(float(o.changes.get("idle_below", self.idle_below)) for o in self.overrides)]

    @cached_property
    def label_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The labels of pods, and those of namespaces, that the overrides go by."""
        pod = {name for override in self.overrides for name in override.pod_labels}
        namespace = {name for override in self.overrides for name in override.namespace_labels}
        return tuple(sorted(pod)), tuple(sorted(namespace))


# -- what pods and namespaces say themselves


def policy_of(holder: Holder, bounds: Bounds = DEFAULT_BOUNDS) -> Policy:
    """The policy of a holder, as far as the bounds let it count."""
    return parse_policy(holder.annotations, holder.namespace_labels, holder.namespace, bounds)


def has_policy(holder: Holder) -> bool:
    """Whether a pod, or its namespace, says anything of alerts itself."""
    pod, spaces = holder.annotations, holder.namespace_labels
    return ALERTS in spaces or IDLE_AFTER in spaces or ALERTS in pod or IDLE_AFTER in pod


# -- all rules


class Wording(NamedTuple):
    """What alerts say beside what was found: where runbooks are, which label names a pod's team, what GPUs cost."""

    runbook_url: str = RUNBOOKS
    team_label: str = "team"
    prices: Prices | None = None

    @property
    def currency(self) -> str:
        return self.prices.currency if self.prices is not None else ""


class Rules(msgspec.Struct, frozen=True, dict=True):
    """The rules in force: those that are enabled, or that an override enables for some."""

    rules: tuple[Rule, ...]
    wording: Wording = Wording()
    bounds: Bounds = DEFAULT_BOUNDS

    def of(self, kind: Kind) -> tuple[Rule, ...]:
        return self.by_kind.get(kind, ())

    @cached_property
    def by_kind(self) -> Mapping[Kind, tuple[Rule, ...]]:
        kinds = {rule.kind for rule in self.rules}
        return {kind: tuple(rule for rule in self.rules if rule.kind == kind) for kind in KINDS if kind in kinds}

    @cached_property
    def by_name(self) -> Mapping[str, Rule]:
        return {rule.name: rule for rule in self.rules}

    @cached_property
    def causes(self) -> Mapping[str, int]:
        """The places of the rules of those kinds in their order, by name."""
        return {rule.name: place for place, kind in enumerate(CAUSES) for rule in self.of(kind)}

    @cached_property
    def busy(self) -> float:
        """The work from which on no pod is idle."""
        return max([rule.most_work for rule in self.of("held_idle")], default=0.0)

    @cached_property
    def full(self) -> float:
        """The utilization below which no device stalls."""
        return min([rule.least_used for rule in self.of("stalled")], default=inf)

    @cached_property
    def ungiven(self) -> float:
        """The work below which no device is used without having been given."""
        return min([rule.used_above for rule in self.of("used_unallocated")], default=inf)

    @cached_property
    def forget_ms(self) -> int:
        """After how long a device that is missing is forgotten."""
        return max((rule.forget_ms for rule in self.rules), default=0)

    @cached_property
    def use_needs(self) -> UseNeeds | None:
        """What of the use of devices is remembered; None: nothing."""
        windows = {
            (one.get("window_ms", rule.window_ms) // STEP_MS, one.get("used_below", rule.used_below))
            for kind in WINDOWED
            for rule in self.of(kind)
            for one in ({}, *[override.changes for override in rule.overrides])
        }
        figures = bool(self.of("straggler"))
        if not windows and not figures:
            return None
        below = max([below for _, below in windows], default=0.0)  # overrides may be laid over one another
        lengths = sorted({steps for steps, _ in windows})
        return UseNeeds(max(lengths, default=0), figures, tuple((steps, below) for steps in lengths))

    @cached_property
    def plan(self) -> dict[Any, Any]:
        """What the conditions work out from the rules once."""
        return {}

    @cached_property
    def _in_force(self) -> dict[tuple[Any, ...], Rule | None]:
        return {}

    def in_force(
        self, rule: Rule, pod: Holder | None, *, xid: int | None = None, policy: Policy = NO_POLICY
    ) -> Rule | None:
        """The rule as it is for a pod, and for errors of a code; None: it is disabled there."""
        if not rule.overrides and policy.idle_after_ms is None:
            return rule
        key: tuple[Any, ...] = (rule.name, xid, policy.idle_after_ms)
        if pod is not None:
            names, namespace_names = rule.label_names
            labels = (*map(pod.labels.get, names), *map(pod.namespace_labels.get, namespace_names))
            key += (pod.namespace, pod.workload and (pod.workload.kind, pod.workload.name), labels)
        if key not in self._in_force:
            if len(self._in_force) >= _CACHED:
                self._in_force.clear()
            self._in_force[key] = overridden(rule, pod, xid, policy)
        return self._in_force[key]


def overridden(rule: Rule, pod: Holder | None, xid: int | None, policy: Policy) -> Rule | None:
    """The rule with its overrides, a later one over an earlier one, and the pod's policy over all."""
    changes: dict[str, Any] = {}
    owner = pod.workload if pod is not None else None
    labels, namespace_labels = (pod.labels, pod.namespace_labels) if pod is not None else ({}, {})
    for override in rule.overrides:
        wanted = [
            (override.namespace, pod.namespace if pod is not None else None),
            (override.workload_kind, owner.kind if owner is not None else None),
            (override.workload, owner.name if owner is not None else None),
            *[(globs, labels.get(name)) for name, globs in override.pod_labels.items()],
            *[(globs, namespace_labels.get(name)) for name, globs in override.namespace_labels.items()],
        ]
        if override.xid and xid not in override.xid:
            continue
        if all(text is not None and any(fnmatchcase(text, glob) for glob in globs) for globs, text in wanted if globs):
            for field, value in override.changes.items():
                beneath = changes.get(field, getattr(rule, field))  # labels and annotations that it lacks stay
                changes[field] = {**beneath, **value} if isinstance(value, dict) else value
    if rule.kind == "held_idle" and policy.idle_after_ms is not None:
        changes["for_ms"] = policy.idle_after_ms
    found = msgspec.structs.replace(rule, **changes) if changes else rule
    return found if found.enabled else None
