"""The settings of the cluster producer, and the labels and annotations that it keeps in any case."""

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from uuid import uuid4

from delivery.policies import DEFAULT_BOUNDS, Bounds, bounds, bounds_text
from delivery.settings import LEASE, NAME, NAMES, KafkaSettings, Kubeconfig, Option, Text
from producers import records
from producers.cluster.objects import allow_list_errors
from producers.settings import GPU_RESOURCES, ResourcePrefixes, prefix_errors

POD_LABELS = (
    "app", "app.kubernetes.io/*", "team", "project", "owner", "cost-center", "queue", "ray.io/cluster", "ray.io/group",
    "ray.io/node-type", "training.kubeflow.org/*", "batch.kubernetes.io/job-completion-index", "jobset.sigs.k8s.io/*",
    "leaderworkerset.sigs.k8s.io/*", "kueue.x-k8s.io/queue-name", "workflows.argoproj.io/workflow",
)  # fmt: skip
POD_ANNOTATIONS = ("gpustream.dev/*", "hami.io/vgpu-devices-allocated")
"""What is always kept of a pod's annotations: without HAMi's its pods would be shown on other GPUs."""

NAMESPACE_LABELS = ("team", "project", "owner", "cost-center", "environment", "gpustream.dev/*")
NODE_LABELS = (
    "topology.kubernetes.io/zone", "topology.kubernetes.io/region", "node.kubernetes.io/instance-type", "nvidia.com/*",
)  # fmt: skip
"""What is always kept of a node's labels."""

POLICY_LONGEST = Text("DURATION[,NAMESPACE=DURATION...]", bounds, "24h,notebooks-*=72h", show=bounds_text)
LEASE_NAME = "gpustream-cluster"
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")  # a pod's own namespace
_LEASE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


def default_lease() -> str:
    """The Lease in the namespace of this process's pod; outside of a cluster in ``default``."""
    try:
        namespace = OWN_NAMESPACE.read_text().strip()
    except OSError:
        namespace = "default"
    return f"{namespace}/{LEASE_NAME}"


def default_identity() -> str:
    """The pod's name; outside of a cluster the host's name and a random part."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{uuid4().hex[:8]}"


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(KafkaSettings):
    """How the API server is read, what of it is published, and by whom. ``kubeconfig`` None: found as kubectl finds it.

    The allow-lists hold exact names, ``prefix/*`` and ``*``; ``node_labels`` and ``pod_annotations`` are kept beside
    :data:`NODE_LABELS` and :data:`POD_ANNOTATIONS`. ``lease`` None: there is no other replica.
    """

    kubeconfig: Kubeconfig = None
    resource_prefixes: ResourcePrefixes = GPU_RESOURCES
    pod_labels: Annotated[
        tuple[str, ...], Option("--pod-labels", NAMES, "Which labels of pods are published; the rest is not read on.")
    ] = POD_LABELS
    pod_annotations: Annotated[tuple[str, ...], Option(
        "--pod-annotations", NAMES, f"Which annotations of pods are published beside {', '.join(POD_ANNOTATIONS)}.",
        shown="none",
    )] = ()  # fmt: skip
    namespace_labels: Annotated[tuple[str, ...], Option(
        "--namespace-labels", NAMES, "Which labels of namespaces are published; the rest is not read on.",
    )] = NAMESPACE_LABELS  # fmt: skip
    node_labels: Annotated[tuple[str, ...], Option(
        "--node-labels", NAMES, f"Which labels of nodes are published beside {', '.join(NODE_LABELS)}.", shown="none",
    )] = ()  # fmt: skip
    lease: Annotated[str | None, Option(
        "--lease", LEASE, "By which Lease several replicas agree on the one that publishes. off: this is the only one.",
        shown=f"{LEASE_NAME} in the pod's namespace",
    )] = field(default_factory=default_lease)  # fmt: skip
    policy_events: Annotated[bool, Option(
        "--policy-events", None, "Say in a Kubernetes Event on the pod which of its annotations under gpustream.dev/,"
        " or its namespace's, are misspelt or out of bounds. It needs the right to create Events.",
    )] = False  # fmt: skip
    policy_longest: Annotated[Bounds, Option(
        "--policy-longest", POLICY_LONGEST, "For how long a policy may silence alerts, as the alert stream's rules file"
        " says: `longest`, and then others for some namespaces.",
    )] = DEFAULT_BOUNDS  # fmt: skip
    identity: Annotated[str, Option(
        "--identity", NAME, "What this replica is called in the Lease.",
        shown="POD_NAME, else the host's name and a random part",
    )] = field(default_factory=default_identity)  # fmt: skip

    def errors(self) -> list[str]:
        errors = super().errors()
        for name in ("pod_labels", "pod_annotations", "namespace_labels", "node_labels"):
            errors += allow_list_errors(f"--{name.replace('_', '-')}", getattr(self, name))
        errors += prefix_errors(self.resource_prefixes)
        if self.lease is not None and not _LEASE.fullmatch(self.lease):
            errors.append(f"--lease: {self.lease!r} is not NAMESPACE/NAME, as {LEASE_NAME} in a namespace is")
        if not self.identity:
            errors.append("--identity: two replicas without a name can't be told apart")
        try:
            records.checked_name("cluster", self.cluster)
        except ValueError as error:
            errors.append(str(error))
        return errors
