"""``gpu_usage_*_seconds``: writes one partition of gpu.usage, a sample for each final hour.

In: records, the hours of a holder in order. Out: requests, dead letters, offsets.
State: none. A record is one sample of each of its series, at the end of its hour. The labels have everything that the
record's key has, except the hour, so no two records have a sample in common, and none waits for another. A sample can't
be rewritten. So an hour is not written before it is final, and the record of a replay, which has a higher generation,
is dropped and counted; `gpustream usage` shows it.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec

from delivery.dead_letters import Record
from sinks.alerts import batches
from sinks.consumer import Handler
from sinks.outcomes import Undecodable, decoded
from sinks.remote_write.partition import RemoteWriteShared
from sinks.remote_write.samples import SampleWriter, Written
from sinks.series.labels import (
    MAX_LABELS,
    DeviceIdentity,
    HolderIdentity,
    labels,
    node_of,
    nonempty,
    tenant_labels,
)
from sinks.series.model import Row, SampleGroup, SeriesSet
from sinks.series.relabel import NO_RELABELLING, Relabelling
from topics.attributed import JOB
from topics.catalogue import USAGE
from topics.metric import Labels
from topics.profiles import LabelNames
from topics.samples import Job
from topics.topic import UInt, decoder
from topics.usage import HOURS, Usage

REPLAYED = "replayed"
"""The reason for dropping a record of a higher generation: the first final one has been written."""

_OWN_LABELS = 6
"""The most labels that usage adds to those of a device's series."""

_HELD, _FREE = (
    tuple([Row(USAGE[key].name, (), "gauge", USAGE[key].help, primary=False) for key in keys])
    for keys in (("held", "used", "idle", "energy", "held_gpu"), ("free", "energy", "free_gpu"))
)

_decode = decoder(Usage)


class _Head(msgspec.Struct, frozen=True):
    """Decides whether a record is written at all; most are not, and are not decoded further."""

    generation: UInt
    final: bool


_decode_head = decoder(_Head)


def group_of(usage: Usage, names: LabelNames, max_labels: int = MAX_LABELS) -> SampleGroup | None:
    """The samples of an hour: seconds of the device, and joules. None if the hour is neither held nor free."""
    if not usage.device_ms or usage.category not in ("held", "free"):
        return None
    is_held = usage.category == "held"
    only_held = (usage.used_us / 1_000_000, usage.idle_ms / 1000) if is_held else ()
    values = (usage.device_ms / 1000, *only_held, usage.energy_mj / 1000, usage.slice_ms / usage.of / 1000)
    series = SeriesSet(usage_labels(usage, names, max_labels), _HELD if is_held else _FREE, "usage")
    return SampleGroup(series, usage.end_ms, values)


def usage_labels(usage: Usage, names: LabelNames, max_labels: int = MAX_LABELS) -> Labels:
    """The labels of the held device's series, and the others that make records distinct.

    A batch job has its own labels and those of a workload, and none of a pod.
    """
    is_mig, workload = usage.uuid != usage.gpu_uuid, usage.workload
    holder = job = None
    if workload is not None and workload.kind == JOB:
        job = Job(workload.name, usage.labels.get("user"), usage.labels.get("partition"), usage.labels.get("team"))
    elif usage.namespace is not None and usage.pod is not None:
        pod = usage.namespace, usage.pod, usage.pod_uid, usage.container
        holder = HolderIdentity(*pod, None, None, None, workload, tuple(tenant_labels(usage.labels, {})))
    parent = usage.gpu_uuid if is_mig else None
    device = DeviceIdentity(node_of(usage), usage.uuid, parent, model=usage.model, holder=holder, job=job)
    own = {
        "gpu_mig_uuid": usage.uuid if is_mig else None,
        "k8s_node_name": usage.node,
        "k8s_pod_uid": None if job else usage.pod_uid,
        "job_partition": job.partition if job else None,
        "k8s_workload_kind": workload.kind if workload else None,
        "k8s_workload_name": workload.name if workload else None,
        "team": usage.team,
    }
    return tuple(sorted((dict(nonempty(own.items())) | dict(labels(names, device, max_labels - _OWN_LABELS))).items()))


class UsagePartition(Handler):
    """The handler of a partition. It keeps nothing: an hour that is sent again is the same sample."""

    def __init__(
        self, names: LabelNames, max_labels: int, shared: RemoteWriteShared, relabelling: Relabelling = NO_RELABELLING
    ) -> None:
        self._names, self._max_labels, self._relabelling = names, max_labels - relabelling.more_labels, relabelling
        self._max_records = max(1, shared.max_samples // len(_HELD))
        self._writer = SampleWriter(shared, "gpustream_remote_write_usage_samples_refused_total")

    async def deliver(self, records: Sequence[Record], abandon: asyncio.Event) -> AsyncGenerator[int]:
        """Write the final hours, batch by batch."""
        hours = [self._read(record) for record in records]
        for batch in batches(hours, self._max_records, key=lambda hour: hour.groups and hour.groups[0].series.labels):
            await self._writer.finish(batch, abandon)
            yield batch[-1].record.offset + 1

    def _read(self, record: Record) -> Written:
        """The samples of a record, or its outcome if it has none."""
        if record.value is None:
            return Written(record)
        try:
            head = decoded(record, _decode_head, HOURS.name)
            if not head.final:
                return Written(record)
            if head.generation:
                return Written(record, None, "dropped", REPLAYED)
            usage = decoded(record, _decode, HOURS.name)
            if record.key != usage.key.encode():
                raise Undecodable(f"not a record of {HOURS.name}: its key is not that of its window")
        except Undecodable as error:
            return Written(record, None, "dead_lettered", str(error))
        group = group_of(usage, self._names, self._max_labels)
        relabelled = group and self._relabelling.group(group)
        return Written(record, [relabelled] if relabelled else None)
