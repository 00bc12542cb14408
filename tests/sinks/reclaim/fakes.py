"""A cluster and a log in memory, and replicas of the sink between them."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from delivery.dead_letters import DeadLetters
from delivery.instruments import Instruments
from delivery.kubernetes.client import Answer, Client, Unreachable
from sinks.outcomes import Outcomes
from sinks.reclaim.cluster import Cluster
from sinks.reclaim.config import ReclaimSettings
from sinks.reclaim.reclaimer import COMPONENT, INSTRUMENTS, Reclaimer
from sinks.reclaim.sink import ReclaimPartition
from tests.sinks.alerts import START_MS, alert, alert_record
from tests.sinks.records import ConsumedRecord
from topics.actions import Action
from topics.alerts import Alert, AlertGpu
from topics.times import time_of

Json = dict[str, Any]
Fault = Callable[[str, str], Answer | None]
"""Called with a request's method and path: the answer to give instead, or None to handle the request."""

HOUR_MS = 3_600_000
CREATED_AT = "2026-11-20T10:00:00Z"


class Killed(Exception):
    """The process ended here."""


def status(code: int, message: str = "no", retry_after_s: float | None = None) -> Answer:
    """A failure as the API server writes it."""
    return Answer(code, json.dumps({"kind": "Status", "code": code, "message": message}).encode(), retry_after_s)


class Api:
    """The objects of a cluster by their paths, and what was changed. ``faults`` are for the coming requests."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.changes: list[tuple[str, Json]] = []
        self.events: dict[str, Json] = {}
        self.faults: list[Fault] = []
        self._version = 0

    def put(self, path: str, kind: str, version: str, *, owner: Json | None = None, **content: Any) -> Json:
        """Create or change an object."""
        self._version += 1
        name = path.rpartition("/")[2]
        before = self.objects.get(path, {}).get("metadata", {})
        metadata: Json = {
            "name": name,
            "uid": f"uid-{name}",
            "generation": 1,
            "creationTimestamp": CREATED_AT,
            **before,
            "resourceVersion": str(self._version),
            **content.pop("metadata", {}),
        }
        if owner is not None:
            ref = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **_named(owner), "controller": True}
            metadata["ownerReferences"] = [ref]
        self.objects[path] = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": {}, **content}
        return self.objects[path]

    async def request(self, method: str, path: str, *, body: bytes | None = None, **_: Any) -> Answer:
        """The client's ``request``."""
        await asyncio.sleep(0)
        fault = self.faults.pop(0)(method, path) if self.faults else None
        return fault if fault is not None else self._answer(method, path, json.loads(body or b"{}"))

    def _answer(self, method: str, path: str, content: Json) -> Answer:
        url = urlsplit(path)
        if method == "POST":
            name = f"{url.path}/{content['metadata']['name']}"
            exists = name in self.events
            self.events.setdefault(name, content)
            return status(409) if exists else Answer(201, json.dumps(content).encode(), None)
        if url.query:
            selector = unquote(parse_qs(url.query)["labelSelector"][0])
            items = [
                item
                for object_path, item in self.objects.items()
                if object_path.startswith(url.path + "/") and _label(item) in selector
            ]
            return Answer(200, json.dumps({"items": items}).encode(), None)
        existing = self.objects.get(url.path) or self.events.get(url.path)
        if existing is None:
            return status(404)
        return (
            self.patch(url.path, existing, content)
            if method == "PATCH"
            else Answer(200, json.dumps(existing).encode(), None)
        )

    def patch(self, path: str, existing: Json, content: Json) -> Answer:
        """A merge patch with preconditions."""
        meta, new_meta = existing["metadata"], content.get("metadata", {})
        if any(new_meta.get(name, meta[name]) != meta[name] for name in ("uid", "resourceVersion")):
            return status(409)
        self.changes.append((path, content["spec"]))
        merged = {**(meta.get("annotations") or {}), **new_meta["annotations"]}
        annotations = {name: value for name, value in merged.items() if value is not None}
        meta = {"annotations": annotations, "generation": meta["generation"] + 1}
        more = {
            name: value for name, value in existing.items() if name not in ("apiVersion", "kind", "metadata", "spec")
        }
        spec = {**existing["spec"], **content["spec"]}
        owners = {"ownerReferences": existing["metadata"].get("ownerReferences")}
        changed = self.put(
            path, existing["kind"], existing["apiVersion"], metadata={**owners, **meta}, spec=spec, **more
        )
        return Answer(200, json.dumps(changed).encode(), None)


def _named(owner: Json) -> Json:
    return {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}


def _label(workload: Json) -> str:
    return str(workload["metadata"].get("labels", {}).get("kueue.x-k8s.io/job-uid", "none"))


class World:
    """A namespace ``ml`` that opts in to ``says``; a log of actions; a time of day that a test sets."""

    def __init__(self, says: str | None = "scale, suspend, deactivate, event") -> None:
        self.api = Api()
        self.log: list[Action] = []
        self.now_ms = START_MS
        self.alerts: list[ConsumedRecord] = []
        self.replicas: list[Replica] = []
        self.opt_in(says)

    def opt_in(self, says: str | None) -> None:
        """Set the namespace's annotation from now on."""
        annotations = {} if says is None else {"annotations": {"gpustream.dev/reclaim": says}}
        self.api.put("/api/v1/namespaces/ml", "Namespace", "v1", metadata={"annotations": None, **annotations})
        for replica in self.replicas:
            replica.reclaimer.cluster._namespaces.clear()

    def deployment(self, name: str = "web", pods: int = 2, replicas: int = 2, **meta: Any) -> Alert:
        """A Deployment whose pods idle; its alert."""
        base = "/apis/apps/v1/namespaces/ml"
        status = {"conditions": [{"type": "Available", "status": "True"}]}
        content: Json = {"spec": {"replicas": replicas}, "status": status, "metadata": meta}
        top = self.api.put(f"{base}/deployments/{name}", "Deployment", "apps/v1", **content)
        middle = self.api.put(f"{base}/replicasets/{name}-1", "ReplicaSet", "apps/v1", owner=top)
        return self.pods(name, middle, pods)

    def job(self, name: str = "train", *, above: Json | None = None, **meta: Any) -> Alert:
        """A Job whose pod idles."""
        path = f"/apis/batch/v1/namespaces/ml/jobs/{name}"
        return self.pods(name, self.api.put(path, "Job", "batch/v1", owner=above, metadata=meta), 1)

    def kueue(self, uid: str, name: str = "job-train", **spec: Any) -> Json:
        """The Workload by which Kueue queues an object."""
        version = "kueue.x-k8s.io/v1beta1"
        self.api.objects["/apis/kueue.x-k8s.io"] = {"preferredVersion": {"groupVersion": version}}
        labels = {"labels": {"kueue.x-k8s.io/job-uid": uid}}
        path = f"/apis/{version}/namespaces/ml/workloads/{name}"
        return self.api.put(path, "Workload", version, spec=spec, metadata=labels)

    def pods(self, name: str, owner: Json | None, count: int, **meta: Any) -> Alert:
        """Pods of an owner that idle; their alert."""
        names = [f"{name}-{number}" for number in range(count)]
        for pod in names:
            self.api.put(f"/api/v1/namespaces/ml/pods/{pod}", "Pod", "v1", owner=owner, metadata=meta)
        gpus = tuple(AlertGpu(uuid=f"GPU-{pod}", node="n1", pod=f"ml/{pod}") for pod in names)
        labels = {"k8s_namespace_name": "ml", "k8s_workload_kind": "Deployment", "k8s_workload_name": name}
        return alert(name, gpus=gpus, idle=count, held=count, labels=labels)

    def write(self, *alerts: Alert | bytes) -> None:
        """Records of gpu.alerts, logged now."""
        for value in alerts:
            self.alerts.append(
                alert_record(value, len(self.alerts), at_ms=self.now_ms, key=b"x" if isinstance(value, bytes) else None)
            )

    def states(self, action: str | None = None) -> list[str]:
        """The states of the written actions with their reasons, in order."""
        return [
            written.state if written.reason is None else f"{written.state} {written.reason}"
            for written in self.log
            if action in (None, written.action)
        ]

    async def send(self, action: Action) -> None:
        """Write an action, and let every replica read it."""
        self.log.append(msgspec.json.decode(msgspec.json.encode(action), type=Action))
        for replica in self.replicas:
            replica.hear(self.log[-1], self.now_ms)
        await asyncio.sleep(0)

    def replica(self, **settings: Any) -> "Replica":
        """A process of the sink that has just started and read the log."""
        replica = Replica(self, settings)
        self.replicas.append(replica)
        return replica


class Replica:
    """A process of the sink. With ``kill_at`` it ends when it would write that state, ``after`` it or before."""

    def __init__(self, world: World, settings: dict[str, Any]) -> None:
        options = {"kafka": "127.0.0.1:1", "cluster": "c1", "act": True, "least_s": 0.0, **settings}
        self.world, instruments = world, Instruments(INSTRUMENTS)
        self.instruments = instruments
        self.kill_at: str | None = None
        self.abandon = asyncio.Event()
        self.reclaimer = Reclaimer(
            ReclaimSettings(**options),
            Cluster(cast("Client", world.api)),
            self._send,
            instruments,
            lambda: world.now_ms,
            lambda: world.now_ms / 1000,
        )
        self.partition = ReclaimPartition(
            self.reclaimer,
            cast("DeadLetters", Letters()),
            Outcomes(COMPONENT, instruments),
            lambda: True,
            lambda: world.now_ms / 1000,
        )
        for action in world.log:
            self.hear(action, world.now_ms)
        for record in world.alerts:
            self.partition.recall(record)
        self._read = len(world.alerts)

    def hear(self, action: Action, at_ms: int) -> None:
        """A record of gpu.actions."""
        self.reclaimer.handle(
            "gpu.actions", [ConsumedRecord(0, msgspec.json.encode(action), at_ms, b"c1", "gpu.actions")]
        )

    async def run(self, *, later_ms: int = 0) -> None:
        """Let time pass, read the new alerts, and do what is due."""
        self.world.now_ms += later_ms
        new, self._read = self.world.alerts[self._read :], len(self.world.alerts)
        if new:
            self.partition._outcomes.read(len(new))
            async for _ in self.partition.deliver(new, self.abandon):
                pass
        await self.partition.quiet(self.abandon)

    async def _send(self, action: Action) -> None:
        if self.kill_at == f"before {action.state}":
            raise Killed
        await self.world.send(action)
        if self.kill_at == f"after {action.state}":
            raise Killed


class Letters:
    """Dead letters that go nowhere."""

    async def write(self, record: Any, error: str, abandon: asyncio.Event) -> None:
        """Drop it."""


def away(method: str, path: str) -> Answer | None:
    """A fault: the API server does not answer."""
    raise Unreachable("connection", "refused")


def over(firing: Alert, at_ms: int) -> Alert:
    """The alert, resolved."""
    return msgspec.structs.replace(firing, state="resolved", ends_at=time_of(at_ms))
