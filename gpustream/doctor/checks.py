"""The checks, in the order of the flow. Each is a function from what was seen to what it has found. Pure.

A finding says what is wrong, its cause or that the cause is not known, what shows it, and what to do next. A new check
is one function and its row in ``CHECKS``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from delivery.values import duration_words
from gpustream.command import counted
from gpustream.doctor.evidence import Fold, NodeEvidence, NodeName, Ranges, SampledRun
from gpustream.doctor.seen import Checked, Finding, Group, OwnMetrics, Situation
from topics import attributed, samples

ATTRIBUTION = "gpustream-attribution"

BEHIND_MS = 30_000
"""What was logged in this time before the end is on its way. A pending tick may wait for 13 s of it."""

SILENT_MS = 30_000
"""A node without a tick for so long, and for five of its intervals, is silent."""

HELD_MS = 2_000
"""A tick that was so much older than others when Kafka got it had waited in the node's buffer."""

IN_PROMETHEUS_MS = 240_000
"""An instant query finds a sample for five minutes."""

NOT_KNOWN = "not known"

_SHOW = "`gpustream dead-letters show {id}` has it; once its error is mended, `dead-letters resubmit` sends it again"


# -- topics


def topics(seen: Situation) -> Checked:
    """Whether the topics are there, and as they must be."""
    wrong = [
        Finding(str(one), "the topic was made by something else, or never", one.topic, f"run `{seen.create}`")
        for one in seen.mismatches
        if one.breaks
    ]
    return Checked(f"{counted(len(wrong), 'mistake')}" if wrong else "as they must be", wrong)


# -- what was sent


def sent(seen: Situation, fold: Fold) -> Checked:
    """What each node sent: gaps in its runs, nodes that went silent, and two producers of one name."""
    found: list[Finding] = []
    runs = ticks = missing = 0
    sending = {name: node for name, node in fold.nodes.items() if node.runs}
    for name, node in sending.items():
        for run_id, run in node.runs.items():
            gaps = gaps_of(run_id, run, seen.since_ms)
            runs, ticks = runs + 1, ticks + len(run.seqs)
            missing += sum(last - first + 1 for first, last in gaps)
            if gaps:
                found.append(_gap(seen, name, run_id, run, gaps))
        if node.returns > 1:
            found.append(
                Finding(
                    f"{name}: two producers send under this name",
                    f"its runs took turns {node.returns} times, and a producer that ended does not go on",
                    f"runs {', '.join(map(str, node.runs))}",
                    "stop one of them, or give it a --node of its own",
                )
            )
    found += _silence(seen, sending)
    if fold.unreadable["lost"]:
        found.append(
            Finding(
                f"{counted(fold.unreadable['lost'], 'record')} of {samples.TOPIC.name} can't be read, and"
                " have no dead letter",
                NOT_KNOWN,
                "attribution has gone past them",
                f"compare with {ATTRIBUTION}'s log: it names each record that it dead-letters",
            )
        )
    twice = sum(run.twice for node in sending.values() for run in node.runs.values())
    said = f"{counted(len(sending), 'node')} sent {counted(ticks, 'tick')} in {counted(runs, 'run')}"
    return Checked(f"{said}, {missing} missing" + (f", {twice} sent twice" if twice else ""), found)


def _silence(seen: Situation, sending: Mapping[NodeName, NodeEvidence]) -> list[Finding]:
    """That nobody sends, that all have stopped, or each node that has."""
    if not sending:
        return [
            Finding(
                f"no tick came in {seen.window}",
                NOT_KNOWN,
                f"{samples.TOPIC.name} has no record of this time that could be read",
                "does a producer run (`gpustream produce node`), with this --kafka? Its /readyz says what it lacks",
            )
        ]
    silent = [name for name, node in sending.items() if not node.removed and _silent(seen, node.runs.values())]
    if len(silent) == len(sending):
        return [
            Finding(
                f"no node has sent a tick for {seen.ago(max(n.last_logged_ms for n in sending.values()))[:-4]}",
                "something that all nodes share: Kafka, the network, or a release of the producer",
                f"{counted(len(sending), 'node')} sent before that",
                "look at /readyz of any producer",
            )
        ]
    last = {name: max(sending[name].runs.values(), key=lambda run: run.last_logged_ms) for name in silent}
    return [
        Finding(
            f"{name}: no tick since {seen.ago(run.last_logged_ms)}",
            NOT_KNOWN,
            f"seq {run.last_seq} was the last; {_held(seen.components)}",
            "docs/runbooks/NodeSilent.md",
        )
        for name, run in last.items()
    ]


def gaps_of(run_id: int, run: SampledRun, since_ms: int) -> list[tuple[int, int]]:
    """The first and the last seq of each gap in a run; also before its first tick, if it began in the time that is
    looked at (a run's id is when it began)."""
    gaps = run.seqs.gaps()
    first = next(iter(run.seqs))[0]
    return [(1, first - 1), *gaps] if run_id >= since_ms and first > 1 else gaps


def _gap(seen: Situation, name: NodeName, run_id: int, run: SampledRun, gaps: Sequence[tuple[int, int]]) -> Finding:
    missing = sum(last - first + 1 for first, last in gaps)
    places = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in gaps[:5])
    more = f" and {len(gaps) - 5} more gaps" if len(gaps) > 5 else ""
    delays = [run.jumps[first] for first, _ in gaps if first in run.jumps]
    waited_ms = max((delay - run.least_delay_ms for delay in delays), default=0)
    evidence = f"run {run_id}, seq {places}{more}; {len(run.seqs)} others came"
    drops = _drops(seen.components)
    if drops:
        evidence += f"; producers that were asked have dropped {drops}"
    if waited_ms >= HELD_MS:
        return Finding(
            f"{name}: {counted(missing, 'tick')} missing in {samples.TOPIC.name}",
            "the node's buffer dropped them: it could not send for longer than the buffer holds"
            f" (the next tick had waited {duration_words(waited_ms)})",
            evidence,
            "find out why Kafka could not be reached then; --buffer and --buffer-size of the producer say how long an"
            " outage it rides out",
        )
    return Finding(
        f"{name}: {counted(missing, 'tick')} missing in {samples.TOPIC.name}",
        f"{NOT_KNOWN}: the node could send at the time, so they were too large, refused or could not be written, or"
        " Kafka has lost them",
        evidence,
        "gpustream_producer_ticks_dropped_total at the producer's /metrics says what it dropped, by reason (--metrics);"
        " if it dropped none, look for an unclean leader election in the broker's log",
    )


def _drops(components: Iterable[OwnMetrics]) -> str:
    dropped: dict[str, float] = {}
    for component in components:
        for (_, reason), value in component.sums("gpustream_producer_ticks_dropped_total").items():
            dropped[reason] = dropped.get(reason, 0) + value
    return ", ".join(f"{value:.0f} ({reason})" for reason, value in sorted(dropped.items()))


def _held(components: Iterable[OwnMetrics]) -> str:
    held = sum(value for one in components for value in one.sums("gpustream_producer_ticks_held").values())
    said = f"; those that were asked hold {counted(int(held), 'tick')}" if held else ""
    return f"a producer that can't reach Kafka holds what it samples{said}"


def _silent(seen: Situation, runs: Iterable[SampledRun]) -> bool:
    last = max(runs, key=lambda run: run.last_logged_ms)
    interval_ms = (last.last_ts_ms - last.first_ts_ms) / max(1, len(last.seqs) - 1)
    return seen.now_ms - last.last_logged_ms > max(SILENT_MS, 5 * interval_ms)


# -- what was attributed


def attribution(seen: Situation, fold: Fold) -> Checked:
    """What became of each tick that was sent: attributed exactly, late or without a snapshot, waiting, or lost."""
    found: list[Finding] = []
    totals: dict[str, int] = {}
    for name, node in fold.nodes.items():
        for run_id, run in node.runs.items():
            for fate, count in run.fates.items():
                totals[fate] = totals.get(fate, 0) + count
            if run.fates["lost"]:
                found.append(
                    Finding(
                        f"{name}: {counted(run.fates['lost'], 'tick')} lost between {samples.TOPIC.name} and"
                        f" {attributed.TOPIC.name}",
                        NOT_KNOWN,
                        f"run {run_id}, seq {_shown(run.lost)}: {ATTRIBUTION} has committed past them, and they have"
                        " neither a record nor a dead letter",
                        f"was {attributed.TOPIC.name} created again, or were the group's offsets set by hand? Setting"
                        " them back to before these records attributes them",
                    )
                )
            if inexact := run.fates["late"] + run.fates["none"]:
                found.append(_inexact(name, run_id, run, inexact))
    group = next((group for group in seen.groups if group.name == ATTRIBUTION), None)
    if group is None and seen.fold is not None and fold.nodes:
        found.append(
            Finding(
                f"nothing is attributed: there is no group {ATTRIBUTION}",
                "no worker has ever run here",
                f"{counted(totals.get('waiting', 0), 'tick')} wait",
                "start `gpustream stream attribution`",
            )
        )
    elif group is not None and _is_behind(seen, fold.oldest_waiting_ms):
        found.append(_behind(seen, group, totals["waiting"], fold.oldest_waiting_ms or 0))
    replayed = sum(node.replayed for node in fold.nodes.values())
    words = {
        "exact": "exact",
        "no_kubelet": "without a kubelet",
        "late": "late",
        "none": "without a snapshot",
        "dead_lettered": "dead-lettered",
        "waiting": "on their way",
        "lost": "lost",
    }
    said = ", ".join(f"{totals[fate]} {word}" for fate, word in words.items() if totals.get(fate)) or "nothing was sent"
    return Checked(said + (f"; {replayed} written again, which readers drop" if replayed else ""), found)


def _inexact(name: NodeName, run_id: int, run: SampledRun, inexact: int) -> Finding:
    if run.unsent == inexact:
        cause = "the snapshots that they name are not in gpu.allocations"
        then = "gpustream_producer_snapshots_dropped_total at the producer's /metrics says which it could not send"
    else:
        cause = "the snapshots that they name came after the tick had waited for --grace, or could not be read in time"
        then = "look at gpustream_attribution_lag_records and loop_late_seconds of the workers; a replay finds them"
    shown = f"{run.fates['late']} with the last snapshot known, {run.fates['none']} with none"
    return Finding(f"{name}: {counted(inexact, 'tick')} not attributed exactly", cause, f"run {run_id}: {shown}", then)


def _is_behind(seen: Situation, oldest_ms: int | None) -> bool:
    return oldest_ms is not None and seen.now_ms - oldest_ms > BEHIND_MS


def _behind(seen: Situation, group: Group, records: int, oldest_ms: int) -> Finding:
    """A group that has not finished what was logged a while ago."""
    evidence = (
        f"the oldest was logged {seen.ago(oldest_ms)}; the group is {group.state}, {counted(group.members, 'member')}"
    )
    what = f"{group.name}: {counted(records, 'record')} not taken yet"
    if not group.members:
        return Finding(what, "nobody reads: the group has no member", evidence, "start it; what waits is read then")
    failing = [
        component.url
        for component in seen.components
        if component.sums("_receiver_failing") and group.name.replace("-", "_").endswith(_stage(component))
    ]
    if failing:
        return Finding(
            what, "the receiver does not take it", f"{evidence}; {failing[0]} says so", f"see {failing[0]} /readyz"
        )
    return Finding(
        what,
        "it has not read that far: it is slower than what comes, or hangs, or its receiver does not answer",
        evidence,
        "/readyz of its members says what they wait for; its loop_late_seconds and request_seconds, how busy it is."
        " More members share the partitions",
    )


def _stage(component: OwnMetrics) -> str:
    name = next((one.name for one in component.series if one.name.endswith("_receiver_failing")), "")
    return name.removeprefix("gpustream_").removesuffix("_receiver_failing") or NOT_KNOWN


def _shown(numbers: Ranges, most: int = 5) -> str:
    ranges = list(numbers)
    shown = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges[:most])
    return shown + (f" and {len(ranges) - most} more" if len(ranges) > most else "")


def workloads(seen: Situation, fold: Fold) -> Checked:
    """Whether the cluster producer says anything of clusters whose nodes name snapshots."""
    clusters = {name.cluster for name, node in fold.nodes.items() if node.runs and node.snapshots}
    silent = sorted(clusters - fold.clusters_known)
    if not fold.clusters_known:
        return Checked(
            "no cluster producer writes gpu.workloads: pods have no owners and no labels" if clusters else "-"
        )
    return Checked(
        f"{counted(len(fold.clusters_known), 'cluster')} known",
        [
            Finding(
                f"{cluster}: nothing is in gpu.workloads of this cluster",
                "its cluster producer does not run, does not lead, or does not reach Kafka",
                "it sends each node every 5 minutes",
                "see /readyz of `gpustream produce cluster`: it says who leads",
            )
            for cluster in silent
        ],
    )


# -- dead letters


def letters(seen: Situation, fold: Fold) -> Checked:
    """What was dead-lettered, by who gave up and why."""
    counts = {kind: count for kind, count in fold.open_letters().items() if count}
    done = sum(len(receipts) for receipts in fold.resubmitted.values())
    found = []
    for kind, count in sorted(counts.items(), key=lambda item: -item[1]):
        last = fold.letters[kind].last
        found.append(
            Finding(
                f"{kind.stage} dead-lettered {counted(count, 'record')} of {kind.topic}: {kind.reason}",
                last.error if last is not None else NOT_KNOWN,
                f"letter {fold.letters[kind].last_id} is the last of them",
                _SHOW.format(id=fold.letters[kind].last_id),
            )
        )
    said = f"{counted(sum(counts.values()), 'dead letter')}" if counts else "none"
    return Checked(said + (f"; {done} were sent again" if done else ""), found)


# -- consumer groups


def groups(seen: Situation, fold: Fold) -> Checked:
    """What each consumer group has not taken yet."""
    found, lines = [], []
    for group in seen.groups:
        oldest = min((lag.oldest_ms for lag in group.lags if lag.oldest_ms is not None), default=None)
        lines.append(f"{group.name} " + ("at the end" if oldest is None else f"at {seen.ago(oldest)}"))
        if group.name == ATTRIBUTION:
            continue  # the check of attribution says more
        for lag in group.lags:
            if _is_behind(seen, lag.oldest_ms):
                of = group._replace(name=f"{group.name}: {lag.topic}")
                found.append(_behind(seen, of._replace(name=group.name), lag.records, lag.oldest_ms or 0))
    if not any(group.name.startswith("gpustream-sink-") for group in seen.groups):
        lines.append("no sink has read anything")
    return Checked("; ".join(lines), found)


# -- what the components say


_RECEIVER_SAYS = {
    "out_of_order": "the receiver has newer samples of these series: ticks came after newer ones",
    "too_old": "the receiver takes nothing so old",
    "too_far_ahead": "a node's clock is ahead",
    "duplicate": "the receiver has other samples at these times: a node's clock stands still, or two write one series",
    "left_out": "the receiver refused all series of these ticks in the ten minutes before",
}
_REFUSALS = "docs/remote-write.md and docs/guarantees.md say what each reason means, and what can be set"

_BAD_COUNTERS = {
    "_records_dropped_total": ("{n} records dropped: {reason}", _RECEIVER_SAYS, _REFUSALS),
    "_values_refused_total": ("{n} values refused: {reason}", _RECEIVER_SAYS, _REFUSALS),
    "_records_expired_total": (
        "{n} records deleted before they were read",
        {"": "retention is shorter than the time for which it did not read"},
        "give the topic more retention.ms, or find out why it was not read",
    ),
    "_lost_offsets_total": (
        "{n} records deleted before they were read",
        {"": "retention is shorter than the time for which it did not read"},
        "give the topic more retention.ms, or find out why it was not read",
    ),
    "_misplaced_nodes_total": (
        "{n} nodes in a partition that is not theirs",
        {"": "a producer that is not gpustream's wrote them, with another partitioner"},
        "use murmur2 of the key, as Kafka's Java clients do (librdkafka: partitioner=murmur2_random)",
    ),
}


def components(seen: Situation) -> Checked:
    """What the components say of themselves: what they dropped, and why they are not ready."""
    found: list[Finding] = []
    for one in seen.components:
        if one.error:
            found.append(Finding(f"{one.url}: no metrics", one.error, "it was asked", "is it up, and is it --listen?"))
            continue
        if one.not_ready:
            found.append(Finding(f"{one.url}: not ready", one.not_ready, "/readyz says so", "its log says more"))
        told_reasons: set[str] = set()  # of a record that was dropped, the values count as refused, too
        for suffix, (what, causes, then) in _BAD_COUNTERS.items():
            for (name, reason), value in one.sums(suffix).items():
                if suffix == "_values_refused_total" and reason in told_reasons:
                    continue
                told_reasons.add(reason)
                said = what.format(n=f"{value:.0f}", reason=reason)
                cause = causes.get(reason, causes.get("", NOT_KNOWN))
                found.append(Finding(f"{one.url}: {said}", cause, f"{name}, {one.since(seen.now_ms)}", then))
    told = [_outcomes(one) for one in seen.components if not one.error]
    return Checked("; ".join(filter(None, told)) or "not asked (--metrics)", found)


def _outcomes(component: OwnMetrics) -> str:
    words: dict[str, dict[str, float]] = {}
    for outcome in ("delivered", "duplicate", "dropped", "dead_lettered"):
        for (name, _), value in component.sums(f"_records_{outcome}_total").items():
            sink = name.removeprefix("gpustream_").partition("_records_")[0]
            words.setdefault(sink, {}).setdefault(outcome, 0.0)
            words[sink][outcome] += value
    return ", ".join(
        f"{sink}: " + ", ".join(f"{value:.0f} {outcome}" for outcome, value in counts.items())
        for sink, counts in words.items()
    )


# -- Prometheus


def prometheus(seen: Situation, fold: Fold) -> Checked:
    """Whether Prometheus has the newest attributed tick of each node."""
    if seen.prometheus is None:
        return Checked("not asked (--prometheus)")
    if seen.prometheus.error:
        wrong = Finding(f"{seen.prometheus.url}: no answer", seen.prometheus.error, "it was asked", "see --prometheus")
        return Checked("not known", [wrong])
    newest = {
        name: node.newest_attributed_ms
        for name, node in fold.nodes.items()
        if seen.now_ms - node.newest_attributed_ms < IN_PROMETHEUS_MS
    }
    behind = {name: at for name, at in newest.items() if at - seen.prometheus.newest_ms.get(name, 0) > BEHIND_MS}
    found = []
    for name, at in behind.items():
        has = seen.prometheus.newest_ms.get(name)
        found.append(
            Finding(
                f"{name}: Prometheus does not have its newest samples",
                f"{NOT_KNOWN}: no sink has delivered them, or Prometheus refused them",
                f"attributed: {seen.ago(at)}; in Prometheus: {seen.ago(has) if has else 'nothing of 5 minutes'}",
                "does the group of the sink lag? What does it say of dropped records (--metrics)?",
            )
        )
    return Checked(f"has {len(newest) - len(behind)} of {counted(len(newest), 'node')}", found)


Check = Callable[[Situation, Fold], Checked]

CHECKS: dict[str, Check] = {
    "sent": sent,
    "attributed": attribution,
    "workloads": workloads,
    "dead letters": letters,
    "groups": groups,
    "components": lambda seen, _: components(seen),
    "prometheus": prometheus,
}
"""The checks of the records, in their order. That of the topics comes before them."""


def run(seen: Situation) -> dict[str, Checked]:
    """All checks; only that of the topics if they can't be read."""
    found = {"topics": topics(seen)}
    if seen.fold is not None:
        found |= {name: check(seen, seen.fold) for name, check in CHECKS.items()}
    return found
