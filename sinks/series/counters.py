"""A file of counters -> the profile that serves it, and why some of its rows can't be served.

In: the rows of a file (:mod:`sinks.series.counters_file`), the catalogue. Out: one profile with just these series, each
with the file's type and help, the unit of its name, and the file's labels beside those of dcgm-exporter.
On failure: :class:`CountersError`, if the file can't be read, has a mistake, or serves nothing.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from sinks.series.counters_file import Counter, CountersError, Mistake, parse
from topics.metric import Kind, Ratio, Series
from topics.profiles import INFO, LABELS, PROFILES, Attribute, LabelNames, Profile

OF_DCGM: tuple[str, ...] = ("dcgm", "dcgm-4.9", "dcgm-legacy")
"""The profiles whose names such a file may have; the file stands in their place."""

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
"""The fields that a row of type ``label`` may name, and what they say."""

_NOT_HERE: tuple[tuple[str, str], ...] = (
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
"""Names of which more can be said than that they are not read."""


_KINDS: dict[str, Kind] = {"gauge": "gauge", "counter": "counter", "untyped": "untyped"}


class Unserved(NamedTuple):
    """A row that can't be served."""

    counter: Counter
    why: str


class Picked(NamedTuple):
    """What a file picks: a profile with just that, the rows that it serves, and those that it can't."""

    profile: Profile
    served: tuple[Counter, ...]
    left_out: tuple[Unserved, ...]


# -- which series a row is


class _Named(NamedTuple):
    """A name of a profile: the key of its values and the series, or what is made of several keys."""

    profile: str
    key: str
    of: Series | Ratio


def _all_names() -> dict[str, _Named]:
    """Every name that a file may pick; what two profiles call alike is the same."""
    found: dict[str, _Named] = {}
    for profile in [one for one in PROFILES.values() if one.name in OF_DCGM]:
        for key, many in profile.series.items():
            for one in many:
                found.setdefault(one.name, _Named(profile.name, key, one))
        for ratio in profile.ratios:
            found.setdefault(ratio.name, _Named(profile.name, "", ratio))
    return found


def pick(counters: Iterable[Counter], labels: LabelNames | None = None) -> Picked:
    """The profile of a file's rows, with these labels or those that its names have. Raises CountersError: it serves
    nothing."""
    names = _all_names()
    served: dict[str, Counter] = {}
    left_out: list[Unserved] = []
    series: dict[str, list[Series]] = {}
    ratios: list[Ratio] = []
    texts: list[tuple[str, Attribute]] = []
    for counter in counters:
        first = served.get(counter.name)
        if first is not None and first.type == counter.type:
            continue  # files of dcgm-exporter itself have rows twice
        why = _why_not(counter, names) if first is None else f"line {first.line} has it already, as a {first.type}"
        if why is not None:
            left_out.append(Unserved(counter, why))
            continue
        served[counter.name] = counter
        if counter.type == "label":
            texts.append((counter.name, AS_LABELS[counter.name]))
            continue
        _, key, of = names[counter.name]
        if isinstance(of, Ratio):
            ratios.append(of._replace(kind=_KINDS[counter.type], help=counter.help))
        else:
            series.setdefault(key, []).append(of._replace(kind=_KINDS[counter.type], help=counter.help))
    if not series and not ratios:
        whys = [Mistake(counter.line, f"{counter.name}: {why}") for counter, why in left_out]
        raise CountersError([Mistake(0, "has no row that can be served"), *whys])
    if labels is None:
        old = [name for name in served if name in names and names[name].profile == "dcgm-legacy"]
        labels = LABELS["dcgm-legacy" if len(old) * 2 > len(served) else "dcgm"]
    device = tuple([(name, says) for name, says in labels.device if says not in INFO])
    labels = replace(labels, name="counters", device=(*device, *texts))
    many = {key: tuple(of_key) for key, of_key in series.items()}
    profile = Profile("counters", many, tuple(ratios), labels, further=False)
    return Picked(profile, tuple(served.values()), tuple(left_out))


def _why_not(counter: Counter, names: Mapping[str, _Named]) -> str | None:
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
        is_one = counter.type in _KINDS
        return None if is_one else f"one number is no {counter.type}: give it the type gauge or counter"
    for pattern, why in _NOT_HERE:
        if re.fullmatch(pattern, name):
            return why
    close = [one for one in difflib.get_close_matches(name, [*names, *AS_LABELS], n=1, cutoff=0.9) if _typed(name, one)]
    unknown = "gpustream does not read it" if name.upper().startswith("DCGM_") else "no field of DCGM is called that"
    return f"{unknown}; is {close[0]} meant?" if close else unknown


def _typed(name: str, one: str) -> bool:
    """Whether each word of a name may be a slip of the other's: UTLI is one of UTIL, MIN is none of MAX."""
    pairs = zip(name.split("_"), one.split("_"), strict=False)
    return all(difflib.SequenceMatcher(None, *pair).ratio() > 0.5 for pair in pairs)


def why_not_served(name: str) -> str:
    """Why there is no series of that name."""
    return _why_not(Counter(0, name, "gauge", ""), _all_names()) or "it can be had: name it in a file of --counters"


# -- a file


@lru_cache(maxsize=4)
def _parsed(content: bytes) -> tuple[Counter, ...] | str | CountersError:
    """What a file says; what is read every second is parsed when it has changed."""
    try:
        return parse(content)
    except CountersError as error:
        return error


def read(path: Path) -> tuple[Counter, ...]:
    """The rows of a file, or of the CSV file that it names. Raises CountersError."""
    found = _content(path, "can't be read")
    if isinstance(found, str):
        named, found = found, _content(Path(found), f"names {found} in `metrics.file`, which can't be read")
        if isinstance(found, str):
            found = CountersError([Mistake(0, f"names {named} in `metrics.file`, which is no CSV file")])
    if isinstance(found, CountersError):
        raise found
    return found


def _content(path: Path, otherwise: str) -> tuple[Counter, ...] | str | CountersError:
    try:
        return _parsed(path.read_bytes())
    except OSError as error:
        return CountersError([Mistake(0, f"{otherwise}: {error.strerror}")])


def load(path: Path, labels: LabelNames | None = None) -> Picked:
    """What a file picks now. Raises CountersError."""
    return pick(read(path), labels)
