"""The rules, and how overrides and a pod's own policy (:mod:`delivery.policies`) change them. Pure."""

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
"""How pods use their GPUs: judged for each pod on a device, and reported as one alert for each workload."""
OF_NODES: tuple[Kind, ...] = ("missing", "lost", "not_answering")
"""Faults that several GPUs of a node may have by one cause: reported as one alert of the node then."""

ALL_GPUS_KINDS: tuple[Kind, ...] = ("stalled",)
"""The kinds whose alert needs all GPUs of a workload."""

WINDOWED: tuple[Kind, ...] = ("underused", "memory_hoarded")
"""The kinds that are judged by a pod's use in a window of time."""

CAUSES: tuple[Kind, ...] = ("crash_loop", "held_idle", "memory_hoarded", "underused")
"""The kinds of which only the first is reported of a pod on a device: it is the cause of the others."""

_MAX_CACHED = 10_000  # rules of pods in the cache; at the limit it is emptied


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """Other settings of a rule for the pods, or XID codes, that match. All selectors that are set must match, each by
    any of its globs. ``changes`` has the fields of :class:`Rule` to replace."""

    namespace: tuple[str, ...] = ()
    workload_kind: tuple[str, ...] = ()
    workload: tuple[str, ...] = ()
    pod_labels: dict[str, tuple[str, ...]] = {}
    namespace_labels: dict[str, tuple[str, ...]] = {}
    xid: tuple[int, ...] = ()
    changes: dict[str, Any] = {}


class Rule(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A rule. Its ``kind`` decides which condition it judges, and which of the thresholds it reads.
    It fires when the condition has held for ``for_ms``, is critical when it has held for ``critical_ms`` (0: never),
    and is resolved when it has not held for ``keep_firing_ms``."""

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
        """The rule with its severity for XID errors of a kind."""
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
        """The work from which on no pod is idle, by any override."""
        return max(self._values_of("idle_below"))

    @cached_property
    def least_work(self) -> float:
        """The work below which every pod is idle, by any override."""
        return min(self._values_of("idle_below"))

    @cached_property
    def least_used(self) -> float:
        """The utilization below which no pod's GPU is stalled, by any override."""
        return min(self._values_of("used_above"))

    def _values_of(self, field: str) -> list[float]:
        """The value of a field by the rule itself, and by each override."""
        value: float = getattr(self, field)
        return [value, *(override.changes.get(field, value) for override in self.overrides)]

    @cached_property
    def label_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the pods' labels, and of the namespaces' labels, that overrides select by."""
        pod = {name for override in self.overrides for name in override.pod_labels}
        namespace = {name for override in self.overrides for name in override.namespace_labels}
        return tuple(sorted(pod)), tuple(sorted(namespace))


# -- policies of pods and namespaces


def policy_of(holder: Holder, bounds: Bounds = DEFAULT_BOUNDS) -> Policy:
    """The policy of a holder about alerts, within the bounds."""
    return parse_policy(holder.annotations, holder.namespace_labels, holder.namespace, bounds)


def has_policy(holder: Holder) -> bool:
    """Whether a pod, or its namespace, has a policy about alerts."""
    pod, namespace = holder.annotations, holder.namespace_labels
    return ALERTS in namespace or IDLE_AFTER in namespace or ALERTS in pod or IDLE_AFTER in pod


# -- all rules


class Wording(NamedTuple):
    """Settings for the texts of alerts: where the runbooks are, which pod label is the team, and what GPUs cost."""

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
        """The priorities of the rules of the kinds in ``CAUSES``, by name; 0 is the first cause."""
        return {rule.name: priority for priority, kind in enumerate(CAUSES) for rule in self.of(kind)}

    @cached_property
    def max_idle_work(self) -> float:
        """The work from which on no pod is idle, by any rule."""
        return max([rule.most_work for rule in self.of("held_idle")], default=0.0)

    @cached_property
    def min_stalled_utilization(self) -> float:
        """The utilization below which no device is stalled, by any rule."""
        return min([rule.least_used for rule in self.of("stalled")], default=inf)

    @cached_property
    def unallocated_work(self) -> float:
        """The work below which no device is used without being allocated, by any rule."""
        return min([rule.used_above for rule in self.of("used_unallocated")], default=inf)

    @cached_property
    def forget_ms(self) -> int:
        """After how long a missing device is forgotten. If an alert about it would not have fired by then, the time is
        counted from that alert on."""
        missing = [(rule.for_ms, rule.forget_ms) for rule in self.of("missing")]
        return max(
            [forget_ms if forget_ms > for_ms else for_ms + forget_ms for for_ms, forget_ms in missing], default=0
        )

    @cached_property
    def use_needs(self) -> UseNeeds | None:
        """The sums of use that the rules need; None if they need none."""
        windows = {
            (settings.get("window_ms", rule.window_ms) // STEP_MS, settings.get("used_below", rule.used_below))
            for kind in WINDOWED
            for rule in self.of(kind)
            for settings in ({}, *[override.changes for override in rule.overrides])
        }
        figures = bool(self.of("straggler"))
        if not windows and not figures:
            return None
        below = max([below for _, below in windows], default=0.0)  # several overrides may apply at once
        lengths = sorted({steps for steps, _ in windows})
        return UseNeeds(max(lengths, default=0), figures, tuple((steps, below) for steps in lengths))

    @cached_property
    def plan(self) -> dict[Any, Any]:
        """A cache for what the conditions compute from the rules."""
        return {}

    @cached_property
    def _in_force(self) -> dict[tuple[Any, ...], Rule | None]:
        return {}

    def in_force(
        self, rule: Rule, pod: Holder | None, *, xid: int | None = None, policy: Policy = NO_POLICY
    ) -> Rule | None:
        """The rule with the overrides for a pod and an XID code, and the pod's policy; None if it is disabled then."""
        if not rule.overrides and policy.idle_after_ms is None:
            return rule
        key: tuple[Any, ...] = (rule.name, xid, policy.idle_after_ms)
        if pod is not None:
            names, namespace_names = rule.label_names
            labels = (*map(pod.labels.get, names), *map(pod.namespace_labels.get, namespace_names))
            key += (pod.namespace, pod.workload and (pod.workload.kind, pod.workload.name), labels)
        if key not in self._in_force:
            if len(self._in_force) >= _MAX_CACHED:
                self._in_force.clear()
            self._in_force[key] = apply_overrides(rule, pod, xid, policy)
        return self._in_force[key]


def apply_overrides(rule: Rule, pod: Holder | None, xid: int | None, policy: Policy) -> Rule | None:
    """The rule with the overrides that match, later ones over earlier ones, and the pod's policy over all.
    None if it is disabled then."""
    changes: dict[str, Any] = {}
    owner = pod.workload if pod is not None else None
    labels, namespace_labels = (pod.labels, pod.namespace_labels) if pod is not None else ({}, {})
    for override in rule.overrides:
        matchers = [
            (override.namespace, pod.namespace if pod is not None else None),
            (override.workload_kind, owner.kind if owner is not None else None),
            (override.workload, owner.name if owner is not None else None),
            *[(globs, labels.get(name)) for name, globs in override.pod_labels.items()],
            *[(globs, namespace_labels.get(name)) for name, globs in override.namespace_labels.items()],
        ]
        if override.xid and xid not in override.xid:
            continue
        if all(
            text is not None and any(fnmatchcase(text, glob) for glob in globs) for globs, text in matchers if globs
        ):
            for field, value in override.changes.items():
                inherited = changes.get(field, getattr(rule, field))  # labels and annotations are merged
                changes[field] = {**inherited, **value} if isinstance(value, dict) else value
    if rule.kind == "held_idle" and policy.idle_after_ms is not None:
        changes["for_ms"] = policy.idle_after_ms
    effective = msgspec.structs.replace(rule, **changes) if changes else rule
    return effective if effective.enabled else None
