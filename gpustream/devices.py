"""``gpustream devices``: what of this machine would be sampled now, what not, and why not.

In:       the node producer's own readers of GPUs, kubelet, processes and jobs, asked twice, an interval apart.
Out:      a report; on standard output as one JSON object, or as text, as wide as 100 columns, a block for each device.
On failure: without a driver or a GPU a sentence on standard error, and exit code 1. Without a kubelet, or with GPUs
          that do not answer, the report says so.
"""

import asyncio
import logging
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import click
import msgspec
import orjson

from delivery.instruments import Instruments
from delivery.settings import HOST_PORTS
from delivery.values import counted, printable
from gpustream import command
from gpustream.command import Command, logged, option, options, output_format
from gpustream.output import FAILED, failed
from producers import PRODUCERS
from producers.node import instruments
from producers.node.cgroups import ProcessOwners
from producers.node.component import ANSWER_WITHIN, OPEN_WITHIN_S
from producers.node.config import NodeSettings, ReadingSettings
from producers.node.gpus import Gpus
from producers.node.job_files import JobFiles
from producers.node.jobs import with_jobs
from producers.node.kubelet import DEADLINE_S, Kubelet
from producers.node.nvml.calls import FailedCall, LeftOut
from topics.catalogue import CATALOGUE
from topics.device_ids import DeviceIndex, UnknownDeviceId, normal, parse
from topics.samples import Device

Json = Mapping[str, Any]

SCHEMA = 1

KUBELET_WITHIN_S = DEADLINE_S + 1.0
"""Longer than a tick waits for the kubelet: a tick can use a late answer for the next one, and here there is none."""


@click.command(
    cls=Command,
    check=lambda values: command.errors(PRODUCERS["node"], {**values, "kafka": HOST_PORTS.example}),
    example=(
        "gpustream devices\n"
        "gpustream devices --device 3 --interval 5s\n"
        "gpustream devices --pod-resources-socket off --format json    # a machine without Kubernetes"
    ),
)
@option(
    "--device", show_default="all", help="Only the GPU of this index or UUID, with its MIG devices, or one of them."
)
@output_format("text", "json", help="json: one object, on one line.")
@options(NodeSettings, only=("interval_s", "node"))
@options(ReadingSettings)
@logged(logging.ERROR)
def devices(device: str | None, form: Literal["text", "json"], **values: Any) -> None:
    """What of this machine would be sampled now: GPUs, MIG devices, who holds them, their values.

    And what would be left out, by which call of NVML and which error. It takes two readings, an --interval apart, just
    as the node producer does, which may run beside it; it sends nothing. Exit code 1 without a driver or without a GPU.
    """
    settings: NodeSettings = command.settings(PRODUCERS["node"], {**values, "kafka": HOST_PORTS.example})
    try:
        report = asyncio.run(read_twice(settings))
        selected = report if device is None else only(report, device)
    except NothingToShow as error:
        raise failed(error) from error
    sys.stdout.write(f"{orjson.dumps(selected).decode() if form == 'json' else text(selected)}\n")
    raise SystemExit(0 if selected["devices"] else FAILED)


class NothingToShow(Exception):
    """There is nothing to show; the message says why."""


async def read_twice(settings: NodeSettings, open_within_s: float = OPEN_WITHIN_S) -> dict[str, Any]:
    """The report: the GPUs read twice, the kubelet's containers, the jobs. Raises :class:`NothingToShow`."""
    metrics, owners = Instruments(instruments.INSTRUMENTS), ProcessOwners(settings.procfs)
    gpus = Gpus(metrics, owners, interval_s=settings.interval_s)
    kubelet = Kubelet(settings.pod_resources_socket, metrics, prefixes=settings.resource_prefixes)
    files = JobFiles(settings.hpc_job_mapping_dir, metrics)
    within_s = settings.interval_s * ANSWER_WITHIN
    try:
        await gpus.open(open_within_s)
        if not gpus.count:
            raise NothingToShow("; ".join(gpus.not_ready()))
        await asyncio.sleep(settings.interval_s)
        reads = gpus.read(within_s), kubelet.read(KUBELET_WITHIN_S), files.read(within_s)
        gpu_devices, containers, job_mapping = await asyncio.gather(*reads)
        refusals, (holders, unplaced) = gpus.unreadable(), place_containers(containers or (), gpu_devices)
        return {
            "schema": SCHEMA,
            "node": settings.node,
            "interval_s": settings.interval_s,
            "kubelet": {
                "socket": _text(settings.pod_resources_socket),
                "containers": None
                if containers is None
                else len({_container_name(container) for container in containers}),
                "trouble": "; ".join(kubelet.not_ready()) or None,
            },
            "job_files": {"directory": _text(settings.hpc_job_mapping_dir), "troubles": files.troubles()},
            "devices": describe(
                with_jobs(gpu_devices, job_mapping, lambda job_id: files.enriched(owners.jobs.of(job_id))),
                holders,
                {refusal.uuid: refusal.failed_call for refusal in refusals if refusal.uuid is not None},
                gpus.left_out(),
            ),
            "unopened": [
                {"place": refusal.gpu_index, **_failure(refusal.failed_call)}
                for refusal in refusals
                if refusal.uuid is None
            ],
            "unplaced": unplaced,
        }
    finally:
        gpus.close()
        files.close()
        await kubelet.close()


def place_containers(containers: Iterable[Json], devices: Sequence[Json]) -> tuple[dict[str, list[Json]], list[Json]]:
    """The containers by the UUID of the device that they hold, and the ids that name no device, with the reason.

    ``hami_slot`` marks a slot of HAMi's, which may be on another device than its id names.
    """
    index = DeviceIndex(msgspec.convert(devices, list[Device]))
    holders: dict[str, list[Json]] = {}
    unplaced: list[Json] = []
    for container in containers:
        container_fields = {key: container.get(key) for key in ("namespace", "pod", "container", "resource")}
        for device_id in container.get("device_ids", ()):
            try:
                ref = parse(device_id)
            except UnknownDeviceId:
                unplaced.append({**container_fields, "device_id": device_id, "claim": None, "why": "unknown_form"})
                continue
            if (uuid := index.find(ref)) is None:
                unplaced.append({**container_fields, "device_id": device_id, "claim": None, "why": "no_such_device"})
            else:
                holder = {**container_fields, "device_id": device_id, "hami_slot": ref.slot is not None}
                holders.setdefault(uuid, []).append(holder)
        claims = container.get("claims", ())
        unplaced += [{**container_fields, "device_id": None, "claim": dict(claim), "why": "claim"} for claim in claims]
    return holders, unplaced


def describe(
    devices: Iterable[Json],
    holders: Mapping[str, Sequence[Json]],
    refusals: Mapping[str, FailedCall],
    left_out: Mapping[str, LeftOut],
) -> list[Json]:
    """The devices as in gpu.samples, each with its holders, why it could not be read, and which metrics it lacks.

    The refusal of a MIG device is that of its GPU. A device that could not be read has no list of missing metrics.
    GPUs that are lost or hang come first.
    """
    described: list[Json] = []
    for device in devices:
        mig, ok = device.get("mig"), device["state"] == "ok"
        refusal = None if ok else refusals.get(device["uuid"] if mig is None else mig["parent_uuid"])
        missing = left_out.get(device["uuid"], {}) if ok else {}
        described.append(
            {
                **device,
                "holders": list(holders.get(device["uuid"], ())),
                "refusal": None if refusal is None else _failure(refusal),
                "left_out": [{"what": key, "tried": [*map(_failure, tried)]} for key, tried in missing.items()],
            }
        )
    unwell = {device["uuid"] for device in described if device["state"] != "ok"}
    return sorted(
        described, key=lambda device: not unwell & {device["uuid"], (device.get("mig") or {}).get("parent_uuid")}
    )


def only(report: Json, selector: str) -> dict[str, Any]:
    """The report of the GPU of that index or UUID with its MIG devices, or of that MIG device. Raises NothingToShow."""

    def is_selected(device: Json) -> bool:
        uuids = (device["uuid"], (device.get("mig") or {}).get("parent_uuid"))
        return str(device.get("index")) == selector or normal(selector) in [normal(uuid) for uuid in uuids if uuid]

    devices = [device for device in report["devices"] if is_selected(device)]
    unopened = [entry for entry in report["unopened"] if str(entry["place"]) == selector]
    if not (devices or unopened):
        available = ", ".join(f"{device.get('index')} {device['uuid']}" for device in report["devices"]) or "none"
        raise NothingToShow(f"there is no device {selector!r} here, by index or UUID: there are {available}")
    return {**report, "devices": devices, "unopened": unopened}


def _failure(failed: FailedCall) -> Json:
    return {"call": failed.call, "error": failed.error}


def _text(path: object) -> str | None:
    return None if path is None else str(path)


# -- the report as text


WIDTH = 100
MAX_PROCESSES = 8
"""Of a device; the others are counted."""

_LABEL = 10
_MARGIN, _GAP = "    ", "   "
_OF_THE_NODE = ("driver_version", "cuda_version")

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

_UNPLACED_REASONS = {
    "unknown_form": "the id is of no known form",
    "no_such_device": "no such device here",
    "claim": "a claim: which device it is is in the API server's resource slices",
}

_FACTORS: Mapping[str, tuple[float, str]] = {
    "ratio": (0.01, "%"),
    "bytes": (1 << 30, "GiB"),
    "bytes_per_second": (1 << 20, "MiB/s"),
    "hertz": (1e6, "MHz"),
    "watts": (1, "W"),
    "joules": (1, "J"),
    "celsius": (1, "C"),
    "seconds": (1, "s"),
}


def text(report: Json) -> str:
    """The report as text. Characters that are not printable become question marks."""
    device_by_left_out: dict[str, str] = {}
    unopened = [f"GPU at {entry['place']} can't be opened: {sentence([entry])}" for entry in report["unopened"]]
    unwell = [
        f"{_name(gpu)} {gpu['state']}" for gpu in report["devices"] if gpu["state"] != "ok" and not gpu.get("mig")
    ]
    unwell += [f"GPU at {entry['place']} can't be opened" for entry in report["unopened"]]
    unplaced = []
    for entry in report["unplaced"]:
        claim = entry["claim"]
        name = entry["device_id"] if claim is None else f"{claim['driver']}/{claim['pool']}/{claim['device']}"
        unplaced.append(f"on no device: {name} of {_container_name(entry)}: {_UNPLACED_REASONS[entry['why']]}")
    blocks = [
        _lines([f"not well: {', '.join(unwell)}"] if unwell else []),
        _lines(_head(report)),
        *(_block(device, device_by_left_out) for device in report["devices"]),
        _lines(unopened),
        _lines(unplaced),
    ]
    lines = "\n\n".join("\n".join(block) for block in blocks if block)
    return "\n".join(map(printable, lines.split("\n")))


def amount(key: str, value: float) -> str:
    """A value of the catalogue with its unit, as people write it."""
    unit = CATALOGUE[key].unit if key in CATALOGUE else ""
    if unit == "bitmask":
        return hex(int(value))
    if unit == "bool":
        return "yes" if value else "no"
    factor, suffix = _FACTORS.get(unit, (1, ""))
    number = f"{value / factor:.1f}".removesuffix(".0")
    return f"{number} {suffix}".rstrip()


def sentence(attempts: Iterable[Json]) -> str:
    """The calls that failed, by error, as a phrase."""
    calls: dict[str, list[str]] = {}
    for attempt in attempts:
        calls.setdefault(attempt["error"], []).append(attempt["call"])
    calls_by_error = {error: ", ".join(filter(None, names)) for error, names in calls.items()}
    return ", then ".join(
        _ERRORS.get(error, error) + (f" ({names})" if names else "") for error, names in calls_by_error.items()
    )


def _head(report: Json) -> Iterator[str]:
    gpus = [device for device in report["devices"] if not device.get("mig")]
    mig_count = len(report["devices"]) - len(gpus)
    counts = f"{counted(len(gpus), 'GPU')}, {counted(mig_count, 'MIG device')}"
    yield f"node {report['node']}: {counts}, read twice {report['interval_s']:g} s apart"
    info: Mapping[str, str] = next((device["info"] for device in gpus if device.get("info")), {})
    version_keys = {"driver": "driver_version", "CUDA": "cuda_version"}
    if versions := ", ".join(f"{title} {info[key]}" for title, key in version_keys.items() if key in info):
        yield versions
    kubelet = report["kubelet"]
    if kubelet["socket"] is None:
        yield "no kubelet is asked: holders are what the processes say"
    elif kubelet["containers"] is None:
        yield f"holders are what the processes say: {kubelet['trouble']}"
    else:
        yield f"the kubelet at {kubelet['socket']} tells of {counted(kubelet['containers'], 'container')} with GPUs"
    if report["job_files"]["directory"] is not None:
        yield f"job files in {report['job_files']['directory']}"
    yield from report["job_files"]["troubles"]


def _block(device: Json, device_by_left_out: dict[str, str]) -> list[str]:
    """The lines of a device; those of a MIG device are indented.

    ``device_by_left_out``: earlier devices by what they lack. A device that lacks the same only names the earlier one.
    """
    margin = "  " if device.get("mig") else ""
    width = WIDTH - len(margin)
    parts = (*_identity(device), *_users(device))
    lines = [line for label, content in parts for line in _line(label, content, width)]
    if device["state"] == "ok":
        metrics = device["metrics"]
        lines += _line("metrics", f"{len(metrics)} of {len(CATALOGUE)}", width)
        # two values on a line; one that is too long for that has its own line
        half = (width - len(_MARGIN) - len(_GAP)) // 2
        amounts = [(key, amount(key, metrics[key])) for key in CATALOGUE if key in metrics]
        cells = [f"{key}{value:>{max(half - len(key), len(value) + 1)}}" for key, value in amounts]
        while cells:
            line = cells.pop(0)
            if cells and max(len(line), len(cells[0])) <= half:
                line += _GAP + cells.pop(0)
            lines.append(_MARGIN + line)
        keys_by_reason: dict[str, list[str]] = {}
        for entry in device["left_out"]:
            keys_by_reason.setdefault(sentence(entry["tried"]), []).append(entry["what"])
        reasons = [f"{reason}: {', '.join(keys)}" for reason, keys in keys_by_reason.items()]
        if earlier_device := device_by_left_out.get("\n".join(reasons)):
            lines += _line("left out", f"{len(device['left_out'])}, as of {earlier_device}", width)
        elif reasons:
            device_by_left_out["\n".join(reasons)] = _name(device)
            lines += _line("left out", str(len(device["left_out"])), width)
            for reason in reasons:
                lines += _wrapped(_MARGIN + reason, len(_MARGIN) + 2, width)
    return [margin + line for line in lines]


def _identity(device: Json) -> Iterator[tuple[str, str]]:
    """The lines on what and where the device is, as labels and contents."""
    mig = device.get("mig")
    kind = device.get("model") if mig is None else mig.get("profile")
    yield "", f"{_name(device)}: {kind or 'unknown model or profile'}, {device['state']}"
    if device["refusal"] is not None:
        yield "why", sentence([device["refusal"]])
    yield "uuid", device["uuid"]
    if mig is not None:
        numbers = [f"{key.replace('_', ' ')} {mig[key]}" for key in ("gpu_instance", "compute_instance") if key in mig]
        yield "of", ", ".join([mig["parent_uuid"], *numbers])
        return
    pci = [device["pci_bus_id"]] if "pci_bus_id" in device else []
    pci += [f"minor {device['minor']}"] if "minor" in device else []
    if pci:
        yield "pci", ", ".join(pci)
    info = [
        f"{key.replace('_', ' ')} {value}" for key, value in device.get("info", {}).items() if key not in _OF_THE_NODE
    ]
    if info:
        yield "info", ", ".join(info)


def _users(device: Json) -> Iterator[tuple[str, str]]:
    """The lines on who uses the device: each container once, with its device ids; processes; jobs."""
    ids: dict[str, list[str]] = {}
    for holder in device["holders"]:
        slot = " (a slot of HAMi's: the pod's annotation names the GPU, which is in the API server)"
        device_id = holder["device_id"] + (slot if holder["hami_slot"] else "")
        ids.setdefault(f"{_container_name(holder)} has {holder['resource']}", []).append(device_id)
    for holder_name, device_ids in ids.items():
        yield "holder", f"{holder_name} {', '.join(device_ids)}"
    processes = device.get("processes") or ()
    names = {"pod_uid": "pod", "container_id": "container", "job_id": "job", "service": "service"}
    for row in processes[:MAX_PROCESSES]:
        memory_bytes, busy_ratio = row.get("memory_used_bytes"), row.get("sm_utilization_ratio")
        facts = [
            str(row["pid"]),
            "memory not known" if memory_bytes is None else amount("memory_used_bytes", memory_bytes),
        ]
        facts += [] if busy_ratio is None else [amount("gpu_utilization_ratio", busy_ratio)]
        owner = " ".join(f"{title} {row[key]}" for key, title in names.items() if key in row)
        yield "process", ", ".join([*facts, owner or "of no pod or job that can be seen"])
    if len(processes) > MAX_PROCESSES:
        yield "process", f"and {len(processes) - MAX_PROCESSES} more"
    for job in device.get("jobs", ()):
        yield "job", ", ".join(job[key] for key in ("id", "user", "partition", "account") if key in job)


def _name(device: Json) -> str:
    mig = device.get("mig")
    gpu = f"GPU {device.get('index', 'without an index')}"
    return gpu if mig is None else f"{gpu} MIG {mig.get('gpu_instance', '?')}/{mig.get('compute_instance', '?')}"


def _container_name(container: Json) -> str:
    return f"{container['namespace']}/{container['pod']}/{container['container']}"


def _lines(contents: Iterable[str]) -> list[str]:
    return [line for content in contents for line in _line("", content)]


def _line(label: str, content: str, width: int = WIDTH) -> list[str]:
    indent = f"  {label:<{_LABEL}}" if label else ""
    return _wrapped(indent + content, len(indent) or 2, width)


def _wrapped(line: str, indent: int, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
