"""gpu.allocations: which container of a node was given which devices, as its kubelet says."""

from typing import Annotated

import msgspec

from topics.topic import Cluster, Node, Topic, UInt, Version, about


class Claim(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A device that a container got through a resource claim (DRA)."""

    claim: Annotated[str, about("The resource claim's name.")]
    namespace: Annotated[str, about("The claim's namespace.")]
    driver: Annotated[str, about("The DRA driver.")]
    pool: Annotated[str, about("The pool of the device, in the driver's resource slices.")]
    device: Annotated[str, about("The device's name in its pool.")]


class Container(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A container and the devices of one resource that the kubelet gave it."""

    namespace: Annotated[str, about("The pod's namespace.")]
    pod: Annotated[str, about("The pod's name.")]
    container: Annotated[str, about("The container's name.")]
    resource: Annotated[str | None, about("The resource's name, such as nvidia.com/gpu.")] = None
    device_ids: Annotated[tuple[str, ...], about("The ids of its devices, as the device plugin wrote them.")] = ()
    claims: Annotated[tuple[Claim, ...], about("The devices that it got through resource claims.")] = ()
    pod_uid: Annotated[str | None, about("The pod's UID, if the kubelet says it, which takes its Pods API.")] = None


class Allocations(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A snapshot of a node."""

    schema: Version
    cluster: Cluster
    node: Node
    run_id: Annotated[UInt, about("Identifies the run of the producer: each start has another one.", "none")]
    seq: Annotated[
        UInt, about("The number of the snapshot in its run. It rises only when the content changes.", "none")
    ]
    ts_ms: Annotated[UInt, about("When the producer made the snapshot, by the node's clock.", "ms since the epoch")]
    containers: Annotated[
        tuple[Container, ...], about("The containers that have GPUs, one entry for each resource.")
    ] = ()


TOPIC = Topic(
    name="gpu.allocations",
    record=Allocations,
    cleanup="delete",
    retention_hours=48,
    promise=(
        "A snapshot is in the log before the first sample that names it, and is sent again unchanged every 5 minutes "
        "and before buffered samples that name it."
    ),
)
