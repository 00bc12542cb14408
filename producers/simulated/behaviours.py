"""The behaviours of a simulated fleet with ``--behaviours``: GPUs that look busy and are not, and what goes wrong.

In: the fleet's size and seed, and the behaviours. Out: which of its GPUs behave so, in pods of their own, and when; and
what such a GPU does meanwhile.
State: none. Everything is a function of the fleet and of the time since its start.

The figures are published ones, or follow from them:

- A collective that hangs shows 100 % utilization at about 70 W (NVIDIA/nccl#968): its kernel spins. NCCL starts at most
  32 thread blocks, on a Hopper GPU of 132 SMs, and needs no tensor cores. PyTorch ends such a job after 10 minutes, if
  its watchdog is on.
- All ranks of a synchronous job take the time of the slowest one. What the others save they spend in a collective, and
  that counts as utilization.
- HW slowdown divides the clocks by 2 or more, by heat or by the machine's power brake; SW thermal slowdown lowers them
  as far as it takes (nvml.h). None of the six counters of violations counts a power brake.
- A kubelet waits 10 s before it starts a container that failed again, twice as long each time, and at most 5 minutes.
- vLLM takes 0.9 of a GPU's memory, however many requests come.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count, pairwise
from typing import Literal, NamedTuple, get_args

from producers.simulated import names
from producers.simulated.hardware import machine, whole_gpus

Behaviour = Literal[
    "hung", "straggler", "throttled", "loader-bound", "notebook", "hoarder", "crash-loop", "underused"
]  # fmt: skip
BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)
SYNCHRONOUS: tuple[Behaviour, ...] = ("hung", "straggler")  # those of a job with ranks on several nodes

CLOCK_SETTING, SW_THERMAL, HW_SLOWDOWN, HW_POWER_BRAKE = 0x2, 0x20, 0x8, 0x80  # bits of clock_event_reasons
CELL_EVERY_MS = 14 * 60_000
BACK_OFF_S = (10, 20, 40, 80, 160, 300)
BLOCK = 10  # nodes: each behaviour is there once in each block of nodes
_FIRST_MS = -90_000  # the first pods of each behaviour run when the fleet starts
_RANKS = 4  # of a synchronous job on one node, at most
_ATTEMPT_MS = 25_000  # how long a container runs before it fails
_CHECKPOINT_EVERY_MS, _CHECKPOINT_MS = 900_000, 25_000

_LASTS: dict[Behaviour, tuple[tuple[int, int], tuple[int, int]]] = {
    "hung": ((5, 30), (9, 120)),
    "straggler": ((5, 30), (30, 180)),
    "throttled": ((5, 30), (5, 60)),
    "loader-bound": ((0, 0), (60, 240)),
    "notebook": ((0, 0), (240, 480)),
    "hoarder": ((0, 0), (300, 480)),
    "crash-loop": ((0, 0), (30, 180)),
    "underused": ((0, 0), (300, 600)),
}
"""For how many minutes a pod does well, and then behaves so: the least and the most of each."""

_CAUSES: dict[Behaviour, tuple[str, ...]] = {
    "straggler": ("clock", "thermal", "host"),
    "throttled": ("thermal", "power-brake"),
}

_MEMORY: dict[Behaviour, float] = {
    "hung": 0.8, "straggler": 0.8, "throttled": 0.7, "loader-bound": 0.93, "notebook": 0.35, "hoarder": 0.9,
    "crash-loop": 0.5, "underused": 0.3,
}  # fmt: skip


def behaviour_names(text: str) -> tuple[Behaviour, ...]:
    """Behaviours, as an option names them. Raises ValueError."""
    requested = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in requested if name not in (*BEHAVIOURS, "all")]:
        raise ValueError(f"{', '.join(unknown)!r} is no behaviour: write some of {', '.join(BEHAVIOURS)}, or all")
    return tuple(behaviour for behaviour in BEHAVIOURS if behaviour in requested or "all" in requested)


class Role(NamedTuple):
    """A behaviour on some GPUs of a node: the job's ranks from ``first_rank`` on are there, of ``ranks`` in all."""

    behaviour: Behaviour
    block: int
    gpus: int
    worker: int = 0
    first_rank: int = 0
    ranks: int = 1


class Round(NamedTuple):
    """One life of a behaviour's pods: they do well until ``turns_ms``. ``cause`` makes the ``victim``, a rank, slow by
    the ``factor``; ``seed``, in [0, 1), stands for all that differs."""

    number: int
    start_ms: int
    turns_ms: int
    end_ms: int
    cause: str
    victim: int
    factor: float
    seed: float


class Doing(NamedTuple):
    """What a container does with a GPU. ``use``: the share of the time in which a kernel runs. ``compute``: that in
    which one computes; in the rest of ``use`` it waits for others. ``memory``: the share of the memory that it has.
    ``reasons``: what keeps the clocks down to ``clock``."""

    use: float
    compute: float
    memory: float
    clock: float = 1.0
    reasons: int = 0
    hot: bool = False


class Label(NamedTuple):
    """How a pod truly behaves on a GPU, since when, and why. ``waiting``: it waits for a straggler; ``healthy``: its
    behaviour has not begun."""

    behaviour: str
    since_ms: int
    cause: str = ""


class Story(NamedTuple):
    """What a pod of a behaviour does in its life."""

    role: Role
    round: Round

    def label(self, rank: int, at_ms: int) -> Label:
        if at_ms < self.round.turns_ms:
            return Label("healthy", self.round.start_ms)
        if self.role.behaviour == "straggler" and rank != self.round.victim:
            return Label("waiting", self.round.turns_ms, self.round.cause)
        return Label(self.role.behaviour, self.round.turns_ms, self.round.cause)

    def doing(self, rank: int, now_ms: int, age_ms: int, chance: float) -> Doing | None:
        """What the rank does, by its processes' ``age_ms`` and a ``chance`` in [0, 1); None: it has no process."""
        behaviour, seed = self.role.behaviour, self.round.seed
        memory = _MEMORY[behaviour] + 0.05 * seed
        if behaviour == "crash-loop":
            last = attempt(age_ms)
            begun = age_ms - last.start_ms > 15_000
            return _evenly(0.2 if begun else 0.0, memory) if age_ms < last.fails_ms else None
        if age_ms < 4_000:
            return _evenly(0.0, memory)
        match behaviour:
            case "hung" | "straggler" | "throttled":
                return self._training(rank, now_ms, age_ms, chance)._replace(memory=memory)
            case "loader-bound":
                period_ms = 6_000 + 8_000 * seed
                return _evenly(0.85 + 0.15 * chance if age_ms % period_ms < 0.25 * period_ms else 0.0, memory)
            case "notebook":
                cell_ms = 20_000 + 40_000 * names.fraction("cell", seed, age_ms // CELL_EVERY_MS)
                return _evenly(0.4 + 0.5 * chance if age_ms % CELL_EVERY_MS < cell_ms else 0.0, memory)
            case "hoarder":
                period_ms = (25 + 30 * seed) * 60_000
                return _evenly(0.6 + 0.35 * chance if age_ms % period_ms < 3_000 + 5_000 * seed else 0.0, memory)
            case "underused":
                return _evenly(0.03 + 0.04 * chance, memory)

    def _training(self, rank: int, now_ms: int, age_ms: int, chance: float) -> Doing:
        """One step after the other. The last tenth of each step is spent in a collective with the other ranks."""
        behaviour, (_, _, turns_ms, _, cause, victim, factor, _) = self.role.behaviour, self.round
        compute = 0.88 - 0.06 * chance
        usual = Doing(1.0 - 0.03 * chance, compute, 0.0)
        turned = now_ms >= turns_ms
        if behaviour == "hung" and turned:
            return Doing(1.0, 0.0, 0.0)
        writes = age_ms > 60_000 and age_ms % _CHECKPOINT_EVERY_MS < _CHECKPOINT_MS  # then nobody computes
        doing = _evenly(0.02 * chance, 0.0) if writes else usual
        if not turned:
            return doing
        if behaviour == "straggler" and rank != victim:
            return doing if writes else Doing(1.0, compute * factor, 0.0)
        match cause:
            case "clock":
                return doing._replace(clock=factor, reasons=CLOCK_SETTING)
            case "thermal":
                return doing if writes else doing._replace(clock=factor, hot=True)
            case "power-brake":
                return doing._replace(clock=0.5, reasons=HW_SLOWDOWN | HW_POWER_BRAKE)
            case _:  # its host is slow to give it work
                return doing if writes else Doing(min(1.0, compute * factor + 0.05), compute * factor, 0.0)


def _evenly(use: float, memory: float) -> Doing:
    return Doing(use, use, memory)


class Attempt(NamedTuple):
    """A container that fails again and again runs from ``start_ms`` to ``fails_ms``, after that many restarts."""

    restarts: int
    start_ms: int
    fails_ms: int


def attempts() -> Iterator[Attempt]:
    at_ms = 0
    for restarts in count():
        yield Attempt(restarts, at_ms, at_ms + _ATTEMPT_MS)
        at_ms += _ATTEMPT_MS + BACK_OFF_S[min(restarts, len(BACK_OFF_S) - 1)] * 1000


def attempt(age_ms: int) -> Attempt:
    """The last attempt that has begun at this age."""
    return next(before for before, after in pairwise(attempts()) if age_ms < after.start_ms)


def rounds(cluster: str, seed: int, role: Role) -> Iterator[Round]:
    """The lives of a role's pods, one after the other: the same on all nodes of a job."""
    chance = names.generator("behaviour", cluster, seed, role.behaviour, role.block)
    well, after = _LASTS[role.behaviour]
    causes, at_ms, number = _CAUSES.get(role.behaviour, ("",)), _FIRST_MS, chance.randrange(6)
    first = number
    while True:
        well_ms = chance.uniform(*well) * 60_000
        if number == first and well_ms:
            well_ms = chance.uniform(150_000, 270_000)
        turns_ms = int(at_ms + well_ms)
        end_ms = int(turns_ms + chance.uniform(*after) * 60_000)
        cause, victim = causes[number % len(causes)], chance.randrange(role.ranks)
        yield Round(number, at_ms, turns_ms, end_ms, cause, victim, chance.uniform(0.5, 0.8), chance.random())
        at_ms, number = end_ms + chance.randrange(60_000, 300_000), number + 1


@lru_cache(maxsize=64)
def cast(
    cluster: str, seed: int, nodes: int, gpus: int, behaviours: Sequence[Behaviour], block: int
) -> dict[int, tuple[Role, ...]]:
    """Which node of a block has which roles. A synchronous job is on the first two nodes whose GPUs say what their SMs
    do, and on no more than half of each; the others are spread over the other nodes."""
    free: dict[int, int] = {}
    profiled: list[int] = []
    for index in range(BLOCK * block, min(nodes, BLOCK * (block + 1))):
        hardware = machine(cluster, seed, index, gpus)
        free[index] = len(whole_gpus(hardware, index))
        if hardware.devices[0].model.gpm and free[index]:
            profiled.append(index)
    roles_by_node: dict[int, list[Role]] = {}
    shares = [(index, max(1, min(_RANKS, free[index] // 2))) for index in profiled[:2]]
    ranks = sum(share for _, share in shares)
    for behaviour in SYNCHRONOUS:
        if behaviour in behaviours and ranks > 1 and all(free[index] >= share for index, share in shares):
            first = 0
            for worker, (index, share) in enumerate(shares):
                roles_by_node.setdefault(index, []).append(Role(behaviour, block, share, worker, first, ranks))
                free[index] -= share
                first += share
    alone = [behaviour for behaviour in BEHAVIOURS if behaviour in behaviours and behaviour not in SYNCHRONOUS]
    for number, behaviour in enumerate(alone):
        room = [index for index, gpus_left in free.items() if gpus_left and index not in profiled[:2]]
        room = room or [index for index, gpus_left in free.items() if gpus_left]
        if room:
            index = room[number % len(room)]
            roles_by_node.setdefault(index, []).append(Role(behaviour, block, 1))
            free[index] -= 1
    return {index: tuple(roles) for index, roles in roles_by_node.items()}
