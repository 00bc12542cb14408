"""The checks of the consumers: the consumer groups, the components' own metrics, a Prometheus. Pure.

In:       the situation.
Out:      findings.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from delivery.ledger import Partition
from delivery.values import counted, duration_words
from gpustream.doctor.evidence import Evidence, NodeName
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
            late = [
                lag
                for lag in group.lags
                if is_behind(situation, group, lag.oldest_ms) and not _waits_at_transaction(situation, group, lag)
            ]
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
        if any(
            is_behind(situation, group, lag.oldest_ms) and not (group.members and lag.finished) for lag in group.lags
        )
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


# -- what the components say


_REFUSAL_CAUSES = {
    "out_of_order": "the receiver has newer samples of these series: ticks came after newer ones",
    "too_old": "the receiver takes nothing so old",
    "too_far_ahead": "a node's clock is ahead",
    "duplicate": "the receiver has other samples at these times: a node's clock stands still, or two write one series",
    "left_out": "the receiver refused these series in the ten minutes before",
    "series_limit": "the tenant has as many series as it may have",
}
_REFUSALS_NEXT = "docs/how-to/prometheus.md and docs/guarantees.md say what each reason means, and what can be set"

_LEFT_OUT_NEXT = "docs/runbooks/GpustreamSeriesLeftOut.md: raise the receiver's limit, or write fewer series or labels"
_EXPIRED_CAUSE = {"": "it was away or behind for longer than the topic keeps records, or somebody deleted them"}
_EXPIRED_NEXT = "docs/runbooks/GpustreamRecordsExpired.md: the topic's retention.ms, and why it was not read"

_LOSS_METRICS = {
    "_producer_ticks_dropped_total": (
        "{n} tick{s} dropped: {reason}",
        {
            "buffer_full": "Kafka was away for longer than --buffer-size lasts",
            "buffer_age": "Kafka was away for longer than --buffer",
            "refused": "the broker refuses them: max.message.bytes, or an ACL",
        },
        "docs/runbooks/GpustreamTicksDropped.md; its log has the broker's words",
    ),
    "_producer_snapshots_dropped_total": (
        "{n} snapshot{s} of the kubelet's pods dropped: {reason}",
        {"refused": "the broker refuses them: max.message.bytes, or an ACL"},
        "docs/runbooks/GpustreamLateAttribution.md; its log has the broker's words",
    ),
    "_records_dropped_total": ("{n} record{s} dropped: {reason}", _REFUSAL_CAUSES, _REFUSALS_NEXT),
    "_values_refused_total": ("{n} value{s} refused: {reason}", _REFUSAL_CAUSES, _REFUSALS_NEXT),
    "_values_left_out_total": ("{n} value{s} not sent: {reason}", _REFUSAL_CAUSES, _LEFT_OUT_NEXT),
    "_alert_samples_refused_total": ("{n} sample{s} of alerts refused: {reason}", _REFUSAL_CAUSES, _REFUSALS_NEXT),
    "_usage_samples_refused_total": ("{n} sample{s} of usage refused: {reason}", _REFUSAL_CAUSES, _REFUSALS_NEXT),
    "_series_left_out": ("{n} series not sent now", {"": "the receiver refused them: its limits"}, _LEFT_OUT_NEXT),
    "_samples_withheld_total": (
        "{n} sample{s} withheld: {reason}",
        {
            "collision": "two series have the same labels: a rule of --relabel takes away what tells them apart",
            "name": "rules of --relabel leave a name that is not valid, or none",
        },
        "docs/runbooks/GpustreamSeriesCollide.md; docs/how-to/labels.md has the rules",
    ),
    "_pods_shed_total": (
        "{n} time{s} a pod, or its labels and annotations, had no room in the record of its node",
        {"": "the record would be larger than Kafka takes: too many pods, or too long labels and annotations"},
        "--pod-labels and --pod-annotations of `gpustream produce cluster` say which are published: name fewer",
    ),
    "_cluster_labels_cut_total": (
        "{n} label{s} or annotation{s} of pods cut or left out",
        {"": "they are longer than is published, or a pod has too many"},
        "--pod-labels and --pod-annotations of `gpustream produce cluster` say which are published: name fewer",
    ),
    "_labels_cut_total": (
        "{n} label{s} of pods and namespaces on no series",
        {"": "pods have more labels than --max-labels leaves room for"},
        "raise --max-labels as far as the receiver takes it, or publish fewer: --pod-labels of `produce cluster`",
    ),
    "_counters_broken": (
        "the file of --counters can't be used",
        {"": "it can't be read, or a line of it is wrong: what it held before is in force"},
        "its log names the line",
    ),
    "_counters_rows_left_out": (
        "{n} row{s} of the file of --counters not served",
        {"": "there is no such field, or nobody collects it"},
        "its log names each row, and why",
    ),
    "_alertmanager_refused_total": (
        "{n} alert{s} refused, each time that they were sent",
        {"": "Alertmanager takes no alert as this one is: its labels, or its times"},
        "its log has Alertmanager's words",
    ),
    "_records_expired_total": ("{n} record{s} deleted before they were read", _EXPIRED_CAUSE, _EXPIRED_NEXT),
    "_lost_offsets_total": ("{n} record{s} deleted before they were read", _EXPIRED_CAUSE, _EXPIRED_NEXT),
    "_misplaced_nodes_total": (
        "nodes in a partition that is not theirs: {n}",
        {"": "a producer that is not gpustream's wrote them, with another partitioner"},
        "use murmur2 of the key, as Kafka's Java clients do (librdkafka: partitioner=murmur2_random)",
    ),
}


_ALSO_COUNTED_AS_DROPPED = ("_values_refused_total", "_values_left_out_total")


_STATUS_NEXT = {
    "400": "docs/how-to/prometheus.md says what a receiver refuses",
    "401": "the credentials are wrong or missing: --bearer-token-file, --basic-auth-user; files are read each time",
    "403": "the credentials are right and may not write: the tenant (--header 'X-Scope-OrgID: NAME') or its rights",
    "404": "the path of --url is wrong, or the receiver is off: Prometheus needs --web.enable-remote-write-receiver",
    "405": "the path of --url is not one that takes a POST",
    "413": "a proxy in front of the receiver takes no request so large: raise its limit",
    "429": "the receiver limits this tenant: raise its limit, or write fewer series or less often (--resolution)",
    "5": "the receiver fails: look at its own log and health",
}
"""What to do about a receiver's HTTP status, by its first digits."""

_NOT_READY_NEXT = {
    "does not accept": "docs/runbooks/GpustreamReceiverFailing.md: is the receiver up, and its address right?",
    "a transaction is open": "the check of the topics, above, says how to end it",
    "kubelet": "docs/runbooks/GpustreamKubeletSilent.md",
    "lease ": "docs/runbooks/GpustreamNoLeader.md",
    "GPU ": "docs/runbooks/GPUNotAnswering.md; `gpustream devices` on the node asks each GPU",
    "event loop": "it has too little CPU, or hangs: `kubectl top pods`, and its CPU limit; if it uses none, restart it",
}
"""What to do about a component that is not ready, by words of its reasons."""

_KUBELET_SILENT_S = 60.0


def components(situation: Situation) -> CheckResult:
    """Checks the components' own metrics: what they dropped, why they are not ready, what their receiver answers."""
    findings = Findings()
    _, silent = silent_consumer(situation) or (None, None)  # the finding of its group names it
    for component in situation.components:
        url = component.url
        if component.error:
            if component is not silent:
                findings.add(f"{url}: no metrics", component.error, "it was asked", "is it up, and is it --listen?")
            continue
        if component.not_ready:
            next_step = _next_of_not_ready(component.not_ready)
            findings.add(f"{url}: not ready", component.not_ready, "/readyz says so", next_step)
        silent_s = max(
            (series.value for series in component.series if series.name == "gpustream_node_kubelet_age_seconds"),
            default=0,
        )
        if silent_s > _KUBELET_SILENT_S and "kubelet" not in component.not_ready:
            findings.add(
                f"{url}: its kubelet has been silent for {duration_words(silent_s * 1000)}",
                "the kubelet is down or its socket is another one: new pods are missing",
                "gpustream_node_kubelet_age_seconds",
                "docs/runbooks/GpustreamKubeletSilent.md",
            )
        findings += _loss_findings(situation, component)
    outcomes = [_outcome_counts(component) for component in situation.components if not component.error]
    summary = "; ".join(filter(None, outcomes)) or (
        f"{counted(len(situation.components), 'component')} asked" if situation.components else "not asked (--metrics)"
    )
    return CheckResult(summary, findings, looked=bool(situation.components))


def _next_of_not_ready(reasons: str) -> str:
    """What to do about a component that is not ready for these reasons."""
    if status := re.search(r"\bHTTP ([45]\d\d)\b", reasons):
        return next(
            (step for digits, step in _STATUS_NEXT.items() if status[1].startswith(digits)), "see the receiver's log"
        )
    return next((step for words, step in _NOT_READY_NEXT.items() if words in reasons), "its log says more")


def _loss_findings(situation: Situation, component: OwnMetrics) -> list[Finding]:
    findings = Findings()
    reported_names: set[str] = set()
    reported_reasons: set[str] = set()  # the values of a dropped record count as refused, too: once reported is enough
    for suffix, (text, causes, next_step) in _LOSS_METRICS.items():
        for (name, reason), value in component.sums(suffix).items():
            is_intended = suffix == "_samples_withheld_total" and reason == "rule"
            is_reported = suffix in _ALSO_COUNTED_AS_DROPPED and reason in reported_reasons
            if name in reported_names or is_intended or is_reported:
                continue
            reported_reasons.add(reason)
            reported_names.update([name] if not reason else [])
            finding = f"{component.url}: {text.format(n=f'{value:.0f}', s='' if value == 1 else 's', reason=reason)}"
            cause = causes.get(reason, causes.get("", NOT_KNOWN))
            findings.add(finding, cause, f"{name}, {component.since(situation.now_ms)}", next_step)
    return findings


def _outcome_counts(component: OwnMetrics) -> str:
    counts_by_sink: dict[str, dict[str, float]] = {}
    for outcome in ("delivered", "duplicate", "dropped", "dead_lettered"):
        for (name, _), value in component.sums(f"_records_{outcome}_total").items():
            sink = name.removeprefix("gpustream_").partition("_records_")[0]
            counts = counts_by_sink.setdefault(sink, {})
            counts[outcome] = counts.get(outcome, 0.0) + value
    return ", ".join(
        f"{sink}: " + ", ".join(f"{value:.0f} {outcome}" for outcome, value in counts.items())
        for sink, counts in counts_by_sink.items()
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
    if server.newest_ms and not any(name.node for name in server.newest_ms):
        return CheckResult("of which node its series are is not known: no label of theirs says it", findings)
    newest = {
        name: node.newest_attributed_ms
        for name, node in evidence.nodes.items()
        if situation.now_ms - node.newest_attributed_ms < IN_PROMETHEUS_MS
    }
    sinks = [
        group
        for group in situation.groups or ()
        if group.name.startswith("gpustream-sink-") and attributed.TOPIC.name in {tp.topic for tp in group.committed}
    ]
    is_scraped = any(group.name.startswith("gpustream-sink-scrape") for group in sinks)
    behind_ms = BEHIND_MS + (SCRAPED_AFTER_MS if is_scraped else 0)
    late = {name: at_ms for name, at_ms in newest.items() if at_ms - server.newest_ms.get(name, 0) > behind_ms}
    lagging = [group for group in sinks if any(is_behind(situation, group, lag.oldest_ms) for lag in group.lags)]
    summary = f"has {len(newest) - len(late)} of {counted(len(newest), 'node')}"
    if late and len(lagging) == len(sinks) > 0:  # it has all that the sinks have finished
        return CheckResult(f"{summary}: {', '.join(group.name for group in lagging)} has not taken more", findings)
    return CheckResult(
        summary,
        [*findings, *_missing_samples(situation, server, late, no_nodes=not server.newest_ms.keys() & newest.keys())],
    )


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
