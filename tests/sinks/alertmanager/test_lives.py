"""Whatever fails or restarts: in the end the alerts that are open in the topic are open in Alertmanager."""

import asyncio
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from tests.sinks.alertmanager.fake import FakeAlertmanager
from tests.sinks.alertmanager.test_partition import STARTS_MS, Setup, records
from tests.sinks.alerts import Writing, deliver_until, writings, written
from tests.sinks.records import ConsumedRecord


@given(
    writings=writings,
    statuses=st.lists(st.sampled_from([200, 503, 429, 0, 302]), max_size=30),
    lives=st.lists(st.integers(1, 6), max_size=5),
    restarts=st.sets(st.integers(0, 20), max_size=3),
    seed=st.integers(0, 99),
)
def test_in_the_end_what_is_open_fires_and_nothing_else(
    writings: list[Writing], statuses: list[int], lives: list[int], restarts: set[int], seed: int
) -> None:
    written_alerts, by_pod = written(writings, STARTS_MS)
    manager = FakeAlertmanager(*statuses)
    asyncio.run(_live(manager, records(*written_alerts), [*lives, 0], restarts, random.Random(seed)))
    last = {pod: of_pod[-1] for pod, of_pod in by_pod.items()}
    assert manager.severities() == sorted((pod, alert.severity) for pod, alert in last.items() if alert.is_open)


async def _live(
    manager: FakeAlertmanager, log: list[ConsumedRecord], lives: list[int], restarts: set[int], chance: random.Random
) -> None:
    """Deliver the log in several lives of the sink; each but the last is killed before a commit."""
    committed, batches = 0, 0
    for requests in lives:
        setup = Setup(manager, max_alerts=3)
        for record in log[:committed]:
            setup.partition.recall(record)
        killed_at = len(manager.requests) + requests if requests else math.inf
        async with setup.resending():
            while committed < len(log):
                batches += 1
                if batches in restarts:
                    manager.restart()
                batch = log[committed : committed + chance.randint(1, 8)]
                committed = await deliver_until(killed_at, manager.requests, setup.partition, setup.outcomes, batch)
                if len(manager.requests) >= killed_at:
                    break
            else:
                await _all_sent(setup)


async def _all_sent(setup: Setup) -> None:
    """Let a minute pass: everything is sent once more."""
    await setup.partition.quiet(setup.abandon)
    await asyncio.wait_for(setup.notifier.resend_now(setup.partition._active), 10)
