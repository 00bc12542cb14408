"""How many alerts people get, and how many of them are worth it: every rule, on simulated fleets whose truth is known.

    python -m tests.bench.noise [MINUTES [HOURS [SEED]]]

204 GPUs of 17 nodes, through the join and the alert stream's own state machines, in the fleet's time: nothing waits.

1. MINUTES of a fleet whose pods train, serve, work in bursts, start, and are left alone: ``GPUHeldIdle`` with several
   ``keep_firing_for``. An alert is useful if its first GPU idles for another :data:`ACT_S` after it fired, by the
   truth, so that somebody can act, and if no alert about the same pod was there in the :data:`AGAIN_S` before: it says
   what nobody knew. All other alerts are noise. ``kept`` are the useful ones of the first row that a row has too: an
   alert about that pod fires at some time of the :data:`ACT_S` after.
2. HOURS of such a fleet in which every ten nodes have each of the simulated behaviours, too: every rule, whether it is
   on by default or not. ``false`` are alerts about what is not so when they fire, ``again`` those that are true and say
   what the rule said of that pod in the :data:`AGAIN_S` before, or that come when it is over within :data:`ACT_S`;
   ``missed`` are spells that lasted for the rule's own time and :data:`ACT_S` more, and no alert was about them: none
   of the rule, nor of one that comes before it as the cause (``CAUSES``).
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from producers.simulated.behaviours import BEHAVIOURS
from producers.simulated.fleet import Fleet
from streams.alerts import tick as ticks
from streams.alerts.node import Replay
from streams.alerts.rules import rules_file
from streams.alerts.rules.rule import CAUSES, WINDOWED, Rule, Rules
from tests.bench.idle import IDLE_BELOW
from tests.bench.score import START_MS, joined
from tests.producers.simulated.fleet_ticks import Tick as SimulatedTick
from topics.alerts import Alert
from topics.times import epoch_ms

NODES, GPUS, SEED, POD_LIFE_S, MINUTES, STEP_S = 17, 12, 3, 7200, 90, 5
HOURS, LABELLED_STEP_S = 6.5, 10
KEEP_MINUTES = (0, 5, 10, 15, 20)
ACT_S, AGAIN_S = 300, 7200
FOREVER_MS = 2**62

Pod = tuple[str, str, str]
"""Node, namespace and name."""


class Spell(NamedTuple):
    """Of a pod's GPU: something was so from a time to another one."""

    pod: Pod
    uuid: str
    start_ms: int
    end_ms: int


class Firing(NamedTuple):
    """An alert: the pods that it is about, when it fired and ended, and the GPU that it began with."""

    pods: frozenset[Pod]
    uuid: str
    start_ms: int
    end_ms: int


class Spells:
    """When each alert would be true, of which pod and GPU, taken tick by tick."""

    def __init__(self) -> None:
        self._going: dict[tuple[str, Pod, str], int] = {}
        self.by_name: dict[str, list[Spell]] = {}

    def see(self, node: str, present: set[tuple[str, Pod, str]], ts_ms: int) -> None:
        """Take the spells that are true of a node in a tick, each as the alert's name, the pod and the GPU's UUID."""
        for key in [key for key in self._going if key[1][0] == node and key not in present]:
            self._end(key, ts_ms)
        self._going.update({key: ts_ms for key in present if key not in self._going})

    def close(self) -> None:
        for key in list(self._going):
            self._end(key, FOREVER_MS)

    def _end(self, key: tuple[str, Pod, str], end_ms: int) -> None:
        name, pod, uuid = key
        self.by_name.setdefault(name, []).append(Spell(pod, uuid, self._going.pop(key), end_ms))


def main(minutes: int, hours: float, seed: int) -> None:
    """Prints both tables."""
    sys.stdout.write("\n".join(of_bursts(minutes)) + "\n\n")
    sys.stdout.write("\n".join(of_behaviours(hours, seed)) + "\n")


# -- alerts about idle GPUs, by how long they outlast a burst


def rules(keep_minutes: int) -> Rules:
    """GPUHeldIdle alone, with this ``keep_firing_for``."""
    (idle,) = rules_file.load(None).of("held_idle")
    return Rules((msgspec.structs.replace(idle, keep_firing_ms=keep_minutes * 60_000, critical_ms=0),))


def of_bursts(minutes: int) -> Iterator[str]:
    replays = {("each GPU", 0): Replay(rules(0), grouped=False)}
    replays |= {("one a workload", keep): Replay(rules(keep)) for keep in KEEP_MINUTES}
    written: dict[tuple[str, int], list[Alert]] = {which: [] for which in replays}
    spells = Spells()
    fleet = Fleet(NODES, GPUS, seed=SEED, pod_life_s=POD_LIFE_S)
    for tick, sample in joined(fleet, minutes * 60 // STEP_S, step_s=STEP_S):
        spells.see(tick.node.name, set(_true(tick)), tick.ts_ms)
        read = ticks.decode(msgspec.json.encode(sample))
        for which, replay in replays.items():
            written[which] += replay.judge(read, read.ts_ms)
    spells.close()
    yield "| alerts about idle GPUs | `keep_firing_for` | alerts | useful | noise | kept |"
    yield "|---|---|---|---|---|---|"
    first: list[Firing] | None = None
    for (way, keep), alerts in written.items():
        fired = firings(alerts)
        good = [firing for i, firing in enumerate(fired) if is_useful(firing, fired[:i], spells.by_name["GPUHeldIdle"])]
        first = good if first is None else first
        covered = sum(1 for firing in first if any(covers(candidate, firing) for candidate in fired))
        yield f"| {way} | {keep}m | {len(fired)} | {len(good)} | {len(fired) - len(good)} | {covered} of {len(first)} |"


# -- every rule, beside what is true

ABOUT: dict[str, Callable[[dict[str, Any]], bool]] = {
    "GPUHeldIdle": lambda label: label["use"] < IDLE_BELOW,
    "GPUStalled": lambda label: label["behaviour"] == "hung",
    "GPUStraggler": lambda label: label["behaviour"] == "straggler",
    "GPUUnderused": lambda label: label["behaviour"] in ("underused", "notebook", "hoarder", "crash-loop", "idle"),
    "GPUMemoryHoarded": lambda label: label["behaviour"] == "hoarder",
    "GPUCrashLoop": lambda label: label["behaviour"] == "crash-loop",
    "GPUThermalSlowdown": lambda label: label.get("cause") == "thermal" and label["behaviour"] != "waiting",
    "GPUPowerBrake": lambda label: label.get("cause") == "power-brake",
    "GPUUsedUnallocated": lambda label: False,
    "GPUAttributionConflict": lambda label: False,
}
"""Of which labels of the truth a rule is true."""


def of_behaviours(hours: float, seed: int) -> Iterator[str]:
    defaults = [default for name, default in rules_file.defaults().items() if name in ABOUT]
    replay = Replay(Rules(tuple(msgspec.structs.replace(default, enabled=True) for default in defaults)))
    written: list[Alert] = []
    spells = Spells()
    fleet = Fleet(NODES, GPUS, seed=seed, pod_life_s=POD_LIFE_S, behaviours=BEHAVIOURS)
    for tick, sample in joined(fleet, int(hours * 3600) // LABELLED_STEP_S, step_s=LABELLED_STEP_S):
        spells.see(tick.node.name, set(_true(tick)), tick.ts_ms)
        read = ticks.decode(msgspec.json.encode(sample))
        written += replay.judge(read, read.ts_ms)
    spells.close()
    yield "| rule | by default | alerts | useful | again | false | missed | seconds until it fired |"
    yield "|---|---|---|---|---|---|---|---|"
    fired = {rule.name: firings([alert for alert in written if alert.name == rule.name]) for rule in defaults}
    for rule in defaults:
        earlier = CAUSES[: CAUSES.index(rule.kind)] if rule.kind in CAUSES else ()
        causes = [firing for cause in defaults if cause.kind in earlier for firing in fired[cause.name]]
        scores = scored(rule, fired[rule.name], causes, spells.by_name)
        yield f"| `{rule.name}` | {'on' if rule.enabled else 'off'} | {scores} |"


def _true(tick: SimulatedTick) -> Iterator[tuple[str, Pod, str]]:
    labels = tick.node.behaviours(tick.ts_ms - START_MS)
    for device, rows in zip(tick.reading.devices, labels, strict=True):
        for label in rows:
            pod = tick.node.name, label["namespace"], label["pod"]
            yield from ((name, pod, device["uuid"]) for name, about in ABOUT.items() if about(label))


def scored(rule: Rule, fired: list[Firing], causes: list[Firing], spells: dict[str, list[Spell]]) -> str:
    """The figures of a rule: by its alerts, those of the rules that come before it, and what was true."""
    of_rule = spells.get(rule.name, [])
    good = [firing for i, firing in enumerate(fired) if is_useful(firing, fired[:i], of_rule)]
    false = [firing for firing in fired if not any(holds(firing, spell) for spell in of_rule)]
    needs_ms = max(rule.for_ms + rule.grace_ms, rule.window_ms if rule.kind in WINDOWED else 0)
    end_ms = max((spell.start_ms for of_name in spells.values() for spell in of_name), default=0)
    long = [spell for spell in of_rule if min(spell.end_ms, end_ms) - spell.start_ms >= needs_ms + ACT_S * 1000]
    missed = [spell for spell in long if not any(meets(firing, spell) for firing in (*fired, *causes))]
    began = [max(spell.start_ms for spell in of_rule if holds(firing, spell)) for firing in good]
    waited = [(firing.start_ms - start_ms) / 1000 for firing, start_ms in zip(good, began, strict=True)]
    cells = (
        len(fired),
        len(good),
        len(fired) - len(good) - len(false),
        len(false),
        f"{len(missed)} of {len(long)}",
        round(statistics.median(waited)) if waited else "",
    )
    return " | ".join(map(str, cells))


def firings(alerts: list[Alert]) -> list[Firing]:
    """The alerts in the order in which they fired, each with all that it was about."""
    by_key: dict[tuple[str, int], Firing] = {}
    for alert in alerts:
        start_ms = epoch_ms(alert.starts_at)
        end_ms = FOREVER_MS if alert.ends_at is None else epoch_ms(alert.ends_at)
        key, labels = (alert.fingerprint, start_ms), alert.labels
        pod_name = f"{labels.get('k8s_namespace_name')}/{labels.get('k8s_pod_name')}"
        holders = [(gpu.node, gpu.pod or pod_name) for gpu in alert.gpus] or [(alert.node, pod_name)]
        pods: set[Pod] = {(node, pod.partition("/")[0], pod.partition("/")[2]) for node, pod in holders}
        uuid = alert.gpus[0].uuid if alert.gpus else labels.get("gpu_mig_uuid") or labels["gpu_uuid"]
        before = by_key.get(key)
        pods_before = before.pods if before is not None else frozenset[Pod]()
        by_key[key] = Firing(pods_before | pods, before.uuid if before is not None else uuid, start_ms, end_ms)
    return sorted(by_key.values(), key=lambda firing: (firing.start_ms, firing.uuid))


def is_useful(firing: Firing, before: list[Firing], spells: list[Spell]) -> bool:
    again = any(firing.pods & other.pods and firing.start_ms - other.start_ms < AGAIN_S * 1000 for other in before)
    lasts = any(holds(firing, spell) and spell.end_ms - firing.start_ms >= ACT_S * 1000 for spell in spells)
    return lasts and not again


def holds(firing: Firing, spell: Spell) -> bool:
    """Whether what an alert says of its first GPU was so when it fired."""
    return spell.uuid == firing.uuid and spell.pod in firing.pods and spell.start_ms <= firing.start_ms < spell.end_ms


def meets(firing: Firing, spell: Spell) -> bool:
    """Whether an alert about the pod of a spell fires at some time of it."""
    return spell.pod in firing.pods and firing.start_ms < spell.end_ms and firing.end_ms > spell.start_ms


def covers(firing: Firing, earlier: Firing) -> bool:
    """Whether an alert fires about the pods of another one soon enough after that began."""
    soon_ms = earlier.start_ms + ACT_S * 1000
    return bool(firing.pods & earlier.pods) and firing.start_ms <= soon_ms and firing.end_ms > earlier.start_ms


if __name__ == "__main__":
    arguments = [*sys.argv[1:], *map(str, (MINUTES, HOURS, SEED)[len(sys.argv) - 1 :])]
    main(int(arguments[0]), float(arguments[1]), int(arguments[2]))
