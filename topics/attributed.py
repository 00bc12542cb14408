"""gpu.attributed: the sample, with who held each device at that time and the workload that owns it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, Protocol, TypeVar

import msgspec

from topics.samples import Device, Event, Job, Sample
from topics.topic import Name, Number, Topic, UInt, Version, about
from topics.workloads import UnwellDevice

Attribution = Annotated[
    str,
    about(
        "What the holders rest on: exact is the snapshot that the sample names, late the last one "
        "known because that one never came, none is nothing. If the word is not known, the holders "
        "count and are not taken for exact.",
        words=("exact", "late", "none"),
    ),
]


class Workload(msgspec.Struct, frozen=True, gc=False):
    """The top of a pod's owner chain."""

    kind: Annotated[str, about("Its kind, such as Job or Deployment; SlurmJob for a batch job.")]
    name: Annotated[str, about("Its name.")]


class Parts(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What of a device that is held is one holder's, or nobody's."""

    utilization_ratio: Annotated[Number | None, about("The part of the device's utilization.", "0-1")] = None
    memory_used_bytes: Annotated[Number | None, about("The part of its memory in use.", "bytes")] = None
    power_watts: Annotated[Number | None, about("The part of its power.", "W")] = None


DIVIDED = {
    "utilization_ratio": "gpu_utilization_ratio",
    "memory_used_bytes": "memory_used_bytes",
    "power_watts": "power_watts",
}
"""The metric of which each field of :class:`Parts` is a part."""


class Holder(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A container that holds a device. At most one of ``job``, ``statefulset`` and ``deployment`` is set.

    On a node without a kubelet it is a batch job: its id is ``pod`` and ``pod_uid``, its partition ``namespace``, and
    ``workload`` is a ``SlurmJob``.
    """

    namespace: Annotated[str, about("The pod's namespace; a batch job's partition.")]
    pod: Annotated[str, about("The pod's name; a batch job's id.")]
    pod_uid: Annotated[str | None, about("The pod's UID; a batch job's id.")] = None
    container: Annotated[str | None, about("The container's name.")] = None
    resource: Annotated[str | None, about("The resource that it got the device by, such as nvidia.com/gpu.")] = None
    workload: Annotated[Workload | None, about("The top of the pod's owner chain, if it is known.")] = None
    job: Annotated[str | None, about("The Job that the pod belongs to.")] = None
    statefulset: Annotated[str | None, about("The StatefulSet that the pod belongs to.")] = None
    deployment: Annotated[str | None, about("The Deployment that the pod belongs to.")] = None
    labels: Annotated[
        dict[str, str], about("The pod's labels, by name; of a batch job: team (its account), user and partition.")
    ] = {}
    annotations: Annotated[dict[str, str], about("The pod's annotations, by name.")] = {}
    namespace_labels: Annotated[dict[str, str], about("The labels of the pod's namespace, by name.")] = {}
    parts: Annotated[
        Parts | None,
        about(
            "What of the device is this pod's, if that is known. Of several containers of a pod only the first has it."
        ),
    ] = None
    observed: Annotated[
        bool, about("Whether the kubelet did not give it the device, but a process of the pod runs there.")
    ] = False
    pod_unknown: Annotated[
        bool,
        about(
            "Whether gpu.workloads knows the node's pods, and up to two seconds after the sample not this "
            "one. Its workload and labels are then not known, and its UID only if the kubelet says it."
        ),
    ] = False
    waiting: Annotated[
        str | None, about("Why a container of the pod that was restarted waits, such as CrashLoopBackOff.")
    ] = None
    restarts: Annotated[UInt | None, about("How often that container was restarted.", "none")] = None


JOB = "SlurmJob"
CRASH_LOOP = "CrashLoopBackOff"
"""The reason why a container waits that keeps crashing."""


def holder_of_job(job: Job) -> Holder:
    """A batch job as the holder of its devices: its partition is the namespace, its account the team."""
    labels = {"team": job.account, "user": job.user, "partition": job.partition}
    return Holder(
        job.partition or "slurm",
        job.id,
        pod_uid=job.id,
        workload=Workload(JOB, job.id),
        labels={name: value for name, value in labels.items() if value},
    )


class HoldingPod(NamedTuple):
    """The identity of a pod that holds a device: a pod that was created again under its name has another UID."""

    namespace: str
    pod: str
    pod_uid: str | None


class PodRef(Protocol):
    """The fields that identify the pod of a holder."""

    @property
    def namespace(self) -> str: ...
    @property
    def pod(self) -> str: ...
    @property
    def pod_uid(self) -> str | None: ...


class OwnedPodRef(PodRef, Protocol):
    """The same, and the workload, which is that of no pod if the holder is a batch job."""

    @property
    def workload(self) -> Workload | None: ...


H = TypeVar("H", bound=PodRef)
OwnedH = TypeVar("OwnedH", bound=OwnedPodRef)


def team_of(labels: Mapping[str, str], namespace_labels: Mapping[str, str], name: str) -> str | None:
    """The team of a pod, by the label of that name: the pod's own, else its namespace's."""
    return labels.get(name, namespace_labels.get(name))


def by_pod(holders: Sequence[H]) -> dict[HoldingPod, list[H]]:
    """The holders grouped by pod, in the order of the first holder of each: a pod may have several containers.

    A holder without a UID belongs to the pod of its name with a UID, if there is one.
    """
    if len(holders) == 1:
        (holder,) = holders
        return {HoldingPod(holder.namespace, holder.pod, holder.pod_uid): [holder]}
    pods: dict[HoldingPod, list[H]] = {}
    for holder in holders:
        pods.setdefault(HoldingPod(holder.namespace, holder.pod, holder.pod_uid), []).append(holder)
    for pod in [pod for pod in pods if pod.pod_uid is None] if len(pods) > 1 else ():
        same_name = next((other for other in pods if other[:2] == pod[:2] and other is not pod), None)
        if same_name is not None:
            pods[same_name] += pods.pop(pod)
    return pods


def pods_of(holders: Sequence[OwnedH]) -> dict[HoldingPod, list[OwnedH]]:
    """The pods that hold a device, each with its holders; none for a batch job, which has labels of its own."""
    workload = holders[0].workload if holders else None
    return {} if workload is not None and workload.kind == JOB else by_pod(holders)


class AttributedEvent(Event, frozen=True, gc=False, omit_defaults=True):
    """Something that happened on the device, and who held the device then."""

    holders: Annotated[
        tuple[Holder, ...] | None,
        about("Who held the device then, only if they are others than the device's. Empty: nobody held it."),
    ] = None
    attribution: Annotated[
        Attribution | None, about("What these holders rest on, if that differs from the device's.")
    ] = None

    def held_by(self, device_holders: tuple[Holder, ...]) -> tuple[Holder, ...]:
        """The holders of the device when the event came."""
        return device_holders if self.holders is None else self.holders


class AttributedDevice(Device, frozen=True, gc=False, omit_defaults=True):
    """A device of a sample and its holders. The holders' parts and ``unattributed`` add up to the device."""

    events: Annotated[tuple[AttributedEvent, ...] | None, about("What happened on it since the tick before.")] = None
    holders: Annotated[tuple[Holder, ...], about("Who holds it. Empty: nobody is known to.")] = ()
    unattributed: Annotated[Parts | None, about("What of a device that is held is no holder's, if that is known.")] = (
        None
    )
    split_scaled: Annotated[
        bool, about("Whether the processes' sum was more than the device, and their parts were scaled down.")
    ] = False
    conflict: Annotated[
        str | None,
        about(
            "What the processes say otherwise than the kubelet: unallocated_process (a pod's process on a "
            "device that it was not given; the pod is a holder with observed if it is known) or no_pod (a "
            "process of no pod on a device that pods hold). A later version may have other words."
        ),
    ] = None
    attribution: Annotated[Attribution | None, about("What its holders rest on, if that differs from the tick's.")] = (
        None
    )


class AttributedSample(Sample, frozen=True, gc=False, kw_only=True):
    """A node's tick with holders."""

    offset: Annotated[UInt, about("The sample's offset in its partition of gpu.samples.", "none")]
    logged_ms: Annotated[UInt | None, about("When the broker wrote the sample there.", "ms since the epoch")] = None
    attribution: Attribution
    node_labels: Annotated[dict[str, str], about("The node's labels, by name.")] = msgspec.field(default_factory=dict)
    devices: Annotated[
        tuple[AttributedDevice, ...], about("Every GPU and MIG device of the node, with its holders.")
    ] = ()
    unwell: Annotated[
        tuple[UnwellDevice, ...],
        about(
            "What the API server says of the node's devices that are not well, each by its UUID as far as "
            "it is known, also of those that are in no tick any more."
        ),
    ] = ()


class _DeviceAttribution(Protocol):
    @property
    def attribution(self) -> Attribution | None: ...


class AttributedTick(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The fields of :class:`AttributedSample` that every reader decodes."""

    schema: Version
    cluster: Name
    node: Name
    run_id: UInt
    seq: UInt
    ts_ms: UInt
    interval_ms: UInt | None = None
    offset: UInt
    attribution: Attribution

    def attribution_of(self, device: _DeviceAttribution) -> Attribution:
        """What the holders of a device of the tick rest on."""
        return device.attribution or self.attribution


TOPIC = Topic(
    name="gpu.attributed",
    record=AttributedSample,
    cleanup="delete",
    retention_hours=24,
    promise=(
        "In the partition number that the sample came from, in order per node. At least once: a record of the same run "
        "as the node's last one is a replay if its seq is not higher; one of another run is a replay if neither its "
        "offset is higher than the last one's nor its ts_ms higher than any before. A record that is no replay though "
        "its offset is not higher shows that gpu.samples was deleted and created again."
    ),
)
