"""Frames for browsers: first the whole fleet, then what has changed. JSON, compressed once for all browsers.

A frame has these keys, most of them only if something has changed:

    kind        all (forget what was before) or more
    at_ms       when it was made; began_ms: since when this process knows the fleet
    metric      the metric of the values; empty: there are none
    metrics     [key, unit, help], of all metrics
    nodes       [slot, cluster, node, zone, devices], of nodes that are new, or have other devices or holders;
                a device is [uuid, index, model, MIG profile, its GPU, since_ms, holders], a holder
                [namespace, pod, workload, team]
    now         [slot, ts_ms, a sign for each device, a value for each device], of nodes with a new tick
    alerts      all open alerts
    usage       [team, GPU-hours held, those of them idle], of all teams

A compressed frame is a part of a gzip stream that never ends. It refers to no earlier part and ends at a whole byte, so
any client can get any frames in any order.
"""

import zlib
from typing import Any, Literal, NamedTuple

import msgspec

from sinks.page.fleet import HISTORY_METRICS, SILENT, STEP_MS, Fleet, ShownDevice
from topics.alerts import Alert
from topics.catalogue import CATALOGUE
from topics.times import epoch_ms

GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_FASTEST = 1
_METRICS = [(key, metric.unit, metric.help) for key, metric in CATALOGUE.items()]

Json = dict[str, Any]


class Versions(NamedTuple):
    """The versions of a fleet, or those that a browser has."""

    version: int = 0
    forgotten: int = 0
    alerts: int = 0
    usage: int = 0


def versions(fleet: Fleet) -> Versions:
    """The current versions of a fleet."""
    return Versions(fleet.version, fleet.forgotten, fleet.alerts_version, fleet.usage_version)


def frame(fleet: Fleet, metric: str, at_ms: int, since: Versions | None = None) -> Json:
    """A frame with what has changed since these versions. ``since`` None, or nodes were forgotten: the whole fleet."""
    whole = since is None or since.forgotten != fleet.forgotten
    before = Versions() if since is None or whole else since
    kind: Literal["all", "more"] = "all" if whole else "more"
    content: Json = {"kind": kind, "at_ms": at_ms, "metric": metric}
    if whole:
        content |= {"began_ms": fleet.began_ms, "metrics": _METRICS}
    changed = [node for node in fleet.nodes.values() if node.version > before.version or whole]
    content["nodes"] = [
        [node.slot, node.tick.cluster, node.tick.node, node.zone, [_device(device) for device in node.devices.values()]]
        for node in changed
        if node.shaped > before.version or whole
    ]
    content["now"] = [
        [node.slot, node.tick.ts_ms, node.signs, node.values(metric) if metric else []] for node in changed
    ]
    if whole or before.alerts != fleet.alerts_version:
        content["alerts"] = [_alert(alert) for alert in fleet.alerts()]
    if whole or before.usage != fleet.usage_version:
        content["usage"] = fleet.usage()
    return content


def _device(device: ShownDevice) -> list[Any]:
    last, mig = device.last, device.last.mig
    profile_and_gpu = [mig.profile, mig.parent_uuid] if mig else [None, None]
    return [last.uuid, last.index, last.model, *profile_and_gpu, device.since_ms, device.holders]


def _alert(alert: Alert) -> Json:
    gpus = [gpu.uuid for gpu in alert.gpus]
    return {
        "name": alert.name,
        "severity": alert.severity,
        "cluster": alert.cluster,
        "node": alert.node,
        "since_ms": epoch_ms(alert.starts_at),
        "gpus": gpus or [alert.labels[key] for key in ("gpu_mig_uuid", "gpu_uuid") if key in alert.labels][:1],
        "namespace": alert.labels.get("k8s_namespace_name", ""),
        "pod": alert.labels.get("k8s_pod_name", ""),
        "summary": alert.annotations.get("summary", ""),
        "runbook": alert.annotations.get("runbook", ""),
    }


def device(fleet: Fleet, uuid: str) -> Json | None:
    """A device and its last hour. None: no node has a device with this UUID."""
    node_and_device = fleet.device(uuid)
    if node_and_device is None:
        return None
    node, shown = node_and_device
    return {
        "cluster": node.tick.cluster,
        "node": node.tick.node,
        "ts_ms": node.tick.ts_ms,
        "attribution": shown.last.attribution or node.tick.attribution,
        "word": SILENT if node.silent else shown.sign.decode(),
        "state": shown.last.state,
        "index": shown.last.index,
        "model": shown.last.model,
        "profile": shown.last.mig.profile if shown.last.mig else None,
        "uuid": shown.last.uuid,
        "conflict": shown.last.conflict,
        "metrics": {key: value for key, value in shown.last.metrics.items() if value is not None},
        "xids": shown.last.xids,
        "holders": [*shown.spans, (shown.holders, shown.since_ms, None)],
        "readings": dict(zip(HISTORY_METRICS, shown.metric_history(), strict=True)),
        "words": shown.sign_history(),
        "first_ms": (shown.step + 1) * STEP_MS - len(shown.signs) * STEP_MS,
        "step_ms": STEP_MS,
        "began_ms": fleet.began_ms,
    }


def event(content: Json) -> bytes:
    """A frame as a server-sent event. Its JSON has no line break: those within strings are escaped."""
    return b"retry: 1000\ndata: " + msgspec.json.encode(content) + b"\n\n"


def compressed(data: bytes) -> bytes:
    """A part of a gzip stream, behind ``GZIP_HEADER``."""
    packer = zlib.compressobj(_FASTEST, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)
