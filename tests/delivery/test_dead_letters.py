"""A component that writes dead letters says so if it can't."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from delivery import sender as sender_module
from delivery.dead_letters import Abandoned, DeadLetters
from tests.sinks.records import ConsumedRecord, FakeSender

RECORD = ConsumedRecord(7, b"{")


async def test_a_letter_that_waits_for_kafka_is_reported_until_it_is_written_or_abandoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender_module, "UNREADY_AFTER_S", -1.0)
    sender = FakeSender(away=True)
    sender.not_ready, sender.refusal = list, lambda: None  # type: ignore[attr-defined]
    letters, abandon = DeadLetters(sender, "sink"), asyncio.Event()  # type: ignore[arg-type]
    assert letters.not_ready() == []
    of_two_groups = [asyncio.create_task(letters.write(RECORD, "why", abandon)) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert letters.not_ready() == ["a dead letter has waited 0 s for Kafka"]
    abandon.set()
    assert [type(end) for end in await asyncio.gather(*of_two_groups, return_exceptions=True)] == [Abandoned] * 2
    assert letters.not_ready() == []
    sender.away = False
    await letters.write(RECORD, "why", asyncio.Event())
    assert letters.not_ready() == []


def test_the_senders_own_reason_is_the_better_one() -> None:
    sender = AsyncMock(not_ready=lambda: ["gpu.dead-letters: not acknowledged"])
    assert DeadLetters(sender, "sink").not_ready() == ["gpu.dead-letters: not acknowledged"]
