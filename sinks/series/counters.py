"""A file of counters -> the profile that serves it, and why some of its rows can't be served.

In: the rows of a file (:mod:`sinks.series.counters_file`), the catalogue. Out: a profile with only these series, each
with the type and help of the file and the unit of its name; and with the labels of the file beside dcgm-exporter's.
On failure: :class:`CountersError`, if the file can't be read, has an error, or serves nothing.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from delivery import files
from delivery.files import TooLarge
from sinks.series.counters_file import Counter, CountersError, LineError, parse
from topics.metric import Kind, Ratio, Series
from topics.profiles import INFO, LABELS, PROFILES, Attribute, LabelNames, Profile

OF_DCGM: tuple[str, ...] = ("dcgm", "dcgm-4.9", "dcgm-legacy")
"""The profiles whose names such a file may have; the file replaces them."""

AS_LABELS: Mapping[str, Attribute] = {
    "DCGM_FI_DRIVER_VERSION": "driver_version",
    "DCGM_FI_SYSTEM_DRIVER_VERSION": "driver_version",
    "DCGM_FI_DEV_SERIAL": "serial",
    "DCGM_FI_DEV_BOARD_SERIAL": "serial",
    "DCGM_FI_DEV_VBIOS_VERSION": "vbios_version",
    "DCGM_FI_DEV_NAME": "model",
    "DCGM_FI_DEV_GPU_NAME": "model",
    "DCGM_FI_DEV_UUID": "gpu_uuid",
    "DCGM_FI_DEV_GPU_UUID": "gpu_uuid",
    "DCGM_FI_DEV_PCI_BUSID": "pci_bus_id",
    "DCGM_FI_DEV_PCI_BUS_ID": "pci_bus_id",
    "DCGM_FI_DEV_NVML_INDEX": "index",
}
"""The fields that a row of type ``label`` may name, and the attribute of the device that each is."""

_NOT_READ: tuple[tuple[str, str], ...] = (
    (r"DCGM_EXP_XID_ERRORS_(COUNT|TOTAL)", "dcgm-exporter counts it itself; gpu_xid_errors_total has it by XID"),
    (r"DCGM_EXP_CLOCK_EVENTS_(COUNT|TOTAL)", "dcgm-exporter counts it itself; gpu_throttle_reason says it by cause"),
    (r"DCGM_EXP_GPU_HEALTH_STATUS", "it is the verdict of DCGM's health checks; alerts are gpustream's"),
    (r"DCGM_EXP_.*", "dcgm-exporter makes it itself"),
    (r"DCGM_FI_DEV_(NVSWITCH|LINK)_.*", "it is of an NVSwitch, which NVML does not read"),
    (r"DCGM_FI_DEV_CPU_(?!AFFINITY).*|DCGM_FI_DEV_MODULE_.*", "it is of a CPU"),
    (r"DCGM_FI_DEV_CONNECTX_.*", "it is of a network card"),
    (r"DCGM_FI_DEV_DIAG_.*", "it is a result of DCGM's diagnostics"),
    (
        r"DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_.*|dcgm_nvlink_data_crc_error_count_total",
        "NVML counts it on GPUs before Hopper only, and gpustream does not read it",
    ),
    (r"DCGM_FI_DEV_NVLINK_.*_L\d+(_.*)?", "it is of one NVLink; gpustream has what all links of a GPU do together"),
    (r"DCGM_FI_DEV_VGPU_.*", "it is of a vGPU, which gpustream does not read"),
    (r"DCGM_FI_PROF_.*", "NVML's GPM does not have it, or gpustream does not read it"),
)
"""Patterns of names that are not read, each with the reason."""


_KINDS: dict[str, Kind] = {"gauge": "gauge", "counter": "counter", "untyped": "untyped"}


class Unserved(NamedTuple):
    """A row that can't be served."""

    counter: Counter
    reason: str


class Picked(NamedTuple):
    """What a file picks: a profile with only that, the rows that are served, and those that can't be."""

    profile: Profile
    served: tuple[Counter, ...]
    left_out: tuple[Unserved, ...]


# -- the series of a row


class _Named(NamedTuple):
    """What a name is in a profile: a series and the key of its values, or a ratio of several keys."""

    profile: str
    key: str
    definition: Series | Ratio


def _all_names() -> dict[str, _Named]:
    """Every name that a file may pick. A name of two profiles has the same meaning in both."""
    names: dict[str, _Named] = {}
    for profile in [profile for profile in PROFILES.values() if profile.name in OF_DCGM]:
        for key, series_of_key in profile.series.items():
            for series in series_of_key:
                names.setdefault(series.name, _Named(profile.name, key, series))
        for ratio in profile.ratios:
            names.setdefault(ratio.name, _Named(profile.name, "", ratio))
    return names


def pick(counters: Iterable[Counter], labels: LabelNames | None = None) -> Picked:
    """The profile of a file's rows. ``labels`` None: those of the profile that most of its names are of.

    Raises CountersError if no row can be served.
    """
    names = _all_names()
    served: dict[str, Counter] = {}
    left_out: list[Unserved] = []
    series: dict[str, list[Series]] = {}
    ratios: list[Ratio] = []
    label_rows: list[tuple[str, Attribute]] = []
    for counter in counters:
        first = served.get(counter.name)
        if first is not None and first.type == counter.type:
            continue  # files of dcgm-exporter itself have rows twice
        reason = _unserved_reason(counter, names)
        if first is not None:
            reason = f"line {first.line} has it already, as a {first.type}"
        if reason is not None:
            left_out.append(Unserved(counter, reason))
            continue
        served[counter.name] = counter
        if counter.type == "label":
            label_rows.append((counter.name, AS_LABELS[counter.name]))
            continue
        _, key, definition = names[counter.name]
        if isinstance(definition, Ratio):
            ratios.append(definition._replace(kind=_KINDS[counter.type], help=counter.help))
        else:
            series.setdefault(key, []).append(definition._replace(kind=_KINDS[counter.type], help=counter.help))
    if not series and not ratios:
        errors = [LineError(counter.line, f"{counter.name}: {reason}") for counter, reason in left_out]
        raise CountersError([LineError(0, "has no row that can be served"), *errors])
    if labels is None:
        legacy = [name for name in served if name in names and names[name].profile == "dcgm-legacy"]
        labels = LABELS["dcgm-legacy" if len(legacy) * 2 > len(served) else "dcgm"]
    device = tuple([(name, attribute) for name, attribute in labels.device if attribute not in INFO])
    labels = replace(labels, name="counters", device=(*device, *label_rows))
    series_by_key = {key: tuple(series_of_key) for key, series_of_key in series.items()}
    profile = Profile("counters", series_by_key, tuple(ratios), labels, further=False)
    return Picked(profile, tuple(served.values()), tuple(left_out))


def _unserved_reason(counter: Counter, names: Mapping[str, _Named]) -> str | None:
    """Why a row can't be served; None if it can."""
    name = counter.name
    if counter.type == "label":
        if name in AS_LABELS:
            return None
        if name in names:
            return "a value as a label would begin a new series with every change: give it the type gauge or counter"
    elif name in AS_LABELS:
        return "it is a text, not a number: give it the type label"
    elif name in names:
        is_number = counter.type in _KINDS
        return None if is_number else f"one number is no {counter.type}: give it the type gauge or counter"
    for pattern, reason in _NOT_READ:
        if re.fullmatch(pattern, name):
            return reason
    unknown = "gpustream does not read it" if name.upper().startswith("DCGM_") else "no field of DCGM is called that"
    for close in difflib.get_close_matches(name, [*names, *AS_LABELS], n=1, cutoff=0.9):
        # each word of it may be a slip of the other's: UTLI is one of UTIL, but MIN is none of MAX
        words = zip(name.split("_"), close.split("_"), strict=False)
        if all(difflib.SequenceMatcher(None, *pair).ratio() > 0.5 for pair in words):
            return f"{unknown}; is {close} meant?"
    return unknown


def why_not_served(name: str) -> str:
    """Why there is no series of that name."""
    return (
        _unserved_reason(Counter(0, name, "gauge", ""), _all_names())
        or "it can be had: name it in a file of --counters"
    )


# -- a file


@lru_cache(maxsize=4)
def _parsed(content: bytes) -> tuple[Counter, ...] | str | CountersError:
    """The rows of a file, the path of another file, or the error. A file that is read again is parsed if it changed."""
    try:
        return parse(content)
    except CountersError as error:
        return error


def read(path: Path) -> tuple[Counter, ...]:
    """The rows of a file, or of the CSV file that it names. Raises CountersError."""
    rows = _read(path, "can't be read")
    if isinstance(rows, str):
        names = f"names {rows} in `metrics.file`, which"
        rows = _read(Path(rows), f"{names} can't be read")
        if isinstance(rows, str):
            raise CountersError([LineError(0, f"{names} is no CSV file")])
    return rows


def _read(path: Path, unreadable: str) -> tuple[Counter, ...] | str:
    """The rows of a file, or the path of another file. Raises CountersError, which ``unreadable`` may begin."""
    try:
        parsed = _parsed(files.read(path))
    except OSError as error:
        raise CountersError([LineError(0, f"{unreadable}: {error.strerror}")]) from error
    except TooLarge as error:
        raise CountersError([LineError(0, f"{unreadable}: it is {error}")]) from error
    if isinstance(parsed, CountersError):
        raise parsed.with_traceback(None)  # or it would grow each time that the file is read
    return parsed


def load(path: Path, labels: LabelNames | None = None) -> Picked:
    """What a file picks. Raises CountersError."""
    return pick(read(path), labels)
