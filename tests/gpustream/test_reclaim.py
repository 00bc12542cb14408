"""``gpustream reclaim list``: what people see of gpu.actions."""

import asyncio
import json

from aiokafka import AIOKafkaProducer
from click.testing import CliRunner

from gpustream.cli import main
from gpustream.embedded import EmbeddedBroker
from topics import actions


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
