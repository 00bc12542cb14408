"""The report of ``gpustream devices`` for people: as wide as 100 columns, a block for each device.

In:       a report as :func:`gpustream.devices.look` makes it.
Out:      text.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from topics.catalogue import CATALOGUE

WIDTH = 100
MOST_PROCESSES = 8
"""Of a device; the others are counted."""

_LABEL = 10
_MARGIN, _GAP = "    ", "   "
_OF_THE_NODE = ("driver_version", "cuda_version")
_GIB, _MIB = 1 << 30, 1 << 20

_ERRORS = {
    "NOT_SUPPORTED": "not supported",
    "FUNCTION_NOT_FOUND": "no such symbol in this driver",
    "ARGUMENT_VERSION_MISMATCH": "not in this version of the driver",
    "DEPRECATED": "not in this driver any more",
    "INVALID_ARGUMENT": "not of this device",
    "NO_PERMISSION": "no permission",
    "GPU_IS_LOST": "lost",
    "GPU_NOT_FOUND": "lost",
    "TIMEOUT": "no answer in time",
    "IMPLAUSIBLE": "a value that can't be",
    "NO_VALUE": "not known, or nothing new",
    "SHARED_INSTANCE": "only known of the GPU instance, which several MIG devices share",
}

_WHY = {
    "unknown_form": "the id is of no known form",
    "no_such_device": "no such device here",
    "claim": "a claim: which device it is is in the API server's resource slices",
}

_FACTORS: Mapping[str, tuple[float, str]] = {
    "ratio": (0.01, "%"),
    "bytes": (_GIB, "GiB"),
    "bytes_per_second": (_MIB, "MiB/s"),
    "hertz": (1e6, "MHz"),
    "watts": (1, "W"),
    "joules": (1, "J"),
    "celsius": (1, "C"),
    "seconds": (1, "s"),
}

Json = Mapping[str, Any]


def text(report: Json) -> str:
    """The report."""
    told: dict[str, str] = {}
    blocks: list[Iterable[str]] = [_head(report), *(_device(device, told) for device in report["devices"])]
    blocks += [_unopened(report["unopened"]), _unplaced(report["unplaced"])]
    lines = "\n\n".join("\n".join(block) for block in map(list, blocks) if block)
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in lines)


def amount(key: str, value: float) -> str:
    """A value of the catalogue with its unit, as people write it."""
    unit = CATALOGUE[key].unit if key in CATALOGUE else ""
    if unit == "bitmask":
        return hex(int(value))
    if unit == "bool":
        return "yes" if value else "no"
    factor, written = _FACTORS.get(unit, (1, ""))
    number = f"{value / factor:.1f}".removesuffix(".0")
    return f"{number} {written}".rstrip()


def sentence(tried: Iterable[Json]) -> str:
    """What was tried, and why each gave nothing."""
    calls: dict[str, list[str]] = {}
    for one in tried:
        calls.setdefault(one["error"], []).append(one["call"])
    return ", then ".join(f"{_ERRORS.get(error, error)}{_in_brackets(names)}" for error, names in calls.items())


def _in_brackets(names: Iterable[str]) -> str:
    found = ", ".join(filter(None, names))
    return f" ({found})" if found else ""


def _head(report: Json) -> Iterator[str]:
    gpus = [device for device in report["devices"] if not device.get("mig")]
    parts = len(report["devices"]) - len(gpus)
    counts = f"{_count(len(gpus), 'GPU')}, {_count(parts, 'MIG device')}"
    yield from _line("", f"node {report['node']}: {counts}, read twice {report['interval_s']:g} s apart")
    info: Mapping[str, str] = next((device["info"] for device in gpus if device.get("info")), {})
    versions = [f"driver {info['driver_version']}"] if "driver_version" in info else []
    versions += [f"CUDA {info['cuda_version']}"] if "cuda_version" in info else []
    if versions:
        yield from _line("", ", ".join(versions))
    yield from _line("", _kubelet(report["kubelet"]))
    if report["job_files"]["directory"] is not None:
        yield from _line("", f"job files in {report['job_files']['directory']}")
    for trouble in report["job_files"]["troubles"]:
        yield from _line("", trouble)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _kubelet(kubelet: Json) -> str:
    if kubelet["socket"] is None:
        return "no kubelet is asked: holders are what the processes say"
    if kubelet["containers"] is None:
        return f"holders are what the processes say: {kubelet['trouble']}"
    return f"the kubelet at {kubelet['socket']} tells of {_count(kubelet['containers'], 'container')} with GPUs"


def _device(device: Json, told: dict[str, str]) -> Iterator[str]:
    """A GPU; a MIG device stands below its GPU, further in."""
    mig = device.get("mig")
    margin = "  " if mig else ""
    yield from (margin + line for line in _block(device, told, WIDTH - len(margin)))


def _block(device: Json, told: dict[str, str], width: int) -> Iterator[str]:
    yield from _line("", _title(device), width)
    if device["refusal"] is not None:
        yield from _line("why", sentence([device["refusal"]]), width)
    yield from _line("uuid", device["uuid"], width)
    yield from _facts(device, width)
    for holder in _holders(device["holders"]):
        yield from _line("holder", holder, width)
    yield from _processes(device.get("processes"), width)
    for job in device.get("jobs", ()):
        yield from _line("job", ", ".join(job[key] for key in ("id", "user", "partition") if key in job), width)
    if device["state"] == "ok":
        yield from _metrics(device["metrics"], width)
        yield from _left_out(device, told, width)


def _name(device: Json) -> str:
    mig = device.get("mig")
    gpu = f"GPU {device.get('index', 'without an index')}"
    return gpu if mig is None else f"{gpu} MIG {mig.get('gpu_instance', '?')}/{mig.get('compute_instance', '?')}"


def _title(device: Json) -> str:
    mig = device.get("mig")
    kind = device.get("model") if mig is None else mig.get("profile")
    return ", ".join([f"{_name(device)}: {kind or 'unknown model or profile'}", device["state"]])


def _facts(device: Json, width: int) -> Iterator[str]:
    mig = device.get("mig")
    if mig is not None:
        numbers = [f"{key.replace('_', ' ')} {mig[key]}" for key in ("gpu_instance", "compute_instance") if key in mig]
        yield from _line("of", ", ".join([mig["parent_uuid"], *numbers]), width)
        return
    where = [device["pci_bus_id"]] if "pci_bus_id" in device else []
    where += [f"minor {device['minor']}"] if "minor" in device else []
    if where:
        yield from _line("pci", ", ".join(where), width)
    info = [f"{key.replace('_', ' ')} {one}" for key, one in device.get("info", {}).items() if key not in _OF_THE_NODE]
    if info:
        yield from _line("info", ", ".join(info), width)


def _holders(holders: Iterable[Json]) -> list[str]:
    """Each container once, with the ids that it was given."""
    ids: dict[str, list[str]] = {}
    for one in holders:
        slot = " (a slot of HAMi's: the pod's annotation names the GPU, which is in the API server)"
        device_id = one["device_id"] + (slot if one["hami_slot"] else "")
        ids.setdefault(f"{_who(one)} has {one['resource']}", []).append(device_id)
    return [f"{who} {', '.join(found)}" for who, found in ids.items()]


def _who(one: Json) -> str:
    return f"{one['namespace']}/{one['pod']}/{one['container']}"


def _processes(processes: Sequence[Json] | None, width: int) -> Iterator[str]:
    rows = processes or ()
    for row in rows[:MOST_PROCESSES]:
        yield from _line("process", f"{row['pid']}, {_use(row)}, {_whose(row)}", width)
    if len(rows) > MOST_PROCESSES:
        yield from _line("process", f"and {len(rows) - MOST_PROCESSES} more", width)


def _use(row: Json) -> str:
    held, busy = row.get("memory_used_bytes"), row.get("sm_utilization_ratio")
    memory = "memory not known" if held is None else amount("memory_used_bytes", held)
    return memory if busy is None else f"{memory}, {amount('gpu_utilization_ratio', busy)}"


def _whose(row: Json) -> str:
    names = {"pod_uid": "pod", "container_id": "container", "job_id": "job", "service": "service"}
    found = [f"{what} {row[key]}" for key, what in names.items() if key in row]
    return " ".join(found) or "of no pod or job that can be seen"


def _metrics(metrics: Mapping[str, float], width: int) -> Iterator[str]:
    yield from _line("metrics", f"{len(metrics)} of {len(CATALOGUE)}", width)
    yield from _columns([(key, amount(key, metrics[key])) for key in CATALOGUE if key in metrics], width)


def _columns(cells: Iterable[tuple[str, str]], width: int) -> Iterator[str]:
    """Two to a line; what is too long for that has a line of its own."""
    half = (width - len(_MARGIN) - len(_GAP)) // 2
    left = ""
    for key, value in cells:
        cell = f"{key}{value:>{max(half - len(key), len(value) + 1)}}"
        if left and len(cell) <= half:
            yield f"{_MARGIN}{left}{_GAP}{cell}"
            left = ""
            continue
        if left:
            yield _MARGIN + left
        left = cell if len(cell) <= half else ""
        if not left:
            yield _MARGIN + cell
    if left:
        yield _MARGIN + left


def _left_out(device: Json, told: dict[str, str], width: int) -> Iterator[str]:
    """By reason; where all of it was told of a device before, only that."""
    reasons: dict[str, list[str]] = {}
    for one in device["left_out"]:
        reasons.setdefault(sentence(one["tried"]), []).append(one["what"])
    if not reasons:
        return
    lines = [f"{reason}: {', '.join(keys)}" for reason, keys in reasons.items()]
    name, text_ = _name(device), "\n".join(lines)
    like = f", as of {told[text_]}" if text_ in told else ""
    yield from _line("left out", f"{len(device['left_out'])}{like}", width)
    if text_ not in told:
        told[text_] = name
        for line in lines:
            yield from _wrapped(_MARGIN + line, len(_MARGIN) + 2, width)


def _unopened(unopened: Sequence[Json]) -> list[str]:
    return [line for one in unopened for line in _line("", f"GPU at {one['place']} can't be opened: {sentence([one])}")]


def _unplaced(unplaced: Sequence[Json]) -> list[str]:
    lines = []
    for one in unplaced:
        claim = one["claim"]
        what = one["device_id"] if claim is None else f"{claim['driver']}/{claim['pool']}/{claim['device']}"
        lines += _line("", f"on no device: {what} of {_who(one)}: {_WHY[one['why']]}")
    return lines


def _line(label: str, content: str, width: int = WIDTH) -> list[str]:
    indent = f"  {label:<{_LABEL}}" if label else ""
    return _wrapped(indent + content, len(indent) or 2, width)


def _wrapped(line: str, indent: int, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
