"""What runs on a node, and when: tenants come, ask for devices, hold them for a life time, and come back.

In: a node's units and its place in the fleet. Out: pods, in the order of their starts.
State: the units that are free, the tenants that wait for some, and what happens next.
Everything is a function of the place and of the time since the fleet's start, however often it is asked.
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
"""How long a pod of a StatefulSet is away before it is back under its name: more than twice as long as a kubelet lags.
So a name in a snapshot never stands for two pods: the one that is nearer in time is meant."""

PAUSES_MS: dict[Kind, tuple[int, int]] = {
    "StatefulSet": REBIRTH_MS, "Deployment": (300, 2_000), "DaemonSet": (300, 2_000), "RayCluster": (300, 2_000),
}  # fmt: skip
"""How long after the end of a pod the next one of its tenant comes; of other kinds a share of a pod's life."""


class Tenant(NamedTuple):
    """One place in the node's queue: a template, and how many units of which resource its pods ask for."""

    number: int
    template: Template
    resource: str
    units: int


class _ScheduleEntry(NamedTuple):
    """At ``at_ms`` a pod's units become free (``ended``); or, without one, the tenant asks for its next."""

    at_ms: int
    order: int
    tenant: Tenant
    ended: SimulatedPod | None


class _Played(NamedTuple):
    """A role, the units that it has for good, and its next life."""

    coming: Round
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
        self._played: list[_Played] = []
        whole = whole_gpus(hardware, node)
        for role in roles:
            units, whole = tuple(whole[: role.gpus]), whole[role.gpus :]
            later = rounds(cluster, seed, role)
            self._played.append(_Played(next(later), role, units, later))
        taken = {unit.device for played in self._played for unit in played.units}
        for unit in in_use(hardware, node):
            if unit.device not in taken:
                self._free.setdefault(unit.resource, []).append(unit)
        self._waiting: list[Tenant] = []
        self._made: dict[int, int] = {}
        self._entries: list[_ScheduleEntry] = []
        self._order = 0
        warm_up_ms = min(2 * self._life_ms, 3_600_000)  # how long before the fleet's start the node is empty
        for tenant in tenants(self._free, node, self._random):
            self._push(-warm_up_ms + self._random.randrange(warm_up_ms // 2 + 1), tenant, None)

    def next_ms(self) -> int | None:
        coming = [self._entries[0].at_ms] if self._entries else []
        return min(coming + [played.coming.start_ms for played in self._played], default=None)

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
        for number, (coming, role, units, later) in enumerate(self._played):
            while coming.start_ms <= until_ms:
                place = PodPlace(*self._where, _FIRST_ROLE + BEHAVIOURS.index(role.behaviour), coming.number)
                story = Story(role, coming)
                started.append(pod(CAST[role.behaviour], place, coming.start_ms, coming.end_ms, units, story))
                coming = next(later)
            self._played[number] = _Played(coming, role, units, later)
        return sorted(started, key=lambda one: one.start_ms) if self._played else started

    def _admit(self, now_ms: int, started: list[SimulatedPod]) -> None:
        """Start the tenants that wait, in turn; one that does not fit holds up those behind it for its resource."""
        held_up: set[str] = set()
        for tenant in list(self._waiting):
            free = self._free[tenant.resource]
            if tenant.resource in held_up or len(free) < tenant.units:
                held_up.add(tenant.resource)
                continue
            self._waiting.remove(tenant)
            free.sort()
            units = [free.pop(self._random.randrange(len(free))) for _ in range(tenant.units)]
            mean_ms = self._life_ms * tenant.template.life
            end_ms = now_ms + max(SHORTEST_LIFE_MS, int(self._random.expovariate(1 / mean_ms)))
            number = self._made[tenant.number] = self._made.get(tenant.number, -1) + 1
            started.append(pod(tenant.template, PodPlace(*self._where, tenant.number, number), now_ms, end_ms, units))
            self._push(end_ms, tenant, started[-1])

    def _push(self, at_ms: int, tenant: Tenant, ended: SimulatedPod | None) -> None:
        self._order += 1
        heapq.heappush(self._entries, _ScheduleEntry(at_ms, self._order, tenant, ended))


def tenants(pools: dict[str, list[Unit]], node: int, chance: random.Random) -> list[Tenant]:
    """The tenants of a node: the templates in turn, until they would hold nine tenths of each resource on average.
    Training takes whole devices, and a DaemonSet has one pod on a node."""
    found: list[Tenant] = []
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
                belongs = template.kind != "DaemonSet" or all(tenant.template != template for tenant in found)
            if fitting and belongs:
                asked = chance.choice(fitting)
                found.append(Tenant(len(found), template, resource, asked))
                room -= asked
    return found
