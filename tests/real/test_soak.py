"""All faults of a cluster, at random: no tick is lost, doubled or attributed to the wrong pod."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.certificates import Authority
from tests.real.conftest import need
from tests.real.faults import FAULTS, LONG_FAULTS
from tests.real.pipeline import Gpustream
from tests.real.resolver import find_compiler
from tests.real.servers import KafkaCluster, PrometheusServer
from tests.real.soak import (
    DRAIN_S,
    GPUS,
    NODES,
    WHOLE_S,
    Pipeline,
    count,
    count_usage,
    pause,
    quantile,
    running,
    say,
    secured,
    soak,
)

MINUTES = float(os.environ.get("SOAK_MINUTES", "1.2"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
LONG_OUTAGE_S = 5.0
"""Minutes for which three brokers are worth their start; there is one else."""

FEW_NODES, FEW_GPUS = 10, 2
"""The nodes of a shorter soak, which runs beside other tests, one of each kind; and their GPUs."""

ONLY = os.environ.get("SOAK_ONLY", "")


@pytest.mark.timeout(60 * MINUTES + 2 * WHOLE_S + 2 * DRAIN_S)
async def test_whatever_fails_nothing_is_lost_and_every_tick_is_booked_to_its_pod(
    request: pytest.FixtureRequest,
    authority: Authority,
    start_prometheus: Callable[..., PrometheusServer],
    gpustream: Callable[..., Gpustream],
    tmp_path: Path,
) -> None:
    need(find_compiler)
    if MINUTES >= LONG_OUTAGE_S:
        cluster: KafkaCluster = request.getfixturevalue("kafka_cluster")
        brokers = cluster.brokers
    else:
        brokers = [request.getfixturevalue("start_kafka")(authority=authority)]
    say(f"\nSOAK_SEED={SEED} SOAK_MINUTES={MINUTES:g}")
    kafka_options = secured(brokers, authority.ca, tmp_path)
    nodes, gpus = (NODES, GPUS) if MINUTES >= LONG_OUTAGE_S else (FEW_NODES, FEW_GPUS)
    pipeline = Pipeline(brokers, kafka_options, start_prometheus(), gpustream, tmp_path, nodes, gpus)
    async with running(pipeline):
        await pause(pipeline, 4)
        table, at_once = (FAULTS + LONG_FAULTS, (1, 1, 2, 3)) if MINUTES >= LONG_OUTAGE_S else (FAULTS, (3,))
        faults = [fault for fault in table if ONLY in fault.name]
        await soak(pipeline, faults, seed=SEED, duration_s=60 * MINUTES, at_once=at_once)
        await pipeline.drain()
        counted = await count(pipeline)
        records, differing = await count_usage(pipeline)
    took_s = pipeline.latencies_s()
    say(
        f"{counted.sampled} ticks sampled, {counted.killed} lost with a producer that was killed, "
        f"{counted.twice} attributed twice; {counted.points} points compared, {len(counted.wrong)} wrong\n"
        f"{records} records of usage compared, {len(differing)} wrong\n"
        f"from reading to accepted write: median {quantile(took_s, 0.5):.2f} s, p99 {quantile(took_s, 0.99):.2f} s\n"
        f"processes started: {dict(pipeline.launches)}"
    )
    for name, life in pipeline.lifetimes().items():
        say(f"{name}: {life}")
    for fault, back_s in pipeline.alone_s().items():
        say(f"{fault.name}: back after {back_s:.1f} s in the median")
    assert counted.wrong == [], f"{len(counted.wrong)}: {counted.wrong[:10]}"
    assert differing == [], f"{len(differing)}: {differing[:10]}"
    assert counted.points > 0
    assert records > 0
    if MINUTES >= LONG_OUTAGE_S:
        medians_s = pipeline.alone_s(min_times=3)  # a single time says how busy the machine was
        late_faults = {
            fault.name: back_s for fault, back_s in medians_s.items() if fault.back_s and back_s > fault.back_s
        }
        assert late_faults == {}
