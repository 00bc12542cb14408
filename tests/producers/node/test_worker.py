"""A worker runs one job at a time, and a job delays nobody else."""

import asyncio
import gc
import subprocess
import sys
import threading

import pytest

from producers.node.worker import Worker
from tests.eventually import LIMIT_S, eventually

HANGS = """
import asyncio, threading
from producers.node.worker import Worker

async def main():
    await asyncio.wait([Worker("hangs").submit(threading.Event().wait)], timeout=0.05)

asyncio.run(main())
"""


async def test_the_answer_comes_to_the_loop_from_another_thread() -> None:
    worker = Worker("worker-here")
    assert await worker.submit(lambda: threading.current_thread().name) == "worker-here"
    assert await worker.submit(lambda: 2) == 2
    worker.stop()


async def test_an_exception_of_a_job_is_raised_where_the_job_is_awaited() -> None:
    worker = Worker("worker")
    with pytest.raises(ZeroDivisionError):
        await worker.submit(lambda: 1 // 0)
    assert await worker.submit(lambda: 2) == 2
    worker.stop()


async def test_an_exception_that_comes_just_before_the_loop_ends_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Worker("worker-ends")
    job = worker.submit(lambda: 1 // 0)
    await eventually(job.done)
    worker.stop()
    await eventually(lambda: all(thread.name != "worker-ends" for thread in threading.enumerate()))
    del job
    gc.collect()

    assert caplog.records == []


async def test_no_second_job_runs_beside_one_that_has_not_returned() -> None:
    worker, end = Worker("worker"), threading.Event()
    job = worker.submit(end.wait)
    assert worker.busy
    with pytest.raises(RuntimeError):
        worker.submit(end.wait)
    end.set()
    assert await job
    assert not worker.busy
    assert worker.busy_s() == 0
    worker.stop()


async def test_a_job_that_nobody_waits_for_any_more_still_keeps_the_worker_busy_until_it_returns() -> None:
    worker, end = Worker("worker"), threading.Event()
    job = worker.submit(end.wait)
    job.cancel()
    await asyncio.sleep(0)
    assert worker.busy
    end.set()
    await eventually(lambda: not worker.busy)
    worker.stop()


async def test_it_reports_for_how_long_a_job_has_run() -> None:
    time_s = [100.0]
    worker, end = Worker("worker", lambda: time_s[0]), threading.Event()
    job = worker.submit(end.wait)
    time_s[0] += 40
    assert worker.busy_s() == 40
    end.set()
    await job
    worker.stop()


def test_an_answer_after_the_loop_was_closed_is_dropped() -> None:
    end, workers = threading.Event(), []

    async def submit_and_return() -> None:
        worker = Worker("worker-late")
        workers.append(worker)
        worker.submit(end.wait)

    asyncio.run(submit_and_return())
    end.set()
    workers[0].stop()
    for thread in [thread for thread in threading.enumerate() if thread.name == "worker-late"]:
        thread.join(20)
        assert not thread.is_alive()


def test_a_process_ends_although_a_job_hangs() -> None:
    assert subprocess.run([sys.executable, "-c", HANGS], timeout=LIMIT_S, check=False).returncode == 0
