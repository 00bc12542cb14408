"""The checks of the consumers: the consumer groups, and a Prometheus. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from delivery.ledger import Partition
from delivery.values import counted
from gpustream.doctor.evidence import Evidence, NodeEvidence, NodeName
from gpustream.doctor.situation import (
    CheckResult,
    Finding,
    Findings,
    Group,
    Lag,
    OwnMetrics,
    Prometheus,
    Situation,
    first_of,
)
from sinks import SINKS
from streams import STREAMS
from topics import attributed, samples
from topics.samples import silent_after_ms

ATTRIBUTION = "gpustream-attribution"

UPSTREAM = {
    f"gpustream-sink-{sink}": f"gpustream-{stream}"
    for sink, reader in SINKS.items()
    for stream, writer in STREAMS.items()
    if f"gpustream-{stream}" != ATTRIBUTION and set(reader.reads) <= set(writer.writes)
}
"""The sinks that only read what one stream writes, with that stream's group. Attribution has a check of its own."""

BEHIND_MS = 30_000
"""A record that is younger than this is on its way. A pending tick may wait for 13 s of it."""

COMMITS_AFTER_MS = {"gpustream-usage": 75_000, "gpustream-sink-parquet": 60_000}
"""The groups that commit only what they have written, once in so long: the books of usage, and ``--write-every``."""

IN_PROMETHEUS_MS = 240_000
"""An instant query finds a sample for five minutes."""

ENDED_MS = 60_000
"""The series of a node that has been silent for so long, or for three of its intervals, end with staleness markers."""

SCRAPED_AFTER_MS = 60_000
"""By default Prometheus scrapes once in so long, and that is how old its newest sample may be."""

NOT_KNOWN = "not known"


# -- consumer groups


def groups(situation: Situation) -> CheckResult:
    """Checks each consumer group's lag, whether it shrinks, and whether two groups attribute."""
    if situation.groups is None:
        return CheckResult("not known: no broker answers for the groups", looked=False)
    findings, summaries = Findings(), list[str]()
    stream_groups = [f"gpustream-{name}" for name in STREAMS]
    for group in situation.groups:
        oldest = min((lag.oldest_ms for lag in group.lags if lag.oldest_ms is not None), default=None)
        summaries.append(f"{group.name} " + ("at the end" if oldest is None else f"at {situation.ago(oldest)}"))
        if group.name != ATTRIBUTION:  # the check of attribution reports its lag
            late = [lag for lag in late_lags(situation, group) if not _waits_at_transaction(situation, group, lag)]
            late_ticks = [lag for lag in late if lag.topic == attributed.TOPIC.name]
            reads_state_beside = group.name in stream_groups and late_ticks
            findings += [behind(situation, group, lag) for lag in (late_ticks if reads_state_beside else late)]
    findings += _expired_findings(situation.groups)
    rivals = [
        group.name
        for group in situation.groups
        if group.name not in stream_groups and samples.TOPIC.name in {tp.topic for tp in group.committed}
    ]
    for name in rivals:
        findings.add(
            f"{name} reads {samples.TOPIC.name} beside {ATTRIBUTION}",
            "two groups attribute: each tick comes twice into gpu.attributed",
            f"it has committed offsets of {samples.TOPIC.name}",
            "stop one of them, or give it a --topic-prefix of its own",
        )
    never_run = [name for name in stream_groups if name not in {group.name for group in situation.groups}]
    for group in situation.groups:
        if (upstream := UPSTREAM.get(group.name, "")) in never_run:
            findings.add(
                f"{group.name} has nothing to read: {upstream} has never run",
                f"no `gpustream stream {upstream.removeprefix('gpustream-')}` was ever started with this Kafka",
                f"there is no group {upstream}",
                "start it; or stop the sink, if nobody wants that",
            )
    summaries += [f"{name} has never run" for name in never_run if name != ATTRIBUTION]
    if not any(group.name.startswith("gpustream-sink-") for group in situation.groups):
        summaries.append("no sink has read anything")
    return CheckResult("; ".join(summaries), findings)


def _expired_findings(groups: Sequence[Group]) -> list[Finding]:
    """A finding for each topic of which records were deleted before a group had read them."""
    findings = Findings()
    for topic in sorted({tp.topic for group in groups for tp in group.log_starts}):
        counts, partitions = {}, []
        for group in groups:
            log_starts = {tp: offset for tp, offset in group.log_starts.items() if tp.topic == topic}
            if log_starts:
                counts[group.name] = sum(offset - group.committed[tp] for tp, offset in log_starts.items())
            partitions += [
                f"partition {tp.partition} begins at offset {offset},"
                f" {group.name} has finished up to {group.committed[tp]}"
                for tp, offset in sorted(log_starts.items())
            ]
        findings.add(
            f"records of {topic} were deleted before they were read: "
            + ", ".join(f"{number} that {name} lacks" for name, number in counts.items()),
            "the group was away or behind for longer than the topic keeps them (retention.ms, retention.bytes), or"
            " somebody deleted them (kafka-delete-records, the topic made again)",
            first_of(partitions),
            "docs/runbooks/GpustreamRecordsExpired.md: a member that starts goes on with the oldest record that is"
            " left; `gpustream topics create` sets a topic's retention right again",
        )
    return findings


def is_behind(situation: Situation, group: Group, oldest_ms: int | None) -> bool:
    """Whether the group should have finished a record by now that was logged at ``oldest_ms``."""
    on_its_way_ms = BEHIND_MS + COMMITS_AFTER_MS.get(group.name, 0)
    return oldest_ms is not None and situation.now_ms - oldest_ms > on_its_way_ms


def late_lags(situation: Situation, group: Group) -> list[Lag]:
    """The lags of the group in the topics in which it is behind."""
    return [lag for lag in group.lags if is_behind(situation, group, lag.oldest_ms)]


def _keeps_last_ticks(group: Group, lag: Lag) -> bool:
    """Whether the group does nothing because no tick comes: the alert stream finishes one with the next of its node."""
    return group.name == "gpustream-alerts" and lag.finished == lag.grew == 0


def _waits_at_transaction(situation: Situation, group: Group, lag: Lag) -> bool:
    """Whether no tick comes because a transaction is open, which the check of the topics reports."""
    hidden = all(Partition(lag.topic, number) in situation.open_transactions for number in lag.partitions)
    return hidden and _keeps_last_ticks(group, lag)


def silent_consumer(situation: Situation) -> tuple[Group, OwnMetrics] | None:
    """The group that is stuck and the component that does not answer, if there is one of each: they belong together."""
    stuck = [
        group
        for group in situation.groups or ()
        if any(not (group.members and lag.finished) for lag in late_lags(situation, group))
    ]
    silent = [component for component in situation.components if component.error]
    return (stuck[0], silent[0]) if len(stuck) == len(silent) == 1 else None


def behind(situation: Situation, group: Group, lag: Lag) -> Finding:
    """The finding for a group that is behind: why, and whether it catches up."""
    partitions = lag.partitions
    partitions_text = f"in {counted(len(partitions), 'partition')}" + (
        f" ({', '.join(map(str, partitions))})" if len(partitions) <= 5 else ""
    )
    shown_by = (
        f"the oldest was logged {situation.ago(lag.oldest_ms or 0)}, {partitions_text}; the group is {group.state},"
        f" {counted(group.members, 'member')}{lag.movement}"
    )
    silent_pair = silent_consumer(situation)
    failing = [
        component.url
        for component in situation.components
        for name, _ in component.sums("_receiver_failing")
        if group.name.replace("-", "_").endswith(name.removeprefix("gpustream_").removesuffix("_receiver_failing"))
    ]
    if silent_pair is not None and silent_pair[0] is group:
        cause = f"{silent_pair[1].url} does not answer ({silent_pair[1].error}): it hangs, is stopped or is down"
        next_step = "restart it: what waits is read then. Its log, and that of its node, may say why"
    elif not group.members:
        cause, next_step = "nobody reads: the group has no member", "start it; what waits is read then"
    elif failing:
        cause, next_step = "the receiver does not take it", f"see {failing[0]} /readyz"
        shown_by += f"; {failing[0]} says so"
    elif lag.finished and lag.grew < 0:
        cause, next_step = "it was away, or slow, and catches up", "wait; look again then"
    elif lag.finished:
        cause = "it is slower than what comes"
        next_step = "more members share the partitions; its loop_late_seconds and request_seconds say how busy it is"
    elif _keeps_last_ticks(group, lag):
        cause = "no tick comes, and until one does it keeps the last ones of each node: or it hangs"
        next_step = "see first why no tick comes: is attribution well? Then /readyz of its members"
    else:
        cause = "it takes nothing: it hangs or is stopped, its receiver does not take anything, or it waits for a topic"
        cause = "it has not read that far" if lag.finished is None else cause
        next_step = "/readyz of its members says what they wait for; one that does not answer either hangs: restart it"
    return Finding(
        f"{group.name}: {counted(lag.records, 'record')} of {lag.topic} not taken yet", cause, shown_by, next_step
    )


# -- Prometheus


def prometheus(situation: Situation, evidence: Evidence) -> CheckResult:
    """Checks that Prometheus has each node's newest attributed tick, and that its own rules and configuration work."""
    server = situation.prometheus
    if server is None:
        return CheckResult("not asked (--prometheus)", looked=False)
    if server.error:
        return CheckResult(
            "not known", [Finding(f"{server.url}: no answer", server.error, "it was asked", "see --prometheus")]
        )
    findings = _broken_files(server)
    if server.newest_ms and not any(name.node for name in server.newest_ms):
        return CheckResult("of which node its series are is not known: no label of theirs says it", findings)
    newest = {
        name: node.newest_attributed_ms
        for name, node in evidence.nodes.items()
        if situation.now_ms - node.newest_attributed_ms < _found_for_ms(node)
    }
    if not newest:
        return CheckResult("nothing to look for: no tick of the last minute is attributed", findings, looked=False)
    sinks = [
        group
        for group in situation.groups or ()
        if group.name.startswith("gpustream-sink-") and attributed.TOPIC.name in {tp.topic for tp in group.committed}
    ]
    is_scraped = any(group.name.startswith("gpustream-sink-scrape") for group in sinks)
    behind_ms = BEHIND_MS + (SCRAPED_AFTER_MS if is_scraped else 0)
    late = {name: at_ms for name, at_ms in newest.items() if at_ms - server.newest_ms.get(name, 0) > behind_ms}
    lagging = [group for group in sinks if late_lags(situation, group)]
    summary = f"has {len(newest) - len(late)} of {counted(len(newest), 'node')}"
    if late and len(lagging) == len(sinks) > 0:  # it has all that the sinks have finished
        return CheckResult(f"{summary}: {', '.join(group.name for group in lagging)} has not taken more", findings)
    return CheckResult(
        summary,
        [*findings, *_missing_samples(situation, server, late, no_nodes=not server.newest_ms.keys() & newest.keys())],
    )


def _broken_files(server: Prometheus) -> Findings:
    """What Prometheus could not load, or fails at, of its own rules and configuration."""
    findings = Findings(
        Finding(
            f"{server.url}: the rule {name} fails", error, "/api/v1/rules", "`promtool check rules FILE` says where"
        )
        for name, error in server.broken_rules.items()
    )
    if server.reload_failed:
        findings.add(
            f"{server.url}: it does not run with the configuration that it has",
            "its file, or a file of rules that it names, could not be parsed: it goes on with the one before",
            "prometheus_config_last_reload_successful is 0",
            "`promtool check config FILE` names the line; then reload it",
        )
    return findings


def _found_for_ms(node: NodeEvidence) -> int:
    """How long an instant query finds the node's newest tick, at least, if no other comes."""
    interval_ms = node.last_run[1].interval_ms if node.runs else None
    return min(IN_PROMETHEUS_MS, silent_after_ms(interval_ms, ENDED_MS))


def _missing_samples(
    situation: Situation, server: Prometheus, late: Mapping[NodeName, int], *, no_nodes: bool
) -> Iterator[Finding]:
    """Findings for the nodes that Prometheus lacks. ``no_nodes``: it has none at all, which has another cause."""
    for name, attributed_ms in () if no_nodes else late.items():
        newest_ms = server.newest_ms.get(name)
        newest_text = situation.ago(newest_ms) if newest_ms else "nothing of 5 minutes"
        yield Finding(
            f"{name}: Prometheus does not have its newest samples",
            f"{NOT_KNOWN}: no sink has delivered them, or Prometheus refused them",
            f"attributed: {situation.ago(attributed_ms)}; in Prometheus: {newest_text}",
            "does the group of the sink lag? What does it say of dropped records (--metrics)?",
        )
    if not late or not no_nodes:
        return
    sinks = [group.name for group in situation.groups or () if group.name.startswith("gpustream-sink-")]
    if server.accepts_remote_write is False and not any("scrape" in name for name in sinks):
        cause, next_step = "it takes no remote write", "start it with --web.enable-remote-write-receiver"
    elif not sinks:
        cause = "no sink has ever run here"
        next_step = "start `gpustream sink remote-write`, or let Prometheus scrape `gpustream sink scrape`"
    else:
        cause = "the sink writes to another Prometheus or tenant, or nothing scrapes it, or nothing is delivered"
        next_step = "compare --url of the sink with this address; does its group lag, what does it say (--metrics)?"
    yield Finding(
        f"{server.url} has no sample of {counted(len(late), 'node')}",
        cause,
        f"it has {counted(len(server.newest_ms), 'other node')}; the groups here: {', '.join(sinks) or 'none'}",
        next_step,
    )
