"""What the cluster producer does where it is not told otherwise. It imports nothing of weight: the command's help reads
it."""

import os
import socket
from pathlib import Path
from uuid import uuid4

POD_LABELS = (
    "app",
    "app.kubernetes.io/*",
    "team",
    "project",
    "owner",
    "cost-center",
    "queue",
    "ray.io/cluster",
    "ray.io/group",
    "ray.io/node-type",
    "training.kubeflow.org/*",
    "batch.kubernetes.io/job-completion-index",
    "jobset.sigs.k8s.io/*",
    "leaderworkerset.sigs.k8s.io/*",
    "kueue.x-k8s.io/queue-name",
    "workflows.argoproj.io/workflow",
)
POD_ANNOTATIONS = ("gpustream.dev/*", "hami.io/vgpu-devices-allocated")
"""What is kept of a pod's annotations whatever else is: without HAMi's its pods would be told of on other GPUs."""

NAMESPACE_LABELS = ("team", "project", "owner", "cost-center", "environment", "gpustream.dev/*")
NODE_LABELS = (
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "node.kubernetes.io/instance-type",
    "nvidia.com/*",
)
"""What is kept of a node's labels whatever else is."""

LEASE_NAME = "gpustream-cluster"
OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
"""Where a pod finds the name of its namespace."""


def lease() -> str:
    """The Lease in the namespace of this process's pod; outside of a cluster in ``default``."""
    try:
        namespace = OWN_NAMESPACE.read_text().strip()
    except OSError:
        namespace = "default"
    return f"{namespace}/{LEASE_NAME}"


def identity() -> str:
    """The pod's name; outside of a cluster the host's, and something that no other process of it has."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{uuid4().hex[:8]}"
