"""The check of the components' own metrics: what they dropped, why they are not ready, what they delivered. Pure."""

import re

from delivery.values import counted, duration_words
from gpustream.doctor.readers import NOT_KNOWN, silent_consumer
from gpustream.doctor.situation import CheckResult, Finding, Findings, OwnMetrics, Situation

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
