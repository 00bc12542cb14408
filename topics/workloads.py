"""gpu.workloads: what the API server knows of a node's GPU pods: owners, labels, life times."""

from typing import Annotated

import msgspec

from topics.allocations import Claim
from topics.topic import Cluster, Node, Topic, UInt, Version, about

MAINTENANCE = "gpustream.dev/maintenance"
"""The annotation of a node, or the key of its taint, by which nobody is alerted of it. It is among its labels here."""


class Owner(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One link of a pod's owner chain."""

    api_version: Annotated[str, about("The owner's API group and version, such as batch/v1.")]
    kind: Annotated[str, about("Its kind, such as Job.")]
    name: Annotated[str, about("Its name.")]
    uid: Annotated[str | None, about("Its UID.")] = None


class Pod(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A pod and its owner chain."""

    namespace: Annotated[str, about("Its namespace.")]
    name: Annotated[str, about("Its name.")]
    uid: Annotated[str, about("Its UID.")]
    phase: Annotated[
        str | None, about("Its phase, as Kubernetes says it: Pending, Running, Succeeded, Failed or Unknown.")
    ] = None
    started_ms: Annotated[UInt | None, about("When it started.", "ms since the epoch")] = None
    ended_ms: Annotated[
        UInt | None, about("When it ended: it ran before this time, and no longer at it.", "ms since the epoch")
    ] = None
    labels: Annotated[dict[str, str], about("Its labels, by name.")] = {}
    annotations: Annotated[
        dict[str, str],
        about("Its annotations, by name, and those of its namespace under gpustream.dev/ that it has not itself."),
    ] = {}
    namespace_labels: Annotated[dict[str, str], about("The labels of its namespace, by name.")] = {}
    owners: Annotated[tuple[Owner, ...], about("The owner chain, from the pod upward.")] = ()
    owners_complete: Annotated[
        bool,
        about(
            "Whether the chain could be read to its top. If not, no workload is named by it. An owner "
            "that the API server does not let be read counts as the top."
        ),
    ] = True
    waiting: Annotated[
        str | None,
        about(
            "Why a container of it that was restarted waits now, as Kubernetes says it, such as CrashLoopBackOff. "
            "Most pods have none."
        ),
    ] = None
    restarts: Annotated[UInt | None, about("How often that container was restarted.", "none")] = None


class DraDevice(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A device of a resource slice, and the UUID that NVML knows it by."""

    driver: Annotated[str, about("The DRA driver.")]
    pool: Annotated[str, about("The pool of the device.")]
    device: Annotated[str, about("The device's name in its pool.")]
    uuid: Annotated[str, about("The device's UUID, as NVML says it.")]


class UnwellDevice(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A device that is not well, as the API server has it."""

    device_id: Annotated[str, about("The device plugin's id of it, or the UUID of a device of a resource slice.")]
    health: Annotated[str | None, about("Unhealthy, if a pod's allocatedResourcesStatus says so.")] = None
    message: Annotated[str | None, about("The message beside that, if it has one.")] = None
    taint: Annotated[
        str | None,
        about("KEY=VALUE:EFFECT, as kubectl writes it: the taint of the resource slice, or of a DeviceTaintRule."),
    ] = None

    def __str__(self) -> str:
        if self.taint is not None:
            return f"taint {self.taint}"
        return f"{self.health}: {self.message}" if self.message else str(self.health)


class NodeWorkloads(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A node's GPU pods."""

    schema: Version
    cluster: Cluster
    node: Node
    epoch: Annotated[
        UInt, about("The number of the leader that wrote it. Readers drop records of a lower one.", "none")
    ]
    seq: Annotated[UInt, about("The number of the record in its epoch.", "none")]
    ts_ms: Annotated[UInt, about("When it was made, by the clock of the cluster producer.", "ms since the epoch")]
    node_labels: Annotated[dict[str, str], about("The node's labels, by name.")] = {}
    pods: Annotated[tuple[Pod, ...], about("The pods of the node that have GPUs.")] = ()
    dra_devices: Annotated[tuple[DraDevice, ...], about("The devices of the node's resource slices.")] = ()
    admin_claims: Annotated[
        tuple[Claim, ...],
        about(
            "The devices that claims have only to look at them (adminAccess), as monitoring does: who has "
            "such a claim does not hold its device."
        ),
    ] = ()
    removed: Annotated[
        bool, about("Whether the node is no longer in the cluster. Nothing more is said of it unless it comes back.")
    ] = False
    unwell: Annotated[
        tuple[UnwellDevice, ...], about("What is said of its devices that are not well. Most nodes have none.")
    ] = ()

    @property
    def order(self) -> tuple[int, int]:
        """Its place among the records of its node: the newest leader's last one counts."""
        return self.epoch, self.seq


TOPIC = Topic(
    name="gpu.workloads",
    record=NodeWorkloads,
    cleanup="delete",
    retention_hours=48,
    promise="Sent when it changes and every 5 minutes. A pod's labels, annotations and first owner may change ten times"
    " at once, and then once a minute: the last ones count. A pod that ended is in the record that ends it, and for 30"
    " minutes in those of every 5 minutes.",
)
