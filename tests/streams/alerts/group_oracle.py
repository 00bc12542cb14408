"""The alerts of several GPUs, from all ticks of all nodes, by docs/reference/alerts.md ("One alert for many GPUs", "All
GPUs", "Peers") and the runbook of GPUStraggler.

Written from those pages alone, to be compared with the stream. The conditions of single GPUs are computed by
``oracle.py``. Here each tick slowly looks at all of them again, and only the last record is remembered.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import msgspec

from streams.alerts.rules.rule import Rule, Rules, policy_of
from streams.alerts.tick import Device, Tick
from tests.streams.alerts.oracle import MINUTE_MS, MISSING_SAYS_NOTHING_MS, OF_PODS, WINDOW_STEP_MS, History, Spell
from topics.alerts import Alert, AlertGpu
from topics.attributed import Holder
from topics.times import epoch_ms

AT_ONE_TIME = ("missing", "lost", "not_answering")
SEVERITIES = ("info", "warning", "critical")
SERVING = ("Deployment", "ReplicaSet", "DaemonSet")
HOUR_MS = 3_600_000
SLOWED_DOWN = 0x8 | 0x20 | 0x40 | 0x80

Whose = tuple[str, ...]
"""What an alert is about: the scope, and the names of the workload, pod, node or GPU."""


class Transition(NamedTuple):
    """A record of an alert. ``number`` is that of the tick that causes it."""

    number: int
    name: str
    whose: Whose
    state: str
    revision: int
    starts_ms: int
    ends_ms: int | None
    severity: str
    gpus: frozenset[AlertGpu]
    held: int | None
    idle: int | None


class Part(NamedTuple):
    """A GPU in an alert, by the numbers of ticks: from its first to the one in which it is over, if it ever is."""

    name: str
    whose: Whose
    gpu: AlertGpu
    first: int
    starts_ms: int
    severity: str
    critical: int | None
    last: int | None
    ends_ms: int | None

    def is_open(self, number: int) -> bool:
        return self.first <= number and (self.last is None or number < self.last)

    def severity_at(self, number: int) -> int:
        is_critical = self.critical is not None and self.critical <= number
        return SEVERITIES.index("critical" if is_critical else self.severity)


def as_written(number: int, alert: Alert) -> Transition:
    """The record of an alert of the stream, in the form of the oracle."""
    labels = alert.labels
    pod = labels.get("k8s_namespace_name", ""), labels.get("k8s_pod_name", "")
    if not alert.gpus:
        whose: Whose = ("gpu", alert.node, labels.get("gpu_mig_uuid") or labels.get("gpu_uuid", ""))
    elif "k8s_workload_name" in labels:
        whose = ("workload", pod[0], labels["k8s_workload_kind"], labels["k8s_workload_name"])
    else:
        whose = ("pod", alert.node, *pod) if pod[1] else ("node", alert.node)
    return Transition(
        number, alert.name, whose, alert.state, alert.revision, epoch_ms(alert.starts_at),
        None if alert.ends_at is None else epoch_ms(alert.ends_at), alert.severity, frozenset(alert.gpus),
        alert.held, alert.idle,
    )  # fmt: skip


def alerts(rules: Rules, log: Sequence[Tick]) -> list[Transition]:
    """All records written for the ticks of some nodes, in the order of their log, by the rules of the kinds that make
    alerts of several GPUs."""
    fleet = Fleet(rules, log)
    single, parts = fleet.parts()
    parts += [part for rule in rules.of("straggler") for part in fleet.stragglers(rule)]
    transitions = [transition for part in single for transition in _of_one(part)]
    for name, whose in {(part.name, part.whose) for part in parts}:
        transitions += fleet.life(name, whose, parts)
    return transitions


class Fleet:
    """The ticks of some nodes."""

    def __init__(self, rules: Rules, log: Sequence[Tick]) -> None:
        self.rules, self.log = rules, log
        self._rule = {rule.name: rule for rule in rules.rules}
        self.numbers: dict[str, list[int]] = {}  # of a node: which of the log's ticks are its own
        for number, tick in enumerate(log):
            self.numbers.setdefault(tick.node, []).append(number)
        judged = tuple(rule for rule in rules.rules if rule.kind in (*OF_PODS, *AT_ONE_TIME))
        of_gpus = msgspec.structs.replace(rules, rules=judged)
        self.histories = {node: History(of_gpus, [log[n] for n in numbers]) for node, numbers in self.numbers.items()}
        self._held_cache: dict[tuple[Whose, int], int] = {}

    # -- what becomes of single GPUs

    def parts(self) -> tuple[list[Part], list[Part]]:
        """GPUs that are alerts of their own, and those that are parts of one."""
        single, together = list[Part](), list[Part]()
        for node, history in self.histories.items():
            spells = [spell for subject in sorted(history.subjects()) for spell in history.spells(subject)]
            for spell in sorted(spells, key=lambda spell: spell.first):
                kind = self._rule[spell.subject.name].kind
                if kind in OF_PODS:
                    together.append(self._part(node, spell, self._whose(node, spell)))
                elif kind in AT_ONE_TIME:
                    several = self._goes_with_others(node, spell, single)
                    whose = ("node", node) if several else ("gpu", node, spell.subject.device)
                    (together if several else single).append(self._part(node, spell, whose))
        return single, together

    def _part(self, node: str, spell: Spell, whose: Whose) -> Part:
        history, numbers, name, uuid = (
            self.histories[node],
            self.numbers[node],
            spell.subject.name,
            spell.subject.device,
        )
        last_seen = next(
            present for i in range(spell.first, -1, -1) if (present := history._present(uuid, i)) is not None
        )
        pods = [holder for holder in last_seen.holders if spell.subject.pod_uid == holder.pod_uid] or _sole(
            last_seen.holders
        )
        gpu = _gpu(node, last_seen, pods[0] if pods else None)
        if self._rule[name].kind in AT_ONE_TIME:
            is_present = history._present(uuid, spell.first) is not None
            held_by = last_seen.holders if is_present else self.holders(node, uuid, spell.first)
            names = dict.fromkeys(f"{holder.namespace}/{holder.pod}" for holder in held_by)
            gpu = msgspec.structs.replace(gpu, pod=", ".join(names) or None)
        return Part(
            name, whose, gpu, numbers[spell.first], spell.starts_ms, self._rule[name].severity,
            None if spell.critical is None else numbers[spell.critical],
            None if spell.last is None else numbers[spell.last], spell.ends_ms,
        )  # fmt: skip

    def _whose(self, node: str, spell: Spell) -> Whose:
        device = self.histories[node]._present(spell.subject.device, spell.first)
        assert device is not None
        return _whose(node, next(holder for holder in device.holders if holder.pod_uid == spell.subject.pod_uid))

    def _goes_with_others(self, node: str, spell: Spell, single: list[Part]) -> bool:
        """Whether the condition also holds for another GPU of the node that has no alert of its own by then."""
        history, number = self.histories[node], self.numbers[node][spell.first]
        before = {part.gpu.uuid for part in single if part.gpu.node == node and part.name == spell.subject.name
                  and part.first < number and part.is_open(number - 1)}  # fmt: skip
        uuids = {device.uuid for tick in history.ticks[: spell.first + 1] for device in tick.devices}
        others = uuids - before - {spell.subject.device}
        return any(history.verdict(spell.subject._replace(device=uuid), spell.first).holds for uuid in others)

    # -- what workloads hold

    def held_by_node(self, whose: Whose, number: int) -> dict[str, int]:
        """How many GPUs an owner holds after a tick, by node; a GPU that its pods share counts once for each pod."""
        counts: dict[str, int] = {}
        for node, numbers in self.numbers.items():
            last = max([index for index, n in enumerate(numbers) if n <= number], default=None)
            if last is not None:
                counts[node] = self._held_there(node, whose, last)
        return counts

    def _held_there(self, node: str, whose: Whose, last: int) -> int:
        key, history = (whose, self.numbers[node][last]), self.histories[node]
        if key not in self._held_cache:
            uuids = {device.uuid for tick in history.ticks[: last + 1] for device in tick.devices}
            pods = {(uuid, pod.namespace, pod.pod, pod.pod_uid) for uuid in uuids
                    if self._may_be_held(history, uuid, last) for pod in self.holders(node, uuid, last)
                    if not pod.observed and _whose(node, pod) == whose}  # fmt: skip
            self._held_cache[key] = len(pods)
        return self._held_cache[key]

    def _may_be_held(self, history: History, uuid: str, last: int) -> bool:
        """Whether a device is present, or missing for so short a time that it still counts as held."""
        last_seen = history._last(uuid, last)
        if last_seen == last or not history._was_there(uuid, last):
            return last_seen == last
        return history.ticks[last].ts_ms - history.ticks[last_seen + 1].ts_ms <= MISSING_SAYS_NOTHING_MS

    def holders(self, node: str, uuid: str, last: int) -> tuple[Holder, ...]:
        """The holders of a device, by the last tick that had the device and a snapshot."""
        history = self.histories[node]
        for i in range(last, -1, -1):
            device = history._present(uuid, i)
            if device is not None and history.ticks[i].attribution != "none":
                return device.holders
            if not history._was_there(uuid, i):
                break
        return ()

    # -- an alert of several

    def life(self, name: str, whose: Whose, all_parts: Sequence[Part]) -> Iterator[Transition]:
        """The records of an alert: its GPUs are determined again at each tick."""
        rule, last = self._rule[name], None
        parts = [part for part in all_parts if (part.name, part.whose) == (name, whose)]
        of_kind = {kind: [part for part in all_parts if part.whose == whose and self._rule[part.name].kind == kind]
                   for kind in ("held_idle", "crash_loop", "stalled")}  # fmt: skip
        for number in range(len(self.log)):
            going = [part for part in parts if part.is_open(number)]
            if not going and (last is None or last.state == "resolved"):
                continue
            count_by_node = {
                node: max(count, sum(part.gpu.node == node for part in going))  # a missing GPU is still one of them
                for node, count in self.held_by_node(whose, number).items()
            }
            held_by_node = self.held_by_node(whose, number)
            others = {
                kind: [
                    part
                    for part in parts_of_kind
                    if part.is_open(number) and (whose[0] == "pod" or held_by_node[part.gpu.node])
                ]
                for kind, parts_of_kind in of_kind.items()
            }
            idles = [*others["held_idle"], *others["crash_loop"]]
            fires = bool(going)
            if rule.kind in ("held_idle", "stalled"):
                stalls = going if rule.kind == "stalled" else others["stalled"]
                fires = fires and (rule.kind == "stalled") == self._of_all(stalls, idles, count_by_node)
            if rule.kind == "held_idle" and (last is None or last.state == "resolved"):
                fires = fires and any(number in self._reported(part) for part in going)
            transition = self._next(number, last, rule, going if fires else [], parts, idles, count_by_node)
            if transition is not None:
                last = transition
                yield transition

    def _of_all(self, going: list[Part], idles: list[Part], held_by_node: dict[str, int]) -> bool:
        """Whether all GPUs of a workload stall, except for idle ones, which may be as many as those that stall."""
        stalled = {(part.gpu.uuid, part.gpu.pod) for part in going}  # what pods share is held once by each
        others = {(part.gpu.uuid, part.gpu.pod) for part in idles} - stalled
        return bool(stalled) and len(others) <= len(stalled) and len(stalled | others) >= sum(held_by_node.values())

    def _reported(self, part: Part) -> Iterator[int]:
        """In which ticks a node reports a GPU: when it begins, when it becomes critical, and once an hour."""
        reported_ms = 0
        for number in self.numbers[part.gpu.node]:
            passed_ms = self.log[number].ts_ms - reported_ms
            if part.is_open(number) and (number in (part.first, part.critical) or not 0 <= passed_ms < HOUR_MS):
                reported_ms = self.log[number].ts_ms
                yield number

    def _next(
        self, number: int, last: Transition | None, rule: Rule, going: list[Part], parts: list[Part], idles: list[Part],
        held_by_node: dict[str, int],
    ) -> Transition | None:  # fmt: skip
        if last is not None and last.state == "firing" and not going:
            over = [part.ends_ms for part in parts if part.ends_ms is not None and part.last == number]
            over = over if rule.kind == "stalled" or not any(part.is_open(number) for part in parts) else []
            ends_ms = max(over, default=self.log[number].ts_ms)
            return last._replace(number=number, state="resolved", ends_ms=max(ends_ms, last.starts_ms))
        if not going:
            return None
        whose, gpus = going[0].whose, frozenset(part.gpu for part in going)
        of_workload = whose[0] != "node"
        severity = max(part.severity_at(number) for part in going)
        changed = Transition(
            number, rule.name, whose, "firing", 0, 0, None, SEVERITIES[severity], gpus,
            sum(held_by_node.values()) if of_workload else None, len(going) if of_workload else None,
        )  # fmt: skip
        if last is None or last.state == "resolved":
            starts = [part.starts_ms for part in going]
            starts_ms = min(starts) if rule.kind != "stalled" else max([*starts, *[idle.starts_ms for idle in idles]])
            if rule.kind == "held_idle" and any(part.first < number for part in going):
                starts_ms = max(starts_ms, self.log[number].ts_ms)  # it has waited for another alert to end
            return changed._replace(starts_ms=max(starts_ms, -1 if last is None else (last.ends_ms or 0) + 1))
        worst = SEVERITIES[max(severity, SEVERITIES.index(last.severity))]
        changed = changed._replace(starts_ms=last.starts_ms, severity=worst)
        is_same = (changed.gpus, changed.held, changed.severity) == (last.gpus, last.held, last.severity)
        return None if is_same else changed._replace(revision=last.revision + 1)

    # -- stragglers

    def stragglers(self, rule: Rule) -> Iterator[Part]:
        """GPUs that lag behind their peers, each from a comparison to a later one."""
        reports = [report for number in range(len(self.log)) for report in self._reports(number)]
        for whose in {report.whose for report in reports}:
            rounds = list(self._comparisons(rule, whose, [report for report in reports if report.whose == whose]))
            for node, uuid in {(gpu.node, gpu.uuid) for comparison in rounds for gpu in comparison.lag}:
                yield from self._lags(rule, whose, node, uuid, rounds)

    def _reports(self, number: int) -> Iterator["Report"]:
        """A node's reports on each workload, if a tick ends a step."""
        tick, numbers = self.log[number], self.numbers[self.log[number].node]
        index = numbers.index(number)
        if index == 0 or _step(self.log[numbers[index - 1]]) == _step(tick):
            return
        ranks: dict[Whose, list[Rank]] = {}
        for device in tick.devices:
            (holder,) = _sole(device.holders) or (None,)
            if holder is None or holder.observed or device.mig is not None or policy_of(holder).off:
                continue
            means = self._means([self.log[n] for n in numbers[: index + 1]], device.uuid, holder)
            if means is not None:
                gpu = _gpu(tick.node, device, holder)
                ranks.setdefault(_whose(tick.node, holder), []).append(Rank(gpu, device.model or "", means))
        for whose, ranks_of_owner in ranks.items():
            yield Report(whose, number, tick.node, tuple(ranks_of_owner))

    def _means(self, ticks: Sequence[Tick], uuid: str, holder: Holder) -> "Means | None":
        """What a GPU did in the step that the last of a node's ticks has ended, if at least half of it was measured."""
        readings = list[tuple[Tick, Device]]()
        for tick in ticks:
            device = next((device for device in tick.devices if device.uuid == uuid), None)
            if device is None or tick.attribution == "none" or device.state != "ok":
                continue
            holds_it = [other.pod_uid for other in device.holders] == [holder.pod_uid]
            readings = [*readings, (tick, device)] if holds_it else []
        ended_step = _step(ticks[-1]) - 1
        if not readings or readings[-1][0] is not ticks[-1]:
            return None
        times = [
            (previous.ts_ms, tick.ts_ms - previous.ts_ms, _step(tick))
            for (previous, _), (tick, _) in pairwise(readings)
        ]
        measured_ms = sum(ms for _, ms, step in times if step == ended_step and 0 < ms <= MINUTE_MS)
        within = [
            (before, after)
            for before, after in pairwise(readings)
            if _step(after[0]) == ended_step and before[0].ts_ms // 5000 != after[0].ts_ms // 5000
        ]
        if not within or measured_ms * 2 < WINDOW_STEP_MS:
            return None
        metrics = [device.metrics for _, (_, device) in within]
        violations = [_violations(reading) for reading in [readings[0], *[after for _, after in within]]]
        violated = None
        if all(violation is not None for violation in violations):
            violated = sum(max((_violations(b) or 0) - (_violations(a) or 0), 0) for a, b in within)
        reasons = [sample.clock_event_reasons for sample in metrics]
        slowed = [None if reason is None else float(bool(int(reason) & SLOWED_DOWN)) for reason in reasons]
        return Means(
            _mean([sample.gpu_utilization_ratio for sample in metrics]),
            _mean([sample.sm_active_ratio for sample in metrics]),
            _mean([sample.tensor_active_ratio for sample in metrics]),
            _mean([sample.sm_clock_hz for sample in metrics]),
            _mean([sample.power_watts for sample in metrics]),
            _mean(slowed),
            None if violated is None else min(violated * 1000 / measured_ms, 1.0),
        )

    def _comparisons(self, rule: Rule, whose: Whose, reports: Sequence["Report"]) -> Iterator["Comparison"]:
        """All comparisons of a workload's GPUs, and an empty one when the workload has left a node."""
        reports_by_node: dict[str, Report] = {}
        by_number = {report.number: report for report in reports}
        for number, tick in enumerate(self.log):
            held_by_node = self.held_by_node(whose, number)
            if number in by_number:
                if tick.node in reports_by_node:
                    yield _compared(rule, whose, number, self.log, reports_by_node)
                    reports_by_node = {}
                reports_by_node[tick.node] = by_number[number]
                if {node for node, count in held_by_node.items() if count} <= reports_by_node.keys():
                    yield _compared(rule, whose, number, self.log, reports_by_node)
                    reports_by_node = {}
            if not held_by_node[tick.node]:
                reports_by_node.pop(tick.node, None)
                yield Comparison(number, tick.ts_ms, None, frozenset({tick.node}))

    def _lags(self, rule: Rule, whose: Whose, node: str, uuid: str, rounds: Sequence["Comparison"]) -> Iterator[Part]:
        """An alert begins when the GPU has been an outlier for long enough; it ends after as long without."""
        lags_ms = ceased_ms = None
        part: Part | None = None
        for comparison in rounds:
            if node not in comparison.nodes:
                continue
            gpu = next((gpu for gpu in comparison.ranks if gpu.uuid == uuid), None)
            if gpu in comparison.lag and gpu is not None:
                lags_ms = (comparison.step_ms or 0) - WINDOW_STEP_MS if lags_ms is None else lags_ms
                ceased_ms = None
                if part is None and (comparison.step_ms or 0) - lags_ms >= rule.for_ms:
                    at_ms = comparison.at_ms
                    part = Part(rule.name, whose, gpu, comparison.number, at_ms, rule.severity, None, None, None)
                continue
            lags_ms = None
            if part is None:
                continue
            ceased_ms = comparison.step_ms if ceased_ms is None else ceased_ms
            has_left = comparison.step_ms is None or gpu is None
            if has_left or (comparison.step_ms or 0) - (ceased_ms or 0) >= rule.keep_firing_ms:
                yield part._replace(last=comparison.number, ends_ms=max(comparison.at_ms, part.starts_ms))
                part = ceased_ms = None
        if part is not None:
            yield part


# -- the comparison of GPUs


class Means(NamedTuple):
    """What a GPU did in a step; None: not known."""

    utilization: float | None
    sms: float | None
    tensors: float | None
    clock: float | None
    power: float | None
    slowed: float | None
    violated: float | None


class Rank(NamedTuple):
    gpu: AlertGpu
    model: str
    means: Means


class Report(NamedTuple):
    whose: Whose
    number: int
    node: str
    ranks: tuple[Rank, ...]


class Comparison(NamedTuple):
    """Which GPUs of some nodes lag when a step has ended; without a step: the nodes hold none any more."""

    number: int
    at_ms: int
    step_ms: int | None
    nodes: frozenset[str]
    ranks: frozenset[AlertGpu] = frozenset()
    lag: frozenset[AlertGpu] = frozenset()


def _compared(
    rule: Rule, whose: Whose, number: int, log: Sequence[Tick], reports_by_node: dict[str, Report]
) -> Comparison:
    ranks = [rank for report in reports_by_node.values() for rank in report.ranks]
    lag = {rank.gpu for model in {rank.model for rank in ranks}
           for rank in outliers([rank for rank in ranks if rank.model == model], rule, whose)}  # fmt: skip
    step_ms = _step(log[number]) * WINDOW_STEP_MS
    gpus = frozenset(rank.gpu for rank in ranks)
    return Comparison(number, log[number].ts_ms, step_ms, frozenset(reports_by_node), gpus, frozenset(lag))


def outliers(ranks: Sequence[Rank], rule: Rule, whose: Whose) -> list[Rank]:
    """The GPUs of one model that have a measure far from the median of all."""
    used = [rank.means.utilization for rank in ranks if rank.means.utilization is not None]
    work = [rank for rank in ranks if rank.means.utilization is None or rank.means.utilization >= 0.2]
    lagging = [
        *_far(work, [rank.means.clock for rank in work], rule, share=0.1, high=False),
        *_far(work, [rank.means.slowed for rank in work], rule, least=0.1, low=False),
        *_far(work, [rank.means.violated for rank in work], rule, least=0.2, low=False),
    ]
    if whose[2] not in SERVING and 2 * sum(ratio >= 0.2 for ratio in used) >= len(used):
        lagging += _far(ranks, [rank.means.utilization for rank in ranks], rule, least=0.2)
        lagging += _far(ranks, [rank.means.sms for rank in ranks], rule, least=0.15)
        lagging += _far(ranks, [rank.means.tensors for rank in ranks], rule, least=0.1, share=0.25)
        lagging += _far(ranks, [rank.means.power for rank in ranks], rule, share=0.25)
    return lagging


def _far(
    ranks: Sequence[Rank], values: Sequence[float | None], rule: Rule, *, least: float = 0.0, share: float = 0.0,
    low: bool = True, high: bool = True,
) -> list[Rank]:  # fmt: skip
    present = [value for value in values if value is not None]
    if len(present) - 1 < rule.peers:
        return []
    middle = median(present)
    mad = median([abs(value - middle) for value in present])
    bound = max(rule.deviations * 1.4826 * mad, least, share * middle)
    far = [
        rank
        for rank, value in zip(ranks, values, strict=True)
        if value is not None and ((low and middle - value > bound) or (high and value - middle > bound))
    ]
    return far if 3 * len(far) <= len(ranks) else []


def _of_one(part: Part) -> Iterable[Transition]:
    fired = Transition(
        part.first, part.name, part.whose, "firing", 0, part.starts_ms, None, part.severity, frozenset(), None, None
    )
    yield fired
    if part.last is not None:
        yield fired._replace(number=part.last, state="resolved", ends_ms=part.ends_ms)


def _step(tick: Tick) -> int:
    return tick.ts_ms // WINDOW_STEP_MS


def _gpu(node: str, device: Device, holder: Holder | None) -> AlertGpu:
    pod = None if holder is None else f"{holder.namespace}/{holder.pod}"
    return AlertGpu(uuid=device.uuid, node=node, index=device.index, pod=pod)


def _sole(holders: Sequence[Holder]) -> list[Holder]:
    return [*holders[:1]] if len({(holder.namespace, holder.pod, holder.pod_uid) for holder in holders}) == 1 else []


def _whose(node: str, holder: Holder) -> Whose:
    if holder.workload is None:
        return ("pod", node, holder.namespace, holder.pod)
    return ("workload", holder.namespace, holder.workload.kind, holder.workload.name)


def _violations(reading: tuple[Tick, Device]) -> float | None:
    metrics = reading[1].metrics
    if metrics.power_violation_seconds_total is None:
        return None
    return metrics.power_violation_seconds_total + (metrics.thermal_violation_seconds_total or 0.0)


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if len(present) == len(values) else None
