"""The cluster as a producer: what its API server says of GPU pods, node by node. One of the replicas publishes it.

In: watches of pods, nodes, namespaces, resource slices, claims and device taint rules; owners, each asked for once.
Out: gpu.workloads.
State: the cluster as far as it concerns GPUs. Every replica keeps it, so that a standby knows what the leader knows.
On failure: without an API server or a Kafka it runs, reports what is missing, and works as soon as they are there.
Nothing is published before all pods and nodes are known, because to a reader a pod that is missing in a record has
ended.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from functools import partial
from typing import Any, NamedTuple

from delivery.connection import Connection
from delivery.instruments import Instruments
from delivery.kubernetes.client import Client
from delivery.sender import Sender
from delivery.tasks import running, set_within, until_stopped
from producers.cluster import instruments as own
from producers.cluster import objects, pods
from producers.cluster.config import NODE_LABELS, POD_ANNOTATIONS, ClusterSettings
from producers.cluster.lease import LeaderElector
from producers.cluster.objects import ANNOTATION_BOUNDS, LABEL_BOUNDS, NODE_LABEL_BOUNDS, AllowList, Selection
from producers.cluster.owners import Chain, Owners
from producers.cluster.policy_events import PolicyEvents
from producers.cluster.reflector import Listener, Reflector
from producers.cluster.store import Store
from producers.cluster.takeover import PublishedNodes, read_back
from producers.publisher import INSTRUMENTS, not_sent, sender_of
from producers.workloads import WorkloadsPublisher

log = logging.getLogger(__name__)

PATHS = {
    "pods": "/api/v1/pods",
    "nodes": "/api/v1/nodes",
    "namespaces": "/api/v1/namespaces",
    "resourceslices": "/apis/resource.k8s.io/v1/resourceslices",
    "resourceclaims": "/apis/resource.k8s.io/v1/resourceclaims",
    "devicetaintrules": "/apis/resource.k8s.io/v1/devicetaintrules",
}
OLDER_PATHS = {  # of what an older API server has under another version only
    "devicetaintrules": ("/apis/resource.k8s.io/v1beta2/devicetaintrules",),
}

REQUIRED = ("pods", "nodes")  # nothing is published without these
OPTIONAL = ("resourceslices", "resourceclaims", "devicetaintrules")  # these an API server need not have
EXTRAS_WITHIN_S = 10.0  # how long the first record waits for namespaces, slices, claims and owners
CHECK_S = 1.0
AT_ONCE = 64  # how many records are made before anything else has its turn
DRAIN_S = 3.0
SPACING_S = 0.2  # the shortest time between two records of a node: a pod that starts changes often
HOLD_S = 1.0  # how long a new pod waits for its owners: readers wait 2 s, and owners that come later change labels
_FORGET_S = 60.0


class Due(NamedTuple):
    """The nodes that are due now, and the time when the next will be; None: none waits."""

    nodes: list[str]
    next_s: float | None


class RateLimiter:
    """When a node's next record is due: at once, but not many in a row, and not before new pods' owners are known.

    State: when each node was last published, and since when each pod is held. Times are given, in seconds that never
    step back.
    """

    def __init__(self) -> None:
        self._published_s: dict[str, float] = {}
        self._held_s: dict[str, float] = {}

    def due(self, changed: Iterable[str], awaits: Callable[[str], Iterable[str]], now_s: float) -> Due:
        """Which of the changed nodes are due. ``awaits`` gives the pods of a node whose chains are not known yet."""
        for times_s, before_s in ((self._published_s, now_s - SPACING_S), (self._held_s, now_s - _FORGET_S)):
            while times_s and (oldest := next(iter(times_s.items())))[1] <= before_s:  # the oldest times are first
                del times_s[oldest[0]]
        nodes, next_s = [], None
        for node in changed:
            at_s = self._published_s.get(node, now_s - SPACING_S) + SPACING_S
            held_s = [self._held_s.setdefault(pod, now_s) for pod in awaits(node)]
            if held_s:
                at_s = max(at_s, min(held_s) + HOLD_S)
            if at_s <= now_s:
                nodes.append(node)
            else:
                next_s = at_s if next_s is None else min(next_s, at_s)
        return Due(nodes, next_s)

    def held(self, pods: Iterable[str], now_s: float) -> set[str]:
        """Which of these pods, whose chains are not known yet, have not waited long enough."""
        return {pod for pod in pods if now_s < self._held_s.setdefault(pod, now_s) + HOLD_S}

    def published(self, node: str, now_s: float) -> None:
        self._published_s.pop(node, None)
        self._published_s[node] = now_s


def listeners(
    state: Store,
    instruments: Instruments,
    wake: Callable[[], None],
    now_ms: Callable[[], int],
    policies: PolicyEvents | None = None,
) -> dict[str, Listener[Any]]:
    """A listener for each resource, which brings the state up to date with what its watch hears."""
    cut = instruments.counter(own.CUT)

    def put_pod(pod: objects.Pod) -> None:
        cut.inc(state.put_pod(pod, now_ms()))
        if policies is not None and state.pods.get(pod.metadata.uid) is not None:
            policies.put_pod(pod.metadata.uid, pod.metadata.namespace, pod.metadata.annotations)

    def put_namespace(one: objects.Object) -> None:
        state.put_namespace(one.metadata.name, one.metadata.labels, one.metadata.annotations)
        if policies is not None:
            policies.put_namespace(one.metadata.name, one.metadata.annotations)

    rows: tuple[tuple[str, type[Any], str, Collection[str], Callable[[Any], object], Callable[[str], object]], ...] = (
        ("pods", objects.Pod, "uid", state.pods.keys(),
         put_pod, lambda uid: state.remove_pod(uid, now_ms())),
        ("nodes", objects.Node, "name", state.nodes,
         lambda node: state.put_node(node.metadata.name, node.metadata.labels, node.maintenance),
         lambda name: state.remove_node(name, now_ms())),
        ("namespaces", objects.Object, "name", state.namespaces,
         put_namespace, state.remove_namespace),
        ("resourceslices", objects.ResourceSlice, "uid", state.slices.keys(), state.put_slice, state.remove_slice),
        ("devicetaintrules", objects.DeviceTaintRule, "uid", state.taint_rules, state.put_taint_rule,
         state.remove_taint_rule),
        ("resourceclaims", objects.ResourceClaim, "uid", state.claims.keys(),
         lambda claim: state.put_claim(claim, now_ms()), lambda uid: state.claims.remove(uid, now_ms())),
    )  # fmt: skip
    return {
        name: Listener(name, kind, instruments, wake, known=known, apply=apply, drop=drop, key=key)
        for name, kind, key, known, apply, drop in rows
    }


class ClusterProducer:
    """The component ``produce cluster``. ``sender`` and ``read_back`` are for tests."""

    name = "cluster"

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        sender: Sender | None = None,
        read_back: Callable[[Connection, int, PublishedNodes], Coroutine[Any, Any, None]] = read_back,
    ) -> None:
        self._settings = settings
        self._instruments = Instruments((*INSTRUMENTS, *own.INSTRUMENTS))
        self.registry = self._instruments.registry
        self._sender = sender or sender_of(self.name, settings.connection(), f"gpustream-{self.name}")
        self._read_back = read_back
        self._reading_since_s: float | None = None
        self._synced_s = float("inf")
        self._publisher: WorkloadsPublisher | None = None
        self._elector: LeaderElector | None = None
        self._api = Client(settings.kubeconfig, partial(self._instruments.counter, own.API_REQUESTS))
        self._owners = Owners(self._api, self._instruments, self._learn)
        selection = Selection(
            settings.resource_prefixes,
            pod_labels=AllowList(settings.pod_labels, LABEL_BOUNDS),
            pod_annotations=AllowList((*POD_ANNOTATIONS, *settings.pod_annotations), ANNOTATION_BOUNDS),
            namespace_labels=AllowList(settings.namespace_labels, LABEL_BOUNDS),
            node_labels=AllowList((*NODE_LABELS, *settings.node_labels), NODE_LABEL_BOUNDS),
        )
        self._state = Store(selection, self._owners.follow, self._owners.forget)
        self._wake, self._stop = asyncio.Event(), asyncio.Event()
        self._policies: PolicyEvents | None = None
        if settings.policy_events:
            self._policies = PolicyEvents(self._api, self._state.pods, settings.policy_longest, self._instruments)
        hearing = listeners(self._state, self._instruments, self._wake.set, _now_ms, self._policies)
        self._watches = {
            name: Reflector(
                self._api,
                path,
                hearing[name],
                self._instruments,
                name=name,
                optional=name in OPTIONAL,
                older=OLDER_PATHS.get(name, ()),
            )
            for name, path in PATHS.items()
        }

    def not_ready(self) -> list[str]:
        """Why it is not ready; empty if it is. A standby is."""
        reasons = [reason for watch in self._watches.values() for reason in watch.not_ready()]
        if self._elector is not None:
            reasons += self._elector.not_ready()
        waited_s = self._publisher.waited_s() if self._publisher else 0.0
        if self._reading_since_s is not None:
            waited_s = time.monotonic() - self._reading_since_s
        return reasons + not_sent(self._sender, what="what is known", waited_s=waited_s)

    async def run(self, stop: asyncio.Event) -> None:
        """Watch, and publish what is known while this replica leads, until ``stop``; then send what is left, for at
        most 3 s. Raises what only a new process, or another configuration, can mend."""
        self._stop = stop
        try:
            await self._api.start()
            parts = [*(watch.run() for watch in self._watches.values()), self._owners.run(), self._sender.start()]
            if self._policies is not None:
                parts.append(self._policies.follow())
            async with running(*parts):
                await until_stopped(stop, self._synced())
                if stop.is_set():
                    return
                if self._settings.lease is None:
                    self._instruments.gauge(own.LEADING).set(1)
                    await until_stopped(stop, self._work(_now_ms()))
                    return
                namespace, _, name = self._settings.lease.partition("/")
                who = self._settings.identity
                self._elector = LeaderElector(
                    self._api, self._instruments, namespace=namespace, name=name, identity=who
                )
                await self._elector.run(self._work, stop)
        finally:
            await self._sender.stop(0.5)
            await self._api.close()

    async def _synced(self) -> None:
        """Wait for Kafka, for pods and nodes, and, not for long, for what a record can be without."""
        while self._sender.not_ready() or not all(self._watches[name].synced for name in REQUIRED):
            await self._sleep(0.1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXTRAS_WITHIN_S):
                while self._owners.unknown or not all(watch.synced for watch in self._watches.values()):
                    await self._sleep(0.1)
        self._synced_s = time.monotonic()

    async def _work(self, epoch: int) -> None:
        """Publish all nodes, then what changes, until it is cancelled. Before that, learn what the last leader
        published and this process has not seen, unless it has watched for long enough."""
        if time.monotonic() - self._synced_s < pods.KEPT_MS / 1000:
            self._reading_since_s = time.monotonic()
            try:
                published = PublishedNodes(self._settings.cluster)
                await self._read_back(self._settings.connection(), _now_ms() - pods.KEPT_MS, published)
                self._state.take_over(published.nodes, _now_ms())
            finally:
                self._reading_since_s = None
        log.info("publishing %d GPU pods on %d nodes", len(self._state.pods), len(self._state.nodes))
        publisher = WorkloadsPublisher(self._sender, self._instruments, cluster=self._settings.cluster, epoch=epoch)
        parts = [publisher.run()] if self._policies is None else [publisher.run(), self._policies.run()]
        async with running(*parts):
            self._publisher = publisher
            try:
                await self._publish(publisher)
            finally:
                self._publisher = None
                if self._stop.is_set() and (left := await publisher.drain(DRAIN_S)):
                    log.warning("left unsent at the stop: %d records of workloads", left)

    async def _publish(self, publisher: WorkloadsPublisher) -> None:
        self._state.mark_all()
        limiter = RateLimiter()
        while True:
            self._state.expire(_now_ms())
            now_s = time.monotonic()
            due = limiter.due(self._state.changed(), self._state.awaits, now_s)
            for node in due.nodes[:AT_ONCE]:
                content = self._state.take(node, limiter.held(self._state.awaits(node), now_s))
                if content is not None:
                    self._instruments.counter(own.SHED).inc(content.shed)
                    publisher.publish(_now_ms(), node, content)
                    if content.removed:
                        publisher.forget(node)
                limiter.published(node, now_s)
            if len(due.nodes) > AT_ONCE:
                await asyncio.sleep(0)
            else:
                await self._sleep(CHECK_S if due.next_s is None else min(CHECK_S, due.next_s - now_s))

    def _learn(self, owner_uid: str, chain: Chain) -> None:
        self._state.learn(owner_uid, chain)
        self._wake.set()

    async def _sleep(self, longest_s: float) -> None:
        await set_within(self._wake, longest_s)
        self._wake.clear()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
