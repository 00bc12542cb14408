"""Helpers that make records of one node."""

from collections.abc import Sequence

from streams.attribution import join
from topics.allocations import Allocations, Container
from topics.samples import Device, Event, Process, Sample
from topics.workloads import NodeWorkloads, Owner, Pod

CLUSTER = "c"


def gpu(number: int) -> str:
    """The UUID of a GPU."""
    return f"GPU-{number:08x}-0000-4000-8000-000000000000"


def tick(
    seq: int,
    named: int | None,
    *,
    run_id: int = 1,
    ts_ms: int = 0,
    node: str = "n",
    gpus: int = 2,
    power: float = 0.0,
    processes: Sequence[tuple[Process, ...] | None] = (),
    events: Sequence[Event] = (),
) -> Sample:
    """A sample that names a snapshot; ``processes`` are those of its first GPUs, ``events`` of the first one."""
    happened = tuple(events) or None
    return Sample(
        schema=1,
        cluster=CLUSTER,
        node=node,
        run_id=run_id,
        seq=seq,
        ts_ms=ts_ms,
        allocations_seq=named,
        devices=tuple(
            [
                Device(
                    gpu(i),
                    index=i,
                    metrics={"power_watts": power},
                    processes=gpu_processes,
                    events=None if i else happened,
                )
                for i, gpu_processes in enumerate([*processes, *[None] * (gpus - len(processes))])
            ]
        ),
    )


def event(named: int | None, ts_ms: int, code: int = 31) -> Event:
    """An XID error that names a snapshot."""
    return Event("xid", code, ts_ms, named)


def process(uid: str | None, memory: int | None = 40, service: str | None = None) -> Process:
    """A process of the pod of that uid, or of none, with memory on its device."""
    return Process(1, pod_uid=uid, memory_used_bytes=memory, service=service)


LONG_AFTER_MS = 1 << 50
"""A log time that is later than that of any record of the workloads."""


def pending(
    sample: Sample,
    offset: int = 0,
    at_s: float = 0.0,
    *,
    logged_ms: int = LONG_AFTER_MS,
    watermark_ms: float = float("inf"),
) -> join.PendingTick:
    """A sample that was read at a time, when the watermark was ``watermark_ms``: by default infinite."""
    return join.PendingTick(sample, offset, at_s, logged_ms, watermark_ms)


def logged(record: NodeWorkloads, logged_ms: int = 0) -> join.LoggedWorkloads:
    """A record of the workloads that was read."""
    return join.LoggedWorkloads(record, logged_ms)


def snapshot(seq: int, *containers: Container, run_id: int = 1, ts_ms: int = 0, node: str = "n") -> Allocations:
    """A snapshot of these containers."""
    return Allocations(
        schema=1, cluster=CLUSTER, node=node, run_id=run_id, seq=seq, ts_ms=ts_ms, containers=tuple(containers)
    )


def container(pod: str, *ids: str, name: str = "main", namespace: str = "ns") -> Container:
    """A container that was given devices."""
    return Container(namespace, pod, name, resource="nvidia.com/gpu", device_ids=tuple(ids))


def pod(
    name: str,
    *,
    uid: str = "",
    started: int | None = 0,
    ended: int | None = None,
    labels: dict[str, str] | None = None,
    owners: tuple[Owner, ...] = (),
) -> Pod:
    """A pod; by default it has always run."""
    return Pod("ns", name, uid or f"uid-{name}", started_ms=started, ended_ms=ended, labels=labels or {}, owners=owners)


def workloads(
    seq: int, *pods: Pod, ts_ms: int = 0, epoch: int = 1, labels: dict[str, str] | None = None, node: str = "n"
) -> NodeWorkloads:
    """A record of the pods of a node."""
    return NodeWorkloads(
        schema=1, cluster=CLUSTER, node=node, epoch=epoch, seq=seq, ts_ms=ts_ms, node_labels=labels or {}, pods=pods
    )
