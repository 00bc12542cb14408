"""Whatever fails or restarts: in the end the alerts that are open in the topic are open in Alertmanager."""

import asyncio
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.sinks.alertmanager.fake import FakeAlertmanager
from tests.sinks.alertmanager.test_partition import STARTS_MS, Setup, now_ms
from tests.sinks.alerts import alert, alert_record
from tests.sinks.records import ConsumedRecord
from topics.alerts import Alert

Writing = tuple[int, int]
"""Which alert, and how many of its last transitions the stream writes again after the new one, as after a crash."""


def _log(writings: Sequence[Writing]) -> tuple[list[ConsumedRecord], set[str]]:
    """A log of transitions with repeats, and the pods whose alerts are open at its end."""
    transitions: dict[str, list[Alert]] = {}
    written_alerts: list[Alert] = []
    for pod, repeats in writings:
        of_pod = transitions.setdefault(str(pod), [])
        starts_ms = STARTS_MS + len(of_pod) // 2 * 1000
        of_pod.append(alert(str(pod), starts_ms, starts_ms + 500 if len(of_pod) % 2 else None))
        written_alerts += [of_pod[-1], *of_pod[-1:] * repeats]
    records = [
        alert_record(written_alert, number, at_ms=now_ms()) for number, written_alert in enumerate(written_alerts)
    ]
    return records, {pod for pod, of_pod in transitions.items() if len(of_pod) % 2}


@given(
    writings=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=30),
    statuses=st.lists(st.sampled_from([200, 503, 429, 0, 302]), max_size=30),
    lives=st.lists(st.integers(1, 6), max_size=5),
    restarts=st.sets(st.integers(0, 20), max_size=3),
    seed=st.integers(0, 99),
)
def test_in_the_end_what_is_open_fires_and_nothing_else(
    writings: list[Writing], statuses: list[int], lives: list[int], restarts: set[int], seed: int
) -> None:
    log, opened = _log(writings)
    manager = FakeAlertmanager(*statuses)
    asyncio.run(_live(manager, log, [*lives, 0], restarts, random.Random(seed)))
    assert manager.firing() == opened


async def _live(
    manager: FakeAlertmanager, log: list[ConsumedRecord], lives: list[int], restarts: set[int], chance: random.Random
) -> None:
    """Deliver the log in several lives of the sink; each but the last is killed before a commit."""
    committed, batches = 0, 0
    for requests in lives:
        setup = Setup(manager, max_alerts=3)
        setup.partition.recall(log[:committed])
        killed_at = len(manager.requests) + requests if requests else None
        async with setup.resending():
            while committed < len(log):
                batches += 1
                if batches in restarts:
                    manager.restart()
                batch = log[committed : committed + chance.randint(1, 8)]
                committed, killed = await _batch(setup, batch, committed, killed_at)
                if killed:
                    break
            else:
                await _all_sent(setup)


async def _batch(setup: Setup, batch: list[ConsumedRecord], committed: int, killed_at: int | None) -> tuple[int, bool]:
    """Deliver a batch, or a part of it. Returns the committed offset, and whether this life is over."""
    setup.outcomes.read(len(batch))
    steps = setup.partition.deliver(batch, setup.abandon)
    try:
        async for offset in steps:
            if killed_at is not None and len(setup.manager.requests) >= killed_at:
                return committed, True
            committed = offset
    finally:
        await steps.aclose()
    return committed, False


async def _all_sent(setup: Setup) -> None:
    """Let a minute pass: everything is sent once more."""
    await setup.partition.quiet(setup.abandon)
    await asyncio.wait_for(setup.notifier.resend_now(setup.partition._active), 10)
