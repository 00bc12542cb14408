"""Whatever a receiver refuses, every other sample is delivered, once."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from delivery.instruments import Instruments
from sinks.remote_write.policy import Answer, Protocol
from sinks.remote_write.refusals import Delivered, Deliverer
from sinks.remote_write.send import RemoteWriteSender
from sinks.remote_write.sink import INSTRUMENTS
from sinks.series.model import Row, SampleGroup, SeriesSet
from tests.sinks.remote_write.receivers import Kind, Receiver, of_every_kind
from tests.sinks.remote_write.wire import Sample, read_v1, unsnappy

ROWS = tuple(Row(f"m{number}") for number in range(4))


def tick(node: int, ts_ms: int = 5, devices: int = 2) -> list[SampleGroup]:
    names = [(("device", str(device)), ("node", str(node))) for device in range(devices)]
    return [SampleGroup(SeriesSet(labels, ROWS), ts_ms, [float(row) for row in range(len(ROWS))]) for labels in names]


async def send(receiver: Receiver, ticks: Sequence[Sequence[SampleGroup]], protocol: Protocol) -> list[Delivered]:
    instruments = Instruments(INSTRUMENTS)
    deliverer = Deliverer(
        RemoteWriteSender(receiver.post, protocol, instruments, first_s=0.0, probe_s=0.0), instruments
    )
    await deliverer.deliver([[GOOD]], asyncio.Event())
    return await deliverer.deliver(ticks, asyncio.Event())


def identity(sample: Sample) -> tuple[int, int, str]:
    labels = dict(sample.labels)
    return int(labels["node"]), int(labels["device"]), labels["__name__"]


def named(fates: Sequence[Delivered]) -> set[tuple[int, int, str]]:
    """The samples that must have been refused."""
    return {
        (node, int(dict(group.series.labels)["device"]), row.name)
        for node, fate in enumerate(fates)
        for group, _ in fate.refused
        for row in group.series.rows
    }


GOOD = tick(9, devices=1)[0].part([0])
"""A series that is always accepted, by which the receiver shows that it does not refuse everything."""

ALL = {(node, device, f"m{row}") for node in range(4) for device in range(2) for row in range(4)}


@of_every_kind
@given(bad=st.sets(st.sampled_from(sorted(ALL))) | st.just(ALL))
def test_whatever_is_refused_every_other_sample_is_delivered_once(kind: Kind, bad: set[tuple[int, int, str]]) -> None:
    receiver = Receiver(
        lambda received_sample: "label too long" if identity(received_sample) in bad else None, kind=kind
    )
    fates = asyncio.run(send(receiver, [tick(node) for node in range(4)], kind.protocol))
    stored = {(int(dict(key)["node"]), int(dict(key)["device"]), dict(key)["__name__"]) for key in receiver.stored}
    assert stored == ALL - bad | {(9, 0, "m0")}
    assert all(len(points) == 1 for points in receiver.stored.values())
    assert named(fates) == bad
    assert {refusal.reason for fate in fates for _, refusal in fate.refused} <= {"rejected"}


@of_every_kind
async def test_ticks_of_a_last_life_that_are_sent_again_are_accepted(kind: Kind) -> None:
    receiver = Receiver(kind=kind)
    await send(receiver, [tick(node) for node in range(4)], kind.protocol)
    fates = await send(receiver, [tick(node) for node in range(4)], kind.protocol)
    assert named(fates) == set()
    assert all(len(points) == 1 for points in receiver.stored.values())


@of_every_kind
async def test_a_tick_that_is_out_of_order_is_not_split_and_costs_the_others_nothing(kind: Kind) -> None:
    receiver = Receiver(kind=kind)
    await send(receiver, [tick(1, ts_ms=9)], kind.protocol)
    receiver.requests = 0
    fates = await send(receiver, [tick(node) for node in range(4)], kind.protocol)
    assert [{refusal.reason for _, refusal in fate.refused} for fate in fates] == [
        set(),
        {"out_of_order"},
        set(),
        set(),
    ]
    assert fates[1].nothing_of(tick(1))
    assert receiver.requests == 1 + 5  # the good one; all; the first half; its two ticks; the other half
    assert len(receiver.stored) == 1 + 4 * 8


async def test_the_earlier_half_goes_first() -> None:
    order: list[list[int]] = []

    async def refuse_many(body: bytes, _: Protocol) -> Answer:
        order.append(sorted({identity(received_sample)[0] for received_sample in read_v1(unsnappy(body))}))
        return Answer(204 if len(order) != 2 else 400)

    instruments = Instruments(INSTRUMENTS)
    deliverer = Deliverer(RemoteWriteSender(refuse_many, "1.0", instruments), instruments)
    await deliverer.deliver([[GOOD]], asyncio.Event())
    await deliverer.deliver([tick(node) for node in range(4)], asyncio.Event())
    assert order == [[9], [0, 1, 2, 3], [9], [0, 1], [2, 3]]


class SlowReceiver(Receiver):
    """Lets all requests that are under way wait for one another, and answers the last one first."""

    waiting: list["asyncio.Future[None]"]

    async def post(self, body: bytes, protocol: Protocol) -> Answer:
        self.waiting.append(asyncio.get_running_loop().create_future())
        await self.waiting[-1]
        return await super().post(body, protocol)

    async def answer(self, delivering: "asyncio.Future[list[Delivered]]") -> tuple[int, int]:
        """Answers until all is delivered. Returns how often it did so, and the most requests that waited at once."""
        rounds = most = 0
        self.waiting = []
        while True:
            for _ in range(100):  # turns of the loop: whoever can send does
                await asyncio.sleep(0)
            if delivering.done():
                return rounds, most
            rounds, most = rounds + 1, max(most, len(self.waiting))
            for waiter in reversed(self.waiting):
                waiter.set_result(None)
            self.waiting.clear()


async def test_ticks_of_different_nodes_that_are_refused_do_not_wait_for_one_another() -> None:
    receiver = SlowReceiver()
    await receiver.answer(asyncio.ensure_future(send(receiver, [tick(node, ts_ms=9) for node in range(16)], "1.0")))
    delivering = asyncio.ensure_future(send(receiver, [tick(node) for node in range(16)], "1.0"))
    rounds, most = await receiver.answer(delivering)
    assert all(fate.nothing_of(tick(node)) for node, fate in enumerate(await delivering))
    assert (rounds, most) == (1 + 1 + 1 + 1 + 1 + 2, 8), (
        "the good one; all; halves; quarters; eighths; ticks, 8 at once"
    )


async def test_a_tick_waits_for_an_earlier_one_of_its_node_when_others_are_refused() -> None:
    receiver = SlowReceiver(lambda received_sample: "label too long" if identity(received_sample)[0] == 1 else None)
    ticks = [tick(1), tick(0, 1), tick(0, 2), tick(0, 3), tick(2), tick(3)]
    delivering = asyncio.ensure_future(send(receiver, ticks, "1.0"))
    await receiver.answer(delivering)
    assert [bool(fate.refused) for fate in await delivering] == [True, False, False, False, False, False]
    assert [ts_ms for ts_ms, _ in next(points for points in receiver.stored.values() if len(points) > 1)] == [1, 2, 3]


async def test_a_tick_without_samples_is_delivered_by_doing_nothing() -> None:
    receiver = Receiver()
    assert await send(receiver, [[], []], "1.0") == [Delivered(), Delivered()]
    assert receiver.requests == 1
