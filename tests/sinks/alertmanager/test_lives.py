"""Whatever fails or restarts: in the end the alerts that are open in the topic are open in Alertmanager."""

import asyncio
import math
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.sinks.alertmanager.fake import FakeAlertmanager
from tests.sinks.alertmanager.test_partition import STARTS_MS, Setup, records
from tests.sinks.alerts import alert, deliver_until
from tests.sinks.records import ConsumedRecord
from topics.alerts import Alert
from topics.times import epoch_ms, time_of

Writing = tuple[str, str]
"""An alert, by its pod, and what is written of it."""

writings = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["begins or ends", "severity", "figures", "again"])), max_size=30
)


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
    log, last = written(writings)
    manager = FakeAlertmanager(*statuses)
    asyncio.run(_live(manager, records(*log), [*lives, 0], restarts, random.Random(seed)))
    assert manager.severities() == sorted((pod, alert.severity) for pod, alert in last.items() if alert.is_open)


def written(writings: Sequence[Writing]) -> tuple[list[Alert], dict[str, Alert]]:
    """The alerts as they are written, and the last one of each pod. What does not go on has neither another severity
    nor other figures."""
    log, last = list[Alert](), dict[str, Alert]()
    for pod, what in writings:
        before = last.get(pod)
        if before is None or (not before.is_open and what == "begins or ends"):
            starts_ms = STARTS_MS if before is None else epoch_ms(before.starts_at) + 1_000
            last[pod] = alert(pod, starts_ms)
        elif before.is_open and what == "begins or ends":
            last[pod] = replace(before, state="resolved", ends_at=time_of(epoch_ms(before.starts_at) + 500))
        elif before.is_open and what == "severity":
            severity = "critical" if before.severity == "warning" else "warning"
            labels = {**before.labels, "severity": severity}
            last[pod] = replace(before, severity=severity, labels=labels, revision=before.revision + 1)
        elif before.is_open and what == "figures":
            last[pod] = replace(before, idle=2, held=3)
        log.append(last[pod])
    return log, last


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
