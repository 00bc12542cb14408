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

from k8s.dashboards.queries import (
    DEVICE,
    GPU,
    IDLE_BELOW,
    ONE_HOUR,
    POD,
    UTILIZATION,
    WORKLOAD,
    alone_or_part,
    did_nothing,
    idle_pods,
    max_activity,
    on_devices,
    own_metrics,
)
from streams.alerts.xids import XIDS, XidKind
from topics.alerts import RUNBOOKS, Severity
from topics.mig import FEWER_SLICES, SLICES
from topics.reference import generate

K8S = Path(__file__).parent
Rule = dict[str, Any]

INTERVAL = "1m"
OTEL = 'k8s_cluster_name!=""'
"""Selects the series of ``otel``: other profiles may be written, too, with the same names and other labels."""

OWNER = "k8s_workload_kind, k8s_workload_name"
LEVELS = {
    "namespace": ("pod", "k8s_cluster_name, k8s_namespace_name"),
    "workload": ("pod", WORKLOAD),
    "node": ("device", "k8s_cluster_name, k8s_node_name"),
    "fleet": ("device", "k8s_cluster_name"),
}
"""For each level, the series that are summed, and the labels to sum by."""


def how_many(noun: str) -> str:
    """The template of how many there are: ``1 record``, ``2 records``. An increase is seldom a whole number."""
    return f'{{{{ printf "%.0f" $value }}}} {noun}{{{{ if ge $value 1.5 }}}}s{{{{ end }}}}'


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
        """The rule in the form of a Prometheus rule file."""
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
    """The recording rules: for devices and pods, then for :data:`LEVELS`. Of a shared GPU, a pod's share counts."""
    holders = f"gpu_holders{{{OTEL}}}"
    slices = f"* on ({DEVICE}) group_left () device:gpu_slices:ratio"
    owned_pod_labels = f"{DEVICE}, {POD}, {OWNER}"
    yield "device:gpu_slices:ratio", _slices()
    yield ("device:gpu_held:ratio", f"device:gpu_slices:ratio and on ({DEVICE}) (max by ({DEVICE}) ({holders}) > 0)")
    yield (
        "device:gpu_used:ratio",
        f'sum by ({DEVICE}) (gpu_utilization{{gpu_mig_uuid=""}} or gpu_gr_engine_active{{gpu_mig_uuid!=""}}) {slices}',
    )
    idle = f"{max_activity(OTEL, INTERVAL)} < {IDLE_BELOW}"
    yield "device:gpu_idle:ratio", f"device:gpu_held:ratio and on ({DEVICE}) ({idle})"
    yield (
        "pod:gpu_held:ratio",
        f"group by ({owned_pod_labels}) ({on_devices(OTEL)})\n"
        f"  / on ({DEVICE}) group_left () max by ({DEVICE}) ({holders} > 0)\n  {slices}",
    )
    used = f"max by ({owned_pod_labels}) ({alone_or_part(*UTILIZATION, OTEL)})"
    yield "pod:gpu_used:ratio", f"{used}\n  {slices}"
    yield "pod:gpu_idle:ratio", f"pod:gpu_held:ratio and on ({DEVICE}, {POD}) ({did_nothing(OTEL, OTEL, INTERVAL)})"
    for level, (source, by) in LEVELS.items():
        for category in ("held", "used", "idle"):
            yield f"{level}:gpu_{category}:sum", f"sum by ({by}) ({source}:gpu_{category}:ratio)"
            yield f"{level}:gpu_{category}_hours:sum1h", f"sum_over_time({level}:gpu_{category}:sum[{ONE_HOUR}]) / 60"
        if source == "device":
            yield f"{level}:gpu:count", f"count by ({by}) (group by ({GPU}) ({holders}))"


def _slices() -> str:
    """The part of a GPU that each device is: 1, or the ratio of a MIG device's compute slices to all of the GPU's."""
    whole_gpus, mig_devices = (f'gpu_holders{{{OTEL},gpu_mig_uuid{match}""}}' for match in ("=", "!="))
    whole = f"(group by ({DEVICE}) ({whole_gpus}) unless on ({GPU}) {mig_devices})"
    others = "|".join(FEWER_SLICES.values())
    models = {SLICES: f'gpu_model!~"{others}"', **{few: f'gpu_model=~"{names}"' for few, names in FEWER_SLICES.items()}}
    parts = [
        f'group by ({DEVICE}) (gpu_holders{{gpu_mig_profile=~"({count}c[.][0-9]g|{count}g)[.].*",{model}}})'
        f" * {count} / {slices}"
        for slices, model in models.items()
        for count in range(1, slices + 1)
    ]
    return "\n  or ".join([whole, *parts])


# -- alerts on GPUs

JOB = "cluster, namespace, job"
PROCESS = f"{JOB}, instance"
"""One process of gpustream: a Prometheus or Mimir may have several clusters and namespaces, with the same names."""

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


def xids_of(kind: XidKind) -> str:
    """The increase of the XIDs of a kind, with the first one, whoever held the GPU. Unknown are those of no kind."""
    codes = "|".join(str(code) for code, xid in XIDS.items() if kind in {xid.kind, "unknown"})
    counter = f'gpu_xid_errors_total{{{OTEL},xid{"!~" if kind == "unknown" else "=~"}"{codes}"}}'
    of_device = f"max by ({ONE_GPU}, gpu_mig_uuid, xid)"  # each MIG device counts by itself
    merged = f"{of_device} ({counter})"
    risen = f"(increase({merged}[15m:15s]) > 0)\n  or ({merged} unless {of_device} ({counter} offset 15m))"
    return f"max by ({ONE_GPU}, xid) (\n  {risen}\n)"


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
    Alert("GPUEccUncorrectable",
          f'increase(max by ({ONE_GPU}) (gpu_ecc_errors{{gpu_ecc_error_type="uncorrectable"}})[15m:15s]) > 0',
          "critical",
          SUBJECT + ": memory errors that can't be corrected",
          "{{ $labels.gpu_uuid }}: what ran on it may have failed. Drain and reset it."),
    Alert("GPURowRemapFailure", f"max by ({ONE_GPU}) (gpu_row_remap_failure) == 1", "critical",
          SUBJECT + ": a memory row could not be remapped",
          "{{ $labels.gpu_uuid }} has no spare rows left there: replace it."),
    Alert("GPURowRemapPending", f"max by ({ONE_GPU}) (gpu_row_remap_pending or gpu_retired_pages_pending) == 1",
          "warning",
          SUBJECT + ": a memory row waits to be remapped",
          "{{ $labels.gpu_uuid }} wants a reset, which ends what runs on it.", "1h"),
    Alert("GPUThermalSlowdown",
          f'max by ({ONE_GPU}) (gpu_throttle_reason{{gpu_throttle_cause=~"temp_hardware|temp_software"}}) == 1',
          "warning",
          SUBJECT + " is too hot and slows down", "{{ $labels.gpu_uuid }}: look at the cooling of the node.", "5m"),
    Alert("GPUNvlinkErrors", f"""
          increase(max by ({ONE_GPU}) (gpu_interconnect_crc_errors)[5m:15s]) > 100
          or increase(max by ({ONE_GPU}) (gpu_interconnect_replays)[5m:15s]) > 100
          or increase(max by ({ONE_GPU}) (gpu_interconnect_recoveries)[5m:15s]) > 0
          """, "warning",
          SUBJECT + ": its NVLinks have errors", "{{ $value | humanize }} in 5 minutes on {{ $labels.gpu_uuid }}."),
    Alert("GPUHeldIdle", f"count by (k8s_cluster_name, {POD}) {idle_pods(OTEL, OTEL, '1h')}", "info",
          "{{ $labels.k8s_namespace_name }}/{{ $labels.k8s_pod_name }} does nothing with {{ $value }} of its GPUs",
          "It did less than 1 % on each for an hour, alone on it or with its part.", "5m"),
    Alert("GPUUsedUnallocated",
          f"(max by ({ONE_GPU}) (gpu_utilization) > 0.05) and on ({GPU}) (max by ({GPU}) (gpu_holders{{{OTEL}}}) == 0)",
          "warning",
          SUBJECT + " works, and nobody was given it",
          "{{ $labels.gpu_uuid }} has a utilization of {{ $value | humanizePercentage }}.", "2m"),
    Alert("GPUAttributionConflict", f"max by ({ONE_GPU}, reason) (gpu_attribution_conflict{{{OTEL}}}) == 1", "warning",
          SUBJECT + ": what runs there is not what it was given to", "{{ $labels.gpu_uuid }}: {{ $labels.reason }}.",
          "2m"),
    Alert("GPULost", f'sum by ({PROCESS}, state) (gpustream_node_gpus{{state="lost"}}) > 0', "critical",
          "{{ $value }} GPUs and MIG devices of {{ $labels.instance }} left the bus (XID 79): reset or replace the GPU",
          "The node producer says so.", "1m"),
    Alert("GPUNotAnswering", f'sum by ({PROCESS}, state) (gpustream_node_gpus{{state="timeout"}}) > 0', "warning",
          "{{ $value }} GPUs and MIG devices of {{ $labels.instance }} do not answer NVML",
          "The node producer says so.", "1m"),
    Alert("NodeSilent", f"""
          group by (k8s_cluster_name, k8s_node_name) (
            gpu_holders{{{OTEL}}} offset 10m and count_over_time(gpu_holders{{{OTEL}}}[15m] offset 10m) > 2
          ) unless group by (k8s_cluster_name, k8s_node_name) (gpu_holders{{{OTEL}}})
          """, "critical",
          "{{ $labels.k8s_node_name }} sends nothing",
          "Prometheus had GPUs of it ten minutes ago. The node, its producer or the way to Kafka is down. If all nodes"
          " of a cluster are silent, attribution or the sink may be behind or down: see its alerts first.", "2m"),
)  # fmt: skip


# -- alerts on gpustream itself

ITS = "{{ $labels.instance }}"
KEPT = "Nothing is lost while Kafka keeps them (24 h)."
PER_SECOND = '{{ if ge $value 1.0 }}{{ $value | humanize }}{{ else }}{{ printf "%.2g" $value }}{{ end }}'
"""The template of a rate: to humanize, 0.02 is 20m, which reads like millions."""


def _increases(counter: str, by: str = PROCESS) -> str:
    """The increase of a counter in 5 minutes. A counter with labels has no series before it first counts."""
    return f"sum by ({by}) ((increase({counter}[5m]) > 0) or ({counter} > 0 unless {counter} offset 5m))"


def _behind(name: str, lag: str, ticks: str, subject: str, description: str) -> Alert:
    """An alert that more records wait than are processed in a minute. A process that has begun none counts none.

    One that has too little CPU is put out of its group again and again: it has no partitions then, and a lag of 0."""
    waiting = f"sum by ({PROCESS}) (max_over_time({lag}[2m]))"
    expr = f"{waiting}\n  > 60 * (sum by ({PROCESS}) (rate({ticks}[5m])) or 0 * {waiting})"
    return Alert(name, expr, "warning", f"{ITS} {subject}", description, "5m")


PIPELINE_ALERTS = (
    Alert("GpustreamDown", 'up{job=~"gpustream.*"} == 0', "critical",
          f"{ITS} does not answer a scrape",
          "Prometheus reaches nobody there. What a stream or sink is to read waits in Kafka. A node producer that does"
          " not run reads no GPU.", "1m"),
    Alert("GpustreamNotReady", "gpustream_ready == 0", "warning",
          f"{ITS} runs and can't do its work", "Its /readyz says why.", "5m"),
    Alert("GpustreamTicksDropped", _increases("gpustream_producer_ticks_dropped_total", f"{PROCESS}, reason"),
          "critical",
          f"{ITS} dropped ticks: {{{{ $labels.reason }}}}",
          how_many("tick") + " in 5 minutes never reached Kafka: lost. For buffer_full and buffer_age"
          " see whether Kafka is there, or give --buffer more."),
    Alert("GpustreamRecordsExpired",
          "\nor ".join(map(_increases, [*own_metrics("lost_offsets_total"), *own_metrics("records_expired_total")])),
          "critical",
          f"{ITS}: Kafka deleted records before they were read",
          how_many("record") + " in 5 minutes: lost to it. It was behind by more than the topic keeps."),
    _behind("GpustreamAttributionBehind", 'gpustream_attribution_lag_records{topic="gpu.samples"}',
            "gpustream_attribution_ticks_total",
            "is more than a minute behind", "{{ $value | humanize }} ticks wait in gpu.samples. " + KEPT),
    _behind("GpustreamAlertsBehind", 'gpustream_alerts_lag_records{topic="gpu.attributed"}',
            "gpustream_alerts_ticks_total",
            "judges GPUs more than a minute late",
            "{{ $value | humanize }} ticks wait in gpu.attributed. Alerts are late, none is lost."),
    _behind("GpustreamUsageBehind", 'gpustream_usage_lag_records{topic="gpu.attributed"}',
            "gpustream_usage_ticks_total",
            "counts usage more than a minute late",
            "{{ $value | humanize }} ticks wait in gpu.attributed. Hours become final later, none is lost."),
    _behind("GpustreamRemoteWriteBehind", "gpustream_remote_write_lag_records",
            "gpustream_remote_write_records_delivered_total",
            "is more than a minute behind", "{{ $value | humanize }} ticks wait in gpu.attributed. " + KEPT),
    Alert("GpustreamReceiverFailing",
          "\nor ".join(f"{metric} == 1" for metric in [*own_metrics("receiver_failing"), *own_metrics("failing")]),
          "warning",
          f"{ITS} can't deliver: its receiver, or its disk, takes nothing or does not answer",
          "It is tried again for as long as it takes, and nothing is lost while Kafka keeps the records (24 h). The"
          " sink's /readyz and its log say why; see the receiver's address, credentials and limits, or the Parquet"
          " sink's disk.",
          "5m"),
    Alert("GpustreamSeriesLeftOut", "gpustream_remote_write_series_left_out > 0", "warning",
          f"The receiver of {ITS} refuses {{{{ $value | humanize }}}} series",
          "They are not sent, and tried again every ten minutes. gpu.dead-letters has the receiver's own words, and"
          " gpustream_remote_write_values_left_out_total the reasons. With series_limit, the tenant has more series"
          " than the receiver lets it have.", "15m"),
    Alert("GpustreamCountersBroken", f"max by ({PROCESS}, sink) (gpustream_counters_broken) == 1", "warning",
          f"The file of --counters of {ITS} can't be used",
          "What it held before stays in force. The log names the lines, and so does gpustream counters check FILE.",
          "2m"),
    Alert("GpustreamSeriesCollide",
          "\nor ".join(_increases(f'{metric}{{reason!="rule"}}') for metric in own_metrics("samples_withheld_total")),
          "warning",
          f"{ITS} leaves out {how_many('sample')} because of labels",
          "After the rules of --relabel another series has the same labels, or the name is not valid. Give each series"
          " a label that tells it apart.", "10m"),
    Alert("GpustreamMisplacedNodes", "\nor ".join(map(_increases, own_metrics("misplaced_nodes_total"))), "warning",
          f"{ITS} reads {how_many('node')} from a wrong partition",
          "Something else than gpustream writes to the topic, with another partitioner. The ticks of these nodes may be"
          " attributed without their snapshots."),
    Alert("GpustreamTicksMissed", f"""
          sum by ({PROCESS}) (rate(gpustream_node_ticks_missed_total[10m]))
            > 0.01 * sum by ({PROCESS}) (rate(gpustream_producer_ticks_made_total[10m]))
          """, "warning",
          f"{ITS} reads its GPUs late",
          f"{PER_SECOND} readings a second never took place: the node has no CPU for it, or NVML is slow.",
          "10m"),
    Alert("GpustreamDeadLetters", "\nor ".join(map(_increases, own_metrics("records_dead_lettered_total"))), "warning",
          f"{ITS} could not use {how_many('record')}",
          "They are in the topic gpu.dead-letters for 7 days, each with the reason in its headers."),
    Alert("GpustreamLateAttribution", f"""
          sum by ({JOB}) (rate(gpustream_attribution_ticks_total{{attribution="late"}}[10m]))
            > 0.01 * sum by ({JOB}) (rate(gpustream_attribution_ticks_total[10m]))
          """, "warning",
          f"{PER_SECOND} ticks a second are attributed by an old snapshot",
          "The snapshots that they name did not come. They are marked late; see the nodes' producers.", "10m"),
    Alert("GpustreamKubeletSilent", "gpustream_node_kubelet_age_seconds > 300", "warning",
          f"The kubelet of {ITS} has not answered for {{{{ $value | humanizeDuration }}}}",
          "GPUs are booked to the pods that it last named. Its /readyz says what fails.", "1m"),
    Alert("GpustreamNoLeader", f"max by ({JOB}) (gpustream_cluster_leading) == 0", "warning",
          "No cluster producer leads",
          "New pods have no workload, labels or owners until one does. Those that were known are kept.", "2m"),
)  # fmt: skip


# -- files


class _Dumper(yaml.SafeDumper):
    """Writes expressions of several lines as block scalars."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _dump(content: Any) -> str:
    head = "# Written by `python -m k8s.rules`: change k8s/rules.py, not this file.\n"
    return head + yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _custom_resource(name: str, groups: list[Rule]) -> str:
    metadata = {"name": name, "namespace": "gpustream", "labels": {"app.kubernetes.io/name": "gpustream"}}
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": metadata}
    return _dump({**head, "spec": {"groups": groups}})


def files() -> dict[Path, str]:
    """The content of each file, by its path."""
    use: Rule = {
        "name": "gpustream-use",
        "interval": INTERVAL,
        "rules": [{"record": name, "expr": expr} for name, expr in recording()],
    }
    pipeline: Rule = {"name": "gpustream", "rules": [alert.rule() for alert in PIPELINE_ALERTS]}
    gpus: Rule = {"name": "gpustream-gpus", "rules": [alert.rule() for alert in GPU_ALERTS]}
    groups_by_file = {"recording": [use], "pipeline": [pipeline], "gpus": [gpus]}
    return {
        **{K8S / "prometheus" / f"{name}.yml": _dump({"groups": groups}) for name, groups in groups_by_file.items()},
        K8S / "components" / "rules" / "prometheusrule.yaml": _custom_resource("gpustream", [use, pipeline]),
        K8S / "components" / "gpu-rules" / "prometheusrule.yaml": _custom_resource("gpustream-gpus", [gpus]),
    }


if __name__ == "__main__":
    sys.exit(generate(files(), "k8s.rules", sys.argv[1:]))
