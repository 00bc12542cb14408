"""The pods of a node: tenants ask for devices, hold them for the life of a pod, and come back.

In: a node's units and its place in the fleet. Out: pods, in the order of their starts.
State: the free units, the waiting tenants, and the coming events.
Everything depends only on the place and on the time since the fleet's start, however often it is asked.
"""

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from producers.simulated import names
from producers.simulated.behaviours import BEHAVIOURS, Role, Round, Story, rounds
from producers.simulated.hardware import Machine, Unit, in_use, whole_gpus
from producers.simulated.pods import CAST, TEMPLATES, Kind, PodPlace, SimulatedPod, Template, pod

SHORTEST_LIFE_MS = 500
_FIRST_ROLE = 90  # the number of the first behaviour among a node's tenants, which are fewer

REBIRTH_MS = (4_000, 9_000)
"""How long until a pod of a StatefulSet is back under its name: more than twice the longest lag of a kubelet.
So a name in a snapshot is never ambiguous: it means the pod that is nearer in time."""

PAUSES_MS: dict[Kind, tuple[int, int]] = {
    "StatefulSet": REBIRTH_MS, "Deployment": (300, 2_000), "DaemonSet": (300, 2_000), "RayCluster": (300, 2_000),
}  # fmt: skip
"""How long after the end of a pod the next one of its tenant comes; of other kinds a share of a pod's life."""


class Tenant(NamedTuple):
    """A tenant of the node: a template, and how many units of which resource its pods ask for."""

    number: int
    template: Template
    resource: str
    units: int


class _ScheduleEntry(NamedTuple):
    """At ``at_ms`` the units of the pod ``ended`` become free; None: the tenant asks for its next pod."""

    at_ms: int
    order: int
    tenant: Tenant
    ended: SimulatedPod | None


class _PlayedRole(NamedTuple):
    """A role, the units that it keeps, its next round and those after it."""

    next_round: Round
    role: Role
    units: tuple[Unit, ...]
    later: Iterator[Round]


class Schedule:
    """The pods of one node, which live ``pod_life_ms`` on average, before each template's own factor; and, on GPUs of
    their own, those of the node's ``roles``."""

    def __init__(
        self, cluster: str, seed: int, node: int, hardware: Machine, pod_life_ms: int, roles: Sequence[Role] = ()
    ) -> None:
        self._where = (cluster, seed, node)
        self._life_ms = pod_life_ms
        self._random = names.generator("schedule", *self._where)
        self._free: dict[str, list[Unit]] = {}
        self._played: list[_PlayedRole] = []
        whole = whole_gpus(hardware, node)
        for role in roles:
            units, whole = tuple(whole[: role.gpus]), whole[role.gpus :]
            later = rounds(cluster, seed, role)
            self._played.append(_PlayedRole(next(later), role, units, later))
        taken = {unit.device for played in self._played for unit in played.units}
        for unit in in_use(hardware, node):
            if unit.device not in taken:
                self._free.setdefault(unit.resource, []).append(unit)
        self._waiting: list[Tenant] = []
        self._pod_numbers: dict[int, int] = {}
        self._entries: list[_ScheduleEntry] = []
        self._order = 0
        warm_up_ms = min(2 * self._life_ms, 3_600_000)  # how long before the fleet's start the node is empty
        for tenant in tenants(self._free, node, self._random):
            self._push(-warm_up_ms + self._random.randrange(warm_up_ms // 2 + 1), tenant, None)

    def next_ms(self) -> int | None:
        times = [self._entries[0].at_ms] if self._entries else []
        return min(times + [played.next_round.start_ms for played in self._played], default=None)

    def advance(self, until_ms: int) -> list[SimulatedPod]:
        """The pods that start at or before ``until_ms`` and were not returned before, in order."""
        started: list[SimulatedPod] = []
        while self._entries and self._entries[0].at_ms <= until_ms:
            entry = heapq.heappop(self._entries)
            if entry.ended is None:
                self._waiting.append(entry.tenant)
            else:
                for unit in (unit for container in entry.ended.containers for unit in container.units):
                    self._free[unit.resource].append(unit)
                span_ms = PAUSES_MS.get(entry.tenant.template.kind)
                mean_ms = 0.15 * self._life_ms
                pause_ms = self._random.randrange(*span_ms) if span_ms else int(self._random.expovariate(1 / mean_ms))
                self._push(entry.at_ms + pause_ms, entry.tenant, None)
            self._admit(entry.at_ms, started)
        for number, (next_round, role, units, later) in enumerate(self._played):
            while next_round.start_ms <= until_ms:
                place = PodPlace(*self._where, _FIRST_ROLE + BEHAVIOURS.index(role.behaviour), next_round.number)
                story = Story(role, next_round)
                started.append(pod(CAST[role.behaviour], place, next_round.start_ms, next_round.end_ms, units, story))
                next_round = next(later)
            self._played[number] = _PlayedRole(next_round, role, units, later)
        return sorted(started, key=lambda pod: pod.start_ms) if self._played else started

    def _admit(self, now_ms: int, started: list[SimulatedPod]) -> None:
        """Start pods of the waiting tenants, in turn. One that does not fit blocks those behind it for its resource."""
        blocked: set[str] = set()
        for tenant in list(self._waiting):
            free = self._free[tenant.resource]
            if tenant.resource in blocked or len(free) < tenant.units:
                blocked.add(tenant.resource)
                continue
            self._waiting.remove(tenant)
            free.sort()
            units = [free.pop(self._random.randrange(len(free))) for _ in range(tenant.units)]
            mean_ms = self._life_ms * tenant.template.life
            end_ms = now_ms + max(SHORTEST_LIFE_MS, int(self._random.expovariate(1 / mean_ms)))
            number = self._pod_numbers[tenant.number] = self._pod_numbers.get(tenant.number, -1) + 1
            started.append(pod(tenant.template, PodPlace(*self._where, tenant.number, number), now_ms, end_ms, units))
            self._push(end_ms, tenant, started[-1])

    def _push(self, at_ms: int, tenant: Tenant, ended: SimulatedPod | None) -> None:
        self._order += 1
        heapq.heappush(self._entries, _ScheduleEntry(at_ms, self._order, tenant, ended))


def tenants(pools: dict[str, list[Unit]], node: int, chance: random.Random) -> list[Tenant]:
    """The tenants of a node: the templates in turn, until they hold nine tenths of each resource on average.
    Training takes whole devices, and a DaemonSet has one pod on a node."""
    chosen: list[Tenant] = []
    for resource, units in sorted(pools.items()):
        room = max(1, round(0.9 * len(units)))
        turn = node * 5
        while room > 0:
            template = TEMPLATES[turn % len(TEMPLATES)]
            turn += 1
            fitting = [n for n in template.units if n <= room and (n == 1 or resource.startswith("nvidia.com/gpu"))]
            if template.kind == "Job":
                belongs = resource != "nvidia.com/gpu.shared"
            else:
                belongs = template.kind != "DaemonSet" or all(tenant.template != template for tenant in chosen)
            if fitting and belongs:
                count = chance.choice(fitting)
                chosen.append(Tenant(len(chosen), template, resource, count))
                room -= count
    return chosen
