"""The sink as a component."""

import asyncio

from sinks.settings import WebhookSettings
from sinks.webhook import WebhookSink
from tests.eventually import eventually


async def test_without_a_broker_it_says_so_and_stops_when_asked() -> None:
    sink = WebhookSink(WebhookSettings(kafka="127.0.0.1:1", url="http://127.0.0.1:1", unsigned=True))
    stop = asyncio.Event()
    assert sink.not_ready() == ["not started"]
    running = asyncio.ensure_future(sink.run(stop))
    await eventually(
        lambda: (
            sink.not_ready()
            == ["no Kafka broker answers at 127.0.0.1:1 (KafkaConnectionError): is one up there, for clients?"]
        )
    )
    stop.set()
    await asyncio.wait_for(running, 8)
