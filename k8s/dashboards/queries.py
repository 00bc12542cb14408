"""PromQL that several dashboards need, of the names of ``--names otel``.

A device is a GPU or a MIG device. Its series carry a pod's labels only while that pod alone holds it; a pod of a shared
device has its parts instead (``gpu_pod_...``), and ``gpu_holders`` says how many hold it. So whoever asks for pods asks
for both, and whoever counts what is held counts ``gpu_holders``.
"""

GPU = "k8s_cluster_name, k8s_node_name, gpu_uuid"
DEVICE = f"{GPU}, gpu_mig_uuid"
POD = "k8s_namespace_name, k8s_pod_name"
WORKLOAD = "k8s_cluster_name, k8s_namespace_name, k8s_workload_kind, k8s_workload_name"

CLUSTER = 'k8s_cluster_name=~"$cluster"'
PLACE = f'{CLUSTER},k8s_node_name=~"$node"'
OWNED = 'k8s_cluster_name=~"$cluster",k8s_namespace_name=~"$namespace",k8s_workload_name=~"$workload",k8s_pod_name!=""'
ACTIVITY = ("gpu_utilization", "gpu_gr_engine_active", "gpu_encode_utilization", "gpu_decode_utilization")
"""What shows that a device works. No two of them have the same labels on one device."""

IDLE_BELOW = 0.01
OURS = 'alertstate="firing",alertname=~"(?i)gpu.*|NodeSilent"'
"""The alerts that Prometheus judges: of GPUs, and of gpustream itself."""


def gpus(where: str = PLACE) -> str:
    """1 for each physical GPU."""
    return f"group by ({GPU}) (gpu_info{{{where}}} or gpu_holders{{{where}}})"


def held(where: str = PLACE) -> str:
    """Each physical GPU that any pod holds, alone, shared or in a MIG device; its value is how many hold it at most."""
    return f"max by ({GPU}) (gpu_holders{{{where}}}) > 0"


def holding(where: str, by: str) -> str:
    """Devices that are held: 1 for a pod alone, and of a shared device an equal part for each of its pods."""
    alone_or_part = f'gpu_holders{{{where},k8s_pod_name!=""}} or gpu_pod_memory_used_bytes{{{where}}}'
    pods = f"group by ({DEVICE}, {POD}, k8s_workload_kind, k8s_workload_name) ({alone_or_part})"
    return f"sum by ({by}) ({pods} / on ({DEVICE}) group_left () max by ({DEVICE}) (gpu_holders{{{CLUSTER}}} > 0))"


def holders(where: str, by: str) -> str:
    """1 for each pod on each device that it holds."""
    return f'group by ({by}, {POD}) (gpu_holders{{{where},k8s_pod_name!=""}} or gpu_pod_memory_used_bytes{{{where}}})'


def alone_or_part(metric: str, part: str, where: str) -> str:
    """A quantity of each pod on each device: its part of a shared device, else the device's, if it holds that alone."""
    alone = [f'{one}{{{where},k8s_pod_name!=""}}' for one in metric.split()]
    return f" or on ({DEVICE}) ".join([f"{part}{{{where}}}", *alone])


UTILIZATION = ("gpu_utilization gpu_gr_engine_active", "gpu_pod_utilization_ratio")
MEMORY = ("gpu_memory_used", "gpu_pod_memory_used_bytes")
POWER = ("gpu_power_draw", "gpu_pod_power_watts")
"""The device's own metric, or the one that stands for it if that is missing; and the metric of a pod's part."""


def works(where: str, by: str) -> str:
    """The most that a device did in the window, in any engine."""
    several = " or ".join(f"max_over_time({one}{{{where}}}[$idle])" for one in ACTIVITY)
    return f"max by ({by}) ({several})"


def idle_devices(where: str = PLACE) -> str:
    """Each device that was held for the whole window, is still, and did nothing in it."""
    always = f"min by ({DEVICE}) (min_over_time(gpu_holders{{{where}}}[$idle])) > 0"
    since = f"max by ({DEVICE}) (gpu_holders{{{where}}} offset $idle) > 0"
    now = f"max by ({DEVICE}) (gpu_holders{{{where}}}) > 0"
    return f"({works(where, DEVICE)} < {IDLE_BELOW}) and ({always}) and ({since}) and ({now})"


def idle_pods(where: str) -> str:
    """Each pod on a device that it held for the whole window, holds still, and did nothing on."""
    alone, part, by = f'{where},k8s_pod_name!=""', f"gpu_pod_utilization_ratio{{{where}}}", f"{DEVICE}, {POD}"
    lone = f"{works(alone, by)} < {IDLE_BELOW}", f"gpu_holders{{{alone}}}"
    parts = f"max by ({by}) (max_over_time({part}[$idle])) < {IDLE_BELOW}", part
    return " or ".join(
        f"(({nothing}) and group by ({by}) ({there}) and group by ({by}) ({there} offset $idle))"
        for nothing, there in (lone, parts)
    )


def firing(where: str = PLACE) -> str:
    """How many alerts fire: the alert stream's, and those that Prometheus judges."""
    return f"(count(gpu_alert_firing{{{where}}}) or vector(0)) + (count(ALERTS{{{OURS}}}) or vector(0))"


def events(counter: str, by: str, window: str = "$__range") -> str:
    """How often something was counted in the window, with the first time, from which on a counter has a series."""
    old = f"increase({counter}[{window}])"
    return f"round(sum by ({by}) (({counter} unless {counter} offset {window}) or {old})) > 0"


def zero(expr: str) -> str:
    """The same, and 0 if there is nothing."""
    return f"({expr}) or vector(0)"
