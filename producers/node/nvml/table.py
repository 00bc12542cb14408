"""The NVML sources of each key of the catalogue, and the conversion of NVML's numbers to the catalogue's units.

In: raw numbers and their widths in bits. Out: numbers in base units, within limits; None if there is none. Pure.

A row names its sources in order of preference, and the first that the device supports is used. The source that the
catalogue names comes first. PCIe throughput comes from GPM or byte counters, because nvmlDeviceGetPcieThroughput takes
20 ms for each direction. GPM comes first: the driver keeps those counters in 32 bits, which a busy link fills several
times a second.

Source: nvml.h for calls, fields and units; it writes "not available" as all ones of the type. DCGM, whose numbers may
come through some layers, writes it as 2^31 - 16 and 2^63 - 16 (and the three numbers above each); some calls as -1. The
limits are far above any device, and far below any garbage. No device has a memory of 0 bytes, or a power limit of 0 W.
"""

from typing import Any, Final, NamedTuple


class Scale(NamedTuple):
    """Converts a raw number to base units: multiply by ``times``, then divide by ``per`` (93 % is exactly 0.93)."""

    times: int = 1
    per: int = 1


class Limits(NamedTuple):
    """The smallest and the largest possible value, in base units. A measured value may exceed ``high`` by at most
    ``slack``, and then counts as ``high``."""

    low: float
    high: float
    slack: float = 0.0


class Call(NamedTuple):
    """One of pynvml's functions, and its arguments after the handle."""

    name: str
    arguments: tuple[Any, ...] = ()


class Field(NamedTuple):
    """A field of nvmlDeviceGetFieldValues, which reads many fields in one call. ``scope``: a link or all links, if the
    field is not of the whole device."""

    number: int
    name: str
    scope: int | None = None

    @property
    def field_id(self) -> int | tuple[int, int]:
        return self.number if self.scope is None else (self.number, self.scope)


class GpmMetric(NamedTuple):
    """A metric of GPM, which reads many metrics in one call."""

    number: int
    name: str


class Sampled(NamedTuple):
    """A kind of samples that the driver takes by itself."""

    number: int
    name: str


class LinkErrors(NamedTuple):
    """Errors that each NVLink counts, in the field ``number``, or on newer GPUs in ``newer_number``."""

    number: int
    name: str
    newer_number: int | None = None


class ValueSource(NamedTuple):
    """Where a value comes from: the question, the part of its answer, the conversion to base units, and the width in
    ``bits`` (a field's answer has its own).

    ``unknown`` is the number that means "the device does not know". ``rate``: the answer is a counter, and the value is
    its increase per second.
    """

    question: Call | Field | GpmMetric | Sampled | LinkErrors
    part: str | int | None = None
    scale: Scale = Scale()
    bits: int = 32
    unknown: int | None = None
    rate: bool = False


class Row(NamedTuple):
    """A key of the catalogue, its limits, and its sources."""

    key: str
    limits: Limits
    sources: tuple[ValueSource, ...]


MEMORY_V2: Final = 0x02000028  # nvmlMemory_v2: the size of its structure, and its version
_LARGEST_MEMORY_BYTES: Final = 1 << 44
ALL_LINKS: Final = 0xFFFFFFFF

AS_IS = Scale()
PERCENT = Scale(per=100)
_MILLI = Scale(per=1000)
_NANO = Scale(per=1_000_000_000)
_MHZ = Scale(times=1_000_000)
_KIB = Scale(times=1 << 10)
_MIB = Scale(times=1 << 20)

RATIO = Limits(0, 1)
_ACTIVITY = Limits(0, 1, slack=0.02)
BYTES = Limits(0, _LARGEST_MEMORY_BYTES)
_MEMORY_SIZE = Limits(1, _LARGEST_MEMORY_BYTES)
_WATTS = Limits(0, 20_000)
_POWER_LIMIT = Limits(0.001, 20_000)
_JOULES = Limits(0, 1e14)
_CELSIUS = Limits(-60, 200)
_HERTZ = Limits(0, 20e9)
_FAN = Limits(0, 3)
_STATE = Limits(0, 15)
_BITMASK = Limits(0, (1 << 31) - 1)
_PCIE = Limits(0, 1e12)
_NVLINK = Limits(0, 1e14)
_COUNT = Limits(0, 1e12)
_ROWS = Limits(0, 1_000_000)
_FLAG = Limits(0, 1)
_SECONDS = Limits(0, 1e10)

_RATES = Call("nvmlDeviceGetUtilizationRates")
_MEMORY = Call("nvmlDeviceGetMemoryInfo", (MEMORY_V2,))
_MEMORY_V1 = Call("nvmlDeviceGetMemoryInfo")
_REMAPPED = Call("nvmlDeviceGetRemappedRows")
_ECC = "nvmlDeviceGetTotalEccErrors"
_SAMPLED_UTILIZATION = Sampled(1, "NVML_GPU_UTILIZATION_SAMPLES")
_SAMPLED_POWER = Sampled(0, "NVML_TOTAL_POWER_SAMPLES")


def _row(key: str, limits: Limits, *sources: ValueSource) -> Row:
    return Row(key, limits, sources)


def _call(function: str, *arguments: int, **more: Any) -> ValueSource:
    return ValueSource(Call(function, arguments), **more)


def _field(number: int, name: str, scale: Scale = AS_IS, *, rate: bool = False) -> ValueSource:
    return ValueSource(Field(number, f"NVML_FI_DEV_{name}"), scale=scale, rate=rate)


def _all_links(number: int, name: str) -> ValueSource:
    """The bytes that all NVLinks of the device carry per second."""
    return ValueSource(Field(number, f"NVML_FI_DEV_NVLINK_{name}", ALL_LINKS), scale=_KIB, rate=True)


def _gpm(number: int, name: str, scale: Scale = PERCENT) -> ValueSource:
    return ValueSource(GpmMetric(number, f"NVML_GPM_METRIC_{name}"), scale=scale)


def _link_errors(number: int, name: str, newer_number: int | None = None) -> ValueSource:
    return ValueSource(LinkErrors(number, f"NVML_FI_DEV_NVLINK_ERROR_DL_{name}", newer_number))


def _memory(part: str) -> tuple[ValueSource, ...]:
    """A part of the memory. Older drivers count the reserved memory as used."""
    sources = (ValueSource(_MEMORY, part, bits=64),)
    return sources if part == "reserved" else (*sources, ValueSource(_MEMORY_V1, part, bits=64))


TABLE: tuple[Row, ...] = (
    _row("gpu_utilization_ratio", RATIO, ValueSource(_RATES, "gpu", PERCENT)),
    _row("memory_controller_utilization_ratio", RATIO, ValueSource(_RATES, "memory", PERCENT)),
    _row("encoder_utilization_ratio", RATIO, _call("nvmlDeviceGetEncoderUtilization", part=0, scale=PERCENT)),
    _row("decoder_utilization_ratio", RATIO, _call("nvmlDeviceGetDecoderUtilization", part=0, scale=PERCENT)),
    _row("memory_used_bytes", BYTES, *_memory("used")),
    _row("memory_free_bytes", BYTES, *_memory("free")),
    _row("memory_total_bytes", _MEMORY_SIZE, *_memory("total")),
    _row("memory_reserved_bytes", BYTES, *_memory("reserved")),
    _row("power_watts", _WATTS, _call("nvmlDeviceGetPowerUsage", scale=_MILLI), _field(185, "POWER_AVERAGE", _MILLI)),
    _row("power_limit_watts", _POWER_LIMIT, _call("nvmlDeviceGetEnforcedPowerLimit", scale=_MILLI),
         _field(190, "POWER_CURRENT_LIMIT", _MILLI)),
    _row("max_power_limit_watts", _POWER_LIMIT,
         _call("nvmlDeviceGetPowerManagementLimitConstraints", part=1, scale=_MILLI),
         _field(188, "POWER_MAX_LIMIT", _MILLI)),
    _row("energy_joules_total", _JOULES, _call("nvmlDeviceGetTotalEnergyConsumption", scale=_MILLI, bits=64),
         _field(83, "TOTAL_ENERGY_CONSUMPTION", _MILLI)),
    _row("temperature_celsius", _CELSIUS, _call("nvmlDeviceGetTemperatureV", 0), _call("nvmlDeviceGetTemperature", 0)),
    _row("memory_temperature_celsius", _CELSIUS, _field(82, "MEMORY_TEMP")),
    _row("fan_speed_ratio", _FAN, _call("nvmlDeviceGetFanSpeed", scale=PERCENT)),
    _row("performance_state", _STATE, _call("nvmlDeviceGetPerformanceState", unknown=32)),
    _row("graphics_clock_hz", _HERTZ, _call("nvmlDeviceGetClockInfo", 0, scale=_MHZ)),
    _row("sm_clock_hz", _HERTZ, _call("nvmlDeviceGetClockInfo", 1, scale=_MHZ)),
    _row("memory_clock_hz", _HERTZ, _call("nvmlDeviceGetClockInfo", 2, scale=_MHZ)),
    _row("max_sm_clock_hz", _HERTZ, _call("nvmlDeviceGetMaxClockInfo", 1, scale=_MHZ)),
    _row("max_memory_clock_hz", _HERTZ, _call("nvmlDeviceGetMaxClockInfo", 2, scale=_MHZ)),
    _row("clock_event_reasons", _BITMASK, _call("nvmlDeviceGetCurrentClocksEventReasons", bits=64),
         _call("nvmlDeviceGetCurrentClocksThrottleReasons", bits=64)),
    _row("pcie_tx_bytes_per_second", _PCIE, _gpm(20, "PCIE_TX_PER_SEC", _MIB),
         _field(197, "PCIE_COUNT_TX_BYTES", rate=True)),
    _row("pcie_rx_bytes_per_second", _PCIE, _gpm(21, "PCIE_RX_PER_SEC", _MIB),
         _field(198, "PCIE_COUNT_RX_BYTES", rate=True)),
    _row("pcie_replays_total", _COUNT, _call("nvmlDeviceGetPcieReplayCounter"), _field(94, "PCIE_REPLAY_COUNTER")),
    _row("ecc_corrected_volatile_total", _COUNT, _call(_ECC, 0, 0, bits=64), _field(3, "ECC_SBE_VOL_TOTAL")),
    _row("ecc_uncorrected_volatile_total", _COUNT, _call(_ECC, 1, 0, bits=64), _field(4, "ECC_DBE_VOL_TOTAL")),
    _row("remapped_rows_correctable_total", _ROWS, ValueSource(_REMAPPED, 0), _field(142, "REMAPPED_COR")),
    _row("remapped_rows_uncorrectable_total", _ROWS, ValueSource(_REMAPPED, 1), _field(143, "REMAPPED_UNC")),
    _row("row_remap_pending", _FLAG, ValueSource(_REMAPPED, 2), _field(144, "REMAPPED_PENDING")),
    _row("row_remap_failure", _FLAG, ValueSource(_REMAPPED, 3), _field(145, "REMAPPED_FAILURE")),
    _row("vgpu_licensed", _FLAG, _call("nvmlDeviceGetGridLicensableFeatures")),
    _row("ecc_corrected_aggregate_total", _COUNT, _call(_ECC, 0, 1, bits=64), _field(5, "ECC_SBE_AGG_TOTAL")),
    _row("ecc_uncorrected_aggregate_total", _COUNT, _call(_ECC, 1, 1, bits=64), _field(6, "ECC_DBE_AGG_TOTAL")),
    _row("retired_pages_single_bit_total", _ROWS, _field(29, "RETIRED_SBE")),
    _row("retired_pages_double_bit_total", _ROWS, _field(30, "RETIRED_DBE")),
    _row("retired_pages_pending", _FLAG, _field(31, "RETIRED_PENDING")),
    _row("nvlink_crc_errors_total", _COUNT, _link_errors(163, "CRC"), _field(38, "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL")),
    _row("nvlink_replay_errors_total", _COUNT, _link_errors(161, "REPLAY"),
         _field(52, "NVLINK_REPLAY_ERROR_COUNT_TOTAL")),
    _row("nvlink_recovery_errors_total", _COUNT, _link_errors(162, "RECOVERY", newer_number=215),
         _field(59, "NVLINK_RECOVERY_ERROR_COUNT_TOTAL")),
    _row("power_violation_seconds_total", _SECONDS, _field(74, "PERF_POLICY_POWER", _NANO)),
    _row("thermal_violation_seconds_total", _SECONDS, _field(75, "PERF_POLICY_THERMAL", _NANO)),
    _row("sync_boost_violation_seconds_total", _SECONDS, _field(76, "PERF_POLICY_SYNC_BOOST", _NANO)),
    _row("board_limit_violation_seconds_total", _SECONDS, _field(77, "PERF_POLICY_BOARD_LIMIT", _NANO)),
    _row("low_utilization_violation_seconds_total", _SECONDS, _field(78, "PERF_POLICY_LOW_UTILIZATION", _NANO)),
    _row("reliability_violation_seconds_total", _SECONDS, _field(79, "PERF_POLICY_RELIABILITY", _NANO)),
    _row("gpu_utilization_mean_ratio", RATIO, ValueSource(_SAMPLED_UTILIZATION, "mean", PERCENT)),
    _row("gpu_utilization_min_ratio", RATIO, ValueSource(_SAMPLED_UTILIZATION, "minimum", PERCENT)),
    _row("gpu_utilization_max_ratio", RATIO, ValueSource(_SAMPLED_UTILIZATION, "maximum", PERCENT)),
    _row("power_mean_watts", _WATTS, ValueSource(_SAMPLED_POWER, "mean", _MILLI)),
    _row("power_min_watts", _WATTS, ValueSource(_SAMPLED_POWER, "minimum", _MILLI)),
    _row("power_max_watts", _WATTS, ValueSource(_SAMPLED_POWER, "maximum", _MILLI)),
    _row("graphics_engine_active_ratio", _ACTIVITY, _gpm(1, "GRAPHICS_UTIL")),
    _row("sm_active_ratio", _ACTIVITY, _gpm(2, "SM_UTIL")),
    _row("sm_occupancy_ratio", _ACTIVITY, _gpm(3, "SM_OCCUPANCY")),
    _row("tensor_active_ratio", _ACTIVITY, _gpm(5, "ANY_TENSOR_UTIL")),
    _row("dram_active_ratio", _ACTIVITY, _gpm(10, "DRAM_BW_UTIL")),
    _row("fp64_active_ratio", _ACTIVITY, _gpm(11, "FP64_UTIL")),
    _row("fp32_active_ratio", _ACTIVITY, _gpm(12, "FP32_UTIL")),
    _row("fp16_active_ratio", _ACTIVITY, _gpm(13, "FP16_UTIL")),
    _row("nvlink_tx_bytes_per_second", _NVLINK, _gpm(61, "NVLINK_TOTAL_TX_PER_SEC", _MIB),
         _all_links(138, "THROUGHPUT_DATA_TX")),
    _row("nvlink_rx_bytes_per_second", _NVLINK, _gpm(60, "NVLINK_TOTAL_RX_PER_SEC", _MIB),
         _all_links(139, "THROUGHPUT_DATA_RX")),
)  # fmt: skip
"""Every key of the catalogue. The first call made for a device is the first supported one in the order of rows."""

AMBIGUOUS_AFTER_S: Final = 10.0  # after this time a counter of 32 bits has wrapped more than once, if not almost idle

_BLANK: dict[int, frozenset[float]] = {
    bits: frozenset({-1, (1 << bits) - 1, *((1 << (bits - 1)) - 16 + more for more in range(4))}) for bits in (32, 64)
}
_BLANK[16] = frozenset({-1, 0xFFFF})
_NONE_BLANK = frozenset({-1.0})


class Count(NamedTuple):
    """A reading of a counter that is ``bits`` wide: at ``at_us`` by the device's clock (0: it has none), and at
    ``at_s`` by this process's clock, which never steps back."""

    raw: int
    bits: int
    at_us: int
    at_s: float


def is_blank(raw: float, bits: int) -> bool:
    """Whether a number of that width means "not available"."""
    return raw in _BLANK.get(bits, _NONE_BLANK)


def measured(raw: object, bits: int, scale: Scale, limits: Limits) -> float | None:
    """A raw number in base units; None if it is blank, not a number, or outside the limits."""
    if not isinstance(raw, int | float) or is_blank(raw, bits):
        return None
    value = raw * scale.times
    return within(value / scale.per if scale.per != 1 else value, limits)


def within(value: float, limits: Limits) -> float | None:
    """The value, at most ``limits.high``; None if it is outside the limits, as NaN always is."""
    return min(value, limits.high) if limits.low <= value <= limits.high + limits.slack else None


def per_second(last: Count, now: Count) -> float | None:
    """The increase per second of a counter that may have wrapped once; None if it can't be computed.

    The time is that of the device's clock if it agrees with this process's within a factor of two, else this
    process's. A counter that was reset to 0 looks wrapped: with 64 bits the rate is far above any limit, with 32 bits a
    reset can't be distinguished from a wrap.
    """
    process_s = now.at_s - last.at_s
    device_s = (now.at_us - last.at_us) / 1e6 if last.at_us > 0 else 0.0
    elapsed_s = device_s if process_s / 2 <= device_s <= process_s * 2 else process_s
    if not elapsed_s > 0 or last.bits != now.bits or (now.bits < 64 and elapsed_s > AMBIGUOUS_AFTER_S):
        return None
    return float((now.raw - last.raw) % (1 << now.bits)) / elapsed_s


def is_same_reading(last: Count, now: Count) -> bool:
    """Whether the device has returned the same reading again."""
    return now.at_us > 0 and now.at_us == last.at_us and now.raw == last.raw
