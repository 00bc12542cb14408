"""``gpustream alerts``: the alerts that fire, and, with ``--follow``, each that begins or ends from now on.

In:       gpu.alerts, read whole and in no group; with ``--policies`` gpu.workloads.
Out:      a table on a terminal, tab-separated fields elsewhere, or the records as JSON lines, on standard output.
On failure: a broker that does not answer or has no such topic is a sentence and exit code 1, and so is later a topic
that has got other partitions; an outage is waited out then. A record that can't be decoded is logged and passed over.
"""

import contextlib
import logging
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
from click.core import ParameterSource

from delivery.connection import Connection
from delivery.policies import ALERTS, IDLE_AFTER, Bounds, parse_policy
from delivery.settings import READABLE_FILE
from delivery.values import duration_words, printable
from gpustream import history
from gpustream.command import KAFKA, LOG_FORMAT, Command, option, output_format
from gpustream.output import answer, json_lines, json_text, second, show
from sinks.alerts import read_alert
from sinks.outcomes import Undecodable
from streams.alerts.rules import rules_file
from topics import workloads
from topics.alerts import TOPIC, Alert, transition_id
from topics.topic import decoder
from topics.workloads import MAINTENANCE, NodeWorkloads

log = logging.getLogger(__name__)

Form = Literal["table", "json"]
_decode_workloads = decoder(NodeWorkloads)

POLICY_COLUMNS = ("namespace", "pod", "node", "policy", "what counts")
COLUMNS = ("since", "for", "severity", "alert", "where", "who", "summary")

_RANKS: dict[str, int] = {"critical": 0, "warning": 1, "info": 2}
_STYLES = {"critical": "red", "warning": "yellow"}
_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


@click.command(
    cls=Command,
    example=(
        "gpustream alerts --kafka 127.0.0.1:9092\n"
        "gpustream alerts --kafka kafka-0:9092 --follow --format json | jq .annotations.summary"
    ),
)
@KAFKA
@option("--policies", is_flag=True, help="List in place of alerts which pods have a policy of their own about alerts.")
@option("--rules", type=READABLE_FILE, help="With --policies: the file of rules, for how long a policy may silence.")
@option("--follow", is_flag=True, help="Go on, with each alert that begins or ends, until interrupted.")
@output_format("table", "json", help="json: the records of gpu.alerts, one a line.")
@LOG_FORMAT
def alerts(connection: Connection, policies: bool, rules: Path | None, follow: bool, form: Form) -> None:
    """List the alerts that fire: since when, where, whose, and what is wrong."""
    source_of = click.get_current_context().get_parameter_source
    if rules is not None and not policies and source_of("rules") is not ParameterSource.ENVIRONMENT:
        raise click.UsageError("'--rules' is for '--policies' only.")
    if policies and follow:
        raise click.UsageError("'--follow' is for alerts: '--policies' lists those that hold now.")
    if policies:
        try:
            bounds = rules_file.load(rules).bounds
        except rules_file.RulesError as error:
            raise click.UsageError(str(error)) from error
        answer(_show_policies(connection, form, bounds))
        return
    with contextlib.suppress(KeyboardInterrupt):
        answer(_show(connection, form, follow=follow))


async def _show_policies(connection: Connection, form: Form, bounds: Bounds) -> None:
    """The policies of the pods that run, by the last record of the newest leader about each node in gpu.workloads."""
    nodes: dict[bytes, NodeWorkloads] = {}
    async with history.opened(connection, [workloads.TOPIC.name]) as reader:
        async for records in reader.records(await reader.spans(workloads.TOPIC.name)):
            for record, node in history.decoded(records, _decode_workloads, log):
                known = nodes.get(record.key)
                if known is None or node.order >= known.order:
                    nodes[record.key] = node
    rows = sorted(row for node in nodes.values() for row in policy_rows(node, bounds))
    if form == "json":
        json_lines(dict(zip(POLICY_COLUMNS, row, strict=True)) for row in rows)
    else:
        show(POLICY_COLUMNS, rows, nothing="no pod has a policy of its own")


def policy_rows(node: NodeWorkloads, bounds: Bounds) -> list[tuple[str, ...]]:
    """A row for a node's maintenance, and for each policy of its pods."""
    rows: list[tuple[str, ...]] = []
    if MAINTENANCE in node.node_labels and not node.removed:
        label = f"{MAINTENANCE}={node.node_labels[MAINTENANCE]}"
        rows.append(("", "", f"{node.cluster}/{node.node}", label, "no alerts about the node"))
    for pod in [pod for pod in node.pods if pod.ended_ms is None and not node.removed]:
        policy = parse_policy(pod.annotations, pod.namespace_labels, pod.namespace, bounds)
        effects = {error.name: error.text for error in policy.errors}
        if policy.off:
            limit = duration_words(bounds.longest(pod.namespace))
            effects[ALERTS] = f"no alerts about its doing, for {limit} after it got a GPU"
        if policy.idle_after_ms is not None and IDLE_AFTER not in effects:
            effects[IDLE_AFTER] = f"its GPUs may be idle for {duration_words(policy.idle_after_ms)}"
        values = {name: pod.annotations.get(name, pod.namespace_labels.get(name, "")) for name in effects}
        rows += [
            (pod.namespace, pod.name, f"{node.cluster}/{node.node}", f"{name}={values[name]}", effect)
            for name, effect in effects.items()
        ]
    return rows


async def _show(connection: Connection, form: Form, *, follow: bool) -> None:
    latest = LatestAlerts()
    async with history.opened(connection, [TOPIC.name]) as reader:
        spans = await reader.spans(TOPIC.name)
        async for records in reader.records(spans):
            for record in records:
                latest.update(record)
        firing = latest.firing()
        if form == "json":
            json_lines(firing)
        else:
            show(COLUMNS, [row(alert, datetime.now(UTC)) for alert in firing], style, nothing="no alert fires")
        if not follow:
            return
        async for records in reader.after(spans):
            for record in records:
                if (transition := latest.update(record)) is not None:
                    _print_transition(transition, form)


class LatestAlerts:
    """The last transition of each alert, by its key."""

    def __init__(self) -> None:
        self._last: dict[bytes, Alert] = {}

    def update(self, record: Any) -> Alert | None:
        """Adds a record of gpu.alerts. Returns its alert, or None if it is a repeat, a deletion or malformed."""
        key = record.key or b""
        try:
            alert = read_alert(record)
        except Undecodable as error:
            log.warning("%s", error, extra={"partition": record.partition, "offset": record.offset})
            return None
        if alert is None:
            self._last.pop(key, None)
            return None
        previous, self._last[key] = self._last.get(key), alert
        return None if previous is not None and transition_id(previous) == transition_id(alert) else alert

    def firing(self) -> list[Alert]:
        """The alerts that fire, the most severe first, then the oldest."""
        firing = [alert for alert in self._last.values() if alert.is_open]
        return sorted(
            firing, key=lambda alert: (_RANKS.get(alert.severity, len(_RANKS)), alert.starts_at, alert.fingerprint)
        )


def _print_transition(alert: Alert, form: Form) -> None:
    if form == "json":
        click.echo(json_text(alert))
        return
    at = alert.ends_at or alert.starts_at
    cells = row(alert, at)
    state = ("changes" if alert.revision else "fires") if alert.state == "firing" else printable(alert.state)
    lasting = "" if alert.is_open else f" after {cells.lasted}"
    fields = (f"{at.astimezone(UTC):%H:%M:%SZ}", f"{state}{lasting}", *cells[2:])
    click.echo("\t".join(fields) if not sys.stdout.isatty() else "  ".join(filter(None, fields)))


class AlertRow(NamedTuple):
    """An alert as a row of text: ``lasted`` is for how long, ``who`` the pod and its workload, or the batch job."""

    since: str
    lasted: str
    severity: str
    alert: str
    where: str
    who: str
    summary: str


def row(alert: Alert, now: datetime) -> AlertRow:
    """An alert as a row. ``lasted`` is until ``now``, or until the alert ended."""
    labels = alert.labels
    pods = {gpu.pod for gpu in alert.gpus}
    pod = "/".join(filter(None, (labels.get("k8s_namespace_name"), labels.get("k8s_pod_name"))))
    pod = pod or (f"job {labels['job_id']}" if "job_id" in labels else "")
    pod = (pods.pop() or pod) if len(pods) == 1 else pod
    workload = "/".join(filter(None, (labels.get("k8s_workload_kind"), labels.get("k8s_workload_name"))))
    gpu_suffix = f" GPU {labels['gpu_index']}" if "gpu_index" in labels else ""
    mig_suffix = f" {labels['gpu_mig_profile']}" if "gpu_mig_profile" in labels else ""
    nodes = sorted({gpu.node for gpu in alert.gpus})
    gpu_indices = ", ".join(map(str, sorted({gpu.index for gpu in alert.gpus if gpu.index is not None})))
    where = f"{alert.cluster}/{alert.node}{gpu_suffix}{mig_suffix}"
    if len(nodes) > 1:
        where = f"{alert.cluster}: {alert.gpu_count} GPUs of {len(nodes)} nodes"
    elif nodes and gpu_indices:
        where = f"{alert.cluster}/{nodes[0]} GPU {gpu_indices}"
    cells = AlertRow(
        since=second(alert.starts_at),
        lasted=lasted((alert.ends_at or now) - alert.starts_at),
        severity=alert.severity,
        alert=alert.name,
        where=where,
        who=f"{pod} ({workload})" if pod and workload else pod or workload,
        summary=" ".join(alert.annotations.get("summary", "").split()),
    )
    return AlertRow(*(printable(cell, "") for cell in cells))


def lasted(time: timedelta) -> str:
    """A duration in its two largest units, such as ``2h 5m``."""
    seconds, parts = max(0, int(time.total_seconds())), list[str]()
    for unit, size in _UNITS:
        count, seconds = divmod(seconds, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def style(row: AlertRow) -> str:
    return _STYLES.get(row.severity, "")
