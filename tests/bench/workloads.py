"""What short pods cost gpu.workloads: its bytes, with the records of every five minutes.

    python -m tests.bench.workloads [PODS] [NODES]

Pods of a second each come one after another to nodes in turn, one every 0.9 s, and are reported until half an hour
after the last; all of it in the time of a test's clock, without a broker.
"""

import asyncio
import sys

import orjson

from producers.workloads import WorkloadsPublisher
from tests.eventually import settle
from tests.producers.cluster.kubernetes_objects import START_MS, pod, state
from tests.producers.fakes import FakeClock, FakeSender, instruments
from topics.workloads import TOPIC, Owner

EVERY_MS, LIFE_MS, AFTER_MS, STEP_MS = 900, 300, 30 * 60_000, 10_000


async def main(pods: int, nodes: int) -> None:
    """Prints the records, their bytes, and the largest."""
    cluster, clock = state(*(f"n{number}" for number in range(nodes))), FakeClock()
    sender = FakeSender(clock, prompt=True)
    publisher = WorkloadsPublisher(sender, instruments(), cluster="prod", epoch=1, clock=clock)
    running = asyncio.create_task(publisher.run())

    async def tell(now_ms: int) -> None:
        clock.now_s = now_ms / 1000
        cluster.expire(now_ms)
        for node in cluster.changed_nodes():
            if content := cluster.pop_content(node):
                publisher.publish(now_ms, node, content)
        publisher.queue_overdue()
        await settle(2 * nodes + 4)

    for number in range(pods):
        name, now_ms = f"job-{number}-abcde", START_MS + number * EVERY_MS
        owner = Owner("batch/v1", "Job", f"job-{number}", f"uid-job-{number}")
        cluster.put_pod(pod(name, node=f"n{number % nodes}", owner=owner), now_ms)
        await tell(now_ms)
        cluster.remove_pod(f"uid-{name}", now_ms + LIFE_MS)
        await tell(now_ms + LIFE_MS)
    end_ms = START_MS + pods * EVERY_MS
    for now_ms in range(end_ms, end_ms + AFTER_MS, STEP_MS):
        await tell(now_ms)
    running.cancel()
    sizes = [len(orjson.dumps(record)) for record in sender.records(TOPIC.name)]
    summary = f"{len(sizes)} records, {sum(sizes) / 1e6:.1f} MB, the largest {max(sizes)} bytes"
    sys.stdout.write(f"{pods} pods on {nodes} nodes: {summary}\n")


if __name__ == "__main__":
    arguments = [int(text) for text in sys.argv[1:]]
    asyncio.run(main(*(arguments + [1000, 4][len(arguments) :])))
