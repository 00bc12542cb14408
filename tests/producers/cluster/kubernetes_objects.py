"""Kubernetes objects as an API server has them, as JSON and decoded."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from producers.cluster import config, objects
from producers.cluster.objects import (
    ANNOTATION_BOUNDS,
    LABEL_BOUNDS,
    NODE_LABEL_BOUNDS,
    AllowList,
    Selection,
    decode,
)
from producers.cluster.pods import PodOwner
from producers.cluster.store import Store
from topics.workloads import Owner

JsonDict = dict[str, Any]

PREFIXES = ("nvidia.com/",)
START = "2026-03-01T12:00:00Z"
START_MS = 1_772_366_400_000

_POD, _SLICE, _CLAIM, _TAINT_RULE = (
    msgspec.json.Decoder(objects.Pod),
    msgspec.json.Decoder(objects.ResourceSlice),
    msgspec.json.Decoder(objects.ResourceClaim),
    msgspec.json.Decoder(objects.DeviceTaintRule),
)


def raw(content: JsonDict) -> bytes:
    """The bytes of an object."""
    return json.dumps(content).encode()


def pod_json(name: str = "bert-0", uid: str = "", **changed: Any) -> JsonDict:
    """A bound pod that asks for a GPU. ``limits``, ``node``, ``labels``, ``annotations``, ``owner``, ``namespace``,
    ``deleting`` and ``status`` change it."""
    owner = changed.get("owner")
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "namespace": changed.get("namespace", "ml"),
            "uid": uid or f"uid-{name}",
            "creationTimestamp": START,
            "deletionTimestamp": START if changed.get("deleting") else None,
            "labels": changed.get("labels", {"app": "bert"}),
            "annotations": changed.get("annotations"),
            "ownerReferences": [reference(owner)] if owner else None,
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
        },
        "spec": {
            "nodeName": changed.get("node", "n1"),
            "containers": [{"name": "main", "resources": {"limits": changed.get("limits", {"nvidia.com/gpu": "1"})}}],
        },
        "status": {"phase": "Running", "startTime": START, **changed.get("status", {})},
    }


def reference(owner: Owner) -> JsonDict:
    """A controller's reference."""
    return {
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
    }


def pod(name: str = "bert-0", uid: str = "", **changed: Any) -> objects.Pod:
    """The same, decoded."""
    return decode(_POD, raw(pod_json(name, uid, **changed)))


def over(phase: str = "Succeeded", *finished: str | None) -> JsonDict:
    """The status of a pod that is over, with the ends of its containers."""
    ends = [{"state": {"terminated": {"exitCode": 0, "finishedAt": end}}} for end in finished]
    return {"phase": phase, "containerStatuses": ends or None}


def slice_json(name: str = "s", **changed: Any) -> JsonDict:
    """A resource slice; ``uuids`` are the UUIDs of its devices, ``taints`` the taints of the first one."""
    uuids: Sequence[str | None] = changed.get("uuids", ("GPU-a", "GPU-b"))
    node: str | None = changed.get("node", "n1")
    devices = [
        {"name": f"gpu-{number}", "attributes": {"uuid": {"string": uuid}, "index": {"int": number}}}
        for number, uuid in enumerate(uuids)
    ]
    if taints := changed.get("taints"):
        devices[0]["taints"] = taints
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {
            "driver": changed.get("driver", "gpu.nvidia.com"),
            "nodeName": node,
            "pool": {
                "name": changed.get("pool", node),
                "generation": changed.get("generation", 1),
                "resourceSliceCount": changed.get("count", 1),
            },
            "devices": devices,
        },
    }


def slice_(name: str = "s", **changed: Any) -> objects.ResourceSlice:
    """The same, decoded."""
    return decode(_SLICE, raw(slice_json(name, **changed)))


def taint_rule_json(name: str = "rule", **spec: Any) -> JsonDict:
    """A device taint rule; ``deviceSelector`` and ``taint`` change it."""
    taint = {"key": "example.com/xid", "value": "79", "effect": "NoExecute", "timeAdded": START}
    return {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": {"taint": taint, **spec}}


def taint_rule(name: str = "rule", **spec: Any) -> objects.DeviceTaintRule:
    """The same, decoded."""
    return decode(_TAINT_RULE, raw(taint_rule_json(name, **spec)))


def claim_json(name: str = "monitor", **changed: Any) -> JsonDict:
    """A resource claim for administration. ``results`` are pairs of a device and its ``adminAccess``, or None for a
    claim without devices; ``uid`` changes it."""
    results: Sequence[tuple[str, bool | None]] | None = changed.get("results", [("gpu-0", True)])
    rows = [
        {
            "request": "gpu",
            "driver": changed.get("driver", "gpu.nvidia.com"),
            "pool": changed.get("pool", "n1"),
            "device": device,
            **({} if access is None else {"adminAccess": access}),
        }
        for device, access in results or ()
    ]
    status = {} if results is None else {"allocation": {"devices": {"results": rows}}}
    return {"metadata": {"name": name, "namespace": "ml", "uid": changed.get("uid", f"uid-{name}")}, "status": status}


def claim(name: str = "monitor", **changed: Any) -> objects.ResourceClaim:
    """The same, decoded."""
    return decode(_CLAIM, raw(claim_json(name, **changed)))


def named(
    name: str, labels: Mapping[str, str | None] | None = None, annotations: Mapping[str, str] | None = None
) -> JsonDict:
    """A node or a namespace."""
    return {"metadata": {"name": name, "uid": f"uid-{name}", "labels": labels, "annotations": annotations}}


class Follower:
    """Records which owners' chains are followed."""

    def __init__(self) -> None:
        self.followed: set[PodOwner] = set()

    def follow(self, owner: PodOwner) -> None:
        self.followed.add(owner)

    def forget(self, owner: PodOwner) -> None:
        self.followed.remove(owner)


def chosen(*, labels: Sequence[str] = config.POD_LABELS) -> Selection:
    """The default selection, except for the labels of pods."""
    return Selection(
        PREFIXES,
        pod_labels=AllowList(labels, LABEL_BOUNDS),
        pod_annotations=AllowList(config.POD_ANNOTATIONS, ANNOTATION_BOUNDS),
        namespace_labels=AllowList(config.NAMESPACE_LABELS, LABEL_BOUNDS),
        node_labels=AllowList(config.NODE_LABELS, NODE_LABEL_BOUNDS),
    )


def state(*nodes: str, follower: Follower | None = None) -> Store:
    """An empty cluster of some nodes."""
    owners = follower or Follower()
    store = Store(chosen(), owners.follow, owners.forget)
    for node in nodes:
        store.put_node(node, {})
    return store
