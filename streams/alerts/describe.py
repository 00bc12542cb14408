"""An alert's labels and annotations, from what was found. Pure.

In: a finding, its tick, and since when it has held. Out: labels (who and where, in OpenTelemetry's names), and the
words: a summary, a description with figures, the runbook.
"""

from streams.alerts.conditions import Finding
from streams.alerts.rule import Rule
from streams.alerts.tick import Tick
from topics.alerts import AlertState

Described = tuple[dict[str, str], dict[str, str]]
"""An alert's labels and annotations."""


def describe(finding: Finding, tick: Tick, since_ms: int) -> Described:
    """The labels and annotations of what a tick shows to have held since a time."""
    return _labels(finding.rule, tick.cluster, tick.node), {"summary": finding.rule.name}


def silent(rule: Rule, state: AlertState) -> Described:
    """Those of a node without ticks."""
    return _labels(rule, state.cluster, state.node), {"summary": rule.name}


def _labels(rule: Rule, cluster: str, node: str) -> dict[str, str]:
    return {"alertname": rule.name, "severity": rule.severity, "k8s_cluster_name": cluster, "k8s_node_name": node}
