"""Other exporters' names beside gpustream's, ``how-to/migrate/names.md``: ``python -m docs.peers [--check]``.

In: the catalogue's profiles, the fields that dcgm-exporter's own counter files name. Out: Markdown.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sinks.series.counters import AS_LABELS, pick
from sinks.series.counters_file import Counter
from topics.catalogue import CATALOGUE, LAST_XID
from topics.profiles import LABELS, PROFILES, Profile
from topics.reference import generate, series_name, table

PATH = Path(__file__).parent / "how-to" / "migrate" / "names.md"


class CounterFile(NamedTuple):
    """A file that dcgm-exporter brings along: the fields of its rows, and of those that are commented out."""

    name: str
    version: str
    rows: str
    commented: str = ""


_COMMON = """
DCGM_FI_DEV_SM_CLOCK DCGM_FI_DEV_MEM_CLOCK DCGM_FI_DEV_MEMORY_TEMP DCGM_FI_DEV_GPU_TEMP DCGM_FI_DEV_POWER_USAGE
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION DCGM_FI_DEV_PCIE_REPLAY_COUNTER DCGM_FI_DEV_GPU_UTIL DCGM_FI_DEV_MEM_COPY_UTIL
DCGM_FI_DEV_ENC_UTIL DCGM_FI_DEV_DEC_UTIL DCGM_FI_DEV_XID_ERRORS DCGM_FI_DEV_FB_FREE DCGM_FI_DEV_FB_USED
DCGM_FI_DEV_FB_RESERVED DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL DCGM_FI_DEV_VGPU_LICENSE_STATUS
DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS DCGM_FI_DEV_ROW_REMAP_FAILURE
DCGM_FI_DRIVER_VERSION DCGM_FI_PROF_GR_ENGINE_ACTIVE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE DCGM_FI_PROF_DRAM_ACTIVE
DCGM_FI_PROF_PCIE_TX_BYTES DCGM_FI_PROF_PCIE_RX_BYTES
"""
_COMMENTED = """
DCGM_FI_DEV_POWER_VIOLATION DCGM_FI_DEV_THERMAL_VIOLATION DCGM_FI_DEV_SYNC_BOOST_VIOLATION
DCGM_FI_DEV_BOARD_LIMIT_VIOLATION DCGM_FI_DEV_LOW_UTIL_VIOLATION DCGM_FI_DEV_RELIABILITY_VIOLATION
DCGM_FI_DEV_ECC_SBE_VOL_TOTAL DCGM_FI_DEV_ECC_DBE_VOL_TOTAL DCGM_FI_DEV_ECC_SBE_AGG_TOTAL DCGM_FI_DEV_ECC_DBE_AGG_TOTAL
DCGM_FI_DEV_RETIRED_SBE DCGM_FI_DEV_RETIRED_DBE DCGM_FI_DEV_RETIRED_PENDING
DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL
DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL
DCGM_FI_DEV_NVLINK_BANDWIDTH_L0 DCGM_FI_NVML_VERSION DCGM_FI_DEV_BRAND DCGM_FI_DEV_SERIAL DCGM_FI_DEV_OEM_INFOROM_VER
DCGM_FI_DEV_ECC_INFOROM_VER DCGM_FI_DEV_POWER_INFOROM_VER DCGM_FI_DEV_INFOROM_IMAGE_VER DCGM_FI_DEV_VBIOS_VERSION
DCGM_FI_PROF_SM_ACTIVE DCGM_FI_PROF_SM_OCCUPANCY DCGM_FI_PROF_PIPE_FP64_ACTIVE DCGM_FI_PROF_PIPE_FP32_ACTIVE
DCGM_FI_PROF_PIPE_FP16_ACTIVE
"""
_EXPORTERS_OWN = """
DCGM_EXP_CLOCK_EVENTS_COUNT DCGM_EXP_XID_ERRORS_COUNT DCGM_EXP_GPU_HEALTH_STATUS DCGM_EXP_P2P_STATUS
"""
_OF_1_X = """
dcgm_sm_clock dcgm_memory_clock dcgm_memory_temp dcgm_gpu_temp dcgm_power_usage dcgm_total_energy_consumption
dcgm_fi_prof_pcie_tx_bytes dcgm_fi_prof_pcie_rx_bytes dcgm_pcie_replay_counter dcgm_gpu_utilization
dcgm_mem_copy_utilization dcgm_enc_utilization dcgm_dec_utilization dcgm_xid_errors dcgm_fb_free dcgm_fb_used
dcgm_nvlink_bandwidth_total dcgm_fi_prof_gr_engine_active dcgm_fi_prof_pipe_tensor_active dcgm_fi_prof_dram_active
"""
_COMMENTED_OF_1_X = """
dcgm_power_violation dcgm_thermal_violation dcgm_sync_boost_violation dcgm_board_limit_violation dcgm_low_util_violation
dcgm_reliability_violation dcgm_ecc_sbe_volatile_total dcgm_ecc_dbe_volatile_total dcgm_ecc_sbe_aggregate_total
dcgm_ecc_dbe_aggregate_total dcgm_retired_pages_sbe dcgm_retired_pages_dbe dcgm_retired_pages_pending
dcgm_nvlink_flit_crc_error_count_total dcgm_nvlink_data_crc_error_count_total dcgm_nvlink_replay_error_count_total
dcgm_nvlink_recovery_error_count_total dcgm_fi_prof_sm_active dcgm_fi_prof_sm_occupancy
"""
_OF_4_9 = """
DCGM_FI_DEV_SM_CLOCK_HERTZ DCGM_FI_DEV_MEMORY_CLOCK_HERTZ DCGM_FI_DEV_MEMORY_TEMP_CELSIUS DCGM_FI_DEV_GPU_TEMP_CELSIUS
DCGM_FI_DEV_BOARD_POWER_WATTS DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL DCGM_FI_DEV_PCIE_REPLAY_TOTAL
DCGM_FI_DEV_GPU_UTIL_RATIO DCGM_FI_DEV_MEMORY_UTIL_RATIO DCGM_FI_DEV_ENC_UTIL_RATIO DCGM_FI_DEV_DEC_UTIL_RATIO
DCGM_FI_DEV_XID_ERROR DCGM_FI_DEV_FB_CAPACITY_BYTES DCGM_FI_DEV_FB_FREE_BYTES DCGM_FI_DEV_FB_USED_BYTES
DCGM_FI_DEV_FB_RESERVED_BYTES DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND DCGM_FI_DEV_VGPU_LICENSE_STATUS
DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL DCGM_FI_DEV_ROW_REMAP_FAILED
DCGM_FI_SYSTEM_DRIVER_VERSION DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO DCGM_FI_PROF_TENSOR_UTIL_RATIO
DCGM_FI_PROF_DRAM_UTIL_RATIO DCGM_FI_PROF_PCIE_TX_BYTES DCGM_FI_PROF_PCIE_RX_BYTES
"""

FILES = (
    CounterFile("default-counters.csv", "4.5.3-4.8.2", _COMMON, _COMMENTED + _EXPORTERS_OWN),
    CounterFile("dcp-metrics-included.csv", "4.5.3-4.8.2", _COMMON, _COMMENTED),
    CounterFile("1.x-compatibility-metrics.csv", "4.5.3-4.8.2", _OF_1_X, _COMMENTED_OF_1_X),
    CounterFile("default-counters.csv", "4.9.0", _OF_4_9),
)
"""What these files name; their types and helps are not here."""


def markdown() -> str:
    """The page."""
    left_out = [pair for file in FILES for pair in pick(_counters(file.rows + file.commented)).left_out]
    parts = [
        "# Names and labels of other exporters",
        "<!-- Written by `python -m docs.peers`: change `topics/` and `docs/peers.py`, not this file. -->",
        "A row for each quantity that gpustream measures and another exporter names. Units are those of the name; a "
        "name without a unit is a count, or a state. All of it is in [metrics.md](../../reference/metrics.md).",
        "## dcgm-exporter",
        "`--names dcgm` has the names up to 4.8, `--names dcgm-4.9` those from 4.9 on; in bold what has another unit "
        "there.",
        _names(("dcgm", "dcgm-4.9")),
        _labels("dcgm", "dcgm-4.9"),
        "## pod-devices-exporter",
        "And dcgm-exporter 1.x, and later ones with its names: `--names dcgm-legacy`.",
        _names(("dcgm-legacy",)),
        _labels("dcgm-legacy"),
        "## l9gpu",
        "`--names otel` has the names of its integration guide, `--names otel-suffixed` those of its dashboards and "
        "alerts.",
        _names(("otel", "otel-suffixed")),
        _labels("otel"),
        "## Counter files",
        "How much of the files that dcgm-exporter brings along `--counters` serves, as far as the GPU and its driver "
        "have it. A row that is commented out is one that many turn on.",
        table(("file", "of", "rows", "served", "commented out", "of these served"), map(_share, FILES)),
        "What is not served, and why:",
        table(("row", "why"), dict.fromkeys((f"`{row.name}`", f"{reason}.") for row, reason in left_out)),
    ]
    return "\n\n".join(parts) + "\n"


def _names(profiles: Sequence[str]) -> str:
    """Each quantity, and what these profiles call it."""
    chosen: list[Profile] = [profile for profile in PROFILES.values() if profile.name in profiles]
    rows = []
    kinds = {key: metric.kind for key, metric in CATALOGUE.items()} | {LAST_XID.name: LAST_XID.kind}
    for key, kind in kinds.items():
        cells = []
        before = {series.unit for series in chosen[0].series.get(key, ())}
        for profile in chosen:
            many = profile.series.get(key, ())
            strong = "**" if before and before.isdisjoint(series.unit for series in many) else ""
            cells.append(
                "<br>".join(f"{series_name(series.name, series.labels)}{_unit(series.unit, strong)}" for series in many)
            )
        if any(cells):
            rows.append((f"`{key}`", *cells, kind))
    for profile in chosen:
        for ratio in profile.ratios:
            cells = [
                f"`{ratio.name}`{_unit(ratio.unit)}"
                if any(candidate.name == ratio.name for candidate in other.ratios)
                else ""
                for other in chosen
            ]
            sums = [" + ".join(f"`{key}`" for key in keys) for keys in (ratio.numerators, ratio.denominators) if keys]
            formula = " / ".join(f"({term})" if "+" in term and len(sums) > 1 else term for term in sums)
            rows.append((formula, *cells, ratio.kind))
    return table(("quantity", *(f"`{profile.name}`" for profile in chosen), "type"), dict.fromkeys(rows))


def _unit(unit: str, strong: str = "") -> str:
    return f", {strong}{unit.replace('_', ' ')}{strong}" if unit else ""


def _labels(*names: str) -> str:
    """The labels of these profiles, and what each says. All of them have the same labels of a holder."""
    sets = {name: labels for name, labels in LABELS.items() if name in names}
    rows = []
    for label, says in dict.fromkeys(pair for labels in sets.values() for pair in labels.device):
        with_it = [f"`{name}`" for name, labels in sets.items() if (label, says) in labels.device]
        when = "always" if len(with_it) == len(sets) else f"with {', '.join(with_it)}"
        rows.append((f"`{label}`", says.replace("_", " "), when))
    holder = next(iter(sets.values())).holder
    rows += [(f"`{label}`", says.replace("_", " "), "if one pod holds the device") for label, says in holder]
    return table(("label", "says", "when"), rows)


def _counters(names: str) -> list[Counter]:
    return [Counter(0, name, "label" if name in AS_LABELS else "gauge", name) for name in names.split()]


def _share(file: CounterFile) -> Sequence[str]:
    rows, further = _counters(file.rows), _counters(file.commented)
    further_cells = (str(len(further)), str(len(pick(further).served))) if further else ("", "")
    return f"`{file.name}`", file.version, str(len(rows)), str(len(pick(rows).served)), *further_cells


if __name__ == "__main__":
    sys.exit(generate({PATH: markdown()}, "docs.peers", sys.argv[1:]))
