"""gpu.allocations: which container of a node was given which devices, as its kubelet says."""

import msgspec

from topics.topic import Name, Topic, UInt, Version


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device that a container got through a resource claim (DRA)."""

    claim: str
    namespace: str
    driver: str
    pool: str
    device: str


class Container(msgspec.Struct, frozen=True, omit_defaults=True):
    """A container and the devices of one resource that the kubelet gave it, with their ids as the plugin wrote them.
    ``pod_uid`` is there if the kubelet says it, which takes its Pods API."""

    namespace: str
    pod: str
    container: str
    resource: str | None = None
    device_ids: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    pod_uid: str | None = None


class Allocations(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a node. ``seq`` rises, within the run ``run_id``, only when the content changes."""

    schema: Version
    cluster: Name
    node: Name
    run_id: UInt
    seq: UInt
    ts_ms: UInt
    containers: tuple[Container, ...] = ()


TOPIC = Topic(
    name="gpu.allocations",
    key="cluster/node",
    record=Allocations,
    cleanup="delete",
    retention_hours=48,
    by_node=True,
    promise=(
        "A snapshot is in the log before the first sample that names it, and is sent again unchanged every 5 minutes "
        "and before buffered samples that name it."
    ),
    example={
        "schema": 1,
        "cluster": "prod-us-east-1",
        "node": "gpu-node-1",
        "run_id": 1795218340000,
        "seq": 5,
        "ts_ms": 1795219151000,
        "containers": [
            {
                "namespace": "ml-team",
                "pod": "bert-0",
                "container": "pytorch",
                "resource": "nvidia.com/gpu",
                "device_ids": ["GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b"],
                "pod_uid": "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10",
                "claims": [
                    {
                        "claim": "gpu",
                        "namespace": "ml-team",
                        "driver": "gpu.nvidia.com",
                        "pool": "gpu-node-1",
                        "device": "gpu-0",
                    }
                ],
            }
        ],
    },
)
