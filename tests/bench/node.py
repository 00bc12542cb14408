"""What the node producer takes: resident memory and the share of one core, with Kafka there, away and back.

    python -m tests.bench.node [SECONDS]

8 scripted GPUs, 6 whole ones shared by 4 pods each and 2 cut into 7 MIG devices of a pod each, with all that there is
to read once a second: GPM of each GPU and GPU instance, the driver's own samples, processes, XID errors. A kubelet of
38 containers, Apache Kafka. The scripted NVML answers in microseconds, so that what a driver takes comes on top. CPU is
user and system time of all threads, and of the short-lived children; memory is the process's own.
"""

import asyncio
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from delivery import topic_admin
from tests.bench.attribution import cpu_s
from tests.nvml.scripted import Mig, Process, ScriptedNvml
from tests.producers.node import pod_resources
from tests.real.pipeline import Gpustream
from tests.real.servers import KafkaServer

WHOLE, SHARED = 6, 4
CUT, PARTS = 2, 7
XID_EVERY_S = 5.0
WARM_UP_S = 10.0


def main(seconds: float) -> None:
    """Prints a row for each state of Kafka."""
    sys.stdout.write("| Kafka is | RSS MB | of it anonymous MB | % of a core |\n|---|---|---|---|\n")
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka"))
        asyncio.run(topic_admin.create(kafka.connection, partitions=4, replication_factor=1))
        socket = directory / "kubelet.sock"
        servers.enter_context(pod_resources.serving(socket, containers()))
        pids = running()
        paths = ("--pod-resources-socket", str(socket), "--procfs", str(pods_of(pids, directory / "proc")))
        options = ("--kafka", kafka.address, "--node", "bench", *paths)
        nvml = gpus(directory / "nvml", pids)
        node = Gpustream(directory / "node", "produce", "node", *options, environment=nvml.environment())
        servers.enter_context(node)
        for state, change in (("there", None), ("away", kafka.kill9), ("back", kafka.start)):
            if change is not None:
                change()
            time.sleep(WARM_UP_S)
            row(state, node.pid, nvml, seconds)


def running() -> list[int]:
    """Processes of this machine, one for each container if there are so many."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pids[n % len(pids)] for n in range(WHOLE * SHARED + CUT * PARTS)]


def gpus(directory: Path, pids: list[int]) -> ScriptedNvml:
    """The GPUs, and each process on one of them or on a part of one."""
    nvml = ScriptedNvml(directory, gpus=WHOLE + CUT)
    remaining = iter(pids)
    for gpu in range(WHOLE):
        nvml.processes(gpu, [Process(next(remaining), 1 << 30) for _ in range(SHARED)])
    for gpu in range(WHOLE, WHOLE + CUT):
        instances = range(1, 1 + PARTS)
        nvml.mig(gpu, [Mig(instance) for instance in instances])
        on_parts = [
            Process(next(remaining), 1 << 30, gpu_instance=instance, compute_instance=0) for instance in instances
        ]
        nvml.processes(gpu, on_parts)
    return nvml


def pods_of(pids: list[int], procfs: Path) -> Path:
    """A procfs in which these processes are pods': what the kernel says of them, except for their control groups."""
    for pid in set(pids):
        (procfs / str(pid)).mkdir(parents=True)
        (procfs / str(pid) / "stat").symlink_to(f"/proc/{pid}/stat")
        uid = f"1b6c0f0e_8a1d_4f0b_9d55_{pid:012x}"
        path = f"0::/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{pid:064x}.scope\n"
        (procfs / str(pid) / "cgroup").write_text(path)
    return procfs


def containers() -> bytes:
    """The kubelet's answer: whole GPUs shared by several pods, each MIG device of one."""
    whole = [f"GPU-5c41b7ed-0000-4000-8000-{gpu:012x}::{n}" for gpu in range(WHOLE) for n in range(SHARED)]
    cut = [
        f"MIG-5c41b7ed-{gpu:04x}-5000-8000-{instance:06x}{0:06x}"
        for gpu in range(WHOLE, WHOLE + CUT)
        for instance in range(1, 1 + PARTS)
    ]
    return pod_resources.pods_on({device: f"bert-{n}" for n, device in enumerate([*whole, *cut])})


def row(state: str, pid: int, nvml: ScriptedNvml, seconds: float) -> None:
    """One line of the table, after that many seconds, with an XID error now and then."""
    before_s, began = all_cpu_s(pid), time.monotonic()
    while (left_s := began + seconds - time.monotonic()) > 0:
        time.sleep(min(left_s, XID_EVERY_S))
        nvml.xid(0, 43)
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
