"""A kubelet's answer, read: which container was given which devices.

In: a ListPodResourcesResponse. Out: the containers of gpu.allocations. On failure: :class:`Undecodable`.

Source: podresources.proto.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from producers.node.podresources_pb2 import ContainerResources, ListPodResourcesResponse


class Undecodable(ValueError):
    """The kubelet's answer is none. Keep the last one, and ask again."""


class _Holder(NamedTuple):
    """Who was given devices: a container and a resource; None: through resource claims."""

    namespace: str
    pod: str
    container: str
    resource: str | None


class _Claim(NamedTuple):
    """A device of a resource claim, as in gpu.allocations."""

    claim: str
    namespace: str
    driver: str
    pool: str
    device: str


_Device = str | _Claim


def containers(answer: bytes, prefixes: Sequence[str]) -> list[dict[str, Any]]:
    """The containers of gpu.allocations in a ListPodResourcesResponse.

    One dict for each container and resource whose name begins with one of ``prefixes``, and one for the claims of a
    container whose driver is of the domain of one ("gpu.nvidia.com" is of "nvidia.com/"). What the answer says twice is
    there once. Raises :class:`Undecodable`.
    """
    given: dict[_Holder, dict[_Device, None]] = {}
    for holder, devices in _given(_decoded(answer), tuple(prefixes)):
        for device in devices:
            given.setdefault(holder, {})[device] = None
    if not all(all(holder[:3]) for holder in given):
        raise Undecodable("a container with devices, or its pod or namespace, has no name")
    return [_row(holder, list(once)) for holder, once in given.items()]


def _decoded(answer: bytes) -> ListPodResourcesResponse:
    try:
        return ListPodResourcesResponse.FromString(answer)
    except DecodeError as error:
        raise Undecodable(str(error)) from error


def _given(answer: ListPodResourcesResponse, prefixes: tuple[str, ...]) -> Iterator[tuple[_Holder, Iterable[_Device]]]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name.startswith(prefixes):
                    holder = _Holder(pod.namespace, pod.name, container.name, devices.resource_name)
                    yield holder, devices.device_ids
            if container.dynamic_resources:
                yield _Holder(pod.namespace, pod.name, container.name, None), _claims(container, prefixes)


def _claims(container: ContainerResources, prefixes: tuple[str, ...]) -> Iterator[_Claim]:
    for dynamic in container.dynamic_resources:
        for claimed in dynamic.claim_resources:
            if any(_is_of(claimed.driver_name, prefix) for prefix in prefixes):
                place = (claimed.driver_name, claimed.pool_name, claimed.device_name)
                yield _Claim(dynamic.claim_name, dynamic.claim_namespace, *place)


def _is_of(driver: str, prefix: str) -> bool:
    """Whether a driver's name is the domain of a resource prefix, or below it."""
    return f".{driver}".endswith("." + prefix.partition("/")[0])


def _row(holder: _Holder, devices: list[Any]) -> dict[str, Any]:
    row = {"namespace": holder.namespace, "pod": holder.pod, "container": holder.container}
    if holder.resource is None:
        return {**row, "claims": [claim._asdict() for claim in sorted(devices)]}
    return {**row, "resource": holder.resource, "device_ids": devices}
