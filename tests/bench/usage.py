"""Who used what on published traces: gpu.usage beside integer sums of the trace's own files, and the idle rule.

    python -m tests.bench.usage [CLUSTERDATA]

CLUSTERDATA is a clone of https://github.com/alibaba/clusterdata, its archives packed or not. Without it, made traces of
the same formats are used: they show that it works, and say nothing of the world.

Equal: a trace is sent through Kafka (``produce replay``), joined and counted (both streams), and what gpu.usage has for
each pod is compared with sums that are made here of the trace's files, in integers. Windows that are not final when the
trace ends, the last hour of it, are left out.

Idle: the truth is what each container of alibaba-genai logged itself: no inference and no loading of a model for so
long, while it held its GPU. The readings of the GPU are another file. Each container at each reading is a claim to be
right about.
"""

import asyncio
import csv
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from delivery import topic_admin
from producers.replay import alibaba, trace
from producers.replay.trace import Rows
from streams.alerts.rules.rules_file import load
from tests.bench.idle import IDLE_BELOW, Claims, Counted, Query, Score, Stream, rows, rules
from tests.producers.replay import trace_files
from tests.real.pipeline import Gpustream, lag, read_all
from tests.real.servers import KafkaServer
from topics.attributed import AttributedSample
from topics.topic import decoder
from topics.usage import HOUR_MS, HOURS, Usage

GENAI, GPU_2023 = "cluster-trace-v2026-GenAI", "cluster-trace-gpu-v2023"
PARTITIONS = 4
FINAL_AFTER_MS = 20 * 60_000
LOGS = (
    "pipeline_inference_data_anon.csv",
    "model_predict_data_anon.csv",
    "pipeline_update_latency_anon.csv",
    "basemodel_update_latency_anon.csv",
    "lora_update_latency_anon.csv",
    "controlnet_latency_data_anon.csv",
)
"""What containers logged: each row is an inference or the loading of a part of a model."""

FIELDS = ("device_ms", "used_us", "idle_ms", "memory_byte_ms")

Sums = Counter[str]
"""Integers by the names of their fields."""


def main(folder: Path | None) -> None:
    """Prints both tables."""
    with tempfile.TemporaryDirectory() as directory:
        if folder is None:
            folder = Path(directory) / "made"
            make(folder)
            sys.stdout.write("Made traces: they say nothing of the world.\n\n")
        sys.stdout.write("\n".join(rows(idle(folder / GENAI))) + "\n\n")
        sys.stdout.write("\n".join(equal(folder, Path(directory))) + "\n")


# -- equal


def equal(folder: Path, directory: Path) -> Iterator[str]:
    """A row for each trace."""
    yield "| trace | ticks | GPU-hours | seconds | compared | equal | GPUs' hours that add up |"
    yield "|---|---|---|---|---|---|---|"
    checks = {"alibaba-genai": (GENAI, of_genai), "alibaba-gpu-2023": (GPU_2023, of_gpu_2023)}
    for name, (sub, truth) in checks.items():
        began_s = time.monotonic()
        ticks, records = through_kafka(directory / name, name, folder / sub)
        seconds = time.monotonic() - began_s
        final = [record for record in records if record.final]
        expected = truth(folder / sub, records)
        hours = sum(record.device_ms for record in final if record.category == "held") / HOUR_MS
        sums_of: dict[tuple[str, ...], Sums] = defaultdict(Counter)
        for record in final:
            if record.category == "held":
                for key in ((record.pod or "", str(record.start_ms)), (record.pod or "",)):
                    sums_of[key].update({field: getattr(record, field) for field in FIELDS})
        agreeing = sum(
            all(sums_of[key][field] == sum_ for field, sum_ in sums.items()) for key, sums in expected.items()
        )
        closed = Counter[bool]()
        windows: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
        for record in final:
            windows[record.gpu_uuid, record.start_ms][0] += record.slice_ms
            windows[record.gpu_uuid, record.start_ms][1] = record.of * HOUR_MS
        closed.update(slice_ms == whole for slice_ms, whole in windows.values())
        yield (
            f"| {name} | {ticks:,} | {hours:,.1f} | {seconds:.0f} | {len(expected):,} | {agreeing:,} |"
            f" {closed[True]:,} of {len(windows):,} |"
        )


def through_kafka(directory: Path, name: str, folder: Path) -> tuple[int, list[Usage]]:
    """Send a trace through Kafka and both streams: how many ticks it had, and the records that count."""
    with ExitStack() as running:
        kafka = running.enter_context(KafkaServer(directory / "kafka", heap="1g"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=PARTITIONS, replication_factor=1))
        options = ("--kafka", kafka.address)
        for stream, more in {"attribution": (), "usage": ("--team-label", "qos")}.items():
            running.enter_context(Gpustream(directory / stream, "stream", stream, *options, *more))
        replay = ("produce", "replay", *options, "--trace", name, str(folder), "--listen", "off")
        subprocess.run([sys.executable, "-m", "gpustream", *replay], check=True)
        for topic, group in (("gpu.samples", "gpustream-attribution"), ("gpu.attributed", "gpustream-usage")):
            while asyncio.run(lag(kafka.address, group, [topic])):
                time.sleep(1.0)
        ticks = len(asyncio.run(read_all(kafka.address, "gpu.samples")))
        decode, newest = decoder(Usage), dict[object, Usage]()
        for record in asyncio.run(read_all(kafka.address, HOURS.name)):
            usage = decode(record.value)
            if usage.key not in newest or newest[usage.key].order < usage.order:
                newest[usage.key] = usage
        return ticks, list(newest.values())


def of_genai(folder: Path, records: list[Usage]) -> dict[tuple[str, ...], Sums]:
    """The integer sums of each container's readings, by the hour: a reading stands for the time since the one before,
    at most three intervals of 57 s; of that time the GPU computed as many millionths as its duty cycle says."""
    read: dict[str, dict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for column, file in (("duty", trace_files.DUTY), ("memory", trace_files.MEMORY)):
        for row in _rows(folder, file):
            read[row["container_ip"]][round(float(row["timestamp_anon"]) * 1000)][column] = row["value"]
    expected: dict[tuple[str, ...], Sums] = defaultdict(Counter)
    for address, readings in read.items():
        times = sorted(readings)
        final_ms = (times[-1] - FINAL_AFTER_MS) // HOUR_MS * HOUR_MS
        for before_ms, ts_ms in itertools.pairwise(times):
            since_ms, values = max(before_ms, ts_ms - 3 * 57_000), readings[ts_ms]
            ratio = float(values["duty"]) / 100 if "duty" in values else 0.0
            millionths = round(ratio * 1_000_000)
            for hour_ms in range(since_ms // HOUR_MS * HOUR_MS, min(ts_ms, final_ms), HOUR_MS):
                start_ms, end_ms = max(since_ms, hour_ms), min(ts_ms, hour_ms + HOUR_MS)
                lasted_ms = end_ms - start_ms
                expected[f"pod-{address}", str(hour_ms)].update(
                    device_ms=lasted_ms,
                    used_us=millionths * (end_ms - since_ms) // 1000 - millionths * (start_ms - since_ms) // 1000,
                    idle_ms=lasted_ms if "duty" in values and ratio < IDLE_BELOW else 0,
                    memory_byte_ms=lasted_ms * int(float(values.get("memory", "0"))),
                )
    return expected


def of_gpu_2023(folder: Path, records: list[Usage]) -> dict[tuple[str, ...], Sums]:
    """What each pod had, if all its hours are final: its GPUs for as long as it ran, or its part of one's time used."""
    expected: dict[tuple[str, ...], Sums] = {}
    open_pods = {record.pod for record in records if not record.final}
    placed = {record.pod for record in records}
    for row in _rows(folder, trace_files.PODS):
        if int(row["num_gpu"]) and row["scheduled_time"] and row["name"] in placed - open_pods:
            ran_ms = (int(row["deletion_time"]) - int(float(row["scheduled_time"]))) * 1000
            milli = int(row["num_gpu"]) * int(row["gpu_milli"])
            whole = {"device_ms": ran_ms * int(row["num_gpu"])} if int(row["gpu_milli"]) == 1000 else {}
            expected[(row["name"],)] = Counter({"used_us": ran_ms * milli, **whole})
    return expected


def _rows(folder: Path, file: str) -> Iterator[dict[str, str]]:
    """The rows of a table, by the names of its columns."""
    with ExitStack() as files:
        yield from csv.DictReader(trace.text_of(folder, file, files))


# -- idle


def idle(folder: Path) -> dict[str, Score]:
    """How right each is, over all readings."""
    (rule,) = load(None).of("held_idle")
    busy: dict[str, set[int]] = defaultdict(set)
    for file in LOGS:
        for row in _rows(folder, file):
            busy[row["container_ip"]].add(round(float(row["timestamp_anon"]) * 1000))
    query = f"avg_over_time(gpu_utilization[{rule.for_ms // 60_000}m]) < {IDLE_BELOW}"
    claimants: dict[str, Callable[[], Stream | Query]] = {
        "GPUHeldIdle": lambda: Stream(rules(rule.for_ms, rule.grace_ms)),
        query: lambda: Query(rule.for_ms, held=False),
    }
    counted = {name: Counted() for name in claimants}
    nodes: dict[str, dict[str, Stream | Query]] = {}
    first_ms: dict[str, int] = {}
    worked_ms: dict[str, int] = {}
    readings = alibaba.genai(folder, Rows())
    for seq, tick in enumerate(readings.ticks, 1):
        address = tick.node.removeprefix("node-")
        since_ms = first_ms.setdefault(address, tick.ts_ms)
        if tick.ts_ms in busy[address]:
            worked_ms[address] = tick.ts_ms
        since_ms = max(since_ms, worked_ms.get(address, since_ms))
        holder = {"namespace": alibaba.NAMESPACE, "pod": f"pod-{address}", "pod_uid": address, "container": "main"}
        head = {"schema": 1, "cluster": "c", "node": tick.node, "run_id": 1, "seq": seq, "ts_ms": tick.ts_ms}
        devices = [{**device, "holders": [holder]} for device in tick.devices]
        fields = {
            **head,
            "interval_ms": readings.interval_ms,
            "offset": seq,
            "attribution": "exact",
            "devices": devices,
        }
        sample = msgspec.convert(fields, AttributedSample)
        pod = holder["namespace"], holder["pod"]
        true: Claims = {(devices[0]["uuid"], pod)} if tick.ts_ms - since_ms >= rule.for_ms else set()
        for name, claimant in nodes.setdefault(tick.node, {name: make() for name, make in claimants.items()}).items():
            counted[name].count(claimant.see(sample), true)
    return {name: contender.score() for name, contender in counted.items()}


# -- made traces


def make(folder: Path) -> None:
    """Traces of both formats, of six hours."""
    chance = random.Random(7)
    duty, memory, logged = list[str](), list[str](), list[str]()
    for container in range(12):
        address, busy = f"{container:032x}", False
        for number in range(380):
            seconds = 1_662_858_720 + 57 * number
            busy = chance.random() < (0.9 if busy else 0.05)
            if chance.random() < 0.98:
                duty.append(f"{chance.choice((33.333333333333336, 80.0)) if busy else 0.0},{seconds}.0,{address}")
            memory.append(f"{seconds}.0,{chance.randrange(1 << 35)}.0,{address}")
            if busy:
                logged.append(f"{seconds}.0,19106.0,{address}")
    (folder / GENAI).mkdir(parents=True)
    trace_files.genai(folder / GENAI, duty, memory)
    for file in LOGS:
        (folder / GENAI / file).write_text("\n".join(["timestamp_anon,value,container_ip", *logged]) + "\n")
    pods = [
        trace_files.pod(
            f"p-{number}", gpus, milli, start_s := chance.randrange(20_000), start_s + chance.randrange(60, 9_000)
        )
        for number, (gpus, milli) in enumerate(chance.choices([(1, 250), (1, 400), (1, 1000), (4, 1000)], k=60))
    ]
    (folder / GPU_2023).mkdir()
    trace_files.gpu_2023(folder / GPU_2023, [f"n-{number},1,1,8,T4" for number in range(6)], pods)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
