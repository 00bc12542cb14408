"""A node that is stopped right after an XID error: the error reaches Kafka, under the pod that had the GPU then."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from delivery import topic_admin
from tests.eventually import eventually_sync
from tests.nvml.scripted import ScriptedNvml
from tests.producers.node import pod_resources
from tests.real.conftest import need
from tests.real.pipeline import Gpustream, read_all
from tests.real.resolver import find_compiler
from tests.real.servers import KafkaServer

NODE = "stopping"
GPUS = [f"GPU-5c41b7ed-0000-4000-8000-{number:012x}" for number in range(2)]


def test_an_error_since_the_last_tick_is_sent_at_the_stop_while_another_gpu_hangs(
    empty_kafka: KafkaServer, tmp_path: Path
) -> None:
    need(find_compiler)
    asyncio.run(topic_admin.create(empty_kafka.connection, partitions=2, replication_factor=1))
    nvml, socket = ScriptedNvml(tmp_path / "nvml", gpus=2), tmp_path / "kubelet.sock"
    with pod_resources.serving(socket, pod_resources.pods_on({GPUS[0]: "first"})) as kubelet:
        options = ("--interval", "5s", "--node", NODE, "--kafka", empty_kafka.address)
        paths = ("--pod-resources-socket", str(socket))
        node = Gpustream(tmp_path / "node", "produce", "node", *options, *paths, environment=nvml.environment())
        with node:
            eventually_sync(lambda: len(_records_of(empty_kafka, "gpu.samples")) >= 1)
            kubelet.reply = pod_resources.pods_on({GPUS[0]: "began-after-the-tick"})
            nvml.hang(1, "nvmlDeviceGetMemoryInfo", 30.0)
            nvml.hang(1, "nvmlDeviceGetMemoryInfo_v2", 30.0)
            calls = kubelet.calls
            nvml.xid(0, 79)
            eventually_sync(lambda: kubelet.calls > calls)
            kubelet.reply = pod_resources.pods_on({GPUS[0]: "came-after-the-error"})
            begin_s = time.monotonic()
            node.stop()
            took_s = time.monotonic() - begin_s

    samples = _records_of(empty_kafka, "gpu.samples")
    pods = {
        record["seq"]: [row["pod"] for row in record["containers"]]
        for record in _records_of(empty_kafka, "gpu.allocations")
    }
    events = [event for tick in samples for device in tick["devices"] for event in device.get("events", ())]
    assert took_s < 10
    assert [event["code"] for event in events] == [79]
    assert pods[events[0]["allocations_seq"]] == ["began-after-the-tick"]
    assert pods[samples[-1]["allocations_seq"]] == ["came-after-the-error"]


def _records_of(kafka: KafkaServer, topic: str) -> list[dict[str, Any]]:
    """The node's records, in order."""
    records = [json.loads(record.value) for record in asyncio.run(read_all(kafka.address, topic))]
    return sorted(
        (record for record in records if record["node"] == NODE), key=lambda record: (record["run_id"], record["seq"])
    )
