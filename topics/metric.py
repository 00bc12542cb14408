"""The rows of the metric catalogue: a key, what it means, and the series it becomes in each naming profile.

The names of ``dcgm-4.9`` are in :mod:`topics.profiles`: in that profile nothing is scaled.

Source: nvml.h for the calls, fields and clock event bits; DCGM's field identifiers (dcgm_fields.h of 4.6) and
dcgm-exporter's default and 1.x counters for the profiles of its names; l9gpu's OpenTelemetry names, dots to underscores
and without unit suffixes, for ``otel``.
"""

from typing import Literal, NamedTuple

import msgspec

Kind = Literal["gauge", "counter", "untyped"]
"""A series' type in Prometheus. No metric of the catalogue is ``untyped``, but a file of counters may have some."""

Labels = tuple[tuple[str, str], ...]

_DECIMALS = 9
_WHOLE_FROM = 1e3  # the driver counts milli-, micro- and nanounits as whole numbers
_ALL_WHOLE = 2.0**52  # all floats from here on are whole

_PERCENT = 100.0
_MHZ = 1e-6
_MILLIJOULES = 1e3
_MICROSECONDS = 1e6
_NANOSECONDS = 1e9
_MIB = 1.0 / (1 << 20)
_KB = 1e-3

_SW_POWER_CAP = 0x04
_SYNC_BOOST = 0x10
_SW_THERMAL = 0x20
_HW_THERMAL = 0x40
"""Bits of clock_event_reasons, as nvml.h has them."""

SCALED: dict[tuple[str, float], str] = {
    ("ratio", _PERCENT): "percent",
    ("bytes", _MIB): "mebibytes",
    ("bytes_per_second", _KB): "kilobytes_per_second",
    ("joules", _MILLIJOULES): "millijoules",
    ("hertz", _MHZ): "megahertz",
    ("seconds", _NANOSECONDS): "nanoseconds",
    ("seconds", _MICROSECONDS): "microseconds",
}
"""The name of a unit after scaling."""


class Series(NamedTuple):
    """One series of a key in a profile: its name, its labels besides the device's, and how its value is computed.

    The value is ``value * scale``; with ``bits`` it is 1.0 if any of those bits is set, else 0.0. In a row of the table
    ``kind``, ``unit`` and ``help`` have their defaults: :func:`topics.profiles.profile` sets them.
    """

    name: str
    labels: Labels = ()
    scale: float = 1.0
    bits: int | None = None
    kind: Kind = "gauge"
    unit: str = ""
    help: str = ""

    def convert(self, value: float) -> float:
        """The series' value for a value of the key, rounded if it is scaled: 0.57 is 57.0 %, 8326.156 J 8326156 mJ."""
        if self.bits is not None:
            return 1.0 if int(value) & self.bits else 0.0
        if self.scale == 1.0:
            return float(value)
        scaled = value * self.scale
        if self.scale < _WHOLE_FROM:
            return round(scaled, _DECIMALS)
        return float(round(scaled)) if abs(scaled) < _ALL_WHOLE else scaled  # much faster than round(scaled, 0)


class Family(NamedTuple):
    """A name that several series of one device share.

    ``label`` distinguishes them, and ``keys`` are the keys that they are made of. ``total`` describes their sum. It is
    None if they can't be added up; then ``mean`` describes what their mean and maximum are.
    """

    label: str
    keys: tuple[str, ...]
    total: str | None = None
    mean: str | None = None


class Ratio(NamedTuple):
    """A series computed from several keys of one device: ``sum of numerators / sum of denominators * scale``.

    Without denominators it is ``sum of numerators * scale``.
    """

    name: str
    numerators: tuple[str, ...]
    denominators: tuple[str, ...]
    unit: str
    help: str
    scale: float = 1.0
    labels: Labels = ()
    kind: Kind = "gauge"

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it needs: if one of them is missing, there is no series."""
        return (*self.numerators, *self.denominators)

    def compute(self, numerator: float, denominator: float = 1.0) -> float | None:
        """The series' value for the sums of its numerators and denominators; None if the denominator is zero."""
        return numerator / denominator * self.scale if denominator else None


class Info(NamedTuple):
    """A series that is not computed from a device's metrics. ``labels`` are the names of its own labels.

    ``since_start``: it counts from the start of the node's producer, so it begins again with another ``run_id``.
    """

    name: str
    help: str
    unit: str = ""
    kind: Kind = "gauge"
    labels: tuple[str, ...] = ()
    since_start: bool = False


class Metric(msgspec.Struct, frozen=True):
    """One row of the table: a key in base units, and its series in each profile; the first of them is the value itself.

    ``mig``: a GPU in MIG mode and its MIG devices may both have the metric, and the GPU's value includes theirs.
    """

    key: str
    unit: str
    help: str
    nvml: str
    otel: tuple[Series, ...]
    dcgm: tuple[Series, ...] = ()
    legacy: tuple[Series, ...] = ()
    suffixed: tuple[Series, ...] = ()
    """Its series in ``otel-suffixed``, if they are not just those of ``otel`` with the unit at the end."""
    mig: bool = False

    @property
    def kind(self) -> Kind:
        """The metric's type in Prometheus."""
        return "counter" if self.key.endswith("_total") else "gauge"


def _labels(**labels: str) -> Labels:
    return tuple(sorted(labels.items()))


_NVLINK = _labels(gpu_interconnect_type="nvlink")


ROWS: tuple[Metric, ...] = (
    # -- utilization
    Metric("gpu_utilization_ratio", "ratio",
           "Share of the last sample period (1/6 s to 1 s) in which at least one kernel ran.",
           "nvmlDeviceGetUtilizationRates, gpu", otel=(Series("gpu_utilization", _labels(gpu_task_type="compute")),),
           dcgm=(Series("DCGM_FI_DEV_GPU_UTIL", scale=_PERCENT),),
           legacy=(Series("dcgm_gpu_utilization", scale=_PERCENT),)),
    Metric("memory_controller_utilization_ratio", "ratio",
           "Share of the last sample period in which device memory was read or written.",
           "nvmlDeviceGetUtilizationRates, memory",
           otel=(Series("gpu_memory_utilization", _labels(gpu_task_type="memory_controller")),),
           dcgm=(Series("DCGM_FI_DEV_MEM_COPY_UTIL", scale=_PERCENT),),
           legacy=(Series("dcgm_mem_copy_utilization", scale=_PERCENT),)),
    Metric("encoder_utilization_ratio", "ratio", "Share of the sample period in which the video encoder was busy.",
           "nvmlDeviceGetEncoderUtilization",
           otel=(Series("gpu_encode_utilization", _labels(gpu_task_type="encoder")),),
           dcgm=(Series("DCGM_FI_DEV_ENC_UTIL", scale=_PERCENT),),
           legacy=(Series("dcgm_enc_utilization", scale=_PERCENT),)),
    Metric("decoder_utilization_ratio", "ratio", "Share of the sample period in which the video decoder was busy.",
           "nvmlDeviceGetDecoderUtilization",
           otel=(Series("gpu_decode_utilization", _labels(gpu_task_type="decoder")),),
           dcgm=(Series("DCGM_FI_DEV_DEC_UTIL", scale=_PERCENT),),
           legacy=(Series("dcgm_dec_utilization", scale=_PERCENT),)),
    # -- memory
    Metric("memory_used_bytes", "bytes", "Device memory in use, without what is reserved.",
           "nvmlDeviceGetMemoryInfo_v2, used", otel=(Series("gpu_memory_used"),),
           dcgm=(Series("DCGM_FI_DEV_FB_USED", scale=_MIB),), legacy=(Series("dcgm_fb_used", scale=_MIB),), mig=True),
    Metric("memory_free_bytes", "bytes", "Device memory that is free.",
           "nvmlDeviceGetMemoryInfo_v2, free", otel=(Series("gpu_memory_free"),),
           dcgm=(Series("DCGM_FI_DEV_FB_FREE", scale=_MIB),), legacy=(Series("dcgm_fb_free", scale=_MIB),), mig=True),
    Metric("memory_total_bytes", "bytes", "Device memory in all: used, free and reserved.",
           "nvmlDeviceGetMemoryInfo_v2, total", otel=(Series("gpu_memory_total"),),
           dcgm=(Series("DCGM_FI_DEV_FB_TOTAL", scale=_MIB),), legacy=(Series("dcgm_fb_total", scale=_MIB),), mig=True),
    Metric("memory_reserved_bytes", "bytes", "Device memory that the driver and firmware keep for themselves.",
           "nvmlDeviceGetMemoryInfo_v2, reserved", otel=(Series("gpu_memory_reserved"),),
           dcgm=(Series("DCGM_FI_DEV_FB_RESERVED", scale=_MIB),), mig=True),
    # -- power, temperature and fan
    Metric("power_watts", "watts", "Power that the device draws.",
           "nvmlDeviceGetPowerUsage", otel=(Series("gpu_power_draw"),),
           dcgm=(Series("DCGM_FI_DEV_POWER_USAGE"),), legacy=(Series("dcgm_power_usage"),)),
    Metric("power_limit_watts", "watts", "Power limit in force.",
           "nvmlDeviceGetEnforcedPowerLimit", otel=(Series("gpu_power_limit"),),
           dcgm=(Series("DCGM_FI_DEV_POWER_MGMT_LIMIT"), Series("DCGM_FI_DEV_ENFORCED_POWER_LIMIT"))),
    Metric("max_power_limit_watts", "watts", "Highest power limit that can be set.",
           "nvmlDeviceGetPowerManagementLimitConstraints, maximum", otel=(Series("gpu_max_power_limit"),),
           dcgm=(Series("DCGM_FI_DEV_POWER_MGMT_LIMIT_MAX"),)),
    Metric("energy_joules_total", "joules", "Energy since the driver was loaded.",
           "nvmlDeviceGetTotalEnergyConsumption", otel=(Series("gpu_energy_consumption", scale=_MILLIJOULES),),
           dcgm=(Series("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", scale=_MILLIJOULES),),
           legacy=(Series("dcgm_total_energy_consumption", scale=_MILLIJOULES),)),
    Metric("temperature_celsius", "celsius", "Temperature of the GPU.",
           "nvmlDeviceGetTemperatureV, NVML_TEMPERATURE_GPU",
           otel=(Series("gpu_temperature", _labels(gpu_temperature_sensor="edge")),),
           dcgm=(Series("DCGM_FI_DEV_GPU_TEMP"),), legacy=(Series("dcgm_gpu_temp"),)),
    Metric("memory_temperature_celsius", "celsius", "Temperature of the device memory.",
           "field NVML_FI_DEV_MEMORY_TEMP", otel=(Series("gpu_memory_temperature"),),
           dcgm=(Series("DCGM_FI_DEV_MEMORY_TEMP"),), legacy=(Series("dcgm_memory_temp"),)),
    Metric("fan_speed_ratio", "ratio", "Speed that the fan is set to, of its maximum; may exceed 1.",
           "nvmlDeviceGetFanSpeed", otel=(Series("gpu_fan_speed"),),
           dcgm=(Series("DCGM_FI_DEV_FAN_SPEED", scale=_PERCENT),)),
    Metric("performance_state", "state", "Performance state: 0 is the fastest, 15 the slowest.",
           "nvmlDeviceGetPerformanceState", otel=(Series("gpu_power_state"),), dcgm=(Series("DCGM_FI_DEV_PSTATE"),)),
    # -- clocks
    Metric("graphics_clock_hz", "hertz", "Clock of the graphics engine.",
           "nvmlDeviceGetClockInfo, NVML_CLOCK_GRAPHICS",
           otel=(Series("gpu_clock_frequency", _labels(gpu_clock_type="graphics"), _MHZ),)),
    Metric("sm_clock_hz", "hertz", "Clock of the streaming multiprocessors.",
           "nvmlDeviceGetClockInfo, NVML_CLOCK_SM",
           otel=(Series("gpu_clock_frequency", _labels(gpu_clock_type="sm"), _MHZ),),
           dcgm=(Series("DCGM_FI_DEV_SM_CLOCK", scale=_MHZ),), legacy=(Series("dcgm_sm_clock", scale=_MHZ),)),
    Metric("memory_clock_hz", "hertz", "Clock of the device memory.",
           "nvmlDeviceGetClockInfo, NVML_CLOCK_MEM", otel=(Series("gpu_memory_clock_frequency", scale=_MHZ),),
           suffixed=(Series("gpu_clock_frequency_MHz", _labels(gpu_clock_type="memory"), _MHZ),),
           dcgm=(Series("DCGM_FI_DEV_MEM_CLOCK", scale=_MHZ),), legacy=(Series("dcgm_memory_clock", scale=_MHZ),)),
    Metric("max_sm_clock_hz", "hertz", "Highest clock that the streaming multiprocessors can have.",
           "nvmlDeviceGetMaxClockInfo, NVML_CLOCK_SM", otel=(Series("gpu_max_clock_frequency", scale=_MHZ),),
           dcgm=(Series("DCGM_FI_DEV_MAX_SM_CLOCK", scale=_MHZ),)),
    Metric("max_memory_clock_hz", "hertz", "Highest clock that the device memory can have.",
           "nvmlDeviceGetMaxClockInfo, NVML_CLOCK_MEM", otel=(Series("gpu_max_memory_clock_frequency", scale=_MHZ),),
           dcgm=(Series("DCGM_FI_DEV_MAX_MEM_CLOCK", scale=_MHZ),)),
    Metric("clock_event_reasons", "bitmask", "Why the clocks are below what was asked for, as a bitmask.",
           "nvmlDeviceGetCurrentClocksEventReasons",
           otel=(Series("gpu_clock_event_reasons"),
                 Series("gpu_throttle_reason", _labels(gpu_throttle_cause="power_software"), bits=_SW_POWER_CAP),
                 Series("gpu_throttle_reason", _labels(gpu_throttle_cause="temp_software"), bits=_SW_THERMAL),
                 Series("gpu_throttle_reason", _labels(gpu_throttle_cause="temp_hardware"), bits=_HW_THERMAL),
                 Series("gpu_throttle_reason", _labels(gpu_throttle_cause="syncboost"), bits=_SYNC_BOOST)),
           dcgm=(Series("DCGM_FI_DEV_CLOCKS_EVENT_REASONS"), Series("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"))),
    # -- PCIe
    Metric("pcie_tx_bytes_per_second", "bytes_per_second", "What the device sends over PCIe.",
           "GPM `NVML_GPM_METRIC_PCIE_TX_PER_SEC`; else field NVML_FI_DEV_PCIE_COUNT_TX_BYTES, per second",
           otel=(Series("gpu_pcie_throughput",
                        _labels(gpu_interconnect_type="pcie", gpu_interconnect_direction="transmit")),),
           dcgm=(Series("DCGM_FI_PROF_PCIE_TX_BYTES"), Series("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", scale=_KB)),
           legacy=(Series("dcgm_fi_prof_pcie_tx_bytes"), Series("dcgm_pcie_tx_throughput", scale=_KB)), mig=True),
    Metric("pcie_rx_bytes_per_second", "bytes_per_second", "What the device receives over PCIe.",
           "GPM `NVML_GPM_METRIC_PCIE_RX_PER_SEC`; else field NVML_FI_DEV_PCIE_COUNT_RX_BYTES, per second",
           otel=(Series("gpu_pcie_throughput",
                        _labels(gpu_interconnect_type="pcie", gpu_interconnect_direction="receive")),),
           dcgm=(Series("DCGM_FI_PROF_PCIE_RX_BYTES"), Series("DCGM_FI_DEV_PCIE_RX_THROUGHPUT", scale=_KB)),
           legacy=(Series("dcgm_fi_prof_pcie_rx_bytes"), Series("dcgm_pcie_rx_throughput", scale=_KB)), mig=True),
    Metric("pcie_replays_total", "replays", "PCIe packets that were sent again, since the GPU was reset.",
           "nvmlDeviceGetPcieReplayCounter", otel=(Series("gpu_pcie_replay_count"),),
           dcgm=(Series("DCGM_FI_DEV_PCIE_REPLAY_COUNTER"),), legacy=(Series("dcgm_pcie_replay_counter"),)),
    # -- faults
    Metric("ecc_corrected_volatile_total", "errors", "Memory errors corrected since the driver was loaded.",
           "nvmlDeviceGetTotalEccErrors, corrected, volatile",
           otel=(Series("gpu_ecc_errors", _labels(gpu_ecc_count_type="volatile", gpu_ecc_error_type="correctable")),),
           dcgm=(Series("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"),), legacy=(Series("dcgm_ecc_sbe_volatile_total"),)),
    Metric("ecc_uncorrected_volatile_total", "errors",
           "Memory errors that could not be corrected since the driver was loaded.",
           "nvmlDeviceGetTotalEccErrors, uncorrected, volatile",
           otel=(Series("gpu_ecc_errors", _labels(gpu_ecc_count_type="volatile", gpu_ecc_error_type="uncorrectable")),),
           dcgm=(Series("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"),), legacy=(Series("dcgm_ecc_dbe_volatile_total"),)),
    Metric("remapped_rows_correctable_total", "rows",
           "Memory rows remapped for correctable errors in the GPU's life; never reset.",
           "nvmlDeviceGetRemappedRows, corrected",
           otel=(Series("gpu_row_remap_count", _labels(gpu_ecc_error_type="correctable")),),
           dcgm=(Series("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"),)),
    Metric("remapped_rows_uncorrectable_total", "rows",
           "Memory rows remapped for uncorrectable errors in the GPU's life; never reset.",
           "nvmlDeviceGetRemappedRows, uncorrected",
           otel=(Series("gpu_row_remap_count", _labels(gpu_ecc_error_type="uncorrectable")),),
           dcgm=(Series("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"),)),
    Metric("row_remap_pending", "bool", "1 if a row is to be remapped at the next reset.",
           "nvmlDeviceGetRemappedRows, pending", otel=(Series("gpu_row_remap_pending"),),
           dcgm=(Series("DCGM_FI_DEV_ROW_REMAP_PENDING"),)),
    Metric("row_remap_failure", "bool", "1 if a row could not be remapped.",
           "nvmlDeviceGetRemappedRows, failure", otel=(Series("gpu_row_remap_failure"),),
           dcgm=(Series("DCGM_FI_DEV_ROW_REMAP_FAILURE"),)),
    Metric("vgpu_licensed", "bool", "1 if a feature of NVIDIA vGPU software is licensed, 0 if none is.",
           "nvmlDeviceGetGridLicensableFeatures_v4, the features' states", otel=(Series("gpu_vgpu_licensed"),),
           dcgm=(Series("DCGM_FI_DEV_VGPU_LICENSE_STATUS"),)),
    # -- counted by the driver
    Metric("ecc_corrected_aggregate_total", "errors",
           "Memory errors corrected in the GPU's life; they are only cleared by hand.",
           "nvmlDeviceGetTotalEccErrors, corrected, aggregate",
           otel=(Series("gpu_ecc_aggregate_errors", _labels(gpu_ecc_error_type="correctable")),),
           dcgm=(Series("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL"),), legacy=(Series("dcgm_ecc_sbe_aggregate_total"),)),
    Metric("ecc_uncorrected_aggregate_total", "errors",
           "Memory errors that could not be corrected in the GPU's life; they are only cleared by hand.",
           "nvmlDeviceGetTotalEccErrors, uncorrected, aggregate",
           otel=(Series("gpu_ecc_aggregate_errors", _labels(gpu_ecc_error_type="uncorrectable")),),
           dcgm=(Series("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL"),), legacy=(Series("dcgm_ecc_dbe_aggregate_total"),)),
    Metric("retired_pages_single_bit_total", "pages",
           "Memory pages retired for several single-bit errors, never reset; of GPUs before Ampere.",
           "field NVML_FI_DEV_RETIRED_SBE",
           otel=(Series("gpu_retired_pages", _labels(gpu_ecc_error_type="correctable")),),
           dcgm=(Series("DCGM_FI_DEV_RETIRED_SBE"),), legacy=(Series("dcgm_retired_pages_sbe"),)),
    Metric("retired_pages_double_bit_total", "pages",
           "Memory pages retired for a double-bit error, never reset; of GPUs before Ampere.",
           "field NVML_FI_DEV_RETIRED_DBE",
           otel=(Series("gpu_retired_pages", _labels(gpu_ecc_error_type="uncorrectable")),),
           dcgm=(Series("DCGM_FI_DEV_RETIRED_DBE"),), legacy=(Series("dcgm_retired_pages_dbe"),)),
    Metric("retired_pages_pending", "bool", "1 if pages are to be retired at the next reset.",
           "field NVML_FI_DEV_RETIRED_PENDING", otel=(Series("gpu_retired_pages_pending"),),
           dcgm=(Series("DCGM_FI_DEV_RETIRED_PENDING"),), legacy=(Series("dcgm_retired_pages_pending"),)),
    Metric("nvlink_crc_errors_total", "errors",
           "NVLink packets with a wrong checksum, of all links, since the GPU was reset; not reported by Blackwell"
           " and later.",
           "field NVML_FI_DEV_NVLINK_ERROR_DL_CRC, of each link (before Hopper a total)",
           otel=(Series("gpu_interconnect_crc_errors", _NVLINK),),
           dcgm=(Series("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),),
           legacy=(Series("dcgm_nvlink_flit_crc_error_count_total"),)),
    Metric("nvlink_replay_errors_total", "errors",
           "NVLink packets that were sent again, of all links, since the GPU was reset; not reported by Blackwell"
           " and later.",
           "field NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, of each link (before Hopper a total)",
           otel=(Series("gpu_interconnect_replays", _NVLINK),),
           dcgm=(Series("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"),),
           legacy=(Series("dcgm_nvlink_replay_error_count_total"),)),
    Metric("nvlink_recovery_errors_total", "errors",
           "Times that an NVLink was trained again after errors, of all links, since the GPU was reset.",
           "field NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY, of each link (before Hopper a total)",
           otel=(Series("gpu_interconnect_recoveries", _NVLINK),),
           dcgm=(Series("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),),
           legacy=(Series("dcgm_nvlink_recovery_error_count_total"),)),
    Metric("power_violation_seconds_total", "seconds",
           "Time for which the power limit kept the clocks down, since the driver was loaded.",
           "field NVML_FI_DEV_PERF_POLICY_POWER",
           otel=(Series("gpu_violation_time", _labels(gpu_violation_cause="power")),),
           dcgm=(Series("DCGM_FI_DEV_POWER_VIOLATION", scale=_NANOSECONDS),),
           legacy=(Series("dcgm_power_violation", scale=_MICROSECONDS),)),
    Metric("thermal_violation_seconds_total", "seconds",
           "Time for which the temperature kept the clocks down, since the driver was loaded.",
           "field NVML_FI_DEV_PERF_POLICY_THERMAL",
           otel=(Series("gpu_violation_time", _labels(gpu_violation_cause="thermal")),),
           dcgm=(Series("DCGM_FI_DEV_THERMAL_VIOLATION", scale=_NANOSECONDS),),
           legacy=(Series("dcgm_thermal_violation", scale=_MICROSECONDS),)),
    Metric("sync_boost_violation_seconds_total", "seconds",
           "Time for which the slowest GPU of its sync boost group kept the clocks down, since the driver was loaded.",
           "field NVML_FI_DEV_PERF_POLICY_SYNC_BOOST",
           otel=(Series("gpu_violation_time", _labels(gpu_violation_cause="sync_boost")),),
           dcgm=(Series("DCGM_FI_DEV_SYNC_BOOST_VIOLATION", scale=_NANOSECONDS),),
           legacy=(Series("dcgm_sync_boost_violation", scale=_MICROSECONDS),)),
    Metric("board_limit_violation_seconds_total", "seconds",
           "Time for which the board's limits kept the clocks down, since the driver was loaded.",
           "field NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT",
           otel=(Series("gpu_violation_time", _labels(gpu_violation_cause="board_limit")),),
           dcgm=(Series("DCGM_FI_DEV_BOARD_LIMIT_VIOLATION", scale=_NANOSECONDS),),
           legacy=(Series("dcgm_board_limit_violation", scale=_MICROSECONDS),)),
    Metric("low_utilization_violation_seconds_total", "seconds",
           "Time for which low utilization kept the clocks down, since the driver was loaded.",
           "field NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION",
           otel=(Series("gpu_violation_time", _labels(gpu_violation_cause="low_utilization")),),
           dcgm=(Series("DCGM_FI_DEV_LOW_UTIL_VIOLATION", scale=_NANOSECONDS),),
           legacy=(Series("dcgm_low_util_violation", scale=_MICROSECONDS),)),
    Metric("reliability_violation_seconds_total", "seconds",
           "Time for which the limits of reliable voltage kept the clocks down, since the driver was loaded.",
           "field NVML_FI_DEV_PERF_POLICY_RELIABILITY",
           otel=(Series("gpu_violation_time", _labels(gpu_violation_cause="reliability")),),
           dcgm=(Series("DCGM_FI_DEV_RELIABILITY_VIOLATION", scale=_NANOSECONDS),),
           legacy=(Series("dcgm_reliability_violation", scale=_MICROSECONDS),)),
    # -- the driver's own samples
    Metric("gpu_utilization_mean_ratio", "ratio",
           "Mean of the driver's own samples of utilization since the last tick.",
           "nvmlDeviceGetSamples, NVML_GPU_UTILIZATION_SAMPLES", otel=(Series("gpu_utilization_avg"),)),
    Metric("gpu_utilization_min_ratio", "ratio",
           "Smallest of the driver's own samples of utilization since the last tick.",
           "nvmlDeviceGetSamples, NVML_GPU_UTILIZATION_SAMPLES", otel=(Series("gpu_utilization_min"),)),
    Metric("gpu_utilization_max_ratio", "ratio",
           "Largest of the driver's own samples of utilization since the last tick.",
           "nvmlDeviceGetSamples, NVML_GPU_UTILIZATION_SAMPLES", otel=(Series("gpu_utilization_max"),)),
    Metric("power_mean_watts", "watts", "Mean of the driver's own samples of the power drawn since the last tick.",
           "nvmlDeviceGetSamples, NVML_TOTAL_POWER_SAMPLES", otel=(Series("gpu_power_draw_avg"),)),
    Metric("power_min_watts", "watts", "Smallest of the driver's own samples of the power drawn since the last tick.",
           "nvmlDeviceGetSamples, NVML_TOTAL_POWER_SAMPLES", otel=(Series("gpu_power_draw_min"),)),
    Metric("power_max_watts", "watts", "Largest of the driver's own samples of the power drawn since the last tick.",
           "nvmlDeviceGetSamples, NVML_TOTAL_POWER_SAMPLES", otel=(Series("gpu_power_draw_max"),)),
    # -- GPM: shares of the tick, from two samples of counters
    Metric("graphics_engine_active_ratio", "ratio",
           "Share of the time in which the graphics or compute engine was busy, over the tick; Hopper and later.",
           "GPM NVML_GPM_METRIC_GRAPHICS_UTIL", otel=(Series("gpu_gr_engine_active"),),
           dcgm=(Series("DCGM_FI_PROF_GR_ENGINE_ACTIVE"),), legacy=(Series("dcgm_fi_prof_gr_engine_active"),),
           mig=True),
    Metric("sm_active_ratio", "ratio",
           "Share of the streaming multiprocessors that were busy, over the tick; Hopper and later.",
           "GPM NVML_GPM_METRIC_SM_UTIL", otel=(Series("gpu_sm_active"),),
           dcgm=(Series("DCGM_FI_PROF_SM_ACTIVE"),), legacy=(Series("dcgm_fi_prof_sm_active"),), mig=True),
    Metric("sm_occupancy_ratio", "ratio",
           "Warps that were resident, of the most that there can be, over the tick; Hopper and later.",
           "GPM NVML_GPM_METRIC_SM_OCCUPANCY", otel=(Series("gpu_sm_occupancy"),),
           dcgm=(Series("DCGM_FI_PROF_SM_OCCUPANCY"),), legacy=(Series("dcgm_fi_prof_sm_occupancy"),), mig=True),
    Metric("tensor_active_ratio", "ratio",
           "Share of the time in which any tensor pipe was busy, over the tick; Hopper and later.",
           "GPM NVML_GPM_METRIC_ANY_TENSOR_UTIL", otel=(Series("gpu_pipe_tensor_active"),),
           dcgm=(Series("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),), legacy=(Series("dcgm_fi_prof_pipe_tensor_active"),),
           mig=True),
    Metric("dram_active_ratio", "ratio",
           "Bandwidth of the device memory that was used, of the most that there can be, over the tick; Hopper"
           " and later.",
           "GPM NVML_GPM_METRIC_DRAM_BW_UTIL", otel=(Series("gpu_dram_active"),),
           dcgm=(Series("DCGM_FI_PROF_DRAM_ACTIVE"),), legacy=(Series("dcgm_fi_prof_dram_active"),), mig=True),
    Metric("fp64_active_ratio", "ratio",
           "Share of the time in which the FP64 pipe was busy, tensors apart, over the tick; Hopper and later.",
           "GPM NVML_GPM_METRIC_FP64_UTIL", otel=(Series("gpu_pipe_fp64_active"),),
           dcgm=(Series("DCGM_FI_PROF_PIPE_FP64_ACTIVE"),), mig=True),
    Metric("fp32_active_ratio", "ratio",
           "Share of the time in which the FP32 pipe was busy, tensors apart, over the tick; Hopper and later.",
           "GPM NVML_GPM_METRIC_FP32_UTIL", otel=(Series("gpu_pipe_fp32_active"),),
           dcgm=(Series("DCGM_FI_PROF_PIPE_FP32_ACTIVE"),), mig=True),
    Metric("fp16_active_ratio", "ratio",
           "Share of the time in which the FP16 pipe was busy, tensors apart, over the tick; Hopper and later.",
           "GPM NVML_GPM_METRIC_FP16_UTIL", otel=(Series("gpu_pipe_fp16_active"),),
           dcgm=(Series("DCGM_FI_PROF_PIPE_FP16_ACTIVE"),), mig=True),
    Metric("nvlink_tx_bytes_per_second", "bytes_per_second",
           "What the device sends over all NVLinks, over the tick.",
           "GPM NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC; else field NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, per second",
           otel=(Series("gpu_interconnect_throughput", _labels(gpu_interconnect_direction="transmit") + _NVLINK),),
           dcgm=(Series("DCGM_FI_PROF_NVLINK_TX_BYTES"),), mig=True),
    Metric("nvlink_rx_bytes_per_second", "bytes_per_second",
           "What the device receives over all NVLinks, over the tick.",
           "GPM NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC; else field NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, per second",
           otel=(Series("gpu_interconnect_throughput", _labels(gpu_interconnect_direction="receive") + _NVLINK),),
           dcgm=(Series("DCGM_FI_PROF_NVLINK_RX_BYTES"),), mig=True),
)  # fmt: skip
"""Every row, in the order of the docs."""
