"""A component's reports and behaviour while its topics can't be used, with a scripted broker."""

import asyncio

import pytest

from delivery import topic_admin
from delivery.connection import Connection
from delivery.kafka_admin import BrokerUnavailable
from delivery.settings import TopicAccess
from delivery.topic_admin import Checked, ContractMismatch, Mismatch, TopicCheck

USES = TopicAccess(reads=("gpu.samples",), optional=("gpu.workloads",))
MISSING = ContractMismatch([Mismatch("gpu.samples", "the topic", "there", "missing")])
RESIZED = ContractMismatch([Mismatch("gpu.samples", "its number of partitions", "32, as gpu.workloads has", "1")])
GOOD = Checked({"gpu.samples": 32}, (Mismatch("gpu.samples", "segment.ms", "3600000", "604800000", breaks=False),))


class FakeBroker:
    """A broker that gives these answers, one after the other; ``checked`` are the topics of each check."""

    def __init__(self, *results: Checked | Exception) -> None:
        self._results = list(results)
        self.checked: list[tuple[str, ...]] = []
        self.waiting: list[list[str]] = []
        self.check: TopicCheck | None = None

    async def __call__(self, connection: Connection, uses: TopicAccess) -> Checked:
        if self.check is not None:
            self.waiting.append(self.check.not_ready())
        self.checked.append((*uses.reads, *uses.optional))
        answer = self._results.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no pause between two checks."""
    monkeypatch.setattr(topic_admin, "CHECK_AGAIN_S", (0.0,))


def scripted_check(monkeypatch: pytest.MonkeyPatch, *answers: Checked | Exception) -> tuple[TopicCheck, FakeBroker]:
    fake_broker, check = FakeBroker(*answers), TopicCheck(Connection("kafka:9092"), USES)
    fake_broker.check = check
    monkeypatch.setattr(topic_admin, "check", fake_broker)
    return check, fake_broker


async def test_the_check_names_missing_topics_and_the_command_to_run_and_ends_when_they_exist(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check, broker = scripted_check(
        monkeypatch, BrokerUnavailable("no Kafka broker answers"), MISSING, MISSING, RESIZED, GOOD
    )

    assert await check.wait(asyncio.Event()) is GOOD

    run = "run `gpustream topics create`"
    missing = [f"gpu.samples: the topic is missing, must be there: {run}"]
    assert broker.waiting == [
        ["no Kafka broker has answered at kafka:9092 yet"],
        ["no Kafka broker answers"],
        missing,
        missing,
        [f"gpu.samples: its number of partitions is 1, must be 32, as gpu.workloads has: {run}"],
    ]
    assert check.not_ready() == []
    assert set(broker.checked) == {("gpu.samples", "gpu.workloads")}
    assert sum("the topic is missing" in line for line in caplog.messages) == 1
    assert sum("segment.ms is 604800000" in line for line in caplog.messages) == 1


async def test_the_check_says_that_the_prefix_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ContractMismatch(MISSING.mismatches, hint="is --topic-prefix right?")
    check, broker = scripted_check(monkeypatch, missing, GOOD)
    await check.wait(asyncio.Event())
    assert broker.waiting[1][1:] == ["is --topic-prefix right?"]


async def test_a_stop_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_admin, "CHECK_AGAIN_S", (3600.0,))
    check, broker = scripted_check(monkeypatch, MISSING)
    stop = asyncio.Event()
    waiting = asyncio.ensure_future(check.wait(stop))
    while not broker.checked:  # noqa: ASYNC110 - one turn of the loop
        await asyncio.sleep(0)
    stop.set()

    assert await asyncio.wait_for(waiting, 10) is None
