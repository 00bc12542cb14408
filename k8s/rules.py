"""The rules for Prometheus, as files: ``python -m k8s.rules [--check]``.

``recording.yml`` has who holds and uses GPUs, and GPU-hours; ``pipeline.yml`` the alerts on gpustream itself;
``gpus.yml`` alerts on GPUs, for where `gpustream stream alerts` does not run. For the Prometheus operator the first two
are in k8s/components/rules, the third in k8s/components/gpu-rules. Names are those of ``--names otel``.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from gpustream import reference
from k8s.dashboards.queries import ACTIVITY, DEVICE, GPU, IDLE_BELOW, POD, WORKLOAD
from sinks import SINKS
from streams import STREAMS
from streams.alerts.xids import XIDS, XidKind
from topics.alerts import RUNBOOKS, Severity
from topics.reference import generate

K8S = Path(__file__).parent
Rule = dict[str, Any]

INTERVAL = "1m"
OTEL = 'k8s_cluster_name!=""'
"""What has the labels of ``otel``: other profiles, written beside it, have the same names with labels of theirs."""

OWNER = "k8s_workload_kind, k8s_workload_name"
LEVELS = {
    "namespace": ("pod", "k8s_cluster_name, k8s_namespace_name"),
    "workload": ("pod", WORKLOAD),
    "node": ("device", "k8s_cluster_name, k8s_node_name"),
    "fleet": ("device", "k8s_cluster_name"),
}
"""What is summed for each, and by which labels."""

FOUR_SLICES = ".*A30.*"
"""The models that have four compute slices; all others that can be cut have seven."""


class Alert(NamedTuple):
    """An alerting rule; ``subject`` and ``description`` are its annotations."""

    name: str
    expr: str
    severity: Severity
    subject: str
    description: str
    holds_for: str = ""
    labels: Mapping[str, str] = MappingProxyType({})

    def rule(self) -> Rule:
        """As Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": dedent(self.expr).strip(),
            **({"for": self.holds_for} if self.holds_for else {}),
            "labels": {"severity": self.severity, **self.labels},
            "annotations": {
                "summary": self.subject,
                "description": self.description,
                "runbook": f"{RUNBOOKS}/{self.name}.md",
            },
        }


# -- who holds and uses GPUs


def recording() -> Iterator[tuple[str, str]]:
    """Of each device and pod, then of namespaces, workloads, nodes and the fleet; of a shared GPU the share counts."""
    alone, of_otel = 'k8s_pod_name!=""', f"{{{OTEL}}}"
    holders, part = f"gpu_holders{of_otel}", f"gpu_pod_utilization_ratio{of_otel}"
    work = " or ".join(f"max_over_time({one}[{INTERVAL}])" for one in ACTIVITY)
    work_alone = " or ".join(f"max_over_time({one}{{{alone}}}[{INTERVAL}])" for one in ACTIVITY)
    of_pod = f"{DEVICE}, {POD}"
    slices = f"* on ({DEVICE}) group_left () device:gpu_slices:ratio"
    per_pod = f"{of_pod}, {OWNER}"
    yield "device:gpu_slices:ratio", _slices()
    yield ("device:gpu_held:ratio", f"device:gpu_slices:ratio and on ({DEVICE}) (max by ({DEVICE}) ({holders}) > 0)")
    yield (
        "device:gpu_used:ratio",
        f'max by ({DEVICE}) (gpu_utilization or gpu_gr_engine_active{{gpu_mig_uuid!=""}}) {slices}',
    )
    nothing = f"max by ({DEVICE}) ({work}) < {IDLE_BELOW}"
    yield "device:gpu_idle:ratio", f"device:gpu_held:ratio and on ({DEVICE}) ({nothing})"
    yield (
        "pod:gpu_held:ratio",
        f"group by ({per_pod}) (gpu_holders{{{alone}}} or gpu_pod_memory_used_bytes{of_otel})\n"
        f"  / on ({DEVICE}) group_left () max by ({DEVICE}) ({holders} > 0)\n  {slices}",
    )
    yield (
        "pod:gpu_used:ratio",
        f"max by ({per_pod}) (\n  {part} or on ({DEVICE})"
        f' (gpu_utilization{{{alone}}} or gpu_gr_engine_active{{{alone},gpu_mig_uuid!=""}}))\n  {slices}',
    )
    yield (
        "pod:gpu_idle:ratio",
        f"pod:gpu_held:ratio and on ({of_pod}) (\n"
        f"  max by ({of_pod}) ({work_alone}) < {IDLE_BELOW}\n"
        f"  or max by ({of_pod}) (max_over_time({part}[{INTERVAL}])) < {IDLE_BELOW})",
    )
    for level, (of, by) in LEVELS.items():
        for what in ("held", "used", "idle"):
            yield f"{level}:gpu_{what}:sum", f"sum by ({by}) ({of}:gpu_{what}:ratio)"
            yield f"{level}:gpu_{what}_hours:sum1h", f"sum_over_time({level}:gpu_{what}:sum[1h]) / 60"
        if of == "device":
            yield f"{level}:gpu:count", f"count by ({by}) (group by ({GPU}) ({holders}))"


def _slices() -> str:
    """What each device is of a GPU: 1, or a MIG device's compute slices of all that there are."""
    of_gpus, of_parts = (f'gpu_holders{{{OTEL},gpu_mig_uuid{of}""}}' for of in ("=", "!="))
    whole = f"(group by ({DEVICE}) ({of_gpus}) unless on ({GPU}) {of_parts})"
    cut = [(own, slices, of) for of, slices in (("!~", 7), ("=~", 4)) for own in range(1, slices + 1)]
    parts = [
        f'group by ({DEVICE}) (gpu_holders{{gpu_mig_profile=~"({own}c[.][0-9]g|{own}g)[.].*",'
        f'gpu_model{of}"{FOUR_SLICES}"}}) * {own} / {slices}'
        for own, slices, of in cut
    ]
    return "\n  or ".join([whole, *parts])


# -- alerts on GPUs

ONE_GPU = "k8s_cluster_name, k8s_node_name, gpu_index, gpu_uuid"
XID_SEVERITIES: dict[XidKind, Severity] = {
    "hardware": "critical",
    "driver": "warning",
    "application": "info",
    "recovered": "info",
    "unknown": "warning",
}
"""As the alert stream has them."""

SUBJECT = "GPU {{ $labels.gpu_index }} of {{ $labels.k8s_node_name }}"
ALONE, PART = 'gpu_holders{k8s_pod_name!=""}', f"gpu_pod_utilization_ratio{{{OTEL}}}"
DID = " or ".join(
    [
        *(f'max_over_time({one}{{k8s_pod_name!=""}}[1h])' for one in ACTIVITY),
        f'label_replace(max_over_time({PART}[1h]), "of", "part", "", "")',
    ]
)
"""What a pod did at the most in an hour, alone on a device or as its part."""


def xids_of(kind: XidKind) -> str:
    """By how much the XIDs of a kind rose, their first time too, whoever held the GPU; unknown are those of no kind."""
    known = "|".join(str(code) for code, xid in XIDS.items() if kind in {xid.kind, "unknown"})
    counter = f'gpu_xid_errors_total{{{OTEL},xid{"!~" if kind == "unknown" else "=~"}"{known}"}}'
    merged = f"max by ({ONE_GPU}, xid) ({counter})"
    return f"(increase({merged}[15m:15s]) > 0)\n  or ({merged} unless max by ({ONE_GPU}, xid) ({counter} offset 15m))"


# Called as the alert stream calls them, so that they have its runbooks.
GPU_ALERTS = (
    *(
        Alert(
            "GPUXid",
            xids_of(kind),
            severity,
            SUBJECT + ": XID {{ $labels.xid }}",
            "The driver reported it within 15 minutes. docs/reference/alerts.md says what the code means and what to"
            " do.",
            labels={"xid_kind": kind},
        )
        for kind, severity in XID_SEVERITIES.items()
    ),
    Alert(
        "GPUEccUncorrectable",
        f'increase(max by ({ONE_GPU}) (gpu_ecc_errors{{gpu_ecc_error_type="uncorrectable"}})[15m:15s]) > 0',
        "critical",
        SUBJECT + ": memory errors that can't be corrected",
        "{{ $labels.gpu_uuid }}: what ran on it may have failed. Drain and reset it.",
    ),
    Alert(
        "GPURowRemapFailure",
        f"max by ({ONE_GPU}) (gpu_row_remap_failure) == 1",
        "critical",
        SUBJECT + ": a memory row could not be remapped",
        "{{ $labels.gpu_uuid }} has no spare rows left there: replace it.",
    ),
    Alert(
        "GPURowRemapPending",
        f"max by ({ONE_GPU}) (gpu_row_remap_pending or gpu_retired_pages_pending) == 1",
        "warning",
        SUBJECT + ": a memory row waits to be remapped",
        "{{ $labels.gpu_uuid }} wants a reset, which ends what runs on it.",
        "1h",
    ),
    Alert(
        "GPUThermalSlowdown",
        f'max by ({ONE_GPU}) (gpu_throttle_reason{{gpu_throttle_cause=~"temp_hardware|temp_software"}}) == 1',
        "warning",
        SUBJECT + " is too hot and slows down",
        "{{ $labels.gpu_uuid }}: look at the cooling of the node.",
        "5m",
    ),
    Alert(
        "GPUNvlinkErrors",
        f"""
        increase(max by ({ONE_GPU}) (gpu_interconnect_crc_errors)[5m:15s]) > 100
        or increase(max by ({ONE_GPU}) (gpu_interconnect_replays)[5m:15s]) > 100
        or increase(max by ({ONE_GPU}) (gpu_interconnect_recoveries)[5m:15s]) > 0
        """,
        "warning",
        SUBJECT + ": its NVLinks have errors",
        "{{ $value | humanize }} in 5 minutes on {{ $labels.gpu_uuid }}.",
    ),
    Alert(
        "GPUHeldIdle",
        f"""
        count by (k8s_cluster_name, {POD}) (
          (max by ({DEVICE}, {POD}) ({DID}) < {IDLE_BELOW})
          and group by ({DEVICE}, {POD}) ({ALONE} or {PART})
          and group by ({DEVICE}, {POD}) ({ALONE} offset 1h or {PART} offset 1h)
        )
        """,
        "info",
        "{{ $labels.k8s_namespace_name }}/{{ $labels.k8s_pod_name }} holds {{ $value }} GPUs and uses none of them",
        "It did less than 1 % on each for an hour, alone on it or with its part.",
        "5m",
    ),
    Alert(
        "GPUUsedUnallocated",
        f"(max by ({ONE_GPU}) (gpu_utilization) > 0.05) and on ({GPU}) (max by ({GPU}) (gpu_holders{{{OTEL}}}) == 0)",
        "warning",
        SUBJECT + " works, and no pod was given it",
        "{{ $labels.gpu_uuid }} has a utilization of {{ $value | humanizePercentage }}.",
        "2m",
    ),
    Alert(
        "GPUAttributionConflict",
        f"max by ({ONE_GPU}, reason) (gpu_attribution_conflict{{{OTEL}}}) == 1",
        "warning",
        SUBJECT + ": what runs there is not what it was given to",
        "{{ $labels.gpu_uuid }}: {{ $labels.reason }}.",
        "2m",
    ),
    Alert(
        "GPULost",
        'sum by (job, instance, state) (gpustream_node_gpus{state="lost"}) > 0',
        "critical",
        "{{ $value }} GPUs of {{ $labels.instance }} left the bus (XID 79) and want a reset or a new board",
        "The node producer says so.",
        "1m",
    ),
    Alert(
        "GPUNotAnswering",
        'sum by (job, instance, state) (gpustream_node_gpus{state="timeout"}) > 0',
        "warning",
        "{{ $value }} GPUs of {{ $labels.instance }} do not answer NVML",
        "The node producer says so.",
        "1m",
    ),
    Alert(
        "NodeSilent",
        f"""
        group by (k8s_cluster_name, k8s_node_name) (gpu_holders{{{OTEL}}} offset 10m)
          unless group by (k8s_cluster_name, k8s_node_name) (gpu_holders{{{OTEL}}})
        """,
        "critical",
        "{{ $labels.k8s_node_name }} sends nothing",
        "Prometheus had GPUs of it ten minutes ago. The node, its producer or the way to Kafka is down.",
        "2m",
    ),
)


# -- alerts on gpustream itself

ITS = "{{ $labels.instance }}"
KEPT = "Nothing is lost while Kafka keeps them (24 h)."


def _counted(counter: str, by: str = "job, instance") -> str:
    """By how much a counter rose in 5 minutes; one with labels begins when it first counts."""
    return f"sum by ({by}) ((increase({counter}[5m]) > 0) or ({counter} > 0 unless {counter} offset 5m))"


def _own(metric: str) -> list[str]:
    """That metric of each stream and sink that has one."""
    there = {row.name for section in reference.sections() for row in section.rows}
    names = (f"gpustream_{name.replace('-', '_')}_{metric}" for name in (*STREAMS, *SINKS))
    return [name for name in names if name in there]


def _behind(name: str, lag: str, ticks: str, what: str, description: str) -> Alert:
    """More records wait than a minute's work."""
    expr = f"sum by (job, instance) ({lag})\n  > 60 * sum by (job, instance) (rate({ticks}[5m]))"
    return Alert(name, expr, "warning", f"{ITS} {what}", description, "5m")


PIPELINE_ALERTS = (
    Alert(
        "GpustreamDown",
        'up{job=~"gpustream.*"} == 0',
        "critical",
        f"{ITS} does not answer a scrape",
        "Prometheus reaches nobody there. Ticks wait in Kafka, or in the node's buffer, until it is back.",
        "1m",
    ),
    Alert(
        "GpustreamNotReady",
        "gpustream_ready == 0",
        "warning",
        f"{ITS} runs and can't do its work",
        "Its /readyz says why.",
        "5m",
    ),
    Alert(
        "GpustreamTicksDropped",
        _counted("gpustream_producer_ticks_dropped_total", "job, instance, reason"),
        "critical",
        f"{ITS} dropped ticks: {{{{ $labels.reason }}}}",
        "{{ $value | humanize }} ticks in 5 minutes never reached Kafka and are lost. For buffer_full and buffer_age"
        " see whether Kafka is there, or give --buffer more.",
    ),
    Alert(
        "GpustreamRecordsExpired",
        "\nor ".join(map(_counted, [*_own("lost_offsets_total"), *_own("records_expired_total")])),
        "critical",
        f"{ITS}: Kafka deleted records before they were read",
        "{{ $value | humanize }} records in 5 minutes are lost to it. It was behind by more than the topic keeps.",
    ),
    _behind(
        "GpustreamAttributionBehind",
        'gpustream_attribution_lag_records{topic="gpu.samples"}',
        "gpustream_attribution_ticks_total",
        "is more than a minute behind",
        "{{ $value | humanize }} ticks wait in gpu.samples. " + KEPT,
    ),
    _behind(
        "GpustreamAlertsBehind",
        'gpustream_alerts_lag_records{topic="gpu.attributed"}',
        "gpustream_alerts_ticks_total",
        "judges GPUs more than a minute late",
        "{{ $value | humanize }} ticks wait in gpu.attributed. Alerts are late, none is lost.",
    ),
    _behind(
        "GpustreamUsageBehind",
        'gpustream_usage_lag_records{topic="gpu.attributed"}',
        "gpustream_usage_ticks_total",
        "counts usage more than a minute late",
        "{{ $value | humanize }} ticks wait in gpu.attributed. Hours become final later, none is lost.",
    ),
    _behind(
        "GpustreamRemoteWriteBehind",
        "gpustream_remote_write_lag_records",
        "gpustream_remote_write_records_delivered_total",
        "is more than a minute behind",
        "{{ $value | humanize }} ticks wait in gpu.attributed. " + KEPT,
    ),
    Alert(
        "GpustreamReceiverFailing",
        "\nor ".join(f"{one} == 1" for one in [*_own("receiver_failing"), *_own("failing")]),
        "warning",
        f"The receiver of {ITS} refuses everything or does not answer",
        "It is tried again for as long as it takes, and nothing is lost while Kafka keeps the records (24 h). The"
        " sink's /readyz and its log have the receiver's own words; see the address, the credentials and the limits.",
        "5m",
    ),
    Alert(
        "GpustreamSeriesLeftOut",
        "gpustream_remote_write_series_left_out > 0",
        "warning",
        f"The receiver of {ITS} refuses {{{{ $value | humanize }}}} series",
        "They are not sent, and tried again every ten minutes. gpu.dead-letters has the receiver's own words, and"
        " gpustream_remote_write_values_left_out_total the reasons. With series_limit, the tenant has more series than"
        " the receiver lets it have.",
        "15m",
    ),
    Alert(
        "GpustreamCountersBroken",
        "max by (job, instance, sink) (gpustream_counters_broken) == 1",
        "warning",
        f"The file of --counters of {ITS} can't be used",
        "What it held before stays in force. The log names the lines, and so does gpustream counters check FILE.",
        "2m",
    ),
    Alert(
        "GpustreamSeriesCollide",
        "\nor ".join(_counted(f'{one}{{reason!="rule"}}') for one in _own("samples_withheld_total")),
        "warning",
        ITS + " leaves out {{ $value | humanize }} samples for their labels",
        "After the rules of --relabel another series has the same labels, or the name is not valid. Give each series a"
        " label that tells it apart.",
        "10m",
    ),
    Alert(
        "GpustreamMisplacedNodes",
        "\nor ".join(map(_counted, _own("misplaced_nodes_total"))),
        "warning",
        ITS + " reads {{ $value | humanize }} nodes from a partition that is not theirs",
        "Something else than gpustream writes to the topic, with another partitioner. The ticks of these nodes may be"
        " attributed without their snapshots.",
    ),
    Alert(
        "GpustreamTicksMissed",
        """
        sum by (job, instance) (rate(gpustream_node_ticks_missed_total[10m]))
          > 0.01 * sum by (job, instance) (rate(gpustream_producer_ticks_made_total[10m]))
        """,
        "warning",
        f"{ITS} reads its GPUs late",
        "{{ $value | humanize }} readings a second never took place: the node has no CPU for it, or NVML is slow.",
        "10m",
    ),
    Alert(
        "GpustreamDeadLetters",
        "\nor ".join(map(_counted, _own("records_dead_lettered_total"))),
        "warning",
        ITS + " could not use {{ $value | humanize }} records",
        "They are in the topic gpu.dead-letters for 7 days, each with the reason in its headers.",
    ),
    Alert(
        "GpustreamLateAttribution",
        """
        sum by (job) (rate(gpustream_attribution_ticks_total{attribution="late"}[10m]))
          > 0.01 * sum by (job) (rate(gpustream_attribution_ticks_total[10m]))
        """,
        "warning",
        "{{ $value | humanize }} ticks/s are attributed by an old snapshot",
        "The snapshots that they name did not come. They are marked late; see the nodes' producers.",
        "10m",
    ),
    Alert(
        "GpustreamKubeletSilent",
        "gpustream_node_kubelet_age_seconds > 300",
        "warning",
        f"The kubelet of {ITS} has not answered for {{{{ $value | humanizeDuration }}}}",
        "GPUs are booked to the pods that it last named; gpustream_node_kubelet_calls_total says what fails.",
        "1m",
    ),
    Alert(
        "GpustreamNoLeader",
        "max by (job) (gpustream_cluster_leading) == 0",
        "warning",
        "No cluster producer leads",
        "New pods have no workload, labels or owners until one does. Those that were known are kept.",
        "2m",
    ),
)


# -- files


class _Dumper(yaml.SafeDumper):
    """Expressions of several lines as they are."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _dumped(content: Any) -> str:
    head = "# Written by `python -m k8s.rules`: change k8s/rules.py, not this file.\n"
    return head + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _custom_resource(name: str, groups: list[Rule]) -> str:
    metadata = {"name": name, "namespace": "gpustream", "labels": {"app.kubernetes.io/name": "gpustream"}}
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": metadata}
    return _dumped({**head, "spec": {"groups": groups}})


def files() -> dict[Path, str]:
    """Every file and what is in it."""
    use: Rule = {
        "name": "gpustream-use",
        "interval": INTERVAL,
        "rules": [{"record": name, "expr": expr} for name, expr in recording()],
    }
    own: Rule = {"name": "gpustream", "rules": [one.rule() for one in PIPELINE_ALERTS]}
    gpus: Rule = {"name": "gpustream-gpus", "rules": [one.rule() for one in GPU_ALERTS]}
    named = {"recording": [use], "pipeline": [own], "gpus": [gpus]}
    return {
        **{K8S / "prometheus" / f"{name}.yml": _dumped({"groups": groups}) for name, groups in named.items()},
        K8S / "components" / "rules" / "prometheusrule.yaml": _custom_resource("gpustream", [use, own]),
        K8S / "components" / "gpu-rules" / "prometheusrule.yaml": _custom_resource("gpustream-gpus", [gpus]),
    }


if __name__ == "__main__":
    sys.exit(generate(files(), "k8s.rules", sys.argv[1:]))
