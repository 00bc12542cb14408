"""What a process needs of its machine runs out: names that resolve, and file descriptors. It says so, and goes on."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.eventually import eventually_sync
from tests.real.certificates import Authority
from tests.real.conftest import need
from tests.real.faults import no_descriptors
from tests.real.pipeline import Gpustream
from tests.real.resolver import find_compiler
from tests.real.servers import KafkaServer, PrometheusServer
from tests.real.soak import Pipeline, count, rest, running, secured


async def test_a_process_that_can_resolve_no_name_or_open_no_file_says_so_and_recovers_by_itself(
    start_kafka: Callable[..., KafkaServer],
    authority: Authority,
    start_prometheus: Callable[..., PrometheusServer],
    gpustream: Callable[..., Gpustream],
    tmp_path: Path,
) -> None:
    need(find_compiler)
    broker = start_kafka(authority=authority)
    at = secured([broker], authority.ca, tmp_path)
    pipeline = Pipeline([broker], at, start_prometheus(), gpustream, tmp_path, nodes=4)
    async with running(pipeline):
        await rest(pipeline, 1)
        processes = [pipeline.fleet, pipeline.workers[0], pipeline.sinks[0]]
        with pipeline.resolver.gone():
            await asyncio.to_thread(broker.restart)
            for process in processes:
                await says(process, "its name is not resolved")
        await pipeline.whole(time.time())
        with ExitStack() as limits:
            for process in processes:
                limits.enter_context(no_descriptors(process))
                await says(process, "no file descriptor is left")
            await asyncio.to_thread(broker.restart)
        await pipeline.whole(time.time())
        await pipeline.drain()
        counted = await count(pipeline)
    assert counted.wrong == []
    assert set(pipeline.launches.values()) == {1}, "none was started again"


async def says(process: Gpustream, text: str) -> None:
    """Wait until /readyz gives this as a reason."""
    await asyncio.to_thread(eventually_sync, lambda: text in process.why_not(), f"/readyz of {process.name}: {text}")
