"""gpu.samples: one node's tick, every GPU of it as NVML answered."""

from typing import Annotated

import msgspec

from topics.topic import Name, Number, Topic, UInt, Version

State = Annotated[
    str,
    msgspec.Meta(examples=["ok", "lost", "timeout"], description="ok, lost, timeout, or a word of a later version"),
]
"""How a device answered. One whose word is not known has values as any other, and is judged neither lost nor well."""


class Mig(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a MIG device is cut from: its own UUID, its parent GPU's, and the instances it is made of."""

    uuid: str
    parent_uuid: str
    gpu_instance: UInt | None = None
    compute_instance: UInt | None = None
    profile: str | None = None


class Process(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process on a device, by the host's PID, with the pod and container its cgroup names.

    ``service`` is set where it computes for the processes of others: "mps" is an MPS server.
    """

    pid: UInt
    pod_uid: str | None = None
    container_id: str | None = None
    memory_used_bytes: UInt | None = None
    sm_utilization_ratio: Number | None = None
    job_id: str | None = None
    service: str | None = None


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job of a scheduler without Kubernetes (Slurm) that uses the device. ``account`` is whom it is charged to."""

    id: str
    user: str | None = None
    partition: str | None = None
    account: str | None = None


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened on the device since the tick before, such as an XID error (``kind`` is "xid").

    ``allocations_seq`` names the snapshot in force at its time, of the tick's run and not below that of the tick
    before; without one it is that of the tick.
    """

    kind: str
    code: int | None = None
    ts_ms: UInt | None = None
    allocations_seq: UInt | None = None


class Device(msgspec.Struct, frozen=True, omit_defaults=True):
    """A GPU or a MIG device. ``metrics`` is keyed by the catalogue; what is absent or null is not known.

    ``info`` is what the device is, each where it is known: ``serial``, ``driver_version``, ``cuda_version``,
    ``vbios_version``, ``mig_mode`` ("enabled" or "disabled"), ``processes_visible`` ("true" or "false": whether its
    processes are in the producer's procfs; absent until it has had one). ``xids`` counts XID errors by code since the
    producer's start. ``read_ms`` is when the values were read, if that was before the tick; absent: in the tick.
    ``compute_slices``: into how many the physical GPU can be cut, MIG on or off; 1: it can't be. ``jobs`` that are
    empty: no batch job has it; absent: that is not known, or there is a kubelet.
    """

    uuid: str
    index: UInt | None = None
    vendor: str = "nvidia"
    model: str | None = None
    pci_bus_id: str | None = None
    minor: UInt | None = None
    state: State = "ok"
    mig: Mig | None = None
    metrics: dict[str, Number | None] = {}
    processes: tuple[Process, ...] | None = None
    jobs: tuple[Job, ...] | None = None
    events: tuple[Event, ...] | None = None
    info: dict[str, str] = {}
    xids: dict[str, UInt] = {}
    read_ms: UInt | None = None
    compute_slices: UInt | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One node's tick. ``seq`` counts the ticks of the run ``run_id`` from 1; ``allocations_seq`` names a snapshot.
    ``interval_ms`` is how far apart ticks are meant to be."""

    schema: Version
    cluster: Name
    node: Name
    run_id: UInt
    seq: UInt
    ts_ms: UInt
    allocations_seq: UInt | None = None
    interval_ms: UInt | None = None
    devices: tuple[Device, ...] = ()


TOPIC = Topic(
    name="gpu.samples",
    key="cluster/node",
    record=Sample,
    cleanup="delete",
    retention_hours=24,
    by_node=True,
    promise=(
        "In order per node. A gap in seq is a tick that the producer dropped. allocations_seq names a snapshot of the "
        "same run that the broker acknowledged before this tick was sent, in an event likewise; null means that the "
        "node has no kubelet."
    ),
    example={
        "schema": 1,
        "cluster": "prod-us-east-1",
        "node": "gpu-node-1",
        "run_id": 1795218340000,
        "seq": 812,
        "ts_ms": 1795219152000,
        "allocations_seq": 5,
        "interval_ms": 1000,
        "devices": [
            {
                "uuid": "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b",
                "index": 0,
                "vendor": "nvidia",
                "model": "NVIDIA H100 80GB HBM3",
                "pci_bus_id": "00000000:0A:00.0",
                "minor": 0,
                "state": "ok",
                "mig": None,
                "compute_slices": 7,
                "metrics": {"gpu_utilization_ratio": 0.93, "memory_used_bytes": 68719476736},
                "processes": [
                    {
                        "pid": 4242,
                        "pod_uid": "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10",
                        "container_id": "9f2e4c1ab0d3",
                        "memory_used_bytes": 68000000000,
                        "sm_utilization_ratio": 0.9,
                        "job_id": None,
                    }
                ],
            }
        ],
    },
)
