"""Everything that a cluster does to a pipeline, at random, and not one tick lost, doubled or given to the wrong pod."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.faults import FAULTS
from tests.real.pipeline import Gpustream
from tests.real.servers import KafkaServer, PrometheusServer
from tests.real.soak import DRAIN_S, WHOLE_S, Pipeline, count, quantile, rest, running, say, soak

MINUTES = float(os.environ.get("SOAK_MINUTES", "1.2"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
ONLY = os.environ.get("SOAK_ONLY", "")


@pytest.mark.timeout(60 * MINUTES + 2 * WHOLE_S + 2 * DRAIN_S)
async def test_whatever_fails_nothing_is_lost_and_every_tick_is_booked_to_its_pod(
    start_kafka: Callable[..., KafkaServer],
    start_prometheus: Callable[..., PrometheusServer],
    gpustream: Callable[..., Gpustream],
    tmp_path: Path,
) -> None:
    say(f"\nSOAK_SEED={SEED} SOAK_MINUTES={MINUTES:g}")
    pipeline = Pipeline([start_kafka()], start_prometheus(), gpustream, tmp_path)
    async with running(pipeline):
        await rest(pipeline, 4)
        await soak(pipeline, [fault for fault in FAULTS if ONLY in fault.name], SEED, 60 * MINUTES)
        await pipeline.drain()
        counted = await count(pipeline)
    took_s = pipeline.latencies_s()
    say(
        f"{counted.sampled} ticks sampled, {counted.killed} lost with a producer that was killed, "
        f"{counted.twice} attributed twice; {counted.points} points compared, {len(counted.wrong)} wrong\n"
        f"from reading to accepted write: median {quantile(took_s, 0.5):.2f} s, p99 {quantile(took_s, 0.99):.2f} s\n"
        f"processes started: {dict(pipeline.launches)}"
    )
    for name, (memory, descriptors) in pipeline.slopes().items():
        say(f"{name}: {memory:+.1f} MiB and {descriptors:+.1f} descriptors an hour")
    assert counted.wrong == [], f"{len(counted.wrong)}: {counted.wrong[:10]}"
    assert counted.points > 0
