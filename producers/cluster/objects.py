"""What is read of the API server's objects, decoded from their JSON.

In: an object's bytes. Out: frozen records with the fields that something here reads; the rest, managedFields first of
all, is skipped and never kept. Lists and maps may be null, as Go writes empty ones.
On failure: :class:`Undecodable`.
Source: the Kubernetes API reference, v1 of core, meta and resource.k8s.io.
"""

from datetime import datetime
from typing import Annotated, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

Labels = dict[str, str]

Time = Annotated[datetime, msgspec.Meta(tz=True)]
"""A time that says where it counts from, as RFC 3339 has it."""


class Undecodable(Exception):
    """These bytes are no such object. Count and skip it."""


class Reference(msgspec.Struct, frozen=True, rename="camel"):
    """An owner reference: at most one of an object's is its controller's."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    """An object's metadata."""

    name: str
    uid: str
    namespace: str = ""
    creation_timestamp: Time | None = None
    labels: Labels | None = None
    annotations: Labels | None = None
    owner_references: list[Reference] | None = None


class Object(msgspec.Struct, frozen=True):
    """An object of any kind, as far as all have it."""

    metadata: Meta


class Names(msgspec.Struct, frozen=True):
    """What of its metadata says which object it is."""

    name: str
    uid: str


class Identity(msgspec.Struct, frozen=True):
    """What may still be read of an object that is malformed elsewhere."""

    metadata: Names


class Resources(msgspec.Struct, frozen=True):
    """What a container asks for; only the names matter, for limits and requests of a GPU are the same."""

    limits: dict[str, msgspec.Raw] | None = None


class Container(msgspec.Struct, frozen=True):
    """A container of a pod's spec."""

    resources: Resources | None = None


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a pod asks for, and where it is bound to."""

    node_name: str | None = None
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    resource_claims: list[msgspec.Raw] | None = None


class Terminated(msgspec.Struct, frozen=True, rename="camel"):
    """The end of a container."""

    finished_at: Time | None = None


class ContainerState(msgspec.Struct, frozen=True):
    """What a container does."""

    terminated: Terminated | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    """A container as the kubelet tells of it."""

    state: ContainerState | None = None


class Condition(msgspec.Struct, frozen=True, rename="camel"):
    """Something that became true or false of a pod."""

    last_transition_time: Time | None = None


class Present(msgspec.Struct, frozen=True):
    """Something of which only matters that it is there."""


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    """A pod as the kubelet tells of it."""

    phase: str | None = None
    start_time: Time | None = None
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    extended_resource_claim_status: Present | None = None


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Attribute(msgspec.Struct, frozen=True):
    """The value of a device's attribute, where it is a text."""

    string: str | None = None


class Device(msgspec.Struct, frozen=True, rename="camel"):
    """A device of a resource slice; ``node_name`` where each device of the slice has its own."""

    name: str
    attributes: dict[str, Attribute] | None = None
    node_name: str | None = None


class Pool(msgspec.Struct, frozen=True):
    """The pool that a slice is a part of; only the slices of its highest generation count."""

    name: str
    generation: int = 0


class SliceSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a driver offers."""

    driver: str
    pool: Pool
    node_name: str | None = None
    devices: list[Device] | None = None


class Slice(msgspec.Struct, frozen=True):
    """A resource slice of dynamic resource allocation."""

    metadata: Meta
    spec: SliceSpec


class AllocatedDevice(msgspec.Struct, frozen=True, rename="camel"):
    """A device that a claim was given; ``admin_access``: only to look at it, whoever else has it."""

    driver: str
    pool: str
    device: str
    admin_access: bool | None = None


class AllocatedDevices(msgspec.Struct, frozen=True):
    """The devices that a claim was given."""

    results: list[AllocatedDevice] | None = None


class Allocation(msgspec.Struct, frozen=True):
    """What a claim was given."""

    devices: AllocatedDevices = AllocatedDevices()


class ClaimStatus(msgspec.Struct, frozen=True):
    """What became of a claim."""

    allocation: Allocation | None = None


class ResourceClaim(msgspec.Struct, frozen=True):
    """A resource claim of dynamic resource allocation."""

    metadata: Meta
    status: ClaimStatus = ClaimStatus()


class ApiResource(msgspec.Struct, frozen=True):
    """A resource of an API group's version; one with a slash in its name is a part of another."""

    name: str
    kind: str
    namespaced: bool = False


class ApiResources(msgspec.Struct, frozen=True):
    """What an API group's version serves."""

    resources: list[ApiResource] | None = None


def reader(kind: type[T]) -> "msgspec.json.Decoder[T]":
    """A decoder of one kind of object, to be used with :func:`decode`; one is enough for all objects of it."""
    return msgspec.json.Decoder(kind)


def decode(decoder: "msgspec.json.Decoder[T]", raw: bytes) -> T:
    """The object that the bytes are; raises Undecodable where they are none."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable(str(error)) from error


def controller(meta: Meta) -> Reference | None:
    """The owner that answers for the object, or None."""
    return next((owner for owner in meta.owner_references or () if owner.controller), None)


def milliseconds(at: datetime | None) -> int | None:
    """A time in ms since the epoch; the API server's zero time, and any other before the epoch, is 0."""
    return None if at is None else max(0, round(at.timestamp() * 1000))
