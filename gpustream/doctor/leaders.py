"""The check of the cluster producers, by what they write to gpu.workloads. Pure."""

from collections.abc import Iterator, Mapping

from delivery.values import counted
from gpustream.doctor.evidence import Evidence, NodeEvidence, NodeName
from gpustream.doctor.situation import CheckResult, Finding, Findings, Situation
from topics import workloads

NO_LEADER_MS = 7 * 60_000
"""A leader sends each node of its cluster again every 5 minutes."""

REMOVED_MS = 120_000
"""A node that was removed from its cluster may send for so long: its pods are ended a little later."""

TAKEOVER_MS = 60_000
"""So long after a new leader has begun no record of the one before it comes any more."""


def leaders(situation: Situation, evidence: Evidence) -> CheckResult:
    """Checks that one cluster producer leads in each cluster, and that it knows each node that has pods."""
    nodes = {
        name: node for name, node in evidence.nodes.items() if not situation.hides(workloads.TOPIC, node.partition)
    }
    clusters = {name.cluster for name, node in nodes.items() if node.runs and node.snapshots}
    if not evidence.listed_ms:
        return CheckResult(
            f"no cluster producer writes {workloads.TOPIC.name}: pods have no owners and no labels" if clusters else "-"
        )
    findings = Findings()
    for cluster in sorted(clusters - evidence.listed_ms.keys()):
        findings.add(
            f"{cluster}: nothing is in {workloads.TOPIC.name} of this cluster",
            "its cluster producer does not run, does not lead, has another --cluster, or does not reach Kafka",
            f"it sends each node every 5 minutes; {', '.join(sorted(evidence.listed_ms))} is there",
            "see /readyz of `gpustream produce cluster`: it says who leads",
        )
    late = {
        name: listed_ms
        for name, listed_ms in evidence.listed_ms.items()
        if name in clusters and situation.now_ms - listed_ms > NO_LEADER_MS
    }
    for cluster, listed_ms in late.items():
        findings.add(
            f"{cluster}: no cluster producer leads",
            "none runs, none has the Lease, or the leader does not reach Kafka or the API server",
            f"its last record was logged {situation.ago(listed_ms)}, and a leader sends each node every 5 minutes",
            "docs/runbooks/GpustreamNoLeader.md; /readyz of `gpustream produce cluster` says who leads",
        )
    findings += _two_leaders_findings(evidence)
    findings += _removed_findings(situation, nodes)
    for name, node in nodes.items():
        findings += _unknown_findings(name, node, is_led=name.cluster in evidence.listed_ms.keys() - late.keys())
    return CheckResult(f"{counted(len(evidence.listed_ms), 'cluster')} known", findings)


def _two_leaders_findings(evidence: Evidence) -> Iterator[Finding]:
    """Findings for clusters in which records of an older epoch come after those of a newer one."""
    shown_by = {
        name.cluster: f"{name}: {counted(node.outdated_epochs, 'record')} of an older epoch came after epoch"
        f" {node.epoch}; readers drop them"
        for name, node in reversed(evidence.nodes.items())
        if node.outdated_epochs
    }
    for cluster, epochs_ms in evidence.epochs_ms.items():
        newest, (began_ms, _) = max(epochs_ms.items())
        others = [
            epoch for epoch, (_, last_ms) in epochs_ms.items() if epoch != newest and last_ms - began_ms > TAKEOVER_MS
        ]
        if others:
            text = f"epoch {max(others)} is written a minute after epoch {newest} began, of other nodes"
            shown_by.setdefault(cluster, text)
    for cluster, text in shown_by.items():
        yield Finding(
            f"{cluster}: two cluster producers write at a time",
            "two clusters have this --cluster, or replicas have different Leases or none (--lease off), or one was cut"
            " off from the API server",
            text,
            "give all replicas of a cluster one --lease, and each cluster a --cluster of its own",
        )


def _removed_findings(situation: Situation, nodes: Mapping[NodeName, NodeEvidence]) -> Iterator[Finding]:
    """Findings for nodes that go on sending long after their cluster producer, the only one, said they were removed."""
    disputed = {name.cluster for name, node in nodes.items() if node.outdated_epochs}
    for name, node in nodes.items():
        if node.removed and node.last_logged_ms - node.removed_ms > REMOVED_MS and name.cluster not in disputed:
            yield Finding(
                f"{name}: it sends, and {workloads.TOPIC.name} says that it was removed: its pods count as ended",
                "another cluster has this --cluster, or the Node was deleted while its producer runs",
                f"the removal was logged {situation.ago(node.removed_ms)}",
                "give each cluster a --cluster of its own; `kubectl get node` says whether the Node is there",
            )


def _unknown_findings(name: NodeName, node: NodeEvidence, *, is_led: bool) -> Iterator[Finding]:
    """Findings for what the cluster producer does not know of a node: its claimed devices, or all of it."""
    if claimed := node.unknown_claims:
        yield Finding(
            f"{name}: nobody seems to hold the GPUs that pods have by resource claims",
            "nothing says which these are: there is no resource slice of the node, or it may not be read",
            f"the kubelet lists {', '.join(claimed[:5])}; {workloads.TOPIC.name} has no device of that driver",
            "`kubectl get resourceslices`; --kube asks whether the cluster producer may list and watch them",
        )
    if node.runs and node.containers and node.epoch is None and is_led:
        yield Finding(
            f"{name}: the API server of {name.cluster} has no node of this name with GPU pods",
            "the producer's --node is not the name of the Node, or its --cluster is another cluster's",
            f"its kubelet lists pods, and {workloads.TOPIC.name} has no record of it",
            "set NODE_NAME from spec.nodeName, as k8s/base does",
        )
