"""The metric catalogue: each key's meaning, its source in NVML, and its series in each naming profile.

Producers read from it what to sample, and ``topics.profiles`` the names of series; the docs are written from it. A key
without a series in a profile is not written in that profile.
"""

from topics.metric import ROWS, Family, Info, Metric

CATALOGUE: dict[str, Metric] = {row.key: row for row in ROWS}  # every key, in the order of the docs
FAMILIES: dict[str, Family] = {
    "gpu_clock_frequency": Family(
        "gpu_clock_type", ("graphics_clock_hz", "sm_clock_hz"), mean="the clocks of the cores, not of the memory"
    ),
    "gpu_throttle_reason": Family(
        "gpu_throttle_cause", ("clock_event_reasons",), "how many of these causes keep the clocks down"
    ),
    "gpu_pcie_throughput": Family(
        "gpu_interconnect_direction",
        ("pcie_tx_bytes_per_second", "pcie_rx_bytes_per_second"),
        "what goes over PCIe in both directions",
    ),
    "gpu_interconnect_throughput": Family(
        "gpu_interconnect_direction",
        ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"),
        "what goes over NVLink in both directions",
    ),
    "gpu_ecc_errors": Family(
        "gpu_ecc_error_type",
        ("ecc_corrected_volatile_total", "ecc_uncorrected_volatile_total"),
        "memory errors since the driver was loaded",
    ),
    "gpu_ecc_aggregate_errors": Family(
        "gpu_ecc_error_type",
        ("ecc_corrected_aggregate_total", "ecc_uncorrected_aggregate_total"),
        "memory errors in the GPU's life, those of `gpu_ecc_errors` among them",
    ),
    "gpu_row_remap_count": Family(
        "gpu_ecc_error_type",
        ("remapped_rows_correctable_total", "remapped_rows_uncorrectable_total"),
        "memory rows that were remapped",
    ),
    "gpu_retired_pages": Family(
        "gpu_ecc_error_type",
        ("retired_pages_single_bit_total", "retired_pages_double_bit_total"),
        "memory pages that were retired",
    ),
    "gpu_violation_time": Family(
        "gpu_violation_cause",
        (
            "power_violation_seconds_total",
            "thermal_violation_seconds_total",
            "sync_boost_violation_seconds_total",
            "board_limit_violation_seconds_total",
            "low_utilization_violation_seconds_total",
            "reliability_violation_seconds_total",
        ),
        "the time of each cause, added up: more than the time that passed if there were several at once",
    ),
}
"""The names that several series of a device share, in any profile. Every other name has one series for each device.

A query may aggregate over a label, because another quantity, a part of another series, or another unit always has a
name of its own.
"""

HOLDERS = Info(
    "gpu_holders",
    "Pods or batch jobs that hold the device, pods that only their processes show among them: 0 if nobody does. Absent "
    "if it is not known who does, or if the device does not answer.",
)
"""In all profiles, with the labels of the device's metrics."""

XIDS = Info(
    "gpu_xid_errors",
    "XID errors of the device, of all codes, since the node's producer started: 0 if none was seen. Of a MIG device "
    "or one whose producer does not say what it is, only if it had one.",
    "errors",
    "counter",
    since_start=True,
)
"""In all profiles, with the labels of the device's metrics."""

LAST_XID = Info(
    "last_xid", "Code of the device's last XID error, 0 if none was seen since the node's producer started.", "code"
)
"""A key of profiles that is no metric: it is made of the device's events."""

POD_INFO = Info(
    "gpu_pod_info", "Always 1, for each pod that holds a device: what is written on it and its namespace, for joins."
)
"""Only with the label set ``otel``."""

POD_PARTS = {
    "utilization_ratio": Info(
        "gpu_pod_utilization_ratio", "A pod's part of the utilization of a device that it shares.", "ratio"
    ),
    "memory_used_bytes": Info(
        "gpu_pod_memory_used_bytes", "A pod's part of the memory in use on a device that it shares.", "bytes"
    ),
    "power_watts": Info(
        "gpu_pod_power_watts", "A pod's part of the power drawn by a device that it shares, mean of the tick.", "watts"
    ),
}
"""By the field of ``Parts``: in all profiles, one for each pod of a device that is split."""

UNATTRIBUTED = {
    "utilization_ratio": Info(
        "gpu_unattributed_utilization_ratio", "What of a shared device's utilization is no pod's part.", "ratio"
    ),
    "memory_used_bytes": Info(
        "gpu_unattributed_memory_used_bytes", "What of the memory in use on a shared device is no pod's part.", "bytes"
    ),
    "power_watts": Info(
        "gpu_unattributed_power_watts", "What of the power drawn by a shared device is no pod's part.", "watts"
    ),
}
"""By the field of ``Parts``: one for each device that is split. It and the pods' parts add up to the device."""

SPLIT_SCALED = Info(
    "gpu_split_scaled",
    "Whether a shared device's processes came to more than the device and the parts were scaled down to it.",
    "bool",
)

CONFLICT = Info(
    "gpu_attribution_conflict",
    "1 while the processes on a device say otherwise than the kubelet: unallocated_process is one of a pod that was "
    "not given the device, whether or not it can be named, no_pod one of no pod on a device that pods hold.",
    "bool",
    labels=("reason",),
)

DEVICE_INFO = Info(
    "gpu_info",
    "Always 1, for each device: what it is. With processes_visible false, nothing is split.",
    labels=("cuda_version", "driver_version", "mig_mode", "processes_visible", "serial", "vbios_version"),
)

XID_ERRORS = Info(
    "gpu_xid_errors_total",
    "XID errors of the device by code, since the node's producer started.",
    "errors",
    "counter",
    ("xid",),
    since_start=True,
)

POD_XID_ERRORS = Info(
    "gpu_pod_xid_errors",
    "XID errors by code since the tick before that came while this pod alone held the device. In ticks that have some "
    "only: sum_over_time adds them up. A scrape sees those of the last tick, remote write has them all.",
    "errors",
    labels=("xid",),
)
"""For the pod that held the device when the error came; another pod may hold it in the tick."""

ALERT_FIRING = Info(
    "gpu_alert_firing",
    "While an alert fires, of how many GPUs it is true (1 if it does not say which), with the alert's labels, its "
    "severity and its fingerprint, which no two alerts share. From remote write only.",
    "devices",
    labels=("alertname", "severity", "fingerprint"),
)
"""In all profiles, from gpu.alerts."""

USAGE = {
    "held": Info(
        "gpu_usage_held_seconds",
        "How long a pod held the device within an hour: one sample at the end of the hour, once it is final. "
        "sum_over_time adds hours up; several pods share a device's time. From remote write only.",
        "seconds",
        labels=("k8s_pod_uid", "k8s_workload_kind", "k8s_workload_name", "job_partition", "team"),
    ),
    "used": Info("gpu_usage_used_seconds", "For how long of that the device computed for it.", "seconds"),
    "idle": Info("gpu_usage_idle_seconds", "For how long of that the pod did nothing with it.", "seconds"),
    "energy": Info("gpu_usage_energy_joules", "What the device drew for it, or while nobody held it.", "joules"),
    "free": Info("gpu_usage_free_seconds", "How long nobody held the device within an hour.", "seconds"),
    "held_gpu": Info(
        "gpu_usage_held_gpu_seconds",
        "How much of a whole GPU's time that was: of a MIG device with two of seven compute slices 2/7.",
        "seconds",
    ),
    "free_gpu": Info(
        "gpu_usage_free_gpu_seconds",
        "How much of a whole GPU's time nobody held, slices that are cut into no MIG device among it.",
        "seconds",
    ),
}
"""In all profiles, from gpu.usage."""

FURTHER = (*POD_PARTS.values(), *UNATTRIBUTED.values(), SPLIT_SCALED, CONFLICT, DEVICE_INFO, XID_ERRORS, POD_XID_ERRORS)
"""The series of a device besides its metrics; they have the same names in all profiles."""
