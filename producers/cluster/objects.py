"""The API server's objects as far as they are decoded, and what of them is kept.

In: an object's bytes. Out: frozen records with the fields that something here reads; which pods and drivers concern
GPUs; and the labels and annotations that an allow-list names, within bounds. Everything else is skipped and never kept,
managedFields first of all. Lists and maps may be null, because Go writes empty ones so. Tenants write the labels and
annotations of their pods, so what is kept of one pod is limited. All of it is pure.
On failure: :class:`UndecodableObject`.
Source: the Kubernetes API reference, v1 of core, meta and resource.k8s.io; resource.k8s.io also as v1beta2 and v1beta1.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import orjson

from topics.topic import UNDECODABLE, Int
from topics.workloads import MAINTENANCE

T = TypeVar("T", bound=msgspec.Struct)
DEEPEST = 100  # levels of an object; nothing that is read here lies that deep

Labels = dict[str, str]
Time = Annotated[datetime, msgspec.Meta(tz=True)]  # a time with its offset from UTC, as RFC 3339 has it
_DNS = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_ALLOWED = re.compile(rf"\*|{_DNS}/\*|({_DNS}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)


class UndecodableObject(Exception):
    """The bytes are not such an object. Count and skip it."""


# The objects are named as in the API reference, which documents them; the docstrings only add to it.


class Reference(msgspec.Struct, frozen=True, rename="camel"):
    """An owner reference: at most one of an object's is its controller's."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str
    namespace: str = ""
    creation_timestamp: Time | None = None
    labels: Labels | None = None
    annotations: Labels | None = None
    owner_references: list[Reference] | None = None


class Object(msgspec.Struct, frozen=True):
    metadata: Meta


class NodeTaint(msgspec.Struct, frozen=True):
    key: str
    value: str | None = None


class NodeSpec(msgspec.Struct, frozen=True):
    taints: list[NodeTaint] | None = None


class Node(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: NodeSpec = NodeSpec()

    @property
    def maintenance(self) -> str | None:
        """The text about the node's maintenance; None if it is in none."""
        texts = [(self.metadata.annotations or {}).get(MAINTENANCE)]
        texts += [taint.value or "by a taint" for taint in self.spec.taints or () if taint.key == MAINTENANCE]
        return next((text.strip() or "yes" for text in texts if text is not None and text.strip() != "false"), None)


class IdentityMeta(msgspec.Struct, frozen=True):
    """The part of the metadata that identifies an object."""

    name: str
    uid: str


class Identity(msgspec.Struct, frozen=True):
    """An object of which only the identity is decoded, because the rest may be malformed."""

    metadata: IdentityMeta


class Resources(msgspec.Struct, frozen=True):
    """What a container asks for; only the names matter, for limits and requests of a GPU are the same."""

    limits: dict[str, msgspec.Raw] | None = None


class Container(msgspec.Struct, frozen=True):
    resources: Resources | None = None


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str | None = None
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    resource_claims: list[msgspec.Raw] | None = None


class Terminated(msgspec.Struct, frozen=True, rename="camel"):
    finished_at: Time | None = None


class Waiting(msgspec.Struct, frozen=True):
    reason: str | None = None


class ContainerState(msgspec.Struct, frozen=True):
    terminated: Terminated | None = None
    waiting: Waiting | None = None


class ResourceHealth(msgspec.Struct, frozen=True):
    """One device: the id is the device plugin's, or ``DRIVER/POOL/DEVICE``."""

    id: str = msgspec.field(name="resourceID")
    health: str | None = None
    message: str | None = None


class ResourceStatus(msgspec.Struct, frozen=True):
    """The devices of a container by a resource's name, or by ``claim:CLAIM/REQUEST``."""

    name: str
    resources: list[ResourceHealth] | None = None


class ContainerStatus(msgspec.Struct, frozen=True, rename="camel"):
    state: ContainerState | None = None
    allocated_resources_status: list[ResourceStatus] | None = None
    restart_count: Int = 0


class PodCondition(msgspec.Struct, frozen=True, rename="camel"):
    last_transition_time: Time | None = None


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str | None = None
    start_time: Time | None = None
    conditions: list[PodCondition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    extended_resource_claim_status: dict[str, msgspec.Raw] | None = None  # only that it is there matters


class Pod(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Attribute(msgspec.Struct, frozen=True):
    """The value of a device's attribute, if it is a text."""

    string: str | None = None


class DeviceTaint(msgspec.Struct, frozen=True):
    key: str
    effect: str
    value: str | None = None


class BasicDevice(msgspec.Struct, frozen=True, rename="camel"):
    """What a slice says of a device; it has a ``node_name`` if each device of the slice has its own."""

    attributes: dict[str, Attribute] | None = None
    node_name: str | None = None
    taints: list[DeviceTaint] | None = None


class SliceDevice(BasicDevice, frozen=True, kw_only=True):
    """A device of a resource slice. Version v1beta1 has all but its name in ``basic``."""

    name: str
    basic: BasicDevice | None = None


class Pool(msgspec.Struct, frozen=True, rename="camel"):
    """The pool that a slice is a part of, and how many slices its generation has; 0 if that is not known."""

    name: str
    generation: int = 0
    resource_slice_count: int = 0


class SliceSpec(msgspec.Struct, frozen=True, rename="camel"):
    driver: str
    pool: Pool
    node_name: str | None = None
    devices: list[SliceDevice] | None = None


class ResourceSlice(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: SliceSpec


class DeviceSelector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which devices a rule taints: those for which all hold that are given."""

    driver: str | None = None
    pool: str | None = None
    device: str | None = None


class TaintRuleSpec(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A selector by something else, which earlier versions had, is not understood: then the rule is skipped."""

    taint: DeviceTaint
    device_selector: DeviceSelector | None = None


class DeviceTaintRule(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: TaintRuleSpec


class AllocatedDevice(msgspec.Struct, frozen=True, rename="camel"):
    """A device that a claim was given; ``admin_access``: only to look at it, whoever else has it."""

    driver: str
    pool: str
    device: str
    admin_access: bool | None = None


class AllocatedDevices(msgspec.Struct, frozen=True):
    results: list[AllocatedDevice] | None = None


class Allocation(msgspec.Struct, frozen=True):
    devices: AllocatedDevices = AllocatedDevices()


class ClaimStatus(msgspec.Struct, frozen=True):
    allocation: Allocation | None = None


class ResourceClaim(msgspec.Struct, frozen=True):
    metadata: Meta
    status: ClaimStatus = ClaimStatus()


class ApiResource(msgspec.Struct, frozen=True):
    """A resource of an API group's version; one with a slash in its name is a part of another."""

    name: str
    kind: str
    namespaced: bool = False


class ApiResources(msgspec.Struct, frozen=True):
    resources: list[ApiResource] | None = None


def decode(decoder: "msgspec.json.Decoder[T]", raw: bytes | msgspec.Raw) -> T:
    """The decoded object; raises UndecodableObject.

    Whoever may write a claim may nest its parameters as deeply as the API server takes it, which is 10,000 levels. How
    many Python takes differs between its versions, and is only 1,400 in 3.12.1. So such an object is read without them.
    """
    try:
        try:
            return decoder.decode(raw)
        except RecursionError:
            return decoder.decode(shallow(bytes(raw)))
    except UNDECODABLE as error:
        raise UndecodableObject(str(error)) from error


def shallow(raw: bytes, deepest: int = DEEPEST) -> bytes:
    """The JSON with null in place of what is nested deeper than ``deepest`` levels."""
    kept, begin, depth = [], 0, 0
    for token in _STRING_OR_BRACKET.finditer(raw):
        if token[0] in b"{[":
            depth += 1
            if depth == deepest + 1:
                kept.append(raw[begin : token.start()])
        elif token[0] in b"]}":
            if depth == deepest + 1:
                kept.append(b"null")
                begin = token.end()
            depth -= 1
    return b"".join([*kept, raw[begin:]])


def controller(meta: Meta) -> Reference | None:
    """The owner that is the object's controller, or None."""
    return next((owner for owner in meta.owner_references or () if owner.controller), None)


def milliseconds(time: datetime | None) -> int | None:
    """A time in ms since the epoch; the API server's zero time, and any other before the epoch, is 0."""
    return None if time is None else max(0, round(time.timestamp() * 1000))


# -- what is kept


class Bounds(NamedTuple):
    """The most entries that are kept, the most bytes of a value (longer ones are cut), and of all of them as JSON."""

    entries: int
    value_bytes: int
    total_bytes: int


LABEL_BOUNDS = Bounds(64, 253, 8 * 1024)
ANNOTATION_BOUNDS = Bounds(64, 4 * 1024, 16 * 1024)
NODE_LABEL_BOUNDS = Bounds(256, 253, 64 * 1024)
LONGEST_TEXT = 317  # the longest name of a label, and more than any other name that the API server takes for an object


def shortened(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text itself, or as much of its beginning as fits into ``longest`` bytes of UTF-8."""
    if len(text) * 4 <= longest or len(text.encode()) <= longest:
        return text
    return text[:longest].encode()[:longest].decode(errors="ignore")


class Kept(NamedTuple):
    """The labels that an allow-list and its bounds let through, and how many allowed ones were cut or had no room."""

    entries: Labels
    cut: int


class AllowList:
    """Exact names, ``prefix/*``, and ``*`` for all. Give it only what :func:`allow_list_errors` finds right."""

    def __init__(self, allowed: Iterable[str], bounds: Bounds) -> None:
        names = set(allowed)
        self._prefixes = tuple(sorted(name[:-1] for name in names if name.endswith("*")))
        self._names = frozenset(name for name in names if not name.endswith("*"))
        self._bounds = bounds

    def keep(self, labels: Mapping[str, str] | None) -> Kept:
        """The first of the allowed labels that fit, their values cut."""
        allowed = [name for name in labels or () if name in self._names or name.startswith(self._prefixes)]
        kept: Labels = {}
        remaining_bytes, cut = self._bounds.total_bytes, 0
        for name in sorted(allowed, key=lambda name: (name not in self._names, name)):
            whole = (labels or {})[name]
            value = shortened(whole, self._bounds.value_bytes)
            size = len(orjson.dumps((name, value)))
            if size <= remaining_bytes and len(kept) < self._bounds.entries:
                kept[name] = value
                remaining_bytes -= size
                cut += value is not whole
        return Kept(kept, cut + len(allowed) - len(kept))


def allow_list_errors(option: str, allowed: Sequence[str]) -> list[str]:
    """The errors in the allow-list of an option."""
    return [
        f"{option}: {name!r} is not the name of a label, nor PREFIX/*, nor *"
        for name in allowed
        if not _ALLOWED.fullmatch(name)
    ]


class Selection(NamedTuple):
    """What is kept of the cluster: pods and drivers of resources with these ``prefixes``, and what allow-lists name."""

    prefixes: tuple[str, ...]
    pod_labels: AllowList
    pod_annotations: AllowList
    namespace_labels: AllowList
    node_labels: AllowList

    def has_pod(self, pod: Pod) -> bool:
        """Whether a pod concerns GPUs: it asks for a resource whose name begins with one of the prefixes, or for
        devices by claim, whose driver may be any."""
        if pod.spec.resource_claims or pod.status.extended_resource_claim_status is not None:
            return True
        for container in chain(pod.spec.containers or (), pod.spec.init_containers or ()):
            limits = container.resources and container.resources.limits
            if any(name.startswith(self.prefixes) for name in limits or ()):
                return True
        return False

    def has_driver(self, driver: str) -> bool:
        """Whether a DRA driver is of the domain of one of the prefixes, as gpu.nvidia.com is of nvidia.com/."""
        return f".{driver}".endswith(tuple("." + prefix.partition("/")[0] for prefix in self.prefixes))
