"""The cluster as a producer: what its API server says of GPU pods is told of node by node, by one of all replicas.

In: watches of pods, nodes, namespaces, resource slices and claims; owners, asked for once each. Out: gpu.workloads.
State: the cluster as far as it concerns GPUs, kept by every replica; a standby knows all that the leader knows.
On failure: without an API server or a Kafka it runs, says so, and works when they come. Nothing is told before all of
the pods and nodes are known, for readers take a pod that is not told of for ended.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from delivery.instruments import Instruments
from delivery.sender import Sender
from delivery.topic_admin import TopicCheck
from producers import instruments as shared
from producers.cluster import instruments as own
from producers.cluster import listeners, pods, selection
from producers.cluster.client import Client
from producers.cluster.config import NODE_LABELS, POD_ANNOTATIONS, ClusterSettings
from producers.cluster.lease import Lease
from producers.cluster.owners import Chain, Owners
from producers.cluster.pods import Reading
from producers.cluster.rate_limiter import RateLimiter
from producers.cluster.reflector import Reflector
from producers.cluster.selection import ANNOTATION_BOUNDS, LABEL_BOUNDS, NODE_LABEL_BOUNDS, AllowList
from producers.cluster.store import Selection, Store
from producers.cluster.takeover import ToldNodes, read_back
from producers.sending import ConnectedSender, not_sent
from producers.stopping import first_failure, first_of
from producers.workloads import WorkloadsPublisher
from topics import allocations, samples, workloads

log = logging.getLogger(__name__)

RESOURCE_SLICES = "/apis/resource.k8s.io/v1/resourceslices"
RESOURCE_CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"
"""What an API server without dynamic resource allocation does not have."""

EXTRAS_WITHIN_S = 10.0
"""So long the first record waits for what it can be without: namespaces, resource slices and claims, owner chains."""

CHECK_S = 1.0
AT_ONCE = 64
"""How many records are made before anything else has its turn."""

DRAIN_S = 3.0

ReadBack = Callable[[str, int, ToldNodes], Coroutine[Any, Any, None]]
"""Takes what was told since a time; see :func:`producers.cluster.takeover.read_back`."""


def _selection(settings: ClusterSettings) -> Selection:
    """What is kept of the cluster."""
    return Selection(
        concerns=selection.gpu_pods(settings.resource_prefixes),
        drivers=selection.gpu_drivers(settings.resource_prefixes),
        pods=Reading(
            AllowList(settings.pod_labels, LABEL_BOUNDS),
            AllowList((*POD_ANNOTATIONS, *settings.pod_annotations), ANNOTATION_BOUNDS),
        ),
        namespace_labels=AllowList(settings.namespace_labels, LABEL_BOUNDS),
        node_labels=AllowList((*NODE_LABELS, *settings.node_labels), NODE_LABEL_BOUNDS),
    )


class ClusterProducer:
    """The component ``produce cluster``. ``sender``, ``api`` and ``read_back`` are for tests."""

    name = "cluster"

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        sender: ConnectedSender | None = None,
        api: Client | None = None,
        read_back: ReadBack = read_back,
    ) -> None:
        self._settings = settings
        self._instruments = Instruments((*shared.INSTRUMENTS, *own.INSTRUMENTS))
        self.registry = self._instruments.registry
        check = TopicCheck(settings.kafka, (workloads.TOPIC.name,), beside=(samples.TOPIC.name, allocations.TOPIC.name))
        self._sender = sender or Sender(settings.kafka, client_id=f"gpustream-{self.name}", check=check)
        self._read_back = read_back
        self._reading_since_s: float | None = None
        self._synced_s = float("inf")
        self._publisher: WorkloadsPublisher | None = None
        self._lease: Lease | None = None
        self._api = api or Client(settings.kubeconfig, self._instruments)
        self._owners = Owners(self._api, self._instruments, self._learn)
        self._state = Store(_selection(settings), self._owners)
        self._wake, self._stop = asyncio.Event(), asyncio.Event()
        self._required, self._extras = self._watches()

    def not_ready(self) -> list[str]:
        """Why it is not ready; empty where it is. A standby is."""
        lease = self._lease
        parts = (*self._required, *self._extras, *([lease] if lease else ()))
        return [*(reason for part in parts for reason in part.not_ready()), *self._not_sent()]

    async def run(self, stop: asyncio.Event) -> None:
        """Watch, and tell of what is known while this replica leads, until ``stop``; then send what is left, for at
        most 3 s. Raises what only a new process, or another configuration, can mend."""
        self._stop = stop
        try:
            await self._api.start()
            async with self._background():
                await first_of(stop, self._synced())
                if not stop.is_set():
                    await self._lead(stop)
        except ExceptionGroup as failures:
            raise first_failure(failures) from failures
        finally:
            await self._sender.stop(0.5)
            await self._api.close()

    def _watches(self) -> tuple[tuple[Reflector, ...], tuple[Reflector, ...]]:
        """The watches without which nothing is told, and the others."""

        def watch(name: str, path: str, listener: listeners.Listener[Any], **how: bool) -> Reflector:
            return Reflector(self._api, path, listener, self._instruments, name=name, **how)

        told = self._state, self._instruments, self._wake.set
        return (
            watch("pods", "/api/v1/pods", listeners.pods(*told, _now_ms)),
            watch("nodes", "/api/v1/nodes", listeners.nodes(*told, _now_ms)),
        ), (
            watch("namespaces", "/api/v1/namespaces", listeners.namespaces(*told)),
            watch("resourceslices", RESOURCE_SLICES, listeners.slices(*told), optional=True),
            watch("resourceclaims", RESOURCE_CLAIMS, listeners.claims(*told, _now_ms), optional=True),
        )

    @contextlib.asynccontextmanager
    async def _background(self) -> AsyncIterator[None]:
        """What runs beside the telling; a failure in it ends all."""
        async with asyncio.TaskGroup() as group:
            parts = [watch.run() for watch in (*self._required, *self._extras)]
            parts += [self._owners.run(), self._connect()]
            running = [group.create_task(part) for part in parts]
            try:
                yield
            finally:
                for task in running:
                    task.cancel()

    async def _connect(self) -> None:
        await self._sender.start()
        self._wake.set()

    async def _synced(self) -> None:
        """Wait for Kafka, for pods and nodes, and, not for long, for what a record can be without."""
        while self._sender.not_ready() or not all(watch.synced for watch in self._required):
            await self._sleep(0.1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXTRAS_WITHIN_S):
                while not self._extras_known():
                    await self._sleep(0.1)
        self._synced_s = time.monotonic()

    def _extras_known(self) -> bool:
        return all(watch.synced for watch in self._extras) and not self._owners.unknown

    async def _lead(self, stop: asyncio.Event) -> None:
        """Tell, whenever this replica leads, until the stop."""
        if self._settings.lease is None:
            self._instruments.gauge(own.LEADING).set(1)
            await first_of(stop, self._work(_now_ms()))
            return
        namespace, _, name = self._settings.lease.partition("/")
        self._lease = Lease(
            self._api, self._instruments, namespace=namespace, name=name, identity=self._settings.identity
        )
        await self._lease.run(self._work, stop)

    async def _work(self, epoch: int) -> None:
        """Tell of all nodes, then of what changes, until it is cancelled."""
        await self._take_over()
        log.info("telling of %d GPU pods on %d nodes", len(self._state.pods), len(self._state.nodes))
        publisher = WorkloadsPublisher(self._sender, self._instruments, cluster=self._settings.cluster, epoch=epoch)
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(publisher.run())
            self._publisher = publisher
            try:
                await self._tell(publisher)
            finally:
                self._publisher = None
                if self._stop.is_set() and (left := await publisher.drain(DRAIN_S)):
                    log.warning("left unsent at the stop: %d records of workloads", left)
                sending.cancel()

    async def _take_over(self) -> None:
        """Learn what the last leader told of that this process has not seen, unless it has watched for long enough."""
        if time.monotonic() - self._synced_s >= pods.KEPT_MS / 1000:
            return
        self._reading_since_s = time.monotonic()
        try:
            told = ToldNodes(self._settings.cluster)
            await self._read_back(self._settings.kafka, _now_ms() - pods.KEPT_MS, told)
            self._state.take_over(told.nodes, _now_ms())
        finally:
            self._reading_since_s = None

    async def _tell(self, publisher: WorkloadsPublisher) -> None:
        self._state.mark_all()
        limiter = RateLimiter()
        while True:
            self._state.expire(_now_ms())
            now_s = time.monotonic()
            due = limiter.due(self._state.changed(), self._state.awaits, now_s)
            for node in due.nodes[:AT_ONCE]:
                self._publish(publisher, node, limiter.held(self._state.awaits(node), now_s))
                limiter.told(node, now_s)
            if len(due.nodes) > AT_ONCE:
                await asyncio.sleep(0)
            else:
                await self._sleep(CHECK_S if due.next_s is None else min(CHECK_S, due.next_s - now_s))

    def _publish(self, publisher: WorkloadsPublisher, node: str, held: set[str]) -> None:
        content = self._state.take(node, held)
        if content is None:
            return
        self._instruments.counter(own.SHED).inc(content.shed)
        about = content.node_labels, content.pods, content.dra_devices, content.admin_claims
        publisher.publish(_now_ms(), node, *about, removed=content.last)
        if content.last:
            publisher.forget(node)

    def _learn(self, owner_uid: str, chain: Chain) -> None:
        self._state.learn(owner_uid, chain)
        self._wake.set()

    async def _sleep(self, longest_s: float) -> None:
        """Wait for news."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._wake.wait()
        self._wake.clear()

    def _not_sent(self) -> list[str]:
        waited_s = self._publisher.waited_s() if self._publisher else 0.0
        if self._reading_since_s is not None:
            waited_s = time.monotonic() - self._reading_since_s
        return not_sent(self._sender, what="what is known", waited_s=waited_s)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
