"""A partition of alerts on its way to an Alertmanager: new ones at once, open ones repeatedly."""

import asyncio
import logging
import time as clock
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from delivery.clock import now_ms
from delivery.dead_letters import Abandoned, DeadLetters
from delivery.instruments import Instruments
from sinks.alertmanager import COMPONENT, INSTRUMENTS, AlertmanagerPartition, Notifier
from sinks.outcomes import Outcomes
from sinks.settings import AlertmanagerSettings
from tests.eventually import eventually
from tests.sinks.alertmanager.fake import FakeAlertmanager
from tests.sinks.alerts import alert, alert_record, deleted
from tests.sinks.records import ConsumedRecord, FakeSender
from topics.alerts import Alert

STARTS_MS = int(clock.time() * 1000) - 600_000
OVER_MS = STARTS_MS + 590_000


class Setup:
    """One or several partitions, and their collaborators."""

    def __init__(self, manager: FakeAlertmanager, *, max_alerts: int = 256, resend_s: float = 60.0) -> None:
        instruments = Instruments(INSTRUMENTS)
        self.registry = instruments.registry
        self.manager = manager
        self.sender = FakeSender()
        self.outcomes = Outcomes(COMPONENT, instruments)
        settings = AlertmanagerSettings(kafka="k:1", urls=("http://am:1",), max_alerts=max_alerts, resend_s=resend_s)
        self.notifier = Notifier("http://am:1", settings, manager.post, instruments, first_s=0.0)
        letters = DeadLetters(self.sender, "sink alertmanager")  # type: ignore[arg-type]
        self.shared = (self.notifier, letters, self.outcomes, max_alerts)
        self.partition = AlertmanagerPartition(*self.shared)
        self.abandon = asyncio.Event()

    async def deliver(self, records: Sequence[ConsumedRecord]) -> list[int]:
        """Delivers records, counted as an assignment does; gives the offsets after each step."""
        self.outcomes.read(len(records))
        steps = self.partition.deliver(records, self.abandon)
        return await asyncio.wait_for(_all(steps), 20)

    @asynccontextmanager
    async def resending(self) -> AsyncIterator[None]:
        """Open alerts are sent again while inside."""
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


def firing(pod: str, **fields: Any) -> Alert:
    return alert(pod, STARTS_MS, **fields)


def over(pod: str, **fields: Any) -> Alert:
    return alert(pod, STARTS_MS, OVER_MS, **fields)


def records(*alerts: Alert, first: int = 0, ago_ms: int = 0) -> list[ConsumedRecord]:
    """Records that the broker got just now, or so long ago."""
    return [
        alert_record(transition, first + number, at_ms=now_ms() - ago_ms) for number, transition in enumerate(alerts)
    ]


async def test_each_transition_is_reported_in_order_and_each_offset_follows_its_request() -> None:
    setup = Setup(FakeAlertmanager())
    assert await setup.deliver(records(firing("a"), firing("b"), over("a"), over("b"), firing("c"))) == [2, 5]
    assert setup.manager.heard == [("a", True), ("b", True), ("a", False), ("b", False), ("c", True)]
    assert setup.manager.firing() == {"c"}
    assert setup.ends() == {"delivered": 5}


async def test_a_request_has_no_more_alerts_than_it_may() -> None:
    setup = Setup(FakeAlertmanager(), max_alerts=3)
    assert await setup.deliver(records(*[firing(str(pod)) for pod in range(7)])) == [3, 6, 7]
    assert len(setup.manager.requests) == 3
    assert setup.manager.firing() == set("0123456")


async def test_what_is_written_again_is_not_reported_as_new() -> None:
    setup = Setup(FakeAlertmanager())
    for record in records(firing("a"), firing("b"), over("b")):
        setup.partition.recall(record)
    assert await setup.deliver(records(firing("a"), firing("b"), over("b"), first=3)) == [5, 6]
    assert setup.manager.requests == []
    assert setup.ends() == {"duplicate": 3}


async def test_a_record_that_can_not_be_read_changes_nothing_of_the_alert_of_its_key() -> None:
    setup = Setup(FakeAlertmanager())
    malformed = alert_record(b"{nonsense", 1, key=firing("a").fingerprint.encode())
    await setup.deliver([*records(firing("a")), malformed])
    assert setup.value("open_alerts") == 1
    await setup.deliver(records(firing("a"), first=2))
    assert setup.ends() == {"delivered": 1, "dead_lettered": 1, "duplicate": 1}


async def test_after_a_start_what_is_open_is_reported_and_what_ended_lately_and_nothing_else() -> None:
    setup = Setup(FakeAlertmanager())
    ended_alert = over("gone")
    for record in (
        *records(firing("open"), firing("long ago"), over("long ago"), ago_ms=3_600_000),
        *records(firing("over"), over("over"), ended_alert, first=3),
        deleted(ended_alert, 6, at_ms=now_ms()),
        alert_record(b"{nonsense", 7),
    ):
        setup.partition.recall(record)
    async with setup.resending():
        await setup.partition.quiet(setup.abandon)
        await eventually(lambda: len(setup.manager.heard) == 2)
        await setup.partition.quiet(setup.abandon)
        await asyncio.sleep(0.02)
    assert setup.manager.heard == [("open", True), ("over", False)]
    assert (setup.value("open_alerts"), setup.value("resent_total")) == (1, 2)
    assert setup.sender.sent == []


async def test_what_is_open_is_reported_again_and_again_and_later_each_time() -> None:
    setup = Setup(FakeAlertmanager(), resend_s=0.02)
    async with setup.resending():
        await setup.deliver(records(firing("a"), firing("b"), over("b")))
        ends = setup.manager.held["a"]["endsAt"]
        await eventually(lambda: len(setup.manager.heard) >= 12)
    assert setup.manager.held["a"]["endsAt"] > ends
    assert setup.manager.heard[-2:] in ([("a", True), ("b", False)], [("b", False), ("a", True)])


async def test_an_alert_that_is_over_does_not_fire_again_when_its_beginning_is_written_again() -> None:
    setup = Setup(FakeAlertmanager(), resend_s=0.01)
    async with setup.resending():
        await setup.deliver(records(firing("a"), over("a"), firing("a"), firing("b")))
        before = len(setup.manager.requests)
        await eventually(lambda: len(setup.manager.requests) > before + 2)
    assert setup.manager.firing() == {"b"}


async def test_a_partition_that_is_taken_away_is_not_reported_any_more() -> None:
    setup = Setup(FakeAlertmanager(), resend_s=0.02)
    stays, other = AlertmanagerPartition(*setup.shared), asyncio.Event()
    for record in records(firing("stays")):
        stays.recall(record)
    async with setup.resending():
        await setup.deliver(records(firing("leaves")))
        await stays.quiet(other)
        await eventually(lambda: len(setup.manager.heard) >= 6)
        setup.abandon.set()
        await asyncio.sleep(0.05)
        setup.manager.heard.clear()
        await eventually(lambda: len(setup.manager.heard) >= 3)
    assert set(setup.manager.heard) == {("stays", True)}
    assert setup.value("open_alerts") == 1


async def test_an_outage_is_waited_for_and_then_all_that_is_open_is_reported() -> None:
    """Alertmanager has alerts in memory only: after a restart it has none."""
    setup = Setup(FakeAlertmanager())
    for record in records(firing("a"), firing("b"), firing("c")):
        setup.partition.recall(record)
    async with setup.resending():
        await setup.partition.quiet(setup.abandon)
        await eventually(lambda: setup.value("resent_total") == 3)
        setup.manager.restart()
        setup.manager.script = [0, 503, 500, 404]
        assert await setup.deliver(records(over("b"), firing("d"), first=3)) == [5]
        await eventually(lambda: len(setup.manager.held) == 4)
    assert setup.manager.firing() == {"a", "c", "d"}
    assert setup.ends() == {"delivered": 2}


async def test_an_alertmanager_that_fails_now_and_then_is_not_sent_all_that_is_open_each_time() -> None:
    setup = Setup(FakeAlertmanager())
    async with setup.resending():
        await setup.deliver(records(firing("a")))
        setup.manager.script = [503, 200] * 20
        await setup.deliver(records(firing("b"), first=1))
        await eventually(lambda: len(setup.manager.requests) >= 5)
        await asyncio.sleep(0.2)
    assert [request.status for request in setup.manager.requests] == [200, 503, 200, 503, 200]


async def test_no_older_state_arrives_after_a_newer_one() -> None:
    setup = Setup(FakeAlertmanager())
    for record in records(firing("a")):
        setup.partition.recall(record)
    async with setup.resending():
        await setup.partition.quiet(setup.abandon)
        await eventually(lambda: setup.value("resent_total") == 1)
        setup.manager.hold.clear()
        setup.notifier._all_due()
        await eventually(lambda: setup.manager.under_way == 1)
        delivering = asyncio.ensure_future(setup.deliver(records(over("a"), first=1)))
        await asyncio.sleep(0.02)
        assert setup.manager.under_way == 1, "the resolved one waits for its turn"
        setup.manager.hold.set()
        await delivering
    assert setup.manager.heard == [("a", True)] * 2 + [("a", False)]
    assert setup.manager.most == 1


async def test_a_delivery_that_is_abandoned_in_an_outage_marks_nothing_as_reported() -> None:
    setup = Setup(FakeAlertmanager())
    setup.manager.default_status = lambda _: 503
    delivering = asyncio.ensure_future(setup.deliver(records(firing("a"))))
    await eventually(lambda: len(setup.manager.requests) > 2)
    setup.abandon.set()
    with pytest.raises(Abandoned):
        await delivering
    assert setup.ends() == {}
    setup.manager.default_status, setup.abandon = lambda _: 200, asyncio.Event()
    assert await setup.deliver(records(firing("a"))) == [1], "the same handler may get the partition again"
    assert setup.ends() == {"delivered": 1}


async def test_a_refused_alert_is_a_dead_letter_and_the_others_are_in(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(FakeAlertmanager(bad=frozenset("cf")))
    assert await setup.deliver(records(*[firing(pod) for pod in "abcdefgh"])) == [8]
    assert setup.manager.firing() == set("abdegh")
    assert setup.ends() == {"delivered": 6, "dead_lettered": 2}
    assert setup.errors() == ["am:1: HTTP 400: said"] * 2
    assert setup.value("refused_total") == 2


async def test_a_refused_alert_whose_partition_is_revoked_before_its_dead_letter_is_there_gets_it_afterwards() -> None:
    setup = Setup(FakeAlertmanager(bad=frozenset("c")))
    setup.sender.away = True
    delivering = asyncio.ensure_future(setup.deliver(records(firing("c"))))
    await eventually(lambda: setup.value("refused_total") == 1)
    setup.abandon.set()
    with pytest.raises(Abandoned):
        await delivering
    setup.sender.away, setup.abandon = False, asyncio.Event()
    await setup.deliver(records(firing("c")))
    assert setup.ends() == {"dead_lettered": 1}
    assert len(setup.errors()) == 1


async def test_an_alert_that_a_proxy_forbids_is_a_dead_letter_and_the_others_are_in() -> None:
    setup = Setup(FakeAlertmanager())
    setup.manager.default_status = lambda body: 403 if b"bad" in body else 200
    await setup.deliver(records(firing("a"), firing("bad"), firing("b")))
    assert setup.manager.firing() == {"a", "b"}
    assert setup.ends() == {"delivered": 2, "dead_lettered": 1}
    assert setup.errors() == ["am:1: HTTP 403: said"]
    setup.manager.requests.clear()
    await asyncio.wait_for(setup.notifier.resend_now(setup.partition._active), 10)
    assert [(request.status, request.body.count(b"alertname")) for request in setup.manager.requests] == [
        (200, 2),
        (403, 1),
        (200, 0),
    ]
    assert setup.value("receiver_failing") == 0


@pytest.mark.parametrize("forbidden", range(4, 10))
async def test_an_alert_that_was_forbidden_until_just_now_is_delivered(forbidden: int) -> None:
    setup = Setup(FakeAlertmanager())
    answers = iter([403] * forbidden)
    setup.manager.default_status = lambda _: next(answers, 200)
    await setup.deliver(records(firing("a")))
    assert (setup.manager.firing(), setup.ends()) == ({"a"}, {"delivered": 1})


async def test_a_refused_alert_is_sent_again_nevertheless_and_that_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup(FakeAlertmanager(bad=frozenset("a")), resend_s=0.02)
    async with setup.resending():
        await setup.deliver(records(firing("a"), firing("b")))
        await eventually(lambda: (setup.value("refused_total") or 0) > 5)
        messages = [record.message for record in caplog.records if "is refused" in record.message]
        assert len(messages) == 1
        setup.manager.bad = frozenset()
        await eventually(lambda: setup.manager.firing() == {"a", "b"})
    assert len(setup.sender.sent) == 1


async def test_an_alert_that_is_refused_costs_the_others_one_request_more_not_a_search_until_it_is_accepted() -> None:
    setup = Setup(FakeAlertmanager(bad=frozenset("h")))
    await setup.deliver(records(*[firing(pod) for pod in "abcdefgh"]))
    async with setup.resending():
        await eventually(lambda: setup.value("resent_total") == 8)
        before = len(setup.manager.requests)
        setup.notifier._all_due()
        await eventually(lambda: setup.value("resent_total") == 16)
        assert len(setup.manager.requests) == before + 2
        setup.manager.bad = frozenset()
        for resent in (24, 32):
            setup.notifier._all_due()
            await eventually(lambda resent=resent: setup.value("resent_total") == resent)  # type: ignore[misc]
    assert len(setup.manager.requests) == before + 2 + 2 + 1


async def test_an_alertmanager_that_refuses_everything_is_reported_as_failing() -> None:
    setup = Setup(FakeAlertmanager(bad=frozenset("abc")))
    await setup.deliver(records(*[firing(pod) for pod in "abc"]))
    assert setup.notifier.receiver.failing == "it refuses everything: am:1: HTTP 400: said"
    assert setup.value("receiver_failing") == 1
    await setup.deliver(records(firing("d"), first=3))
    assert setup.notifier.receiver.failing is None


async def test_refused_alerts_that_are_over_do_not_make_one_refusal_look_like_all() -> None:
    setup = Setup(FakeAlertmanager(bad=frozenset("abcd")))
    await setup.deliver(records(*[firing(pod) for pod in "abc"]))
    assert setup.notifier.receiver.failing is not None
    await setup.deliver([deleted(over(pod), offset, at_ms=now_ms()) for offset, pod in enumerate("abc", 3)])
    setup.notifier._all_due()
    assert setup.notifier.receiver.failing is None
    await setup.deliver(records(firing("d"), first=6))
    assert setup.notifier.receiver.failing is None


@pytest.mark.parametrize("bad", [b"{nonsense", b"", b"[]"])
async def test_a_record_that_cannot_be_decoded_is_a_dead_letter_and_holds_up_nothing(bad: bytes) -> None:
    setup = Setup(FakeAlertmanager())
    assert await setup.deliver([alert_record(bad, 0), *records(firing("a"), first=1)]) == [2]
    assert setup.ends() == {"delivered": 1, "dead_lettered": 1}
    assert setup.errors()[0].startswith("not a record of gpu.alerts")


async def test_a_tombstone_is_accepted() -> None:
    setup = Setup(FakeAlertmanager())
    assert await setup.deliver([*records(over("a")), deleted(over("a"), 1, at_ms=now_ms())]) == [1, 2]
    assert setup.ends() == {"delivered": 1, "duplicate": 1}
    async with setup.resending():
        await asyncio.sleep(0.02)
    assert setup.manager.heard == [("a", False)]


async def test_after_the_topic_was_created_again_nothing_of_the_old_one_is_reported() -> None:
    setup = Setup(FakeAlertmanager())
    for record in records(firing("a"), firing("b")):
        setup.partition.recall(record)
    setup.partition.reset()
    assert await setup.deliver(records(firing("a"))) == [1]
    async with setup.resending():
        await eventually(lambda: len(setup.manager.heard) == 2)
    assert setup.manager.firing() == {"a"}


def test_success_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def deliver_all() -> None:
        await Setup(FakeAlertmanager()).deliver(records(firing("a"), over("a")))

    asyncio.run(deliver_all())
    assert caplog.records == []


@pytest.mark.parametrize(("address", "posted"), [("http://am:1", ""), ("http://am:1/prefix/", "/prefix")])
async def test_alerts_go_below_an_alertmanager_s_own_address(address: str, posted: str) -> None:
    manager = FakeAlertmanager()
    settings = AlertmanagerSettings(kafka="k:1", urls=(address,))
    notifier = Notifier(address, settings, manager.post, Instruments(INSTRUMENTS), first_s=0.0)
    await notifier.send([firing("a")], asyncio.Event())
    assert [request.url for request in manager.requests] == [f"http://am:1{posted}/api/v2/alerts"]


async def test_the_end_of_an_alert_is_sent_again_at_least_once_however_seldom_that_is() -> None:
    setup = Setup(FakeAlertmanager(), resend_s=3600.0)
    ended_ms = now_ms() - 3_600_000
    await setup.deliver([alert_record(alert("p", ended_ms - 60_000, ended_ms))])
    setup.manager.restart()
    await setup.notifier.resend_now(setup.partition._active)
    assert setup.manager.held.keys() == {"p"}
