"""Whatever is killed and however the ticks are dealt out, the same transitions are written, byte for byte."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from streams.alerts.tick import Tick
from streams.alerts.worker import ALERTS, STATE
from tests.clock import run
from tests.streams.alerts.fakes import Broker, Worker, settle
from tests.streams.alerts.stories import lives
from topics.alerts import transition_id


async def undisturbed(ticks: list[Tick]) -> Broker:
    broker = Broker()
    worker = Worker(broker)
    await worker.start()
    for tick in ticks:
        broker.log(tick)
        await worker.live()
    assert worker.failures == []
    return broker


async def disturbed(ticks: list[Tick], chance: Random, *, kills: float) -> Broker:
    """The same ticks in batches of any size, to workers that are killed or lose the partition, at any point."""
    broker = Broker()
    logged = 0
    worker = await _another(broker)
    for _ in range(10_000):
        some = chance.randint(0, 6)
        for tick in ticks[logged : logged + some]:
            broker.log(tick)
            _repeat_some(broker, chance)
        logged = min(len(ticks), logged + some)
        await worker.read(count=chance.randint(1, 9))
        await _let_arrive(worker, chance)
        if chance.random() < 0.5:
            await worker.read(STATE)
        if chance.random() < 0.5:
            worker.commit()
        if chance.random() < kills:
            worker = await _after_a_disturbance(worker, broker, chance)
        elif logged == len(ticks) and worker.position_read() == len(broker.logs["gpu.attributed"]):
            break
        assert worker.failures == []
    worker.sender.holding = False
    worker.sender.land()
    await settle()
    await worker.live()
    return broker


async def _another(broker: Broker) -> Worker:
    worker = Worker(broker)
    worker.sender.holding = True
    await worker.start()
    return worker


async def _after_a_disturbance(worker: Worker, broker: Broker, chance: Random) -> Worker:
    if chance.random() < 0.3:  # a rebalance that leaves the partition here
        await worker.start()
        return worker
    worker.kill(chance)
    await settle()
    return await _another(broker)


async def _let_arrive(worker: Worker, chance: Random) -> None:
    for _ in range(chance.randint(0, 4)):
        worker.sender.land(chance.randint(1, 3))
        await settle()


def _repeat_some(broker: Broker, chance: Random) -> None:
    """The attribution stream writes its last records again, as after a crash of its own."""
    log = broker.logs["gpu.attributed"]
    if chance.random() < 0.1:
        log.extend(log[-chance.randint(1, 5) :])


def transitions(broker: Broker) -> dict[str, bytes]:
    """Every transition by its identity, in order; a repeat must be the same in every byte."""
    found: dict[str, bytes] = {}
    for record, alert in zip((r for r in broker.logs[ALERTS] if r.value), broker.alerts(), strict=True):
        assert record.value is not None
        assert found.setdefault(transition_id(alert), record.value) == record.value
    return found


def last(broker: Broker, topic: str) -> dict[bytes | None, bytes | None]:
    return {record.key: record.value for record in broker.logs[topic]}


def by_alert(found: dict[str, bytes]) -> dict[str, list[str]]:
    """The transitions of each alert, in order of first appearance."""
    lists: dict[str, list[str]] = {}
    for one in found:
        lists.setdefault(one.partition("/")[0], []).append(one)
    return lists


@given(lives(nodes=2, least=12), st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.4]))
def test_any_batching_and_any_restart_give_the_same_transitions(ticks: list[Tick], seed: int, kills: float) -> None:
    straight, crooked = run(undisturbed(ticks)), run(disturbed(ticks, Random(seed), kills=kills))

    expected, found = transitions(straight), transitions(crooked)
    assert set(found) == set(expected)
    for identity, value in expected.items():
        assert found[identity] == value
    assert by_alert(found) == by_alert(expected)
    assert last(crooked, ALERTS) == last(straight, ALERTS)
