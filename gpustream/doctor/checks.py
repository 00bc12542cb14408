"""The checks, in the order of the flow. Each is a function from a :class:`Situation` to a :class:`CheckResult`. Pure.

A finding says what is wrong, its cause or that the cause is not known, what shows it, and what to do next. A new check
is one function and its row in ``CHECKS``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from delivery.sender import partition_of
from delivery.topic_admin import NUMBER_OF_PARTITIONS
from delivery.values import counted, duration_words
from gpustream.dead_letters.letters import RESUBMITTABLE
from gpustream.doctor import brokers, components, pods, readers
from gpustream.doctor.clocks import clocks
from gpustream.doctor.evidence import Evidence, Fate, NodeEvidence, NodeName, SampledRun
from gpustream.doctor.leaders import leaders
from gpustream.doctor.readers import ATTRIBUTION, NOT_KNOWN
from gpustream.doctor.situation import CheckResult, Finding, Findings, Lag, Situation, first_of
from topics import allocations, attributed, samples
from topics.samples import silent_after_ms
from topics.topic import node_key

SILENT_MS = 30_000
"""A node is silent if it has sent no tick for so long, and for three of its intervals."""

BUFFERED_MS = 2_000
"""A tick waited in the node's retry buffer if its delay is longer than the run's shortest by this much."""

MAX_REPLAYED_RATIO = 0.1
"""If more than this ratio of the ticks was attributed again, a restart is not the cause."""

FATE_TEXTS: dict[Fate, str] = {
    "exact": "exact",
    "no_kubelet": "without a kubelet",
    "late": "late",
    "none": "without a snapshot",
    "other": "in another way",
    "dead_lettered": "dead-lettered",
    "waiting": "on their way",
    "deleted": "deleted after that",
    "hidden": "behind an open transaction",
    "lost": "lost",
}
"""The text for each fate of a tick, in the order of the summary."""

_SEND_AGAIN = "once its error is mended, `dead-letters resubmit {id} --yes` sends it again"
_SEND_NO_MORE = "mend its error, and later records are taken; a record of this topic can't be sent again"


# -- what was sent


def sent(situation: Situation, evidence: Evidence) -> CheckResult:
    """Checks what each node sent: gaps in its runs, nodes that went silent, two producers of one name, and two names of
    one GPU."""
    findings = Findings()
    runs = ticks = missing = 0
    sending = {name: node for name, node in evidence.nodes.items() if node.runs}
    for name, node in sending.items():
        for run_id, run in node.runs.items():
            gaps = gaps_of(run_id, run, situation.since_ms)
            runs, ticks = runs + 1, ticks + len(run.seqs)
            missing += sum(last - first + 1 for first, last in gaps)
            if gaps:
                findings.append(_gap_finding(situation, name, run_id, run, gaps))
        if node.has_two_producers:
            findings.add(
                f"{name}: two producers send under this name",
                f"its runs took turns {node.interleavings} times, and a producer that ended does not go on",
                f"runs {', '.join(map(str, node.runs))}",
                "stop one of them, or give it a --node of its own",
            )
    findings += [*_silence_findings(situation, sending), *_misplaced_findings(situation, sending)]
    findings += _two_names_findings(sending)
    if evidence.unreadable["lost"]:
        findings.add(
            f"{counted(evidence.unreadable['lost'], 'record')} of {samples.TOPIC.name} can't be read, and"
            " have no dead letter",
            NOT_KNOWN,
            "attribution has gone past them",
            f"compare with {ATTRIBUTION}'s log: it names each record that it dead-letters",
        )
    duplicates = sum(run.duplicates for node in sending.values() for run in node.runs.values())
    summary = f"{counted(len(sending), 'node')} sent {counted(ticks, 'tick')} in {counted(runs, 'run')}"
    return CheckResult(f"{summary}, {missing} missing" + (f", {duplicates} sent twice" if duplicates else ""), findings)


def _two_names_findings(sending: Mapping[NodeName, NodeEvidence]) -> Iterator[Finding]:
    """A finding for each pair of nodes that send the same GPUs at the same time."""
    names_by_uuid: dict[str, list[NodeName]] = {}
    for name, node in sending.items():
        for uuid in node.last_run[1].answering:
            names_by_uuid.setdefault(uuid, []).append(name)
    uuids_by_pair: dict[tuple[NodeName, NodeName], list[str]] = {}
    for uuid, names in names_by_uuid.items():
        for first, second in pairwise(names):
            apart_ms = abs(sending[first].last_logged_ms - sending[second].last_logged_ms)
            if apart_ms <= silent_after_ms(sending[first].last_run[1].interval_ms, SILENT_MS):
                uuids_by_pair.setdefault((first, second), []).append(uuid)
    for (first, second), uuids in uuids_by_pair.items():
        yield Finding(
            f"{first} and {second} send the same {counted(len(uuids), 'GPU')}: sums over nodes count them twice",
            "two producers run on one machine with a --node each, or a machine was cloned with its virtual GPUs",
            f"both send {first_of(uuids, ', ')}",
            "stop one of the producers; NODE_NAME from spec.nodeName is the name that a pod's producer needs",
        )


def _misplaced_findings(situation: Situation, sending: Mapping[NodeName, NodeEvidence]) -> Iterator[Finding]:
    """A finding for the nodes that another partitioner than Kafka's own has put into a partition of its choice."""
    layout = situation.kafka.topics.get(samples.TOPIC.name)
    were_added = any(mismatch.subject == NUMBER_OF_PARTITIONS for mismatch in situation.kafka.mismatches)
    partitions = 0 if layout is None or were_added else layout.partitions  # 0: not known
    misplaced = {
        name: node.partition
        for name, node in sending.items()
        if partitions and partition_of(node_key(*name), partitions) != node.partition
    }
    if misplaced:
        texts = [f"{name} in partition {number}" for name, number in misplaced.items()]
        yield Finding(
            f"{counted(len(misplaced), 'node')} in a partition that is not theirs",
            "a producer that is not gpustream's wrote them, with another partitioner",
            first_of(texts, ", "),
            "docs/runbooks/GpustreamMisplacedNodes.md: use murmur2 of the key, as Kafka's Java clients do",
        )


def _silence_findings(situation: Situation, sending: Mapping[NodeName, NodeEvidence]) -> list[Finding]:
    """Findings if no node sends, if all have stopped, or for each node that has stopped."""
    if not sending:
        prefixes = ", ".join(map(repr, situation.kafka.other_prefixes))
        hint = f". There are topics with the prefix {prefixes}, too: --topic-prefix" if prefixes else ""
        return [
            Finding(
                f"no tick came in {situation.window}",
                NOT_KNOWN,
                f"{samples.TOPIC.name} has no record of this time that could be read",
                "does a producer run (`gpustream produce node`), with this --kafka? Its /readyz says what it lacks"
                + hint,
            )
        ]
    last_runs = {
        name: node.last_run[1]
        for name, node in sending.items()
        if not node.removed and not situation.hides(samples.TOPIC, node.partition)
    }
    silent = {
        name: run
        for name, run in last_runs.items()
        if situation.now_ms - run.last_logged_ms > silent_after_ms(run.interval_ms, SILENT_MS)
    }
    if len(silent) == len(sending):
        newest_ms = max(node.last_logged_ms for node in sending.values())
        return [
            Finding(
                f"no node has sent a tick for {duration_words(max(0, situation.now_ms - newest_ms))}",
                "something that all nodes share: Kafka, the network, or a release of the producer; or this machine's"
                " clock is ahead of the brokers'",
                f"{counted(len(sending), 'node')} sent before that",
                "look at /readyz of any producer; `chronyc tracking` here and on a broker",
            )
        ]
    buffered = sum(situation.sums("gpustream_producer_ticks_held").values())
    buffered_note = f"; those that were asked hold {counted(int(buffered), 'tick')}" if buffered else ""
    return [
        Finding(
            f"{name}: no tick since {situation.ago(run.last_logged_ms)}",
            NOT_KNOWN,
            f"seq {run.last_seq} was the last; a producer that can't reach Kafka holds what it samples{buffered_note}",
            "docs/runbooks/NodeSilent.md",
        )
        for name, run in silent.items()
    ]


def gaps_of(run_id: int, run: SampledRun, since_ms: int) -> list[tuple[int, int]]:
    """The first and the last seq of each gap in a run; also before its first tick, if it began in the time that is
    looked at (a run's id is when it began)."""
    gaps = run.seqs.gaps()
    first = next(iter(run.seqs))[0]
    return [(1, first - 1), *gaps] if run_id >= since_ms and first > 1 and not run.truncated else gaps


def _gap_finding(
    situation: Situation, name: NodeName, run_id: int, run: SampledRun, gaps: Sequence[tuple[int, int]]
) -> Finding:
    missing = sum(last - first + 1 for first, last in gaps)
    delays_ms = [run.delays_after_gaps[first] for first, _ in gaps if first in run.delays_after_gaps]
    buffered_ms = max((delay_ms - run.min_delay_ms for delay_ms in delays_ms), default=0)
    shown_by = f"run {run_id}, seq {_format_ranges(gaps, 'gaps')}; {len(run.seqs)} others came"
    dropped = situation.sums("gpustream_producer_ticks_dropped_total")
    drops = ", ".join(f"{value:.0f} ({reason})" for reason, value in sorted(dropped.items()))
    if drops:
        shown_by += f"; producers that were asked have dropped {drops}"
    if buffered_ms >= BUFFERED_MS:
        cause = (
            f"the node's buffer dropped them, if it holds no more than the {duration_words(buffered_ms)} that the next"
            " tick had waited; otherwise Kafka refused them, or has lost them"
        )
    else:
        cause = (
            f"{NOT_KNOWN}: the node could send at the time, so they were too large, refused or could not be written, or"
            " Kafka has lost them"
        )
    next_step = (
        "gpustream_producer_ticks_dropped_total at the producer's /metrics says what it dropped, by reason (--metrics);"
        " --buffer and --buffer-size say how long an outage it rides out; if it dropped none, look for an unclean"
        " leader election in the broker's log"
    )
    return Finding(f"{name}: {counted(missing, 'tick')} missing in {samples.TOPIC.name}", cause, shown_by, next_step)


def _format_ranges(ranges: Iterable[tuple[int, int]], noun: str = "") -> str:
    """The first five ranges as text, and how many more there are, counted in ``noun``."""
    first_ranges, omitted = (all_ranges := list(ranges))[:5], len(all_ranges) - 5
    text = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in first_ranges)
    return text + (f" and {omitted} more {noun}".rstrip() if omitted > 0 else "")


# -- snapshots of the kubelets


def snapshots(situation: Situation, evidence: Evidence) -> CheckResult:
    """Checks that each node's kubelet answers, and gpu.allocations has the snapshots that ticks name."""
    findings = Findings()
    sending = {name: node for name, node in evidence.nodes.items() if node.runs}
    with_kubelet = 0
    for name, node in sending.items():
        run_id, run = node.last_run
        if run.last_snapshot_seq is None:
            others_have_kubelet = any(
                other.last_run[1].last_snapshot_seq is not None
                for other_name, other in sending.items()
                if other_name != name
            )
            has_jobs = run_id not in node.snapshots and run.fates["exact"]  # a batch system says who holds its GPUs
            if node.epoch is not None or (others_have_kubelet and not has_jobs):
                earlier_note = "" if run_id not in node.snapshots else "; earlier ones of this run did"
                findings.add(
                    f"{name}: no kubelet answers its producer: its samples have no pods",
                    "the kubelet is down, its socket is elsewhere or not mounted, or the producer may not open it",
                    f"run {run_id}: tick {run.last_seq} names no snapshot, as those of a machine without"
                    f" Kubernetes{earlier_note}",
                    "docs/runbooks/GpustreamKubeletSilent.md: is /var/lib/kubelet/pod-resources mounted?"
                    " --pod-resources-socket",
                )
            continue
        with_kubelet += 1
        if unknown_ids := node.unknown_ids:
            findings.add(
                f"{name}: nobody seems to hold the GPUs of {counted(len(unknown_ids), 'device id')} of the kubelet",
                "the ids have no known form: they are of a device plugin that gpustream does not know",
                unknown_ids[0],
                "`gpustream devices` on the node names each; until it is known, these GPUs count as free",
            )
        # the check of attribution reports the ticks of ``without_snapshot``
        is_reported = run.without_snapshot or situation.hides(allocations.TOPIC, node.partition)
        if run.last_snapshot_seq not in node.snapshots.get(run_id, ()) and not is_reported:
            findings.add(
                f"{name}: the snapshot that its ticks name is not in {allocations.TOPIC.name}",
                "it could not be written (an ACL, its size), or the topic was made again or keeps too little",
                f"run {run_id} names snapshot {run.last_snapshot_seq}; it is sent again every 5 minutes",
                "gpustream_producer_snapshots_dropped_total at the producer's /metrics says which it did not send",
            )
    return CheckResult(f"a kubelet on {with_kubelet} of {counted(len(sending), 'node')}", findings)


# -- what was attributed


def attribution(situation: Situation, evidence: Evidence) -> CheckResult:
    """Checks what became of each tick: attributed exactly, late or without a snapshot, waiting, or lost."""
    findings = Findings()
    totals = Counter[Fate]()
    for name, node in evidence.nodes.items():
        hidden_snapshots = situation.hides(allocations.TOPIC, node.partition)
        for run_id, run in node.runs.items():
            totals.update(run.fates)
            inexact_reported = (hidden_snapshots and run.without_snapshot == run.inexact) or node.has_two_producers
            findings += _run_findings(name, run_id, run, inexact_reported=inexact_reported)
    group = next((group for group in situation.groups or () if group.name == ATTRIBUTION), None)
    late_group = group if group and readers.is_behind(situation, group, evidence.oldest_waiting_ms) else None
    if (
        group is None
        and situation.groups is not None
        and evidence.nodes
        and ATTRIBUTION not in situation.kafka.hidden_groups
    ):
        findings.add(
            f"nothing is attributed: there is no group {ATTRIBUTION}",
            "no worker has ever run here",
            f"{counted(totals['waiting'], 'tick')} wait",
            "start `gpustream stream attribution`",
        )
    elif late_group is not None:  # one that its group puts out for want of CPU attributes ticks again, too
        no_lag = Lag(samples.TOPIC.name, 0, (), None)
        lag = next((lag for lag in late_group.lags if lag.topic == samples.TOPIC.name), no_lag)
        waiting = lag._replace(records=totals["waiting"], oldest_ms=evidence.oldest_waiting_ms)
        findings.append(readers.behind(situation, late_group, waiting))
    expiry_reported = any(
        tp.topic == attributed.TOPIC.name for group in situation.groups or () for tp in group.log_starts
    )
    if totals["deleted"] and not expiry_reported:  # otherwise the check of the groups reports it
        findings.append(_deleted_finding(evidence, totals["deleted"]))
    replayed = sum(node.replayed for node in evidence.nodes.values())
    attributed_once = sum(
        count for fate, count in totals.items() if fate not in ("waiting", "deleted", "hidden", "lost", "dead_lettered")
    )
    if late_group is None and replayed > MAX_REPLAYED_RATIO * max(attributed_once, 1):
        findings.add(
            f"{counted(replayed, 'tick')} of {attributed_once} were attributed again",
            "two workers attribute that are not in one group, or the group's offsets were set back",
            f"{attributed.TOPIC.name} has them twice; readers drop the second one",
            "look for a second `gpustream stream attribution` with this --topic-prefix, maybe in another cluster",
        )
    summary = (
        ", ".join(f"{totals[fate]} {text}" for fate, text in FATE_TEXTS.items() if totals[fate]) or "nothing was sent"
    )
    return CheckResult(summary + (f"; {replayed} written again, which readers drop" if replayed else ""), findings)


def _deleted_finding(evidence: Evidence, ticks: int) -> Finding:
    """The finding that gpu.attributed has lost records; for when no group reports that it lacks them."""
    log_starts = {tp: offset for tp, offset in evidence.log_starts.items() if tp.topic == attributed.TOPIC.name}
    starts = ", ".join(
        f"partition {tp.partition} begins at offset {offset}" for tp, offset in sorted(log_starts.items())[:5]
    )
    return Finding(
        f"{attributed.TOPIC.name} no longer has {counted(ticks, 'tick')} that {ATTRIBUTION} has finished",
        "its records were deleted (retention, kafka-delete-records), or it was deleted and made again",
        f"{starts}; these ticks were logged in {samples.TOPIC.name} before its oldest record",
        "docs/runbooks/GpustreamRecordsExpired.md; which readers lack some of them, their records_expired_total and"
        " lost_offsets_total say (--metrics)",
    )


def _run_findings(name: NodeName, run_id: int, run: SampledRun, *, inexact_reported: bool) -> Iterator[Finding]:
    """Findings for the ticks of a run that were lost, and for those not attributed by the snapshot that they name.
    ``inexact_reported``: a transaction hides the snapshots, or two producers send, which is a finding already."""
    if run.fates["lost"]:
        yield Finding(
            f"{name}: {counted(run.fates['lost'], 'tick')} lost between {samples.TOPIC.name} and"
            f" {attributed.TOPIC.name}",
            NOT_KNOWN,
            f"run {run_id}, seq {_format_ranges(run.lost)}: {ATTRIBUTION} has committed past them, and they have"
            " neither a record nor a dead letter",
            f"was {attributed.TOPIC.name} created again, or were the group's offsets set by hand? Setting"
            " them back to before these records attributes them",
        )
    if not run.inexact or inexact_reported:
        return
    if run.without_snapshot == run.inexact:
        cause = "the snapshots that they name are not in gpu.allocations"
        next_step = "gpustream_producer_snapshots_dropped_total at the producer's /metrics says which it could not send"
    else:
        cause = "the snapshots that they name came after the tick had waited for --grace, or could not be read in time"
        next_step = (
            "look at gpustream_attribution_lag_records and loop_late_seconds of the workers; a replay finds them"
        )
    shown_by = f"{run.fates['late']} with the last snapshot known, {run.fates['none']} with none"
    yield Finding(
        f"{name}: {counted(run.inexact, 'tick')} not attributed exactly", cause, f"run {run_id}: {shown_by}", next_step
    )


# -- dead letters


def dead_letters(situation: Situation, evidence: Evidence) -> CheckResult:
    """Checks which records were dead-lettered, by stage, topic and reason."""
    counts = {kind: count for kind, count in evidence.open_dead_letters().items() if count}
    resubmitted = sum(len(receipts) for receipts in evidence.resubmitted.values())
    findings = Findings()
    for kind, count in sorted(counts.items(), key=lambda item: -item[1]):
        last, last_id = evidence.dead_letters[kind].last, evidence.dead_letters[kind].last_id
        then = _SEND_AGAIN.format(id=last_id) if kind.topic in RESUBMITTABLE else _SEND_NO_MORE
        findings.add(
            f"{kind.stage} dead-lettered {counted(count, 'record')} of {kind.topic}: {kind.reason}",
            last.error if last is not None else NOT_KNOWN,
            f"letter {last_id} is the last of them",
            f"`gpustream dead-letters show {last_id}` has it; {then}",
        )
    summary = f"{counted(sum(counts.values()), 'dead letter')}" if counts else "none"
    return CheckResult(summary + (f"; {resubmitted} were sent again" if resubmitted else ""), findings)


CHECKS: dict[str, Callable[[Situation, Evidence], CheckResult]] = {
    "pods": lambda situation, _: pods.pods(situation),
    "broker": lambda situation, _: brokers.broker(situation),
    "topics": lambda situation, _: brokers.topics(situation),
    "rights": lambda situation, _: brokers.rights(situation),
    "sent": sent,
    "clocks": clocks,
    "snapshots": snapshots,
    "workloads": leaders,
    "attributed": attribution,
    "groups": lambda situation, _: readers.groups(situation),
    "dead letters": dead_letters,
    "components": lambda situation, _: components.components(situation),
    "prometheus": readers.prometheus,
}
"""The checks, in the order in which an operator would look."""

RECORD_CHECKS = ("sent", "clocks", "snapshots", "workloads", "attributed", "dead letters")
"""The checks that need the records."""


def run(situation: Situation) -> dict[str, CheckResult]:
    """Runs all checks; those of records only if the records could be read."""
    evidence = situation.evidence or Evidence({})
    unread = CheckResult(f"not looked at: {situation.unread}", looked=False)
    return {
        name: unread if situation.evidence is None and name in RECORD_CHECKS else check(situation, evidence)
        for name, check in CHECKS.items()
    }
