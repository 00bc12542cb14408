"""Rules that make series of several nodes equal: one node writes such a series at a time, and nothing is refused."""

import asyncio
import random

import pytest

from sinks.remote_write.policy import Answer, Protocol
from sinks.series.relabel import Relabelling
from sinks.series.relabel_file import load
from sinks.series.windows import Resolution
from tests.sinks.conftest import device, sample
from tests.sinks.records import ConsumedRecord, record
from tests.sinks.remote_write.receivers import KINDS, Receiver
from tests.sinks.remote_write.test_partition import Setup
from tests.sinks.remote_write.wire import Sample

NODES = ("n1", "n2", "n3")
RULES = "- {regex: host_name|k8s_node_name|gpu_uuid, action: labeldrop}"


class HastyReceiver(Receiver):
    """Answers some requests before earlier ones, and keeps the reasons of what it refuses."""

    chance: random.Random
    refused: list[str]

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        for _ in range(self.chance.choice((0, 1, 3, 10, 40))):
            await asyncio.sleep(0)
        return await super().post(body, protocol)

    def _error_of(self, key: frozenset[tuple[str, str]], received_sample: Sample) -> str | None:
        error = super()._error_of(key, received_sample)
        self.refused += [error] if error else []
        return error


def _ticks(chance: random.Random, rounds: int) -> list[list[ConsumedRecord]]:
    """Ticks of nodes whose clocks differ and whose pods come and go: those of some nodes at a time."""
    ahead_ms = {node: chance.randint(-5000, 5000) for node in NODES}
    batches: list[list[ConsumedRecord]] = []
    seq = 0
    for _ in range(rounds):
        batches.append([])
        for node in chance.sample(NODES, chance.randint(1, len(NODES))):
            seq += 1
            devices = [device(pod=chance.choice(["a", "b", None])) for _ in range(chance.randint(1, 2))]
            tick = sample(seq, *devices, node=node, ts_ms=1_795_219_152_000 + seq * 1000 + ahead_ms[node])
            batches[-1].append(record(tick))
    return batches


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("windows", [False, True], ids=["ticks", "windows"])
async def test_a_series_that_passes_from_node_to_node_is_never_out_of_order(seed: int, *, windows: bool) -> None:
    chance = random.Random(seed)
    receiver = HastyReceiver(kind=chance.choice(KINDS))
    receiver.chance, receiver.refused = chance, []
    setup = Setup(
        receiver,
        receiver.kind.protocol,
        resolution=Resolution(3000, ()) if windows else None,
        relabelling=Relabelling([load(RULES, "rules.yml")]),
    )
    for batch in _ticks(chance, 40):
        setup.counted.read(len(batch))
        for records in (batch, *[()] * chance.randint(0, 8)):
            async for _ in setup.handler.deliver(records, setup.abandon):
                pass
            setup.queue_s += 1.0
            await asyncio.sleep(0)
        if not chance.randrange(10):
            await setup.handler.quiet(setup.abandon)
    await setup.deliver_some()
    await setup.queue.close()

    assert receiver.refused == []
    assert receiver.markers() > 0
