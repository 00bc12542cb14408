"""The checks, in the order of the flow. Each is a function from what was seen to what it has found. Pure.

A finding says what is wrong, its cause or that the cause is not known, what shows it, and what to do next. A new check
is one function and its row in ``CHECKS``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from delivery.values import duration_words
from gpustream.command import counted
from gpustream.doctor import brokers, pods, readers
from gpustream.doctor.evidence import Fold, NodeEvidence, NodeName, SampledRun
from gpustream.doctor.readers import ATTRIBUTION, NOT_KNOWN
from gpustream.doctor.seen import Checked, Finding, Findings, Lag, Situation
from topics import allocations, attributed, samples, workloads

SILENT_MS = 30_000
"""A node is silent if it has sent no tick for so long, and for five of its intervals."""

HELD_MS = 2_000
"""A tick waited in the node's buffer if it was so much older than others when Kafka got it."""

AHEAD_MS = 2_000
"""If a tick's time is so much later than its log time, a clock is ahead."""

LATE_MS = 30_000
"""If a tick was so old when Kafka got it, it comes from a buffer, or its clock is behind."""

STEADY_MS = 5_000
"""If delays differ by no more than this, a clock is wrong: what comes from a buffer is less and less late."""

NO_LEADER_MS = 7 * 60_000
"""A leader sends each node of its cluster again every 5 minutes."""

MANY_TIMES = 0.1
"""If more than this share of the ticks was attributed again, it was not a restart."""

FATES = {
    "exact": "exact",
    "no_kubelet": "without a kubelet",
    "late": "late",
    "none": "without a snapshot",
    "dead_lettered": "dead-lettered",
    "waiting": "on their way",
    "deleted": "deleted after that",
    "lost": "lost",
}
"""What may have become of a tick, and the words for it."""

_SHOW = "`gpustream dead-letters show {id}` has it; once its error is mended, `dead-letters resubmit` sends it again"


# -- what was sent


def sent(seen: Situation, fold: Fold) -> Checked:
    """What each node sent: gaps in its runs, nodes that went silent, and two producers of one name."""
    found = Findings()
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
            found.say(
                f"{name}: two producers send under this name",
                f"its runs took turns {node.returns} times, and a producer that ended does not go on",
                f"runs {', '.join(map(str, node.runs))}",
                "stop one of them, or give it a --node of its own",
            )
    found += _silence(seen, sending)
    if fold.unreadable["lost"]:
        found.say(
            f"{counted(fold.unreadable['lost'], 'record')} of {samples.TOPIC.name} can't be read, and"
            " have no dead letter",
            NOT_KNOWN,
            "attribution has gone past them",
            f"compare with {ATTRIBUTION}'s log: it names each record that it dead-letters",
        )
    twice = sum(run.twice for node in sending.values() for run in node.runs.values())
    said = f"{counted(len(sending), 'node')} sent {counted(ticks, 'tick')} in {counted(runs, 'run')}"
    return Checked(f"{said}, {missing} missing" + (f", {twice} sent twice" if twice else ""), found)


def _silence(seen: Situation, sending: Mapping[NodeName, NodeEvidence]) -> list[Finding]:
    """Findings if no node sends, if all have stopped, or for each node that has stopped."""
    others = [repr(prefix) for prefix in seen.kafka.elsewhere]
    if not sending:
        return [
            Finding(
                f"no tick came in {seen.window}",
                NOT_KNOWN,
                f"{samples.TOPIC.name} has no record of this time that could be read",
                "does a producer run (`gpustream produce node`), with this --kafka? Its /readyz says what it lacks"
                + (f". There are topics with the prefix {', '.join(others)}, too: --topic-prefix" if others else ""),
            )
        ]
    silent = {}
    for name, run in ((name, node.last_run[1]) for name, node in sending.items() if not node.removed):
        interval_ms = (run.last_ts_ms - run.first_ts_ms) / max(1, len(run.seqs) - 1)
        if seen.now_ms - run.last_logged_ms > max(SILENT_MS, 5 * interval_ms):
            silent[name] = run
    if len(silent) == len(sending):
        return [
            Finding(
                f"no node has sent a tick for {seen.ago(max(n.last_logged_ms for n in sending.values()))[:-4]}",
                "something that all nodes share: Kafka, the network, or a release of the producer",
                f"{counted(len(sending), 'node')} sent before that",
                "look at /readyz of any producer",
            )
        ]
    held = sum(value for one in seen.components for value in one.sums("gpustream_producer_ticks_held").values())
    asked = f"; those that were asked hold {counted(int(held), 'tick')}" if held else ""
    return [
        Finding(
            f"{name}: no tick since {seen.ago(run.last_logged_ms)}",
            NOT_KNOWN,
            f"seq {run.last_seq} was the last; a producer that can't reach Kafka holds what it samples{asked}",
            "docs/runbooks/NodeSilent.md",
        )
        for name, run in silent.items()
    ]


def gaps_of(run_id: int, run: SampledRun, since_ms: int) -> list[tuple[int, int]]:
    """The first and the last seq of each gap in a run; also before its first tick, if it began in the time that is
    looked at (a run's id is when it began)."""
    gaps = run.seqs.gaps()
    first = next(iter(run.seqs))[0]
    return [(1, first - 1), *gaps] if run_id >= since_ms and first > 1 and not run.cut else gaps


def _gap(seen: Situation, name: NodeName, run_id: int, run: SampledRun, gaps: Sequence[tuple[int, int]]) -> Finding:
    missing = sum(last - first + 1 for first, last in gaps)
    delays = [run.jumps[first] for first, _ in gaps if first in run.jumps]
    waited_ms = max((delay - run.least_delay_ms for delay in delays), default=0)
    evidence = f"run {run_id}, seq {_written(gaps, 'gaps')}; {len(run.seqs)} others came"
    dropped: dict[str, float] = {}
    for component in seen.components:
        for (_, reason), value in component.sums("gpustream_producer_ticks_dropped_total").items():
            dropped[reason] = dropped.get(reason, 0) + value
    drops = ", ".join(f"{value:.0f} ({reason})" for reason, value in sorted(dropped.items()))
    if drops:
        evidence += f"; producers that were asked have dropped {drops}"
    if waited_ms >= HELD_MS:
        cause = (
            "the node's buffer dropped them: it could not send for longer than the buffer holds"
            f" (the next tick had waited {duration_words(waited_ms)})"
        )
        then = (
            "find out why Kafka could not be reached then; --buffer and --buffer-size of the producer say how long an"
            " outage it rides out"
        )
    else:
        cause = (
            f"{NOT_KNOWN}: the node could send at the time, so they were too large, refused or could not be written, or"
            " Kafka has lost them"
        )
        then = (
            "gpustream_producer_ticks_dropped_total at the producer's /metrics says what it dropped, by reason"
            " (--metrics); if it dropped none, look for an unclean leader election in the broker's log"
        )
    return Finding(f"{name}: {counted(missing, 'tick')} missing in {samples.TOPIC.name}", cause, evidence, then)


def _written(ranges: Iterable[tuple[int, int]], what: str = "") -> str:
    """The first five ranges, and how many more there are of ``what``."""
    few, more = (found := list(ranges))[:5], len(found) - 5
    shown = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in few)
    return shown + (f" and {more} more {what}".rstrip() if more > 0 else "")


# -- clocks


def clocks(seen: Situation, fold: Fold) -> Checked:
    """Whether each node's clock agrees with the log time of its ticks, and this machine's with the brokers'."""
    runs = {name: node.last_run[1] for name, node in fold.nodes.items() if node.runs}
    off = {name: -run.last_delay_ms for name, run in runs.items() if run.last_delay_ms < -AHEAD_MS}
    off |= {name: -run.last_delay_ms for name, run in runs.items() if run.last_delay_ms > LATE_MS}
    found = Findings(_clock(name, runs[name], by_ms) for name, by_ms in off.items())
    alike = off and max(off.values()) - min(off.values()) < STEADY_MS and len(off) == len(runs) > 1
    if alike:  # it is not all of them
        by_ms = next(iter(off.values()))
        found = Findings()
        found.say(
            f"all {counted(len(runs), 'node')} are {_off(by_ms)} the brokers' clock",
            "the brokers' clock is wrong, or that from which the nodes have theirs",
            "their ticks and the log times of these differ by as much",
            "`chronyc tracking` on a broker and on a node",
        )
    newest_ms = max((run.last_logged_ms for run in runs.values()), default=0)
    if newest_ms - seen.now_ms > AHEAD_MS:
        found.say(
            f"this machine's clock is {duration_words(newest_ms - seen.now_ms)} behind the brokers'",
            "one of the two is wrong",
            "a tick was logged after now",
            "what is said here of ages is wrong by as much: `chronyc tracking` here and on a broker",
        )
    least = [run.last_delay_ms for name, run in runs.items() if name not in off]
    return Checked(f"the newest ticks were {min(least)} to {max(least)} ms old when they came" if least else "-", found)


def _clock(name: NodeName, run: SampledRun, by_ms: int) -> Finding:
    shown = f"its newest tick says {duration_words(abs(by_ms))} {'later' if by_ms > 0 else 'earlier'} than its log time"
    if by_ms > 0 or run.most_delay_ms - run.least_delay_ms < STEADY_MS:
        return Finding(
            f"{name}: its clock is {_off(by_ms)} the brokers'",
            "the node does not follow a time server, or another one",
            shown,
            "`chronyc tracking` on the node; receivers refuse samples that are too old or too far ahead",
        )
    return Finding(
        f"{name}: its ticks came {duration_words(-by_ms)} late",
        "it still sends what it kept while Kafka was away, or its clock is behind",
        f"{shown}; others of this run came {duration_words(run.least_delay_ms)} to {duration_words(run.most_delay_ms)}"
        " after theirs",
        "look again in a minute; if it is as much then: `chronyc tracking` on the node",
    )


def _off(by_ms: int) -> str:
    return f"{duration_words(abs(by_ms))} {'ahead of' if by_ms > 0 else 'behind'}"


# -- snapshots of the kubelets


def snapshots(seen: Situation, fold: Fold) -> Checked:
    """Whether each node's kubelet says who has its devices, and gpu.allocations has what the newest tick names."""
    found = Findings()
    sending = {name: node for name, node in fold.nodes.items() if node.runs}
    named = 0
    for name, node in sending.items():
        run_id, run = node.last_run
        if run.last_named is None:
            beside = any(one.last_run[1].last_named is not None for key, one in sending.items() if key != name)
            if node.epoch is not None or beside:
                before = "" if run_id not in node.snapshots else "; earlier ones of this run did"
                found.say(
                    f"{name}: no kubelet answers its producer: its samples have no pods",
                    "the kubelet is down, its socket is elsewhere or not mounted, or the producer may not open it",
                    f"run {run_id}: tick {run.last_seq} names no snapshot, as those of a machine without"
                    f" Kubernetes{before}",
                    "docs/runbooks/GpustreamKubeletSilent.md: is /var/lib/kubelet/pod-resources mounted?"
                    " --pod-resources-socket",
                )
            continue
        named += 1
        if run.last_named not in node.snapshots.get(run_id, ()) and not run.unsent:  # attribution says those
            found.say(
                f"{name}: the snapshot that its ticks name is not in {allocations.TOPIC.name}",
                "it could not be written (an ACL, its size), or the topic was made again or keeps too little",
                f"run {run_id} names snapshot {run.last_named}; it is sent again every 5 minutes",
                "gpustream_producer_snapshots_dropped_total at the producer's /metrics says which it did not send",
            )
    return Checked(f"{named} of {counted(len(sending), 'node')} have a kubelet", found)


# -- what was attributed


def attribution(seen: Situation, fold: Fold) -> Checked:
    """What became of each tick that was sent: attributed exactly, late or without a snapshot, waiting, or lost."""
    found = Findings()
    totals: dict[str, int] = {}
    for name, node in fold.nodes.items():
        for run_id, run in node.runs.items():
            for fate, count in run.fates.items():
                totals[fate] = totals.get(fate, 0) + count
            found += _lost_or_inexact(name, run_id, run)
    group = next((group for group in seen.groups or () if group.name == ATTRIBUTION), None)
    if group is None and seen.groups is not None and fold.nodes and ATTRIBUTION not in seen.kafka.hidden:
        found.say(
            f"nothing is attributed: there is no group {ATTRIBUTION}",
            "no worker has ever run here",
            f"{counted(totals.get('waiting', 0), 'tick')} wait",
            "start `gpustream stream attribution`",
        )
    elif group is not None and readers.is_behind(seen, fold.oldest_waiting_ms):
        lag = next((lag for lag in group.lags if lag.topic == samples.TOPIC.name), Lag(samples.TOPIC.name, 0, (), None))
        waiting = lag._replace(records=totals["waiting"], oldest_ms=fold.oldest_waiting_ms)
        found.append(readers.behind(seen, group, waiting))
    reported = any(tp.topic == attributed.TOPIC.name for one in seen.groups or () for tp in one.begins)
    if totals.get("deleted") and not reported:  # else the check of the groups says it
        found.append(_emptied(fold, totals["deleted"]))
    replayed = sum(node.replayed for node in fold.nodes.values())
    once = sum(count for fate, count in totals.items() if fate not in ("waiting", "deleted", "lost", "dead_lettered"))
    if replayed > MANY_TIMES * max(once, 1):
        found.say(
            f"{counted(replayed, 'tick')} of {once} were attributed again",
            "two workers attribute that are not in one group, or the group's offsets were set back",
            f"{attributed.TOPIC.name} has them twice; readers drop the second one",
            "look for a second `gpustream stream attribution` with this --topic-prefix, maybe in another cluster",
        )
    said = ", ".join(f"{totals[fate]} {word}" for fate, word in FATES.items() if totals.get(fate)) or "nothing was sent"
    return Checked(said + (f"; {replayed} written again, which readers drop" if replayed else ""), found)


def _emptied(fold: Fold, ticks: int) -> Finding:
    """A finding that gpu.attributed has lost records, if no group reports that it lacks them."""
    begins = {tp: at for tp, at in fold.begins.items() if tp.topic == attributed.TOPIC.name}
    some = ", ".join(f"partition {tp.partition} begins at offset {at}" for tp, at in sorted(begins.items())[:5])
    return Finding(
        f"{attributed.TOPIC.name} no longer has {counted(ticks, 'tick')} that {ATTRIBUTION} has finished",
        "its records were deleted (retention, kafka-delete-records), or it was deleted and made again",
        f"{some}; these ticks were logged in {samples.TOPIC.name} before its oldest record",
        "docs/runbooks/GpustreamRecordsExpired.md; which readers lack some of them, their records_expired_total and"
        " lost_offsets_total say (--metrics)",
    )


def _lost_or_inexact(name: NodeName, run_id: int, run: SampledRun) -> Iterator[Finding]:
    """The ticks of a run that were lost, and those that were not attributed by the snapshot that they name."""
    if run.fates["lost"]:
        yield Finding(
            f"{name}: {counted(run.fates['lost'], 'tick')} lost between {samples.TOPIC.name} and"
            f" {attributed.TOPIC.name}",
            NOT_KNOWN,
            f"run {run_id}, seq {_written(run.lost)}: {ATTRIBUTION} has committed past them, and they have"
            " neither a record nor a dead letter",
            f"was {attributed.TOPIC.name} created again, or were the group's offsets set by hand? Setting"
            " them back to before these records attributes them",
        )
    inexact = run.fates["late"] + run.fates["none"]
    if not inexact:
        return
    if run.unsent == inexact:
        cause = "the snapshots that they name are not in gpu.allocations"
        then = "gpustream_producer_snapshots_dropped_total at the producer's /metrics says which it could not send"
    else:
        cause = "the snapshots that they name came after the tick had waited for --grace, or could not be read in time"
        then = "look at gpustream_attribution_lag_records and loop_late_seconds of the workers; a replay finds them"
    shown = f"{run.fates['late']} with the last snapshot known, {run.fates['none']} with none"
    yield Finding(f"{name}: {counted(inexact, 'tick')} not attributed exactly", cause, f"run {run_id}: {shown}", then)


# -- workloads


def leaders(seen: Situation, fold: Fold) -> Checked:
    """Whether a cluster producer leads in each cluster, one only, and knows each node that has pods."""
    clusters = {name.cluster for name, node in fold.nodes.items() if node.runs and node.snapshots}
    if not fold.listed_ms:
        return Checked(
            f"no cluster producer writes {workloads.TOPIC.name}: pods have no owners and no labels" if clusters else "-"
        )
    found = Findings()
    for cluster in sorted(clusters - fold.listed_ms.keys()):
        found.say(
            f"{cluster}: nothing is in {workloads.TOPIC.name} of this cluster",
            "its cluster producer does not run, does not lead, has another --cluster, or does not reach Kafka",
            f"it sends each node every 5 minutes; {', '.join(sorted(fold.listed_ms))} is there",
            "see /readyz of `gpustream produce cluster`: it says who leads",
        )
    late = {name: at for name, at in fold.listed_ms.items() if name in clusters and seen.now_ms - at > NO_LEADER_MS}
    for cluster, at in late.items():
        found.say(
            f"{cluster}: no cluster producer leads",
            "none runs, none has the Lease, or the leader does not reach Kafka or the API server",
            f"its last record was logged {seen.ago(at)}, and a leader sends each node every 5 minutes",
            "docs/runbooks/GpustreamNoLeader.md; /readyz of `gpustream produce cluster` says who leads",
        )
    if outdated := {name: node for name, node in fold.nodes.items() if node.outdated}:
        name, node = next(iter(outdated.items()))
        found.say(
            f"{name.cluster}: two cluster producers write at a time",
            "they have different Leases or none (--lease off), or one was cut off from the API server",
            f"{name}: {counted(node.outdated, 'record')} of an older epoch came after epoch {node.epoch};"
            " readers drop them",
            "give all replicas of a cluster one --lease, and each cluster a --cluster of its own",
        )
    for name, node in fold.nodes.items():
        if node.runs and node.holds and node.epoch is None and name.cluster in fold.listed_ms.keys() - late.keys():
            found.say(
                f"{name}: the API server of {name.cluster} has no node of this name with GPU pods",
                "the producer's --node is not the name of the Node, or its --cluster is another cluster's",
                f"its kubelet lists pods, and {workloads.TOPIC.name} has no record of it",
                "set NODE_NAME from spec.nodeName, as k8s/base does",
            )
    return Checked(f"{counted(len(fold.listed_ms), 'cluster')} known", found)


# -- dead letters


def letters(seen: Situation, fold: Fold) -> Checked:
    """What was dead-lettered, by who gave up and why."""
    counts = {kind: count for kind, count in fold.open_letters().items() if count}
    done = sum(len(receipts) for receipts in fold.resubmitted.values())
    found = Findings()
    for kind, count in sorted(counts.items(), key=lambda item: -item[1]):
        last = fold.letters[kind].last
        found.say(
            f"{kind.stage} dead-lettered {counted(count, 'record')} of {kind.topic}: {kind.reason}",
            last.error if last is not None else NOT_KNOWN,
            f"letter {fold.letters[kind].last_id} is the last of them",
            _SHOW.format(id=fold.letters[kind].last_id),
        )
    said = f"{counted(sum(counts.values()), 'dead letter')}" if counts else "none"
    return Checked(said + (f"; {done} were sent again" if done else ""), found)


Check = Callable[[Situation, Fold], Checked]

CHECKS: dict[str, Check] = {
    "pods": lambda seen, _: pods.pods(seen),
    "broker": lambda seen, _: brokers.broker(seen),
    "topics": lambda seen, _: brokers.topics(seen),
    "rights": lambda seen, _: brokers.rights(seen),
    "sent": sent,
    "clocks": clocks,
    "snapshots": snapshots,
    "workloads": leaders,
    "attributed": attribution,
    "groups": lambda seen, _: readers.groups(seen),
    "dead letters": letters,
    "components": lambda seen, _: readers.components(seen),
    "prometheus": readers.prometheus,
}
"""The checks, in the order in which an operator would look."""

OF_RECORDS = ("sent", "clocks", "snapshots", "workloads", "attributed", "dead letters")
"""Those that can say nothing if the records could not be read."""


def run(seen: Situation) -> dict[str, Checked]:
    """All checks."""
    fold = seen.fold or Fold({})
    unread = Checked(f"not looked at: {seen.unread}", looked=False)
    return {
        name: unread if seen.fold is None and name in OF_RECORDS else check(seen, fold)
        for name, check in CHECKS.items()
    }
