"""The dashboards of what goes wrong: XID errors and the GPUs' health, and the pipeline itself."""

from collections.abc import Callable

from k8s.dashboards.gpus import CLUSTER, NODE
from k8s.dashboards.panel import (
    BAD_ABOVE_ZERO,
    HOT,
    LOOK_ABOVE_ZERO,
    Column,
    choice,
    dashboard,
    graph,
    row,
    table,
    tile,
)
from k8s.dashboards.queries import (
    GPU,
    NODE_MATCHERS,
    POD,
    PROMETHEUS_ALERTS,
    counted,
    events,
    firing_alerts,
    number_of,
    or_zero,
    own_metrics,
)
from streams import STREAMS

# -- XID errors, errors of memory and links, heat, and what fires

DEVICE_OF_GPU = f"{GPU}, gpu_index"
XIDS = f"gpu_xid_errors_total{{{NODE_MATCHERS}}}"
UNCORRECTABLE = f'gpu_ecc_errors{{{NODE_MATCHERS},gpu_ecc_error_type="uncorrectable"}}'


def count_of(metric: str) -> str:
    return number_of(f"max by ({GPU}) ({metric}) > 0")


def increase(metric: str) -> str:
    return f"sum(increase({metric}[$__rate_interval]))"


FINDINGS = {
    "row remap failed": f"gpu_row_remap_failure{{{NODE_MATCHERS}}}",
    "row remap pending": f"gpu_row_remap_pending{{{NODE_MATCHERS}}}",
    "pages to retire": f"gpu_retired_pages_pending{{{NODE_MATCHERS}}}",
    "uncorrectable memory errors": UNCORRECTABLE,
    "slowed down by heat": f'gpu_throttle_reason{{{NODE_MATCHERS},gpu_throttle_cause=~"temp_.*"}}',
    "not as the kubelet says": f"gpu_attribution_conflict{{{NODE_MATCHERS}}}",
}
TO_LOOK_AT = " or ".join(
    f'label_replace(max by ({DEVICE_OF_GPU}) ({metric}) > 0, "finding", "{finding}", "", "")'
    for finding, metric in FINDINGS.items()
)
HEALTH_BOARD = dashboard(
    "gpu-health",
    "XIDs and health of GPUs",
    "Errors that the driver reported, memory, links and heat, and what fires.",
    [CLUSTER, NODE],
    [
        tile("Alerts", "What fires, by the alert stream or by Prometheus.", firing_alerts(), steps=BAD_ABOVE_ZERO),
        tile("XID errors", "In the time shown.", or_zero(f"sum({events(XIDS, 'xid')})"), steps=BAD_ABOVE_ZERO),
        tile(
            "Memory that failed",
            "GPUs with errors that ECC could not correct since the driver was loaded.",
            count_of(UNCORRECTABLE),
            steps=BAD_ABOVE_ZERO,
        ),
        tile(
            "To be reset",
            "GPUs with rows or pages that wait to be replaced.",
            count_of(f"gpu_row_remap_pending{{{NODE_MATCHERS}}} or gpu_retired_pages_pending{{{NODE_MATCHERS}}}"),
            steps=LOOK_ABOVE_ZERO,
        ),
        tile(
            "To be replaced",
            "GPUs of which a row could not be replaced.",
            count_of(FINDINGS["row remap failed"]),
            steps=BAD_ABOVE_ZERO,
        ),
        tile(
            "Slowed down by heat",
            "GPUs that heat keeps below their clocks.",
            count_of(FINDINGS["slowed down by heat"]),
            steps=BAD_ABOVE_ZERO,
        ),
        graph(
            "XID errors by code",
            "In the time of a point.",
            [("XID {{xid}}", events(XIDS, "xid", "$__rate_interval"))],
            bars=True,
        ),
        graph(
            "Alerts by name",
            "The alert stream's, and those that Prometheus judges.",
            [
                ("{{alertname}}", f"count by (alertname) (gpu_alert_firing{{{NODE_MATCHERS}}})"),
                ("{{alertname}} (Prometheus)", f"count by (alertname) (ALERTS{{{PROMETHEUS_ALERTS}}})"),
            ],
            stacked=True,
        ),
        table(
            "What fires",
            "By the alert stream. docs/runbooks says what to do about each.",
            "alertname severity k8s_cluster_name k8s_node_name gpu_index gpu_uuid k8s_namespace_name k8s_pod_name",
            [
                Column(
                    "fires",
                    f"count by (alertname, severity, {DEVICE_OF_GPU}, {POD}) (gpu_alert_firing{{{NODE_MATCHERS}}})",
                )
            ],
            opens="gpu_uuid",
        ),
        table(
            "XID errors by GPU",
            "In the time shown. docs/reference/alerts.md says what each code means.",
            "k8s_cluster_name k8s_node_name gpu_index gpu_uuid xid",
            [Column("errors", events(XIDS, f"{DEVICE_OF_GPU}, xid"), steps=BAD_ABOVE_ZERO)],
            opens="gpu_uuid",
            width=12,
        ),
        table(
            "XID errors by pod",
            "Of pods that alone held the GPU when the error came, in the time shown.",
            "k8s_namespace_name k8s_pod_name xid",
            [
                Column(
                    "errors",
                    f"sum by ({POD}, xid) (sum_over_time(gpu_pod_xid_errors{{{NODE_MATCHERS}}}[$__range]))",
                    steps=BAD_ABOVE_ZERO,
                )
            ],
            width=12,
        ),
        table(
            "GPUs to look at",
            "What is wrong with them now, and how much of it.",
            "k8s_cluster_name k8s_node_name gpu_index gpu_uuid finding",
            [Column("value", TO_LOOK_AT)],
            opens="gpu_uuid",
        ),
        graph(
            "Memory errors",
            "In the time of a point, by whether ECC could correct them.",
            [
                (
                    "{{gpu_ecc_error_type}}",
                    f"sum by (gpu_ecc_error_type) (increase(gpu_ecc_errors{{{NODE_MATCHERS}}}[$__rate_interval]))",
                )
            ],
        ),
        graph(
            "Link errors",
            "NVLink and PCIe, in the time of a point.",
            [
                ("NVLink CRC", increase(f"gpu_interconnect_crc_errors{{{NODE_MATCHERS}}}")),
                ("NVLink replays", increase(f"gpu_interconnect_replays{{{NODE_MATCHERS}}}")),
                ("NVLink recoveries", increase(f"gpu_interconnect_recoveries{{{NODE_MATCHERS}}}")),
                ("PCIe replays", increase(f"gpu_pcie_replay_count{{{NODE_MATCHERS}}}")),
            ],
        ),
        graph(
            "Why clocks are down",
            "GPUs by cause.",
            [("{{gpu_throttle_cause}}", f"sum by (gpu_throttle_cause) (gpu_throttle_reason{{{NODE_MATCHERS}}})")],
        ),
        graph(
            "Temperature",
            "The hottest GPU and memory, and the median GPU.",
            [
                ("hottest GPU", f"max(gpu_temperature{{{NODE_MATCHERS}}})"),
                ("hottest memory", f"max(gpu_memory_temperature{{{NODE_MATCHERS}}})"),
                ("median GPU", f"quantile(0.5, gpu_temperature{{{NODE_MATCHERS}}})"),
            ],
            "celsius",
            steps=HOT,
        ),
    ],
)


AGE = "time() - max by (k8s_cluster_name, k8s_node_name) (timestamp(gpu_power_draw))"
"""By how much the newest power of a node is behind the clock."""

OWN = 'job=~"$job",instance=~"$instance"'


# -- gpustream itself: what flows, what waits, what was lost or refused


def each(metric: str, query: Callable[[str], str]) -> list[tuple[str, str]]:
    """A query for each stream and sink that has a metric of its own of this name."""
    return [(name, query(f"{metric_name}{{{OWN}}}")) for metric_name, name in own_metrics(metric).items()]


def since(metrics: list[tuple[str, str]]) -> str:
    """How many there were in the time shown, in all."""
    return f"round({' + '.join(f'(sum{counted(metric)} or vector(0))' for _, metric in metrics)})"


LETTERS = each("records_dead_lettered_total", str)
LAGS = each("lag_records", lambda metric: f"sum({metric})")
PRODUCER = {
    name: f"gpustream_producer_{name}{{{OWN}}}"
    for name in ("ticks_made_total", "ticks_sent_total", "ticks_held", "buffered_bytes")
}
DROPPED = f"gpustream_producer_ticks_dropped_total{{{OWN}}}"
TICKS = f"gpustream_attribution_ticks_total{{{OWN}}}"
PIPELINE_BOARD = dashboard(
    "gpu-pipeline",
    "gpustream itself",
    "What flows, what waits, what was late, refused or lost: the components' own metrics.",
    [choice("job", "job", "gpustream_ready"), choice("instance", "instance", 'gpustream_ready{job=~"$job"}')],
    [
        tile("Processes", "Those that answer.", number_of(f"gpustream_ready{{{OWN}}}")),
        tile(
            "Not ready",
            "They run and can't do their work: /readyz says why.",
            number_of(f"gpustream_ready{{{OWN}}} == 0"),
            steps=BAD_ABOVE_ZERO,
        ),
        tile(
            "Ticks that wait",
            "Of gpu.samples, for attribution.",
            or_zero(f'sum(gpustream_attribution_lag_records{{{OWN},topic="gpu.samples"}})'),
        ),
        tile(
            "Dead letters",
            "In the time shown: records that could not be used. gpu.dead-letters has the reasons.",
            since(LETTERS),
            steps=BAD_ABOVE_ZERO,
        ),
        tile(
            "Ticks dropped",
            "In the time shown: they never reached Kafka.",
            since([("", DROPPED)]),
            steps=BAD_ABOVE_ZERO,
        ),
        tile(
            "Receivers that fail",
            "Of the sinks: tried again for as long as it takes.",
            " + ".join(
                f"(sum({metric}) or vector(0))" for _, metric in [*each("receiver_failing", str), *each("failing", str)]
            ),
            steps=BAD_ABOVE_ZERO,
        ),
        graph(
            "Ticks per second",
            "Made and sent by producers, attributed, and delivered by sinks. The sinks of alerts deliver alerts.",
            [
                ("made", f"sum(rate({PRODUCER['ticks_made_total']}[$__rate_interval]))"),
                ("sent", f"sum(rate({PRODUCER['ticks_sent_total']}[$__rate_interval]))"),
                ("attributed", f"sum(rate({TICKS}[$__rate_interval]))"),
                *each("records_delivered_total", lambda metric: f"sum(rate({metric}[$__rate_interval]))")[
                    len(STREAMS) :
                ],
            ],
        ),
        graph(
            "Records that wait", "Not finished yet, by stream and sink. Nothing is lost while Kafka keeps them.", LAGS
        ),
        graph(
            "Delay",
            "99 of 100 ticks take no longer: from reading until the receiver has them; of alerts, from the log.",
            each(
                "delay_seconds",
                lambda metric: (
                    f"histogram_quantile(0.99, sum by (le) (rate({metric.replace('{', '_bucket{')}[$__rate_interval])))"
                ),
            ),
            "s",
        ),
        graph(
            "Age of the newest reading",
            "In Prometheus: of the node that is behind the most, and of the median node.",
            [("oldest", f"max({AGE})"), ("median", f"quantile(0.5, {AGE})")],
            "s",
        ),
        row("Late, refused, lost"),
        graph(
            "Dead letters by component",
            "In the time of a point, by who wrote them.",
            each("records_dead_lettered_total", increase),
            bars=True,
        ),
        graph(
            "Dropped",
            "In the time of a point: ticks by producers, and records that a receiver refused for their time.",
            [
                ("producers: {{reason}}", f"sum by (reason) (increase({DROPPED}[$__rate_interval]))"),
                *each("records_dropped_total", increase),
            ],
            bars=True,
        ),
        graph(
            "How ticks are attributed",
            "exact by the snapshot that they name, late by the last one known, none without one.",
            [("{{attribution}}", f"sum by (attribution) (rate({TICKS}[$__rate_interval]))")],
            stacked=True,
        ),
        graph(
            "Deleted before it was read",
            "Records that retention deleted, in the time of a point.",
            [*each("lost_offsets_total", increase), *each("records_expired_total", increase)],
            bars=True,
        ),
        row("Sinks"),
        graph(
            "Requests",
            "Attempts per second, by what the answer meant.",
            [
                (f"{name}: {{{{result}}}}", expr)
                for name, expr in each(
                    "requests_total", lambda metric: f"sum by (result) (rate({metric}[$__rate_interval]))"
                )
            ],
        ),
        graph(
            "Series left out",
            "Series that the receiver of remote write refused, and that are not sent for ten minutes.",
            [("series", f"sum(gpustream_remote_write_series_left_out{{{OWN}}})")],
        ),
        row("The processes"),
        graph(
            "Buffers of producers",
            "Ticks that wait to be sent, and their bytes.",
            [("ticks", f"sum({PRODUCER['ticks_held']})"), ("bytes", f"sum({PRODUCER['buffered_bytes']})")],
        ),
        graph(
            "Event loops",
            "The most that a loop was late in the last minute, by stream and sink.",
            each("loop_late_seconds", lambda metric: f"max({metric})"),
            "s",
        ),
        graph(
            "Rebalances of streams",
            "Times that partitions were taken away, in the time of a point.",
            each("rebalances_total", increase),
            bars=True,
        ),
        graph(
            "Kubelets",
            "Seconds since the kubelet of a node last answered.",
            [("longest", f"max(gpustream_node_kubelet_age_seconds{{{OWN}}})")],
            "s",
        ),
        table(
            "Nodes' GPUs that don't answer",
            "By the node producers, MIG devices among them: lost left the bus, timeout do not answer NVML.",
            "instance state",
            [
                Column(
                    "devices",
                    f'sum by (instance, state) (gpustream_node_gpus{{{OWN},state!="ok"}}) > 0',
                    steps=BAD_ABOVE_ZERO,
                )
            ],
            width=12,
        ),
        table(
            "Versions",
            "Of the processes that answer.",
            "version",
            [Column("processes", f"count by (version) (gpustream_build_info{{{OWN}}})")],
            width=12,
        ),
    ],
)
