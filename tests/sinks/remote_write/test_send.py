"""Requests are sent until they are accepted or refused, in the protocol that the receiver speaks."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.dead_letters import Abandoned
from delivery.instruments import Instruments
from sinks.remote_write.policy import Answer, Protocol
from sinks.remote_write.send import SERVER_ERRORS, RemoteWriteSender, compressed
from sinks.remote_write.sink import INSTRUMENTS
from sinks.series.model import Row, SampleGroup, SeriesSet
from tests.sinks.remote_write.receivers import Receiver
from tests.sinks.remote_write.wire import read_v1, unsnappy


def group(name: str = "up", value: float = 1.0) -> SampleGroup:
    return SampleGroup(SeriesSet((("gpu", "0"),), (Row(name),)), 5, [value])


class Script:
    """Gives the answers of the test, then 204, and keeps the protocols."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[Protocol] = []
        self.first = asyncio.Event()

    async def post(self, _: bytes, protocol: Protocol) -> Answer:
        self.asked.append(protocol)
        self.first.set()
        return self.answers.pop(0) if self.answers else Answer(204, written=1 if protocol == "2.0" else None)


def transmitter(post: Any, protocol: Literal["auto", "1.0", "2.0"] = "1.0") -> RemoteWriteSender:
    return RemoteWriteSender(post, protocol, Instruments(INSTRUMENTS), first_s=0.0, probe_s=0.0)


async def send(to: RemoteWriteSender, groups: Sequence[SampleGroup] = (), abandon: asyncio.Event | None = None) -> Any:
    return await asyncio.wait_for(to.send(groups or [group()], abandon or asyncio.Event()), 10)


@pytest.mark.parametrize("status", [0, 408, 425, 429, 502, 503, 504])
async def test_what_is_no_refusal_is_tried_again_for_as_long_as_it_takes(status: int) -> None:
    script = Script(*[Answer(status, "away")] * 20)
    to = transmitter(script.post)
    assert await send(to) is None
    assert len(script.asked) == 21
    assert to.failing is None


async def test_that_it_fails_and_that_it_accepts_again_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    to = transmitter(Script(*[Answer(429, "slow down")] * 3).post)

    assert await send(to) is None
    assert await send(to) is None

    failed = "remote write is not accepted, trying again: HTTP 429: slow down"
    assert caplog.messages == [failed, "the receiver accepts again"]


async def test_while_it_fails_the_reason_is_reported() -> None:
    stop = asyncio.Event()
    script = Script(*[Answer(0, "ClientConnectorError: refused")] * 1000)
    to = RemoteWriteSender(script.post, "1.0", Instruments(INSTRUMENTS), first_s=60.0)
    sending = asyncio.ensure_future(to.send([group()], stop))
    await asyncio.wait_for(script.first.wait(), 10)
    await asyncio.sleep(0)
    assert to.failing == "ClientConnectorError: refused"
    stop.set()
    with pytest.raises(Abandoned):
        await sending


async def test_retry_after_is_waited_for() -> None:
    script = Script(Answer(429, retry_after_s=0.05))
    start = asyncio.get_running_loop().time()
    assert await send(transmitter(script.post)) is None
    assert asyncio.get_running_loop().time() - start >= 0.05


async def test_auto_goes_on_in_1_0_if_2_0_is_not_counted_and_remembers() -> None:
    script = Script(Answer(204))
    to = transmitter(script.post, "auto")
    assert await send(to) is None
    assert await send(to) is None
    assert script.asked == ["2.0", "1.0", "1.0"]


async def test_auto_stays_with_2_0_if_it_is_spoken() -> None:
    script = Script()
    to = transmitter(script.post, "auto")
    await send(to)
    script.answers = [Answer(400, "label too long")]
    assert (await send(to)).reason == "rejected"
    assert script.asked == ["2.0", "2.0"]


async def test_an_explicit_2_0_never_falls_back() -> None:
    script = Script(*[Answer(204)] * 3)
    assert await send(transmitter(script.post, "2.0")) is None
    assert set(script.asked) == {"2.0"}


async def test_a_receiver_of_1_0_stores_each_sample_once() -> None:
    receiver = Receiver(speaks_2_0=False)
    await send(transmitter(receiver.post, "auto"))
    assert receiver.values() == {"up": [(5, 1.0)]}


async def test_500_is_tried_again_while_nothing_says_that_the_receiver_is_well() -> None:
    script = Script(*[Answer(500)] * 4 * SERVER_ERRORS)
    assert await send(transmitter(script.post)) is None
    assert len(script.asked) == 4 * SERVER_ERRORS + 1


@pytest.mark.parametrize(("status", "reason"), [(500, "server_error"), (403, "rejected"), (302, "rejected")])
async def test_it_is_the_requests_fault_if_the_receiver_still_takes_what_it_took_last(status: int, reason: str) -> None:
    async def poisoned(body: bytes, _: Protocol) -> Answer:
        names = {dict(received_sample.labels)["__name__"] for received_sample in read_v1(unsnappy(body))}
        return Answer(status, "panic") if "poison" in names else Answer(204)

    to = transmitter(poisoned)
    await send(to, [group("good")])
    assert (await send(to, [group("poison")])).reason == reason
    assert to.failing is None


async def test_500_is_the_receivers_fault_if_it_takes_nothing() -> None:
    script = Script()
    to = transmitter(script.post)
    await send(to)
    script.answers = [Answer(500)] * 3 * (SERVER_ERRORS + 1)
    assert await send(to) is None


async def test_500_is_the_requests_fault_if_others_are_accepted_meanwhile() -> None:
    others = 0

    async def mostly(body: bytes, _: Protocol) -> Answer:
        nonlocal others
        names = {dict(received_sample.labels)["__name__"] for received_sample in read_v1(unsnappy(body))}
        others += "good" in names
        return Answer(500) if "poison" in names else Answer(204)

    to = transmitter(mostly)
    poison, *good = await asyncio.gather(
        send(to, [group("poison")]), *(send(to, [group("good", number)]) for number in range(3))
    )
    assert poison.reason == "server_error"
    assert good == [None] * 3
    assert others <= 4


@given(st.lists(st.tuples(st.binary(max_size=40), st.sampled_from([1, 3, 2_000, 40_000])), max_size=6))
def test_a_body_that_is_compressed_in_pieces_is_one_block(parts: list[tuple[bytes, int]]) -> None:
    pieces = [piece * times for piece, times in parts]

    assert unsnappy(compressed(pieces)) == b"".join(pieces)
