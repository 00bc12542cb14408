"""Who reads, and what is said outside of Kafka: the consumer groups, the components' own metrics, a Prometheus. Pure.

In:       what was seen.
Out:      findings.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from delivery.values import duration_words
from gpustream.command import counted
from gpustream.doctor.evidence import Fold, NodeName
from gpustream.doctor.seen import Checked, Finding, Findings, Group, Lag, OwnMetrics, Prometheus, Situation
from streams import STREAMS
from topics import attributed, samples

ATTRIBUTION = "gpustream-attribution"

FED_BY = {
    "gpustream-sink-alertmanager": "gpustream-alerts",
    "gpustream-sink-webhook": "gpustream-alerts",
    "gpustream-sink-parquet": "gpustream-usage",
}
"""Sinks that read what one stream writes, and nothing else."""

BEHIND_MS = 30_000
"""What was logged in this time before the end is on its way. A pending tick may wait for 13 s of it."""

IN_PROMETHEUS_MS = 240_000
"""An instant query finds a sample for five minutes."""

NOT_KNOWN = "not known"

_PLACES = 5
"""At most this many partitions are written out in a finding."""


# -- consumer groups


def groups(seen: Situation) -> Checked:
    """What each consumer group has not taken yet, whether that gets less, and whether there are too many groups."""
    if seen.groups is None:
        return Checked("not known: no broker answers for the groups", looked=False)
    found, lines = Findings(), list[str]()
    for group in seen.groups:
        oldest = min((lag.oldest_ms for lag in group.lags if lag.oldest_ms is not None), default=None)
        lines.append(f"{group.name} " + ("at the end" if oldest is None else f"at {seen.ago(oldest)}"))
        if group.name != ATTRIBUTION:  # the check of attribution says more
            found += [behind(seen, group, lag) for lag in group.lags if is_behind(seen, lag.oldest_ms)]
    found += _expired(seen.groups)
    known = [f"gpustream-{name}" for name in STREAMS]
    rivals = [
        group.name
        for group in seen.groups
        if group.name not in known and samples.TOPIC.name in {tp.topic for tp in group.committed}
    ]
    found += [
        Finding(
            f"{name} reads {samples.TOPIC.name} beside {ATTRIBUTION}",
            "two groups attribute: each tick comes twice into gpu.attributed",
            f"it has committed offsets of {samples.TOPIC.name}",
            "stop one of them, or give it a --topic-prefix of its own",
        )
        for name in rivals
    ]
    never = [name for name in known if name not in {group.name for group in seen.groups}]
    found += [
        Finding(
            f"{group.name} has nothing to read: {FED_BY[group.name]} has never run",
            f"no `gpustream stream {FED_BY[group.name].removeprefix('gpustream-')}` was ever started with this Kafka",
            f"there is no group {FED_BY[group.name]}",
            "start it; or stop the sink, if nobody wants that",
        )
        for group in seen.groups
        if FED_BY.get(group.name) in never
    ]
    lines += [f"{name} has never run" for name in never if name != ATTRIBUTION]
    if not any(group.name.startswith("gpustream-sink-") for group in seen.groups):
        lines.append("no sink has read anything")
    return Checked("; ".join(lines), found)


def _expired(groups: Sequence[Group]) -> list[Finding]:
    """For each topic, the groups that had not read its records when these were deleted."""
    found = Findings()
    for topic in sorted({tp.topic for group in groups for tp in group.begins}):
        counts, places = {}, []
        for group in groups:
            mine = {tp: at for tp, at in group.begins.items() if tp.topic == topic}
            if mine:
                counts[group.name] = sum(at - group.committed[tp] for tp, at in mine.items())
            places += [
                f"partition {tp.partition} begins at offset {at}, {group.name} has finished up to {group.committed[tp]}"
                for tp, at in sorted(mine.items())
            ]
        more = f"; and {len(places) - _PLACES} more" if len(places) > _PLACES else ""
        found.say(
            f"records of {topic} were deleted before they were read: "
            + ", ".join(f"{number} that {name} lacks" for name, number in counts.items()),
            "the group was away or behind for longer than the topic keeps them (retention.ms, retention.bytes), or"
            " somebody deleted them (kafka-delete-records, the topic made again)",
            "; ".join(places[:_PLACES]) + more,
            "docs/runbooks/GpustreamRecordsExpired.md: a member that starts goes on with the oldest record that is"
            " left; `gpustream topics create` sets a topic's retention right again",
        )
    return found


def is_behind(seen: Situation, oldest_ms: int | None) -> bool:
    """Whether what was logged then should have been taken by now."""
    return oldest_ms is not None and seen.now_ms - oldest_ms > BEHIND_MS


def silent_reader(seen: Situation) -> tuple[Group, OwnMetrics] | None:
    """The group that takes nothing and the component that does not answer, if there is one of each: it is its group."""
    stuck = [
        group
        for group in seen.groups or ()
        if any(is_behind(seen, lag.oldest_ms) and not (group.members and lag.finished) for lag in group.lags)
    ]
    silent = [one for one in seen.components if one.error]
    return (stuck[0], silent[0]) if len(stuck) == len(silent) == 1 else None


def behind(seen: Situation, group: Group, lag: Lag) -> Finding:
    """A group that has not finished what was logged a while ago: why, and whether it catches up."""
    parts = lag.partitions
    where = f"in {counted(len(parts), 'partition')}" + (f" ({', '.join(map(str, parts))})" if len(parts) <= 5 else "")
    evidence = (
        f"the oldest was logged {seen.ago(lag.oldest_ms or 0)}, {where}; the group is {group.state},"
        f" {counted(group.members, 'member')}{lag.movement}"
    )
    silent = silent_reader(seen)
    failing = [
        one.url
        for one in seen.components
        for name, _ in one.sums("_receiver_failing")
        if group.name.replace("-", "_").endswith(name.removeprefix("gpustream_").removesuffix("_receiver_failing"))
    ]
    if silent is not None and silent[0] is group:
        cause = f"{silent[1].url} does not answer ({silent[1].error}): it hangs, is stopped or is down"
        then = "restart it: what waits is read then. Its log, and that of its node, may say why"
    elif not group.members:
        cause, then = "nobody reads: the group has no member", "start it; what waits is read then"
    elif failing:
        cause, then = "the receiver does not take it", f"see {failing[0]} /readyz"
        evidence += f"; {failing[0]} says so"
    elif lag.finished and lag.grew < 0:
        cause, then = "it was away, or slow, and catches up", "wait; look again then"
    elif lag.finished:
        cause = "it is slower than what comes"
        then = "more members share the partitions; its loop_late_seconds and request_seconds say how busy it is"
    else:
        cause = "it takes nothing: it hangs or is stopped, its receiver does not take anything, or it waits for a topic"
        cause = "it has not read that far" if lag.finished is None else cause
        then = "/readyz of its members says what they wait for; one that does not answer either hangs: restart it"
    return Finding(
        f"{group.name}: {counted(lag.records, 'record')} of {lag.topic} not taken yet", cause, evidence, then
    )


# -- what the components say


_RECEIVER_SAYS = {
    "out_of_order": "the receiver has newer samples of these series: ticks came after newer ones",
    "too_old": "the receiver takes nothing so old",
    "too_far_ahead": "a node's clock is ahead",
    "duplicate": "the receiver has other samples at these times: a node's clock stands still, or two write one series",
    "left_out": "the receiver refused these series in the ten minutes before",
    "series_limit": "the tenant has as many series as it may have",
}
_REFUSALS = "docs/how-to/prometheus.md and docs/guarantees.md say what each reason means, and what can be set"

_LEFT_OUT = "docs/runbooks/GpustreamSeriesLeftOut.md: raise the receiver's limit, or write fewer series or labels"
_DELETED = {"": "it was away or behind for longer than the topic keeps records, or somebody deleted them"}
_EXPIRED = "docs/runbooks/GpustreamRecordsExpired.md: the topic's retention.ms, and why it was not read"

_BAD_COUNTERS = {
    "_records_dropped_total": ("{n} records dropped: {reason}", _RECEIVER_SAYS, _REFUSALS),
    "_values_refused_total": ("{n} values refused: {reason}", _RECEIVER_SAYS, _REFUSALS),
    "_values_left_out_total": ("{n} values not sent: {reason}", _RECEIVER_SAYS, _LEFT_OUT),
    "_alert_samples_refused_total": ("{n} samples of alerts refused: {reason}", _RECEIVER_SAYS, _REFUSALS),
    "_usage_samples_refused_total": ("{n} samples of usage refused: {reason}", _RECEIVER_SAYS, _REFUSALS),
    "_series_left_out": ("{n} series are not sent now", {"": "the receiver refused them: its limits"}, _LEFT_OUT),
    "_samples_withheld_total": (
        "{n} samples withheld: {reason}",
        {
            "collision": "two series have the same labels: a rule of --relabel takes away what tells them apart",
            "name": "rules of --relabel leave a name that is not valid, or none",
        },
        "docs/runbooks/GpustreamSeriesCollide.md; docs/how-to/labels.md has the rules",
    ),
    "_pods_shed_total": (
        "{n} times a pod, or its labels and annotations, had no room in the record of its node",
        {"": "the record would be larger than Kafka takes: too many pods, or too long labels and annotations"},
        "--pod-labels and --pod-annotations of `gpustream produce cluster` say which are published: name fewer",
    ),
    "_cluster_labels_cut_total": (
        "{n} labels or annotations of pods were cut or left out",
        {"": "they are longer than is published, or a pod has too many"},
        "--pod-labels and --pod-annotations of `gpustream produce cluster` say which are published: name fewer",
    ),
    "_labels_cut_total": (
        "{n} labels of pods and namespaces are on no series",
        {"": "pods have more labels than --max-labels leaves room for"},
        "raise --max-labels as far as the receiver takes it, or publish fewer: --pod-labels of `produce cluster`",
    ),
    "_counters_broken": (
        "the file of --counters can't be used",
        {"": "it can't be read, or a line of it is wrong: what it held before is in force"},
        "its log names the line",
    ),
    "_counters_rows_left_out": (
        "{n} rows of the file of --counters are not served",
        {"": "there is no such field, or nobody collects it"},
        "its log names each row, and why",
    ),
    "_alertmanager_refused_total": (
        "{n} alerts refused, each time that they were sent",
        {"": "Alertmanager takes no alert as this one is: its labels, or its times"},
        "its log has Alertmanager's words",
    ),
    "_records_expired_total": ("{n} records deleted before they were read", _DELETED, _EXPIRED),
    "_lost_offsets_total": ("{n} records deleted before they were read", _DELETED, _EXPIRED),
    "_misplaced_nodes_total": (
        "{n} nodes in a partition that is not theirs",
        {"": "a producer that is not gpustream's wrote them, with another partitioner"},
        "use murmur2 of the key, as Kafka's Java clients do (librdkafka: partitioner=murmur2_random)",
    ),
}


_COUNTED_AGAIN = ("_values_refused_total", "_values_left_out_total")


_ANSWERS = {
    "400": "docs/how-to/prometheus.md says what a receiver refuses",
    "401": "the credentials are wrong or missing: --bearer-token-file, --basic-auth-user; files are read each time",
    "403": "the credentials are right and may not write: the tenant (--header 'X-Scope-OrgID: NAME') or its rights",
    "404": "the path of --url is wrong, or the receiver is off: Prometheus needs --web.enable-remote-write-receiver",
    "405": "the path of --url is not one that takes a POST",
    "413": "a proxy in front of the receiver takes no request so large: raise its limit",
    "429": "the receiver limits this tenant: raise its limit, or write fewer series or less often (--resolution)",
    "5": "the receiver fails: look at its own log and health",
}
"""What to do about an answer of a receiver, by the beginning of its status."""

_KUBELET_SILENT_S = 60.0


def components(seen: Situation) -> Checked:
    """What the components say of themselves: what they dropped, why they are not ready, what their receiver answers."""
    found = Findings()
    silent = silent_reader(seen)  # that is said of its group
    for one in seen.components:
        if one.error and silent is not None and one is silent[1]:
            continue
        if one.error:
            found.append(Finding(f"{one.url}: no metrics", one.error, "it was asked", "is it up, and is it --listen?"))
            continue
        if one.not_ready:
            found.append(Finding(f"{one.url}: not ready", one.not_ready, "/readyz says so", _then(one.not_ready)))
        silent_s = max((row.value for row in one.series if row.name == "gpustream_node_kubelet_age_seconds"), default=0)
        if silent_s > _KUBELET_SILENT_S:
            found.say(
                f"{one.url}: its kubelet has been silent for {duration_words(silent_s * 1000)}",
                "the kubelet is down or its socket is another one: new pods are missing",
                "gpustream_node_kubelet_age_seconds",
                "docs/runbooks/GpustreamKubeletSilent.md",
            )
        found += _counted_losses(seen, one)
    outcomes = [_outcomes(one) for one in seen.components if not one.error]
    said = "; ".join(filter(None, outcomes)) or "not asked (--metrics)"
    return Checked(said, found, looked=bool(seen.components))


def _then(not_ready: str) -> str:
    """What to do about a reason: what a receiver's status means, if there is one in it."""
    if status := re.search(r"\bHTTP ([45]\d\d)\b", not_ready):
        return next((then for code, then in _ANSWERS.items() if status[1].startswith(code)), "see the receiver's log")
    if "does not accept" in not_ready:
        return "docs/runbooks/GpustreamReceiverFailing.md: is the receiver up, and its address right?"
    return "its log says more"


def _counted_losses(seen: Situation, one: OwnMetrics) -> list[Finding]:
    found = Findings()
    names: set[str] = set()
    reasons: set[str] = set()  # of a record that was dropped, the values count as refused, too; then they are left out
    for suffix, (what, causes, then) in _BAD_COUNTERS.items():
        for (name, reason), value in one.sums(suffix).items():
            asked_for = suffix == "_samples_withheld_total" and reason == "rule"
            if name in names or asked_for or (reason in reasons and suffix in _COUNTED_AGAIN):
                continue
            reasons.add(reason)
            names.update([name] if not reason else [])
            said = what.format(n=f"{value:.0f}", reason=reason)
            cause = causes.get(reason, causes.get("", NOT_KNOWN))
            found.append(Finding(f"{one.url}: {said}", cause, f"{name}, {one.since(seen.now_ms)}", then))
    return found


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
    """Whether Prometheus has the newest attributed tick of each node, and its own rules and configuration work."""
    asked = seen.prometheus
    if asked is None:
        return Checked("not asked (--prometheus)", looked=False)
    if asked.error:
        return Checked(
            "not known", [Finding(f"{asked.url}: no answer", asked.error, "it was asked", "see --prometheus")]
        )
    found = Findings(
        Finding(f"{asked.url}: the rule {name} fails", said, "/api/v1/rules", "`promtool check rules FILE` says where")
        for name, said in asked.broken_rules.items()
    )
    if asked.reload_failed:
        found.say(
            f"{asked.url}: it does not run with the configuration that it has",
            "its file, or a file of rules that it names, could not be parsed: it goes on with the one before",
            "prometheus_config_last_reload_successful is 0",
            "`promtool check config FILE` names the line; then reload it",
        )
    newest = {
        name: node.newest_attributed_ms
        for name, node in fold.nodes.items()
        if seen.now_ms - node.newest_attributed_ms < IN_PROMETHEUS_MS
    }
    late = {name: at for name, at in newest.items() if at - asked.newest_ms.get(name, 0) > BEHIND_MS}
    sinks = [
        group
        for group in seen.groups or ()
        if group.name.startswith("gpustream-sink-") and attributed.TOPIC.name in {tp.topic for tp in group.committed}
    ]
    slow = [one for one in sinks if any(is_behind(seen, lag.oldest_ms) for lag in one.lags)]
    said = f"has {len(newest) - len(late)} of {counted(len(newest), 'node')}"
    if late and len(slow) == len(sinks) > 0:  # it has what they have taken
        return Checked(f"{said}: {', '.join(one.name for one in slow)} has not taken more", found)
    return Checked(said, [*found, *_not_there(seen, asked, late, nothing=not asked.newest_ms.keys() & newest.keys())])


def _not_there(seen: Situation, asked: Prometheus, late: Mapping[NodeName, int], *, nothing: bool) -> Iterator[Finding]:
    """What Prometheus lacks, by node; ``nothing``: it has no node of ours at all, which has another cause."""
    for name, at in () if nothing else late.items():
        has = asked.newest_ms.get(name)
        there = seen.ago(has) if has else "nothing of 5 minutes"
        yield Finding(
            f"{name}: Prometheus does not have its newest samples",
            f"{NOT_KNOWN}: no sink has delivered them, or Prometheus refused them",
            f"attributed: {seen.ago(at)}; in Prometheus: {there}",
            "does the group of the sink lag? What does it say of dropped records (--metrics)?",
        )
    if not late or not nothing:
        return
    sinks = [group.name for group in seen.groups or () if group.name.startswith("gpustream-sink-")]
    if asked.receives is False and not any("scrape" in name for name in sinks):
        cause, then = "it takes no remote write", "start it with --web.enable-remote-write-receiver"
    elif not sinks:
        cause = "no sink has ever run here"
        then = "start `gpustream sink remote-write`, or let Prometheus scrape `gpustream sink scrape`"
    else:
        cause = "the sink writes to another Prometheus or tenant, or nothing scrapes it, or nothing is delivered"
        then = "compare --url of the sink with this address; does its group lag, what does it say (--metrics)?"
    yield Finding(
        f"{asked.url} has no sample of {counted(len(late), 'node')}",
        cause,
        f"it has {counted(len(asked.newest_ms), 'other node')}; the groups here: {', '.join(sinks) or 'none'}",
        then,
    )
