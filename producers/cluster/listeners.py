"""From what the watches say to what is known: a listener for each resource that is watched.

In: objects' bytes. Out: the state, brought up to date.
On failure: an object that can't be read is counted and skipped, and what was known of it stays.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import msgspec

from delivery.instruments import Instruments
from producers.cluster import instruments as names
from producers.cluster import objects
from producers.cluster.objects import Names, Undecodable, decode, reader
from producers.cluster.store import Store

T = TypeVar("T", bound=msgspec.Struct)

Clock = Callable[[], int]
"""Milliseconds since the epoch."""


class Target(NamedTuple, Generic[T]):
    """What becomes of the objects of one kind. ``seen``: a full list has one that can't be read. ``kept`` counts
    them."""

    kind: type[T]
    begin: Callable[[], None]
    put: Callable[[T], None]
    remove: Callable[[Names], None]
    seen: Callable[[Names], None]
    complete: Callable[[], None]
    kept: Callable[[], int]


class Listener(Generic[T]):
    """Takes what a watch tells of one resource. ``wake`` is called after anything that may have changed the state."""

    def __init__(self, resource: str, target: Target[T], instruments: Instruments, wake: Callable[[], None]) -> None:
        self._target, self._wake = target, wake
        self._whole, self._identity = reader(target.kind), reader(objects.Identity)
        self._undecodable = instruments.counter(names.UNDECODABLE, resource)
        self._objects = instruments.gauge(names.OBJECTS, resource)

    def begin(self) -> None:
        """A full list begins."""
        self._target.begin()

    def put(self, raw: bytes) -> None:
        """An object as it is now."""
        try:
            self._target.put(decode(self._whole, raw))
        except (Undecodable, ValueError):
            self._skip(raw)
        self._tell()

    def remove(self, raw: bytes) -> None:
        """An object was deleted."""
        try:
            self._target.remove(decode(self._identity, raw).metadata)
        except Undecodable:
            self._undecodable.inc()
        self._tell()

    def complete(self) -> None:
        """The full list is over."""
        self._target.complete()
        self._tell()

    def _skip(self, raw: bytes) -> None:
        """An object that can't be read is there nevertheless, if it says which it is."""
        self._undecodable.inc()
        try:
            self._target.seen(decode(self._identity, raw).metadata)
        except Undecodable:
            return

    def _tell(self) -> None:
        self._objects.set(self._target.kept())
        self._wake()


def pods(state: Store, instruments: Instruments, wake: Callable[[], None], clock: Clock) -> Listener[objects.Pod]:
    """The listener of pods."""
    cut = instruments.counter(names.CUT)
    target = Target(
        kind=objects.Pod,
        begin=state.pods.begin,
        put=lambda pod: cut.inc(state.put_pod(pod, clock())),
        remove=lambda pod: state.remove_pod(pod.uid, clock()),
        seen=lambda pod: state.pods.seen(pod.uid),
        complete=lambda: state.complete_pods(clock()),
        kept=lambda: len(state.pods),
    )
    return Listener("pods", target, instruments, wake)


def nodes(state: Store, instruments: Instruments, wake: Callable[[], None], clock: Clock) -> Listener[objects.Object]:
    """The listener of nodes."""
    target = Target(
        kind=objects.Object,
        begin=state.nodes.begin,
        put=lambda node: state.put_node(node.metadata.name, node.metadata.labels),
        remove=lambda node: state.remove_node(node.name, clock()),
        seen=lambda node: state.nodes.seen(node.name),
        complete=lambda: state.complete_nodes(clock()),
        kept=lambda: len(state.nodes),
    )
    return Listener("nodes", target, instruments, wake)


def namespaces(state: Store, instruments: Instruments, wake: Callable[[], None]) -> Listener[objects.Object]:
    """The listener of namespaces."""
    target = Target(
        kind=objects.Object,
        begin=state.namespaces.begin,
        put=lambda one: state.put_namespace(one.metadata.name, one.metadata.labels, one.metadata.annotations),
        remove=lambda namespace: state.remove_namespace(namespace.name),
        seen=lambda namespace: state.namespaces.seen(namespace.name),
        complete=state.complete_namespaces,
        kept=lambda: len(state.namespaces),
    )
    return Listener("namespaces", target, instruments, wake)


def slices(state: Store, instruments: Instruments, wake: Callable[[], None]) -> Listener[objects.Slice]:
    """The listener of resource slices."""
    target = Target(
        kind=objects.Slice,
        begin=state.slices.begin,
        put=state.put_slice,
        remove=lambda part: state.remove_slice(part.uid),
        seen=lambda part: state.slices.seen(part.uid),
        complete=state.complete_slices,
        kept=lambda: len(state.slices),
    )
    return Listener("resourceslices", target, instruments, wake)


def claims(
    state: Store, instruments: Instruments, wake: Callable[[], None], clock: Clock
) -> Listener[objects.ResourceClaim]:
    """The listener of resource claims."""
    target = Target(
        kind=objects.ResourceClaim,
        begin=state.claims.begin,
        put=lambda claim: state.put_claim(claim, clock()),
        remove=lambda claim: state.claims.remove(claim.uid, clock()),
        seen=lambda claim: state.claims.seen(claim.uid),
        complete=lambda: state.claims.complete(clock()),
        kept=lambda: len(state.claims),
    )
    return Listener("resourceclaims", target, instruments, wake)
