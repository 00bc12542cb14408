"""How many nodes two cores carry at one tick a second: from a node's reading to the receiver's answer.

    python -m tests.bench.live [--write]

Apache Kafka, one worker of the attribution stream, two of remote write, and a receiver that only counts are on this
machine; so is the load, which replays records of a simulated fleet (8 whole GPUs a node, with processes and shared
GPUs). First 2,000 nodes; if these are too many, the most at which the lag stays flat, in steps of 250. It is flat if it
is no longer in the second half of a window than in the first, except for what half a second brings.

Ages are of the sink's own histogram, interpolated, as Prometheus would show them. CPU is user and system time of each
process, all threads.
"""

import asyncio
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from delivery import topic_admin
from delivery.connection import Connection
from tests.bench.aims import PER_TICK, Figure, report
from tests.bench.attribution import cpu_s
from tests.bench.load import WARM, Replay, fleet
from tests.bench.remote_write import null_receiver
from tests.real.pipeline import Gpustream
from tests.real.pipeline import lag as committed_lag
from tests.real.servers import KafkaServer

NODES, STEP, PARTITIONS = 2000, 250, 8
WARM_UP_S, MEASURE_S = 15, 30
REST = "receiver, and what else the machine does"
GROUPS = {
    "attribution": ("gpustream-attribution", "gpu.samples"),
    "remote write": ("gpustream-sink-remote-write", "gpu.attributed"),
}
LAST = Path(__file__).with_suffix(".json")

_NEVER_STALE = ("--stale-after", "1h")
_BUCKET = re.compile(r'^gpustream_remote_write_delay_seconds_bucket{le="(.*)"} (.*)', re.MULTILINE)
_LAG = re.compile(r'^gpustream_\w+_lag_records(?:{topic="gpu.samples"})? (.*)', re.MULTILINE)


class Pipeline:
    """Workers of the attribution stream and one of remote write, on topics of their own; no node is silent so long that
    its series end."""

    def __init__(
        self, running: ExitStack, kafka: KafkaServer, prefix: str, url: str, workers: int = 1, sinks: int = 1
    ) -> None:
        self.kafka, self.prefix = kafka, prefix
        connection = Connection(kafka.address, topic_prefix=prefix)
        asyncio.run(topic_admin.create(connection, partitions=PARTITIONS, replication_factor=1))
        options = ("--kafka", kafka.address, "--topic-prefix", prefix)
        commands: dict[str, tuple[str, ...]] = {
            **{f"attribution {n + 1}": ("stream", "attribution", *options) for n in range(workers)},
            **{
                f"remote write {n + 1}": (
                    "sink",
                    "remote-write",
                    *options,
                    "--url",
                    url,
                    "--from",
                    "earliest",
                    *_NEVER_STALE,
                )
                for n in range(sinks)
            },
        }
        self.processes = {
            name: running.enter_context(Gpustream(kafka.directory.parent / f"{prefix}{name}", *command))
            for name, command in commands.items()
        }

    def lag(self) -> float:
        """How many records are not finished, of all topics."""
        texts = [process.get("/metrics") or "" for process in self.processes.values()]
        return sum(float(number) for text in texts for number in _LAG.findall(text))

    def finish(self, names: Iterable[str] = GROUPS) -> None:
        """Waits until these have finished all that they read, one after the other."""
        for name in names:
            group, topic = GROUPS[name]
            while asyncio.run(committed_lag(self.kafka.address, self.prefix + group, [self.prefix + topic])):
                time.sleep(0.5)

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds of all workers of attribution, and of remote write."""
        spent = {name: cpu_s(process.pid) for name, process in self.processes.items()}
        streams = sum(s for name, s in spent.items() if name.startswith("attribution"))
        return streams, sum(spent.values()) - streams

    def ages(self) -> dict[float, float]:
        """How many ticks were written when they were no older than so many seconds, since the start."""
        ages: Counter[float] = Counter()
        for name, process in self.processes.items():
            buckets = _BUCKET.findall(process.get("/metrics") or "") if name.startswith("remote write") else []
            ages.update({float(bound): float(count) for bound, count in buckets})
        return dict(ages)


class Window(NamedTuple):
    """What was seen while so many nodes had a tick a second."""

    nodes: int
    lags: list[float]
    ages: Mapping[float, float]
    cores: Mapping[str, float]

    @property
    def halves(self) -> tuple[float, float]:
        """The mean lag of each half."""
        middle = len(self.lags) // 2
        return mean(self.lags[:middle]), mean(self.lags[middle:])

    @property
    def flat(self) -> bool:
        """Whether the lag does not grow."""
        before, after = self.halves
        return after < before + self.nodes / 2

    def quantile(self, share: float) -> float:
        """The age in seconds that this share of the ticks has at most."""
        rank, lower_s, below = share * max(self.ages.values()), 0.0, 0.0
        for upper_s, count in self.ages.items():
            if count >= rank and count > below:
                return lower_s + (upper_s - lower_s) * (rank - below) / (count - below)
            lower_s, below = upper_s, count
        return float("inf")


def measured(nodes: int, kafka: KafkaServer, url: str) -> Window:
    """A window with so many nodes, on topics of its own."""
    prefix, stop = f"live-{nodes}.", threading.Event()
    with ExitStack() as running:
        pipeline = Pipeline(running, kafka, prefix, url, sinks=2)
        replay = Replay(kafka.address, prefix, asyncio.run(fleet(nodes)))
        replay.ticks(range(1, WARM + 1), WARM)
        pipeline.finish()
        load = threading.Thread(target=replay.steadily, args=(stop,))
        load.start()
        running.callback(stop.set)
        time.sleep(WARM_UP_S)
        ages, before_s = pipeline.ages(), spent_s(pipeline, kafka)
        lags = []
        for _ in range(MEASURE_S):
            time.sleep(1)
            lags.append(pipeline.lag())
        cores = {name: (s - before_s[name]) / MEASURE_S for name, s in spent_s(pipeline, kafka).items()}
        since = {bound: count - ages.get(bound, 0) for bound, count in pipeline.ages().items()}
    load.join()
    return Window(nodes, lags, since, cores)


def spent_s(pipeline: Pipeline, kafka: KafkaServer) -> dict[str, float]:
    """CPU seconds of each process so far, and of everything that runs on this machine."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    ours = dict(zip(("attribution", "remote write", "Kafka"), (*pipeline.cpu_s(), cpu_s(kafka.pid)), strict=True))
    ours["load"] = time.process_time()
    ours[REST] = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - sum(ours.values())
    return ours


def most(kafka: KafkaServer, url: str) -> Window:
    """The window of the most nodes, up to 2,000, at which the lag stays flat; that of the fewest if it never does."""
    low, high, most_nodes = 0, NODES // STEP + 1, None
    step = NODES // STEP
    while low < step < high:
        window = measured(step * STEP, kafka, url)
        sys.stderr.write(f"{window.nodes} nodes: lag {[round(half) for half in window.halves]}, {window.cores}\n")
        if window.flat:
            low, most_nodes = step, window
        else:
            high = step
        step = (low + high) // 2
    return most_nodes or window


def figures() -> Iterator[Figure]:
    """All rows, in the order of the table."""
    with ExitStack() as servers:
        directory = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        kafka = servers.enter_context(KafkaServer(directory / "kafka", heap="1g"))
        window = most(kafka, servers.enter_context(null_receiver()))
    yield Figure("nodes at 1 Hz", window.nodes if window.flat else 0, "nodes", NODES, more=True)
    for share, aim_s in ((0.5, 1), (0.99, 3)):
        yield Figure(f"reading to accepted write, p{share * 100:g}", window.quantile(share), "s", aim_s)
    for half, lag in zip(("first", "second"), window.halves, strict=True):
        yield Figure(f"lag, {half} half", lag, "records")
    for name, cores in window.cores.items():
        if name == REST:
            yield Figure(name, cores, "cores")
        else:
            yield Figure(name, cores / window.nodes * 1e6, PER_TICK)


if __name__ == "__main__":
    report(figures(), LAST, write="--write" in sys.argv)
