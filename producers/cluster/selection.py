"""What is kept of the cluster: GPU pods, and of labels and annotations what an allow-list names, within bounds.

In: objects as the API server has them. Out: what of them may be published. All of it is pure.
A tenant writes a pod's labels and annotations: whatever is in them, what is kept of one pod has a greatest size.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import orjson

from producers.cluster.objects import Container, Pod

_DNS = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_ALLOWED = re.compile(rf"\*|{_DNS}/\*|({_DNS}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")


class Bounds(NamedTuple):
    """At most so many entries, of values of so many bytes (longer ones are cut), in so many bytes of JSON."""

    entries: int
    value_bytes: int
    total_bytes: int


LABEL_BOUNDS = Bounds(64, 253, 8 * 1024)
ANNOTATION_BOUNDS = Bounds(64, 4 * 1024, 16 * 1024)
NODE_LABEL_BOUNDS = Bounds(256, 253, 64 * 1024)

LONGEST_TEXT = 317
"""The longest name of a label, and more than any other name that the API server takes for an object."""


class Kept(NamedTuple):
    """What an allow-list and its bounds left of some labels, those that it names first, and how many they cut or left
    out for want of room."""

    entries: dict[str, str]
    cut: int


class AllowList:
    """Exact names, ``prefix/*``, and ``*`` for all. Make it of what :func:`mistakes` finds nothing wrong with."""

    def __init__(self, allowed: Iterable[str], bounds: Bounds) -> None:
        names = set(allowed)
        self._prefixes = tuple(sorted(name[:-1] for name in names if name.endswith("*")))
        self._names = frozenset(name for name in names if not name.endswith("*"))
        self._bounds = bounds

    def keep(self, labels: Mapping[str, str] | None) -> Kept:
        """What is kept of some labels."""
        if not labels:
            return Kept({}, 0)
        names = [name for name in labels if name in self._names or name.startswith(self._prefixes)]
        first = sorted(names, key=lambda name: (name not in self._names, name))
        return _bounded({name: labels[name] for name in first}, self._bounds)


def _bounded(entries: Mapping[str, str], bounds: Bounds) -> Kept:
    """The first entries that fit, their values cut."""
    kept: dict[str, str] = {}
    room, cut = bounds.total_bytes, 0
    for name, whole in entries.items():
        value = shortened(whole, bounds.value_bytes)
        size = _json_bytes(name, value)
        if size <= room and len(kept) < bounds.entries:
            kept[name] = value
            room -= size
            cut += value is not whole
    return Kept(kept, cut + len(entries) - len(kept))


def shortened(text: str, longest: int) -> str:
    """The text itself, or as much of its beginning as has so many bytes in UTF-8."""
    if len(text) * 4 <= longest or len(text.encode()) <= longest:
        return text
    return text[:longest].encode()[:longest].decode(errors="ignore")


def _json_bytes(name: str, value: str) -> int:
    return len(orjson.dumps((name, value)))


def mistakes(option: str, allowed: Sequence[str]) -> list[str]:
    """What is wrong with an allow-list that an option gives."""
    return [
        f"{option}: {name!r} is not the name of a label, nor PREFIX/*, nor *"
        for name in allowed
        if not _ALLOWED.fullmatch(name)
    ]


def gpu_pods(prefixes: Sequence[str]) -> Callable[[Pod], bool]:
    """Whether a pod concerns GPUs: it asks for a resource whose name begins with one of ``prefixes``, or for devices by
    claim, whose driver may be any."""
    beginnings = tuple(prefixes)

    def asks(container: Container) -> bool:
        limits = container.resources and container.resources.limits
        return any(name.startswith(beginnings) for name in limits or ())

    def concerns(pod: Pod) -> bool:
        if pod.spec.resource_claims or pod.status.extended_resource_claim_status is not None:
            return True
        return any(map(asks, chain(pod.spec.containers or (), pod.spec.init_containers or ())))

    return concerns


def gpu_drivers(prefixes: Sequence[str]) -> Callable[[str], bool]:
    """Whether a DRA driver is of the domain of one of the resource prefixes, as gpu.nvidia.com is of nvidia.com/."""
    domains = {prefix.partition("/")[0] for prefix in prefixes}

    def concerns(driver: str) -> bool:
        return any(driver == domain or driver.endswith(f".{domain}") for domain in domains)

    return concerns
