"""The settings of the node producer."""

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from delivery.settings import DIRECTORY, EXISTING_DIRECTORY, NAME, SOCKET, Option
from producers.settings import GPU_RESOURCES, BufferSettings, Interval, ResourcePrefixes, prefix_errors

KUBELET_SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")  # where a kubelet serves its pod resources
PODS_API_SOCKET = Path("/var/lib/kubelet/pods-api/pods-api.sock")  # and its pods, from Kubernetes 1.37 on
SHORTEST_INTERVAL_S = 0.1


def node_name() -> str:
    """NODE_NAME (which a DaemonSet gets from its pod), else the host's name."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


Node = Annotated[str, Option("--node", NAME, "The node's name.", shown="NODE_NAME, else the host's name")]


@dataclass(frozen=True, kw_only=True)
class ReadingSettings:
    """How a node is read. ``pod_resources_socket`` None: no kubelet; ``hpc_job_mapping_dir`` None: no job files."""

    pod_resources_socket: Annotated[Path | None, Option(
        "--pod-resources-socket", SOCKET,
        "Where the kubelet says which container has which GPU. Mount its folder, not the socket. off: there is no"
        " kubelet on this machine.",
    )] = KUBELET_SOCKET  # fmt: skip
    pods_api_socket: Annotated[Path | None, Option(
        "--pods-api-socket", SOCKET,
        "Where the kubelet says at once that a pod begins or ends, beside its pod resources: from Kubernetes 1.37 on."
        " Mount its folder, not the socket. Nothing is lacking if it is not there, or off.",
    )] = PODS_API_SOCKET  # fmt: skip
    resource_prefixes: ResourcePrefixes = GPU_RESOURCES
    procfs: Annotated[Path, Option(
        "--procfs", EXISTING_DIRECTORY,
        "The host's procfs, where the pod of a GPU's process is found: /proc in a pod with hostPID, else where the"
        " host's is mounted.",
    )] = Path("/proc")  # fmt: skip
    hpc_job_mapping_dir: Annotated[Path | None, Option(
        "--hpc-job-mapping-dir", DIRECTORY,
        "A directory in which a batch system's prolog names the jobs of each GPU: a file named 0 (its index) or 2.1"
        " (index and GPU instance), a job id a line.",
    )] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NodeSettings(BufferSettings, ReadingSettings):
    """All settings of the node producer."""

    node: Node = field(default_factory=node_name)
    interval_s: Interval = 1.0

    def errors(self) -> list[str]:
        found = super().errors()
        if not self.interval_s >= SHORTEST_INTERVAL_S:
            found.append(f"--interval: {self.interval_s:g} s is less than a GPU can be read in; the least is 100ms")
        return found + prefix_errors(self.resource_prefixes)
