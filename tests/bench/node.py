"""What the node producer takes: resident memory and the share of one core, with Kafka there, away and back.

    python -m tests.bench.node [SECONDS]

8 scripted GPUs with 4 processes each, read once a second, a kubelet of 32 containers, Apache Kafka. The scripted NVML
answers in microseconds, so that what a driver takes comes on top. CPU is user and system time of all threads, and of
the short-lived children; memory is the process's own.
"""

import asyncio
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.bench.attribution import cpu_s
from tests.nvml.scripted import Process, ScriptedNvml
from tests.producers.node import pod_resources
from tests.real.pipeline import Gpustream
from tests.real.servers import KafkaServer
from topics import broker

GPUS, SHARED = 8, 4
WARM_UP_S = 10.0


def main(seconds: float) -> None:
    """Prints a row for each state of Kafka."""
    sys.stdout.write("| Kafka is | RSS MB | of it anonymous MB | % of a core |\n|---|---|---|---|\n")
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        asyncio.run(broker.create(kafka.address, partitions=4, replication_factor=1))
        socket = directory / "kubelet.sock"
        servers.enter_context(pod_resources.serving(socket, containers()))
        pids = running()
        paths = ("--pod-resources-socket", str(socket), "--procfs", str(pods_of(pids, directory / "proc")))
        options = ("--kafka", kafka.address, "--node", "bench", *paths)
        environment = gpus(directory / "nvml", pids).environment()
        node = Gpustream(directory / "node", "produce", "node", *options, environment=environment)
        servers.enter_context(node)
        for state, change in (("there", None), ("away", kafka.kill9), ("back", kafka.start)):
            if change is not None:
                change()
            time.sleep(WARM_UP_S)
            row(state, node.pid, seconds)


def running() -> list[int]:
    """Processes of this machine, one for each container where there are so many."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [found[n % len(found)] for n in range(GPUS * SHARED)]


def gpus(directory: Path, pids: list[int]) -> ScriptedNvml:
    """The GPUs, shared by these processes."""
    nvml = ScriptedNvml(directory, gpus=GPUS)
    for gpu in range(GPUS):
        nvml.processes(gpu, [Process(pid, 1 << 30) for pid in pids[gpu * SHARED : (gpu + 1) * SHARED]])
    return nvml


def pods_of(pids: list[int], procfs: Path) -> Path:
    """A procfs in which these processes are pods': what the kernel says of them, but for their control groups."""
    for pid in set(pids):
        (procfs / str(pid)).mkdir(parents=True)
        (procfs / str(pid) / "stat").symlink_to(f"/proc/{pid}/stat")
        uid = f"1b6c0f0e_8a1d_4f0b_9d55_{pid:012x}"
        path = f"0::/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{pid:064x}.scope\n"
        (procfs / str(pid) / "cgroup").write_text(path)
    return procfs


def containers() -> bytes:
    """The kubelet's answer: each GPU shared by 4 pods."""
    uuids = [f"GPU-5c41b7ed-0000-4000-8000-{gpu:012x}" for gpu in range(GPUS)]
    return pod_resources.pods_on({f"{u}::{n}": f"bert-{i}-{n}" for i, u in enumerate(uuids) for n in range(SHARED)})


def row(state: str, pid: int, seconds: float) -> None:
    """One line of the table, after that many seconds."""
    before_s, began = all_cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    share = (all_cpu_s(pid) - before_s) / (time.monotonic() - began)
    memory = memory_bytes(pid)
    sys.stdout.write(f"| {state} | {memory['Rss'] / 1e6:.1f} | {memory['Anonymous'] / 1e6:.1f} | {share * 100:.2f} |\n")
    sys.stdout.flush()


def all_cpu_s(pid: int) -> float:
    """User and system time of a process and of its children that have ended."""
    children = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[13:15]
    return cpu_s(pid) + sum(map(int, children)) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> dict[str, int]:
    """What the kernel says of a process's memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name.rstrip(":"): int(size) * 1024 for name, size, *_ in (line.split() for line in lines)}


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
