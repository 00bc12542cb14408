"""A process runs out of name resolution or of file descriptors: it reports that, and recovers."""

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
from tests.real.soak import Pipeline, count, pause, running, secured


async def test_a_process_that_can_resolve_no_name_or_open_no_file_says_so_and_recovers_by_itself(
    start_kafka: Callable[..., KafkaServer],
    authority: Authority,
    start_prometheus: Callable[..., PrometheusServer],
    gpustream: Callable[..., Gpustream],
    tmp_path: Path,
) -> None:
    need(find_compiler)
    broker = start_kafka(authority=authority)
    kafka_options = secured([broker], authority.ca, tmp_path)
    pipeline = Pipeline([broker], kafka_options, start_prometheus(), gpustream, tmp_path, nodes=4)
    async with running(pipeline):
        await pause(pipeline, 1)
        processes = [pipeline.fleet, pipeline.workers[0], pipeline.sinks[0]]
        with pipeline.resolver.unresolvable():
            await asyncio.to_thread(broker.restart)
            for process in processes:
                await wait_for_reason(process, "its name is not resolved")
        await pipeline.wait_until_healthy(time.time())
        with ExitStack() as limits:
            for process in processes:
                limits.enter_context(no_descriptors(process))
                await wait_for_reason(process, "no file descriptor is left")
            await asyncio.to_thread(broker.restart)
        await pipeline.wait_until_healthy(time.time())
        await pipeline.drain()
        counted = await count(pipeline)
    assert counted.wrong == []
    assert set(pipeline.launches.values()) == {1}, "none was started again"


async def wait_for_reason(process: Gpustream, text: str) -> None:
    """Wait until /readyz gives this as a reason."""
    await asyncio.to_thread(eventually_sync, lambda: text in process.why_not(), f"/readyz of {process.name}: {text}")
