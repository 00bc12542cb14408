"""A partition's transitions on their way to a webhook: in order, at least once, and no more often than that."""

import asyncio
import hashlib
import hmac
import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.dead_letters import Abandoned, DeadLetters
from delivery.instruments import Instruments
from sinks import webhook
from sinks.outcomes import Outcomes
from sinks.receiver import Receiver
from sinks.webhook import AHEAD, COMPONENT, INSTRUMENTS, PENDING, Secret, WebhookPartition
from tests.eventually import eventually
from tests.sinks.alerts import START_MS, Writing, alert, alert_record, deleted, deliver_until, writings, written
from tests.sinks.receivers import Scripted
from tests.sinks.records import ConsumedRecord, FakeSender
from topics.alerts import Alert, transition_id

OVER_MS = START_MS + 60_000


class Setup:
    """A partition and its collaborators."""

    def __init__(
        self, scripted: Scripted, *, at_once: int = 8, secret: Secret | None = None, most_refused: float = math.inf
    ) -> None:
        instruments = Instruments(INSTRUMENTS)
        self.registry = instruments.registry
        self.scripted = scripted
        self.sender = FakeSender()
        self.outcomes = Outcomes(COMPONENT, instruments)
        receiver = Receiver(
            "http://h:1/hook",
            scripted.post,
            COMPONENT,
            instruments,
            at_once=at_once,
            most_refused=most_refused,
            first_s=0.0,
        )
        letters = DeadLetters(self.sender, "sink webhook")  # type: ignore[arg-type]
        self.receiver = receiver
        self.partition = WebhookPartition(receiver, "record", secret or Secret(None), letters, self.outcomes)
        self.abandon = asyncio.Event()
        self.read = 0

    async def begin(self, records: Sequence[ConsumedRecord]) -> list[int]:
        """Gives the partition records, counted as an assignment does; it may keep some of them unfinished.

        Gives the offsets after each step.
        """
        self.read += len(records)
        self.outcomes.read(len(records))
        return [offset async for offset in self.partition.deliver(records, self.abandon)]

    async def deliver(self, records: Sequence[ConsumedRecord]) -> list[int]:
        """The same, repeated without more records until all are finished: a slow machine takes more calls."""
        offsets = await self.begin(records)
        while sum(self.ends().values()) < self.read:
            await asyncio.sleep(0)
            offsets += await self.begin(())
        return offsets

    def posted(self) -> list[str]:
        """The identities of the transitions that were accepted."""
        return [request.headers["Idempotency-Key"] for request in self.scripted.accepted()]

    def ends(self) -> dict[str, int]:
        """How many records ended in which way."""
        counts = {
            end: int(self.registry.get_sample_value(f"gpustream_webhook_records_{end}_total") or 0)
            for end in ("delivered", "duplicate", "dead_lettered")
        }
        return {end: count for end, count in counts.items() if count}

    def errors(self) -> list[str]:
        """Of the dead letters."""
        return [headers["error"].decode() for _, _, headers in self.sender.sent]


def records(*alerts: Alert, first: int = 0) -> list[ConsumedRecord]:
    return [alert_record(transition, first + number) for number, transition in enumerate(alerts)]


async def test_each_transition_is_posted_as_its_record_is_and_signed(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"key\n")
    setup = Setup(Scripted(), secret=Secret(file))
    firing, over = alert(), alert(ends_ms=OVER_MS)
    assert (await setup.deliver(records(firing, over)))[-1] == 2
    assert setup.posted() == [transition_id(firing), transition_id(over)]
    for request, transition in zip(setup.scripted.requests, (firing, over), strict=True):
        assert request.url == "http://h:1/hook"
        assert request.body == msgspec.json.encode(transition)
        signature = hmac.new(b"key", request.body, hashlib.sha256).hexdigest()
        assert request.headers["X-Gpustream-Signature"] == f"sha256={signature}"
    assert setup.ends() == {"delivered": 2}


async def test_what_was_posted_before_is_not_posted_when_it_is_written_again() -> None:
    setup = Setup(Scripted())
    for record in records(alert("a"), alert("b"), alert("b", ends_ms=OVER_MS)):
        setup.partition.recall(record)
    replayed = records(alert("a"), alert("b", ends_ms=OVER_MS), alert("b"), alert("a"), first=3)
    assert (await setup.deliver(replayed))[-1] == 7
    assert setup.scripted.requests == []
    assert setup.ends() == {"duplicate": 4}


async def test_what_was_recalled_undecodable_has_its_dead_letter_already() -> None:
    setup = Setup(Scripted())
    setup.partition.recall(alert_record(b"{", 0))
    await setup.deliver(records(alert(), first=1))
    assert setup.ends() == {"delivered": 1}
    assert setup.sender.sent == []


async def test_a_tombstone_is_accepted_and_its_alert_may_fire_again() -> None:
    setup = Setup(Scripted())
    over = alert(ends_ms=OVER_MS)
    replayed = [alert_record(over, 0), deleted(over, 1, at_ms=OVER_MS), alert_record(over, 2)]
    assert (await setup.deliver(replayed))[-1] == 3
    assert setup.posted() == [transition_id(over)] * 2
    assert setup.ends() == {"delivered": 2, "duplicate": 1}


@pytest.mark.parametrize("bad", [b"{nonsense", b"", b"[]"])
async def test_a_record_that_cannot_be_decoded_is_a_dead_letter_and_holds_up_nothing(bad: bytes) -> None:
    setup = Setup(Scripted())
    assert (await setup.deliver([alert_record(bad, 0), *records(alert(), first=1)]))[-1] == 2
    assert setup.ends() == {"delivered": 1, "dead_lettered": 1}
    assert setup.errors()[0].startswith("not a record of gpu.alerts")


async def test_a_refused_transition_is_a_dead_letter_and_the_next_one_goes_on() -> None:
    setup = Setup(Scripted(default_status=lambda body: 422 if b'"firing"' in body else 204))
    assert (await setup.deliver(records(alert(), alert(ends_ms=OVER_MS))))[-1] == 2
    assert setup.posted() == [transition_id(alert(ends_ms=OVER_MS))]
    assert setup.ends() == {"delivered": 1, "dead_lettered": 1}
    assert setup.errors() == ["refused: HTTP 422: said"]


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
async def test_an_outage_loses_nothing_and_keeps_the_order_of_each_alert(
    patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "_STUCK_AFTER_S", patience_s)
    setup = Setup(Scripted(*[0, 503, 429, 500, 401] * 10))
    await setup.deliver(records(*[alert(pod, ends_ms=ends) for ends in (None, OVER_MS) for pod in "abcde"]))
    assert sorted(setup.posted()) == sorted(set(setup.posted()))
    for pod in "abcde":
        of_pod = [identity for identity in setup.posted() if identity.startswith(alert(pod).fingerprint)]
        assert of_pod == [transition_id(alert(pod)), transition_id(alert(pod, ends_ms=OVER_MS))]


async def test_alerts_do_not_wait_for_one_another_but_one_waits_for_itself() -> None:
    setup = Setup(Scripted(), at_once=3)
    setup.scripted.hold.clear()
    delivering = asyncio.ensure_future(
        setup.deliver(records(alert("a"), alert("a", ends_ms=OVER_MS), alert("b"), alert("c"), alert("d"), alert("e")))
    )
    await eventually(lambda: setup.scripted.under_way == 3)
    setup.scripted.hold.set()
    await delivering
    assert setup.scripted.most == 3
    first = [request.headers["Idempotency-Key"] for request in setup.scripted.requests[:3]]
    assert first == [transition_id(alert(pod)) for pod in "abc"]


async def test_no_offset_passes_an_unfinished_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_STUCK_AFTER_S", 60.0)
    setup = Setup(Scripted(default_status=lambda body: 503 if b'"k8s_pod_name":"b"' in body else 200))
    setup.outcomes.read(3)
    steps = setup.partition.deliver(records(alert("a"), alert("b"), alert("c")), setup.abandon)
    assert await asyncio.wait_for(anext(steps), 10) == 1
    await eventually(lambda: len(setup.posted()) == 2)
    setup.abandon.set()
    with pytest.raises(Abandoned):
        await asyncio.wait_for(anext(steps), 10)
    assert setup.ends() == {"delivered": 1}, "the third was accepted, and is posted again by whoever is next"


async def test_an_alert_that_is_not_accepted_holds_up_no_other_that_comes_later() -> None:
    setup = Setup(Scripted(default_status=lambda body: 503 if b'"k8s_pod_name":"0"' in body else 200))
    assert await setup.begin(records(alert("0"))) == []
    later = records(*[alert(str(pod)) for pod in range(1, 40)], first=1)
    assert await setup.begin(later[:10]) == []
    assert await setup.begin(later[10:]) == []
    await eventually(lambda: len(setup.posted()) == 39)
    assert setup.posted() == [transition_id(alert(str(pod))) for pod in range(1, 40)]
    more_records = records(alert("0", ends_ms=OVER_MS), first=40)
    assert await setup.begin(more_records) == []
    setup.scripted.default_status = lambda _: 200
    await eventually(lambda: len(setup.posted()) == 41)
    assert (await setup.deliver([]))[-1] == 41
    assert setup.posted()[-2:] == [transition_id(alert("0")), transition_id(alert("0", ends_ms=OVER_MS))]
    assert setup.ends() == {"delivered": 41}


async def test_no_more_are_begun_ahead_of_an_unfinished_transition_than_may_be_posted_again() -> None:
    setup = Setup(Scripted(default_status=lambda body: 503 if b'"k8s_pod_name":"0"' in body else 200))
    log = records(*[alert(str(pod)) for pod in range(AHEAD + 100)])
    delivering = asyncio.ensure_future(setup.deliver(log))
    await eventually(lambda: len(setup.posted()) == AHEAD - 1)
    tries = len(setup.scripted.requests)
    await eventually(lambda: len(setup.scripted.requests) > tries + 20)
    assert len(setup.posted()) == AHEAD - 1
    setup.scripted.default_status = lambda _: 200
    assert (await delivering)[-1] == AHEAD + 100
    assert len(set(setup.posted())) == len(setup.posted()) == AHEAD + 100


async def test_in_an_outage_few_requests_are_in_flight() -> None:
    setup = Setup(Scripted(default_status=lambda _: 503))
    delivering = asyncio.ensure_future(setup.deliver(records(*[alert(str(pod)) for pod in range(100)])))
    await eventually(lambda: len(setup.scripted.requests) > 200)
    assert len({request.headers["Idempotency-Key"] for request in setup.scripted.requests}) == PENDING
    setup.abandon.set()
    with pytest.raises(Abandoned):
        await delivering


async def test_a_partition_that_comes_back_begins_again_with_what_it_had_not_finished() -> None:
    setup = Setup(Scripted(default_status=lambda body: 503 if b'"k8s_pod_name":"0"' in body else 200))
    assert await setup.begin(records(alert("0"), alert("1"))) == []
    await eventually(lambda: len(setup.posted()) == 1)
    setup.read = 0
    setup.abandon.set()
    setup.abandon = asyncio.Event()
    setup.scripted.default_status = lambda _: 200
    assert (await setup.deliver(records(alert("0"), alert("1"), alert("2"))))[-1] == 3
    assert sorted(setup.posted()) == sorted(transition_id(alert(pod)) for pod in "012")


async def test_what_counts_as_delivered_is_given_as_finished_though_the_next_one_is_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(webhook, "_STUCK_AFTER_S", 60.0)
    setup = Setup(Scripted(default_status=lambda body: 503 if b'"k8s_pod_name":"1"' in body else 200))
    setup.scripted.hold.clear()
    steps = setup.partition.deliver(records(alert("0"), alert("1")), setup.abandon)
    first = asyncio.ensure_future(anext(steps))
    await eventually(lambda: setup.scripted.under_way == 2, "both are under way")
    setup.abandon.set()
    setup.scripted.hold.set()
    assert (await first, setup.ends()) == (1, {"delivered": 1})
    with pytest.raises(Abandoned):
        await anext(steps)


async def test_a_receiver_that_refuses_everything_keeps_the_transitions() -> None:
    setup = Setup(Scripted(default_status=lambda _: 400), most_refused=3)
    delivering = asyncio.ensure_future(setup.deliver(records(*[alert(str(pod)) for pod in range(9)])))
    await eventually(lambda: len(setup.scripted.requests) > 30)
    assert setup.ends() == {"dead_lettered": 3}
    assert setup.receiver.failing == "it refuses everything: HTTP 400: said"
    setup.scripted.default_status = lambda _: 200
    await delivering
    assert setup.ends() == {"dead_lettered": 3, "delivered": 6}


async def test_after_the_topic_was_created_again_everything_is_news() -> None:
    setup = Setup(Scripted())
    setup.partition.recall(records(alert())[0])
    setup.partition.reset()
    await setup.deliver(records(alert()))
    assert setup.ends() == {"delivered": 1}


@given(
    writings=writings,
    statuses=st.lists(st.sampled_from([200, 202, 503, 429, 0, 302]), max_size=40),
    lives=st.lists(st.integers(1, 12), max_size=6),
    seed=st.integers(0, 99),
)
def test_whatever_fails_and_restarts_each_alert_s_transitions_arrive_in_order(
    writings: list[Writing], statuses: list[int], lives: list[int], seed: int
) -> None:
    written_alerts, by_pod = written(writings, START_MS)
    scripted = Scripted(*statuses)
    asyncio.run(_live(scripted, records(*written_alerts), [*lives, 0], random.Random(seed)))
    posted = [request.headers["Idempotency-Key"] for request in scripted.accepted()]
    for pod, of_pod in by_pod.items():
        ids = [identity for identity in posted if identity.startswith(alert(pod).fingerprint)]
        first_seen = list(dict.fromkeys(ids))  # as a receiver that knows identities sees them
        assert first_seen == list(dict.fromkeys(map(transition_id, of_pod)))  # new figures alone are no news


async def _live(scripted: Scripted, log: list[ConsumedRecord], lives: list[int], chance: random.Random) -> None:
    """Deliver the log in several lives; each but the last is killed before a commit."""
    committed = 0
    for requests in lives:
        setup = Setup(scripted, at_once=3)
        for record in log[:committed]:
            setup.partition.recall(record)
        killed_at = len(scripted.requests) + requests if requests else math.inf
        while committed < len(log):
            batch = log[committed : committed + chance.randint(1, 8)]
            committed = await deliver_until(killed_at, scripted.requests, setup.partition, setup.outcomes, batch)
            if len(scripted.requests) >= killed_at:
                break
