"""gpu.workloads: what the API server knows of a node's GPU pods: owners, labels, life times."""

import msgspec

from topics.allocations import Claim
from topics.topic import Name, Topic, UInt, Version

MAINTENANCE = "gpustream.dev/maintenance"
"""The annotation of a node, or the key of its taint, by which nobody is alerted of it. It is among its labels here."""


class Owner(msgspec.Struct, frozen=True, omit_defaults=True):
    """One link of a pod's owner chain."""

    api_version: str
    kind: str
    name: str
    uid: str | None = None


class Pod(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pod and its owner chain, from the pod upward. It ran in [started_ms, ended_ms).

    ``owners_complete`` false: the chain could not be read to its top, or not yet, and no workload is named by it. An
    owner that the API server does not let be read counts as the top. Among its ``annotations`` are those of
    its namespace under ``gpustream.dev/`` that it has not itself.
    """

    namespace: str
    name: str
    uid: str
    phase: str | None = None
    started_ms: UInt | None = None
    ended_ms: UInt | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    namespace_labels: dict[str, str] = {}
    owners: tuple[Owner, ...] = ()
    owners_complete: bool = True


class DraDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device of a resource slice, and the UUID that NVML knows it by."""

    driver: str
    pool: str
    device: str
    uuid: str


class UnwellDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device that is not well, as the API server has it.

    ``device_id`` is the device plugin's, or the UUID of a device of a resource slice. ``health`` is ``Unhealthy`` if a
    pod's ``allocatedResourcesStatus`` says so, with its ``message`` if it has one. ``taint`` is ``KEY=VALUE:EFFECT``,
    as kubectl writes it: of the resource slice, or of a DeviceTaintRule.
    """

    device_id: str
    health: str | None = None
    message: str | None = None
    taint: str | None = None

    def __str__(self) -> str:
        if self.taint is not None:
            return f"taint {self.taint}"
        return f"{self.health}: {self.message}" if self.message else str(self.health)


class NodeWorkloads(msgspec.Struct, frozen=True, kw_only=True):
    """A node's GPU pods. ``epoch`` is the leader's that wrote it: readers drop records of an older one.

    ``admin_claims`` are the devices that claims have only to look at them (``adminAccess``), as monitoring does: who
    has such a claim does not hold its device. ``removed``: the node is no longer in the cluster; nothing more is said
    of it unless it comes back. ``unwell``: what is said of its devices that are not well; most nodes have none.
    """

    schema: Version
    cluster: Name
    node: Name
    epoch: UInt
    seq: UInt
    ts_ms: UInt
    node_labels: dict[str, str] = {}
    pods: tuple[Pod, ...] = ()
    dra_devices: tuple[DraDevice, ...] = ()
    admin_claims: tuple[Claim, ...] = ()
    removed: bool = False
    unwell: tuple[UnwellDevice, ...] = ()


TOPIC = Topic(
    name="gpu.workloads",
    key="cluster/node",
    record=NodeWorkloads,
    cleanup="delete",
    retention_hours=48,
    by_node=True,
    promise="Sent when it changes and every 5 minutes. A pod that ended is in the record that ends it, and for 30"
    " minutes in those of every 5 minutes.",
    example={
        "schema": 1,
        "cluster": "prod-us-east-1",
        "node": "gpu-node-1",
        "epoch": 3,
        "seq": 17,
        "ts_ms": 1795219150000,
        "node_labels": {"topology.kubernetes.io/zone": "us-east-1a"},
        "pods": [
            {
                "namespace": "ml-team",
                "name": "bert-0",
                "uid": "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10",
                "phase": "Running",
                "started_ms": 1795218000000,
                "ended_ms": None,
                "labels": {"app": "bert"},
                "annotations": {},
                "namespace_labels": {},
                "owners": [
                    {"api_version": "batch/v1", "kind": "Job", "name": "bert-finetune-v3", "uid": "77aa0c1e-3b2d-4a5f"}
                ],
            }
        ],
        "dra_devices": [
            {
                "driver": "gpu.nvidia.com",
                "pool": "gpu-node-1",
                "device": "gpu-0",
                "uuid": "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b",
            }
        ],
    },
)
