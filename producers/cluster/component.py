"""The cluster producer: publishes the GPU pods of each node as the API server has them, from one leading replica.

In: watches of pods, nodes, namespaces, resource slices, claims and device taint rules; owners, each asked for once.
Out: gpu.workloads.
State: the objects that concern GPUs. Every replica keeps them, so that a standby can lead at once.
On failure: without an API server or Kafka it is not ready, says what is missing, and works as soon as it is there.
Nothing is published before all pods and nodes are known, because to a reader a pod that is missing in a record has
ended.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from functools import partial
from typing import Any

from delivery.clock import now_ms
from delivery.connection import Connection
from delivery.instruments import Instruments
from delivery.kubernetes.client import Client
from delivery.sender import Sender, not_sent
from delivery.tasks import running, set_within, until_stopped
from producers.cluster import instruments as names
from producers.cluster import objects, pods
from producers.cluster.config import NODE_LABELS, POD_ANNOTATIONS, ClusterSettings
from producers.cluster.lease import LeaderElector
from producers.cluster.objects import ANNOTATION_BOUNDS, LABEL_BOUNDS, NODE_LABEL_BOUNDS, AllowList, Selection
from producers.cluster.owners import Chain, Owners
from producers.cluster.pods import PodOwner
from producers.cluster.policy_events import PolicyEvents
from producers.cluster.reflector import Listener, Reflector
from producers.cluster.store import Store
from producers.cluster.takeover import PublishedNodes, read_back
from producers.publisher import INSTRUMENTS as SHARED_INSTRUMENTS
from producers.publisher import sender_of
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
OLDER_PATHS = {  # of resources that an older API server serves only under another version
    "resourceslices": ("/apis/resource.k8s.io/v1beta2/resourceslices", "/apis/resource.k8s.io/v1beta1/resourceslices"),
    "resourceclaims": ("/apis/resource.k8s.io/v1beta2/resourceclaims", "/apis/resource.k8s.io/v1beta1/resourceclaims"),
    "devicetaintrules": ("/apis/resource.k8s.io/v1beta2/devicetaintrules",),
}

REQUIRED = ("pods", "nodes")  # nothing is published without these
OPTIONAL = ("resourceslices", "resourceclaims", "devicetaintrules")  # an API server need not have these
EXTRAS_WITHIN_S = 10.0  # how long the first record waits for namespaces, slices, claims and owners
CHECK_S = 1.0
BATCH_NODES = 64  # how many records are built before other tasks get their turn
DRAIN_S = 3.0
SPACING_S = 0.2  # the shortest time between two records of a node: a pod that starts changes often
DEFER_S = 1.0  # how long a new pod waits for its owners: readers wait 2 s, and later owners change labels
_FORGET_S = 60.0
_MOST_NAMED = 5  # of the nodes in a line of the log


class RateLimiter:
    """Decides when a node's record is due: at once, but at most one each 0.2 s, and after new pods' owners are known.

    State: when each node was last published, and since when each pod is deferred. The caller gives the times, in
    seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._published_s: dict[str, float] = {}
        self._deferred_since_s: dict[str, float] = {}

    def due(
        self, changed: Iterable[str], awaiting: Callable[[str], Iterable[str]], now_s: float
    ) -> tuple[list[str], float | None]:
        """The changed nodes that are due now, and when the next one will be; None: no other node changed. ``awaiting``
        gives the pods of a node whose owners are not known yet."""
        kept_since = ((self._published_s, now_s - SPACING_S), (self._deferred_since_s, now_s - _FORGET_S))
        for times_s, limit_s in kept_since:
            while times_s and (oldest := next(iter(times_s.items())))[1] <= limit_s:  # the oldest times are first
                del times_s[oldest[0]]
        nodes, next_s = [], None
        for node in changed:
            due_s = self._published_s.get(node, now_s - SPACING_S) + SPACING_S
            since_s = [self._deferred_since_s.setdefault(pod, now_s) for pod in awaiting(node)]
            if since_s:
                due_s = max(due_s, min(since_s) + DEFER_S)
            if due_s <= now_s:
                nodes.append(node)
            else:
                next_s = due_s if next_s is None else min(next_s, due_s)
        return nodes, next_s

    def deferred(self, pods: Iterable[str], now_s: float) -> set[str]:
        """Which of these pods, whose owners are not known yet, still have to wait."""
        return {pod for pod in pods if now_s < self._deferred_since_s.setdefault(pod, now_s) + DEFER_S}

    def published(self, node: str, now_s: float) -> None:
        self._published_s.pop(node, None)
        self._published_s[node] = now_s


def listeners(
    store: Store,
    instruments: Instruments,
    wake: Callable[[], None],
    now_ms: Callable[[], int],
    policies: PolicyEvents | None = None,
) -> dict[str, Listener[Any]]:
    """A listener for each resource, which applies the events of its watch to the store."""
    cut = instruments.counter(names.CUT)

    def put_pod(pod: objects.Pod) -> None:
        cut.inc(store.put_pod(pod, now_ms()))
        if policies is not None and store.pods.get(pod.metadata.uid) is not None:
            policies.put_pod(pod.metadata.uid, pod.metadata.namespace, pod.metadata.annotations)

    def put_namespace(namespace: objects.Object) -> None:
        store.put_namespace(namespace.metadata.name, namespace.metadata.labels, namespace.metadata.annotations)
        if policies is not None:
            policies.put_namespace(namespace.metadata.name, namespace.metadata.annotations)

    def remove_namespace(name: str) -> None:
        store.remove_namespace(name)
        if policies is not None:
            policies.put_namespace(name, None)

    rows: tuple[tuple[str, type[Any], str, Collection[str], Callable[[Any], object], Callable[[str], object]], ...] = (
        ("pods", objects.Pod, "uid", store.pods.keys(),
         put_pod, lambda uid: store.remove_pod(uid, now_ms())),
        ("nodes", objects.Node, "name", store.nodes,
         lambda node: store.put_node(node.metadata.name, node.metadata.labels, node.maintenance),
         lambda name: store.remove_node(name, now_ms())),
        ("namespaces", objects.Object, "name", store.namespaces,
         put_namespace, remove_namespace),
        ("resourceslices", objects.ResourceSlice, "uid", store.slices.keys(), store.put_slice, store.remove_slice),
        ("devicetaintrules", objects.DeviceTaintRule, "uid", store.taint_rules, store.put_taint_rule,
         store.remove_taint_rule),
        ("resourceclaims", objects.ResourceClaim, "uid", store.claims.keys(),
         lambda claim: store.put_claim(claim, now_ms()), lambda uid: store.claims.remove(uid, now_ms())),
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
        self._instruments = Instruments((*SHARED_INSTRUMENTS, *names.INSTRUMENTS))
        self.registry = self._instruments.registry
        self._sender = sender or sender_of(self.name, settings.connection(), f"gpustream-{self.name}")
        self._read_back = read_back
        self._read_back_since_s: float | None = None
        self._synced_s = float("inf")
        self._publisher: WorkloadsPublisher | None = None
        self._elector: LeaderElector | None = None
        self._api = Client(settings.kubeconfig, partial(self._instruments.counter, names.API_REQUESTS))
        self._owners = Owners(self._api, self._instruments, self._set_chain)
        selection = Selection(
            settings.resource_prefixes,
            pod_labels=AllowList(settings.pod_labels, LABEL_BOUNDS),
            pod_annotations=AllowList((*POD_ANNOTATIONS, *settings.pod_annotations), ANNOTATION_BOUNDS),
            namespace_labels=AllowList(settings.namespace_labels, LABEL_BOUNDS),
            node_labels=AllowList((*NODE_LABELS, *settings.node_labels), NODE_LABEL_BOUNDS),
        )
        self._store = Store(selection, self._owners.follow, self._owners.forget)
        self._wake, self._stop = asyncio.Event(), asyncio.Event()
        self._policies: PolicyEvents | None = None
        if settings.policy_events:
            self._policies = PolicyEvents(self._api, self._store.pods, settings.policy_longest, self._instruments)
        listener_by_name = listeners(self._store, self._instruments, self._wake.set, now_ms, self._policies)
        self._reflectors = {
            name: Reflector(
                self._api,
                path,
                listener_by_name[name],
                self._instruments,
                name=name,
                optional=name in OPTIONAL,
                older=OLDER_PATHS.get(name, ()),
            )
            for name, path in PATHS.items()
        }

    def not_ready(self) -> list[str]:
        """Why it is not ready; empty if it is. A standby is."""
        reasons = [reason for reflector in self._reflectors.values() for reason in reflector.not_ready()]
        if self._elector is not None:
            reasons += self._elector.not_ready()
        waited_s = self._publisher.waited_s() if self._publisher else 0.0
        if self._read_back_since_s is not None:
            waited_s = time.monotonic() - self._read_back_since_s
        return reasons + not_sent(self._sender, what="what is known", waited_s=waited_s)

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until ``stop``, and publish while this replica leads. Then send what is left, for at most 3 s. Raises
        errors that only a new process or another configuration can mend."""
        self._stop = stop
        try:
            await self._api.start()
            watches = [reflector.run() for reflector in self._reflectors.values()]
            policies = [] if self._policies is None else [self._policies.follow()]
            async with running(*watches, *policies, self._owners.run(), self._expire(), self._sender.start()):
                await until_stopped(stop, self._wait_synced())
                if stop.is_set():
                    return
                if self._settings.lease is None:
                    self._instruments.gauge(names.LEADING).set(1)
                    await until_stopped(stop, self._lead(now_ms()))
                    return
                namespace, _, name = self._settings.lease.partition("/")
                identity = self._settings.identity
                self._elector = LeaderElector(
                    self._api, self._instruments, namespace=namespace, name=name, identity=identity
                )
                await self._elector.run(self._lead, stop)
        finally:
            await self._sender.stop(0.5)
            await self._api.close()

    async def _wait_synced(self) -> None:
        """Wait for Kafka, pods and nodes; and for at most 10 s for namespaces, slices, claims and owners."""
        while self._sender.not_ready() or not all(self._reflectors[name].synced for name in REQUIRED):
            await self._sleep(0.1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXTRAS_WITHIN_S):
                while self._owners.unknown or not all(reflector.synced for reflector in self._reflectors.values()):
                    await self._sleep(0.1)
        self._synced_s = time.monotonic()

    async def _lead(self, epoch: int) -> None:
        """Publish all nodes, then those that change, until it is cancelled. First read back what the last leader
        published, unless this process has watched for as long as pods that ended are kept."""
        if time.monotonic() - self._synced_s < pods.KEPT_MS / 1000:
            self._read_back_since_s = time.monotonic()
            try:
                published = PublishedNodes(self._settings.cluster)
                await self._read_back(self._settings.connection(), now_ms() - pods.KEPT_MS, published)
                if removed := self._store.take_over(published.nodes, now_ms()):
                    log.warning(
                        "%s: the API server does not have %d nodes that were published last (%s); they count as removed"
                        " and their pods as ended: if they still send, another cluster has this --cluster",
                        self._settings.cluster,
                        len(removed),
                        ", ".join(removed[:_MOST_NAMED]),
                    )
                epoch = published.epoch_after(epoch)
            finally:
                self._read_back_since_s = None
        log.info("publishing %d GPU pods on %d nodes", len(self._store.pods), len(self._store.nodes))
        publisher = WorkloadsPublisher(self._sender, self._instruments, cluster=self._settings.cluster, epoch=epoch)
        tasks = [publisher.run()] if self._policies is None else [publisher.run(), self._policies.run()]
        async with running(*tasks):
            self._publisher = publisher
            try:
                await self._publish(publisher)
            finally:
                self._publisher = None
                if self._stop.is_set() and (unsent := await publisher.drain(DRAIN_S)):
                    log.warning("left unsent at the stop: %d records of workloads", unsent)

    async def _publish(self, publisher: WorkloadsPublisher) -> None:
        self._store.mark_all_changed()
        limiter = RateLimiter()
        while True:
            now_s = time.monotonic()
            due, next_s = limiter.due(self._store.changed_nodes(), self._store.pods_awaiting_owners, now_s)
            for node in due[:BATCH_NODES]:
                deferred = limiter.deferred(self._store.pods_awaiting_owners(node), now_s)
                content = self._store.pop_content(node, deferred)
                if content is not None:
                    self._instruments.counter(names.SHED).inc(content.shed)
                    publisher.publish(now_ms(), node, content)
                    if content.removed:
                        publisher.forget(node)
                limiter.published(node, now_s)
            if len(due) > BATCH_NODES:
                await asyncio.sleep(0)
            else:
                await self._sleep(CHECK_S if next_s is None else min(CHECK_S, next_s - now_s))

    async def _expire(self) -> None:
        """Forget what ended long ago, also while another replica leads, until it is cancelled."""
        while True:
            self._store.expire(now_ms())
            await asyncio.sleep(CHECK_S)

    def _set_chain(self, owner: PodOwner, chain: Chain) -> None:
        self._store.set_chain(owner, chain)
        self._wake.set()

    async def _sleep(self, longest_s: float) -> None:
        await set_within(self._wake, longest_s)
        self._wake.clear()
