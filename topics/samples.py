"""gpu.samples: one node's tick, every GPU of it as NVML answered."""

from typing import Annotated

import msgspec

from topics.topic import Cluster, Int, Node, Number, Topic, UInt, Version, about

State = Annotated[
    str,
    about(
        "ok: it answered. lost: the driver has lost it. timeout: it did not answer in time. The values of one whose "
        "word is not known count as any others; it is judged neither lost nor well.",
        words=("ok", "lost", "timeout"),
    ),
]


class Mig(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Where a MIG device is cut from."""

    uuid: Annotated[str, about("The MIG device's own UUID.")]
    parent_uuid: Annotated[str, about("The UUID of the GPU that it is a part of.")]
    gpu_instance: Annotated[UInt | None, about("The id of its GPU instance.", "none")] = None
    compute_instance: Annotated[UInt | None, about("The id of its compute instance.", "none")] = None
    profile: Annotated[str | None, about("The name of its profile, such as 1g.10gb.")] = None


class Process(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A process on a device."""

    pid: Annotated[UInt, about("Its process id on the host.", "none")]
    pod_uid: Annotated[str | None, about("The UID of the pod that its cgroup names.")] = None
    container_id: Annotated[str | None, about("The id of the container that its cgroup names.")] = None
    memory_used_bytes: Annotated[UInt | None, about("The device memory that it uses.", "bytes")] = None
    sm_utilization_ratio: Annotated[
        Number | None, about("The share of the time in which it used the streaming multiprocessors.", "0-1")
    ] = None
    job_id: Annotated[str | None, about("The id of the batch job (Slurm) that it belongs to.")] = None
    service: Annotated[
        str | None,
        about(
            "Set if it computes for the processes of others: mps is an MPS server. A later version may "
            "have other words."
        ),
    ] = None


class Job(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A job of a scheduler without Kubernetes (Slurm) that uses the device."""

    id: Annotated[str, about("The scheduler's id of it.")]
    user: Annotated[str | None, about("Whose job it is.")] = None
    partition: Annotated[str | None, about("The scheduler's partition that it runs in.")] = None
    account: Annotated[str | None, about("Whom it is charged to.")] = None


class Event(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Something that happened on the device since the tick before."""

    kind: Annotated[str, about("What it was: xid is an XID error. A later version may have other words.")]
    code: Annotated[Int | None, about("The number of the XID error.", "none")] = None
    ts_ms: Annotated[UInt | None, about("When it happened.", "ms since the epoch")] = None
    allocations_seq: Annotated[
        UInt | None,
        about(
            "The snapshot of gpu.allocations in force at its time, of the tick's run and not below that "
            "of the tick before. Without one it is that of the tick.",
            "none",
        ),
    ] = None


class Device(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A GPU or a MIG device."""

    uuid: Annotated[str, about("The device's UUID, as NVML says it.")]
    index: Annotated[
        UInt | None, about("The GPU's index on its node, which can change when the node starts again.", "none")
    ] = None
    vendor: Annotated[str, about("Who made it: always nvidia as yet.")] = "nvidia"
    model: Annotated[str | None, about("The model's name, as NVML says it.")] = None
    pci_bus_id: Annotated[str | None, about("Where it is on the PCI bus: DOMAIN:BUS:DEVICE.FUNCTION.")] = None
    minor: Annotated[UInt | None, about("N of /dev/nvidiaN.", "none")] = None
    state: State = "ok"
    mig: Annotated[Mig | None, about("What it is cut from, if it is a MIG device.")] = None
    metrics: Annotated[
        dict[str, Number | None],
        about(
            "Measured values by the keys of docs/reference/metrics.md. What is absent or null is not known.",
            "that of the key",
        ),
    ] = {}
    processes: Annotated[tuple[Process, ...] | None, about("The processes on it. Absent: not known.")] = None
    jobs: Annotated[
        tuple[Job, ...] | None,
        about("The batch jobs that have it. Empty: none; absent: that is not known, or there is a kubelet."),
    ] = None
    events: Annotated[tuple[Event, ...] | None, about("What happened on it since the tick before.")] = None
    info: Annotated[
        dict[str, str],
        about(
            "What the device is, each if it is known: serial, driver_version, cuda_version, "
            "vbios_version, mig_mode (enabled or disabled), processes_visible (true or false: whether its "
            "processes are in the producer's procfs; absent until it has had one)."
        ),
    ] = {}
    xids: Annotated[
        dict[str, UInt], about("How many XID errors it had since the producer's start, by their code.", "errors")
    ] = {}
    read_ms: Annotated[
        UInt | None,
        about("When the values were read, if that was before the tick. Absent: in the tick.", "ms since the epoch"),
    ] = None
    compute_slices: Annotated[
        UInt | None, about("Into how many parts the physical GPU can be cut, MIG on or off. 1: it can't be.", "slices")
    ] = None


class Sample(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One node's tick."""

    schema: Version
    cluster: Cluster
    node: Node
    run_id: Annotated[UInt, about("Identifies the run of the producer: each start has another one.", "none")]
    seq: Annotated[
        UInt, about("The number of the tick in its run, from 1. A gap is a tick that the producer dropped.", "none")
    ]
    ts_ms: Annotated[UInt, about("When the producer made the tick, by the node's clock.", "ms since the epoch")]
    allocations_seq: Annotated[
        UInt | None,
        about(
            "The seq of the snapshot in gpu.allocations, of the same run, that was in force. Absent: the "
            "node has no kubelet, or it has not answered yet.",
            "none",
        ),
    ] = None
    interval_ms: Annotated[UInt | None, about("How far apart ticks are meant to be.", "ms")] = None
    devices: Annotated[tuple[Device, ...], about("Every GPU and MIG device of the node.")] = ()


MISSED_INTERVALS = 3
LONGEST_INTERVAL_MS = 3_600_000


def silent_after_ms(interval_ms: int | None, at_least_ms: int) -> int:
    """After how long without a tick a node is silent: three of its intervals, but not less than this.

    ``interval_ms`` is that of its last tick; more than an hour counts as an hour.
    """
    return max(at_least_ms, MISSED_INTERVALS * min(interval_ms or 0, LONGEST_INTERVAL_MS))


def silent_after_s(interval_ms: int | None, at_least_s: float) -> float:
    """The same in seconds."""
    return max(at_least_s, silent_after_ms(interval_ms, 0) / 1000)


TOPIC = Topic(
    name="gpu.samples",
    record=Sample,
    cleanup="delete",
    retention_hours=24,
    promise=(
        "In order per node. A gap in seq is a tick that the producer dropped. allocations_seq names a snapshot of the "
        "same run that the broker acknowledged before this tick was sent, in an event likewise; null means that the "
        "node has no kubelet, or that it has not answered since the producer's start."
    ),
)
