"""A partition of alerts on its way to an Alertmanager: what is new at once, what is open again and again."""

import asyncio
import logging
import time as clock
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from delivery.dead_letters import Abandoned, DeadLetters
from delivery.instruments import Instruments
from sinks.alertmanager import COMPONENT, INSTRUMENTS, AlertmanagerPartition, Notifier
from sinks.outcomes import Outcomes
from sinks.settings import AlertmanagerSettings
from tests.eventually import eventually
from tests.sinks.alertmanager.fake import FakeAlertmanager
from tests.sinks.alerts import alert, alert_record, deleted
from tests.sinks.records import FakeSender, Read
from topics.alerts import Alert

STARTS_MS = int(clock.time() * 1000) - 600_000
OVER_MS = STARTS_MS + 590_000


class Setup:
    """A partition, or several, and what they work with."""

    def __init__(self, manager: FakeAlertmanager, *, max_alerts: int = 256, resend_s: float = 60.0) -> None:
        made = Instruments(INSTRUMENTS)
        self.registry = made.registry
        self.manager = manager
        self.sender = FakeSender()
        self.outcomes = Outcomes(COMPONENT, made)
        settings = AlertmanagerSettings(kafka="k:1", urls=("http://am:1",), max_alerts=max_alerts, resend_s=resend_s)
        self.notifier = Notifier("http://am:1", settings, manager.post, made, first_s=0.0)
        letters = DeadLetters(self.sender, "sink alertmanager")  # type: ignore[arg-type]
        self.shared = (self.notifier, letters, self.outcomes, max_alerts)
        self.partition = AlertmanagerPartition(*self.shared)
        self.abandon = asyncio.Event()

    async def deliver(self, records: Sequence[Read]) -> list[int]:
        """Delivers records, counted as an assignment does; gives the offsets after each step."""
        self.outcomes.read(len(records))
        steps = self.partition.deliver(records, self.abandon)
        return await asyncio.wait_for(_all(steps), 20)

    @asynccontextmanager
    async def resending(self) -> AsyncIterator[None]:
        """It sends again what is open."""
        task = asyncio.ensure_future(self.notifier.resend())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def value(self, name: str) -> float | None:
        """One of the sink's own metrics."""
        return self.registry.get_sample_value(f"gpustream_alertmanager_{name}", {"receiver": "am:1"})

    def ends(self) -> dict[str, int]:
        """How many records ended in which way."""
        names = ("delivered", "duplicate", "dead_lettered")
        counts = {
            end: int(self.registry.get_sample_value(f"gpustream_alertmanager_records_{end}_total") or 0)
            for end in names
        }
        return {end: count for end, count in counts.items() if count}

    def errors(self) -> list[str]:
        """Of the dead letters."""
        return [headers["error"].decode() for _, _, headers in self.sender.sent]


async def _all(steps: AsyncIterator[int]) -> list[int]:
    return [offset async for offset in steps]


def firing(pod: str, **more: Any) -> Alert:
    return alert(pod, STARTS_MS, **more)


def over(pod: str, **more: Any) -> Alert:
    return alert(pod, STARTS_MS, OVER_MS, **more)


def records(*alerts: Alert, first: int = 0, ago_ms: int = 0) -> list[Read]:
    """Records that the broker got just now, or so long ago."""
    return [alert_record(one, first + number, at_ms=now_ms() - ago_ms) for number, one in enumerate(alerts)]


def now_ms() -> int:
    """The time, in milliseconds since the epoch."""
    return int(clock.time() * 1000)


async def test_each_transition_is_reported_in_order_and_each_offset_follows_its_request() -> None:
    one = Setup(FakeAlertmanager())
    assert await one.deliver(records(firing("a"), firing("b"), over("a"), over("b"), firing("c"))) == [2, 5]
    assert one.manager.heard == [("a", True), ("b", True), ("a", False), ("b", False), ("c", True)]
    assert one.manager.firing() == {"c"}
    assert one.ends() == {"delivered": 5}


async def test_a_request_has_no_more_alerts_than_it_may() -> None:
    one = Setup(FakeAlertmanager(), max_alerts=3)
    assert await one.deliver(records(*[firing(str(pod)) for pod in range(7)])) == [3, 6, 7]
    assert len(one.manager.got) == 3
    assert one.manager.firing() == set("0123456")


async def test_what_is_written_again_is_not_reported_as_new() -> None:
    one = Setup(FakeAlertmanager())
    one.partition.recall(records(firing("a"), firing("b"), over("b")))
    assert await one.deliver(records(firing("a"), firing("b"), over("b"), first=3)) == [5, 6]
    assert one.manager.got == []
    assert one.ends() == {"duplicate": 3}


async def test_after_a_start_what_is_open_is_reported_and_what_ended_lately_and_nothing_else() -> None:
    one = Setup(FakeAlertmanager())
    gone = over("gone")
    one.partition.recall(
        [
            *records(firing("open"), firing("long ago"), over("long ago"), ago_ms=3_600_000),
            *records(firing("over"), over("over"), gone, first=3),
            deleted(gone, 6, at_ms=now_ms()),
            alert_record(b"{nonsense", 7),
        ]
    )
    async with one.resending():
        await one.partition.quiet(one.abandon)
        await eventually(lambda: len(one.manager.heard) == 2)
        await one.partition.quiet(one.abandon)
        await asyncio.sleep(0.02)
    assert one.manager.heard == [("open", True), ("over", False)]
    assert (one.value("open_alerts"), one.value("resent_total")) == (1, 2)
    assert one.sender.sent == []


async def test_what_is_open_is_reported_again_and_again_and_later_each_time() -> None:
    one = Setup(FakeAlertmanager(), resend_s=0.02)
    async with one.resending():
        await one.deliver(records(firing("a"), firing("b"), over("b")))
        ends = one.manager.held["a"]["endsAt"]
        await eventually(lambda: len(one.manager.heard) >= 12)
    assert one.manager.held["a"]["endsAt"] > ends
    assert one.manager.heard[-2:] in ([("a", True), ("b", False)], [("b", False), ("a", True)])


async def test_a_partition_that_is_taken_away_is_not_reported_any_more() -> None:
    one = Setup(FakeAlertmanager(), resend_s=0.02)
    stays, other = AlertmanagerPartition(*one.shared), asyncio.Event()
    stays.recall(records(firing("stays")))
    async with one.resending():
        await one.deliver(records(firing("leaves")))
        await stays.quiet(other)
        await eventually(lambda: len(one.manager.heard) >= 6)
        one.abandon.set()
        await asyncio.sleep(0.05)
        one.manager.heard.clear()
        await eventually(lambda: len(one.manager.heard) >= 3)
    assert set(one.manager.heard) == {("stays", True)}
    assert one.value("open_alerts") == 1


async def test_an_outage_is_waited_for_and_then_all_that_is_open_is_reported() -> None:
    """Alertmanager has alerts in memory only: one that comes back knows none."""
    one = Setup(FakeAlertmanager())
    one.partition.recall(records(firing("a"), firing("b"), firing("c")))
    async with one.resending():
        await one.partition.quiet(one.abandon)
        await eventually(lambda: one.value("resent_total") == 3)
        one.manager.restart()
        one.manager.script = [0, 503, 500, 404]
        assert await one.deliver(records(over("b"), firing("d"), first=3)) == [5]
        await eventually(lambda: len(one.manager.held) == 4)
    assert one.manager.firing() == {"a", "c", "d"}
    assert one.ends() == {"delivered": 2}


async def test_no_older_state_arrives_after_a_newer_one() -> None:
    one = Setup(FakeAlertmanager())
    one.partition.recall(records(firing("a")))
    async with one.resending():
        await one.partition.quiet(one.abandon)
        await eventually(lambda: one.value("resent_total") == 1)
        one.manager.hold.clear()
        one.notifier._all_due()
        await eventually(lambda: one.manager.under_way == 1)
        delivering = asyncio.ensure_future(one.deliver(records(over("a"), first=1)))
        await asyncio.sleep(0.02)
        assert one.manager.under_way == 1, "the resolved one waits for its turn"
        one.manager.hold.set()
        await delivering
    assert one.manager.heard == [("a", True)] * 2 + [("a", False)]
    assert one.manager.most == 1


async def test_who_gives_up_during_an_outage_has_reported_nothing_as_known() -> None:
    one = Setup(FakeAlertmanager())
    one.manager.then = lambda _: 503
    delivering = asyncio.ensure_future(one.deliver(records(firing("a"))))
    await eventually(lambda: len(one.manager.got) > 2)
    one.abandon.set()
    with pytest.raises(Abandoned):
        await delivering
    assert one.ends() == {}
    one.manager.then, one.abandon = lambda _: 200, asyncio.Event()
    assert await one.deliver(records(firing("a"))) == [1], "the same handler may get the partition again"
    assert one.ends() == {"delivered": 1}


async def test_a_refused_alert_is_a_dead_letter_and_the_others_are_in(caplog: pytest.LogCaptureFixture) -> None:
    one = Setup(FakeAlertmanager(bad=frozenset("cf")))
    assert await one.deliver(records(*[firing(pod) for pod in "abcdefgh"])) == [8]
    assert one.manager.firing() == set("abdegh")
    assert one.ends() == {"delivered": 6, "dead_lettered": 2}
    assert one.errors() == ["am:1: HTTP 400: said"] * 2
    assert one.value("refused_total") == 2


async def test_a_refused_alert_is_reported_again_nevertheless_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Setup(FakeAlertmanager(bad=frozenset("a")), resend_s=0.02)
    async with one.resending():
        await one.deliver(records(firing("a"), firing("b")))
        await eventually(lambda: (one.value("refused_total") or 0) > 5)
        said = [record.message for record in caplog.records if "is refused" in record.message]
        assert len(said) == 1
        one.manager.bad = frozenset()
        await eventually(lambda: one.manager.firing() == {"a", "b"})
    assert len(one.sender.sent) == 1


async def test_an_alert_that_was_refused_costs_the_others_one_request_more_not_a_search() -> None:
    one = Setup(FakeAlertmanager(bad=frozenset("h")))
    await one.deliver(records(*[firing(pod) for pod in "abcdefgh"]))
    async with one.resending():
        await eventually(lambda: one.value("resent_total") == 8)
        before = len(one.manager.got)
        one.notifier._all_due()
        await eventually(lambda: one.value("resent_total") == 16)
    assert len(one.manager.got) == before + 2


async def test_an_alertmanager_that_refuses_everything_is_not_said_to_be_well() -> None:
    one = Setup(FakeAlertmanager(bad=frozenset("abc")))
    await one.deliver(records(*[firing(pod) for pod in "abc"]))
    assert one.notifier.receiver.failing == "it refuses everything: am:1: HTTP 400: said"
    assert one.value("receiver_failing") == 1
    await one.deliver(records(firing("d"), first=3))
    assert one.notifier.receiver.failing is None


@pytest.mark.parametrize("bad", [b"{nonsense", b"", b"[]"])
async def test_what_cannot_be_decoded_is_a_dead_letter_and_holds_up_nothing(bad: bytes) -> None:
    one = Setup(FakeAlertmanager())
    assert await one.deliver([alert_record(bad, 0), *records(firing("a"), first=1)]) == [2]
    assert one.ends() == {"delivered": 1, "dead_lettered": 1}
    assert one.errors()[0].startswith("not a record of gpu.alerts")


async def test_a_tombstone_is_let_pass() -> None:
    one = Setup(FakeAlertmanager())
    assert await one.deliver([*records(over("a")), deleted(over("a"), 1, at_ms=now_ms())]) == [1, 2]
    assert one.ends() == {"delivered": 1, "duplicate": 1}
    async with one.resending():
        await asyncio.sleep(0.02)
    assert one.manager.heard == [("a", False)]


async def test_after_the_topic_was_made_again_nothing_of_the_old_one_is_reported() -> None:
    one = Setup(FakeAlertmanager())
    one.partition.recall(records(firing("a"), firing("b")))
    one.partition.reset()
    assert await one.deliver(records(firing("a"))) == [1]
    async with one.resending():
        await eventually(lambda: len(one.manager.heard) == 2)
    assert one.manager.firing() == {"a"}


def test_the_log_says_nothing_of_what_goes_well(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def deliver_all() -> None:
        await Setup(FakeAlertmanager()).deliver(records(firing("a"), over("a")))

    asyncio.run(deliver_all())
    assert caplog.records == []


@pytest.mark.parametrize(("given", "posted"), [("http://am:1", ""), ("http://am:1/prefix/", "/prefix")])
async def test_alerts_go_below_an_alertmanager_s_own_address(given: str, posted: str) -> None:
    manager = FakeAlertmanager()
    settings = AlertmanagerSettings(kafka="k:1", urls=(given,))
    notifier = Notifier(given, settings, manager.post, Instruments(INSTRUMENTS), first_s=0.0)
    await notifier.send([firing("a")], asyncio.Event())
    assert [one.url for one in manager.got] == [f"http://am:1{posted}/api/v2/alerts"]
