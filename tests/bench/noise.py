"""How many alerts people get, and how many of them are worth it: the rules that everybody has, on a simulated fleet.

    python -m tests.bench.noise [MINUTES]

204 GPUs of 17 nodes, whose pods train, serve, work in bursts, start, and are left alone, through the join and the alert
stream's own state machines, in the fleet's time: nothing waits. Each row is the same ticks by other rules.

An alert is useful if its first GPU idles for another :data:`ACT_S` after it fired, by the truth, so that somebody can
act, and if no alert about the same pod was there in the :data:`AGAIN_S` before: it says what nobody knew. All other
alerts about idle GPUs are noise. ``kept`` are the useful ones of the first row that a row has too: an alert about that
pod fires at some time of the :data:`ACT_S` after. Alerts about faults are not counted: all rows have the same.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from producers.simulated.fleet import Fleet
from streams.alerts import tick as ticks
from streams.alerts.node import Replay
from streams.alerts.rules.rule import Rules
from streams.alerts.rules.rules_file import load
from tests.bench.idle import Truth
from tests.bench.score import joined
from topics.alerts import Alert, milliseconds

NODES, GPUS, SEED, POD_LIFE_S, MINUTES, STEP_S = 17, 12, 3, 7200, 90, 5
KEEP_MINUTES = (0, 5, 10, 15, 20)
ACT_S, AGAIN_S = 300, 7200

Pod = tuple[str, str, str]
"""Node, namespace and name."""


class Idleness(NamedTuple):
    """Of a pod's GPU: it was idle from a time to another one."""

    pod: Pod
    uuid: str
    start_ms: int
    end_ms: int


class Found(NamedTuple):
    """An alert: the pods that it is about, when it fired and ended, and the GPU that it began with."""

    pods: frozenset[Pod]
    uuid: str
    start_ms: int
    end_ms: int


class Score(NamedTuple):
    alerts: int
    useful: frozenset[tuple[Pod, int]]


def rules(keep_minutes: int) -> Rules:
    """GPUHeldIdle alone, with this ``keep_firing_for``."""
    (idle,) = load(None).of("held_idle")
    return Rules((msgspec.structs.replace(idle, keep_firing_ms=keep_minutes * 60_000, critical_ms=0),))


def main(minutes: int) -> None:
    """Prints a row for each."""
    replays = {("each GPU", 0): Replay(rules(0), grouped=False)}
    replays |= {("one a workload", keep): Replay(rules(keep)) for keep in KEEP_MINUTES}
    written: dict[tuple[str, int], list[Alert]] = {which: [] for which in replays}
    truths: dict[str, Truth] = {}
    idle: dict[tuple[Pod, str], int] = {}
    spells: list[Idleness] = []
    fleet = Fleet(NODES, GPUS, seed=SEED, pod_life_s=POD_LIFE_S)
    for made, sample in joined(fleet, minutes * 60 // STEP_S, step_s=STEP_S):
        node = made.node.name
        now = {((node, *pod), uuid) for uuid, pod in truths.setdefault(node, Truth(0)).see(made)}
        over = [key for key in idle if key[0][0] == node and key not in now]
        spells += [Idleness(*key, idle.pop(key), made.ts_ms) for key in over]
        idle.update({key: made.ts_ms for key in now if key not in idle})
        read = ticks.decode(msgspec.json.encode(sample))
        for which, replay in replays.items():
            written[which] += replay.take(read, read.ts_ms)
    spells += [Idleness(*key, start_ms, 2**62) for key, start_ms in idle.items()]
    sys.stdout.write("\n".join(rows(written, spells)) + "\n")


def rows(written: dict[tuple[str, int], list[Alert]], spells: list[Idleness]) -> Iterator[str]:
    yield "| alerts about idle GPUs | `keep_firing_for` | alerts | useful | noise | kept |"
    yield "|---|---|---|---|---|---|"
    first: list[Found] | None = None
    for (what, keep), alerts in written.items():
        found = firings(alerts)
        good = [one for i, one in enumerate(found) if is_useful(one, found[:i], spells)]
        first = good if first is None else first
        kept = sum(1 for one in first if any(covers(other, one) for other in found))
        yield f"| {what} | {keep}m | {len(found)} | {len(good)} | {len(found) - len(good)} | {kept} of {len(first)} |"


def firings(alerts: list[Alert]) -> list[Found]:
    """The alerts in the order in which they fired, each with all that it was about."""
    found: dict[tuple[str, int], Found] = {}
    for alert in alerts:
        start_ms = milliseconds(alert.starts_at)
        end_ms = 2**62 if alert.ends_at is None else milliseconds(alert.ends_at)
        key, labels = (alert.fingerprint, start_ms), alert.labels
        own = f"{labels.get('k8s_namespace_name')}/{labels.get('k8s_pod_name')}"
        held = [(gpu.node, gpu.pod or own) for gpu in alert.gpus] or [(alert.node, own)]
        pods: set[Pod] = {(node, pod.partition("/")[0], pod.partition("/")[2]) for node, pod in held}
        uuid = alert.gpus[0].uuid if alert.gpus else labels.get("gpu_mig_uuid") or labels["gpu_uuid"]
        before = found.get(key)
        known = before.pods if before is not None else frozenset[Pod]()
        found[key] = Found(known | pods, before.uuid if before is not None else uuid, start_ms, end_ms)
    return sorted(found.values(), key=lambda one: (one.start_ms, one.uuid))


def is_useful(one: Found, before: list[Found], spells: list[Idleness]) -> bool:
    again = any(one.pods & other.pods and one.start_ms - other.start_ms < AGAIN_S * 1000 for other in before)
    lasts = any(
        spell.pod in one.pods
        and spell.uuid == one.uuid
        and spell.start_ms <= one.start_ms
        and spell.end_ms - one.start_ms >= ACT_S * 1000
        for spell in spells
    )
    return lasts and not again


def covers(one: Found, other: Found) -> bool:
    """Whether an alert fires about the pods of another one soon enough after that began."""
    soon_ms = other.start_ms + ACT_S * 1000
    return bool(one.pods & other.pods) and one.start_ms <= soon_ms and one.end_ms > other.start_ms


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else MINUTES)
