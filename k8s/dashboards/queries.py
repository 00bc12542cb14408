"""PromQL that several dashboards need, of the names of ``--names otel``.

A device is a GPU or a MIG device. Its series carry a pod's labels only while that pod alone holds it; a pod of a shared
device has its parts instead (``gpu_pod_...``), and ``gpu_holders`` says how many hold it. So a query
for pods needs both, and a query that counts held devices counts ``gpu_holders``.

With ``--parts-by-pod`` the utilization, memory and power of a shared device are several series: its pods' parts, and
the rest. So a query for devices adds them up, and gives the same with and without that option.
"""

from collections.abc import Sequence

from gpustream import reference
from sinks import SINKS
from streams import STREAMS

GPU = "k8s_cluster_name, k8s_node_name, gpu_uuid"
DEVICE = f"{GPU}, gpu_mig_uuid"
POD = "k8s_namespace_name, k8s_pod_name"
WORKLOAD = "k8s_cluster_name, k8s_namespace_name, k8s_workload_kind, k8s_workload_name"

CLUSTER = 'k8s_cluster_name=~"$cluster"'
NODE_MATCHERS = f'{CLUSTER},k8s_node_name=~"$node"'
WORKLOAD_MATCHERS = (
    'k8s_cluster_name=~"$cluster",k8s_namespace_name=~"$namespace",k8s_workload_name=~"$workload",k8s_pod_name!=""'
)
HOLDERS = f"max by ({DEVICE}) (gpu_holders{{{NODE_MATCHERS}}})"
"""How many hold each device."""

ACTIVITY = ("gpu_utilization", "gpu_gr_engine_active", "gpu_encode_utilization", "gpu_decode_utilization")
"""The metrics that show that a device works. No two of them have the same labels on one device."""
VIDEO = ACTIVITY[2:]
"""Those of them that are in no pod's part."""

IDLE_BELOW = 0.01
ONE_HOUR = "59m59s"
"""The range with what was sampled in an hour: Prometheus before 3.0 takes the sample at the start of 1h, too."""

PROMETHEUS_ALERTS = 'alertstate="firing",alertname=~"(?i)gpu.*|NodeSilent"'
"""The alerts that Prometheus judges: of GPUs, and of gpustream itself."""


_OWN_METRICS = {row.name for _, rows in reference.sections() for row in rows}


def own_metrics(metric: str) -> dict[str, str]:
    """The whole names of this metric of all streams and sinks that have it, each with its stream or sink."""
    names = {f"gpustream_{name.replace('-', '_')}_{metric}": name for name in (*STREAMS, *SINKS)}
    return {metric_name: name for metric_name, name in names.items() if metric_name in _OWN_METRICS}


def gpus() -> str:
    """1 for each physical GPU."""
    return f"group by ({GPU}) (gpu_info{{{NODE_MATCHERS}}} or gpu_holders{{{NODE_MATCHERS}}})"


def held_gpus() -> str:
    """Each physical GPU that is held, alone, shared or by MIG; its value is the highest number of holders."""
    return f"max by ({GPU}) (gpu_holders{{{NODE_MATCHERS}}}) > 0"


def on_devices(matchers: str) -> str:
    """A series of each pod on each device that it holds, and never two with different labels: the device's if it holds
    that alone, else a part. Of a GPU with unified memory, for example, no part of the memory is known."""
    parts = " or ".join(f"{part}{{{matchers}}}" for _, part in (MEMORY, UTILIZATION))
    return f'gpu_holders{{{matchers},k8s_pod_name!=""}} or {parts}'


def holding(matchers: str, by: str) -> str:
    """Devices that are held: 1 for a pod alone, and of a shared device an equal part for each of its pods."""
    pods = f"group by ({DEVICE}, {POD}, k8s_workload_kind, k8s_workload_name) ({on_devices(matchers)})"
    return f"sum by ({by}) ({pods} / on ({DEVICE}) group_left () max by ({DEVICE}) (gpu_holders{{{CLUSTER}}} > 0))"


def holding_pods(matchers: str, by: str) -> str:
    """1 for each pod on each device that it holds."""
    return f"group by ({by}, {POD}) ({on_devices(matchers)})"


def alone_or_part(metric: str, part: str, matchers: str) -> str:
    """A quantity of each pod on each device: the device's if it holds that alone, else its part of it."""
    alone = [f'{name}{{{matchers},k8s_pod_name!=""}}' for name in metric.split()]
    return f" or on ({DEVICE}) ".join([*alone, f"{part}{{{matchers}}}"])


def of_devices(metric: str, matchers: str = NODE_MATCHERS, by: str = DEVICE) -> str:
    """The utilization, memory or power of each device, also if it is written as the parts of its pods and the rest."""
    return f"sum by ({by}) ({metric}{{{matchers}}})"


UTILIZATION = ("gpu_utilization gpu_gr_engine_active", "gpu_pod_utilization_ratio")
MEMORY = ("gpu_memory_used", "gpu_pod_memory_used_bytes")
POWER = ("gpu_power_draw", "gpu_pod_power_watts")
"""The device's own metric, or the one that stands for it if that is missing; and the metric of a pod's part."""

DIVIDED = ("gpu_utilization", "gpu_memory_used", "gpu_power_draw")
"""What ``--parts-by-pod`` divides."""


def idle_devices() -> str:
    """Each device that was held for the whole window, is still held, and did nothing in it."""
    holders = f"gpu_holders{{{NODE_MATCHERS}}}"
    always = f"min by ({DEVICE}) (min_over_time({holders}[$idle]) or {holders}) > 0"
    since = f"max by ({DEVICE}) ({holders} offset $idle) > 0"
    now = f"{HOLDERS} > 0"
    did = max_activity(NODE_MATCHERS, "$idle")
    return f"({did} < {IDLE_BELOW}) and ({always}) and ({since}) and ({now})"


def most(metrics: Sequence[str], matchers: str, window: str) -> str:
    """The highest value of each series of these metrics in a window, or the last one if samples are further apart."""
    selectors = [f"{metric}{{{matchers}}}" for metric in metrics]
    return " or ".join(f"max_over_time({selector}[{window}]) or {selector}" for selector in selectors)


def max_activity(matchers: str, window: str) -> str:
    """The most that each device did in a window, in any engine.

    Of a shared device that is written in parts, their highest values are added up. NVML's utilization is in whole
    percents: if the device had 1 % at any time, so has the sum; else all parts are 0.
    """
    utilization, others = (most(metrics, matchers, window) for metrics in (ACTIVITY[:1], ACTIVITY[1:]))
    return f"max by ({DEVICE}) (sum by ({DEVICE}) ({utilization}) or {others})"


def did_nothing(pods: str, devices: str, window: str) -> str:
    """Each pod on a device on which it did nothing in a window. ``devices``: matchers without those of pods.

    A pod that holds a device alone did all that the device did. Of a shared device it did its part, and perhaps what is
    nobody's part, such as video and what an MPS server does: if that is work, nobody is called idle. It is no work if
    it is less than half of the parts, because the device and its processes are measured in different windows.
    """
    part, rest = "gpu_pod_utilization_ratio", "gpu_unattributed_utilization_ratio"
    alone = most(ACTIVITY, f'{pods},k8s_pod_name!=""', window)
    did = f'{alone} or label_replace({most([part], pods, window)}, "of", "part", "", "")'
    nobodys = f"max by ({DEVICE}) ({most([rest], devices, window)}) >= {IDLE_BELOW}"
    half = f"sum by ({DEVICE}) ({most([part], devices, window)}) / 2"
    video = f"max by ({DEVICE}) ({most(VIDEO, devices, window)}) >= {IDLE_BELOW}"
    return (
        f"max by ({DEVICE}, {POD}) ({did}) < {IDLE_BELOW}"
        f" unless on ({DEVICE}) (({nobodys}) >= on ({DEVICE}) {half} or {video})"
    )


def idle_pods(pods: str, devices: str = NODE_MATCHERS, window: str = "$idle") -> str:
    """Each pod on a device that it held when a window began, still holds, and did nothing on."""
    alone, part = f'gpu_holders{{{pods},k8s_pod_name!=""}}', f"gpu_pod_utilization_ratio{{{pods}}}"
    now, before = f"{alone} or {part}", f"{alone} offset {window} or {part} offset {window}"
    held = " and ".join(f"group by ({DEVICE}, {POD}) ({present})" for present in (now, before))
    return f"({did_nothing(pods, devices, window)} and {held})"


def firing_alerts() -> str:
    """How many alerts fire: the alert stream's, and those that Prometheus judges."""
    selectors = f"gpu_alert_firing{{{NODE_MATCHERS}}}", f"ALERTS{{{PROMETHEUS_ALERTS}}}"
    return " + ".join(f"(count({selector}) or vector(0))" for selector in selectors)


def counted(counter: str, window: str = "$__range") -> str:
    """What a counter counted in the window. One that began in it began with its first count; it may have ended."""
    return f"((max_over_time({counter}[{window}]) unless {counter} offset {window}) or increase({counter}[{window}]))"


def events(counter: str, by: str, window: str = "$__range") -> str:
    """How many events a counter counted in the window."""
    return f"round(sum by ({by}) {counted(counter, window)}) > 0"


def or_zero(expr: str) -> str:
    """The value of an expression, or 0 if it is empty."""
    return f"({expr}) or vector(0)"


def number_of(expr: str) -> str:
    """How many series an expression has."""
    return or_zero(f"count({expr})")
