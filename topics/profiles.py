"""Naming profiles: what the series of a device are called, as values.

A :class:`Profile` is frozen data: the series of each metric (name, labels, scale, type, unit, help), the series that
are computed from several metrics, and the label names of the device and its holder (:class:`LabelNames`). Code that
translates a device takes the profiles as values and has no other source of names. So another profile can be made with
``dataclasses.replace``, or from scratch. ``PROFILES`` has those that ``--names`` picks from.

A device may be written in several profiles at once. If two profiles give it the same labels, they share one set of
series; a series that both have under one name is in it once, as in the first of them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from topics.catalogue import CATALOGUE, LAST_XID
from topics.metric import SCALED, Ratio, Series

ProfileName = Literal["otel", "otel-suffixed", "dcgm", "dcgm-4.9", "dcgm-legacy"]
LabelSet = Literal["otel", "dcgm", "dcgm-4.9", "dcgm-legacy", "pod-devices"]

Attribute = Literal[
    # of the device
    "cluster", "node", "instance", "zone", "region", "host_type", "service", "vendor", "index", "gpu_uuid", "uuid",
    "mig_uuid", "mig_profile", "gpu_instance", "model", "pci_bus_id", "device", "job_id", "job_user", "job_partition",
    "job_account",
    # of what its record's ``info`` says
    "serial", "driver_version", "cuda_version", "vbios_version", "mig_mode", "processes_visible",
    # of its holder
    "namespace", "pod", "pod_uid", "container", "job", "statefulset", "deployment", "workload_kind", "workload_name",
]  # fmt: skip
"""What a label may have as its value.

``uuid`` is a MIG device's own, ``gpu_uuid`` that of the physical GPU. Dashboards made for a scraped exporter filter by
``instance``. Of ``job``, ``statefulset`` and ``deployment`` at most one is known.
"""

INFO: tuple[Attribute, ...] = (
    "serial", "driver_version", "cuda_version", "vbios_version", "mig_mode", "processes_visible",
)  # fmt: skip
"""The attributes that come from ``info`` of the record."""


@dataclass(frozen=True, slots=True)
class LabelNames:
    """The labels of a device's series: pairs of a name and an attribute; an unknown attribute has no label.

    ``holder``: labels of a series only if a single pod holds the device, or if the series is a pod's own. ``tenants``:
    the pod's and its namespace's own labels follow, and each pod has a ``gpu_pod_info``.
    """

    name: str
    device: tuple[tuple[str, Attribute], ...]
    holder: tuple[tuple[str, Attribute], ...]
    tenants: bool = False

    @property
    def info(self) -> bool:
        """Whether a label comes from ``info`` of the record."""
        return any(attribute in INFO for _, attribute in self.device)

    @property
    def pod_uid(self) -> bool:
        """Whether the pod's UID is a label: then a pod that is created again has other labels."""
        return any(attribute == "pod_uid" for _, attribute in self.holder)


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The names of a device's series. A key that is not in ``series`` is not written; ``last_xid`` may be one.

    All series of a name have one kind, one unit and one help, which names the unit. ``further``: the series of
    :data:`topics.catalogue.FURTHER` are written, too.
    """

    name: str
    series: Mapping[str, tuple[Series, ...]]
    ratios: tuple[Ratio, ...]
    labels: LabelNames
    further: bool = True


# -- labels

_DCGM: tuple[tuple[str, Attribute], ...] = (
    ("gpu", "index"),
    ("UUID", "gpu_uuid"),
    ("pci_bus_id", "pci_bus_id"),
    ("device", "device"),
    ("modelName", "model"),
    ("GPU_I_PROFILE", "mig_profile"),
    ("GPU_I_ID", "gpu_instance"),
    ("hostname", "node"),
    ("instance", "instance"),
    ("cluster", "cluster"),
)
_DCGM_POD: tuple[tuple[str, Attribute], ...] = (("namespace", "namespace"), ("pod", "pod"), ("container", "container"))
_POD_DEVICES: tuple[tuple[str, Attribute], ...] = (("gpu", "index"), ("uuid", "uuid"))
_POD: tuple[tuple[str, Attribute], ...] = (
    ("pod_namespace", "namespace"),
    ("pod_name", "pod"),
    ("container_name", "container"),
)

LABELS: dict[LabelSet, LabelNames] = {
    "otel": LabelNames(
        "otel",
        device=(
            ("k8s_cluster_name", "cluster"),
            ("k8s_node_name", "node"),
            ("host_name", "node"),
            ("host_type", "host_type"),
            ("cloud_availability_zone", "zone"),
            ("cloud_region", "region"),
            ("service_name", "service"),
            ("gpu_vendor", "vendor"),
            ("gpu_index", "index"),
            ("gpu_uuid", "gpu_uuid"),
            ("gpu_model", "model"),
            ("gpu_mig_uuid", "mig_uuid"),
            ("gpu_mig_profile", "mig_profile"),
            ("job_id", "job_id"),
            ("job_user", "job_user"),
            ("job_partition", "job_partition"),
            ("job_account", "job_account"),
        ),
        holder=(
            ("k8s_container_name", "container"),
            ("k8s_namespace_name", "namespace"),
            ("k8s_pod_name", "pod"),
            ("k8s_pod_uid", "pod_uid"),
            ("k8s_job_name", "job"),
            ("k8s_statefulset_name", "statefulset"),
            ("k8s_deployment_name", "deployment"),
            ("k8s_workload_kind", "workload_kind"),
            ("k8s_workload_name", "workload_name"),
        ),
        tenants=True,
    ),
    "dcgm": LabelNames("dcgm", (*_DCGM, ("DCGM_FI_DRIVER_VERSION", "driver_version")), _DCGM_POD),
    "dcgm-4.9": LabelNames("dcgm-4.9", (*_DCGM, ("DCGM_FI_SYSTEM_DRIVER_VERSION", "driver_version")), _DCGM_POD),
    "dcgm-legacy": LabelNames("dcgm-legacy", (*_POD_DEVICES, ("node", "node"), ("cluster", "cluster")), _POD),
    "pod-devices": LabelNames("pod-devices", _POD_DEVICES, _POD),
}
"""The label sets that ``--labels`` picks from; without it a profile has that of its name."""


# -- names


def profile(
    name: ProfileName,
    series: Mapping[str, tuple[Series, ...]],
    ratios: tuple[Ratio, ...],
    labels: LabelSet | None = None,
    last_xid: str | None = None,
) -> Profile:
    """A profile from rows of the table: each series gets its kind, its unit and a help that names the unit.

    The help of a name that several keys share has the help of each. ``labels`` None: the label set of the same name.
    """
    helps: dict[str, dict[str, None]] = {}
    for key, rows in series.items():
        for row in rows:
            helps.setdefault(row.name, {})[CATALOGUE[key].help] = None
    by_key = {}
    for key, rows in series.items():
        metric, described = CATALOGUE[key], []
        for row in rows:
            text = " ".join(helps[row.name])
            if row.bits is not None:  # a bit of a counter or a mask is a gauge, 0 or 1
                described.append(row._replace(kind="gauge", unit="bool", help=text))
            else:
                unit = metric.unit if row.scale == 1.0 else SCALED[metric.unit, row.scale]
                described.append(row._replace(kind=metric.kind, unit=unit, help=help_with_unit(text, unit)))
        by_key[key] = tuple(described)
    if last_xid is not None:
        by_key[LAST_XID.name] = (Series(last_xid, unit=LAST_XID.unit, help=LAST_XID.help),)
    ratios = tuple([ratio._replace(help=help_with_unit(ratio.help, ratio.unit)) for ratio in ratios])
    return Profile(name, by_key, ratios, LABELS[labels or name])  # type: ignore[index] # such a name has a label set


def help_with_unit(text: str, unit: str) -> str:
    """A help text with the unit at its end, if there is a unit."""
    return text if unit in {"", "bool", "bitmask", "state", "code"} else f"{text} Unit: {unit.replace('_', ' ')}."


_SUFFIXES = {
    "ratio": "_ratio",
    "bytes": "_bytes",
    "bytes_per_second": "_bytes_per_second",
    "watts": "_watts",
    "celsius": "_celsius",
    "megahertz": "_MHz",
    "millijoules": "_mJ",
    "seconds": "_seconds",
}
"""The suffixes that Prometheus appends to metrics that it gets by OTLP. Units in braces, such as percent, have none."""


def with_unit_suffix(name: str, unit: str) -> str:
    """A name of ``otel`` as it is in Prometheus, and in dashboards that read Prometheus."""
    return name + _SUFFIXES.get(unit, "")


def insert_suffix(name: str, suffix: str, unit: str) -> str:
    """A name with another suffix, placed before the suffix of its unit if the name has one."""
    unit_suffix = _SUFFIXES.get(unit, "")
    return f"{name.removesuffix(unit_suffix)}{suffix}{unit_suffix if name.endswith(unit_suffix) else ''}"


_OTEL = profile(
    "otel",
    {key: metric.otel for key, metric in CATALOGUE.items()},
    (
        Ratio(
            "gpu_memory_used_percent",
            ("memory_used_bytes",),
            ("memory_total_bytes",),
            "percent",
            "Share of the device memory that is in use.",
            scale=100.0,
        ),
        Ratio(
            "gpu_power_utilization",
            ("power_watts",),
            ("power_limit_watts",),
            "ratio",
            "Power drawn, of the limit in force.",
        ),
    ),
)
_USED = "Share of the device memory that is in use, of what is not reserved."
_NVLINK = "What the device sends and receives over all NVLinks, together."
_NVLINKS = ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second")
_AVAILABLE = ("memory_used_bytes", "memory_free_bytes")

_DCGM_49: dict[str, tuple[str, ...]] = {
    "gpu_utilization_ratio": ("DCGM_FI_DEV_GPU_UTIL_RATIO",),
    "memory_controller_utilization_ratio": ("DCGM_FI_DEV_MEMORY_UTIL_RATIO",),
    "encoder_utilization_ratio": ("DCGM_FI_DEV_ENC_UTIL_RATIO",),
    "decoder_utilization_ratio": ("DCGM_FI_DEV_DEC_UTIL_RATIO",),
    "memory_used_bytes": ("DCGM_FI_DEV_FB_USED_BYTES",),
    "memory_free_bytes": ("DCGM_FI_DEV_FB_FREE_BYTES",),
    "memory_total_bytes": ("DCGM_FI_DEV_FB_CAPACITY_BYTES",),
    "memory_reserved_bytes": ("DCGM_FI_DEV_FB_RESERVED_BYTES",),
    "power_watts": ("DCGM_FI_DEV_BOARD_POWER_WATTS",),
    "power_limit_watts": (
        "DCGM_FI_DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS",
        "DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS",
    ),
    "max_power_limit_watts": ("DCGM_FI_DEV_BOARD_POWER_LIMIT_MAX_WATTS",),
    "energy_joules_total": ("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL",),
    "temperature_celsius": ("DCGM_FI_DEV_GPU_TEMP_CELSIUS",),
    "memory_temperature_celsius": ("DCGM_FI_DEV_MEMORY_TEMP_CELSIUS",),
    "fan_speed_ratio": ("DCGM_FI_DEV_FAN_SPEED_RATIO",),
    "performance_state": ("DCGM_FI_DEV_GPU_PSTATE",),
    "sm_clock_hz": ("DCGM_FI_DEV_SM_CLOCK_HERTZ",),
    "memory_clock_hz": ("DCGM_FI_DEV_MEMORY_CLOCK_HERTZ",),
    "max_sm_clock_hz": ("DCGM_FI_DEV_SM_MAX_CLOCK_HERTZ",),
    "max_memory_clock_hz": ("DCGM_FI_DEV_MEMORY_MAX_CLOCK_HERTZ",),
    "clock_event_reasons": ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS",),
    "pcie_tx_bytes_per_second": ("DCGM_FI_PROF_PCIE_TX_BYTES",),
    "pcie_rx_bytes_per_second": ("DCGM_FI_PROF_PCIE_RX_BYTES",),
    "pcie_replays_total": ("DCGM_FI_DEV_PCIE_REPLAY_TOTAL",),
    "ecc_corrected_volatile_total": ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",),
    "ecc_uncorrected_volatile_total": ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",),
    "remapped_rows_correctable_total": ("DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL",),
    "remapped_rows_uncorrectable_total": ("DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL",),
    "row_remap_pending": ("DCGM_FI_DEV_ROW_REMAP_PENDING",),
    "row_remap_failure": ("DCGM_FI_DEV_ROW_REMAP_FAILED",),
    "vgpu_licensed": ("DCGM_FI_DEV_VGPU_LICENSE_STATUS",),
    "ecc_corrected_aggregate_total": ("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL",),
    "ecc_uncorrected_aggregate_total": ("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL",),
    "retired_pages_single_bit_total": ("DCGM_FI_DEV_PAGE_RETIRED_SBE_TOTAL",),
    "retired_pages_double_bit_total": ("DCGM_FI_DEV_PAGE_RETIRED_DBE_TOTAL",),
    "retired_pages_pending": ("DCGM_FI_DEV_PAGE_RETIRED_PENDING",),
    "nvlink_crc_errors_total": ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_TOTAL",),
    "nvlink_replay_errors_total": ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_TOTAL",),
    "nvlink_recovery_errors_total": ("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_TOTAL",),
    "power_violation_seconds_total": ("DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL",),
    "thermal_violation_seconds_total": ("DCGM_FI_DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL",),
    "graphics_engine_active_ratio": ("DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO",),
    "sm_active_ratio": ("DCGM_FI_PROF_SM_UTIL_RATIO",),
    "sm_occupancy_ratio": ("DCGM_FI_PROF_SM_OCCUPANCY_RATIO",),
    "tensor_active_ratio": ("DCGM_FI_PROF_TENSOR_UTIL_RATIO",),
    "dram_active_ratio": ("DCGM_FI_PROF_DRAM_UTIL_RATIO",),
    "fp64_active_ratio": ("DCGM_FI_PROF_FP64_UTIL_RATIO",),
    "fp32_active_ratio": ("DCGM_FI_PROF_FP32_UTIL_RATIO",),
    "fp16_active_ratio": ("DCGM_FI_PROF_FP16_UTIL_RATIO",),
    "nvlink_tx_bytes_per_second": ("DCGM_FI_PROF_NVLINK_TX_BYTES",),
    "nvlink_rx_bytes_per_second": ("DCGM_FI_PROF_NVLINK_RX_BYTES",),
}
"""The names of DCGM 4.7 (its dcgm_fields.h) and of dcgm-exporter 4.9. All are in base units: nothing is scaled."""

PROFILES: dict[ProfileName, Profile] = {
    "otel": _OTEL,
    "otel-suffixed": profile(
        "otel-suffixed",
        {
            key: CATALOGUE[key].suffixed
            or tuple([row._replace(name=with_unit_suffix(row.name, row.unit)) for row in rows])
            for key, rows in _OTEL.series.items()
        },
        tuple([ratio._replace(name=with_unit_suffix(ratio.name, ratio.unit)) for ratio in _OTEL.ratios]),
        labels="otel",
    ),
    "dcgm": profile(
        "dcgm",
        {key: metric.dcgm for key, metric in CATALOGUE.items() if metric.dcgm},
        (
            Ratio("DCGM_FI_DEV_FB_USED_PERCENT", ("memory_used_bytes",), _AVAILABLE, "ratio", _USED),
            Ratio("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", _NVLINKS, (), "megabytes_per_second", _NVLINK, scale=1e-6),
        ),
        last_xid="DCGM_FI_DEV_XID_ERRORS",
    ),
    "dcgm-4.9": profile(
        "dcgm-4.9",
        {key: tuple([Series(name) for name in names]) for key, names in _DCGM_49.items()},
        (
            Ratio("DCGM_FI_DEV_FB_USED_RATIO", ("memory_used_bytes",), _AVAILABLE, "ratio", _USED),
            Ratio("DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND", _NVLINKS, (), "bytes_per_second", _NVLINK),
        ),
        last_xid="DCGM_FI_DEV_XID_ERROR",
    ),
    "dcgm-legacy": profile(
        "dcgm-legacy",
        {key: metric.legacy for key, metric in CATALOGUE.items() if metric.legacy},
        (Ratio("dcgm_nvlink_bandwidth_total", _NVLINKS, (), "megabytes_per_second", _NVLINK, scale=1e-6),),
        last_xid="dcgm_xid_errors",
    ),
}
"""The profiles that ``--names`` picks from."""


def profile_names(text: str) -> tuple[ProfileName, ...]:
    """Parse a list such as ``otel,dcgm``: the names of profiles, in that order.

    :raises ValueError: a name is not known, or is there twice.
    """
    return tuple(names_of(text, PROFILES))  # type: ignore[arg-type] # all of them were found


def names_of(text: str, known: Collection[str]) -> list[str]:
    """The names of a list, separated by commas.

    :raises ValueError: a name is not known, or is there twice.
    """
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
    if len(set(names)) < len(names):
        raise ValueError(f"{text!r} has a name twice")
    return names
