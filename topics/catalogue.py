"""The metric catalogue: every key of ``metrics``, what it is, where NVML has it, and its series in each naming profile.

Producers read what to sample here, sinks what to call it, the docs are written from it. A key without a name in a
profile is not emitted in that profile.
"""

from topics.metric import PROFILES, Info, Labels, Metric, Profile, Ratio, Series
from topics.metric_rows import ROWS

__all__ = [
    "CATALOGUE",
    "DERIVED",
    "HOLDERS",
    "POD_INFO",
    "PROFILES",
    "Info",
    "Labels",
    "Metric",
    "Profile",
    "Ratio",
    "Series",
    "label_names",
    "series",
]

CATALOGUE: dict[str, Metric] = {row.key: row for row in ROWS}
"""Every key, in the order of the docs."""

DERIVED: dict[Profile, tuple[Ratio, ...]] = {
    "otel": (
        Ratio(
            "gpu_memory_used_percent",
            "memory_used_bytes",
            "memory_total_bytes",
            "percent",
            "Share of the device memory that is in use, 0 to 100.",
            scale=100.0,
        ),
        Ratio(
            "gpu_power_utilization",
            "power_watts",
            "power_limit_watts",
            "ratio",
            "Power drawn, of the limit in force.",
        ),
    ),
    "dcgm": (),
    "dcgm-legacy": (),
}
"""The series that are made of two keys."""


HOLDERS = Info(
    "gpu_holders",
    "Pods that hold the device: 0 where nobody does. Absent where the node's kubelet has not said who does.",
)
"""With the names of ``otel``."""

POD_INFO = Info(
    "gpu_pod_info",
    "Always 1, for each pod that holds a device: what is written on it and its namespace, for joins.",
)
"""With the label set ``otel``."""


def series(profile: Profile) -> dict[str, tuple[Series, ...]]:
    """The series of each key in a profile; keys without a name in it are absent."""
    return {key: metric.names[profile] for key, metric in CATALOGUE.items() if profile in metric.names}


def label_names(profile: Profile) -> frozenset[str]:
    """The names of the labels that tell series of one name apart in a profile."""
    labels = [one.labels for many in series(profile).values() for one in many]
    return frozenset(name for pairs in (*labels, *(ratio.labels for ratio in DERIVED[profile])) for name, _ in pairs)
