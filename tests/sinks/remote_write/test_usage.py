"""An hour of usage is one sample of each of its series, once it is final, whatever other records there are of it."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks.remote_write.usage import UsagePartition, group_of
from sinks.series.labels import MAX_LABELS
from tests.sinks.records import ConsumedRecord
from tests.sinks.remote_write.receivers import Receiver
from tests.sinks.remote_write.setup import SharedSetup
from topics.profiles import LABELS, LabelSet
from topics.usage import HOUR_MS, HOURS, Usage

START_MS = 1_795_132_800_000


def usage(**fields: Any) -> Usage:
    """The example of the topic, with other fields."""
    start_ms = fields.get("start_ms", START_MS)
    return msgspec.convert({**HOURS.example, "start_ms": start_ms, "end_ms": start_ms + HOUR_MS, **fields}, Usage)


def free(**fields: Any) -> Usage:
    """A record of a device that nobody holds."""
    no_holder = dict.fromkeys(("namespace", "pod", "pod_uid", "container", "workload", "team"))
    return usage(**{"category": "free", "labels": {}, "used_us": 0, **no_holder, **fields})


class Setup(SharedSetup):
    """A partition's handler between records and a receiver."""

    def __init__(self, receiver: Receiver | None = None, label_set: LabelSet = "otel") -> None:
        super().__init__(receiver, max_samples=100)
        self.handler = UsagePartition(LABELS[label_set], MAX_LABELS, self.shared)
        self.offset = 0

    async def deliver(self, *records: Usage | bytes) -> list[int]:
        """Give it records; returns the offsets that may be committed, in order."""
        batch = []
        for record in records:
            value, key = (
                (record, b"k") if isinstance(record, bytes) else (msgspec.json.encode(record), record.key.encode())
            )
            batch.append(ConsumedRecord(self.offset, value, key=key, topic=HOURS.name))
            self.offset += 1
        self.counted.read(len(batch))
        return [offset async for offset in self.handler.deliver(batch, asyncio.Event())]

    def values(self) -> dict[str, list[tuple[int, float]]]:
        """The stored points by name: the hours since the start of the first hour, and the value."""
        stored = self.receiver.values()
        return {name: [((ts - START_MS) // HOUR_MS, value) for ts, value in points] for name, points in stored.items()}


async def test_a_final_hour_is_a_sample_at_its_end() -> None:
    setup = Setup()
    held_hour = usage(device_ms=3_599_999, used_us=1_800_000_001, idle_ms=60_001, energy_mj=2_460_000_007)
    assert await setup.deliver(held_hour, free(device_ms=1, slice_ms=7, energy_mj=1)) == [2]
    assert setup.values() == {
        "gpu_usage_held_seconds": [(1, 3599.999)],
        "gpu_usage_used_seconds": [(1, 1800.000001)],
        "gpu_usage_idle_seconds": [(1, 60.001)],
        "gpu_usage_energy_joules": [(1, 2460000.007), (1, 0.001)],
        "gpu_usage_free_seconds": [(1, 0.001)],
        "gpu_usage_held_gpu_seconds": [(1, 3600.0)],
        "gpu_usage_free_gpu_seconds": [(1, 0.001)],
    }
    assert setup.count("records_delivered_total") == 2


async def test_a_mig_device_has_its_slices_part_of_a_gpus_time() -> None:
    setup = Setup()
    await setup.deliver(usage(uuid="MIG-1", slice_ms=2 * HOUR_MS, of=7), free(slice_ms=5 * HOUR_MS, of=7))
    assert setup.values()["gpu_usage_held_gpu_seconds"] == [(1, 2 * HOUR_MS / 7 / 1000)]
    assert setup.values()["gpu_usage_free_gpu_seconds"] == [(1, 5 * HOUR_MS / 7 / 1000)]


async def test_its_labels_are_those_of_the_device_with_its_holder_and_the_team() -> None:
    setup = Setup()
    await setup.deliver(usage(), free())
    held_hour, unheld_hour = (
        dict(next(s for s in setup.receiver.stored if ("__name__", f"gpu_usage_{name}_seconds") in s))
        for name in ("held", "free")
    )
    of_device = {
        "k8s_cluster_name": "prod-us-east-1",
        "k8s_node_name": "gpu-node-1",
        "host_name": "gpu-node-1",
        "service_name": "gpustream",
        "cloud_availability_zone": "us-east-1a",
        "gpu_uuid": "GPU-0f12ab34-5c6d-7e8f-9a0b-1c2d3e4f5a6b",
        "gpu_model": "NVIDIA H100 80GB HBM3",
    }
    assert held_hour == of_device | {
        "__name__": "gpu_usage_held_seconds",
        "k8s_namespace_name": "ml-team",
        "k8s_pod_name": "bert-0",
        "k8s_pod_uid": "1b6c0f0e-8a1d-4f0b-9d55-0f6f1c9b7a10",
        "k8s_container_name": "pytorch",
        "k8s_workload_kind": "Job",
        "k8s_workload_name": "bert-finetune-v3",
        "k8s_pod_label_team": "ml",
        "team": "ml",
    }
    assert unheld_hour == of_device | {"__name__": "gpu_usage_free_seconds"}


async def test_what_grows_and_what_nobody_had_is_not_written() -> None:
    setup = Setup()
    growing = [usage(revision=revision, final=False) for revision in range(3)]
    others = [
        free(category="unobserved"),
        free(category="lost"),
        usage(device_ms=0, slice_ms=0),
        free(category="later"),
    ]
    await setup.deliver(*growing, *others)
    assert setup.receiver.requests == 0
    assert setup.count("records_duplicate_total") == 7


async def test_what_a_replay_writes_again_is_left_out_and_counted() -> None:
    setup = Setup()
    await setup.deliver(usage(used_us=1_000_000))
    await setup.deliver(usage(used_us=2_000_000, generation=1))
    assert setup.values()["gpu_usage_used_seconds"] == [(1, 1.0)]
    assert setup.count("records_dropped_total", reason="replayed") == 1


async def test_hours_of_a_holder_are_written_in_order_and_one_that_comes_again_is_the_same_sample() -> None:
    setup = Setup()
    hours = [usage(start_ms=START_MS + number * HOUR_MS) for number in range(3)]
    assert await setup.deliver(*hours, hours[2]) == [1, 2, 3, 4]
    await setup.deliver(hours[2])
    assert setup.values()["gpu_usage_held_seconds"] == [(1, 3600.0), (2, 3600.0), (3, 3600.0)]
    assert setup.count("records_delivered_total") == 5


async def test_an_hour_that_is_too_old_for_the_receiver_is_dropped_with_the_reason() -> None:
    setup = Setup(Receiver(refuse=lambda sample: "too old sample" if sample.ts_ms <= START_MS + HOUR_MS else None))
    await setup.deliver(usage(), usage(start_ms=START_MS + HOUR_MS))
    assert setup.values()["gpu_usage_held_seconds"] == [(2, 3600.0)]
    assert setup.count("records_dropped_total", reason="too_old") == setup.count("records_delivered_total") == 1
    assert setup.count("usage_samples_refused_total", reason="too_old") == 5


async def test_an_hour_of_which_a_refused_series_is_left_out_is_delivered() -> None:
    used = ("__name__", "gpu_usage_used_seconds")
    setup = Setup(Receiver(refuse=lambda sample: "no" if used in sample.labels else None))
    hours = [START_MS + number * HOUR_MS for number in range(2)]
    await setup.deliver(*(usage(start_ms=start_ms) for start_ms in hours))
    assert setup.count("records_dead_lettered_total") == setup.count("records_delivered_total") == 1
    assert setup.values()["gpu_usage_held_seconds"] == [(1, 3600.0), (2, 3600.0)]
    assert setup.count("usage_samples_refused_total", reason="left_out") == 1


NO_SLICES = msgspec.json.encode({**HOURS.example, "of": 0, "final": True})


@pytest.mark.parametrize(
    "value", [b"{", b"{}", b'{"final": true, "generation": 0}', b'{"final": 1, "generation": 0}', NO_SLICES]
)
async def test_a_malformed_record_is_dead_lettered(value: bytes) -> None:
    setup = Setup()
    await setup.deliver(value, usage())
    assert setup.count("records_dead_lettered_total") == setup.count("records_delivered_total") == 1
    assert len(setup.sender.sent) == 1


async def test_a_record_under_another_key_is_dead_lettered() -> None:
    setup = Setup()
    await setup.deliver(msgspec.json.encode(usage()))
    assert setup.count("records_dead_lettered_total") == 1


IDS = st.sampled_from(["a", "b", None])
RECORDS = st.builds(
    lambda node, uuid, holder, uid, container, category: (
        usage(node=node, uuid=uuid, gpu_uuid="GPU-1", pod=holder, pod_uid=uid, container=container)
        if category == "held"
        else free(node=node, uuid=uuid, gpu_uuid="GPU-1")
    ),
    st.sampled_from(["n-1", "n-2"]),
    st.sampled_from(["GPU-1", "MIG-1", "MIG-2"]),
    st.sampled_from(["a", "b"]),
    IDS,
    IDS,
    st.sampled_from(["held", "free"]),
)


@given(records=st.lists(RECORDS, min_size=2, max_size=6), label_set=st.sampled_from(list(LABELS)))
def test_no_two_keys_are_one_series(records: list[Usage], label_set: LabelSet) -> None:
    keys_by_series: dict[object, set[object]] = {}
    for record in records:
        group = group_of(record, LABELS[label_set])
        assert group is not None
        for row in group.series.rows:
            keys_by_series.setdefault((row.name, group.series.labels), set()).add(record.key)
    assert all(len(keys) == 1 for keys in keys_by_series.values())


@pytest.mark.parametrize("label_set", LABELS)
def test_a_batch_job_before_and_after_its_partition_is_known_is_two_series_of_an_hour(label_set: LabelSet) -> None:
    job = {"workload": {"kind": "SlurmJob", "name": "42"}, "pod": "42", "pod_uid": "42", "container": None}
    unknown = usage(**job, namespace="slurm", team=None, labels={})
    known = usage(**job, namespace="gpu", team=None, labels={"partition": "gpu"})
    groups = [group_of(record, LABELS[label_set]) for record in (unknown, known)]
    assert len({group.series.labels for group in groups if group is not None}) == 2


@pytest.mark.parametrize("label_set", LABELS)
def test_an_hour_of_a_batch_job_is_named_by_the_job_and_by_no_pod(label_set: LabelSet) -> None:
    identity = {"workload": {"kind": "SlurmJob", "name": "42"}, "pod": "42", "pod_uid": "42", "namespace": "gpu"}
    tenant_labels = {"team": "ml", "user": "ada", "partition": "gpu"}
    group = group_of(usage(**identity, container="", team="ada", labels=tenant_labels), LABELS[label_set])
    assert group is not None
    group_labels = dict(group.series.labels)
    assert (group_labels["k8s_workload_kind"], group_labels["k8s_workload_name"], group_labels["team"]) == (
        "SlurmJob",
        "42",
        "ada",  # of a stream with --team-label user
    )
    assert not {name for name in group_labels if "pod" in name or "namespace" in name or "container" in name}
    otel_only = {"job_id": "42", "job_user": "ada", "job_account": "ml"} if label_set == "otel" else {}
    job_labels = {name: value for name, value in group_labels.items() if name.startswith("job_")}
    assert job_labels == otel_only | {"job_partition": "gpu"}
