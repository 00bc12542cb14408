"""``gpustream devices``: what of this machine would be sampled now, what not, and why not.

In:       the node producer's own readers of GPUs, kubelet, processes and jobs, asked twice, an interval apart.
Out:      a report; on standard output as text or as one JSON object.
On failure: without a driver or a GPU a sentence on standard error, and exit code 1. Without a kubelet, or with GPUs
          that do not answer, the report says so.
"""

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import click
import msgspec
import orjson

from delivery.instruments import Instruments
from gpustream import devices_text
from producers.node import instruments
from producers.node.cgroups import Places
from producers.node.component import ANSWER_WITHIN, OPEN_WITHIN_S
from producers.node.config import NodeSettings
from producers.node.gpus import Gpus
from producers.node.job_files import JobFiles
from producers.node.jobs import with_jobs
from producers.node.kubelet import DEADLINE_S, Kubelet
from producers.node.nvml.calls import LeftOut, Tried
from topics.device_ids import DeviceIndex, UnknownDeviceId, normal, parse
from topics.samples import Device

Format = Literal["text", "json"]
Json = dict[str, Any]

SCHEMA = 1
FAILED = 1

KUBELET_WITHIN_S = DEADLINE_S + 1.0
"""A tick does not wait so long for the kubelet: its answer counts for the next one, which there is none of here."""


class Nothing(Exception):
    """There is nothing to show; the message says why."""


class Placed(NamedTuple):
    """The kubelet's containers by the device that they hold, and what of them is on no device, and why."""

    holders: Mapping[str, Sequence[Json]]
    unplaced: Sequence[Json]


def show(settings: NodeSettings, form: Format, wanted: str | None = None) -> int:
    """Print the devices, or the one that is ``wanted`` by its index or UUID. 1 where nothing would be sampled."""
    try:
        report = asyncio.run(look(settings))
        found = report if wanted is None else only(report, wanted)
    except Nothing as nothing:
        click.echo(str(nothing), err=True)
        return FAILED
    text = orjson.dumps(found).decode() if form == "json" else devices_text.text(found)
    sys.stdout.write(f"{text}\n")
    return 0 if found["devices"] else FAILED


async def look(settings: NodeSettings, open_within_s: float = OPEN_WITHIN_S) -> Json:
    """Read twice, and say what was found. Raises :class:`Nothing`."""
    counted, places = Instruments(instruments.INSTRUMENTS), Places(settings.procfs)
    gpus = Gpus(counted, places, interval_s=settings.interval_s)
    kubelet = Kubelet(settings.pod_resources_socket, counted, prefixes=settings.resource_prefixes)
    files = JobFiles(settings.hpc_job_mapping_dir, counted)
    within_s = settings.interval_s * ANSWER_WITHIN
    try:
        await gpus.open(open_within_s)
        if not gpus.count:
            raise Nothing("; ".join(gpus.not_ready()))
        await asyncio.sleep(settings.interval_s)
        read = gpus.read(within_s), kubelet.read(KUBELET_WITHIN_S), files.read(within_s)
        found, containers, mapped = await asyncio.gather(*read)
        refusals, placed = gpus.refusals(), place(containers or (), found)
        return {
            "schema": SCHEMA,
            "node": settings.node,
            "interval_s": settings.interval_s,
            "kubelet": _kubelet(settings, containers, kubelet.not_ready()),
            "job_files": {"directory": _text(settings.hpc_job_mapping_dir), "troubles": files.troubles()},
            "devices": described(
                with_jobs(found, mapped, places.job),
                placed.holders,
                {one.uuid: one.why for one in refusals if one.uuid is not None},
                gpus.left_out(),
            ),
            "unopened": [{"place": one.place, **_tried(one.why)} for one in refusals if one.uuid is None],
            "unplaced": list(placed.unplaced),
        }
    finally:
        gpus.close()
        files.close()
        await kubelet.close()


def place(containers: Iterable[Mapping[str, Any]], devices: Sequence[Mapping[str, Any]]) -> Placed:
    """Who holds which of the devices, as the ids that the kubelet hands on say."""
    index = DeviceIndex(msgspec.convert(devices, list[Device]))
    holders: dict[str, list[Json]] = {}
    unplaced: list[Json] = []
    for container in containers:
        who = {key: container.get(key) for key in ("namespace", "pod", "container", "resource")}
        for device_id in container.get("device_ids", ()):
            meant = _meant(device_id, index)
            if meant.uuid is None:
                unplaced.append({**who, "device_id": device_id, "claim": None, "why": meant.why})
            else:
                holders.setdefault(meant.uuid, []).append({**who, "device_id": device_id, "hami_slot": meant.slot})
        claims = container.get("claims", ())
        unplaced += [{**who, "device_id": None, "claim": dict(claim), "why": "claim"} for claim in claims]
    return Placed(holders, unplaced)


class _Meant(NamedTuple):
    """The device of an id, or why there is none; ``slot``: it is a slot of HAMi's, which may not be what it seems."""

    uuid: str | None
    why: str = "no_such_device"
    slot: bool = False


def _meant(device_id: str, index: DeviceIndex) -> _Meant:
    try:
        ref = parse(device_id)
    except UnknownDeviceId:
        return _Meant(None, "unknown_form")
    return _Meant(index.find(ref), slot=ref.slot is not None)


def described(
    devices: Iterable[Mapping[str, Any]],
    holders: Mapping[str, Sequence[Json]],
    refusals: Mapping[str, Tried],
    left_out: Mapping[str, LeftOut],
) -> list[Json]:
    """The devices as in gpu.samples, each with who holds it, why it could not be read, and what it could not say."""
    return [
        {
            **device,
            "holders": list(holders.get(device["uuid"], ())),
            "refusal": _refusal(device, refusals),
            "left_out": _left_out(device, left_out),
        }
        for device in devices
    ]


def only(report: Mapping[str, Any], wanted: str) -> Json:
    """The report of the GPU of that index or UUID with its MIG devices, or of that MIG device. Raises Nothing."""
    devices = [device for device in report["devices"] if _is(device, wanted)]
    unopened = [one for one in report["unopened"] if str(one["place"]) == wanted]
    if not (devices or unopened):
        known = ", ".join(f"{device.get('index')} {device['uuid']}" for device in report["devices"]) or "none"
        raise Nothing(f"there is no device {wanted!r} here, by index or UUID: there are {known}")
    return {**report, "devices": devices, "unopened": unopened}


def _is(device: Mapping[str, Any], wanted: str) -> bool:
    uuids = (device["uuid"], (device.get("mig") or {}).get("parent_uuid"))
    return str(device.get("index")) == wanted or normal(wanted) in [normal(uuid) for uuid in uuids if uuid]


def _kubelet(settings: NodeSettings, containers: Sequence[Any] | None, troubles: Sequence[str]) -> Json:
    names = {(one["namespace"], one["pod"], one["container"]) for one in containers or ()}
    return {
        "socket": _text(settings.pod_resources_socket),
        "containers": None if containers is None else len(names),
        "trouble": "; ".join(troubles) or None,
    }


def _refusal(device: Mapping[str, Any], refusals: Mapping[str, Tried]) -> Json | None:
    """Of a MIG device, its GPU's."""
    if device["state"] == "ok":
        return None
    mig = device.get("mig")
    why = refusals.get(device["uuid"] if mig is None else mig["parent_uuid"])
    return None if why is None else _tried(why)


def _left_out(device: Mapping[str, Any], left_out: Mapping[str, LeftOut]) -> list[Json]:
    """Nothing where the device did not answer: that is told once, as its refusal."""
    if device["state"] != "ok":
        return []
    found = left_out.get(device["uuid"], {})
    return [{"what": what, "tried": [_tried(one) for one in tried]} for what, tried in found.items()]


def _tried(one: Tried) -> Json:
    return {"call": one.call, "error": one.error}


def _text(path: object) -> str | None:
    return None if path is None else str(path)
