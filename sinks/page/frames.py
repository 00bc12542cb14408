"""What goes to a browser: the whole fleet once, then what has changed. JSON, and compressed once for all.

A frame has, each if there is something to say:

    kind        all (forget what was before) or more
    at_ms       when it was made; began_ms: since when this process knows the fleet
    metric      the metric of the values; empty: there are none
    metrics     [key, unit, help], of all metrics
    nodes       [slot, cluster, node, zone, devices], of nodes that are new, or have other devices or holders;
                a device is [uuid, index, model, MIG profile, its GPU, since_ms, holders], a holder
                [namespace, pod, workload, team]
    now         [slot, ts_ms, a sign for each device, a value for each device], of nodes with a new tick
    alerts      those that are open, all of them
    usage       [team, GPU-hours held, those of them idle], all of them

A compressed frame is a piece of a gzip stream that ends nowhere: each begins without a history and ends at a whole
byte, so that any client can be given any frames in any order.
"""

import zlib
from typing import Any, Literal, NamedTuple

import msgspec

from sinks.page.fleet import READ, STEP_MS, Fleet, ShownDevice
from topics.alerts import Alert, milliseconds
from topics.catalogue import CATALOGUE

GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_FASTEST = 1
_METRICS = [(key, metric.unit, metric.help) for key, metric in CATALOGUE.items()]

Json = dict[str, Any]


class Versions(NamedTuple):
    """The versions of a fleet, or up to which ones somebody knows it."""

    version: int = 0
    forgotten: int = 0
    alerts: int = 0
    usage: int = 0


def versions(fleet: Fleet) -> Versions:
    """Those that the fleet has now."""
    return Versions(fleet.version, fleet.forgotten, fleet.alerts_version, fleet.usage_version)


def frame(fleet: Fleet, metric: str, at_ms: int, since: Versions | None = None) -> Json:
    """What has changed since then; None, or if nodes are gone: everything."""
    whole = since is None or since.forgotten != fleet.forgotten
    known = Versions() if since is None or whole else since
    kind: Literal["all", "more"] = "all" if whole else "more"
    said: Json = {"kind": kind, "at_ms": at_ms, "metric": metric}
    if whole:
        said |= {"began_ms": fleet.began_ms, "metrics": _METRICS}
    changed = [node for node in fleet.nodes.values() if node.version > known.version or whole]
    said["nodes"] = [
        [node.slot, node.tick.cluster, node.tick.node, node.zone, [_device(one) for one in node.devices.values()]]
        for node in changed
        if node.shaped > known.version or whole
    ]
    said["now"] = [[node.slot, node.tick.ts_ms, node.words, node.values(metric) if metric else []] for node in changed]
    if whole or known.alerts != fleet.alerts_version:
        said["alerts"] = [_alert(alert) for alert in fleet.alerts()]
    if whole or known.usage != fleet.usage_version:
        said["usage"] = fleet.usage()
    return said


def _device(device: ShownDevice) -> list[Any]:
    is_, mig = device.last, device.last.mig
    cut = [mig.profile, mig.parent_uuid] if mig else [None, None]
    return [is_.uuid, is_.index, is_.model, *cut, device.since_ms, device.who]


def _alert(alert: Alert) -> Json:
    gpus = [one.uuid for one in alert.gpus]
    return {
        "name": alert.name,
        "severity": alert.severity,
        "cluster": alert.cluster,
        "node": alert.node,
        "since_ms": milliseconds(alert.starts_at),
        "gpus": gpus or [alert.labels[key] for key in ("gpu_mig_uuid", "gpu_uuid") if key in alert.labels][:1],
        "namespace": alert.labels.get("k8s_namespace_name", ""),
        "pod": alert.labels.get("k8s_pod_name", ""),
        "summary": alert.annotations.get("summary", ""),
        "runbook": alert.annotations.get("runbook", ""),
    }


def device(fleet: Fleet, uuid: str) -> Json | None:
    """All that is known of a device, and its last hour; None: there is none of that UUID."""
    found = fleet.device(uuid)
    if found is None:
        return None
    node, of = found
    return {
        "cluster": node.tick.cluster,
        "node": node.tick.node,
        "ts_ms": node.tick.ts_ms,
        "attribution": node.tick.attribution,
        "silent": node.silent,
        "state": of.last.state,
        "index": of.last.index,
        "model": of.last.model,
        "uuid": of.last.uuid,
        "conflict": of.last.conflict,
        "metrics": {key: value for key, value in of.last.metrics.items() if value is not None},
        "xids": of.last.xids,
        "holders": [*of.spans, (of.who, of.since_ms, None)],
        "readings": dict(zip(READ, of.history(), strict=True)),
        "words": of.words_since(),
        "first_ms": (of.step + 1) * STEP_MS - len(of.words) * STEP_MS,
        "step_ms": STEP_MS,
        "began_ms": fleet.began_ms,
    }


def event(said: Json) -> bytes:
    """A frame as an event of a stream of events: JSON has no line breaks outside of strings, and in them they are
    escaped."""
    return b"retry: 1000\ndata: " + msgspec.json.encode(said) + b"\n\n"


def compressed(data: bytes) -> bytes:
    """A piece of a gzip stream after ``GZIP_HEADER``."""
    packer = zlib.compressobj(_FASTEST, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)
