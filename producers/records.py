"""The records that producers write: plain dicts in, JSON bytes out.

In: what was read, with its place in the producer's run. Out: values of gpu.samples, gpu.allocations and gpu.workloads.
On failure: :class:`Unencodable`, for something that JSON has no word for.
A missing value is absent: ``None``, NaN and infinities are left out, and zero is zero.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from topics.topic import SCHEMA, Name

JsonDict = dict[str, Any]


class Unencodable(Exception):
    """This record holds something that JSON has no word for, such as lone surrogates. Drop and count it."""


def checked_name(what: str, name: str) -> str:
    """``name``, if it can name a cluster or a node; otherwise ValueError says what it may be made of."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ValueError(f"{what} {name!r}: a name has 1-253 of A-Z a-z 0-9 . _ -") from None


def sample(
    *,
    cluster: str,
    node: str,
    run_id: int,
    seq: int,
    ts_ms: int,
    allocations_seq: int | None,
    devices: Sequence[Mapping[str, Any]],
) -> bytes:
    """One node's tick. ``devices`` are dicts as in gpu.samples; ``allocations_seq`` None: there is no kubelet."""
    return _dumps(
        {
            "schema": SCHEMA,
            "cluster": cluster,
            "node": node,
            "run_id": run_id,
            "seq": seq,
            "ts_ms": ts_ms,
            "allocations_seq": allocations_seq,
            "devices": [_device(device) for device in devices],
        }
    )


def snapshot(*, cluster: str, node: str, run_id: int, seq: int, ts_ms: int, content: bytes) -> bytes:
    """A snapshot of a node; ``content`` is what :func:`containers_content` made of its containers."""
    head = {"schema": SCHEMA, "cluster": cluster, "node": node, "run_id": run_id, "seq": seq, "ts_ms": ts_ms}
    return _dumps({**head, "containers": orjson.Fragment(content)})


def workloads(*, cluster: str, node: str, epoch: int, seq: int, ts_ms: int, content: bytes) -> bytes:
    """What the API server knows of a node's pods; ``content`` is what :func:`workloads_content` made of it."""
    head = {"schema": SCHEMA, "cluster": cluster, "node": node, "epoch": epoch, "seq": seq, "ts_ms": ts_ms}
    return _dumps(head)[:-1] + b"," + content[1:]


def containers_content(containers: Iterable[Mapping[str, Any]]) -> bytes:
    """The containers of a snapshot in one order, so that equal content is equal bytes (a kubelet's order varies)."""
    rows = [_present({**row, "device_ids": sorted(row.get("device_ids") or ())}) for row in containers]
    return _dumps(sorted(rows, key=_container_order), sort_keys=True)


def workloads_content(
    node_labels: Mapping[str, str],
    pods: Iterable[Mapping[str, Any]],
    dra_devices: Iterable[Mapping[str, Any]] = (),
    admin_claims: Iterable[Mapping[str, Any]] = (),
    *,
    removed: bool = False,
) -> bytes:
    """What a gpu.workloads record says beside its numbers, in one order, so that equal content is equal bytes."""
    rows = sorted((_present(pod) for pod in pods), key=lambda pod: (pod["namespace"], pod["name"], pod["uid"]))
    dra = sorted((_present(row) for row in dra_devices), key=lambda row: (row["driver"], row["pool"], row["device"]))
    content = {"node_labels": dict(node_labels), "pods": rows, "dra_devices": dra}
    if admin := sorted(map(dict, admin_claims), key=lambda row: sorted(row.items())):
        content["admin_claims"] = admin
    return _dumps(content | {"removed": True} if removed else content, sort_keys=True)


def _container_order(row: JsonDict) -> tuple[str, ...]:
    ids = row["device_ids"]
    return (row["namespace"], row["pod"], row["container"], row.get("resource", ""), ids[0] if ids else "")


def _device(device: Mapping[str, Any]) -> Mapping[str, Any]:
    """A device without its missing values; most have none, and go out as they are."""
    metrics = device.get("metrics")
    processes = device.get("processes")
    if _all_finite(metrics) and all(map(_all_present, processes or ())):
        return device
    clean = _present(device)
    if metrics is not None:
        clean["metrics"] = _present(metrics)
    if processes is not None:
        clean["processes"] = [_present(row) for row in processes]
    return clean


def _all_finite(metrics: Mapping[str, Any] | None) -> bool:
    """Whether no value is missing: a sum is finite only if all of it is. Overflow answers False, and costs a copy."""
    try:
        return math.isfinite(sum(metrics.values())) if metrics else True
    except (TypeError, OverflowError):
        return False


def _all_present(row: Mapping[str, Any]) -> bool:
    return all(map(_is_present, row.values()))


def _present(row: Mapping[str, Any]) -> JsonDict:
    return {key: value for key, value in row.items() if _is_present(value)}


def _is_present(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _dumps(record: object, *, sort_keys: bool = False) -> bytes:
    try:
        return orjson.dumps(record, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except orjson.JSONEncodeError as error:
        raise Unencodable(str(error)) from error
