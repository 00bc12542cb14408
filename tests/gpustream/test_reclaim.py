"""``gpustream reclaim``: what people see of gpu.actions, and what they are told of what can't be written there."""

import asyncio
import json

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from click.testing import CliRunner

from delivery.connection import Connection
from gpustream import history
from gpustream.cli import main
from gpustream.embedded import EmbeddedBroker
from gpustream.reclaim import NotUndone, write_down
from topics import actions
from topics.actions import Action


def test_an_action_of_any_time_is_listed() -> None:
    async def write(kafka: str) -> None:
        async with AIOKafkaProducer(bootstrap_servers=kafka) as producer:
            for number, at in enumerate(("0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00")):
                action = {**actions.TOPIC.example, "id": f"{number:016x}", "at": at, "due_at": at, "state": "planned"}
                await producer.send_and_wait(actions.TOPIC.name, json.dumps(action).encode(), key=b"c")

    with EmbeddedBroker() as running:
        running.start({actions.TOPIC.name: 1})
        asyncio.run(write(running.address))
        result = CliRunner().invoke(main, ["reclaim", "list", "--kafka", running.address])

    _, *lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert [(line[0], line[5]) for line in lines] == [
        ("1970-01-01 00:00:00Z", "1970-01-01 00:00:00Z"),
        ("9999-12-31 23:59:59Z", "9999-12-31 23:59:59Z"),
    ]


def test_a_broker_that_goes_away_while_an_action_is_undone_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "STALLED_S", 0.01)
    action = msgspec.convert(actions.TOPIC.example, Action)
    with pytest.raises(NotUndone, match="it was undone, and that could not be written down: Kafka has taken no record"):
        asyncio.run(asyncio.wait_for(write_down(Connection("127.0.0.1:1"), action), 60))
