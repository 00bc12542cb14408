"""The sink as a component."""

import asyncio

import pytest

from delivery.dead_letters import Abandoned
from delivery.instruments import Instruments
from sinks.alertmanager import INSTRUMENTS, AlertmanagerSink, Notifier
from sinks.consumer import GroupReader
from sinks.settings import AlertmanagerSettings
from tests.eventually import eventually
from tests.sinks.alertmanager.fake import FakeAlertmanager
from tests.sinks.alerts import alert

SETTINGS = AlertmanagerSettings(kafka="127.0.0.1:1", urls=("http://127.0.0.1:1", "http://127.0.0.1:2"))


async def test_without_a_broker_it_says_so_of_each_alertmanager_and_stops_when_asked() -> None:
    sink, stop = AlertmanagerSink(SETTINGS), asyncio.Event()
    assert sink.not_ready() == ["not started"]
    running = asyncio.ensure_future(sink.run(stop))
    waiting = "no Kafka broker answers at 127.0.0.1:1 (KafkaConnectionError): is one up there, for clients?"
    await eventually(lambda: sink.not_ready() == [f"127.0.0.1:1: {waiting}", f"127.0.0.1:2: {waiting}"])
    groups = [reader._settings.group for _, reader in sink._alertmanagers]
    assert groups == [SETTINGS.group_of(url) for url in SETTINGS.urls]
    stop.set()
    await asyncio.wait_for(running, 8)


async def test_two_alertmanagers_behind_one_address_are_told_apart_by_their_paths() -> None:
    urls = ("http://gateway:80/am-0", "http://gateway:80/am-1/", "http://other:80/am")
    settings, instruments = AlertmanagerSettings(kafka="127.0.0.1:1", urls=urls), Instruments(INSTRUMENTS)
    down, well, other = [FakeAlertmanager(*[503] * 1000), FakeAlertmanager(), FakeAlertmanager()]
    notifiers = [
        Notifier(url, settings, manager.post, instruments, first_s=0.0)
        for url, manager in zip(urls, (down, well, other), strict=True)
    ]
    abandon = asyncio.Event()
    sending = asyncio.ensure_future(notifiers[0].send([alert()], abandon))
    await eventually(lambda: len(down.requests) > 2)
    await notifiers[1].send([alert()], abandon)

    def failing(receiver: str) -> float | None:
        name = "gpustream_alertmanager_receiver_failing"
        return instruments.registry.get_sample_value(name, {"receiver": receiver})

    assert [failing("gateway:80/am-0"), failing("gateway:80/am-1"), failing("other:80")] == [1.0, 0.0, 0.0]
    abandon.set()
    with pytest.raises(Abandoned):
        await sending


async def test_a_reader_that_fails_ends_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[object] = []

    async def run(self: object, stop: asyncio.Event) -> None:
        if not stopped:
            stopped.append("failed")
            raise ZeroDivisionError
        await stop.wait()
        stopped.append("in good order")

    monkeypatch.setattr(GroupReader, "run", run)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(AlertmanagerSink(SETTINGS).run(asyncio.Event()), 8)
    assert stopped == ["failed", "in good order"]


async def test_a_teller_that_fails_ends_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resend(_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Notifier, "resend", resend)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(AlertmanagerSink(SETTINGS).run(asyncio.Event()), 8)
