"""The faults of a pipeline, as a table: each is really caused, undone, and named in docs/guarantees.md.

A strike causes its fault, undoes it, and gives the time at which it was undone. What has ended is started again by the
pipeline, as Kubernetes would. Two faults of one part are never at work together.
"""

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

from tests.eventually import eventually, eventually_sync
from tests.real.pipeline import Gpustream
from tests.real.process import Server
from tests.real.proxy import FAILURES, Failure
from tests.real.servers import KafkaServer
from tests.real.soak import Fault, Pipeline

SESSION_S = 10.0
FIXED_BACK_S, MOVING_BACK_S = 5.0, SESSION_S + 8.0
"""What is promised of a member that is killed: with an instance id, and without one."""


# -- what is done to processes


async def kill(process: Server) -> float:
    """Kill a process; it is started again."""
    await asyncio.to_thread(process.kill9)
    return time.time()


async def pause(process: Server, for_s: float) -> float:
    """Stop a process in mid-air, and let it go on."""
    await asyncio.to_thread(process.sigstop)
    try:
        await asyncio.sleep(for_s)
    finally:
        process.sigcont()
    return time.time()


async def roll(processes: list[Gpustream]) -> float:
    """Restart one after the other in good order, each when the one before is ready."""
    for process in processes:
        await asyncio.to_thread(process.stop)
        await asyncio.to_thread(eventually_sync, lambda: process.running and process.ready(), process.name)  # noqa: B023
    return time.time()


def member(pipeline: Pipeline, group: str, number: int) -> Gpustream:
    """A worker of attribution or usage, or a sink: those with an even number have an instance id."""
    members: list[Gpustream] = getattr(pipeline, group)
    return members[number]


async def kill_member(group: str, number: int, pipeline: Pipeline, chance: Random) -> float:
    """Kill a member."""
    return await kill(member(pipeline, group, number))


async def pause_member(group: str, number: int, pipeline: Pipeline, chance: Random) -> float:
    """Stop a member past its session: the group gives its partitions to others meanwhile."""
    return await pause(member(pipeline, group, number), SESSION_S + 5)


async def roll_members(group: str, pipeline: Pipeline, chance: Random) -> float:
    """Restart all members that run."""
    return await roll([process for process in getattr(pipeline, group) if process in pipeline.wanted])


async def scale(group: str, numbers: Sequence[int], pipeline: Pipeline, chance: Random) -> float:
    """Run each of these numbers of workers, one after the other."""
    members: list[Gpustream] = getattr(pipeline, group)
    for number in numbers:
        await pipeline.want(*(process for process in pipeline.wanted if process not in members), *members[:number])
        await asyncio.sleep(5)
    return time.time()


async def kill_the_sink_before_its_commit(pipeline: Pipeline, chance: Random) -> float:
    """Kill a sink between a write that Prometheus accepted and the commit of its offsets."""
    kills, sink = pipeline.receiver.kills, chance.choice(pipeline.sinks)
    pipeline.receiver.kill_at_next(sink.kill9)
    await eventually(lambda: pipeline.receiver.kills > kills, "a write to kill at")
    return time.time()


async def kill_the_fleet(pipeline: Pipeline, chance: Random) -> float:
    """Kill the producer: its next run begins, and what Kafka did not have of the last one is lost.

    The nodes come back with other GPUs and pods: the pods of a seed would live a second time, which none does.
    """
    pipeline.fleet.arguments += ["--seed", str(chance.randrange(1_000_000))]
    return await kill(pipeline.fleet)


async def pause_the_fleet(pipeline: Pipeline, chance: Random) -> float:
    """Stop the producer for longer than a broker waits for anything."""
    return await pause(pipeline.fleet, 12)


# -- what is done to brokers


async def kill_each_broker(pipeline: Pipeline, chance: Random) -> float:
    """Kill one broker after the other, so that every partition, and the controller, is led by another one for a while.

    The next one is killed when all have all records again.
    """
    for broker in chance.sample(pipeline.brokers, len(pipeline.brokers)):
        await asyncio.to_thread(broker.kill9)
        await asyncio.sleep(chance.uniform(1, 6))
        await asyncio.to_thread(broker.start)
        await asyncio.to_thread(eventually_sync, partial(in_sync, broker, len(pipeline.brokers)))
    return time.time()


async def restart_each_broker(pipeline: Pipeline, chance: Random) -> float:
    """Restart one broker after the other in good order, as an upgrade does."""
    for broker in pipeline.brokers:
        await asyncio.to_thread(broker.restart)
        await asyncio.to_thread(eventually_sync, partial(in_sync, broker, len(pipeline.brokers)))
    return time.time()


async def kill_all_but_one_broker(pipeline: Pipeline, chance: Random) -> float:
    """Nothing can be written, and no group has its offsets, until two are back: a record needs two replicas."""
    killed = chance.sample(pipeline.brokers, max(1, len(pipeline.brokers) - 1))
    for broker in killed:
        await asyncio.to_thread(broker.kill9)
    await asyncio.sleep(chance.uniform(4, 12))
    await asyncio.gather(*(asyncio.to_thread(broker.start) for broker in killed))
    return time.time()


def in_sync(broker: KafkaServer, replicas: int) -> bool:
    """Whether every partition of gpu.samples has all its replicas in sync, as this broker says."""
    partitions = broker.admin().list_topics("gpu.samples", timeout=5).topics["gpu.samples"].partitions
    return all(len(partition.isrs) == replicas for partition in partitions.values())


async def pause_a_broker(pipeline: Pipeline, chance: Random) -> float:
    """A broker hangs: its connections stay, and nothing is answered."""
    return await pause(chance.choice(pipeline.brokers), chance.uniform(4, 14))


# -- what runs out on the machine


async def stop_resolving(at_least_s: float, pipeline: Pipeline, chance: Random) -> float:
    """No name resolves, while all connections to a broker break."""
    with pipeline.resolver.unresolvable():
        await asyncio.to_thread(chance.choice(pipeline.brokers).restart)
        await asyncio.sleep(at_least_s + chance.uniform(0, 6))
    return time.time()


async def use_up_descriptors(pipeline: Pipeline, chance: Random) -> float:
    """A process can open no file and no connection more, while all its connections to a broker break."""
    with no_descriptors(chance.choice(pipeline.wanted)):
        await asyncio.to_thread(chance.choice(pipeline.brokers).restart)
        await asyncio.sleep(chance.uniform(4, 10))
    return time.time()


@contextlib.contextmanager
def no_descriptors(process: Gpustream) -> Iterator[None]:
    """The process can open nothing that it had not at its start for as long as it lasts, and keeps what is open.

    The last thing that it opens at its start is /dev/null, as the descriptor that /readyz has in reserve.
    """
    pid, (soft, hard) = process.pid, resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    opened = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            opened += [int(descriptor.name)] if str(descriptor.readlink()) == os.devnull else []
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(opened) + 1, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was restarted meanwhile
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


# -- what is done to the receiver and to clocks


async def fail_the_receiver(failure: Failure, pipeline: Pipeline, chance: Random) -> float:
    """The receiver fails in this way for some seconds."""
    with pipeline.receiver.failing(failure):
        await asyncio.sleep(chance.uniform(6, 14))
    return time.time()


async def kill_prometheus(at_least_s: float, pipeline: Pipeline, chance: Random) -> float:
    """Kill Prometheus, and start it again after a while."""
    await asyncio.to_thread(pipeline.prometheus.kill9)
    await asyncio.sleep(at_least_s + chance.uniform(0, 7))
    await asyncio.to_thread(pipeline.prometheus.start)
    return time.time()


async def skew(by_s: float, pipeline: Pipeline, chance: Random) -> float:
    """The clock of two nodes is wrong for some seconds, by no whole ones: no two readings have the same time."""
    pipeline.set_clock(by_s + 0.4)
    await asyncio.sleep(chance.uniform(4, 8))
    pipeline.set_clock(0)
    return time.time()


FAULTS: tuple[Fault, ...] = (
    Fault("worker with an instance id killed", "workers", partial(kill_member, "workers", 0), FIXED_BACK_S),
    Fault("worker without an instance id killed", "workers", partial(kill_member, "workers", 1), MOVING_BACK_S),
    Fault("sink with an instance id killed", "sinks", partial(kill_member, "sinks", 0), FIXED_BACK_S),
    Fault("sink without an instance id killed", "sinks", partial(kill_member, "sinks", 1), MOVING_BACK_S),
    Fault("worker with an instance id stopped past its session", "workers", partial(pause_member, "workers", 0)),
    Fault("worker without an instance id stopped past its session", "workers", partial(pause_member, "workers", 1)),
    Fault("sink with an instance id stopped past its session", "sinks", partial(pause_member, "sinks", 0)),
    Fault("sink without an instance id stopped past its session", "sinks", partial(pause_member, "sinks", 1)),
    Fault("rolling restart of the workers", "workers", partial(roll_members, "workers")),
    Fault("rolling restart of the sinks", "sinks", partial(roll_members, "sinks")),
    Fault("1, 4, 2 workers", "workers", partial(scale, "workers", (1, 4, 2))),
    Fault("sink killed between write and commit", "sinks", kill_the_sink_before_its_commit),
    Fault("usage worker with an instance id killed", "usage", partial(kill_member, "usage", 0)),
    Fault("usage worker without an instance id killed", "usage", partial(kill_member, "usage", 1)),
    Fault("usage worker with an instance id stopped past its session", "usage", partial(pause_member, "usage", 0)),
    Fault("usage worker without an instance id stopped past its session", "usage", partial(pause_member, "usage", 1)),
    Fault("rolling restart of the usage workers", "usage", partial(roll_members, "usage")),
    Fault("1, 3, 2 usage workers", "usage", partial(scale, "usage", (1, 3, 2))),
    Fault("producer killed", "producers", kill_the_fleet),
    Fault("producer stopped for 12 s", "producers", pause_the_fleet),
    Fault("each broker killed", "brokers", kill_each_broker),
    Fault("each broker restarted", "brokers", restart_each_broker),
    Fault("all brokers but one killed", "brokers", kill_all_but_one_broker),
    Fault("broker hangs", "brokers", pause_a_broker),
    Fault("no name resolves", "brokers", partial(stop_resolving, 4)),
    Fault("descriptors used up", "brokers", use_up_descriptors),
    Fault("Prometheus killed", "receiver", partial(kill_prometheus, 1)),
    *(Fault(f"receiver: {failure}", "receiver", partial(fail_the_receiver, failure)) for failure in FAILURES),
    *(Fault(f"clock {by_s:+g} s", "clocks", partial(skew, by_s)) for by_s in (61, 540, 7200, -3600)),
)

LONG_FAULTS: tuple[Fault, ...] = (
    Fault("no name resolves for a minute", "brokers", partial(stop_resolving, 60)),
    Fault("Prometheus away for three minutes", "receiver", partial(kill_prometheus, 180)),
)
"""What takes too long for a short soak."""
